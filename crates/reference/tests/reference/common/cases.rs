//! Random problems of the plain loss and of the whole family, each with tokens on all sides of its choices.

use assay_core::problem::{Advantages, Dtype, Extra, FloatArray, Problem};
use assay_core::spec::{
    AdvantageLevel, CovarianceBand, DroppedTerm, LogitsTransform, LossSpec, Objective, OldLogp, QuantilePrecision,
    RatioLevel, Reduction, RolloutLevel, Rows, Support, TopCovariance, TopEntropy,
};
use assay_suites::cases::{self as suites, any_ppo_spec};
use ndarray::{Array1, Array2, Array3};
use proptest::collection::vec;
use proptest::option::weighted;
use proptest::prelude::*;
use proptest::sample::select;

use super::draws::{Case, Regime};
use super::family;

/// One token, as drawn.
#[derive(Clone, Debug)]
struct Draw {
    id: usize,
    logits: Vec<f64>,
    counts: bool,
    advantage: f64,
    /// `ℓ − old_logp`, or `ℓ − rollout_logp` where that is what the ratio is against.
    log_ratio: f64,
    /// `ℓ − ref_logp`
    from_reference: f64,
    /// `old_logp − rollout_logp`
    from_sampler: f64,
    unscored: bool,
    weight: f64,
    /// The trainer's own, 0 now and then.
    own_weight: f64,
    selected: bool,
}

/// What is the same for the whole batch, besides the spec.
#[derive(Clone, Copy, Debug)]
struct Layout {
    batch: usize,
    tokens: usize,
    vocab: usize,
    dtype: Dtype,
    /// Whether NaN stands under the mask, and in every array that the spec does not read.
    garbage: bool,
    /// Whether a given weight is a whole sequence's.
    weight_a_row: bool,
}

/// A case of the plain PPO-clip loss, its logits in `regime`.
pub(crate) fn plain(regime: Regime) -> BoxedStrategy<Case> {
    case(any_ppo_spec(), Just(regime), |_| Just(Support::default()).boxed()).boxed()
}

/// A case of any loss with `objective`.
pub(crate) fn of_family(objective: BoxedStrategy<Objective>) -> BoxedStrategy<Case> {
    let regime = prop_oneof![
        8 => Just(Regime::Normal),
        2 => Just(Regime::Small),
        2 => Just(Regime::Wide),
        2 => Just(Regime::Confident),
        2 => Just(Regime::Excluded),
        1 => Just(Regime::Shifted),
        1 => Just(Regime::Low),
        1 => Just(Regime::Tied),
    ];
    case(spec(objective), regime, support).boxed()
}

/// Batches of at most 3 × 4 tokens over at most 7 columns; `support` is of so many.
fn case(
    spec: impl Strategy<Value = LossSpec>,
    regime: impl Strategy<Value = Regime>,
    support: fn(usize) -> BoxedStrategy<Support>,
) -> impl Strategy<Value = Case> {
    let dtype = prop_oneof![3 => Just(Dtype::F64), 1 => select(Dtype::KERNEL.to_vec())];
    let layout = (1..=3_usize, 1..=4_usize, 2..=7_usize, dtype, any::<bool>(), any::<bool>()).prop_map(
        |(batch, tokens, vocab, dtype, garbage, weight_a_row)| Layout {
            batch,
            tokens,
            vocab,
            dtype,
            garbage,
            weight_a_row,
        },
    );
    (spec, layout, regime)
        .prop_flat_map(move |(spec, layout, regime)| {
            // An infinite logit is a finite one beyond a soft cap, and the sampled one where the scale is negative.
            let plain = spec.logits.scale > 0.0 && spec.logits.softcap.is_none();
            let regime = if matches!(regime, Regime::Excluded) && !plain { Regime::Normal } else { regime };
            let rows = vec(weighted(0.88, vec(draw(regime, layout.vocab), layout.tokens)), layout.batch);
            let blank = vec(draw(regime, layout.vocab), layout.tokens);
            (Just(spec), Just(layout), support(layout.vocab), rows, blank)
        })
        .prop_map(|(mut spec, layout, support, rows, mut blank)| {
            // A row that was not drawn is fully masked.
            for token in &mut blank {
                token.counts = false;
            }
            spec.support = support;
            let draws = rows.into_iter().flat_map(|row| row.unwrap_or_else(|| blank.clone())).collect();
            let problem = problem(&spec, layout, draws);
            Case { spec, problem }
        })
}

fn support(vocab: usize) -> BoxedStrategy<Support> {
    let vocab_below = weighted(0.2, Just(vocab - 1));
    let excluded = prop_oneof![3 => Just(Vec::new()), 1 => vec(1..vocab + 2, 1..=2)];
    (vocab_below, excluded, any::<bool>())
        .prop_map(|(vocab, excluded_ids, keep_sampled)| Support { vocab, excluded_ids, keep_sampled, kept: None })
        .boxed()
}

fn problem(spec: &LossSpec, layout: Layout, mut draws: Vec<Draw>) -> Problem {
    let Layout { batch, tokens, vocab, dtype, garbage, weight_a_row } = layout;
    for draw in &mut draws {
        if !family::in_support(spec, draw.id, draw.id) {
            // Column 0 is never left out.
            draw.logits.swap(0, draw.id);
            draw.id = 0;
        }
    }
    let shape = (batch, tokens);
    let draw = |(b, t): (usize, usize)| &draws[b * tokens + t];
    let logits = Array3::from_shape_fn((batch, tokens, vocab), |(b, t, j)| draw((b, t)).logits[j]);
    let mask = Array2::from_shape_fn(shape, |at| draw(at).counts);
    let mut problem = Problem {
        logits: FloatArray::rounded_from(&logits, dtype),
        ids: Array2::from_shape_fn(shape, |at| i64::try_from(draw(at).id).expect("a small vocabulary")),
        mask,
        advantages: match spec.advantages {
            AdvantageLevel::Sequence => Advantages::Sequence(Array1::from_shape_fn(batch, |b| draw((b, 0)).advantage)),
            AdvantageLevel::Token => Advantages::Token(Array2::from_shape_fn(shape, |at| draw(at).advantage)),
        },
        old_logp: None,
        ref_logp: None,
        extra: Extra {
            bias: Some(Array1::from_shape_fn(vocab, |j| 0.7 - 0.4 * j as f64)),
            temperature: Some(Array2::from_shape_fn((batch, if weight_a_row { 1 } else { tokens }), |at| {
                0.5 + draw(at).weight.min(1.5)
            })),
            ..Extra::default()
        },
    };
    let logp = Array2::from_shape_fn(shape, |at| {
        let row = family::logits(&problem, at.0, at.1);
        let row = family::scaled(spec, &problem, &row, draw(at).id);
        family::logp(spec, &row, draw(at).id, family::temperature(spec, &problem, at.0, at.1)).to_f64()
    });
    let against_sampler = spec.old_logp == OldLogp::Rollout;
    // No probability is above 1.
    let below = |logp: f64, by: f64| if logp - by > 0.0 { logp - by.abs() } else { logp - by };
    let first = Array2::from_shape_fn(shape, |at| below(logp[at], draw(at).log_ratio));
    let second = Array2::from_shape_fn(shape, |at| below(first[at], draw(at).from_sampler));
    let (old_logp, mut rollout_logp) = if against_sampler { (second, first) } else { (first, second) };
    for (at, x) in rollout_logp.indexed_iter_mut().filter(|_| !against_sampler) {
        if draw(at).unscored {
            *x = f64::NAN;
        }
    }
    let ref_logp = Array2::from_shape_fn(shape, |at| below(logp[at], draw(at).from_reference));
    let weights =
        Array2::from_shape_fn((batch, if gives_a_row(spec, weight_a_row) { 1 } else { tokens }), |at| draw(at).weight);
    problem.old_logp = Some(old_logp);
    problem.ref_logp = Some(ref_logp);
    problem.extra.rollout_logp = Some(rollout_logp);
    problem.extra.rollout_weights = Some(weights);
    let own_columns = if weight_a_row { 1 } else { tokens };
    problem.extra.token_weights = Some(Array2::from_shape_fn((batch, own_columns), |at| draw(at).own_weight));
    problem.extra.selected = Some(Array2::from_shape_fn(shape, |at| draw(at).selected));
    problem.extra.dentropy = Some(Array2::from_shape_fn(shape, |at| draw(at).weight - 1.0));
    if garbage {
        spoil(spec, &mut problem);
    }
    problem
}

fn gives_a_row(spec: &LossSpec, weight_a_row: bool) -> bool {
    weight_a_row && spec.rollout.as_ref().is_some_and(|rollout| rollout.level == RolloutLevel::Token)
}

/// NaN under the mask and in what `spec` does not read, and no array at all for what is asked of neither.
fn spoil(spec: &LossSpec, problem: &mut Problem) {
    let mask = problem.mask.clone();
    let nan_outside = |array: &mut Array2<f64>| {
        for (at, x) in array.indexed_iter_mut() {
            if !mask[at] {
                *x = f64::NAN;
            }
        }
    };
    let Extra { rollout_logp, dentropy, .. } = &mut problem.extra;
    for array in [&mut problem.old_logp, &mut problem.ref_logp, rollout_logp, dentropy] {
        nan_outside(array.as_mut().expect("drawn"));
    }
    let reads_masked_weights = matches!(&spec.objective, Objective::Vespo(vespo) if vespo.weights_of_masked_tokens);
    let weights = problem.extra.rollout_weights.as_mut().expect("drawn");
    if weights.dim() == mask.dim() && !reads_masked_weights {
        nan_outside(weights);
    }
    let counts_empty_rows = matches!(&spec.objective, Objective::ImportanceSampling(sampling) if sampling.empty_rows);
    let own_weights = problem.extra.token_weights.as_mut().expect("drawn");
    let temperatures = problem.extra.temperature.as_mut().expect("drawn");
    for array in [own_weights, temperatures] {
        if array.dim() == mask.dim() {
            nan_outside(array);
        }
    }
    match &mut problem.advantages {
        Advantages::Token(array) | Advantages::Dlogp(array) => nan_outside(array),
        Advantages::Sequence(array) if !counts_empty_rows => {
            for (a, row) in array.iter_mut().zip(mask.rows()) {
                if !row.iter().any(|counts| *counts) {
                    *a = f64::NAN;
                }
            }
        }
        Advantages::Sequence(_) => {}
    }
    for ((b, t), _) in mask.indexed_iter().filter(|(_, counts)| !**counts) {
        problem.ids[[b, t]] = -7;
        problem.logits.fill_row(b, t, f64::NAN);
    }
    if spec.kl.is_none() {
        problem.ref_logp = None;
    }
    if !spec.reads_old_logp() {
        problem.old_logp = Some(Array2::from_elem(mask.dim(), f64::NAN));
    }
    if !spec.reads_rollout_logp() {
        problem.extra.rollout_logp = None;
    }
    if !spec.logits.bias {
        problem.extra.bias = None;
    }
    if spec.token_weights.is_none() {
        problem.extra.token_weights = None;
    }
}

fn draw(regime: Regime, vocab: usize) -> BoxedStrategy<Draw> {
    // Most near the bounds of clips, some beyond clamps, some so near 0 that exp(d) − 1 − d would cancel.
    let log_ratio = || prop_oneof![8 => -0.6..0.6, 4 => -3.0..3.0, 1 => -30.0..30.0, 2 => -1e-4..1e-4];
    let advantage = prop_oneof![8 => -2.0..2.0, 1 => Just(0.0), 1 => Just(1.0)];
    let weight = prop_oneof![6 => 0.1..3.0, 1 => Just(0.0), 1 => Just(1.0)];
    (0..vocab)
        .prop_flat_map(move |id| {
            let inputs = (Just(id), regime.row(vocab, id), prop::bool::weighted(0.8), advantage.clone());
            let from_sampler = prop_oneof![12 => -0.6..0.6, 3 => -3.0..3.0, 1 => -25.0..25.0];
            let ratios = (log_ratio(), log_ratio(), from_sampler, prop::bool::weighted(0.1));
            let weights = (weight.clone(), weight.clone());
            (inputs, ratios, weights, any::<bool>()).prop_map(|(inputs, ratios, (weight, own_weight), selected)| {
                let (id, logits, counts, advantage) = inputs;
                let (log_ratio, from_reference, from_sampler, unscored) = ratios;
                Draw {
                    id,
                    logits,
                    counts,
                    advantage,
                    log_ratio,
                    from_reference,
                    from_sampler,
                    unscored,
                    weight,
                    own_weight,
                    selected,
                }
            })
        })
        .boxed()
}

/// Every arm, by its name in a file, with the tokens of a batch that the oracle selects and no kernel.
pub(crate) fn objectives() -> Vec<(&'static str, BoxedStrategy<Objective>)> {
    let top = weighted(0.6, (0.1..1.0).prop_map(|fraction| TopCovariance { fraction }));
    let band = (prop_oneof![0.3..1.0, 1.0..1.5], -1.0..0.1, 0.1..1.5)
        .prop_map(|(fraction, lower, width)| CovarianceBand { fraction, lower, upper: lower + width });
    let selections = (top, weighted(0.7, band), any::<bool>());
    let selecting = |arm: BoxedStrategy<Objective>| {
        (arm, selections.clone()).prop_map(|(mut objective, (top, band, empty_rows))| {
            match &mut objective {
                Objective::KlCov(cov) => cov.selection = top,
                Objective::ClipCov(cov) => cov.selection = band,
                Objective::ImportanceSampling(sampling) => sampling.empty_rows = empty_rows,
                _ => {}
            }
            objective
        })
    };
    // The formulas here are of log-probabilities and entropies; a cross-entropy reads the whole row.
    let of_logp = suites::objectives().into_iter().filter(|(name, _)| *name != "cross_entropy");
    of_logp.map(|(name, arm)| (name, selecting(arm).boxed())).collect()
}

fn logits_transform() -> BoxedStrategy<LogitsTransform> {
    let whole = (select(vec![1.0, 0.5, -0.7]), weighted(0.5, select(vec![3.0, 30.0])), any::<bool>())
        .prop_map(|(scale, softcap, bias)| LogitsTransform { scale, softcap, bias });
    prop_oneof![2 => Just(LogitsTransform::default()), 1 => whole].boxed()
}

/// Every option of the loss; the support comes with the vocabulary.
fn spec(objective: BoxedStrategy<Objective>) -> BoxedStrategy<LossSpec> {
    let fraction = prop_oneof![0.1..0.95, select(vec![0.25, 0.5, 0.75])];
    let top_entropy = (fraction, select(vec![DroppedTerm::PolicyTerm, DroppedTerm::Ratio]))
        .prop_map(|(fraction, drops)| TopEntropy { fraction, drops, precision: QuantilePrecision::Exact });
    let drawn =
        (objective, logits_transform(), weighted(0.3, top_entropy), suites::family(Just(Objective::None).boxed()));
    drawn
        .prop_map(|(objective, logits, top_entropy, rest)| {
            let mut spec = LossSpec { objective, logits, top_entropy, support: Support::default(), ..rest };
            if matches!(&spec.objective, Objective::ImportanceSampling(sampling) if sampling.empty_rows) {
                spec.ratio.level = RatioLevel::Sequence;
                spec.advantages = AdvantageLevel::Sequence;
                spec.reduction = Reduction::SequenceMean { rows: Rows::All };
            }
            spec
        })
        .boxed()
}
