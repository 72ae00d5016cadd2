//! A client in a process of its own: `actor URL [--report-stale-state | --ttl-ms N]`. It reads
//! commands from stdin and writes replies to stdout.

fn main() {
    lockset_testkit::process::serve_arguments();
}
