//! What Cargo cannot hold of the walls between the crates: where `unsafe` may stand.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Folders where `unsafe` may stand, each block with its reason: where hardware or a foreign interface is.
const UNSAFE: [&str; 9] = [
    "crates/cuda/examples/fake_cuda.rs",
    "crates/cuda/src/driver",
    "crates/pjrt/examples/fake_tpu.rs",
    "crates/pjrt/src/runtime",
    "crates/simd/src",
    "python/src/memory",
    "python/src/xla",
    // Plugins of tests, and the room that old plugins are given.
    "tests/pjrt/abi.rs",
    "tests/pjrt/runtime.rs",
];

/// This file, which names the word.
const OWN: &str = "tests/project/unsafe_code.rs";

/// `(path, text)` of every source file below `folder`.
pub(super) fn sources(folder: &Path, found: &mut BTreeMap<String, String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.insert(path.to_str().unwrap().to_string(), fs::read_to_string(&path).unwrap());
        }
    }
}

#[test]
fn unsafe_is_only_where_it_may_be_and_gives_its_reason() {
    let mut files = BTreeMap::new();
    for folder in ["benches", "crates", "examples", "fuzz/fuzz_targets", "python/src", "src", "tests"] {
        sources(Path::new(folder), &mut files);
    }
    files.remove(OWN);
    assert!(UNSAFE.iter().all(|folder| files.keys().any(|file| file.starts_with(folder))), "{UNSAFE:?}");
    for (file, text) in files {
        let lines: Vec<&str> = text.lines().collect();
        for (i, line) in lines.iter().enumerate() {
            let code = line.split("//").next().unwrap();
            if !code.split(|c: char| !c.is_alphanumeric() && c != '_' && c != '-').any(|word| word == "unsafe") {
                continue;
            }
            assert!(UNSAFE.iter().any(|layer| file.starts_with(layer)), "{file}:{}: unsafe outside {UNSAFE:?}", i + 1);
            // Attributes may stand between.
            let beside = |line: &&&str| ["//", "#["].iter().any(|start| line.trim_start().starts_with(start));
            let reason = lines[..i].iter().rev().take_while(beside);
            // A block says why it may; a function says what its caller must keep.
            let given = |line: &&str| line.contains("SAFETY:") || line.contains("# Safety");
            assert!(reason.into_iter().any(given), "{file}:{}: no SAFETY reason", i + 1);
        }
    }
}
