//! Counts the lines of code of the library by module: without blank lines, comments, tests and
//! generated code.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::Outcome;

const SOURCES: &str = "crates/lockset/src";
/// Generated, or nothing but tests.
const NOT_COUNTED: [&str; 2] = ["engine/etcd/rpc.rs", "engine/local/tests.rs"];

/// Prints the lines of each module, the largest first, and of all together.
pub(crate) fn print() -> Outcome {
    let mut modules = BTreeMap::<String, usize>::new();
    for file in files(Path::new(SOURCES))? {
        let path = file.strip_prefix(SOURCES).map_err(|error| error.to_string())?;
        let path = path.to_string_lossy().into_owned();
        if !NOT_COUNTED.contains(&path.as_str()) {
            let text = fs::read_to_string(&file).map_err(|error| format!("{path}: {error}"))?;
            *modules.entry(module_of(&path)).or_default() += lines_of_code(&text);
        }
    }
    let all: usize = modules.values().sum();
    let mut modules: Vec<(String, usize)> = modules.into_iter().collect();
    modules.sort_by_key(|(_, lines)| std::cmp::Reverse(*lines));
    for (module, lines) in modules {
        println!("{lines:7}  {module}");
    }
    println!("{all:7}  together");
    Ok(())
}

fn files(folder: &Path) -> Outcome<Vec<PathBuf>> {
    let failed = |error: std::io::Error| format!("{}: {error}", folder.display());
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        match path.extension().and_then(|end| end.to_str()) {
            _ if path.is_dir() => found.extend(files(&path)?),
            Some("rs" | "lua" | "sql") => found.push(path),
            _ => {}
        }
    }
    Ok(found)
}

/// A file of the library, or an engine with its folder.
fn module_of(path: &str) -> String {
    let depth = if path.starts_with("engine/") { 2 } else { 1 };
    let parts: Vec<&str> = path.split('/').take(depth).collect();
    parts.join("/").trim_end_matches(".rs").to_owned()
}

/// The tests are at the end of a file.
fn lines_of_code(text: &str) -> usize {
    let before_tests = text.split("\n#[cfg(test)]\nmod tests").next().unwrap_or(text);
    let is_code = |line: &&str| {
        !line.is_empty() && !["//", "--"].iter().any(|comment| line.starts_with(comment))
    };
    before_tests.lines().map(str::trim).filter(is_code).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blank_lines_comments_and_tests_are_not_counted() {
        let code = "//! Docs\n\nfn f() {\n    // why\n    g(); // here\n}\n";
        assert_eq!(lines_of_code(&format!("{code}\n#[cfg(test)]\nmod tests {{\n}}\n")), 3);
        assert_eq!(lines_of_code("-- what\nlocal a = 1\n"), 1);
        assert_eq!(module_of("engine/etcd/watch.rs"), module_of("engine/etcd.rs"));
        assert_eq!(
            (module_of("url.rs"), module_of("fence/file.rs")),
            ("url".into(), "fence".into())
        );
    }
}
