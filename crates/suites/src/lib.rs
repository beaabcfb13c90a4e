//! The cases that implementations are run on, which tests, measurements and counts of false alarms share.

pub mod cases;
pub mod covering;
pub mod differences;
pub mod measure;
#[cfg(feature = "mutants")]
pub mod mutants;
pub mod peers;
pub mod sampler;
pub mod supported;

use proptest::strategy::{BoxedStrategy, Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use assay_core::problem::{Dtype, HeadShape};
use assay_core::spec::LossSpec;
use assay_judge::generate::{HeadRecipe, Recipe, Regime};

/// Seed of the cases on which false alarms are counted, and of those that properties are tried on.
pub const SEED: u64 = 7;

/// Random specs and recipes without end; the same `seed` gives the same ones.
///
/// ```
/// use assay_suites::{SEED, random_cases};
///
/// let (spec, recipe) = random_cases(SEED).next().unwrap();
/// let problem = recipe.problem(&spec).unwrap();
/// assert!(problem.check(&spec).is_ok());
/// assert_eq!(random_cases(SEED).next().unwrap().0, spec);
/// ```
pub fn random_cases(seed: u64) -> impl Iterator<Item = (LossSpec, Recipe)> {
    drawn(rng([seed, 0]), cases::any_recipe())
}

/// Random specs with kept sets and recipes without end; the same `seed` gives the same ones.
///
/// ```
/// use assay_suites::{SEED, kept_cases};
///
/// let (spec, recipe) = kept_cases(SEED).next().unwrap();
/// assert!(recipe.problem(&spec).unwrap().extra.kept_ids.is_some());
/// ```
pub fn kept_cases(seed: u64) -> impl Iterator<Item = (LossSpec, Recipe)> {
    drawn_of(rng([seed, 64]), cases::any_kept_spec(), cases::any_recipe())
}

/// Random divergences from a teacher and recipes without end; the same `seed` gives the same ones.
///
/// ```
/// use assay_suites::{SEED, divergence_cases};
///
/// let (spec, recipe) = divergence_cases(SEED).next().unwrap();
/// assert!(recipe.problem(&spec).unwrap().extra.teacher.is_some());
/// ```
pub fn divergence_cases(seed: u64) -> impl Iterator<Item = (LossSpec, Recipe)> {
    drawn_of(rng([seed, 65]), cases::any_divergence(), cases::any_recipe())
}

/// The random cases that `worst_seen` is measured on.
pub(crate) fn measured_cases() -> impl Iterator<Item = (LossSpec, Recipe)> {
    drawn(TestRng::deterministic_rng(RngAlgorithm::ChaCha), cases::any_recipe())
}

/// The random cases of heads that `worst_seen` is measured on.
pub(crate) fn measured_heads() -> impl Iterator<Item = (LossSpec, HeadRecipe)> {
    drawn(TestRng::deterministic_rng(RngAlgorithm::ChaCha), cases::any_head_recipe())
}

fn rng(seed: [u64; 2]) -> TestRng {
    // A seed is two numbers in the first half of the generator's key: the caller's, and one for each family of cases.
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed[0].to_le_bytes());
    bytes[8..16].copy_from_slice(&seed[1].to_le_bytes());
    TestRng::from_seed(RngAlgorithm::ChaCha, &bytes)
}

fn drawn<R: Strategy>(rng: TestRng, recipe: R) -> impl Iterator<Item = (LossSpec, R::Value)> {
    drawn_of(rng, cases::any_spec(), recipe)
}

fn drawn_of<R: Strategy>(
    rng: TestRng,
    spec: BoxedStrategy<LossSpec>,
    recipe: R,
) -> impl Iterator<Item = (LossSpec, R::Value)> {
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let random = (spec, recipe);
    std::iter::from_fn(move || Some(random.new_tree(&mut runner).expect("no filter rejects").current()))
}

/// Tokens and vocabularies that 2, 4 and 8 devices do not divide; the last one leaves some of 8 devices a column less,
/// or none. Eight sequences cut the batch alone, three cut tokens as well.
pub const DEVICE_SHAPES: [[usize; 3]; 4] = [[2, 5, 131], [8, 2, 37], [3, 9, 1031], [1, 16, 9]];

/// Cases for implementations that compile a program for each shape: few shapes, many problems. `structures` random
/// specs, each in every regime, on [`DEVICE_SHAPES`] in turn: a spec is a program to compile, its regimes are problems
/// for it. The same arguments give the same cases.
///
/// ```
/// use assay_core::problem::Dtype;
/// use assay_judge::generate::Regime;
/// use assay_suites::device_cases;
///
/// // Two specs are two programs to compile, each with a problem in every regime.
/// let cases = device_cases(Dtype::Bf16, 2, 0);
/// assert_eq!(cases.len(), 2 * Regime::FINITE.len());
/// ```
pub fn device_cases(dtype: Dtype, structures: usize, seed: u64) -> Vec<(LossSpec, Recipe)> {
    let mut cases = Vec::new();
    for (i, (spec, recipe)) in drawn(rng([seed, dtype as u64]), cases::any_recipe()).take(structures).enumerate() {
        // The shapes rotate by the seed as well, so that different seeds pair one spec with different shapes.
        let shape = DEVICE_SHAPES[(i + seed as usize) % DEVICE_SHAPES.len()];
        for (seed, regime) in (recipe.seed..).zip(Regime::FINITE) {
            cases.push((spec.clone(), Recipe { shape, dtype, regime, seed, ..recipe.clone() }));
        }
    }
    cases
}

/// Extents of heads that 2, 4 and 8 devices do not divide; the last one leaves some of 8 devices no row of `dlm_head`.
pub const DEVICE_HEADS: [HeadShape; 4] = {
    const fn shape([batch, tokens, hidden, vocab]: [usize; 4]) -> HeadShape {
        HeadShape { batch, tokens, hidden, vocab }
    }
    [shape([2, 5, 33, 131]), shape([8, 2, 16, 37]), shape([3, 9, 65, 1031]), shape([1, 16, 5, 9])]
};

/// [`device_cases`] for heads, in every regime that a product has. Layout and rounding are drawn with the spec.
///
/// ```
/// use assay_core::problem::Dtype;
/// use assay_suites::{DEVICE_HEADS, device_heads};
///
/// let cases = device_heads(Dtype::F32, 1, 0);
/// assert!(cases.iter().all(|(_, head)| head.hidden == DEVICE_HEADS[0].hidden));
/// ```
pub fn device_heads(dtype: Dtype, structures: usize, seed: u64) -> Vec<(LossSpec, HeadRecipe)> {
    let mut cases = Vec::new();
    let drawn = drawn(rng([seed, 16 + dtype as u64]), cases::any_head_recipe()).take(structures);
    for (i, (spec, HeadRecipe { layout, rounds_logits, recipe, .. })) in drawn.enumerate() {
        let HeadShape { batch, tokens, hidden, vocab } = DEVICE_HEADS[(i + seed as usize) % DEVICE_HEADS.len()];
        for (seed, regime) in (recipe.seed..).zip(Regime::FINITE.into_iter().filter(|regime| !regime.has_holes())) {
            let recipe = Recipe { shape: [batch, tokens, vocab], dtype, regime, seed, ..recipe.clone() };
            cases.push((spec.clone(), HeadRecipe { hidden, layout, rounds_logits, recipe }));
        }
    }
    cases
}
