//! Paths, strangers' text and shapes, as they are read and written.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use assay::problem::HeadShape;
use assay_core::project::{code_folders, find, find_code, in_words};
use assay_core::text::one_line;

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
    assert_eq!(one_line("  two\n\twords \u{1b}[2J"), "two words \\u{1b}[2J");
    assert_eq!(one_line(&"é".repeat(300)), "é".repeat(300));
    assert_eq!(one_line(&"é".repeat(301)), "é".repeat(300) + "…");
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
