//! A client in a process of its own, for the laws: `files-actor FOLDER`.
#![allow(clippy::unwrap_used, reason = "test code")]

use std::path::PathBuf;
use std::sync::Arc;

use lockset::Lockset;
use lockset_example_files::Files;
use lockset_testkit::process::{StateSource, serve_stdio};

fn main() {
    let folder = PathBuf::from(std::env::args_os().nth(1).unwrap());
    serve_stdio(StateSource::Guard, async move {
        Lockset::with_engine(Arc::new(Files::open(&folder).unwrap())).unwrap()
    });
}
