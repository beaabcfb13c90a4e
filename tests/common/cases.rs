//! Random problems over every option of [`LossSpec`], for tests that hold on all of them.

use std::f64::consts::TAU;

use assay::problem::{Advantages, Dtype, Extra, FloatArray, Problem};
use assay::spec::{
    AdvantageLevel, Kl, KlEstimator, LossSpec, Objective, OldLogp, PpoClip, Reduction, Rows, TemperatureDivides,
};
use ndarray::{Array1, Array2, Array3};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, FileFailurePersistence, TestRunner};

/// Where logits lie. Each has broken a published kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Regime {
    /// Within ±0.1: all columns weigh the same.
    Small,
    /// Normal, σ = 1.
    Normal,
    /// Normal, σ = 8.
    Wide,
    /// Normal, around 10⁴ or −10⁴.
    Shifted,
    /// Normal, around −120: a maximum that starts at 0 underflows every exponential.
    Low,
    /// One column 30, 60 or 100 nats above the rest, the target or another.
    Confident,
    /// Normal, with −∞ on ids other than the target.
    Excluded,
    /// 0, 1 or 2: columns tie, the largest among them.
    Tied,
}

impl Regime {
    /// `V` logits of one token.
    fn row(self, vocab: usize, id: usize) -> BoxedStrategy<Vec<f64>> {
        let normals = |mean: f64, sigma: f64| vec(normal().prop_map(move |x| mean + sigma * x), vocab);
        match self {
            Regime::Small => vec(-0.1..0.1, vocab).boxed(),
            Regime::Normal => normals(0.0, 1.0).boxed(),
            Regime::Wide => normals(0.0, 8.0).boxed(),
            Regime::Shifted => prop_oneof![normals(1e4, 1.0), normals(-1e4, 1.0)].boxed(),
            Regime::Low => normals(-120.0, 1.0).boxed(),
            Regime::Confident => (normals(0.0, 0.5), select(vec![30.0, 60.0, 100.0]), 0..2 * vocab)
                .prop_map(move |(mut row, margin, peak)| {
                    row[if peak < vocab { peak } else { id }] += margin;
                    row
                })
                .boxed(),
            Regime::Excluded => (normals(0.0, 2.0), vec(any::<bool>(), vocab))
                .prop_map(move |(row, excluded)| {
                    let keep = |j: usize| j == id || !excluded[j];
                    row.into_iter().enumerate().map(|(j, x)| if keep(j) { x } else { f64::NEG_INFINITY }).collect()
                })
                .boxed(),
            Regime::Tied => vec(select(vec![0.0, 1.0, 2.0]), vocab).boxed(),
        }
    }
}

/// One spec and one batch for it.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) spec: LossSpec,
    pub(crate) problem: Problem,
}

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
    (spec(), shape, dtype)
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

/// Every option of the loss.
pub(crate) fn spec() -> impl Strategy<Value = LossSpec> {
    let clip =
        (0.05..0.4, 0.05..0.6, option::of(select(vec![1.02, 1.3, 2.5])), option::of(select(vec![1.1, 1.5, 3.0])))
            .prop_map(|(epsilon_low, epsilon_high, delta, dual_clip)| PpoClip {
                epsilon_low,
                epsilon_high,
                delta,
                dual_clip,
            });
    let estimator = select(vec![KlEstimator::K1, KlEstimator::K2, KlEstimator::K3, KlEstimator::Abs]);
    let kl = option::of((0.01..1.0, estimator).prop_map(|(beta, estimator)| Kl::plain(beta, estimator)));
    let reduction = select(vec![
        Reduction::TokenMean,
        Reduction::SequenceMean { rows: Rows::All },
        Reduction::SequenceMean { rows: Rows::NonEmpty },
        Reduction::FixedLength { rows: Rows::All, length: Some(7) },
        Reduction::Normalizer(27.5),
    ]);
    (
        clip,
        select(vec![AdvantageLevel::Sequence, AdvantageLevel::Token]),
        prop_oneof![4 => Just(OldLogp::Given), 1 => Just(OldLogp::Current)],
        select(vec![1.0, 0.5, 0.7, 1.7]),
        select(vec![TemperatureDivides::Logits, TemperatureDivides::Logp]),
        kl,
        select(vec![0.0, 0.01, -0.3]),
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

/// A standard normal deviate (Box and Muller 1958).
fn normal() -> impl Strategy<Value = f64> {
    (f64::MIN_POSITIVE..1.0, 0.0..TAU).prop_map(|(u, angle): (f64, f64)| (-2.0 * u.ln()).sqrt() * angle.cos())
}

/// A runner that writes the seeds of failures to `failures`. `PROPTEST_CASES` sets how many cases it draws, else
/// `cases`.
pub(crate) fn runner(failures: &'static str, cases: u32) -> TestRunner {
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() { Config::default().cases } else { cases };
    let failure_persistence = FileFailurePersistence::Direct(failures);
    TestRunner::new(Config { cases, failure_persistence: Some(Box::new(failure_persistence)), ..Config::default() })
}
