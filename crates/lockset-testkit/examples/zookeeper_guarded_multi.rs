//! A write to ZooKeeper that is refused when the lock is no longer held: no token is compared, the
//! server checks the lock's own node in the same transaction.
//!
//! Runs against the ensemble in `LOCKSET_URL` if that is a `zk://` URL, otherwise against a server
//! of its own.
//!
//!     cargo run -p lockset-testkit --example zookeeper_guarded_multi
#![allow(clippy::print_stdout, reason = "an example talks to its reader")]

use lockset::engine::zookeeper::ZooKeeperOwnership;
use lockset::{Break, Lockset};
use lockset_testkit::stage::ZooKeeperServers;
use zookeeper_client::{Acls, Client, CreateMode};

#[tokio::main(flavor = "multi_thread", worker_threads = 1)]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let given = std::env::var("LOCKSET_URL").ok().filter(|url| url.starts_with("zk://"));
    let servers = given.is_none().then(|| ZooKeeperServers::start(1));
    let url = match (&given, &servers) {
        (Some(url), _) => url.clone(),
        (None, servers) => servers.iter().map(|servers| servers.url("/shop")).collect(),
    };
    let hosts = url.trim_start_matches("zk://").split('/').next().unwrap_or_default();

    let locks = Lockset::connect(&url).await?;
    let zookeeper = Client::connect(hosts).await?;
    let stock = format!("/stock-{:016x}", std::process::id());
    let persistent = CreateMode::Persistent.with_acls(Acls::anyone_all());
    zookeeper.create(&stock, b"10", &persistent).await?;

    let guard = locks.mutex("stock")?.lock().await?;
    let ownership = ZooKeeperOwnership::of(&guard.grant())?;
    sell(&zookeeper, &stock, &ownership, b"9").await?;
    println!("sold one under the lock");

    // An operator takes the lock away while we think; the same would be a pause beyond the lease.
    locks.force_release("stock", Break::Now).await?;
    match sell(&zookeeper, &stock, &ownership, b"8").await {
        Ok(()) => return Err("it was sold without the lock".into()),
        Err(error) => println!("refused after the lock was lost: {error}"),
    }
    let (left, _) = zookeeper.get_data(&stock).await?;
    assert_eq!(left, b"9");
    zookeeper.delete(&stock, None).await?;
    locks.close().await?;
    Ok(())
}

/// Writes what is left, if the lock is held at that moment.
async fn sell(
    zookeeper: &Client,
    stock: &str,
    lock: &ZooKeeperOwnership,
    left: &[u8],
) -> Result<(), Box<dyn std::error::Error>> {
    let mut multi = zookeeper.new_multi_writer();
    multi.add_check_version(&lock.path, lock.version)?;
    multi.add_set_data(stock, left, None)?;
    multi.commit().await?;
    Ok(())
}
