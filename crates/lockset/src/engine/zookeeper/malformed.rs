//! What another program may have stored in a lock's nodes. The checks are run by property tests and
//! by `fuzz/`.

use super::layout::{Layout, sequence_number};
use super::paths::NodePaths;
use super::record::{NodeRecord, ZooKeeperKey};
use crate::engine::ClaimId;

#[cfg(fuzzing)]
pub(crate) use super::client::malformed::check_frame;

const LAYOUTS: [Layout; 3] = [Layout::Curator, Layout::CuratorRw, Layout::Kazoo];

/// The path of a node, whatever created it.
#[allow(clippy::panic, reason = "checks")]
pub(crate) fn check_path(path: &str) {
    let node = path.rsplit('/').next().unwrap_or_default();
    let _ = sequence_number(node);
    for layout in LAYOUTS {
        let queue = layout.queue(&[node.to_owned(), "x-lock-0000000001".to_owned()]);
        assert_eq!(queue.iter().any(|entry| entry.name == node), layout.is_claim(node), "{node}");
        let _ = layout.claim_id(node).is_none_or(|id: ClaimId| layout.is_node_of(node, id));
        for raw_names in [false, true] {
            let paths = NodePaths { chroot: "/c".to_owned(), raw_names };
            let Some(name) = paths.name_of_lock(path) else { continue };
            let parent = paths.lock_parent(&name);
            assert_eq!(parent.ok(), Some(format!("/c/{path}")), "one name, one node");
        }
        let paths = NodePaths { chroot: String::new(), raw_names: true };
        let _ = paths.name_at(path, layout);
    }
}

/// The data of a node, and the key in a ticket.
#[allow(clippy::panic, reason = "checks")]
pub(crate) fn check_data(data: &[u8]) {
    if let Some(record) = NodeRecord::decode(data) {
        assert_eq!(NodeRecord::decode(&record.encode()).as_ref(), Some(&record));
        let _ = (record.ttl(), record.token(i64::MIN));
    }
    if let Some(key) = ZooKeeperKey::decode(data) {
        assert!(ZooKeeperKey::decode(&key.encode()) == Some(key), "it is written as it was read");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_path_is_understood(path in "\\PC{0,60}") {
            check_path(&path);
        }

        #[test]
        fn paths_like_ours_are_understood(
            path in "(/|%cells/)?([a-zé%25F]{1,9}/)?(_c_)?[0-9a-fé-]{30,37}(lock-|__lock__|__READ__|[0-9]{0,11}\\.5__PERM__)-{0,3}[0-9é+]{8,11}",
        ) {
            check_path(&path);
        }

        #[test]
        fn any_data_is_understood(data in prop::collection::vec(any::<u8>(), 0..80)) {
            check_data(&data);
        }

        #[test]
        fn data_like_ours_is_understood(
            data in r#"\{("lockset":[0-9]{1,11},)?"ttl_ms":[0-9]{1,22}(,"token":"[0-9+-]{1,22}")?(,"claim":"[0-9a-fé+]{31,33}")?(,"path":"/x","session":\[-?[0-9]{1,20},\[[0-9]{1,4}\]\])?\}"#,
        ) {
            check_data(data.as_bytes());
        }
    }
}
