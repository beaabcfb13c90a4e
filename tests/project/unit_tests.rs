//! Unit tests are run: a crate that has some has no `test = false`.

use std::fs;
use std::path::{Path, PathBuf};

/// Whether a file below `folder` has unit tests.
fn has_unit_tests(folder: &Path) -> bool {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).any(|path| {
        if path.is_dir() { has_unit_tests(&path) } else { fs::read_to_string(&path).unwrap().contains("#[cfg(test)]") }
    })
}

#[test]
fn unit_tests_are_left_out_by_no_crate() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates");
    let (mut tested, mut left_out) = (0, vec![]);
    for folder in fs::read_dir(crates).unwrap().map(|entry| entry.unwrap().path()) {
        let manifest = fs::read_to_string(folder.join("Cargo.toml")).unwrap();
        if has_unit_tests(&folder.join("src")) {
            tested += 1;
            if manifest.lines().any(|line| line == "test = false") {
                left_out.push(folder);
            }
        }
    }
    assert!(tested > 3, "else this test shows nothing");
    assert_eq!(left_out, Vec::<PathBuf>::new());
}
