//! The interpreter of PTX: what it computes, what it refuses, and what it finds.

use proptest::prelude::*;
use proptest::test_runner::RngSeed;

mod arithmetic;
mod rules;
mod small;
mod softmax;
mod text;
mod transactions;

/// `cases` of one seed, unless the environment says another number or seed; what fails is printed, and no file is written.
fn config(cases: u32) -> ProptestConfig {
    let given = |name| std::env::var_os(name).is_some();
    let wanted = ProptestConfig::default();
    ProptestConfig {
        cases: if given("PROPTEST_CASES") { wanted.cases } else { cases },
        rng_seed: if given("PROPTEST_RNG_SEED") { wanted.rng_seed } else { RngSeed::Fixed(29) },
        failure_persistence: None,
        ..wanted
    }
}
