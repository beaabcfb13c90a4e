//! Random specs, and recipes for problems in every regime.

use assay::conformance::generate::{Recipe, Regime};
use assay::problem::Dtype;
use assay::spec::{
    AdvantageLevel, Kl, KlEstimator, LossSpec, Objective, OldLogp, PpoClip, Reduction, Rows, TemperatureDivides,
};
use proptest::prelude::*;
use proptest::sample::select;

/// Every option of [`LossSpec`], clip widths and bounds on either side of each other.
pub(crate) fn any_spec() -> impl Strategy<Value = LossSpec> {
    let clip = (0.0..0.9_f64, 0.0..1.5_f64, option(0.5..3.0_f64), option(1.01..4.0_f64)).prop_map(
        |(epsilon_low, epsilon_high, delta, dual_clip)| PpoClip { epsilon_low, epsilon_high, delta, dual_clip },
    );
    let estimator = select(vec![KlEstimator::K1, KlEstimator::K2, KlEstimator::K3, KlEstimator::Abs]);
    let kl = option((0.0..0.5_f64, estimator).prop_map(|(beta, estimator)| Kl::plain(beta, estimator)));
    let reduction = prop_oneof![
        Just(Reduction::TokenMean),
        select(vec![Rows::All, Rows::NonEmpty]).prop_map(|rows| Reduction::SequenceMean { rows }),
        (1..64_usize).prop_map(|max_length| Reduction::FixedLength { rows: Rows::All, length: Some(max_length) }),
        (0.5..500.0_f64).prop_map(Reduction::Normalizer),
    ];
    let temperature = prop_oneof![Just(1.0), 0.3..2.0_f64];
    (
        clip,
        select(vec![AdvantageLevel::Sequence, AdvantageLevel::Token]),
        select(vec![OldLogp::Given, OldLogp::Given, OldLogp::Current]),
        temperature,
        select(vec![TemperatureDivides::Logits, TemperatureDivides::Logits, TemperatureDivides::Logp]),
        kl,
        prop_oneof![Just(0.0), -0.1..0.1_f64],
        reduction,
    )
        .prop_map(|(clip, advantages, old_logp, temperature, temperature_divides, kl, entropy_coef, reduction)| {
            LossSpec {
                objective: Objective::PpoClip(clip),
                advantages,
                old_logp,
                temperature,
                temperature_divides,
                kl,
                entropy_coef,
                reduction,
                ..LossSpec::default()
            }
        })
}

/// Small batches in every regime and dtype; vocabularies of 1, around the tiles of vector units and GPU blocks, and primes.
#[allow(dead_code, reason = "a suite may have shapes of its own")]
pub(crate) fn any_recipe() -> impl Strategy<Value = Recipe> {
    let around_tiles =
        select(vec![8_usize, 16, 32, 64, 128, 256, 1024, 2048]).prop_flat_map(|tile| tile - 1..=tile + 1);
    let vocab = prop_oneof![1..10_usize, around_tiles, select(vec![97_usize, 997, 4099])];
    (
        (1..5_usize, 1..9_usize, vocab),
        select(Dtype::KERNEL.to_vec()),
        select(Regime::ALL.to_vec()),
        any::<u64>(),
        prop_oneof![Just(0.0), 0.01..1.0_f64, Just(5.0), Just(60.0)],
        any::<bool>(),
    )
        .prop_map(|((b, t, v), dtype, regime, seed, old_logp_noise_scale, masked_garbage)| Recipe {
            shape: [b, t, v],
            dtype,
            regime,
            seed,
            old_logp_noise_scale,
            masked_garbage,
        })
}

fn option<S: Strategy>(strategy: S) -> impl Strategy<Value = Option<S::Value>>
where
    S::Value: Clone,
{
    proptest::option::of(strategy)
}
