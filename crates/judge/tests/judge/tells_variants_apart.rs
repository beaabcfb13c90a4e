//! Two losses that carry one name and differ in one line: the answer to one must be rejected as an answer to the other,
//! and accepted as its own.
//!
//! Each pair is a difference between published projects, or a mistake that one of them has had.

use assay_core::problem::{Advantages, Candidate, Dtype, Extra, FloatArray, Problem};
use assay_core::spec::{
    AdvantageLevel, Aspo, Cispo, Divergence, Dro, DroppedTerm, ImportanceSampling, Kl, KlEstimator, KlGradient,
    KlImportance, LogClip, LossSpec, LossTerms, MaskedRatio, Objective, OffPolicyMask, OldLogp, OutOfBounds,
    PositiveTokens, PpoClip, QuantilePrecision, Ratio, RatioLevel, Reduction, Rejection, RejectionEstimator,
    RejectionLevel, RolloutLevel, RolloutSource, RolloutWeights, Rows, Sapo, TokenWeights, TopEntropy, Topr,
    TrustRegion, UnscoredWeight, Vespo,
};
use assay_judge::generate::{Recipe, Regime};
use assay_judge::tolerance::{Grade, Limits};
use assay_judge::trial::JudgedProblem;
use assay_reference as reference;
use ndarray::{Array2, arr0};

/// Five rows, one of them empty, with advantages of both signs and every array that a spec may ask for.
fn problem(advantages: AdvantageLevel) -> Problem {
    let spec = LossSpec { advantages, ..LossSpec::default() };
    let recipe = Recipe {
        shape: [5, 7, 97],
        dtype: Dtype::F32,
        regime: Regime::Normal,
        seed: 23,
        old_logp_noise_scale: 0.7,
        masked_garbage: false,
    };
    let mut problem = recipe.unmasked_problem(&spec).unwrap();
    for (b, length) in [7, 5, 0, 3, 6].into_iter().enumerate() {
        problem.mask.row_mut(b).indexed_iter_mut().for_each(|(t, counts)| *counts = t < length);
    }
    let old_logp = problem.old_logp.as_ref().expect("drawn");
    let wave = |phase: f64| Array2::from_shape_fn((5, 7), |(b, t)| (phase + (7 * b + t) as f64).sin());
    problem.extra = Extra {
        rollout_logp: Some(old_logp + &(0.2 * wave(0.3))),
        rollout_weights: Some(wave(1.1).mapv(|x| (0.5 * x).exp())),
        token_weights: Some(wave(0.7).mapv(|x| if x > 0.9 { 0.0 } else { (0.4 * x).exp() })),
        selected: Some(wave(2.0).mapv(|x| x > 0.5)),
        bias: None,
        dentropy: Some(0.2 * wave(2.9)),
        ..Extra::default()
    };
    if let Advantages::Sequence(advantages) = &mut problem.advantages {
        advantages.assign(&ndarray::arr1(&[1.25, -0.75, 0.5, -1.5, 0.875]));
    }
    problem
}

/// The reference's own answer, rounded to f32.
fn answer(spec: &LossSpec, problem: &Problem) -> Candidate {
    let reference = reference::evaluate(spec, problem).unwrap();
    let outcome = reference.outcome();
    let rounded = |array: &FloatArray<ndarray::Ix2>| {
        let values = Array2::from_shape_fn(problem.mask.dim(), |(b, t)| array.at(b, t) as f32);
        Some(values.into())
    };
    let FloatArray::F64(dlogits) = &outcome.gradient else { panic!("the reference answers in f64") };
    Candidate {
        loss: Some(arr0(reference.loss() as f32).into()),
        gradient: dlogits.mapv(|x| x as f32).into(),
        logp: rounded(&outcome.logp),
        logp_of_others: None,
        entropy: rounded(&outcome.entropy),
        token_loss: rounded(&outcome.token_loss),
        metrics: None,
    }
}

fn ppo(epsilon_low: f64, epsilon_high: f64, delta: Option<f64>, dual_clip: Option<f64>) -> LossSpec {
    let clip = PpoClip { epsilon_low, epsilon_high, delta, dual_clip };
    LossSpec { objective: Objective::PpoClip(clip), ..LossSpec::default() }
}

fn grpo() -> LossSpec {
    LossSpec { reduction: Reduction::SequenceMean { rows: Rows::All }, ..ppo(0.2, 0.2, None, None) }
}

fn level(level: RatioLevel) -> LossSpec {
    LossSpec { ratio: Ratio { level, ..Ratio::default() }, ..ppo(0.2, 0.28, None, None) }
}

fn with_kl(kl: Kl) -> LossSpec {
    LossSpec { kl: Some(kl), ..grpo() }
}

fn objective(objective: Objective) -> LossSpec {
    LossSpec { objective, ..LossSpec::default() }
}

fn weighted(applies_to: LossTerms, level: RolloutLevel, outside: OutOfBounds) -> LossSpec {
    let rollout = RolloutWeights {
        source: RolloutSource::Logp,
        level,
        outside,
        min: None,
        max: Some(1.1),
        clamp: None,
        normalize: false,
        unscored: UnscoredWeight::One,
        applies_to,
    };
    LossSpec { rollout: Some(rollout), ..with_kl(Kl::plain(0.2, KlEstimator::K3)) }
}

fn vespo(weights_of_masked_tokens: bool) -> LossSpec {
    let rollout = RolloutWeights {
        source: RolloutSource::Given,
        level: RolloutLevel::Token,
        outside: OutOfBounds::Truncate,
        min: None,
        max: None,
        clamp: None,
        normalize: false,
        unscored: UnscoredWeight::One,
        applies_to: LossTerms::Policy,
    };
    let vespo = Vespo { weights_of_masked_tokens, ..Vespo::default() };
    LossSpec { rollout: Some(rollout), ..objective(Objective::Vespo(vespo)) }
}

fn aspo() -> Aspo {
    Aspo { dual_clip_positive: 1.2, dual_clip_negative: 1.6, ..Aspo::default() }
}

fn given_weights(applies_to: LossTerms) -> LossSpec {
    let token_weights = Some(TokenWeights { applies_to });
    LossSpec { token_weights, reduction: Reduction::TokenMean, ..with_kl(Kl::plain(0.2, KlEstimator::K3)) }
}

fn rejecting(estimator: RejectionEstimator, level: RejectionLevel) -> LossSpec {
    let max = if level == RejectionLevel::SecondMoment { 0.01 } else { 0.005 };
    let rejection = Rejection { estimator, level, min: None, max, counts: false, drops_from: LossTerms::PolicyAndKl };
    LossSpec { rejection: vec![rejection], ..grpo() }
}

fn region(divergence: Divergence, two_sided: bool, truncate: Option<f64>) -> LossSpec {
    let region = TrustRegion { divergence, low: 0.002, high: 0.002, two_sided, truncate, penalty: 0.0 };
    objective(Objective::TrustRegion(region))
}

/// Pairs under their name.
fn pairs() -> Vec<(&'static str, LossSpec, LossSpec)> {
    let k3 = || Kl::plain(0.2, KlEstimator::K3);
    let corrected = || Kl { importance: KlImportance::Ratio, ..k3() };
    let rows = |rows| LossSpec { reduction: Reduction::SequenceMean { rows }, ..ppo(0.2, 0.2, None, None) };
    let gmpo = |clip, empty_rows| LossSpec {
        ratio: Ratio { level: RatioLevel::Sequence, clip, ..Ratio::default() },
        reduction: Reduction::SequenceMean { rows: Rows::All },
        ..objective(Objective::ImportanceSampling(ImportanceSampling { empty_rows }))
    };
    let log_clip = Some(LogClip { low: 0.2, high: 0.2 });
    let cispo = |lower, upper| objective(Objective::Cispo(Cispo { lower, upper }));
    let sapo = |tau_positive, tau_negative| objective(Objective::Sapo(Sapo { tau_positive, tau_negative }));
    let mask = |behaviour| LossSpec { off_policy_mask: Some(OffPolicyMask { threshold: 0.02, behaviour }), ..grpo() };
    let top = |fraction| LossSpec {
        top_entropy: Some(TopEntropy { fraction, drops: DroppedTerm::PolicyTerm, precision: QuantilePrecision::Exact }),
        kl: Some(k3()),
        ..grpo()
    };
    let bonus = |averaging| LossSpec { entropy_coef: 0.05, entropy_averaging: averaging, ..grpo() };
    let unequal = |of| LossSpec { rollout: vespo(false).rollout, ..level(of) };
    let (token, sequence) = (RolloutLevel::Token, RolloutLevel::Sequence);
    vec![
        ("epsilons swapped", ppo(0.2, 0.28, None, None), ppo(0.28, 0.2, None, None)),
        ("dual clip left out", ppo(0.2, 0.2, None, Some(1.3)), ppo(0.2, 0.2, None, None)),
        (
            "delta below 1 + epsilon_high, on both branches or one",
            ppo(0.2, 0.7, Some(1.15), None),
            ppo(0.2, 0.15, None, None),
        ),
        ("empty rows counted or not", rows(Rows::All), rows(Rows::NonEmpty)),
        (
            "row sums over the padded width",
            rows(Rows::All),
            LossSpec {
                reduction: Reduction::FixedLength { rows: Rows::All, length: None },
                ..ppo(0.2, 0.2, None, None)
            },
        ),
        ("ratio of the sequence or of the token", level(RatioLevel::Sequence), level(RatioLevel::Token)),
        (
            "product or geometric mean of a row's ratios",
            level(RatioLevel::SequenceProduct),
            level(RatioLevel::Sequence),
        ),
        // With one weight for all tokens of a row the two are the same.
        ("GSPO by its mean or by the token", unequal(RatioLevel::Sequence), unequal(RatioLevel::SequenceToken)),
        ("CISPO: epsilon_high as a bound or as an offset", cispo(None, 1.28), cispo(Some(0.8), 1.28)),
        ("CISPO's weight with a gradient", cispo(None, 1.2), objective(Objective::PolicyGradient)),
        ("SAPO's temperatures swapped", sapo(1.0, 1.6), sapo(1.6, 1.0)),
        ("GMPO clipped or not", gmpo(log_clip, false), gmpo(None, false)),
        ("GMPO's empty row", gmpo(log_clip, true), gmpo(log_clip, false)),
        ("VESPO's weights of masked tokens", vespo(true), vespo(false)),
        ("KL corrected for its bias or not", with_kl(corrected()), with_kl(k3())),
        ("KL: value of k3, gradient of k2", with_kl(Kl { gradient: KlGradient::K2, ..k3() }), with_kl(k3())),
        ("KL clamped", with_kl(Kl { value_clamp: Some(0.05), ..k3() }), with_kl(k3())),
        (
            "KL clamped before or after its correction",
            with_kl(Kl { value_clamp: Some(0.05), clamp_after_importance: true, ..corrected() }),
            with_kl(Kl { value_clamp: Some(0.05), ..corrected() }),
        ),
        ("k1 or k3", with_kl(Kl::plain(0.2, KlEstimator::K1)), with_kl(k3())),
        (
            "rollout weights on the KL penalty",
            weighted(LossTerms::Policy, token, OutOfBounds::Truncate),
            weighted(LossTerms::PolicyAndKl, token, OutOfBounds::Truncate),
        ),
        (
            "rollout weights truncated or masked",
            weighted(LossTerms::Policy, token, OutOfBounds::Truncate),
            weighted(LossTerms::Policy, token, OutOfBounds::Mask),
        ),
        (
            "rollout weights of tokens or of sequences",
            weighted(LossTerms::Policy, token, OutOfBounds::Truncate),
            weighted(LossTerms::Policy, sequence, OutOfBounds::Truncate),
        ),
        ("off-policy mask left out", mask(OldLogp::Rollout), grpo()),
        ("top entropy left out", top(0.4), LossSpec { top_entropy: None, ..top(0.4) }),
        ("entropy bonus by tokens or as the loss", bonus(None), bonus(Some(grpo().averaging()))),
        (
            "trust region one-sided or two-sided",
            region(Divergence::TotalVariation, false, None),
            region(Divergence::TotalVariation, true, None),
        ),
        (
            "trust region by total variation or KL",
            region(Divergence::TotalVariation, false, None),
            region(Divergence::BinaryKl, false, None),
        ),
        (
            "ratio held constant or not",
            region(Divergence::TotalVariation, false, Some(3.0)),
            region(Divergence::TotalVariation, false, None),
        ),
        (
            "ratios outside masked or clipped",
            objective(Objective::MaskedRatio(MaskedRatio { lower: 0.8, upper: 1.2, surrogate: false })),
            cispo(Some(0.8), 1.2),
        ),
        ("DRO's penalty", objective(Objective::Dro(Dro { beta: 0.3 })), objective(Objective::PolicyGradient)),
        ("scaled by the accumulation steps", LossSpec { scale: 0.25, ..grpo() }, grpo()),
    ]
}

/// Pairs of losses that differ in ratios outside a band or beyond a cap.
fn bounded_ratios() -> Vec<(&'static str, LossSpec, LossSpec)> {
    let masked = |surrogate| objective(Objective::MaskedRatio(MaskedRatio { lower: 0.8, upper: 1.2, surrogate }));
    let capped = |straight_through| LossSpec {
        ratio: Ratio { cap: Some(0.1), straight_through, ..Ratio::default() },
        ..objective(Objective::ImportanceSampling(ImportanceSampling::default()))
    };
    vec![
        ("masked ratio as a weight or as the term", masked(false), masked(true)),
        ("gradient beyond a cap", capped(false), capped(true)),
    ]
}

/// Of weights that a trainer gives, and of rejections.
fn weights_and_rejections() -> Vec<(&'static str, LossSpec, LossSpec)> {
    vec![
        ("token weights on the KL penalty", given_weights(LossTerms::Policy), given_weights(LossTerms::PolicyAndKl)),
        (
            "a weight of 0 counted in the mean",
            given_weights(LossTerms::PolicyAndKl),
            LossSpec { token_weights: None, rollout: vespo(false).rollout, ..given_weights(LossTerms::PolicyAndKl) },
        ),
        (
            "rejected by ratio or by probability",
            rejecting(RejectionEstimator::K1, RejectionLevel::Token),
            rejecting(RejectionEstimator::TotalVariation, RejectionLevel::Token),
        ),
        (
            "rejected by its largest or smallest",
            rejecting(RejectionEstimator::K1, RejectionLevel::SequenceMax),
            rejecting(RejectionEstimator::K1, RejectionLevel::SequenceMin),
        ),
        (
            "rejected by its square or by the batch's",
            rejecting(RejectionEstimator::K2, RejectionLevel::Token),
            rejecting(RejectionEstimator::K2, RejectionLevel::SecondMoment),
        ),
    ]
}

/// Of TOPR and ASPO, and of what weighs a KL penalty.
fn token_arms() -> Vec<(&'static str, LossSpec, LossSpec)> {
    let k3 = || Kl::plain(0.2, KlEstimator::K3);
    let corrected = || Kl { importance: KlImportance::Ratio, ..k3() };
    vec![
        (
            "TOPR: positive by its advantage or as selected",
            objective(Objective::Topr(Topr::default())),
            objective(Objective::Topr(Topr { positive: PositiveTokens::Selected, ..Topr::default() })),
        ),
        (
            "TOPR's taper left out",
            objective(Objective::Topr(Topr::default())),
            objective(Objective::Topr(Topr { upper: 100.0, ..Topr::default() })),
        ),
        ("ASPO's ratio the right way up", objective(Objective::Aspo(aspo())), ppo(0.2, 0.2, None, Some(3.0))),
        (
            "ASPO's bounds swapped",
            objective(Objective::Aspo(aspo())),
            objective(Objective::Aspo(Aspo { dual_clip_positive: 1.6, dual_clip_negative: 1.2, ..aspo() })),
        ),
        (
            "KL weighed against the old policy or the sampler",
            with_kl(corrected()),
            with_kl(Kl { importance: KlImportance::Rollout, ..k3() }),
        ),
        (
            "KL weighed by the sequence's ratio or the token's",
            LossSpec { kl: Some(corrected()), ..level(RatioLevel::Sequence) },
            LossSpec { kl: Some(Kl { importance: KlImportance::TokenRatio, ..k3() }), ..level(RatioLevel::Sequence) },
        ),
        (
            "KL: gradient of k2 weighed or not",
            with_kl(Kl { gradient: KlGradient::K2Weighted(10.0), ..k3() }),
            with_kl(Kl { gradient: KlGradient::K2, ..k3() }),
        ),
    ]
}

/// The gates that a candidate fails.
fn failures(spec: &LossSpec, problem: &Problem, candidate: &Candidate) -> Vec<String> {
    let judged = JudgedProblem::new(spec, problem)
        .unwrap()
        .judge(candidate.clone(), &Limits::external(Grade::Standard))
        .unwrap();
    judged.failed().map(|verdict| verdict.gate.to_string()).collect()
}

#[test]
fn variants_pass_as_themselves_and_fail_as_their_neighbours() {
    for advantages in [AdvantageLevel::Sequence, AdvantageLevel::Token] {
        let problem = problem(advantages);
        for (name, one, other) in
            pairs().into_iter().chain(bounded_ratios()).chain(weights_and_rejections()).chain(token_arms())
        {
            // What counts rows without tokens asks for one advantage a sequence.
            if name.starts_with("GMPO's empty") && advantages == AdvantageLevel::Token {
                continue;
            }
            let [one, other] = [one, other].map(|spec| LossSpec { advantages, ..spec });
            for (asked, given) in [(&one, &other), (&other, &one)] {
                let own = failures(asked, &problem, &answer(asked, &problem));
                assert!(own.is_empty(), "{name}, {advantages:?}: its own answer fails {own:?}");
                let wrong = failures(asked, &problem, &answer(given, &problem));
                assert!(!wrong.is_empty(), "{name}, {advantages:?}: the other's answer passes");
            }
        }
    }
}
