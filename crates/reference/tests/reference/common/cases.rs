//! Random problems of the plain PPO-clip loss, in one regime of logits.

use assay_core::problem::{Advantages, Dtype, Extra, FloatArray, Problem};
use assay_core::spec::{AdvantageLevel, LossSpec, OldLogp, TemperatureDivides};
use assay_suites::cases::any_ppo_spec;
use ndarray::{Array1, Array2, Array3};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

pub(crate) use super::draws::{Case, Regime, runner};

/// One token, as drawn.
#[derive(Clone, Debug)]
struct Draw {
    id: usize,
    logits: Vec<f64>,
    counts: bool,
    advantage: f64,
    log_ratio: f64,
    log_ratio_to_ref: f64,
}

/// Batches of at most 2 × 3 tokens over at most 6 columns.
pub(crate) fn case(regime: Regime) -> impl Strategy<Value = Case> {
    let shape = (1..=2_usize, 1..=3_usize, 2..=6_usize);
    let dtype = select(vec![Dtype::F64, Dtype::F32, Dtype::Bf16, Dtype::F16]);
    (any_ppo_spec(), shape, dtype)
        .prop_flat_map(move |(spec, (batch, tokens, vocab), dtype)| {
            let rows = vec(option::weighted(0.85, vec(draw(regime, vocab), tokens)), batch);
            let blank = vec(draw(regime, vocab), tokens);
            (Just(spec), Just((batch, tokens, vocab)), Just(dtype), rows, blank)
        })
        .prop_map(|(spec, shape, dtype, rows, mut blank)| {
            // A row that was not drawn is fully masked.
            for token in &mut blank {
                token.counts = false;
            }
            let draws: Vec<Draw> = rows.into_iter().flat_map(|row| row.unwrap_or_else(|| blank.clone())).collect();
            let problem = problem(&spec, shape, dtype, &draws);
            Case { spec, problem }
        })
}

fn problem(spec: &LossSpec, shape: (usize, usize, usize), dtype: Dtype, draws: &[Draw]) -> Problem {
    let (batch, tokens, vocab) = shape;
    let logits = draws.iter().flat_map(|draw| draw.logits.clone()).collect();
    let logits = Array3::from_shape_vec((batch, tokens, vocab), logits).expect("V logits a draw");
    let logits = FloatArray::rounded_from(&logits, dtype);
    let draw = |b: usize, t: usize| &draws[b * tokens + t];
    let shape = (batch, tokens);
    let offset_logp = |offset: &dyn Fn(&Draw) -> f64| {
        Array2::from_shape_fn(shape, |(b, t)| logp(spec, &logits.row(b, t), draw(b, t).id) + offset(draw(b, t)))
    };
    Problem {
        ids: Array2::from_shape_fn(shape, |(b, t)| i64::try_from(draw(b, t).id).expect("a small vocabulary")),
        mask: Array2::from_shape_fn(shape, |(b, t)| draw(b, t).counts),
        advantages: match spec.advantages {
            AdvantageLevel::Sequence => Advantages::Sequence(Array1::from_shape_fn(batch, |b| draw(b, 0).advantage)),
            AdvantageLevel::Token => Advantages::Token(Array2::from_shape_fn(shape, |(b, t)| draw(b, t).advantage)),
        },
        old_logp: (spec.old_logp == OldLogp::Given).then(|| offset_logp(&|draw| -draw.log_ratio)),
        ref_logp: spec.kl.as_ref().map(|_| offset_logp(&|draw| -draw.log_ratio_to_ref)),
        logits,
        extra: Extra::default(),
    }
}

/// About the token's log-probability: good enough to place `old_logp` at a wanted ratio.
fn logp(spec: &LossSpec, logits: &[f64], id: usize) -> f64 {
    let (before, after) = match spec.temperature_divides {
        TemperatureDivides::Logits => (spec.temperature, 1.0),
        TemperatureDivides::Logp => (1.0, spec.temperature),
    };
    let sum: f64 = logits.iter().map(|x| ((x - logits[id]) / before).exp()).sum();
    -sum.ln() / after
}

fn draw(regime: Regime, vocab: usize) -> impl Strategy<Value = Draw> {
    // Most near the clip bounds, some far out, some so near 0 that exp(d) − 1 − d would cancel.
    let log_ratio = || prop_oneof![4 => -0.6..0.6, 2 => -3.0..3.0, 1 => -30.0..30.0, 2 => -1e-4..1e-4];
    let advantage = prop_oneof![4 => -2.0..2.0, 1 => Just(0.0), 1 => Just(1.0)];
    (0..vocab).prop_flat_map(move |id| {
        (Just(id), regime.row(vocab, id), prop::bool::weighted(0.8), advantage.clone(), log_ratio(), log_ratio())
            .prop_map(|(id, logits, counts, advantage, log_ratio, log_ratio_to_ref)| Draw {
                id,
                logits,
                counts,
                advantage,
                log_ratio,
                log_ratio_to_ref,
            })
    })
}
