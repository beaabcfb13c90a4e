//! Paths, strangers' text and shapes, as they are read and written.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use assay::problem::HeadShape;
use assay_core::project::{code_folders, find, find_code, in_words};
use assay_core::text::{ForeignLines, ForeignText, ShownPath, drives_terminal};

use super::unsafe_code::sources;

#[test]
fn data_is_found_in_the_working_folder_then_in_the_tree() {
    assert_eq!(find("Cargo.toml"), Ok("Cargo.toml".into()), "the working directory comes first");
    let looked = find("nowhere").unwrap_err();
    assert_eq!(looked, [PathBuf::from("nowhere"), env::current_dir().unwrap().join("nowhere")]);
}

#[test]
fn code_is_searched_in_the_tree_and_the_data_folder_alone() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let searched = |own: &str| code_folders(&root.join(own));
    assert_eq!(searched("target/release/assay"), [] as [PathBuf; 0], "a folder without Cargo.toml is no tree");
    fs::write(root.join("Cargo.toml"), "").unwrap();
    assert_eq!(searched("target/release/assay"), [root.join(".plugins")]);
    assert_eq!(searched("target/sanitize/debug/deps/it-0"), [root.join(".plugins")]);
    assert_eq!(searched("target/debug/lib_native.so"), [root.join(".plugins")]);
    assert_eq!(searched("bin/assay"), [root.join("share/grpo-assay")]);
    assert_eq!(searched("site-packages/assay/_native.abi3.so"), [root.join("site-packages/assay/data")]);
    // Folders above an executable are somebody's home or downloads.
    assert_eq!(searched("downloads/assay"), [] as [PathBuf; 0]);
    assert_eq!(code_folders(Path::new("bin/assay")), [] as [PathBuf; 0], "relative to the working directory");
    assert!(in_words(&[]).starts_with("nowhere"));
    // These tests are in the project's tree, and data of the working directory is no code.
    let tree = env::current_dir().unwrap();
    assert_eq!(find_code("Cargo.toml"), Err(vec![tree.join(".plugins/Cargo.toml")]));
}

#[test]
fn text_of_strangers_is_one_line_that_drives_no_terminal() {
    let shown = |text: &str| ForeignText::from(text).to_string();
    assert_eq!(shown("  two\n\twords \u{1b}[2J"), "two words \\u{1b}[2J");
    assert_eq!(shown("\u{9b}2J \u{7f} \u{202e}\u{2066}\u{61c}"), "\\u{9b}2J \\u{7f} \\u{202e}\\u{2066}\\u{61c}");
    assert_eq!(shown(&"é".repeat(300)), "é".repeat(300));
    assert_eq!(shown(&"é".repeat(301)), "é".repeat(300) + "…");
    let lines = ForeignLines::from("one\r\n\ttwo\u{2028}\rthree");
    assert_eq!(lines.to_string(), "one\n\ttwo\\u{2028}\\rthree");
    let path = ShownPath(Path::new("a\u{1b}[31m\nb\u{200f}"));
    assert_eq!(format!("{path} {:?}", ShownPath(Path::new("\u{9b}"))), r#"a\u{1b}[31m\nb\u{200f} ShownPath("\u{9b}")"#);
    // Whatever has a character that drives a terminal is shown without it, and the rest as it is.
    for c in ('\0'..='\u{2fff}').filter(|&c| drives_terminal(c)) {
        let text = format!("a{c}b");
        let all = [shown(&text), ForeignLines::from(text.as_str()).to_string(), ShownPath(&text).to_string()];
        assert!(all.iter().all(|shown| shown.chars().all(|c| !drives_terminal(c) || "\n\t".contains(c))), "{all:?}");
    }
}

/// A path in an error, or shown by its own `display`, would drive the terminal by a file's name; a file that is opened plainly may be a pipe.
#[test]
fn foreign_paths_are_shown_and_opened_through_their_types() {
    // Each plain opening is of a file of this program's own or of the kernel's.
    const OPENED: [&str; 13] = [
        "crates/ahead/src/files.rs",
        "crates/ahead/src/gpu/assemble.rs",
        "crates/core/src/files.rs",
        "crates/core/src/guardian.rs",
        "crates/core/src/memory.rs",
        "crates/core/src/project.rs",
        "crates/core/src/temporary.rs",
        "crates/pjrt/src/compile_worker.rs",
        "crates/pjrt/src/runtime/plugin.rs",
        "crates/train/src/train/disk.rs",
        "src/cli/document.rs",
        "src/cli/emit/manifest.rs",
        "src/cli/output.rs",
    ];
    let mut files = BTreeMap::new();
    for folder in ["src", "crates", "python/src"] {
        sources(Path::new(folder), &mut files);
    }
    for (file, text) in
        files.iter().filter(|(file, _)| file.contains("src/") && !file.contains("/tests") && !file.contains("testkit"))
    {
        // Tests within a file are of its author's own files.
        let text = text.split("#[cfg(test)]").next().unwrap();
        assert!(!text.contains(".display()"), "{file}: show a path as `ShownPath`");
        let text = text.replace("ProblemFile::open(", "").replace("SafetensorsFile::open(", "");
        let opens = ["File::open(", "fs::read(", "fs::read_to_string("].iter().any(|call| text.contains(call));
        assert!(!opens || OPENED.contains(&file.as_str()), "{file}: read through `assay_core::files`");
        // `thiserror` shows a `PathBuf` by its `display`.
        for error in text.split("thiserror::Error)]").skip(1) {
            let body = error.split("\n}\n").next().unwrap();
            assert!(!body.contains("path: PathBuf"), "{file}: a path in an error is a `ShownPath`");
        }
    }
}

#[test]
fn shape_is_written_as_it_is_read() {
    let shape: HeadShape = "2x16x896x151936".parse().unwrap();
    assert_eq!(shape, HeadShape { batch: 2, tokens: 16, hidden: 896, vocab: 151_936 });
    assert_eq!(shape.to_string(), "2x16x896x151936");
    for wrong in ["2x16x896", "2x0x896x7", "2x16x896x7x1", "2x-1x3x4", ""] {
        assert!(wrong.parse::<HeadShape>().unwrap_err().contains("BxTxHxV"), "{wrong}");
    }
}
