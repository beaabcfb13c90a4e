//! What the documents name is there.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use assay::judge::generate::Regime;

use super::prose;

/// Folders of this project whose paths are written out in documents. `tests` is not among them: other projects have one too.
const FOLDERS: [&str; 8] = ["crates/", "src/", "docs/", "benches/", "configs/", "examples/", "fixtures/", "python/"];

/// The documents whose paths, commands and anchors are tried.
pub(super) fn documents() -> Vec<PathBuf> {
    let in_docs = fs::read_dir("docs").unwrap().map(|entry| entry.unwrap().path());
    let named = ["README.md", "CONTRIBUTING.md", "fixtures/README.md", "python/README.md"].map(PathBuf::from);
    named
        .into_iter()
        .chain(in_docs.filter(|path| path.extension().is_some_and(|extension| extension == "md")))
        .collect()
}

/// The targets of Markdown links within the project, as paths from its root.
fn links(text: &str, folder: &Path) -> Vec<PathBuf> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target);
    let files = targets.filter_map(|target| target.split('#').next()).filter(|file| !file.is_empty());
    files.filter(|file| !file.contains("://")).map(|file| folder.join(file)).collect()
}

/// The paths that stand in the text, without those that hold a placeholder or a pattern.
fn paths(text: &str) -> Vec<PathBuf> {
    let words = text.split(|c: char| c.is_whitespace() || "`()[]|,;#\"'".contains(c));
    let words = words.map(|word| word.trim_end_matches(['.', ':'])).filter(|word| !word.contains(['*', '{', '<', '…']));
    words.filter(|word| FOLDERS.iter().any(|folder| word.starts_with(folder))).map(PathBuf::from).collect()
}

/// One `cargo test` command of a document: the folder whose tests it runs, and the names that it asks for.
#[derive(Debug, PartialEq)]
struct CitedTests {
    folder: PathBuf,
    filters: Vec<String>,
}

/// The commands in `text` that run tests by name. In a sentence such a command is between backticks and may go on in the next line.
fn cited_tests(text: &str) -> Vec<CitedTests> {
    let starts = ["cargo test ", "cargo test\n", "$(CARGO) test ", "miri test "];
    let mut places: Vec<(usize, usize)> =
        starts.iter().flat_map(|start| text.match_indices(start).map(|(at, found)| (at, at + found.len()))).collect();
    places.sort_unstable();
    let commands = places.into_iter().map(|(at, from)| {
        // Variables may be set within the backticks too; a fence is three of them at the beginning of a line.
        let line = &text[text[..at].rfind('\n').map_or(0, |end| end + 1)..at];
        let inline = line.matches('`').count() % 2 == 1;
        let end = text[from..].find(|c: char| "`;#|>".contains(c) || (c == '\n' && !inline));
        &text[from..end.map_or(text.len(), |end| from + end)]
    });
    commands.filter_map(cited_by).collect()
}

/// The tests that the words after `cargo test` ask for, if they ask for any by name.
fn cited_by(command: &str) -> Option<CitedTests> {
    let (mut folder, mut filters) = (PathBuf::from("."), Vec::new());
    let mut words = command.split_whitespace();
    while let Some(word) = words.next() {
        match word {
            "-p" | "--package" => {
                let package = words.next()?.trim_matches('\'').strip_prefix("assay-")?;
                let name = package.strip_suffix("-tests").unwrap_or(package);
                folder = Path::new("crates").join(name);
            }
            // The binary `it` is all of `tests`; any other is in a folder of its name.
            "--test" => {
                let name = words.next()?;
                let nested = [
                    "tests",
                    "crates/judge/tests",
                    "crates/native/tests",
                    "crates/programs/tests",
                    "crates/reference/tests",
                ];
                let candidates = nested.iter().map(|parent| Path::new(parent).join(name));
                folder = candidates.into_iter().find(|path| path.is_dir()).unwrap_or_else(|| "tests".into());
            }
            "--features" | "--target" | "--profile" | "--message-format" => {
                words.next();
            }
            // Wildcards and variables are no names.
            _ if word.starts_with(['-', '\'', '$', '"']) || word.contains(['*', '…']) => {}
            _ => filters.push(word.into()),
        }
    }
    (!filters.is_empty()).then_some(CitedTests { folder, filters })
}

/// The names of all tests below `folder` as `cargo test` filters them, a line each. Binaries that make their own trials have their names,
/// or parts of them, in texts.
fn names_of_tests(folder: &Path) -> String {
    let mut files = Vec::new();
    prose::rust_files(folder, &mut files);
    let mut names = String::new();
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        let within = file.strip_prefix(folder).unwrap().with_extension("");
        let parts = within.iter().map(|part| part.to_str().unwrap());
        let module =
            parts.filter(|part| !["src", "tests", "mod", "lib", "main"].contains(part)).collect::<Vec<_>>().join("::");
        for test in prose::test_functions(&text) {
            names += &format!("{module}::{}{}\n", test.module, test.name);
        }
        if folder.join("main.rs").is_file() && text.contains("libtest_mimic") {
            let texts =
                text.split('"').skip(1).step_by(2).filter(|text| text.contains(['_', '-']) && !text.contains('\n'));
            texts.for_each(|text| names += &format!("{module}::{text}\n"));
        }
    }
    names
}

#[test]
fn documents_commands_name_tests_that_are_there() {
    let mut cited = Vec::new();
    for document in documents().into_iter().chain(["Makefile".into(), ".ci/run".into()]) {
        let text = fs::read_to_string(&document).unwrap();
        cited.extend(cited_tests(&text).into_iter().map(|cited| (document.clone(), cited)));
    }
    assert!(cited.len() > 30, "{cited:#?}");
    let mut missing = Vec::new();
    let mut of_folders: BTreeMap<PathBuf, String> = BTreeMap::new();
    for (document, CitedTests { folder, filters }) in cited {
        let names = of_folders.entry(folder.clone()).or_insert_with(|| names_of_tests(&folder));
        let absent = filters.into_iter().filter(|filter| !names.contains(filter.as_str()));
        missing.extend(
            absent.map(|filter| format!("{}: no test in {} is named {filter}", document.display(), folder.display())),
        );
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

#[test]
fn documents_commands_are_found_in_text() {
    let text = "`ASSAY_CASES=3 cargo test\n--test judge a::` and `cargo test -p assay-native-tests more -- --nocapture`, `cargo test -p x`.\n\
                ```sh\ncargo test --features train --test it b   # a comment\nmake replay\ncargo test --test it prose\n```\n";
    let cited = |folder: &str, filter: &str| CitedTests { folder: folder.into(), filters: vec![filter.into()] };
    let expected = [
        cited("crates/judge/tests/judge", "a::"),
        cited("crates/native", "more"),
        cited("tests", "b"),
        cited("tests", "prose"),
    ];
    assert_eq!(cited_tests(text), expected);
}

#[test]
fn documents_links_and_paths_lead_to_files() {
    let mut missing = Vec::new();
    for document in documents() {
        let text = fs::read_to_string(&document).unwrap();
        let named = [links(&text, document.parent().unwrap()), paths(&text)].concat();
        missing.extend(named.into_iter().filter(|path| !path.exists()).map(|path| (document.clone(), path)));
    }
    assert_eq!(missing, []);
}

#[test]
fn documents_links_and_paths_are_found_in_text() {
    let text = "[a](../src/lib.rs#L1) and `crates/core/src/lib.rs`, docs/*.md, https://example.org/src/no.rs: [b](https://x.org).";
    assert_eq!(links(text, Path::new("docs")), [PathBuf::from("docs/../src/lib.rs")]);
    assert_eq!(paths(text), [PathBuf::from("crates/core/src/lib.rs")]);
}

#[test]
fn documents_glossary_names_every_regime() {
    let glossary = fs::read_to_string("docs/glossary.md").unwrap();
    for regime in Regime::ALL {
        assert!(glossary.contains(&format!("`{regime}`")), "docs/glossary.md does not name the regime {regime}");
    }
}
