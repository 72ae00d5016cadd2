//! Stock 1, two orders at the same time: with the lock one is shipped, without it both are.
//!
//!     cargo run -p lockset --example oversell

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use lockset::{Lockset, Mutex, Result};

/// A shop that looks into its warehouse, takes a moment, and then takes the article out.
struct Shop {
    stock: AtomicI64,
}

impl Shop {
    async fn order(&self) -> bool {
        if self.stock.load(Ordering::SeqCst) < 1 {
            return false;
        }
        tokio::time::sleep(Duration::from_millis(20)).await; // charge the card, print the label
        self.stock.fetch_sub(1, Ordering::SeqCst);
        true
    }

    async fn order_under(&self, lock: &Mutex) -> Result<bool> {
        let guard = lock.lock().await?;
        let shipped = guard.run(self.order()).await?;
        guard.release().await?;
        Ok(shipped)
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let locks = Lockset::connect("memory:").await?;

    let shop = Shop { stock: AtomicI64::new(1) };
    let (a, b) = tokio::join!(shop.order(), shop.order());
    let left = shop.stock.load(Ordering::SeqCst);
    say(&format!("without the lock: {} shipped, stock {left}", u8::from(a) + u8::from(b)));
    assert_eq!(left, -1, "the race this example is about");

    let shop = Shop { stock: AtomicI64::new(1) };
    let lock = locks.mutex("stock/shoes")?;
    let (a, b) = tokio::join!(shop.order_under(&lock), shop.order_under(&lock));
    let left = shop.stock.load(Ordering::SeqCst);
    say(&format!("with the lock:    {} shipped, stock {left}", u8::from(a?) + u8::from(b?)));
    assert_eq!(left, 0);

    locks.close().await
}

#[allow(clippy::print_stdout, reason = "an example talks to its reader")]
fn say(line: &str) {
    println!("{line}");
}
