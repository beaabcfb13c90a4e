//! Nothing escapes the property suites: every arm of a spec, every implementation, output, dtype and regime is exercised,
//! and every file under `fixtures/` is opened.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use assay::fixture::manifest_files;
use assay::judge::generate::Recipe;
use assay::judge::variants::variants;
use assay::problem::Dtype;
use assay::registry::{find, head_registry, registry};
use assay::spec::LossSpec;
use assay::suites;
use assay::suites::cases::head_recipe;
use assay_testkit::JudgedProblem;
use assay_testkit::arms::Arms;

/// The seed and number of cases of `make test-extensive`.
const SEED: u64 = suites::SEED;
const CASES: usize = 10_000;

fn drawn() -> Vec<(LossSpec, Recipe)> {
    // Kept sets, which one kernel takes, are drawn by `kept_any_spec_matches_reference`, and teachers by
    // `divergence_is_right_at_grade_exact`.
    let of_one_kernel = suites::kept_cases(SEED).take(100).chain(suites::divergence_cases(SEED).take(100));
    suites::random_cases(SEED).take(CASES).chain(of_one_kernel).collect()
}

#[test]
fn coverage_every_arm_of_a_spec_is_a_named_variant() {
    let all = variants();
    let named = Arms::from_specs(all.iter().map(|variant| &variant.spec));
    assert_eq!(named.missing(), Vec::<&String>::new());
}

#[test]
fn coverage_every_arm_that_a_kernel_computes_is_drawn() {
    let native = find("native", None).unwrap();
    let shape = "4x6x33".parse().unwrap();
    let all = variants();
    let computed = all.iter().filter(|variant| native.supports(&variant.spec, shape, Dtype::F32, 1).is_ok());
    let computed = Arms::from_specs(computed.map(|variant| &variant.spec));
    let drawn = drawn();
    let drawn = Arms::from_specs(drawn.iter().map(|(spec, _)| spec));
    assert_eq!(drawn.missing_of(&computed), Vec::<&String>::new());
    // No kernel has a choice over the whole batch: all else is drawn.
    let rest: BTreeSet<&str> = drawn.missing().iter().map(|arm| arm.as_str()).collect();
    let choices = ["clip_cov.selection: given", "kl_cov.selection: given", "top_entropy: given"];
    assert_eq!(rest, choices.into());
}

#[test]
fn coverage_every_regime_and_kernel_dtype_is_drawn() {
    let mut arms = Arms::default();
    for (_, recipe) in &drawn() {
        arms.recipe(recipe);
    }
    // Kernels read no f64; `dtype_f64_logits_are_refused_by_name`. Not every loss is finite where a logp is −∞:
    // `target_at_minus_infinity_matches_reference` has those that are.
    // The campaign's deck deals what is far above all else, `deck_covers_each_feature_twice_in_two_regimes_and_each_dtype`.
    assert_eq!(arms.missing(), ["dtype: f64", "regime: far_column", "regime: target_holes"]);
}

#[test]
fn coverage_every_output_is_judged() {
    let mut arms = Arms::default();
    let native = find("native", None).unwrap();
    for (spec, recipe) in drawn().into_iter().take(100) {
        let problem = recipe.problem(&spec).unwrap();
        let judged = JudgedProblem::new(&spec, &problem).unwrap().run(&*native, 1).unwrap();
        for verdict in &judged.verdicts {
            arms.gate(verdict.gate);
        }
    }
    let spec = LossSpec::default();
    let problem = head_recipe("2x3x4x5".parse().unwrap()).problem(&spec).unwrap();
    let known = JudgedProblem::new(&spec, &problem).unwrap();
    for head in assay::registry::immediate_heads() {
        for verdict in known.run(&*head, 1).unwrap().verdicts {
            arms.gate(verdict.gate);
        }
    }
    // Recorded scalars are compared by `assay replay`; `replay_of_a_changed_recorded_scalar_fails`.
    assert_eq!(arms.missing(), ["output: recorded"]);
}

#[test]
fn coverage_every_implementation_is_in_one_property_suite() {
    let ids = |all: Vec<std::sync::Arc<dyn assay::implementation::Implementation>>| -> Vec<String> {
        all.iter().map(|implementation| implementation.id().into()).collect()
    };
    let compiled = ids(assay::registry::compiled(Path::new("nowhere.so")));
    let mut in_suites = [ids(assay::registry::immediate()), compiled].concat();
    let mut registered = ids(registry(None));
    in_suites.sort();
    registered.sort();
    assert_eq!(in_suites, registered);
    let heads =
        assay::registry::immediate_heads().into_iter().chain(assay::registry::compiled_heads(Path::new("nowhere.so")));
    let mut heads: Vec<String> = heads.map(|head| head.id().into()).collect();
    let mut registered: Vec<String> = head_registry(None).iter().map(|head| head.id().into()).collect();
    heads.sort();
    registered.sort();
    assert_eq!(heads, registered);
}

#[test]
fn coverage_names_a_choice_that_nobody_makes() {
    let mut specs: Vec<LossSpec> = variants().into_iter().map(|variant| variant.spec).collect();
    specs.retain(|spec| spec.kl.as_ref().is_none_or(|kl| kl.estimator != assay::spec::KlEstimator::Abs));
    assert_eq!(Arms::from_specs(&specs).missing(), ["kl.estimator: abs"]);
}

/// What is written for people.
const DOCUMENTS: [&str; 22] = [
    "LICENSE-Apache-2.0.txt",
    "LICENSE-GSM8K.txt",
    "README.md",
    // How samplers' numbers were made.
    "agreement/record/samplers.py",
    "peers/README.md",
    // How runs of other projects were made.
    "peers/record/archer.py",
    "peers/record/areal.py",
    "peers/record/axolotl.py",
    "peers/record/batch.py",
    "peers/record/cross_entropy.py",
    "peers/record/divergence.py",
    "peers/record/fast_llm.py",
    "peers/record/prime_rl.py",
    "peers/record/rl_kernel.py",
    "peers/record/roll.py",
    "peers/record/torchtitan.py",
    "peers/record/trinity_rft.py",
    "peers/record/trl_rloo.py",
    "peers/record/verl_bypass.py",
    "peers/record/verl_temperatures.py",
    "tpu/README.md",
    // How the `pallas_*` files were made.
    "tpu/pallas.py",
];

/// Folders of which a test opens every file of one kind.
const WALKED: [(&str, &str, &str); 4] = [
    ("panel", "safetensors", "tests/project/panel.rs"),
    ("peers", "json", "tests/commands/peers.rs"),
    ("regressions", "yaml", "tests/commands/regressions.rs"),
    ("regressions/devices", "yaml", "tests/devices/main.rs"),
];

/// The files below `folder`, as paths from `root`.
fn files(root: &Path, folder: &Path, found: &mut Vec<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(root, &path, found);
        } else {
            found.push(path.strip_prefix(root).unwrap().to_str().unwrap().into());
        }
    }
}

fn below(folder: &str) -> Vec<String> {
    let mut found = Vec::new();
    files(Path::new(folder), Path::new(folder), &mut found);
    found.sort();
    found
}

/// `path` without its comments.
fn code(path: &str) -> String {
    let text = fs::read_to_string(path).unwrap();
    text.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

/// What could open a fixture: the code of tests and of the crate, this file left out, and the manifests of exported
/// programs.
fn openers() -> Vec<String> {
    let within = |folder: &'static str, extension: &'static str| {
        let of_kind = below(folder).into_iter().filter(move |path| path.ends_with(extension));
        of_kind.map(move |path| format!("{folder}/{path}")).filter(|path| path != "tests/project/coverage.rs")
    };
    let all = within("tests", ".rs")
        .chain(within("src", ".rs"))
        .chain(within("crates", ".rs"))
        .chain(within("fixtures/exported", ".toml"));
    all.map(|path| code(&path)).collect()
}

/// Whether `code` names the fixture in a literal: its file name, or a path that ends with it; or a path with one
/// placeholder, and what stands for that in another literal.
fn names(code: &str, fixture: &str) -> bool {
    let name = fixture.rsplit('/').next().unwrap();
    let templates = code.split("fixtures/").skip(1).filter_map(|rest| rest.split('"').next()?.split_once('{'));
    let filled = |(before, rest): (&str, &str)| {
        let (_, after) = rest.split_once('}')?;
        fixture.strip_prefix(before)?.strip_suffix(after)
    };
    let literal = |text: &str| code.contains(&format!("\"{text}\""));
    literal(name) || code.contains(&format!("/{name}\"")) || templates.filter_map(filled).any(literal)
}

fn walked(fixture: &str) -> bool {
    let (folder, name) = fixture.rsplit_once('/').unwrap_or(("", fixture));
    WALKED.iter().any(|(walked, extension, _)| folder == *walked && name.ends_with(&format!(".{extension}")))
}

fn unopened(fixtures: &[String]) -> Vec<&String> {
    let openers = openers();
    let opened = |fixture: &str| {
        DOCUMENTS.contains(&fixture) || walked(fixture) || openers.iter().any(|code| names(code, fixture))
    };
    fixtures.iter().filter(|fixture| !opened(fixture)).collect()
}

#[test]
fn fixtures_are_all_opened() {
    assert_eq!(unopened(&below("fixtures")), Vec::<&String>::new());
    for (folder, _, test) in WALKED {
        let code = code(test);
        assert!(code.contains(&format!("\"fixtures/{folder}\"")) && code.contains("read_dir"), "{test}: {folder}");
    }
    for document in DOCUMENTS {
        assert!(Path::new("fixtures").join(document).is_file(), "{document} is gone");
    }
}

#[test]
fn fixture_that_nobody_opens_is_named() {
    let stray = ["tpu/golden.other.mlir", "peers/notes.txt", "exported/grpo_f64.mlir", "new/other.yaml"];
    let stray = stray.map(String::from);
    assert_eq!(unopened(&stray), stray.iter().collect::<Vec<_>>());
}

#[test]
fn fixture_batches_are_all_evaluated_by_replay() {
    let listed: Vec<_> = manifest_files("fixtures").unwrap();
    let recorded = below("fixtures").into_iter().filter(|path| path.ends_with(".safetensors") && !walked(path));
    // Samplers' log-probabilities are of the recorded batches, and no batches themselves.
    let recorded = recorded.filter(|path| path != "agreement/samplers.safetensors");
    let recorded: Vec<_> = recorded.map(|path| Path::new("fixtures").join(path)).collect();
    assert_eq!(BTreeSet::from_iter(listed), BTreeSet::from_iter(recorded));
}

#[test]
fn covering_specs_of_all_that_kernels_compute_are_valid() {
    // An implementation that refuses nothing gets every objective.
    let covered = [suites::covering::pairs(&|_, _| true), suites::covering::choices(&|_, _| true)].concat();
    let refused: Vec<_> = covered.iter().filter_map(|spec| Some((spec.check().err()?, spec))).collect();
    assert!(
        !covered.is_empty() && refused.is_empty(),
        "{} of {}: {:#?}",
        refused.len(),
        covered.len(),
        refused.first()
    );
}
