//! Checks that the bounds of the dependencies are true: the lowest versions build, and the Redis
//! engine works with the lowest and the newest `redis` that its bound allows.

use std::fs;
use std::path::Path;

use crate::Outcome;
use crate::cargo::{cargo, with_env};

const LOCK_FILE: &str = "Cargo.lock";
/// Separate from the usual build, which would otherwise be made again afterwards.
const TARGET: (&str, &str) = ("CARGO_TARGET_DIR", "target/versions");

/// Runs all checks with other versions in the lock file, and puts the file back in any case.
pub(crate) fn check() -> Outcome {
    let lock_file = Path::new(LOCK_FILE);
    let before = fs::read(lock_file).map_err(|error| format!("{LOCK_FILE}: {error}"))?;
    let restore = || fs::write(lock_file, &before).map_err(|error| format!("{LOCK_FILE}: {error}"));
    let lowest = lowest_versions_build();
    restore()?;
    let lowest_redis = redis_engine_works_with(&["--precise", &lowest_redis_version()?]);
    restore()?;
    let newest_redis = redis_engine_works_with(&[]);
    restore()?;
    lowest.and(lowest_redis).and(newest_redis)
}

fn lowest_versions_build() -> Outcome {
    println!("== the lowest versions of all dependencies");
    // The option is unstable, and nothing else here is.
    let unstable = ("RUSTC_BOOTSTRAP", "1");
    with_env(&["update", "-q", "-Z", "direct-minimal-versions"], &[unstable])?;
    with_env(&["check", "-p", "lockset", "-p", "lockset-cli", "--all-features"], &[TARGET])
}

fn redis_engine_works_with(version: &[&str]) -> Outcome {
    println!("== redis {}", version.last().unwrap_or(&"newest"));
    cargo(&[&["update", "-q", "-p", "redis"], version].concat())?;
    let library = ["test", "-p", "lockset", "--features", "redis-tls"];
    with_env(&[&library[..], &["--lib", "redis"]].concat(), &[TARGET])?;
    with_env(&[&library[..], &["--test", "redis_crate"]].concat(), &[TARGET])?;
    let laws = ["test", "-p", "lockset-testkit", "--test", "laws_redis", "--test"];
    with_env(&[&laws[..], &["redis_security"]].concat(), &[TARGET])
}

/// The bound in `Cargo.toml`, as a complete version.
fn lowest_redis_version() -> Outcome<String> {
    let manifest =
        fs::read_to_string("Cargo.toml").map_err(|error| format!("Cargo.toml: {error}"))?;
    redis_bound(&manifest).ok_or_else(|| "Cargo.toml has no version of redis".to_owned())
}

fn redis_bound(manifest: &str) -> Option<String> {
    let line = manifest.lines().find(|line| line.starts_with("redis = "))?;
    let bound = line.split("version = \"").nth(1)?.split('"').next()?;
    let missing = 2_usize.checked_sub(bound.matches('.').count())?;
    Some(format!("{bound}{}", ".0".repeat(missing)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_becomes_a_complete_version() {
        let manifest = "serde = \"1\"\nredis = { version = \"1.8\", features = [] }\n";
        assert_eq!(redis_bound(manifest).as_deref(), Some("1.8.0"));
        assert_eq!(redis_bound("redis = { version = \"1.8.2\" }").as_deref(), Some("1.8.2"));
        assert_eq!(redis_bound("serde = \"1\""), None);
    }
}
