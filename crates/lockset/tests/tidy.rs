//! Style and layering, as tests instead of reviews.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::{BTreeMap, BTreeSet};
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
const LONGEST_FUNCTION: usize = 100;

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
        self.text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default()
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
    // Methods of a trait of another crate (`object_store::ObjectStore`).
    const FOREIGN: &[&str] = &["get_opts"];
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
                let is_getter = pair[1].starts_with("get_") && !FOREIGN.contains(&pair[1]);
                if pair[0] == "fn" && is_getter {
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
    // What a file may not use, because that is above it or beside it.
    let above_engines = [
        "acquire",
        "attach",
        "builder",
        "cell",
        "client",
        "gate",
        "guard",
        "hold",
        "keeper",
        "locks",
        "options",
        "telemetry",
        "ticket",
    ];
    let primitives = ["mutex", "rwlock", "semaphore", "election", "latch", "barrier", "multi"];
    let engines = engines();
    let mut found = Vec::new();
    for source in sources(&["rs"]).iter().filter(|source| source.is_library()) {
        let file = source.path.strip_prefix("crates/lockset/src/").unwrap();
        let used = modules_used(source.shipped());
        let uses = |module: &str| used.contains(module);
        if file.starts_with("engine") {
            let wrong = above_engines.iter().chain(&primitives).filter(|module| uses(module));
            found.extend(wrong.map(|module| format!("{file} uses {module}")));
        }
        if ["acquire.rs", "gate.rs", "hold.rs", "keeper.rs", "guard.rs", "client.rs"]
            .contains(&file)
        {
            let wrong = primitives.iter().chain(&["locks", "builder"]).filter(|one| uses(one));
            found.extend(wrong.map(|module| format!("{file} uses {module}")));
        }
        let names_an_engine = engines
            .iter()
            // The test server is the memory engine.
            .filter(|engine| (file, engine.as_str()) != ("testing.rs", "memory"))
            .any(|engine| code(source).contains(&format!("engine::{engine}")));
        // `fence.rs` exports the conditions that engines offer for transactions of the user.
        let may =
            ["builder.rs", "fence.rs", "fuzzing.rs"].contains(&file) || file.starts_with("engine");
        if names_an_engine && !may {
            found.push(format!("{file} names an engine; only builder.rs may"));
        }
    }
    complain("layering", found);
}

/// The files of the folder `engine`, except what they share.
fn engines() -> Vec<String> {
    let folder = fs::read_dir(root().join("crates/lockset/src/engine")).unwrap();
    let names = folder.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let engines = names.filter_map(|name| name.strip_suffix(".rs").map(str::to_owned));
    let engines: Vec<String> = engines.filter(|name| name != "common").collect();
    assert!(engines.len() >= 6, "the engines were not found");
    engines
}

/// What ships of a file, without its comments.
fn code(source: &Source) -> String {
    let lines = source.shipped().lines().filter(|line| !line.trim_start().starts_with("//"));
    lines.collect::<Vec<_>>().join("\n")
}

/// No engine uses another, not even `redlock`, whose nodes are engines that `builder.rs` hands it.
#[test]
fn no_engine_imports_another() {
    let engines = engines();
    let mut found = Vec::new();
    for source in sources(&["rs"]).iter().filter(|source| source.is_library()) {
        let file = source.path.strip_prefix("crates/lockset/src/").unwrap();
        let own = file.strip_prefix("engine/").and_then(|rest| rest.split(['/', '.']).next());
        let Some(own) = own.filter(|_| !file.ends_with("tests.rs")) else { continue };
        for other in engines.iter().filter(|other| *other != own) {
            let forms = [format!("engine::{other}::"), format!("super::{other}::")];
            if forms.iter().any(|form| code(source).contains(form.as_str())) {
                found.push(format!("{file} uses {other}"));
            }
        }
    }
    complain("engines that import another engine", found);
}

/// The modules of the library that a text uses by `crate::`.
fn modules_used(text: &str) -> BTreeSet<&str> {
    let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    let paths = code.flat_map(|line| line.split("crate::").skip(1));
    let names = paths.map(|path| path.split(|c: char| !c.is_alphanumeric() && c != '_'));
    names.filter_map(|mut words| words.next()).filter(|name| !name.is_empty()).collect()
}

/// The cycle that is left, as the modules it consists of: an error contains the lock's name and its
/// holder, and parsing a name or a claim's id returns errors. The list must not grow.
const CYCLES_LEFT: &[&[&str]] = &[&["error", "name", "state"]];

#[test]
fn modules_have_no_cycles() {
    let mut uses: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let all = sources(&["rs"]);
    let library: Vec<&Source> = all.iter().filter(|source| source.is_library()).collect();
    let module_of = |source: &Source| {
        let file = source.path.strip_prefix("crates/lockset/src/").unwrap();
        file.split(['/', '.']).next().unwrap().to_owned()
    };
    let modules: BTreeSet<String> = library.iter().map(|source| module_of(source)).collect();
    for source in library {
        let module = module_of(source);
        let used = modules_used(source.shipped()).into_iter().map(str::to_owned);
        let used = used.filter(|used| modules.contains(used) && *used != module);
        uses.entry(module.clone()).or_default().extend(used);
    }
    // `lib` declares all others.
    uses.remove("lib");
    let reachable = |from: &str| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![from.to_owned()]);
        while let Some(module) = next.pop() {
            for used in uses.get(&module).into_iter().flatten() {
                if seen.insert(used.clone()) {
                    next.push(used.clone());
                }
            }
        }
        seen
    };
    let reach: BTreeMap<&String, BTreeSet<String>> =
        uses.keys().map(|module| (module, reachable(module))).collect();
    let mut cycles: BTreeSet<Vec<String>> = BTreeSet::new();
    for (module, reached) in &reach {
        if reached.contains(*module) {
            let mutual = reached
                .iter()
                .filter(|other| reach.get(*other).is_some_and(|back| back.contains(*module)));
            cycles.insert(mutual.cloned().collect());
        }
    }
    let left: BTreeSet<Vec<String>> = CYCLES_LEFT
        .iter()
        .map(|cycle| cycle.iter().map(|module| (*module).to_owned()).collect())
        .collect();
    assert_eq!(cycles, left, "cycles between modules");
}

#[test]
fn a_type_name_means_one_thing() {
    let mut files: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let library = sources(&["rs"]);
    // `telemetry/off.rs` replaces `telemetry.rs` where metrics are not compiled in.
    let replaces = |source: &&Source| source.path.ends_with("telemetry/off.rs");
    let library = library.iter().filter(|source| source.is_library() && !replaces(source));
    for source in library {
        for line in source.shipped().lines() {
            let words: Vec<&str> = line.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
            let is_comment = line.trim_start().starts_with("//");
            for pair in words.windows(2).filter(|_| !is_comment) {
                // An indented `type` is an associated one.
                let is_type = matches!(pair[0], "struct" | "enum" | "trait")
                    || pair[0] == "type" && !line.starts_with(' ');
                if is_type && pair[1].starts_with(|c: char| c.is_ascii_uppercase()) {
                    let files = files.entry(pair[1].to_owned()).or_default();
                    files.insert(source.path.clone());
                }
            }
        }
    }
    let shared: Vec<String> =
        files.into_iter().filter(|(_, files)| files.len() > 1).map(|(name, _)| name).collect();
    complain("type names that are used twice", shared);
}

/// Words that were given up for the field's own, and what is said instead. Written in two parts, so
/// that this list does not contain them.
const RETIRED: &[(&str, &str, &str)] = &[
    ("Car", "rier", "Transport"),
    ("Co", "ach", "TxnBatcher"),
    ("Cro", "wd", "Batcher"),
    ("Eye", "s", "telemetry"),
    ("unpoi", "soned", "sync::lock"),
    ("post", "man", "on_push"),
    ("wor", "ries", "warnings"),
    ("Unans", "wered", "RequestError"),
    ("Trou", "ble", "RequestError"),
    ("Orp", "han", "WithdrawOnDrop"),
    ("visit_", "anyway", "InFlight"),
    ("awaits_", "alone", "InFlight"),
    ("Bes", "ide", "PerRuntime"),
    ("at_", "hand", "route"),
    ("act_", "afar", "redirect"),
    ("heed_", "answer", "on_reply"),
    ("LAST_", "ORDERS", "DRAIN_TIMEOUT"),
    ("MARK_", "LIFE", "TOMBSTONE_LIFE"),
    ("SAFETY_", "NET", "RECHECK"),
    ("Let", "ter", "Message"),
    ("De", "sk", "Dispatcher"),
    ("bu", "ry", "remove_dead"),
    ("signs of ", "life", "heartbeats"),
];

#[test]
fn retired_words_do_not_come_back() {
    let mut found = Vec::new();
    for source in sources(&["rs", "lua", "md"]) {
        for (number, line) in source.lines() {
            for (head, tail, instead) in RETIRED {
                let word = format!("{head}{tail}");
                let is_whole = |at: usize| {
                    let is_part = |c: char| c.is_alphanumeric() || c == '_';
                    !line[..at].ends_with(is_part) && !line[at + word.len()..].starts_with(is_part)
                };
                if line.match_indices(&word).any(|(at, _)| is_whole(at)) {
                    found.push(format!("{}:{number}: {word}: {instead}", source.path));
                }
            }
        }
    }
    complain("retired words", found);
}

/// Comments speak of claims, clients, tasks and servers.
#[test]
fn comments_name_tasks_and_not_persons() {
    let persons = [("some", "body"), ("no", "body"), ("any", "body"), ("every", "body")];
    let mut words: Vec<String> = persons.iter().map(|(one, two)| format!("{one}{two}")).collect();
    words.push(concat!("who", "ever").to_owned());
    let mut found = Vec::new();
    for source in sources(&["rs", "lua"]) {
        for (number, line) in source.lines() {
            let comment = comment_of(line).to_lowercase();
            let mut of_comment = comment.split(|c: char| !c.is_alphanumeric());
            if of_comment.any(|word| words.iter().any(|person| person == word)) {
                found.push(format!("{}:{number}: {}", source.path, line.trim()));
            }
        }
    }
    complain("comments that speak of persons", found);
}

/// What a line says in a comment of its own.
fn comment_of(line: &str) -> &str {
    let line = line.trim_start();
    if line.starts_with("//") || line.starts_with("--") { line } else { "" }
}

/// Each row of `docs/timing.md` that states a value quotes the source it comes from.
#[test]
fn the_timing_page_states_the_values_of_the_sources() {
    let page = fs::read_to_string(root().join("docs/timing.md")).unwrap();
    let sources = sources(&["rs"]);
    let mut wrong = Vec::new();
    let mut checked = 0;
    let rows = page.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| what"));
    for row in rows {
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").map(str::trim).collect();
        let (quote, stated) = cells.split_last().unwrap();
        let mut quoted = quote.split('`').skip(1).step_by(2);
        let (Some(path), Some(text)) = (quoted.next(), quoted.next()) else {
            wrong.push(format!("no source: {row}"));
            continue;
        };
        let below = format!("crates/lockset/src/{path}");
        let is_there = sources
            .iter()
            .filter(|source| source.path.starts_with(&below))
            .any(|source| source.shipped().contains(text));
        if !is_there {
            wrong.push(format!("`{text}` is not in {path}"));
        }
        let stated = stated.join(" ");
        for value in values_of(text) {
            checked += 1;
            if !stated.contains(&value) {
                wrong.push(format!("the source says {value:?}: {row}"));
            }
        }
    }
    assert!(checked > 25, "only {checked} values were found on the page");
    complain("docs/timing.md", wrong);
}

/// The numbers in a line of source, as the page writes them.
fn values_of(text: &str) -> Vec<String> {
    let number_after = |head: &str| {
        let (_, rest) = text.split_once(head)?;
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        (!digits.is_empty()).then_some(digits)
    };
    let fraction = text.rsplit_once(" / ").map(|(_, rest)| rest);
    let part: Option<String> =
        fraction.map(|rest| rest.chars().take_while(char::is_ascii_digit).collect());
    let mut values = Vec::new();
    values.extend(number_after("from_secs(").map(|n| format!("{n} s")));
    values.extend(number_after("from_millis(").map(|n| format!("{n} ms")));
    values.extend(number_after("u32 = ").map(|n| format!("{n} ")));
    values.extend(part.filter(|part| !part.is_empty()).map(|part| format!("/{part}")));
    values
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
            // A signature without a body ends with a semicolon, perhaps some lines below.
            let mut signature = lines[start..].iter();
            let has_body = signature.find(|line| line.ends_with(['{', ';', '}']));
            if !is_fn || has_body.is_none_or(|line| line.ends_with(';')) {
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
/// A reader follows these names, so a file that is moved takes its name in the pages along.
#[test]
fn the_files_that_the_design_names_exist() {
    let paths: BTreeSet<String> =
        sources(&["rs", "lua", "sql"]).into_iter().map(|source| source.path).collect();
    let mut named = 0;
    let mut complaints = Vec::new();
    for page in ["DESIGN.md", "GUARANTEES.md", "docs/engines.md", "docs/timing.md"] {
        let text = fs::read_to_string(root().join(page)).unwrap();
        for name in text.split('`').skip(1).step_by(2) {
            let is_file = [".rs", ".lua", ".sql"].iter().any(|end| name.ends_with(end));
            if is_file && !name.contains("NAME") && !name.contains(' ') {
                named += 1;
                let is_there = paths.iter().any(|path| {
                    path.strip_suffix(name)
                        .is_some_and(|rest| rest.is_empty() || rest.ends_with('/'))
                });
                if !is_there {
                    complaints.push(format!("{page}: `{name}`"));
                }
            }
        }
    }
    assert!(named > 20, "the names were not found");
    complain("these files do not exist", complaints);
}

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
    complain("paths of one machine", found);
}
