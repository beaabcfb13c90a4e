//! The f64 reference of the loss family against 640-bit arithmetic where random cases seldom are: empty rows, exact bounds, NaN under
//! the mask, choices that are not determined.

use crate::common::draws::Case;
use crate::common::exact::{KINK, OF_EVERY_SPEC, Record, check};
use assay_core::problem::{Advantages, Extra, Problem, ProblemError};
use assay_core::spec::{
    Cispo, ClipCov, CovarianceBand, Divergence, Dro, DroppedTerm, ImportanceSampling, Kl, KlCov, KlEstimator,
    KlImportance, LogClip, LossSpec, LossTerms, MaskedRatio, Objective, OffPolicyMask, OldLogp, OutOfBounds, PpoClip,
    QuantilePrecision, Ratio, RatioLevel, Reduction, Rejection, RejectionEstimator, RejectionLevel, RolloutLevel,
    RolloutSource, RolloutWeights, Rows, Sapo, Support, TopEntropy, TrustRegion, UnscoredWeight, Vespo,
};
use assay_reference as reference;
use ndarray::{Array2, Array3, arr1, arr2};

/// Two rows of three tokens over four columns, every array there, and `mask` over them.
fn batch(mask: [[bool; 3]; 2]) -> Problem {
    let shape = (2, 3);
    let spread = |(b, t): (usize, usize), from: f64| from + 0.37 * ((5 * b + 3 * t) % 4) as f64;
    let array = |from: f64| Some(Array2::from_shape_fn(shape, |at| spread(at, from)));
    let logits = Array3::from_shape_fn((2, 3, 4), |(b, t, j)| 0.3 * ((7 * b + 3 * t + 5 * j) % 11) as f64);
    Problem {
        logits: logits.into(),
        ids: arr2(&[[0, 1, 2], [3, 0, 1]]),
        mask: arr2(&mask),
        advantages: Advantages::Sequence(arr1(&[0.8, -1.3])),
        old_logp: array(-2.1),
        ref_logp: array(-2.3),
        extra: Extra {
            rollout_logp: array(-2.2),
            rollout_weights: array(0.4),
            token_weights: array(0.6),
            selected: Some(arr2(&[[true, false, true], [false, true, false]])),
            bias: Some(arr1(&[0.1, -0.2, 0.3, 0.0])),
            dentropy: array(0.2),
            ..Extra::default()
        },
    }
}

const FULL: [[bool; 3]; 2] = [[true; 3]; 2];

const LEVELS: [RatioLevel; 4] =
    [RatioLevel::Token, RatioLevel::Sequence, RatioLevel::SequenceToken, RatioLevel::SequenceProduct];

/// Compares `problem` under `spec` with the exact loss.
fn agrees(spec: LossSpec, problem: &Problem) -> f64 {
    let case = Case { spec, problem: problem.clone() };
    if let Err(reason) = check(&case, &OF_EVERY_SPEC, &mut Record::default()) {
        panic!("{reason}\n{case:?}");
    }
    reference::evaluate(&case.spec, problem).expect("a valid case").loss()
}

fn with(objective: Objective) -> LossSpec {
    LossSpec { objective, ..LossSpec::default() }
}

/// Rollout weights without bounds, on the policy term.
fn weights(source: RolloutSource, level: RolloutLevel) -> RolloutWeights {
    RolloutWeights {
        source,
        level,
        outside: OutOfBounds::Truncate,
        min: None,
        max: None,
        clamp: None,
        normalize: false,
        unscored: UnscoredWeight::One,
        applies_to: LossTerms::Policy,
    }
}

/// A rejection above `max`, as if masked.
fn rejection(estimator: RejectionEstimator, level: RejectionLevel, max: f64) -> Rejection {
    Rejection { estimator, level, min: None, max, counts: false, drops_from: LossTerms::PolicyAndKl }
}

/// The tokens of the highest entropies, exactly.
fn top_entropy(fraction: f64, drops: DroppedTerm) -> TopEntropy {
    TopEntropy { fraction, drops, precision: QuantilePrecision::Exact }
}

/// One objective of every arm, at its usual numbers.
fn arms() -> Vec<LossSpec> {
    let region = |truncate| TrustRegion {
        divergence: Divergence::BinaryKl,
        low: 0.2,
        high: 0.2,
        two_sided: false,
        truncate,
        penalty: 1e-3,
    };
    let arms = vec![
        Objective::PpoClip(PpoClip { delta: Some(2.5), dual_clip: Some(3.0), ..PpoClip::default() }),
        Objective::Cispo(Cispo { lower: Some(0.8), upper: 5.0 }),
        Objective::Sapo(Sapo::default()),
        Objective::Vespo(Vespo::default()),
        Objective::PolicyGradient,
        Objective::ImportanceSampling(ImportanceSampling { empty_rows: false }),
        Objective::MaskedRatio(MaskedRatio { lower: 0.5, upper: 2.0, surrogate: false }),
        Objective::TrustRegion(region(None)),
        Objective::TrustRegion(region(Some(3.0))),
        Objective::Dro(Dro { beta: 0.5 }),
        Objective::KlCov(KlCov { coefficient: 1.0, selection: None }),
        Objective::ClipCov(ClipCov { clip: PpoClip::default(), selection: None }),
        Objective::None,
    ];
    arms.into_iter().map(with).collect()
}

#[test]
fn objectives_at_usual_numbers_match_640_bits() {
    for spec in arms() {
        for level in LEVELS {
            let ratio = Ratio { level, ..Ratio::default() };
            agrees(LossSpec { ratio, ..spec.clone() }, &batch([[true, true, false], [true; 3]]));
        }
    }
}

#[test]
fn clip_cov_with_too_many_candidates_is_refused() {
    let band = |fraction| Some(CovarianceBand { fraction, lower: -10.0, upper: 10.0 });
    let wide = || PpoClip { epsilon_low: 0.99, epsilon_high: 99.0, ..PpoClip::default() };
    let cov = |fraction| with(Objective::ClipCov(ClipCov { clip: wide(), selection: band(fraction) }));
    let problem = batch(FULL);
    let spec = cov(0.5);
    let Err(refused) = reference::evaluate(&spec, &problem) else { panic!("six candidates, of which three are taken") };
    assert_eq!(refused, ProblemError::Undetermined { candidates: 6, taken: 3 });
    assert!(refused.to_string().starts_with("`selected`: not given"), "{refused}");
    assert_eq!(agrees(cov(1.0), &problem), 0.0);
}

#[test]
fn gmpo_counts_an_empty_row_as_a_ratio_of_one() {
    let gmpo = |empty_rows| LossSpec {
        ratio: Ratio { level: RatioLevel::Sequence, clip: Some(LogClip { low: 0.4, high: 0.4 }), ..Ratio::default() },
        reduction: Reduction::SequenceMean { rows: Rows::All },
        scale: 0.5,
        ..with(Objective::ImportanceSampling(ImportanceSampling { empty_rows }))
    };
    let problem = batch([[true, false, true], [false; 3]]);
    let (counted, left_out) = (agrees(gmpo(true), &problem), agrees(gmpo(false), &problem));
    assert!((counted - left_out - 0.5 * 1.3 / 2.0).abs() < 1e-15, "{counted} and {left_out}");
    // A row whose tokens are all rejected has none.
    let rejection = rejection(RejectionEstimator::K2, RejectionLevel::Token, 1e-9);
    let rejected = LossSpec { rejection: vec![rejection], ..gmpo(true) };
    assert!((agrees(rejected, &batch(FULL)) - 0.5 * (1.3 - 0.8) / 2.0).abs() < 1e-15);
}

#[test]
fn vespo_weights_of_masked_tokens_match_640_bits() {
    let vespo = |weights_of_masked_tokens, level, normalize| LossSpec {
        rollout: Some(RolloutWeights { normalize, ..weights(RolloutSource::Given, level) }),
        ..with(Objective::Vespo(Vespo { weights_of_masked_tokens, ..Vespo::default() }))
    };
    let problem = batch([[true, true, false], [true, false, false]]);
    let token = RolloutLevel::Token;
    for normalize in [false, true] {
        assert_ne!(agrees(vespo(true, token, normalize), &problem), agrees(vespo(false, token, normalize), &problem));
        for masked_too in [false, true] {
            agrees(vespo(masked_too, RolloutLevel::Geometric, normalize), &problem);
        }
    }
    // One weight a row is added once, whether or not masked tokens have it too.
    let mut of_rows = problem;
    of_rows.extra.rollout_weights = Some(arr2(&[[0.4], [1.7]]));
    assert_eq!(agrees(vespo(true, token, false), &of_rows), agrees(vespo(false, token, false), &of_rows));
}

#[test]
fn overflowing_ratio_without_advantage_is_zero() {
    for spec in arms() {
        // A penalty does not ask for an advantage.
        let penalizes = matches!(&spec.objective, Objective::Dro(_) | Objective::TrustRegion(_) | Objective::KlCov(_));
        let mut problem = batch(FULL);
        problem.advantages = Advantages::Sequence(arr1(&[0.0, 0.0]));
        problem.old_logp = Some(Array2::from_elem((2, 3), -1000.0));
        let outcome = reference::evaluate(&spec, &problem).expect("a valid case").outcome();
        if penalizes {
            assert!(outcome.token_loss.to_f64().iter().all(|loss| loss.is_finite()), "{spec:?}");
            continue;
        }
        assert!(outcome.token_loss.to_f64().iter().all(|loss| *loss == 0.0), "{spec:?}");
        assert!(outcome.gradient.to_f64().iter().all(|dlogit| *dlogit == 0.0), "{spec:?}");
    }
}

#[test]
fn mask_nan_under_it_is_never_read() {
    let weights = RolloutWeights {
        normalize: true,
        applies_to: LossTerms::PolicyAndKl,
        ..weights(RolloutSource::Given, RolloutLevel::Token)
    };
    let computed = RolloutWeights { source: RolloutSource::Logp, level: RolloutLevel::Sequence, ..weights.clone() };
    let rejection = rejection(RejectionEstimator::K3, RejectionLevel::SequenceMax, 0.5);
    let clean = batch([[true, false, true], [true, true, false]]);
    let mut dirty = clean.clone();
    for (at, _) in clean.mask.indexed_iter().filter(|(_, counts)| !**counts) {
        let Extra { rollout_logp, rollout_weights, dentropy, .. } = &mut dirty.extra;
        for array in [&mut dirty.old_logp, &mut dirty.ref_logp, rollout_logp, rollout_weights, dentropy] {
            array.as_mut().expect("there")[at] = f64::NAN;
        }
        dirty.ids[at] = i64::MIN;
        dirty.logits.fill_row(at.0, at.1, f64::NAN);
    }
    for arm in arms() {
        for rollout in [weights.clone(), computed.clone()] {
            let spec = LossSpec {
                rollout: Some(rollout),
                rejection: vec![rejection],
                off_policy_mask: Some(OffPolicyMask { threshold: 0.1, behaviour: OldLogp::Rollout }),
                top_entropy: Some(top_entropy(0.6, DroppedTerm::PolicyTerm)),
                kl: Some(Kl::plain(0.1, KlEstimator::K3)),
                entropy_coef: 0.01,
                ..arm.clone()
            };
            let [clean, dirty] = [&clean, &dirty].map(|problem| {
                let reference = reference::evaluate(&spec, problem).expect("a valid case");
                (reference.loss(), reference.metrics(), reference.outcome().gradient)
            });
            assert_eq!(clean, dirty, "{spec:?}");
            assert!(!clean.0.is_nan(), "{spec:?}");
        }
    }
}

#[test]
fn support_without_the_sampled_id_is_refused_or_extended() {
    let spec = |keep_sampled| LossSpec {
        support: Support { vocab: Some(3), excluded_ids: vec![1], keep_sampled, kept: None },
        ..with(Objective::PolicyGradient)
    };
    let problem = batch(FULL);
    let outside = ProblemError::IdOutsideSupport { b: 0, t: 1, k: None, id: 1 };
    assert_eq!(reference::evaluate(&spec(false), &problem).err(), Some(outside));
    agrees(spec(true), &problem);
    // Column 3 is padding where it was not sampled, and a token of its own where it was.
    let spec = spec(true);
    let dlogits = reference::evaluate(&spec, &problem).expect("a valid case").outcome().gradient;
    assert_eq!(dlogits.row(0, 0)[3], 0.0);
    assert_ne!(dlogits.row(1, 0)[3], 0.0);
    // Under the mask it is nobody's.
    let masked = batch([[true, false, true], [false, true, false]]);
    agrees(LossSpec { support: Support { keep_sampled: false, ..spec.support.clone() }, ..spec }, &masked);
}

#[test]
fn top_entropy_keeps_the_token_at_the_quantile() {
    let masks = [FULL, [[true, true, true], [true, true, false]]];
    for (mask, fraction, kept) in [(masks[0], 0.4, 3), (masks[1], 0.5, 3), (masks[1], 0.75, 4), (masks[1], 0.25, 2)] {
        let top_entropy = Some(top_entropy(fraction, DroppedTerm::PolicyTerm));
        let spec = LossSpec { top_entropy, ..with(Objective::PolicyGradient) };
        let mut problem = batch(mask);
        // All entropies differ: the peak of each row has its own height.
        let peak = |(b, t, j): (usize, usize, usize)| if j == 0 { 0.5 + (3 * b + t) as f64 } else { 0.0 };
        problem.logits = Array3::from_shape_fn((2, 3, 4), peak).into();
        agrees(spec.clone(), &problem);
        let token_loss = reference::evaluate(&spec, &problem).expect("a valid case").outcome().token_loss;
        assert_eq!(token_loss.to_f64().iter().filter(|loss| **loss != 0.0).count(), kept, "fraction {fraction}");
    }
}

#[test]
fn objectives_of_one_token_or_none_match_640_bits() {
    for spec in arms() {
        for level in LEVELS {
            let spec = LossSpec {
                ratio: Ratio { level, ..Ratio::default() },
                top_entropy: Some(top_entropy(0.3, DroppedTerm::Ratio)),
                kl: Some(Kl { importance: KlImportance::Ratio, ..Kl::plain(0.2, KlEstimator::K3) }),
                entropy_coef: 0.1,
                ..spec.clone()
            };
            agrees(spec.clone(), &batch([[false, true, false], [false; 3]]));
            assert_eq!(agrees(spec, &batch([[false; 3]; 2])), 0.0);
        }
    }
}

#[test]
fn vespo_has_no_weight_of_a_rejected_token() {
    let rejection = Rejection { min: Some(-0.5), ..rejection(RejectionEstimator::K1, RejectionLevel::Token, 0.5) };
    let spec = LossSpec {
        rollout: Some(weights(RolloutSource::Logp, RolloutLevel::Token)),
        rejection: vec![rejection],
        ..with(Objective::Vespo(Vespo::default()))
    };
    let mut problem = batch(FULL);
    problem.extra.rollout_logp.as_mut().expect("there")[[0, 1]] -= 1.0;
    let rejected = agrees(spec.clone(), &problem);
    problem.mask[[0, 1]] = false;
    assert_eq!(rejected, agrees(spec, &problem));
}

#[test]
fn rejection_clamps_log_ratios_to_twenty_nats() {
    let spec = |max| {
        let rejection =
            Rejection { counts: true, ..rejection(RejectionEstimator::K1, RejectionLevel::SequenceSum, max) };
        LossSpec { rejection: vec![rejection], ..with(Objective::PolicyGradient) }
    };
    let mut problem = batch([[true, false, false], [true, false, false]]);
    problem.extra.rollout_logp.as_mut().expect("there")[[0, 0]] += 30.0;
    assert_eq!(agrees(spec(21.0), &problem), agrees(spec(100.0), &problem));
    assert_ne!(agrees(spec(19.0), &problem), agrees(spec(21.0), &problem));
}

#[test]
fn clip_cov_means_have_an_epsilon_in_the_count() {
    let mut problem = batch([[true, false, false], [true, false, false]]);
    problem.advantages = Advantages::Sequence(arr1(&[1200.0, 1000.0]));
    let wide = PpoClip { epsilon_low: 0.99, epsilon_high: 99.0, ..PpoClip::default() };
    let reference = reference::evaluate(&LossSpec::default(), &problem).map(|reference| reference.outcome().logp);
    let logp = reference.expect("a valid case");
    let (first, second) = (logp.at(0, 0), logp.at(1, 0));
    let covariance = |count: f64| (1000.0 - 2200.0 / count) * (second - (first + second) / count);
    let (with_it, without) = (covariance(2.0 + 1e-8), covariance(2.0));
    assert!((with_it - without).abs() > 10.0 * KINK * without.abs().max(1.0));
    // The other token's is smaller by half of that, and lies outside too.
    let between = 0.5 * (with_it + without);
    let beyond = between + (with_it - without).signum();
    let (lower, upper) = (between.min(beyond), between.max(beyond));
    let band = Some(CovarianceBand { fraction: 1.0, lower, upper });
    let spec = with(Objective::ClipCov(ClipCov { clip: wide, selection: band }));
    agrees(spec.clone(), &problem);
    let token_loss = reference::evaluate(&spec, &problem).expect("a valid case").outcome().token_loss;
    assert_eq!(token_loss.at(1, 0), 0.0, "{with_it:e} lies within {lower:e} to {upper:e}");
}

#[test]
fn trust_region_ends_at_its_divergence() {
    let mut problem = batch([[true, false, false], [false; 3]]);
    problem.logits = Array3::from_shape_fn((2, 3, 4), |(.., j)| if j == 0 { 7.0 } else { 0.0 }).into();
    problem.old_logp = Some(Array2::from_elem((2, 3), -0.05));
    let p = 1.0 / (1.0 + 3.0 * (-7.0_f64).exp());
    let (old, p_old) = (-0.05, (-0.05_f64).exp());
    let others = ((1.0 - p_old + 1e-8) / (1.0 - p + 1e-8)).ln();
    let divergences = [
        (Divergence::TotalVariation, p - p_old),
        (Divergence::BinaryKl, p_old * (old - p.ln()) + (1.0 - p_old) * others),
    ];
    for (divergence, distance) in divergences {
        // Upwards, as the advantage asks; and downwards of a negative one only where both directions count.
        for (advantage, two_sided, asked) in [(0.8, false, true), (-0.8, false, false), (-0.8, true, true)] {
            problem.advantages = Advantages::Sequence(arr1(&[advantage, 0.0]));
            for (bound, within) in [(distance * (1.0 - 2e-7), false), (distance * (1.0 + 2e-7), true)] {
                let (low, high) = if advantage > 0.0 { (9.0, bound) } else { (bound, 9.0) };
                let region = TrustRegion { divergence, low, high, two_sided, truncate: None, penalty: 0.0 };
                let spec = with(Objective::TrustRegion(region));
                agrees(spec.clone(), &problem);
                let loss = reference::evaluate(&spec, &problem).expect("a valid case").outcome().token_loss.at(0, 0);
                assert_eq!(loss != 0.0, within || !asked, "{spec:?}");
            }
        }
    }
}
