//! One guarded write in a process of its own: `fence_file_writer FOLDER FILE LOCK=TOKEN DATA`. It
//! has one thread, so that its system calls come in one order.
#![allow(clippy::unwrap_used)]

use lockset::fence::{FencingToken, FileFence};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [folder, file, token, data] = args.try_into().unwrap();
    let token: FencingToken = token.parse().unwrap();
    let lock = token.lock().clone();
    let fence = FileFence::open(folder).unwrap();
    fence.write(file, lock, token, data.as_bytes()).unwrap();
}
