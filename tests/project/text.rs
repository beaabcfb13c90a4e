//! Paths, strangers' text and shapes, as they are read and written.

use std::env;
use std::path::Path;

use assay::problem::HeadShape;
use assay_core::project::find;
use assay_core::text::one_line;

#[test]
fn fixtures_outside_the_working_folder_are_found_by_executable() {
    let executable = env::current_exe().unwrap();
    let name = executable.file_name().unwrap();
    assert_eq!(find(name), Ok(executable.clone()));
    assert_eq!(find("Cargo.toml"), Ok("Cargo.toml".into()), "the working directory comes first");
    let looked = find("nowhere").unwrap_err();
    assert!(looked.len() == 5 && looked[0] == Path::new("nowhere"), "{looked:?}");
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
