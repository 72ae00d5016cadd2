//! Servers that are not what they claim to be: whatever they send, a client does not panic, fails
//! in bounded time with a short error, and needs a bounded amount of memory.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use lockset::{LockOptions, Lockset};
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};

/// By then every attempt has ended, on a busy machine as well.
const LIMIT: Duration = Duration::from_secs(120);
/// How much an impostor sends over one connection.
const FLOOD: usize = 96 << 20;
/// How much more memory the process may need for all clients of a test together.
const MEMORY: u64 = 1 << 30;

static PANICS: AtomicUsize = AtomicUsize::new(0);

/// What an impostor sends.
#[derive(Clone, Copy, Debug)]
enum Manner {
    /// Nothing.
    Silent,
    /// Closes each connection after the first bytes.
    Closes,
    /// A web server.
    Web,
    /// Random bytes after each request.
    Noise(u64),
    /// Well-formed pieces of the engine's own protocol that make no sense.
    Nonsense(u64),
    /// A single value that does not end.
    Flood,
    /// Values inside values inside values.
    Nested,
    /// A length that is not followed by so much.
    FalseLength,
}

fn manners() -> Vec<Manner> {
    use Manner::{Closes, FalseLength, Flood, Nested, Noise, Nonsense, Silent, Web};
    let seeded = (0..6).flat_map(|seed| [Noise(seed), Nonsense(seed)]);
    [Silent, Closes, Web, Flood, Nested, FalseLength].into_iter().chain(seeded).collect()
}

/// Starts an impostor for a scheme. Returns its port.
fn start(scheme: &'static str, manner: Manner) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for (number, stream) in (0_u64..).zip(listener.incoming().map_while(Result::ok)) {
            std::thread::spawn(move || drop(serve(scheme, manner, number, stream)));
        }
    });
    port
}

fn serve(scheme: &str, manner: Manner, number: u64, mut to: TcpStream) -> std::io::Result<()> {
    let mut request = vec![0; 1 << 16];
    loop {
        if to.read(&mut request)? == 0 {
            return Ok(());
        }
        match manner {
            Manner::Silent => {}
            Manner::Closes => return Ok(()),
            Manner::Web => {
                to.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")?;
                return Ok(());
            }
            Manner::Noise(seed) => {
                let mut rng = StdRng::seed_from_u64(seed * 1000 + number);
                let mut bytes = vec![0; rng.random_range(1..300)];
                rng.fill_bytes(&mut bytes);
                to.write_all(&bytes)?;
            }
            Manner::Nonsense(seed) => {
                let mut rng = StdRng::seed_from_u64(seed * 1000 + number);
                for _ in 0..8 {
                    to.write_all(&piece(scheme, &mut rng))?;
                }
            }
            Manner::Flood => {
                to.write_all(match scheme {
                    "zk" => &[0x01, 0xff, 0xff, 0xff],
                    "etcd" => b"\x00\xff\xff\xff\x00\x00\x00\x00\x01",
                    _ => b"$500000000\r\n",
                })?;
                for _ in 0..FLOOD / request.len() {
                    to.write_all(&request)?;
                }
                return Ok(());
            }
            Manner::Nested => to.write_all(&b"*1\r\n".repeat(100_000))?,
            Manner::FalseLength => to.write_all(match scheme {
                "zk" => &[0x7f, 0xff, 0xff, 0xff, 1, 2, 3],
                "etcd" => b"\xff\xff\xff\x04\x00\x00\x00\x00\x00",
                _ => b"*2147483647\r\n:1\r\n",
            })?,
        }
    }
}

/// A piece of the protocol.
fn piece(scheme: &str, rng: &mut StdRng) -> Vec<u8> {
    match scheme {
        "zk" => {
            // A frame that may be a handshake: version, timeout, session, password.
            let mut body = vec![0; rng.random_range(0..60)];
            rng.fill_bytes(&mut body);
            body.iter_mut().take(4).for_each(|byte| *byte = 0);
            [&u32::try_from(body.len()).unwrap().to_be_bytes()[..], &body].concat()
        }
        "etcd" => {
            // An HTTP/2 frame: settings first, as a server must.
            let mut body = vec![0; 6 * rng.random_range(0..4)];
            rng.fill_bytes(&mut body);
            let kind = if rng.random_bool(0.4) { 4 } else { rng.random_range(0..11) };
            let length = u32::try_from(body.len()).unwrap().to_be_bytes();
            let stream = [0, 0, 0, rng.random_range(0..4)];
            [&length[1..], &[kind, rng.random_range(0..6)], &stream, &body].concat()
        }
        _ => {
            let values = [
                "+OK\r\n",
                ":1\r\n",
                ":-9223372036854775808\r\n",
                "$-1\r\n",
                "$3\r\nfoo\r\n",
                "*0\r\n",
                "-ERR no\r\n",
                "-MOVED 1 127.0.0.1:1\r\n",
                "-LOADING x\r\n",
                "%1\r\n+a\r\n:1\r\n",
                "*3\r\n$6\r\nqueued\r\n:1\r\n:-1\r\n",
                ">3\r\n+message\r\n+x\r\n+g\r\n",
                "_\r\n",
                "*2\r\n$7\r\ngranted\r\n$1\r\nx\r\n",
                "*-1\r\n",
                "(999999999999999999999\r\n",
            ];
            values[rng.random_range(0..values.len())].into()
        }
    }
}

/// Connects, locks and closes. An impostor that replies as a server would is one.
async fn attempt(url: String) -> Option<String> {
    let locks = match Lockset::connect(&url).await {
        Ok(locks) => locks,
        Err(error) => return Some(error.to_string()),
    };
    let options = LockOptions::default().ttl(Duration::from_secs(5));
    let mutex = locks.mutex("m").unwrap().with(options);
    let error = mutex.lock_within(Duration::from_secs(1)).await.err();
    let _ = locks.close().await;
    error.map(|error| error.to_string())
}

async fn check(scheme: &'static str, path: &str) {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        PANICS.fetch_add(1, Ordering::SeqCst);
        hook(info);
    }));
    let before = peak_memory();
    let attempts = manners().into_iter().map(|manner| {
        let hosts: Vec<String> = match scheme {
            "redlock" => (0..3).map(|_| start(scheme, manner)).collect::<Vec<_>>(),
            _ => vec![start(scheme, manner)],
        }
        .iter()
        .map(|port| format!("127.0.0.1:{port}"))
        .collect();
        let url = format!("{scheme}://{}{path}", hosts.join(","));
        tokio::spawn(async move { (manner, tokio::time::timeout(LIMIT, attempt(url)).await) })
    });
    for attempt in attempts.collect::<Vec<_>>() {
        let (manner, outcome) = attempt.await.unwrap();
        let error = outcome.unwrap_or_else(|_| panic!("{scheme} {manner:?}: no end"));
        let error = error.unwrap_or_default();
        assert!(error.len() < 2000, "{scheme} {manner:?}: {error}");
        let is_senseless = matches!(manner, Manner::Nonsense(_));
        assert!(is_senseless || !error.is_empty(), "{scheme} {manner:?}: it is no server");
    }
    let grown = peak_memory().saturating_sub(before);
    assert!(grown < MEMORY, "{scheme}: {} MiB more", grown >> 20);
    assert_eq!(PANICS.load(Ordering::SeqCst), 0, "a thread panicked");
}

/// The most memory that this process has had, in bytes.
fn peak_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() << 10
}

#[tokio::test(flavor = "multi_thread")]
async fn an_impostor_of_redis_is_survived() {
    check("redis", "").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_impostor_of_sentinel_is_survived() {
    check("redis+sentinel", "/service").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_impostor_of_a_cluster_is_survived() {
    check("redis+cluster", "").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn impostors_of_a_quorum_are_survived() {
    check("redlock", "").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_impostor_of_etcd_is_survived() {
    check("etcd", "").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_impostor_of_zookeeper_is_survived() {
    check("zk", "").await;
}
