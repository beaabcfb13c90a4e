//! Who may see whom: DESIGN's import rules, read off the sources.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// What each layer may name of the crate, besides itself.
const ALLOWED: [(&str, &[&str]); 25] = [
    ("spec", &[]),
    ("problem", &["spec"]),
    // The oracle shares nothing with any kernel.
    ("reference", &["spec", "problem"]),
    ("kernels", &["spec", "problem", "element", "tile"]),
    ("native", &["spec", "problem", "implementation", "kernels"]),
    ("bandwidth", &["problem"]),
    ("products", &["problem", "native"]),
    ("element", &["problem"]),
    ("stablehlo", &["element"]),
    ("tile", &["element", "stablehlo"]),
    ("memory", &[]),
    ("runtime", &["element", "memory"]),
    ("xla", &["spec", "problem", "implementation", "kernels", "stablehlo", "tile", "element", "memory", "runtime"]),
    // The interpreter checks what an emitter wrote, and shares nothing with it.
    ("tpu", &["problem", "element", "memory", "runtime"]),
    ("exported", &["spec", "problem", "implementation", "element", "runtime"]),
    ("implementation", &["spec", "problem", "memory"]),
    ("registry", &["problem", "implementation", "native", "xla", "exported"]),
    ("fixture", &["spec", "problem"]),
    ("checkpoint", &["problem", "fixture"]),
    ("train", &["spec", "problem", "implementation", "registry", "native", "memory", "fixture", "checkpoint"]),
    ("record", &["spec", "problem", "fixture", "checkpoint", "train"]),
    // Of other commands it knows their JSON alone.
    ("report", &[]),
    ("conformance", &["spec", "problem", "reference", "implementation", "registry"]),
    (
        "cli",
        &[
            "spec",
            "problem",
            "reference",
            "implementation",
            "registry",
            "bandwidth",
            "products",
            "memory",
            "runtime",
            "xla",
            "tpu",
            "train",
            "conformance",
            "fixture",
            "record",
            "report",
        ],
    ),
    ("main", &["cli", "runtime"]),
];

/// Layers where `unsafe` may stand, each block with its reason.
const UNSAFE: [&str; 2] = ["runtime", "native/simd"];

/// `(path below src, text)` of every source file.
fn sources(folder: &Path, found: &mut BTreeMap<String, String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else {
            let name = path.strip_prefix("src").unwrap().to_str().unwrap().to_string();
            found.insert(name, fs::read_to_string(&path).unwrap());
        }
    }
}

fn all_sources() -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    sources(Path::new("src"), &mut found);
    found
}

fn layer_of(file: &str) -> &str {
    file.split(['/', '.']).next().unwrap()
}

/// The layers that `text` names as `crate::layer`, outside comments.
fn named(text: &str) -> Vec<&str> {
    let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    let paths = code.flat_map(|line| ["crate::", "assay::"].into_iter().flat_map(|root| line.split(root).skip(1)));
    paths.map(|rest| rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap()).collect()
}

#[test]
fn layers_name_only_what_they_may() {
    for (file, text) in all_sources() {
        let layer = layer_of(&file);
        if layer == "lib" {
            continue;
        }
        let Some((_, allowed)) = ALLOWED.iter().find(|(name, _)| *name == layer) else {
            panic!("src/{file}: layer `{layer}` has no import rule in tests/project/layering.rs");
        };
        for name in named(&text) {
            assert!(name == layer || allowed.contains(&name), "src/{file}: `{layer}` may not see `{name}`");
        }
    }
}

#[test]
fn names_are_found_in_code_and_not_in_comments() {
    let text = "//! [`crate::reference`]\nuse crate::native::Native;\n    /// see crate::cli\nlet x = crate::fixture::persist();";
    assert_eq!(named(text), ["native", "fixture"]);
}

#[test]
fn unsafe_stands_only_where_it_may_and_gives_its_reason() {
    for (file, text) in all_sources() {
        let lines: Vec<&str> = text.lines().collect();
        for (i, line) in lines.iter().enumerate() {
            let code = line.split("//").next().unwrap();
            if !code.split(|c: char| !c.is_alphanumeric() && c != '_' && c != '-').any(|word| word == "unsafe") {
                continue;
            }
            assert!(
                UNSAFE.iter().any(|layer| file.starts_with(layer)),
                "src/{file}:{}: unsafe outside {UNSAFE:?}",
                i + 1
            );
            // Attributes may stand between.
            let beside = |line: &&&str| ["//", "#["].iter().any(|start| line.trim_start().starts_with(start));
            let reason = lines[..i].iter().rev().take_while(beside);
            // A block says why it may; a function says what its caller must keep.
            let given = |line: &&str| line.contains("SAFETY:") || line.contains("# Safety");
            assert!(reason.into_iter().any(given), "src/{file}:{}: no SAFETY reason", i + 1);
        }
    }
}
