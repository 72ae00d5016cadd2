//! Edits a snapshot of a ZooKeeper server, to reach counter values that would take years.

use std::path::{Path, PathBuf};

/// The offset of the child counter in the record of a node, after its data: behind the ACL, two
/// transaction ids, two timestamps and the data version.
const COUNT: usize = 8 + 4 * 8 + 4;
/// A seal: the checksum of everything before it, and a string of one character.
const SEAL: usize = 8 + 4 + 1;
/// Between the two seals: a transaction id, a version and a digest of the nodes.
const DIGEST: usize = 8 + 4 + 8;

/// Writes this count into the newest snapshot in the folder. Later logged transactions do not touch
/// the node.
pub(super) fn count_children_from(folder: &Path, path: &str, count: i32) {
    let file = newest(folder);
    let mut bytes = std::fs::read(&file).unwrap();
    let count_at = place_of(&bytes, path) + COUNT;
    let seals = [bytes.len() - SEAL - DIGEST - SEAL, bytes.len() - SEAL];
    for seal in seals {
        let sum = adler32(&bytes[..seal]).to_be_bytes();
        assert_eq!(bytes[seal..seal + 8], sum, "this is not the snapshot we know");
    }
    bytes[count_at..count_at + 4].copy_from_slice(&count.to_be_bytes());
    // The second checksum includes the first.
    for seal in seals {
        let sum = adler32(&bytes[..seal]).to_be_bytes();
        bytes[seal..seal + 8].copy_from_slice(&sum);
    }
    std::fs::write(&file, bytes).unwrap();
}

fn newest(folder: &Path) -> PathBuf {
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let number = |file: &PathBuf| {
        let number = file.file_name()?.to_str()?.strip_prefix("snapshot.")?;
        u64::from_str_radix(number, 16).ok()
    };
    files.filter(|file| number(file).is_some()).max_by_key(number).expect("there is a snapshot")
}

/// The position in the record of a node after its path and its data.
fn place_of(bytes: &[u8], path: &str) -> usize {
    let name = [&(path.len() as u32).to_be_bytes(), path.as_bytes()].concat();
    let found = bytes.windows(name.len()).position(|part| part == name);
    let data = found.expect("the node is in the snapshot") + name.len();
    let length = u32::from_be_bytes(bytes[data..data + 4].try_into().unwrap());
    data + 4 + length as usize
}

fn adler32(bytes: &[u8]) -> u64 {
    let (mut low, mut high) = (1, 0);
    for &byte in bytes {
        low = (low + u64::from(byte)) % 65_521;
        high = (high + low) % 65_521;
    }
    high << 16 | low
}
