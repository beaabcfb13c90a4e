//! What the documents name is there.

use std::fs;
use std::path::{Path, PathBuf};

/// Folders of this project whose paths are written out in documents. `tests` is not among them: other projects have one too.
const FOLDERS: [&str; 8] = ["crates/", "src/", "docs/", "benches/", "configs/", "examples/", "fixtures/", "python/"];

fn documents() -> Vec<PathBuf> {
    let in_docs = fs::read_dir("docs").unwrap().map(|entry| entry.unwrap().path());
    let named = ["README.md", "CONTRIBUTING.md", "fixtures/README.md"].map(PathBuf::from);
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

#[test]
fn every_link_and_path_in_a_document_leads_to_a_file() {
    let mut missing = Vec::new();
    for document in documents() {
        let text = fs::read_to_string(&document).unwrap();
        let named = [links(&text, document.parent().unwrap()), paths(&text)].concat();
        missing.extend(named.into_iter().filter(|path| !path.exists()).map(|path| (document.clone(), path)));
    }
    assert_eq!(missing, []);
}

#[test]
fn links_and_paths_are_found_where_they_stand() {
    let text = "[a](../src/lib.rs#L1) and `crates/core/src/lib.rs`, docs/*.md, https://example.org/src/no.rs: [b](https://x.org).";
    assert_eq!(links(text, Path::new("docs")), [PathBuf::from("docs/../src/lib.rs")]);
    assert_eq!(paths(text), [PathBuf::from("crates/core/src/lib.rs")]);
}
