//! Makes the Rust code of etcd's messages from the proto file. The code is committed, so that
//! building lockset needs no generator; a test compares it with the proto file.

use std::path::{Path, PathBuf};

use crate::Outcome;

const HEAD: &str = "//! etcd's messages and calls. Made by `cargo xtask proto` from \
                    `proto/etcd.proto`; do not edit.\n\n";

/// Writes the code where the library has it.
pub(crate) fn write() -> Outcome {
    let code = generated()?;
    std::fs::write(committed(), code).map_err(|error| format!("{}: {error}", committed().display()))
}

fn library() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("crates").join("lockset")
}

fn committed() -> PathBuf {
    library().join("src/engine/etcd/rpc.rs")
}

fn generated() -> Outcome<String> {
    let folder = library().join("proto");
    let files = protox::compile(["etcd.proto"], [&folder]).map_err(|error| error.to_string())?;
    let out = std::env::temp_dir().join(format!("lockset-proto-{}", std::process::id()));
    std::fs::create_dir_all(&out).map_err(|error| format!("{}: {error}", out.display()))?;
    let made = tonic_prost_build::configure()
        .build_server(false)
        .build_transport(false)
        .out_dir(&out)
        .compile_fds(files)
        .and_then(|()| std::fs::read_to_string(out.join("etcdserverpb.rs")));
    // Nothing is lost if it stays.
    let _ = std::fs::remove_dir_all(&out);
    made.map(|code| format!("{HEAD}{code}")).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_code_is_what_the_proto_file_says() -> Outcome {
        let committed = std::fs::read_to_string(committed()).map_err(|error| error.to_string())?;
        match committed == generated()? {
            true => Ok(()),
            false => Err("run `cargo xtask proto` and commit what it writes".to_owned()),
        }
    }
}
