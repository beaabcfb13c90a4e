//! Kept sets: the reference against itself with logits of −∞ outside each set, and against the sum of a loss over the set and one
//! over the vocabulary.

use assay_core::problem::{Dtype, FloatArray, NO_ENTRY, Outcome, Problem};
use assay_core::spec::{
    KeptSupport, Kl, KlEstimator, KlImportance, LogitsTransform, LossSpec, Objective, OldLogp, Ratio, RatioLevel,
    SoftmaxRange, Support, Temperature,
};
use assay_judge::generate::{Recipe, Regime};
use assay_reference as reference;
use ndarray::Array3;

/// The unit roundoff of f64.
const U: f64 = f64::EPSILON / 2.0;

const SHAPE: [usize; 3] = [3, 4, 29];

fn kept(entropy: SoftmaxRange, kl: SoftmaxRange) -> Support {
    Support { kept: Some(KeptSupport { entropy, kl }), ..Support::default() }
}

/// Losses over kept sets alone, with every option that changes logits.
fn over_sets() -> Vec<LossSpec> {
    let set = kept(SoftmaxRange::Set, SoftmaxRange::Set);
    let plain = LossSpec {
        support: set.clone(),
        kl: Some(Kl::plain(0.1, KlEstimator::K3)),
        entropy_coef: 0.02,
        ..LossSpec::default()
    };
    let logits = LogitsTransform { softcap: Some(20.0), scale: -0.5, bias: true };
    let part = Support { vocab: Some(25), excluded_ids: vec![3, 5], keep_sampled: true, ..set };
    let ratio = Ratio { level: RatioLevel::Sequence, ..Ratio::default() };
    vec![
        plain.clone(),
        LossSpec { logits, support: part, temperature: 0.7.into(), ..plain.clone() },
        LossSpec { ratio, temperature: Temperature::Given, ..plain },
        LossSpec {
            ids_per_token: 3,
            support: kept(SoftmaxRange::Set, SoftmaxRange::Set),
            ..LossSpec::from_cotangents(true)
        },
    ]
}

fn recipe(regime: Regime, seed: u64) -> Recipe {
    Recipe { shape: SHAPE, dtype: Dtype::F32, regime, seed, old_logp_noise_scale: 0.3, masked_garbage: true }
}

/// Whether column `j` is in the set of the unmasked token at `(b, t)`, or is its own.
fn inside(problem: &Problem, (b, t): (usize, usize), j: usize) -> bool {
    let kept = problem.extra.kept_ids.as_ref().expect("drawn by the spec");
    let same = |id: i64| usize::try_from(id) == Ok(j);
    (0..kept.dim().2).any(|k| same(kept[[b, t, k]].into())) || same(problem.ids[[b, t]])
}

/// Returns a problem without its sets, whose logits are −∞ on the side of `left_out`.
fn with_holes(problem: &Problem, scale: f64, left_out: impl Fn(bool) -> bool) -> Problem {
    let hole = if scale < 0.0 { f64::INFINITY } else { f64::NEG_INFINITY };
    let logits = problem.logits.to_f64();
    let holes = Array3::from_shape_fn(logits.dim(), |(b, t, j)| {
        let counts = problem.mask[[b, t]];
        if counts && left_out(inside(problem, (b, t), j)) { hole } else { logits[[b, t, j]] }
    });
    let mut other = problem.with_logits(FloatArray::F64(holes));
    other.extra.kept_ids = None;
    other
}

fn without_kept(spec: &LossSpec) -> LossSpec {
    LossSpec { support: Support { kept: None, ..spec.support.clone() }, ..spec.clone() }
}

fn outcome(spec: &LossSpec, problem: &Problem) -> Outcome {
    reference::evaluate(spec, problem).unwrap().outcome()
}

#[test]
fn kept_set_has_the_bits_of_logits_of_minus_infinity() {
    let mut gradients = 0;
    for (spec, regime) in over_sets().into_iter().flat_map(|spec| Regime::FINITE.map(|regime| (spec.clone(), regime))) {
        for seed in 0..6 {
            let problem = recipe(regime, seed).problem(&spec).unwrap();
            // A softcap makes an infinite logit finite: there the set is left to the support, which the cap does not reach.
            let capped = spec.logits.softcap.is_some();
            if capped {
                continue;
            }
            let of_set = outcome(&spec, &problem);
            let holes = with_holes(&problem, spec.logits.scale, |inside| !inside);
            let of_holes = outcome(&without_kept(&spec), &holes);
            let bits = |outcome: &Outcome| {
                let arrays = [outcome.logp.to_f64(), outcome.entropy.to_f64(), outcome.token_loss.to_f64()];
                let tokens = arrays.into_iter().flatten();
                let all = tokens.chain(outcome.gradient.to_f64()).chain([outcome.loss.value()]);
                all.map(|x| (x + 0.0).to_bits()).collect::<Vec<u64>>()
            };
            assert_eq!(bits(&of_set), bits(&of_holes), "{regime} {seed} {spec:?}");
            for ((b, t, j), &dx) in of_set.gradient.to_f64().indexed_iter() {
                let counts = problem.mask[[b, t]] && inside(&problem, (b, t), j);
                assert!(counts || dx == 0.0, "{regime} {seed}: {b} {t} {j}: {dx}");
                gradients += usize::from(dx != 0.0);
            }
        }
    }
    assert!(gradients > 1000, "{gradients} dlogits were not 0");
}

/// A support that leaves out the same columns for one token alone: transforms and a cap are then tested too.
#[test]
fn kept_set_of_one_token_is_a_support() {
    for (spec, seed) in over_sets().into_iter().flat_map(|spec| (0..6).map(move |seed| (spec.clone(), seed))) {
        let recipe = Recipe { shape: [1, 1, 29], masked_garbage: false, ..recipe(Regime::Normal, seed) };
        let problem = recipe.unmasked_problem(&spec).unwrap();
        let entries = problem.tokens().kept_entries(&spec, (0, 0)).unwrap();
        let excluded_ids = (0..29).filter(|j| !entries.contains(j)).collect();
        let support = Support { vocab: None, excluded_ids, keep_sampled: false, kept: None };
        let of_support = outcome(&LossSpec { support, ..spec.clone() }, &problem);
        let of_set = outcome(&spec, &problem);
        assert_eq!(of_set.gradient.to_f64(), of_support.gradient.to_f64(), "{seed} {spec:?}");
        assert_eq!(of_set.loss.value(), of_support.loss.value(), "{seed} {spec:?}");
    }
}

/// A loss whose entropy and KL penalty are over the vocabulary is the sum of its policy term over the set and of these without a set.
#[test]
fn kept_entropy_and_kl_over_vocabulary_add_up() {
    let vocabulary = SoftmaxRange::Vocabulary;
    let penalties = [KlImportance::One, KlImportance::Score, KlImportance::Rollout];
    let penalties = penalties.map(|importance| Kl { importance, ..Kl::plain(0.4, KlEstimator::K3) });
    for (kl, transformed) in penalties.into_iter().flat_map(|kl| [(kl.clone(), false), (kl, true)]) {
        let logits = LogitsTransform { softcap: Some(20.0), scale: -0.5, bias: true };
        let spec = LossSpec {
            support: kept(vocabulary, vocabulary),
            logits: if transformed { logits } else { LogitsTransform::default() },
            temperature: 0.7.into(),
            kl: Some(kl.clone()),
            entropy_coef: 0.3,
            ..LossSpec::default()
        };
        let policy = LossSpec { kl: None, entropy_coef: 0.0, ..spec.clone() };
        let rest = without_kept(&LossSpec { objective: Objective::None, ..spec.clone() });
        for (regime, seed) in Regime::FINITE.into_iter().flat_map(|regime| (0..4).map(move |seed| (regime, seed))) {
            let problem = recipe(regime, seed).problem(&spec).unwrap();
            let [all, policy, rest] = [&spec, &policy, &rest].map(|spec| outcome(spec, &problem));
            // The policy's are over the set, the entropy over the vocabulary.
            assert_eq!(all.logp.to_f64(), policy.logp.to_f64(), "{regime} {seed}");
            assert_eq!(all.entropy.to_f64(), rest.entropy.to_f64(), "{regime} {seed}");
            assert_eq!(all.metrics.kl_mean, rest.metrics.kl_mean, "{regime} {seed}");
            let near = |x: f64, [a, b]: [f64; 2], what: &str| {
                let allowed = 8.0 * U * (a.abs() + b.abs());
                assert!((x - (a + b)).abs() <= allowed, "{regime} {seed} {what}: {x} for {a} + {b}");
            };
            near(all.loss.value(), [policy.loss.value(), rest.loss.value()], "loss");
            let [all, policy, rest] = [all, policy, rest].map(|outcome| outcome.gradient.to_f64());
            let mut outside = 0;
            for (at, &dx) in all.indexed_iter() {
                near(dx, [policy[at], rest[at]], "dlogits");
                let (b, t, j) = at;
                outside += usize::from(problem.mask[[b, t]] && !inside(&problem, (b, t), j) && dx != 0.0);
            }
            assert!(outside > 0 || regime == Regime::Confident, "{regime} {seed}: no dlogit outside of a set");
        }
    }
}

/// A penalty that the ratio weighs has a gradient through both softmaxes: central differences of the whole loss.
#[test]
fn kept_kl_weighed_by_the_ratio_has_the_gradient_of_its_loss() {
    let vocabulary = SoftmaxRange::Vocabulary;
    let levels = [RatioLevel::Token, RatioLevel::Sequence];
    for (level, seed) in levels.into_iter().flat_map(|level| (0..4).map(move |seed| (level, seed))) {
        let spec = LossSpec {
            support: kept(SoftmaxRange::Set, vocabulary),
            ratio: Ratio { level, ..Ratio::default() },
            objective: Objective::None,
            kl: Some(Kl { importance: KlImportance::Ratio, ..Kl::plain(0.4, KlEstimator::K3) }),
            entropy_coef: 0.3,
            ..LossSpec::default()
        };
        let problem = recipe(Regime::Normal, seed).problem(&spec).unwrap();
        let exact = outcome(&spec, &problem).gradient.to_f64();
        let loss = |at: (usize, usize, usize), by: f64| {
            let mut logits = problem.logits.to_f64();
            logits[at] += by;
            reference::evaluate(&spec, &problem.with_logits(FloatArray::F64(logits))).unwrap().loss()
        };
        let mut compared = 0;
        for (at, &dx) in exact.indexed_iter().filter(|((b, t, j), _)| problem.mask[[*b, *t]] && j % 3 == 0) {
            let step = 1e-5;
            let difference = (loss(at, step) - loss(at, -step)) / (2.0 * step);
            assert!((dx - difference).abs() < 1e-9, "{level:?} {seed} {at:?}: {dx} for {difference}");
            compared += usize::from(dx != 0.0);
        }
        assert!(compared > 10);
    }
}

#[test]
fn kept_set_may_have_any_order_and_any_empty_places() {
    let spec = &over_sets()[0];
    let problem = recipe(Regime::Normal, 1).problem(spec).unwrap();
    let expected = outcome(spec, &problem);
    let kept = problem.extra.kept_ids.clone().expect("drawn");
    let (batch, tokens, count) = kept.dim();
    let mut other = problem.clone();
    let reversed = Array3::from_shape_fn((batch, tokens, 2 * count), |(b, t, k)| {
        if k % 2 == 0 { NO_ENTRY } else { kept[[b, t, count - 1 - k / 2]] }
    });
    other.extra.kept_ids = Some(reversed);
    let given = outcome(spec, &other);
    assert_eq!(given.gradient.to_f64(), expected.gradient.to_f64());
    assert_eq!(given.loss.value(), expected.loss.value());
}

#[test]
fn kept_set_that_does_not_fit_is_refused() {
    let spec = over_sets()[0].clone();
    let kept_sampled = LossSpec { support: Support { keep_sampled: true, ..spec.support.clone() }, ..spec.clone() };
    let recipe = Recipe { masked_garbage: false, ..recipe(Regime::Normal, 2) };
    let mut problem = recipe.unmasked_problem(&spec).unwrap();
    problem.mask[[2, 3]] = false;
    let sets = Array3::from_shape_fn((3, 4, 3), |(b, t, k)| if k == 1 { problem.ids[[b, t]] as i32 } else { NO_ENTRY });
    let refusal = |spec: &LossSpec, change: &dyn Fn(&mut Problem)| {
        let mut changed = problem.clone();
        changed.extra.kept_ids = Some(sets.clone());
        change(&mut changed);
        reference::evaluate(spec, &changed).map(|_| ()).map_err(|error| error.to_string())
    };
    let at = |b, t, k, id| move |problem: &mut Problem| problem.extra.kept_ids.as_mut().unwrap()[[b, t, k]] = id;
    assert_eq!(refusal(&spec, &|_| {}), Ok(()));
    let own = problem.ids[[1, 2]];
    let not_own = i32::try_from((own + 1) % 29).unwrap();
    // A masked token's set may hold anything.
    assert_eq!(refusal(&spec, &at(2, 3, 0, 77)), Ok(()));
    let none = refusal(&spec, &|problem| problem.extra.kept_ids = None);
    assert_eq!(none.unwrap_err(), "`kept_ids`: not given, expected [3, 4, K] because the spec has `support.kept`");
    let shape = refusal(&spec, &|problem| problem.extra.kept_ids = Some(Array3::zeros((3, 5, 2))));
    assert_eq!(shape.unwrap_err(), "`kept_ids`: got shape [3, 5, 2], expected [3, 4, K] with K ≥ 1");
    let range = "expected 0 ≤ id < V = 29, or −1 for no entry, on an unmasked token";
    for id in [29, -2, i32::MIN, i32::MAX] {
        assert_eq!(refusal(&spec, &at(1, 2, 2, id)).unwrap_err(), format!("`kept_ids[1,2,2]`: got {id}, {range}"));
    }
    let twice = refusal(&spec, &at(1, 2, 2, own as i32)).unwrap_err();
    assert_eq!(twice, format!("`kept_ids[1,2,2]`: got {own}, expected an id that is not at `kept_ids[1,2,1]` too"));
    let outside = refusal(&spec, &at(1, 2, 1, not_own)).unwrap_err();
    let expected = "expected an id within the token's `kept_ids`, a mask of 0, or `support.keep_sampled: true`";
    assert_eq!(outside, format!("`ids[1,2]`: got {own}, {expected}"));
    // Put back, a sampled id that is alone has the probability 1.
    assert_eq!(refusal(&kept_sampled, &at(1, 2, 1, not_own)), Ok(()));
    assert_eq!(refusal(&kept_sampled, &at(1, 2, 1, NO_ENTRY)), Ok(()));
}

#[test]
fn kept_spec_that_is_not_computed_is_refused() {
    let vocabulary = SoftmaxRange::Vocabulary;
    let divides_logp = |support| LossSpec {
        support,
        temperature: 0.7.into(),
        temperature_divides: assay_core::spec::TemperatureDivides::Logp,
        ..LossSpec::default()
    };
    let weighed = Kl { importance: KlImportance::TokenRatio, ..Kl::plain(0.1, KlEstimator::K3) };
    for (spec, expected) in [
        (
            divides_logp(kept(vocabulary, SoftmaxRange::Set)),
            "spec field `support.kept.entropy`: got vocabulary, expected set with `temperature_divides: logp`",
        ),
        (
            divides_logp(kept(SoftmaxRange::Set, vocabulary)),
            "spec field `support.kept.kl`: got vocabulary, expected set with `temperature_divides: logp`",
        ),
        (
            LossSpec { kl: Some(weighed), support: kept(SoftmaxRange::Set, vocabulary), ..LossSpec::default() },
            "spec field `support.kept.kl`: got vocabulary, expected set with `kl.importance: token_ratio`",
        ),
    ] {
        assert_eq!(spec.check().unwrap_err().to_string(), expected);
    }
    assert_eq!(divides_logp(kept(SoftmaxRange::Set, SoftmaxRange::Set)).check(), Ok(()));
    assert_eq!(LossSpec { old_logp: OldLogp::Current, ..over_sets()[0].clone() }.check(), Ok(()));
}
