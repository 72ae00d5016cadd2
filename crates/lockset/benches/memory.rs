#![allow(missing_docs)]
use std::sync::Arc;
use std::time::Instant;
#[tokio::main(flavor = "current_thread")]
async fn main() {
    let locks = lockset::Lockset::connect("memory:").await.unwrap();
    let m = locks.mutex("bench").unwrap();
    let t = Arc::new(tokio::sync::Mutex::new(()));
    for _ in 0..5 {
        let n = 200_000;
        let s = Instant::now();
        for _ in 0..n {
            let g = t.clone().lock_owned().await;
            std::hint::black_box(&g);
            drop(g);
        }
        let a = s.elapsed() / n;
        let s = Instant::now();
        for _ in 0..n {
            let g = m.lock().await.unwrap();
            g.release().await.unwrap();
        }
        let b = s.elapsed() / n;
        println!(
            "tokio {a:?} lockset {b:?} ratio {:.1}",
            b.as_nanos() as f64 / a.as_nanos() as f64
        );
    }
}
