//! Cases for implementations that compile a program for each shape: few shapes, many problems.

use assay::conformance::cases;
use assay::conformance::generate::{Recipe, Regime};
use assay::problem::Dtype;
use assay::spec::LossSpec;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

/// Tokens and vocabularies that 2, 4 and 8 devices do not divide; the last one leaves some of 8 devices a column less,
/// or none. Eight sequences cut the batch alone, three cut tokens as well.
pub(crate) const SHAPES: [[usize; 3]; 4] = [[2, 5, 131], [8, 2, 37], [3, 9, 1031], [1, 16, 9]];

/// `structures` random specs, each in every regime, on the shapes in turn. A spec is a program to compile, its regimes
/// are problems for it. The same arguments give the same cases.
pub(crate) fn cases(dtype: Dtype, structures: usize, seed: u64) -> Vec<(LossSpec, Recipe)> {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    bytes[8..16].copy_from_slice(&(dtype as u64).to_le_bytes());
    let mut runner = TestRunner::new_with_rng(Config::default(), TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    let random = (cases::any_spec(), cases::any_recipe());
    let mut cases = Vec::new();
    for i in 0..structures {
        let (spec, recipe) = random.new_tree(&mut runner).expect("no filter rejects").current();
        let shape = SHAPES[(i + seed as usize) % SHAPES.len()];
        for (seed, regime) in (recipe.seed..).zip(Regime::ALL) {
            cases.push((spec.clone(), Recipe { shape, dtype, regime, seed, ..recipe.clone() }));
        }
    }
    cases
}
