//! [`variants`]: every named choice of a spec, each in a spec that is otherwise plain.
//!
//! They are the lines of the table of supported options, and the specs that a suite runs one by one.
//!
//! ```
//! let all = assay_judge::variants::variants();
//! assert!(all.iter().any(|variant| (variant.field, variant.choice) == ("logits", "softcap")));
//! assert!(all.iter().all(|variant| variant.spec.check().is_ok()));
//! ```

use super::generate::{Recipe, Regime};
use assay_core::problem::Dtype;
use assay_core::spec::{
    AdvantageLevel, Aspo, Averaging, Cispo, ClipCov, ClipWidths, CovarianceBand, Distillation, DistillationKind,
    Divergence, Dro, DroppedTerm, ImportanceSampling, KeptSupport, Kl, KlCov, KlEstimator, KlGradient, KlImportance,
    LogClip, LogitsTransform, LossSpec, LossTerms, MaskedRatio, Objective, OffPolicyMask, OldLogp, OutOfBounds,
    PositiveTokens, PpoClip, QuantilePrecision, Ratio, RatioLevel, Reduction, Rejection, RejectionEstimator,
    RejectionLevel, RolloutLevel, RolloutSource, RolloutWeights, Rows, Sapo, SoftmaxRange, Support, Temperature,
    TemperatureDivides, TokenWeights, TopCovariance, TopEntropy, TopKRest, Topr, TrustRegion, UnscoredWeight, Vespo,
};

/// A named choice of one field of a spec.
#[derive(Clone, Debug)]
pub struct Variant {
    /// The field of the spec that the choice is made in.
    pub field: &'static str,
    /// The choice as a file spells it.
    pub choice: &'static str,
    /// A spec that makes the choice, and is plain otherwise.
    pub spec: LossSpec,
}

/// Lists all variants, by field.
pub fn variants() -> Vec<Variant> {
    let of = |field: &'static str, choices: Vec<(&'static str, LossSpec)>| {
        choices.into_iter().map(move |(choice, spec)| Variant { field, choice, spec })
    };
    let mut all = Vec::new();
    all.extend(of("objective", objectives()));
    all.extend(of("ratio", ratios()));
    all.extend(of("old_logp", old_logps()));
    all.extend(of("advantages", vec![("token", LossSpec { advantages: AdvantageLevel::Token, ..plain() })]));
    all.extend(of("temperature", temperatures()));
    all.extend(of("kl", kls()));
    all.extend(of("entropy", entropies()));
    all.extend(of("rollout", rollouts()));
    all.extend(of("rejection", rejections()));
    all.extend(of("token_weights", token_weights()));
    all.extend(of("masks", masks()));
    all.extend(of("reduction", reductions()));
    all.extend(of("logits", logits()));
    all.extend(of("support", supports()));
    // New variants come last: a variant's problems are drawn from its number.
    all.extend(of(
        "ids_per_token",
        vec![(
            "logp of three ids, by its cotangents",
            LossSpec { ids_per_token: 3, ..LossSpec::from_cotangents(false) },
        )],
    ));
    let widths = ClipWidths { epsilon_low: 0.05, epsilon_high: 0.4 };
    let objective = Objective::Aspo(aspo(Some(widths)));
    all.extend(of("objective", vec![("aspo, selected", LossSpec { objective, ..plain() })]));
    all.extend(of("support", kept_sets()));
    all.extend(of("objective", distillations()));
    all
}

/// The extents `[B,T,V]` of a variant's problems: sequences of several lengths, most likely an empty one among them.
pub const SHAPE: [usize; 3] = [4, 6, 33];

/// Returns the recipe of the `step`th problem for the `variant`th variant: one dtype, and another regime at every step.
pub fn recipe(variant: usize, step: usize) -> Recipe {
    Recipe {
        shape: SHAPE,
        dtype: Dtype::KERNEL[variant % Dtype::KERNEL.len()],
        regime: Regime::FINITE[(variant + step) % Regime::FINITE.len()],
        seed: (variant + 10 * step) as u64,
        old_logp_noise_scale: 0.3,
        masked_garbage: true,
    }
}

fn plain() -> LossSpec {
    LossSpec::default()
}

fn aspo(selected: Option<ClipWidths>) -> Aspo {
    Aspo { selected, dual_clip_positive: 1.3, dual_clip_negative: 1.4, ..Aspo::default() }
}

fn objectives() -> Vec<(&'static str, LossSpec)> {
    let of = |objective| LossSpec { objective, ..plain() };
    let clip = |clip| of(Objective::PpoClip(clip));
    let region = TrustRegion {
        divergence: Divergence::TotalVariation,
        low: 0.002,
        high: 0.003,
        two_sided: false,
        truncate: None,
        penalty: 0.0,
    };
    let trust = |region| of(Objective::TrustRegion(region));
    let sampling = |empty_rows| of(Objective::ImportanceSampling(ImportanceSampling { empty_rows }));
    let gmpo = |spec| LossSpec {
        ratio: Ratio { level: RatioLevel::Sequence, ..Ratio::default() },
        reduction: Reduction::SequenceMean { rows: Rows::All },
        ..spec
    };
    let kl_cov = |selection| of(Objective::KlCov(KlCov { coefficient: 0.5, selection }));
    let clip_cov = |selection| of(Objective::ClipCov(ClipCov { clip: PpoClip::default(), selection }));
    let topr = |positive| of(Objective::Topr(Topr { negative_weight: 0.8, positive, ..Topr::default() }));
    let band = CovarianceBand { fraction: 0.9, lower: 1.0, upper: 5.0 };
    vec![
        ("ppo_clip", plain()),
        ("ppo_clip, delta", clip(PpoClip { delta: Some(1.1), ..PpoClip::default() })),
        ("ppo_clip, dual_clip", clip(PpoClip { dual_clip: Some(1.3), ..PpoClip::default() })),
        ("cispo", of(Objective::Cispo(Cispo { lower: Some(0.8), upper: 1.3 }))),
        ("cispo, no lower bound", of(Objective::Cispo(Cispo { lower: None, upper: 5.0 }))),
        ("sapo", of(Objective::Sapo(Sapo::default()))),
        ("vespo", of(Objective::Vespo(Vespo::default()))),
        ("policy_gradient", of(Objective::PolicyGradient)),
        ("importance_sampling", sampling(false)),
        ("importance_sampling, empty_rows", gmpo(sampling(true))),
        ("masked_ratio", of(Objective::MaskedRatio(MaskedRatio { lower: 0.8, upper: 1.2, surrogate: false }))),
        (
            "masked_ratio, surrogate",
            of(Objective::MaskedRatio(MaskedRatio { lower: 0.8, upper: 1.2, surrogate: true })),
        ),
        ("trust_region, total_variation", trust(region.clone())),
        ("trust_region, binary_kl", trust(TrustRegion { divergence: Divergence::BinaryKl, ..region.clone() })),
        ("trust_region, two_sided", trust(TrustRegion { two_sided: true, ..region.clone() })),
        ("trust_region, truncate", trust(TrustRegion { truncate: Some(1.2), ..region.clone() })),
        ("trust_region, penalty", trust(TrustRegion { penalty: 0.1, ..region })),
        ("dro", of(Objective::Dro(Dro { beta: 0.3 }))),
        ("kl_cov, selected given", kl_cov(None)),
        ("kl_cov, selection", kl_cov(Some(TopCovariance { fraction: 0.2 }))),
        ("clip_cov, selected given", clip_cov(None)),
        ("clip_cov, selection", clip_cov(Some(band))),
        ("topr", topr(PositiveTokens::Advantage)),
        ("topr, positive: selected", topr(PositiveTokens::Selected)),
        ("aspo", of(Objective::Aspo(aspo(None)))),
        ("cross_entropy", LossSpec::cross_entropy(0.0, 0.0)),
        ("cross_entropy, label_smoothing", LossSpec::cross_entropy(0.1, 0.0)),
        ("cross_entropy, z_loss", LossSpec::cross_entropy(0.0, 0.01)),
        ("none", LossSpec { kl: Some(Kl::plain(0.1, KlEstimator::K3)), ..of(Objective::None) }),
    ]
}

fn distillations() -> Vec<(&'static str, LossSpec)> {
    let of = LossSpec::distillation;
    let top = |rest| of(Distillation { top_k: Some(8), rest: Some(rest), ..Distillation::default() });
    let squared = Distillation { temperature_squared: true, ..Distillation::default() };
    vec![
        ("distillation, forward_kl", of(Distillation::default())),
        ("distillation, reverse_kl", of(Distillation::reverse_kl())),
        (
            "distillation, jensen_shannon",
            of(Distillation { kind: DistillationKind::JensenShannon, ..Distillation::default() }),
        ),
        ("distillation, beta", of(Distillation::jensen_shannon(0.1))),
        ("distillation, temperature_squared", LossSpec { temperature: 2.0.into(), ..of(squared) }),
        ("distillation, rest: tail", top(TopKRest::Tail)),
        ("distillation, rest: renormalized", top(TopKRest::Renormalized)),
        ("distillation, rest: ignored", top(TopKRest::Ignored)),
    ]
}

fn ratios() -> Vec<(&'static str, LossSpec)> {
    let with = |ratio| LossSpec { ratio, ..plain() };
    let sequence = || Ratio { level: RatioLevel::Sequence, ..Ratio::default() };
    let product = || Ratio { level: RatioLevel::SequenceProduct, ..Ratio::default() };
    let clip = Some(LogClip { low: 0.2, high: 0.1 });
    vec![
        ("level: sequence", with(sequence())),
        // Where no token is held, its gradient is that of a token's ratio; where all of a row have one advantage, that of the row's.
        (
            "level: sequence_token",
            LossSpec {
                advantages: AdvantageLevel::Token,
                ..with(Ratio { level: RatioLevel::SequenceToken, clamp: Some(0.25), ..Ratio::default() })
            },
        ),
        ("level: sequence_product", with(product())),
        ("clamp, sequence_product", with(Ratio { clamp: Some(0.25), ..product() })),
        ("clamp", with(Ratio { clamp: Some(0.25), ..Ratio::default() })),
        (
            "clip, sequence",
            LossSpec {
                ratio: Ratio { clip, ..sequence() },
                objective: Objective::ImportanceSampling(ImportanceSampling::default()),
                ..plain()
            },
        ),
        ("clip, token", with(Ratio { clip, ..Ratio::default() })),
        ("cap", with(Ratio { cap: Some(0.1), ..Ratio::default() })),
        ("cap, straight_through", with(Ratio { cap: Some(0.1), straight_through: true, ..Ratio::default() })),
        ("denominator_epsilon", with(Ratio { denominator_epsilon: 0.5, ..sequence() })),
    ]
}

fn old_logps() -> Vec<(&'static str, LossSpec)> {
    let from = |old_logp| LossSpec { old_logp, ..plain() };
    vec![("given", plain()), ("current", from(OldLogp::Current)), ("rollout", from(OldLogp::Rollout))]
}

fn temperatures() -> Vec<(&'static str, LossSpec)> {
    let of = |temperature_divides| LossSpec { temperature: 0.7.into(), temperature_divides, ..plain() };
    vec![
        ("divides logits", of(TemperatureDivides::Logits)),
        ("divides logp", of(TemperatureDivides::Logp)),
        ("given", LossSpec { temperature: Temperature::Given, ..plain() }),
    ]
}

fn kls() -> Vec<(&'static str, LossSpec)> {
    let with = |kl| LossSpec { kl: Some(kl), ..plain() };
    let k3 = || Kl::plain(0.1, KlEstimator::K3);
    let corrected = || Kl { importance: KlImportance::Ratio, ..k3() };
    let of_rows = Averaging { reduction: Reduction::SequenceMean { rows: Rows::All }, denominator_epsilon: 0.0 };
    vec![
        ("estimator: k1", with(Kl::plain(0.1, KlEstimator::K1))),
        ("estimator: k2", with(Kl::plain(0.1, KlEstimator::K2))),
        ("estimator: k3", with(k3())),
        ("estimator: abs", with(Kl::plain(0.1, KlEstimator::Abs))),
        ("gradient: k2", with(Kl { gradient: KlGradient::K2, ..k3() })),
        ("importance: ratio", with(corrected())),
        (
            "importance: ratio, sequence",
            LossSpec { ratio: Ratio { level: RatioLevel::Sequence, ..Ratio::default() }, ..with(corrected()) },
        ),
        ("gradient: k2_weighted", with(Kl { gradient: KlGradient::K2Weighted(1.1), ..k3() })),
        (
            "importance: token_ratio, sequence",
            LossSpec {
                ratio: Ratio { level: RatioLevel::Sequence, ..Ratio::default() },
                ..with(Kl { importance: KlImportance::TokenRatio, ..k3() })
            },
        ),
        ("importance: rollout", with(Kl { importance: KlImportance::Rollout, ..k3() })),
        ("importance: score", with(Kl { importance: KlImportance::Score, ..k3() })),
        ("difference_clamp", with(Kl { difference_clamp: Some(0.2), ..k3() })),
        ("value_clamp", with(Kl { value_clamp: Some(0.02), ..k3() })),
        (
            "value_clamp, clamp_after_importance",
            with(Kl { value_clamp: Some(0.02), clamp_after_importance: true, ..corrected() }),
        ),
        ("averaging", with(Kl { averaging: Some(of_rows), ..k3() })),
    ]
}

fn entropies() -> Vec<(&'static str, LossSpec)> {
    let with = |entropy_averaging| LossSpec { entropy_coef: 0.01, entropy_averaging, ..plain() };
    let of = |reduction| Some(Averaging { reduction, denominator_epsilon: 1e-8 });
    vec![
        ("entropy_coef", with(None)),
        ("entropy_averaging: sequence_mean", with(of(Reduction::SequenceMean { rows: Rows::NonEmpty }))),
        ("entropy_averaging: sequence_sum", with(of(Reduction::SequenceSum { rows: Rows::All }))),
        ("dentropy", LossSpec { dentropy: true, ..plain() }),
        ("logp, by its cotangents", LossSpec { temperature: 0.7.into(), ..LossSpec::from_cotangents(false) }),
        (
            "logp and entropy, by their cotangents",
            LossSpec { temperature: 0.7.into(), ..LossSpec::from_cotangents(true) },
        ),
    ]
}

fn rollouts() -> Vec<(&'static str, LossSpec)> {
    let from = |source, level| RolloutWeights {
        source,
        level,
        outside: OutOfBounds::Truncate,
        min: None,
        max: Some(1.1),
        clamp: None,
        normalize: false,
        unscored: UnscoredWeight::One,
        applies_to: LossTerms::Policy,
    };
    let k3 = || Some(Kl::plain(0.1, KlEstimator::K3));
    let with = |rollout| LossSpec { rollout: Some(rollout), kl: k3(), ..plain() };
    let of_logp = |level| from(RolloutSource::Logp, level);
    let token = || of_logp(RolloutLevel::Token);
    let given = |level| RolloutWeights { max: None, ..from(RolloutSource::Given, level) };
    let vespo = |weights_of_masked_tokens| Objective::Vespo(Vespo { weights_of_masked_tokens, ..Vespo::default() });
    vec![
        ("given, token", with(given(RolloutLevel::Token))),
        ("given, geometric", with(given(RolloutLevel::Geometric))),
        ("token, truncate", with(token())),
        ("token, mask", with(RolloutWeights { outside: OutOfBounds::Mask, min: Some(0.9), ..token() })),
        ("sequence, mask", with(RolloutWeights { outside: OutOfBounds::Mask, ..of_logp(RolloutLevel::Sequence) })),
        ("geometric", with(of_logp(RolloutLevel::Geometric))),
        (
            "token_gated_by_geometric",
            with(RolloutWeights { min: Some(0.9), ..of_logp(RolloutLevel::TokenGatedByGeometric) }),
        ),
        ("clamp", with(RolloutWeights { clamp: Some(0.05), ..token() })),
        ("normalize", with(RolloutWeights { normalize: true, ..token() })),
        ("unscored: zero", with(RolloutWeights { unscored: UnscoredWeight::Zero, ..of_logp(RolloutLevel::Sequence) })),
        ("applies_to: policy_and_kl", with(RolloutWeights { applies_to: LossTerms::PolicyAndKl, ..token() })),
        (
            "within a sequence's ratio",
            LossSpec { ratio: Ratio { level: RatioLevel::Sequence, ..Ratio::default() }, ..with(token()) },
        ),
        ("within vespo", LossSpec { objective: vespo(false), ..with(token()) }),
        (
            "within vespo, weights_of_masked_tokens",
            LossSpec { objective: vespo(true), ..with(given(RolloutLevel::Token)) },
        ),
    ]
}

fn rejections() -> Vec<(&'static str, LossSpec)> {
    let with =
        |rejection| LossSpec { rejection: vec![rejection], kl: Some(Kl::plain(0.1, KlEstimator::K3)), ..plain() };
    let of = |level, max| Rejection {
        estimator: RejectionEstimator::K2,
        level,
        min: None,
        max,
        counts: false,
        drops_from: LossTerms::PolicyAndKl,
    };
    let token = || of(RejectionLevel::Token, 0.03);
    let estimated = |estimator, max| Rejection { estimator, ..of(RejectionLevel::Token, max) };
    vec![
        ("token", with(token())),
        ("token, k1", with(Rejection { estimator: RejectionEstimator::K1, min: Some(-0.2), max: 0.3, ..token() })),
        ("token, k3", with(Rejection { estimator: RejectionEstimator::K3, ..token() })),
        ("token, counts", with(Rejection { counts: true, ..token() })),
        (
            "token, counts, drops_from: policy",
            with(Rejection { counts: true, drops_from: LossTerms::Policy, ..token() }),
        ),
        ("sequence_sum", with(of(RejectionLevel::SequenceSum, 0.1))),
        ("sequence_mean", with(of(RejectionLevel::SequenceMean, 0.04))),
        ("sequence_max", with(of(RejectionLevel::SequenceMax, 0.1))),
        (
            "sequence_min",
            with(Rejection {
                estimator: RejectionEstimator::K1,
                min: Some(-0.5),
                max: 1.0,
                ..of(RejectionLevel::SequenceMin, 1.0)
            }),
        ),
        ("second_moment", with(of(RejectionLevel::SecondMoment, 0.04))),
        ("token, binary_kl", with(estimated(RejectionEstimator::BinaryKl, 0.002))),
        ("token, total_variation", with(estimated(RejectionEstimator::TotalVariation, 0.01))),
        (
            "token, probability",
            with(Rejection { min: Some(-0.005), ..estimated(RejectionEstimator::Probability, 0.01) }),
        ),
        (
            "sequence_mean, absolute_ratio",
            with(Rejection {
                level: RejectionLevel::SequenceMean,
                ..estimated(RejectionEstimator::AbsoluteRatio, 1.25)
            }),
        ),
    ]
}

fn token_weights() -> Vec<(&'static str, LossSpec)> {
    let with = |applies_to, spec: LossSpec| LossSpec {
        token_weights: Some(TokenWeights { applies_to }),
        kl: Some(Kl::plain(0.1, KlEstimator::K3)),
        ..spec
    };
    let sum = LossSpec { reduction: Reduction::Normalizer(1.0), ..plain() };
    vec![
        ("applies_to: policy", with(LossTerms::Policy, plain())),
        ("applies_to: policy_and_kl", with(LossTerms::PolicyAndKl, plain())),
        ("in place of a reduction", with(LossTerms::PolicyAndKl, sum)),
    ]
}

fn masks() -> Vec<(&'static str, LossSpec)> {
    let off_policy = |behaviour| LossSpec {
        off_policy_mask: Some(OffPolicyMask { threshold: 0.02, behaviour }),
        kl: Some(Kl::plain(0.1, KlEstimator::K3)),
        ..plain()
    };
    let quantile =
        |drops, precision| LossSpec { top_entropy: Some(TopEntropy { fraction: 0.4, drops, precision }), ..plain() };
    let top = |drops| quantile(drops, QuantilePrecision::Exact);
    vec![
        ("off_policy_mask, given", off_policy(OldLogp::Given)),
        ("off_policy_mask, rollout", off_policy(OldLogp::Rollout)),
        ("top_entropy", top(DroppedTerm::PolicyTerm)),
        ("top_entropy, precision: f32_threshold", quantile(DroppedTerm::PolicyTerm, QuantilePrecision::F32Threshold)),
        ("top_entropy, precision: f32", quantile(DroppedTerm::PolicyTerm, QuantilePrecision::F32)),
        (
            "top_entropy, drops: ratio",
            LossSpec { ratio: Ratio { level: RatioLevel::Sequence, ..Ratio::default() }, ..top(DroppedTerm::Ratio) },
        ),
    ]
}

fn reductions() -> Vec<(&'static str, LossSpec)> {
    let with = |reduction| LossSpec { reduction, ..plain() };
    let of_rows = |rows| with(Reduction::SequenceMean { rows });
    let fixed = |length| with(Reduction::FixedLength { rows: Rows::All, length });
    vec![
        ("token_mean", plain()),
        ("sequence_mean, all", of_rows(Rows::All)),
        ("sequence_mean, non_empty", of_rows(Rows::NonEmpty)),
        ("sequence_mean, given", of_rows(Rows::Given(24.0))),
        ("sequence_sum", with(Reduction::SequenceSum { rows: Rows::NonEmpty })),
        ("fixed_length", fixed(Some(1024))),
        ("fixed_length, padded width", fixed(None)),
        ("normalizer", with(Reduction::Normalizer(1024.0))),
        ("denominator_epsilon", LossSpec { denominator_epsilon: 0.5, ..of_rows(Rows::All) }),
        ("scale", LossSpec { scale: 0.25, ..plain() }),
    ]
}

fn logits() -> Vec<(&'static str, LossSpec)> {
    let with = |logits| LossSpec { logits, ..plain() };
    vec![
        ("scale", with(LogitsTransform { scale: 0.5, ..LogitsTransform::default() })),
        ("softcap", with(LogitsTransform { softcap: Some(30.0), ..LogitsTransform::default() })),
        ("bias", with(LogitsTransform { bias: true, ..LogitsTransform::default() })),
    ]
}

fn supports() -> Vec<(&'static str, LossSpec)> {
    let with = |support| LossSpec { support, ..plain() };
    vec![
        ("vocab", with(Support { vocab: Some(30), ..Support::default() })),
        ("excluded_ids", with(Support { excluded_ids: vec![1, 7], ..Support::default() })),
        ("keep_sampled", with(Support { vocab: Some(20), excluded_ids: vec![3], keep_sampled: true, kept: None })),
    ]
}

fn kept_sets() -> Vec<(&'static str, LossSpec)> {
    let with = |entropy, kl| LossSpec {
        support: Support { kept: Some(KeptSupport { entropy, kl }), ..Support::default() },
        kl: Some(Kl::plain(0.1, KlEstimator::K3)),
        entropy_coef: 0.02,
        ..plain()
    };
    let (set, vocabulary) = (SoftmaxRange::Set, SoftmaxRange::Vocabulary);
    vec![
        ("kept", with(set, set)),
        ("kept, entropy: vocabulary", with(vocabulary, set)),
        ("kept, kl: vocabulary", with(set, vocabulary)),
    ]
}
