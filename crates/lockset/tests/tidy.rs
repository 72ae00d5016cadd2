//! Style and layering, as tests instead of reviews.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::path::{Path, PathBuf};

/// Unsafe code lives here and nowhere else: the fork notice, the command's signals and `pre_exec`,
/// and the tests that fork or make terminals.
const MAY_BE_UNSAFE: &[&str] = &[
    "crates/lockset/src/fork.rs",
    "crates/lockset/tests/local_files.rs",
    "crates/lockset-cli/src/sys.rs",
    "crates/lockset-cli/tests/cli/common.rs",
    "crates/lockset-cli/tests/cli/terminal.rs",
];
/// Made by `cargo xtask proto`, as the generator writes it; the names in it are etcd's.
const GENERATED: &[&str] = &["crates/lockset/src/engine/etcd/rpc.rs"];
const LONGEST_LINE: usize = 100;
const LONGEST_FUNCTION: usize = 70;

struct Source {
    path: String,
    text: String,
}

impl Source {
    fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        self.text.lines().enumerate().map(|(index, line)| (index + 1, line))
    }

    /// The part that ships: everything before the tests at the end of the file.
    fn shipped(&self) -> &str {
        self.text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default()
    }

    fn is_library(&self) -> bool {
        self.path.starts_with("crates/lockset/src/")
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn sources(extensions: &[&str]) -> Vec<Source> {
    let mut found = Vec::new();
    collect(&root(), &mut found);
    let kept = found.into_iter().filter(|path| {
        path.extension().is_some_and(|e| extensions.iter().any(|wanted| e == *wanted))
    });
    let sources: Vec<Source> = kept
        .map(|path| Source {
            path: path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned(),
            text: fs::read_to_string(&path).unwrap(),
        })
        .filter(|source| !GENERATED.contains(&source.path.as_str()))
        .collect();
    assert!(sources.len() > 10 || !extensions.contains(&"rs"), "the sources were not found");
    sources
}

fn collect(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if name.starts_with('.') || name == "target" {
            continue;
        }
        if path.is_dir() {
            collect(&path, found);
        } else {
            found.push(path);
        }
    }
}

fn complain(title: &str, complaints: Vec<String>) {
    assert!(complaints.is_empty(), "{title}:\n  {}", complaints.join("\n  "));
}

#[test]
fn lines_fit_a_page() {
    let mut long = Vec::new();
    for source in sources(&["rs", "sql", "lua"]) {
        for (number, line) in source.lines() {
            // Texts for people, addresses and the hidden lines of examples cannot be broken.
            let unbreakable = ["\"", "://", "/// # ", "//! # ", "//! |"];
            let breakable = !unbreakable.iter().any(|part| line.contains(part));
            if breakable && line.chars().count() > LONGEST_LINE {
                long.push(format!("{}:{number}", source.path));
            }
        }
    }
    complain("lines longer than 100 columns", long);
}

#[test]
fn every_file_says_what_it_is_for() {
    let silent = sources(&["rs"])
        .into_iter()
        .filter(|source| !source.text.starts_with("//!"))
        .map(|source| source.path);
    complain("files without a first line of documentation", silent.collect());
}

#[test]
fn nothing_is_left_for_later() {
    let words = [
        concat!("to", "do!("),
        concat!("unimple", "mented!("),
        concat!("#[ig", "nore"),
        concat!("FIX", "ME"),
        concat!("TO", "DO"),
        concat!("db", "g!("),
    ];
    let mut found = Vec::new();
    for source in sources(&["rs", "sql", "lua", "md", "toml"]) {
        for (number, line) in source.lines() {
            if let Some(word) = words.iter().find(|word| line.contains(**word)) {
                found.push(format!("{}:{number}: {word}", source.path));
            }
        }
    }
    complain("unfinished things", found);
}

#[test]
fn names_say_what_things_are() {
    let mut found = Vec::new();
    for source in sources(&["rs"]) {
        for (number, line) in source.lines() {
            let words: Vec<&str> = line.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
            for pair in words.windows(2) {
                let vague = ["Manager", "Helper", "Provider", "Impl", "Util", "Utils"];
                let is_type = matches!(pair[0], "struct" | "enum" | "trait" | "type");
                if is_type && vague.iter().any(|end| pair[1].ends_with(end)) {
                    found.push(format!("{}:{number}: {}", source.path, pair[1]));
                }
                if pair[0] == "fn" && pair[1].starts_with("get_") {
                    found.push(format!("{}:{number}: {}", source.path, pair[1]));
                }
            }
        }
    }
    complain("vague names", found);
}

#[test]
fn unsafe_code_is_where_it_is_documented() {
    let keyword = concat!("un", "safe");
    let found = sources(&["rs"])
        .into_iter()
        .filter(|source| !MAY_BE_UNSAFE.contains(&source.path.as_str()))
        .filter(|source| {
            let uses =
                [format!("{keyword} {{"), format!("{keyword} fn"), format!("{keyword} impl")];
            source
                .text
                .lines()
                .filter(|line| !line.trim_start().starts_with("//"))
                .any(|line| uses.iter().any(|one| line.contains(one.as_str())))
        })
        .map(|source| source.path);
    complain("unsafe code outside its modules", found.collect());
}

#[test]
fn arrows_point_downwards() {
    // What a file may not use, because that lies above it or beside it.
    let above_engines =
        ["acquire", "client", "gate", "guard", "keeper", "locks", "connect", "eyes"];
    let primitives = ["mutex", "rwlock", "semaphore", "election", "latch", "barrier", "multi"];
    let mut found = Vec::new();
    for source in sources(&["rs"]).iter().filter(|source| source.is_library()) {
        let file = source.path.strip_prefix("crates/lockset/src/").unwrap();
        let uses = |module: &str| source.shipped().contains(&format!("use crate::{module}::"));
        if file.starts_with("engine") {
            let wrong = above_engines.iter().chain(&primitives).filter(|module| uses(module));
            found.extend(wrong.map(|module| format!("{file} uses {module}")));
        }
        if ["acquire.rs", "gate.rs", "keeper.rs", "guard.rs", "client.rs"].contains(&file) {
            let wrong = primitives.iter().chain(&["locks", "connect"]).filter(|one| uses(one));
            found.extend(wrong.map(|module| format!("{file} uses {module}")));
        }
        let names_an_engine = ["memory", "local", "redis", "redlock", "etcd", "zookeeper"]
            .iter()
            // The test server is the memory engine.
            .filter(|engine| (file, **engine) != ("testing.rs", "memory"))
            .any(|engine| source.shipped().contains(&format!("engine::{engine}")));
        if names_an_engine && file != "builder.rs" && !file.starts_with("engine") {
            found.push(format!("{file} names an engine; only builder.rs may"));
        }
    }
    complain("layering", found);
}

#[test]
fn async_methods_say_what_cancelling_does() {
    let mut silent = Vec::new();
    for source in sources(&["rs"]).iter().filter(|source| source.is_library()) {
        let mut doc = String::new();
        for line in source.shipped().lines().map(str::trim) {
            if line.starts_with("///") {
                doc.push_str(line);
            } else if line.starts_with("pub async fn") {
                if !doc.contains("# Cancel safety") {
                    silent.push(format!("{}: {line}", source.path));
                }
                doc.clear();
            } else if !line.starts_with("#[") {
                doc.clear();
            }
        }
    }
    complain("async methods without a word on cancelling", silent);
}

#[test]
fn functions_fit_a_screen() {
    let mut long = Vec::new();
    for source in sources(&["rs"]) {
        let lines: Vec<&str> = source.shipped().lines().collect();
        for (start, line) in lines.iter().enumerate() {
            let trimmed = line.trim_start();
            let indent = &line[..line.len() - trimmed.len()];
            let is_fn = ["fn ", "pub fn ", "async fn ", "pub async fn ", "pub(crate) fn "]
                .iter()
                .any(|head| trimmed.starts_with(head))
                || trimmed.starts_with("pub(crate) async fn ");
            if !is_fn || trimmed.ends_with(';') {
                continue;
            }
            let end = format!("{indent}}}");
            let length = lines[start..].iter().position(|line| *line == end).unwrap_or(0);
            if length > LONGEST_FUNCTION {
                long.push(format!("{}:{}: {length} lines", source.path, start + 1));
            }
        }
    }
    complain("functions longer than a screen", long);
}

/// The Chinese README shows the same commands and the same code.
#[test]
fn both_readmes_show_the_same_code() {
    let blocks = |file: &str| {
        let text = fs::read_to_string(root().join(file)).unwrap();
        let blocks: Vec<String> = text.split("```").skip(1).step_by(2).map(String::from).collect();
        blocks
    };
    let english = blocks("README.md");
    assert!(english.len() >= 4, "the README shows no code");
    assert_eq!(english, blocks("README.zh-CN.md"));
}

#[test]
fn the_readme_and_ci_agree_on_the_test_command() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let ci = fs::read_to_string(root().join(".ci/run")).unwrap();
    assert!(readme.contains("cargo xtask test"), "the README does not name the test command");
    assert!(ci.contains("cargo xtask test"), "CI does not run the README's test command");
}

#[test]
fn the_project_speaks_of_itself_only() {
    let mut found = Vec::new();
    let private = [concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("crates", ".io-")];
    for source in sources(&["rs", "md", "toml", "sql", "lua", "yml"]) {
        for (number, line) in source.lines() {
            if private.iter().any(|path| line.contains(path)) {
                found.push(format!("{}:{number}", source.path));
            }
        }
    }
    complain("paths of somebody's machine", found);
}
