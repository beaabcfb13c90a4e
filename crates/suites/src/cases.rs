//! Random specs, and recipes for problems in every regime: proptest strategies.
//!
//! Specs are drawn here alone. What the oracle computes and no kernel (choices made over a whole batch) its tests add to them.

use proptest::prelude::*;
use proptest::sample::select;
use proptest::strategy::Union;
use proptest::test_runner::RngSeed;

use assay_core::problem::{Dtype, HeadLayout, HeadShape};
use assay_core::spec::{
    AdvantageLevel, Aspo, Averaging, Cispo, ClipCov, ClipWidths, CrossEntropy, Distillation, DistillationKind,
    Divergence, Dro, ImportanceSampling, KeptSupport, Kl, KlCov, KlEstimator, KlGradient, KlImportance, LogClip,
    LogitsTransform, LossSpec, LossTerms, MaskedRatio, Objective, OffPolicyMask, OldLogp, OutOfBounds, PositiveTokens,
    PpoClip, Ratio, RatioLevel, Reduction, Rejection, RejectionEstimator, RejectionLevel, RolloutLevel, RolloutSource,
    RolloutWeights, Rows, Sapo, SoftmaxRange, Support, Temperature, TemperatureDivides, TokenWeights, TopKRest, Topr,
    TrustRegion, UnscoredWeight, Vespo,
};
use assay_judge::generate::{HeadRecipe, Recipe, Regime};

/// Returns the configuration of a property that is tried on `cases` cases. Its seed is fixed, so that a change is
/// judged on the cases of those before it; `PROPTEST_RNG_SEED` and `PROPTEST_CASES` replace seed and number. A failure
/// is printed, and no file is written.
///
/// ```
/// use assay_suites::cases::{any_recipe, any_spec, config};
/// use proptest::prelude::*;
///
/// proptest!(config(4), |(spec in any_spec(), recipe in any_recipe())| {
///     prop_assert!(recipe.problem(&spec).is_ok());
/// });
/// ```
pub fn config(cases: u32) -> ProptestConfig {
    // The environment's number and seed win over the property's own, each by itself.
    let given = |name| std::env::var_os(name).is_some();
    let wanted = ProptestConfig::default();
    ProptestConfig {
        cases: if given("PROPTEST_CASES") { wanted.cases } else { cases },
        rng_seed: if given("PROPTEST_RNG_SEED") { wanted.rng_seed } else { RngSeed::Fixed(crate::SEED) },
        failure_persistence: None,
        ..wanted
    }
}

/// Every option of [`LossSpec`] that some kernel computes: PPO-clip alone in two cases of five.
///
/// ```
/// use assay_suites::cases::{any_spec, config};
/// use proptest::prelude::*;
///
/// proptest!(config(4), |(spec in any_spec())| prop_assert!(spec.check().is_ok()));
/// ```
pub fn any_spec() -> BoxedStrategy<LossSpec> {
    // A trust region has four choices of its own.
    let weight = |name| if name == "trust_region" { 2 } else { 1 };
    let objective = Union::new_weighted(objectives().into_iter().map(|(name, arm)| (weight(name), arm)).collect());
    prop_oneof![2 => any_ppo_spec(), 3 => family(objective.boxed()).prop_map(or_logp).boxed()].boxed()
}

/// Logp of two to four ids by its cotangents in place of a policy gradient by tokens that is weighed against its sampler or has its
/// logits changed, with what becomes of these. No draw of its own.
fn or_logp(spec: LossSpec) -> LossSpec {
    let by_token = spec.objective == Objective::PolicyGradient && spec.advantages == AdvantageLevel::Token;
    let changed = spec.logits != LogitsTransform::default() || !spec.support.is_whole();
    // Policy gradients by token have an advantage for each token, which serves as the cotangent of its logp.
    if !by_token || !(changed || spec.rollout.is_some() || !spec.rejection.is_empty()) {
        return spec;
    }
    let LossSpec { logits, mut support, temperature, temperature_divides, dentropy, .. } = spec;
    // A spec with several ids for each token refuses `keep_sampled`.
    support.keep_sampled = false;
    let size = temperature.number().unwrap_or(1.0);
    // The number of ids follows from values that were drawn anyway: a draw of its own would change every spec after it.
    let ids_per_token = if size < 0.9 { 2 } else { 2 + usize::from(size > 1.0) + usize::from(dentropy) };
    LossSpec { logits, support, temperature, temperature_divides, ids_per_token, ..LossSpec::from_cotangents(dentropy) }
}

/// Any member of the family with `objective`: a ratio and a reduction, and of everything else something in some cases.
///
/// ```
/// use assay_core::spec::Objective;
/// use assay_suites::cases::{config, family};
/// use proptest::prelude::*;
///
/// proptest!(config(4), |(spec in family(Just(Objective::PolicyGradient).boxed()))| {
///     prop_assert_eq!(spec.objective, Objective::PolicyGradient);
/// });
/// ```
pub fn family(objective: BoxedStrategy<Objective>) -> BoxedStrategy<LossSpec> {
    // An element that occurs twice in a list is drawn twice as often: most losses have the plain choice.
    let levels = (
        select(vec![AdvantageLevel::Sequence, AdvantageLevel::Token]),
        select(vec![OldLogp::Given, OldLogp::Given, OldLogp::Current, OldLogp::Rollout]),
        prop_oneof![Just(1.0), 0.3..2.0_f64],
        select(vec![TemperatureDivides::Logits, TemperatureDivides::Logits, TemperatureDivides::Logp]),
    );
    let corrections = (
        weighted(0.4, rollout()),
        prop_oneof![3 => Just(vec![]).boxed(), 1 => proptest::collection::vec(rejection(), 1..3).boxed()],
        weighted(0.15, off_policy_mask()),
        weighted(
            0.2,
            select(vec![LossTerms::Policy, LossTerms::PolicyAndKl]).prop_map(|applies_to| TokenWeights { applies_to }),
        ),
    );
    let columns = prop_oneof![6 => Just((LogitsTransform::default(), Support::default())), 1 => changed_logits()];
    let bonus = (prop_oneof![Just(0.0), -0.3..0.3_f64], weighted(0.4, averaging()));
    (objective, ratio(), levels, corrections, weighted(0.5, kl()), columns, bonus, averaging(), scale())
        .prop_map(|(objective, ratio, levels, corrections, kl, columns, bonus, averaging, scale)| {
            let (advantages, old_logp, temperature, temperature_divides) = levels;
            let (rollout, rejection, off_policy_mask, token_weights) = corrections;
            // No draw of its own, which would change every case.
            let dentropy = bonus.0 == 0.0 && scale == 1.0 && kl.is_none();
            let given = averaging.denominator_epsilon == 0.5 && temperature_divides == TemperatureDivides::Logits;
            let mut spec = LossSpec {
                objective,
                ratio,
                advantages,
                old_logp,
                logits: columns.0,
                support: columns.1,
                temperature: if given { Temperature::Given } else { temperature.into() },
                temperature_divides,
                rollout,
                rejection,
                token_weights,
                off_policy_mask,
                top_entropy: None,
                kl,
                entropy_coef: bonus.0,
                entropy_averaging: bonus.1.filter(|_| !dentropy),
                dentropy,
                ids_per_token: 1,
                reduction: averaging.reduction,
                denominator_epsilon: averaging.denominator_epsilon,
                scale,
            };
            if let Objective::ImportanceSampling(sampling) = &mut spec.objective {
                // A sequence of no tokens has an advantage of its own.
                sampling.empty_rows = spec.ratio.level == RatioLevel::Sequence
                    && spec.advantages == AdvantageLevel::Sequence
                    && spec.reduction == Reduction::SequenceMean { rows: Rows::All };
            }
            without_policy_options(spec)
        })
        .boxed()
}

/// Returns a cross-entropy without the options of policy losses that it refuses; any other spec as it is.
///
/// ```
/// use assay_core::spec::{Kl, KlEstimator, LossSpec};
/// use assay_suites::cases::without_policy_options;
///
/// let spec = LossSpec { kl: Some(Kl::plain(0.1, KlEstimator::K3)), ..LossSpec::cross_entropy(0.1, 0.0) };
/// assert_eq!(without_policy_options(spec), LossSpec::cross_entropy(0.1, 0.0));
/// ```
pub fn without_policy_options(spec: LossSpec) -> LossSpec {
    let Objective::CrossEntropy(cross_entropy) = &spec.objective else { return spec };
    let mut kept = LossSpec {
        ratio: Ratio::default(),
        old_logp: OldLogp::Current,
        rollout: None,
        rejection: Vec::new(),
        off_policy_mask: None,
        top_entropy: None,
        kl: None,
        ..spec.clone()
    };
    if cross_entropy.reads_row() {
        (kept.support, kept.temperature_divides) = (Support::default(), TemperatureDivides::Logits);
    }
    kept
}

fn clip() -> BoxedStrategy<PpoClip> {
    (0.0..0.9_f64, 0.0..1.5_f64, option(0.5..3.0_f64), option(1.01..4.0_f64))
        .prop_map(|(epsilon_low, epsilon_high, delta, dual_clip)| PpoClip {
            epsilon_low,
            epsilon_high,
            delta,
            dual_clip,
        })
        .boxed()
}

/// Every objective, by its name in a file.
///
/// ```
/// use assay_suites::cases::objectives;
///
/// assert!(objectives().iter().any(|(name, _)| *name == "ppo_clip"));
/// ```
pub fn objectives() -> Vec<(&'static str, BoxedStrategy<Objective>)> {
    let vespo = (0.0..4.0_f64, -0.5..4.0_f64, 0.0..4.0_f64, 0.0..4.0_f64, any::<bool>()).prop_map(
        |(k_positive, lambda_positive, k_negative, lambda_negative, weights_of_masked_tokens)| Vespo {
            k_positive,
            lambda_positive,
            k_negative,
            lambda_negative,
            weights_of_masked_tokens,
        },
    );
    let region = (
        select(vec![Divergence::TotalVariation, Divergence::BinaryKl]),
        (0.0..0.2_f64, 0.0..0.2_f64),
        any::<bool>(),
        option(0.7..4.0_f64),
        prop_oneof![Just(0.0), 1e-3..0.5_f64],
    )
        .prop_map(|(divergence, (low, high), two_sided, truncate, penalty)| TrustRegion {
            divergence,
            low,
            high,
            two_sided,
            truncate,
            penalty,
        });
    let cispo = (option(0.0..0.95_f64), 1.0..6.0_f64).prop_map(|(lower, upper)| Cispo { lower, upper });
    let sapo =
        (0.3..3.0_f64, 0.3..3.0_f64).prop_map(|(tau_positive, tau_negative)| Sapo { tau_positive, tau_negative });
    let masked_ratio = (0.0..0.95_f64, 1.0..3.0_f64, any::<bool>()).prop_map(|(lower, upper, surrogate)| MaskedRatio {
        lower,
        upper,
        surrogate,
    });
    let topr =
        (0.0..2.0_f64, 0.0..2.0_f64, 0.5..2.0_f64, select(vec![PositiveTokens::Advantage, PositiveTokens::Selected]))
            .prop_map(|(positive_weight, negative_weight, upper, positive)| Topr {
                positive_weight,
                negative_weight,
                upper,
                positive,
            });
    let widths =
        (0.0..0.9_f64, 0.0..1.5_f64).prop_map(|(epsilon_low, epsilon_high)| ClipWidths { epsilon_low, epsilon_high });
    let aspo = (widths.clone(), proptest::option::of(widths), 1.05..4.0_f64, 1.05..4.0_f64).prop_map(
        |(ClipWidths { epsilon_low, epsilon_high }, selected, dual_clip_positive, dual_clip_negative)| Aspo {
            epsilon_low,
            epsilon_high,
            selected,
            dual_clip_positive,
            dual_clip_negative,
        },
    );
    let share = prop_oneof![Just(0.0), 0.01..0.9_f64];
    let factor = prop_oneof![Just(0.0), 1e-4..0.5_f64];
    let cross_entropy = (share, factor).prop_map(|(label_smoothing, z_loss)| CrossEntropy { label_smoothing, z_loss });
    let kl_cov = (0.0..1.5_f64).prop_map(|coefficient| KlCov { coefficient, selection: None });
    let clip_cov = clip().prop_map(|clip| ClipCov { clip, selection: None });
    vec![
        ("ppo_clip", clip().prop_map(Objective::PpoClip).boxed()),
        ("cispo", cispo.prop_map(Objective::Cispo).boxed()),
        ("sapo", sapo.prop_map(Objective::Sapo).boxed()),
        ("vespo", vespo.prop_map(Objective::Vespo).boxed()),
        ("policy_gradient", Just(Objective::PolicyGradient).boxed()),
        ("importance_sampling", Just(Objective::ImportanceSampling(ImportanceSampling::default())).boxed()),
        ("masked_ratio", masked_ratio.prop_map(Objective::MaskedRatio).boxed()),
        ("trust_region", region.prop_map(Objective::TrustRegion).boxed()),
        ("dro", (0.05..2.0_f64).prop_map(|beta| Objective::Dro(Dro { beta })).boxed()),
        ("kl_cov", kl_cov.prop_map(Objective::KlCov).boxed()),
        ("clip_cov", clip_cov.prop_map(Objective::ClipCov).boxed()),
        ("topr", topr.prop_map(Objective::Topr).boxed()),
        ("aspo", aspo.prop_map(Objective::Aspo).boxed()),
        ("cross_entropy", cross_entropy.prop_map(Objective::CrossEntropy).boxed()),
        ("none", Just(Objective::None).boxed()),
    ]
}

fn ratio() -> BoxedStrategy<Ratio> {
    let level = select(vec![
        RatioLevel::Token,
        RatioLevel::Token,
        RatioLevel::Sequence,
        RatioLevel::SequenceToken,
        RatioLevel::SequenceProduct,
    ]);
    let clip = (0.0..0.5_f64, 0.0..0.5_f64).prop_map(|(low, high)| LogClip { low, high });
    // The ranges reach from clamps that hold nearly every ratio to ones that hold none.
    (
        level,
        weighted(0.3, 0.1..20.0_f64),
        weighted(0.2, clip),
        weighted(0.2, -0.1..10.0_f64),
        any::<bool>(),
        select(vec![0.0, 1e-8, 0.5]),
    )
        .prop_map(|(level, clamp, clip, cap, straight_through, denominator_epsilon)| Ratio {
            level,
            clamp,
            clip,
            cap,
            straight_through: straight_through && cap.is_some(),
            // A sum over the sequence has no denominator.
            denominator_epsilon: if level == RatioLevel::SequenceProduct { 0.0 } else { denominator_epsilon },
        })
        .boxed()
}

fn kl() -> BoxedStrategy<Kl> {
    let estimator = select(vec![KlEstimator::K1, KlEstimator::K2, KlEstimator::K3, KlEstimator::Abs]);
    let gradient = prop_oneof![
        2 => Just(KlGradient::Own),
        1 => Just(KlGradient::K2),
        1 => (0.5..10.0_f64).prop_map(KlGradient::K2Weighted),
    ];
    let importance = select(vec![
        KlImportance::One,
        KlImportance::Ratio,
        KlImportance::TokenRatio,
        KlImportance::Rollout,
        KlImportance::Score,
    ]);
    let clamps = (weighted(0.3, 0.05..20.0_f64), weighted(0.3, 0.01..10.0_f64), any::<bool>());
    (0.0..1.0_f64, estimator, gradient, importance, clamps, weighted(0.2, averaging()))
        .prop_map(|(beta, estimator, gradient, importance, clamps, averaging)| Kl {
            beta,
            estimator,
            gradient,
            importance,
            difference_clamp: clamps.0,
            value_clamp: clamps.1,
            clamp_after_importance: clamps.2,
            averaging,
        })
        .boxed()
}

fn averaging() -> BoxedStrategy<Averaging> {
    let rows = || prop_oneof![Just(Rows::All), Just(Rows::NonEmpty), (0.5..20.0_f64).prop_map(Rows::Given)];
    let reduction = prop_oneof![
        Just(Reduction::TokenMean),
        rows().prop_map(|rows| Reduction::SequenceMean { rows }),
        rows().prop_map(|rows| Reduction::SequenceSum { rows }),
        (rows(), option(1..64_usize)).prop_map(|(rows, length)| Reduction::FixedLength { rows, length }),
        (0.5..500.0_f64).prop_map(Reduction::Normalizer),
    ];
    (reduction, select(vec![0.0, 0.0, 1e-8, 0.5]))
        .prop_map(|(reduction, denominator_epsilon)| Averaging { reduction, denominator_epsilon })
        .boxed()
}

fn scale() -> BoxedStrategy<f64> {
    prop_oneof![Just(1.0), 0.1..8.0_f64].boxed()
}

fn rollout() -> BoxedStrategy<RolloutWeights> {
    let of_logp = select(vec![
        RolloutLevel::Token,
        RolloutLevel::Sequence,
        RolloutLevel::Geometric,
        RolloutLevel::TokenGatedByGeometric,
    ]);
    let source = prop_oneof![
        select(vec![RolloutLevel::Token, RolloutLevel::Geometric]).prop_map(|level| (RolloutSource::Given, level)),
        of_logp.prop_map(|level| (RolloutSource::Logp, level)),
    ];
    (
        source,
        select(vec![OutOfBounds::Truncate, OutOfBounds::Mask]),
        (option(0.0..0.95_f64), option(1.0..3.0_f64), option(0.1..20.0_f64)),
        any::<bool>(),
        select(vec![UnscoredWeight::One, UnscoredWeight::Zero]),
        select(vec![LossTerms::Policy, LossTerms::PolicyAndKl]),
    )
        .prop_map(|((source, level), outside, (min, max, clamp), normalize, unscored, applies_to)| {
            let plain = RolloutWeights {
                source,
                level,
                outside: OutOfBounds::Truncate,
                min: None,
                max: None,
                clamp: None,
                normalize,
                unscored: UnscoredWeight::One,
                applies_to,
            };
            // A weight that the batch gives is taken as it is, so bounds and clamps would have no effect.
            if source == RolloutSource::Given {
                plain
            } else {
                RolloutWeights { outside, min, max, clamp, unscored, ..plain }
            }
        })
        .boxed()
}

fn rejection() -> BoxedStrategy<Rejection> {
    (
        select(vec![
            RejectionEstimator::K1,
            RejectionEstimator::K2,
            RejectionEstimator::K3,
            RejectionEstimator::BinaryKl,
            RejectionEstimator::TotalVariation,
            RejectionEstimator::Probability,
            RejectionEstimator::AbsoluteRatio,
        ]),
        select(vec![
            RejectionLevel::Token,
            RejectionLevel::SequenceSum,
            RejectionLevel::SequenceMean,
            RejectionLevel::SequenceMax,
            RejectionLevel::SequenceMin,
            RejectionLevel::SecondMoment,
        ]),
        option(-2.0..0.01_f64),
        0.01..3.0_f64,
        any::<bool>(),
        select(vec![LossTerms::Policy, LossTerms::PolicyAndKl]),
    )
        .prop_map(|(estimator, level, min, max, counts, drops_from)| {
            // The larger of a ratio and its inverse is at least 1, so the bound must be above that.
            let max = if estimator == RejectionEstimator::AbsoluteRatio { 1.0 + max } else { max };
            let drawn = Rejection { estimator, level, min, max, counts, drops_from };
            if level == RejectionLevel::SecondMoment {
                // This level bounds the mean of `y²` over the batch, and has no choice of estimator or lower bound.
                Rejection { estimator: RejectionEstimator::K2, min: None, counts: false, ..drawn }
            } else {
                drawn
            }
        })
        .boxed()
}

fn off_policy_mask() -> BoxedStrategy<OffPolicyMask> {
    (-0.5..0.5_f64, select(vec![OldLogp::Given, OldLogp::Rollout]))
        .prop_map(|(threshold, behaviour)| OffPolicyMask { threshold, behaviour })
        .boxed()
}

/// Draws a transform of the logits before their softmax, and the support of that softmax.
///
/// ```
/// use assay_suites::cases::{changed_logits, config};
/// use proptest::prelude::*;
///
/// proptest!(config(4), |((logits, support) in changed_logits())| {
///     prop_assert!(logits.scale > 0.0 && support.keep_sampled);
/// });
/// ```
pub fn changed_logits() -> BoxedStrategy<(LogitsTransform, Support)> {
    (logits_transform(), support()).boxed()
}

/// Specs with kept sets: any loss, with entropy and KL penalty over the sets or the vocabulary.
///
/// ```
/// use assay_suites::cases;
/// use proptest::prelude::*;
///
/// proptest!(|(spec in cases::any_kept_spec())| {
///     prop_assert!(spec.reads_kept_ids() && spec.check().is_ok());
/// });
/// ```
pub fn any_kept_spec() -> BoxedStrategy<LossSpec> {
    let range = || select(vec![SoftmaxRange::Set, SoftmaxRange::Vocabulary]);
    (any_spec(), range(), range(), any::<bool>())
        .prop_map(|(mut spec, entropy, kl, keep_sampled)| {
            // The spec's own check refuses losses that need a third softmax, and the terms of a whole row.
            if let Objective::CrossEntropy(cross_entropy) = &mut spec.objective {
                *cross_entropy = CrossEntropy::default();
            }
            let divides_logp =
                spec.temperature_divides == TemperatureDivides::Logp && spec.temperature != Temperature::ONE;
            let by_token_ratio = spec.kl.as_ref().is_some_and(|kl| kl.importance == KlImportance::TokenRatio);
            let only_set = |range: SoftmaxRange, refused: bool| if refused { SoftmaxRange::Set } else { range };
            spec.support.kept = Some(KeptSupport {
                entropy: only_set(entropy, divides_logp),
                kl: only_set(kl, divides_logp || by_token_ratio),
            });
            spec.support.keep_sampled = keep_sampled && spec.ids_per_token == 1;
            // A sampled id must lie in the support unless it is put back: id 0 stays, which a vocabulary of one entry has too.
            if !spec.support.keep_sampled {
                spec.support.excluded_ids.retain(|&id| id != 0);
            }
            spec
        })
        .boxed()
}

/// Draws divergences from a teacher: of its logits, or of up to eight of its likeliest entries.
///
/// ```
/// use assay_suites::cases;
/// use proptest::prelude::*;
///
/// proptest!(|(spec in cases::any_divergence())| {
///     prop_assert!(spec.reads_teacher() && spec.check().is_ok());
/// });
/// ```
pub fn any_divergence() -> BoxedStrategy<LossSpec> {
    let kinds = prop_oneof![
        Just((DistillationKind::ForwardKl, None)),
        Just((DistillationKind::ReverseKl, None)),
        Just((DistillationKind::JensenShannon, None)),
        prop_oneof![select(vec![0.0, 0.1, 0.5, 0.9, 1.0]), 0.01..0.99]
            .prop_map(|beta| (DistillationKind::JensenShannon, Some(beta))),
    ];
    let rests = select(vec![TopKRest::Tail, TopKRest::Renormalized, TopKRest::Ignored]);
    let entries = prop_oneof![
        3 => Just((None, None)),
        1 => (1_usize..9, rests).prop_map(|(k, rest)| (Some(k), Some(rest))),
    ];
    let temperatures = prop_oneof![Just(Temperature::ONE), (0.3..3.0).prop_map(Temperature::Number)];
    (kinds, entries, any::<bool>(), temperatures)
        .prop_map(|((kind, beta), (top_k, rest), temperature_squared, temperature)| LossSpec {
            temperature,
            ..LossSpec::distillation(Distillation { kind, beta, top_k, rest, temperature_squared })
        })
        .boxed()
}

fn logits_transform() -> impl Strategy<Value = LogitsTransform> {
    (select(vec![1.0, 0.5, 1.7]), option(5.0..50.0_f64), any::<bool>())
        .prop_map(|(scale, softcap, bias)| LogitsTransform { scale, softcap, bias })
}

fn support() -> impl Strategy<Value = Support> {
    (option(1..300_usize), proptest::collection::vec(0..40_usize, 0..4)).prop_map(|(vocab, excluded_ids)| Support {
        vocab,
        excluded_ids,
        keep_sampled: true,
        kept: None,
    })
}

/// Every option of PPO-clip, clip widths and bounds on either side of each other.
///
/// ```
/// use assay_core::spec::Objective;
/// use assay_suites::cases::{any_ppo_spec, config};
/// use proptest::prelude::*;
///
/// proptest!(config(4), |(spec in any_ppo_spec())| {
///     prop_assert!(matches!(spec.objective, Objective::PpoClip(_)));
/// });
/// ```
pub fn any_ppo_spec() -> BoxedStrategy<LossSpec> {
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
        clip(),
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
                temperature: temperature.into(),
                temperature_divides,
                kl,
                entropy_coef,
                reduction,
                ..LossSpec::default()
            }
        })
        .boxed()
}

/// Small batches in every regime and dtype; vocabularies of 1, around the tiles of vector units and GPU blocks, and primes.
///
/// ```
/// use assay_suites::cases::{any_recipe, config};
/// use proptest::prelude::*;
///
/// proptest!(config(4), |(recipe in any_recipe())| prop_assert!(recipe.shape.iter().all(|extent| *extent > 0)));
/// ```
pub fn any_recipe() -> BoxedStrategy<Recipe> {
    let around_tiles =
        // The widths around a tile's are the ones at which a last tile is empty, full, or has one column.
        select(vec![8_usize, 16, 32, 64, 128, 256, 1024, 2048]).prop_flat_map(|tile| tile - 1..=tile + 1);
    let vocab = prop_oneof![1..10_usize, around_tiles, select(vec![97_usize, 997, 4099])];
    (
        (1..5_usize, 1..9_usize, vocab),
        select(Dtype::KERNEL.to_vec()),
        select(Regime::FINITE.to_vec()),
        any::<u64>(),
        // Noise of 0 makes all ratios 1, and that of 60 nats lets them overflow f32.
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
        .boxed()
}

/// Small batches over heads of any width, in both layouts, with and without rounded logits.
///
/// ```
/// use assay_suites::cases::{any_head_recipe, config};
/// use proptest::prelude::*;
///
/// // No product of finite numbers is −∞.
/// proptest!(config(4), |(head in any_head_recipe())| prop_assert!(!head.recipe.regime.has_holes()));
/// ```
pub fn any_head_recipe() -> BoxedStrategy<HeadRecipe> {
    let width = prop_oneof![1..10_usize, select(vec![16_usize, 31, 64, 65, 128, 257])];
    let layout = select(vec![HeadLayout::HiddenByVocab, HeadLayout::VocabByHidden]);
    (any_recipe(), width, layout, any::<bool>())
        .prop_map(|(mut recipe, hidden, layout, rounds_logits)| {
            if recipe.regime.has_holes() {
                recipe.regime = Regime::Normal;
            }
            HeadRecipe { hidden, layout, rounds_logits, recipe }
        })
        .boxed()
}

/// One batch of f32, `[H,V]`.
///
/// ```
/// use assay_core::spec::LossSpec;
/// use assay_suites::cases::head_recipe;
///
/// let problem = head_recipe("2x3x4x5".parse().unwrap()).problem(&LossSpec::default()).unwrap();
/// assert_eq!(problem.shape().to_string(), "2x3x4x5");
/// ```
pub fn head_recipe(shape: HeadShape) -> HeadRecipe {
    let HeadShape { batch, tokens, hidden, vocab } = shape;
    let recipe = Recipe {
        shape: [batch, tokens, vocab],
        dtype: Dtype::F32,
        regime: Regime::Normal,
        seed: 1,
        old_logp_noise_scale: 0.3,
        masked_garbage: false,
    };
    HeadRecipe { hidden, layout: HeadLayout::HiddenByVocab, rounds_logits: false, recipe }
}

fn option<S: Strategy>(strategy: S) -> impl Strategy<Value = Option<S::Value>>
where
    S::Value: Clone,
{
    proptest::option::of(strategy)
}

fn weighted<S: Strategy>(share: f64, strategy: S) -> impl Strategy<Value = Option<S::Value>>
where
    S::Value: Clone,
{
    proptest::option::weighted(share, strategy)
}
