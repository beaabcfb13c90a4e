//! What is built with cargo alone, and what a crate stands on.

use assert_cmd::Command;

/// The names of all packages that `arguments` of `cargo tree` come to, those that only tests and build scripts use included
/// where `edges` say so.
fn tree(edges: &str, arguments: &[&str]) -> Vec<String> {
    let fixed = ["tree", "--offline", "--locked", "--prefix", "none", "--format", "{p}", "--edges", edges];
    let mut command = Command::new(env!("CARGO"));
    let output = command.current_dir(env!("CARGO_MANIFEST_DIR")).args(fixed).args(arguments).assert().success();
    let text = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    text.lines().filter_map(|line| Some(line.split_whitespace().next()?.to_string())).collect()
}

fn any<'n>(names: &[String], of: &[&'n str]) -> Vec<&'n str> {
    of.iter().copied().filter(|name| names.iter().any(|held| held == name)).collect()
}

/// What needs libclang or protoc, and what is heavy.
const FOREIGN: [&str; 7] = ["pjrt", "pjrt-sys", "bindgen", "clang-sys", "prost-build", "candle-core", "tokenizers"];

/// `cargo test --no-default-features` at the root is built with cargo alone.
#[test]
fn dependencies_without_features_need_cargo_alone() {
    let names = tree("normal,build,dev", &["--no-default-features", "--workspace"]);
    assert_eq!(any(&names, &FOREIGN), Vec::<&str>::new());
    let names = tree("normal,build,dev", &["--all-features", "--workspace"]);
    assert!(any(&names, &FOREIGN).len() > 5, "else this test shows nothing");
}

/// A program that uses the library alone builds no command line.
#[test]
fn dependencies_of_the_library_alone_have_no_command_line() {
    let of_commands = ["clap", "comfy-table", "ctrlc", "indicatif", "maud", "plotters", "proptest"];
    let library = tree("normal,build", &["--package", "grpo-assay", "--no-default-features"]);
    // The judge's own reports are tables.
    assert_eq!(any(&library, &of_commands), ["comfy-table"]);
    let command = tree("normal,build", &["--package", "grpo-assay", "--no-default-features", "--features", "cli"]);
    assert_eq!(any(&command, &of_commands), of_commands);
}

/// A kernel's bytes are emitted with cargo alone, and the judge knows no kernel.
#[test]
fn dependencies_of_crates_are_those_allowed() {
    let kernels = [
        "assay-native",
        "assay-simd",
        "assay-tile",
        "assay-ptx",
        "assay-programs",
        "assay-algebra",
        "assay-pjrt",
        "assay-cuda",
        "assay-mutants",
    ];
    let judge = tree("normal", &["--package", "assay-judge"]);
    assert_eq!(any(&judge, &["proptest", "toml_edit", "plotters", "clap"]), Vec::<&str>::new());
    assert_eq!(any(&judge, &kernels), Vec::<&str>::new());
    let reference = tree("normal", &["--package", "assay-reference"]);
    let ours: Vec<&String> = reference.iter().filter(|name| name.starts_with("assay-")).collect();
    assert_eq!(ours, ["assay-reference", "assay-core"], "the oracle shares nothing with any kernel");
    let interpreter = tree("normal", &["--package", "assay-mosaic-interpreter"]);
    let ours: Vec<&String> = interpreter.iter().filter(|name| name.starts_with("assay-")).collect();
    assert_eq!(ours, ["assay-mosaic-interpreter", "assay-core"], "nor the interpreter with the emitter");
    let interpreter = tree("normal,dev", &["--package", "assay-ptx-interpreter"]);
    let ours: Vec<&String> = interpreter.iter().filter(|name| name.starts_with("assay-")).collect();
    assert_eq!(ours, ["assay-ptx-interpreter"], "nor that of PTX with anything");
    for package in kernels {
        let names = tree("normal", &["--package", package]);
        assert_eq!(any(&names, &["assay-reference", "assay-judge"]), Vec::<&str>::new(), "{package}");
    }
    let programs = tree("normal,build", &["--package", "assay-programs"]);
    assert_eq!(any(&programs, &[&FOREIGN[..], &["libloading"]].concat()), Vec::<&str>::new());
    for engine in ["assay-campaign", "assay-replay"] {
        let names = tree("normal", &["--package", engine]);
        assert_eq!(any(&names, &["clap"]), Vec::<&str>::new(), "{engine} is asked by commands, and parses nothing");
    }
    let binary = tree("normal", &["--package", "grpo-assay"]);
    let of_tests = ["assay-mosaic-interpreter", "assay-ptx-interpreter", "assay-testkit", "proptest-macro"];
    assert_eq!(any(&binary, &of_tests), Vec::<&str>::new());
}
