//! The figures of a pair of log-probabilities: what projects log, the floor, and where the difference is.

use std::collections::BTreeMap;

use ndarray::Array2;

use super::RoundingFloor;
use assay_schema::agreement::{
    AgreementFigure, DifferenceAtPosition, DifferenceOfSequence, DifferenceTrend, TokenPair,
};

/// The number of ranges that positions are summarised by.
const RANGES: usize = 16;

/// The sequences that are listed.
const SEQUENCES: usize = 5;

/// The rank correlation from which on a trend is worth a word.
const CORRELATED: f64 = 0.3;

/// The fewest tokens of which a correlation is told.
const FEWEST: usize = 20;

/// Returns the difference, `trainer − sampler`, in nats.
pub(super) fn difference(pair: &TokenPair) -> f64 {
    pair.trainer - pair.sampler
}

/// Returns the size of the difference, `|trainer − sampler|`, in nats.
pub(super) fn size(pair: &TokenPair) -> f64 {
    difference(pair).abs()
}

/// Evaluates the figures that projects log of such a pair.
pub(super) fn figures(pairs: &[TokenPair], [low, high]: [f64; 2]) -> Vec<AgreementFigure> {
    let count = pairs.len() as f64;
    let mean = |of: &dyn Fn(&TokenPair) -> f64| pairs.iter().map(of).sum::<f64>() / count;
    let mut sizes: Vec<f64> = pairs.iter().map(size).collect();
    sizes.sort_by(f64::total_cmp);
    // The smallest size that at least 99 % of all do not exceed.
    let rank = (99 * pairs.len()).div_ceil(100);
    let p99 = sizes.get(rank.max(1) - 1).copied().unwrap_or(f64::NAN);
    let largest = sizes.last().copied().unwrap_or(f64::NAN);
    let apart = |pair: &TokenPair| (pair.trainer.exp() - pair.sampler.exp()).abs();
    let largest_apart = pairs.iter().map(apart).fold(f64::NAN, f64::max);
    let k3 = |pair: &TokenPair| {
        let x = difference(pair);
        x.exp_m1() - x
    };
    let outside = |pair: &TokenPair| f64::from(!(low..=high).contains(&difference(pair).exp()));
    let weight = |pair: &TokenPair| difference(pair).exp();
    let effective = mean(&weight).powi(2) / mean(&|pair| weight(pair).powi(2));
    let figure = |name: &str, value: f64, definition: String| AgreementFigure { name: name.into(), value, definition };
    vec![
        figure("mean |Δ|", mean(&size), "mean of |trainer − sampler|, nats".into()),
        figure("p99 |Δ|", p99, "|trainer − sampler| that 99 % of the tokens do not exceed, nats".into()),
        figure("max |Δ|", largest, "the largest |trainer − sampler|, nats".into()),
        figure(
            "NeMo-RL token_mult_prob_error",
            mean(&|pair| size(pair).exp()),
            "mean of exp(|trainer − sampler|)".into(),
        ),
        figure("verl rollout_probs_diff_mean", mean(&apart), "mean of |exp(trainer) − exp(sampler)|".into()),
        figure("verl rollout_probs_diff_max", largest_apart, "the largest |exp(trainer) − exp(sampler)|".into()),
        figure("k1", mean(&|pair| -difference(pair)), "mean of sampler − trainer, nats: KL(sampler ‖ trainer)".into()),
        figure("k3", mean(&k3), "mean of exp(x) − x − 1 with x = trainer − sampler, nats".into()),
        figure("ratios outside", mean(&outside), format!("share of exp(trainer − sampler) outside [{low}, {high}]")),
        figure("effective sample size", effective, "(Σ w)² / (N Σ w²) with w = exp(trainer − sampler)".into()),
    ]
}

/// Summarises the floor of all tokens, and the tokens that rounding can carry across a bound of the ratio.
pub(super) fn floor(pairs: &[TokenPair], bounds: [f64; 2]) -> RoundingFloor {
    let mut floors: Vec<f64> = pairs.iter().filter_map(|pair| pair.floor).collect();
    floors.sort_by(f64::total_cmp);
    let within = |pair: &TokenPair| pair.floor.unwrap_or(0.0);
    // The logarithm of the ratio may be off by the floor.
    let near = |pair: &&TokenPair| bounds.iter().any(|bound| (difference(pair) - bound.ln()).abs() <= within(pair));
    RoundingFloor {
        median: floors[floors.len() / 2],
        largest: floors[floors.len() - 1],
        beyond: pairs.iter().filter(|pair| size(pair) > within(pair)).count() as u64,
        bounds,
        may_cross: pairs.iter().filter(near).count() as u64,
    }
}

/// Summarises the difference by position.
pub(super) fn positions(pairs: &[TokenPair]) -> Vec<DifferenceAtPosition> {
    let last = pairs.iter().map(|pair| pair.t).max().unwrap_or(0);
    let width = (last + 1).div_ceil(RANGES).max(1);
    let mut ranges: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    for pair in pairs {
        ranges.entry(pair.t / width).or_default().push(size(pair));
    }
    let summary = |(range, sizes): (usize, Vec<f64>)| DifferenceAtPosition {
        from: range * width,
        to: ((range + 1) * width - 1).min(last),
        tokens: sizes.len() as u64,
        mean: sizes.iter().sum::<f64>() / sizes.len() as f64,
        largest: sizes.iter().copied().fold(0.0, f64::max),
    };
    ranges.into_iter().map(summary).collect()
}

/// Returns the sequences with the largest mean difference.
pub(super) fn sequences(pairs: &[TokenPair]) -> Vec<DifferenceOfSequence> {
    let mut rows: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    for pair in pairs {
        rows.entry(pair.b).or_default().push(size(pair));
    }
    let summary = |(sequence, sizes): (usize, Vec<f64>)| DifferenceOfSequence {
        sequence,
        tokens: sizes.len() as u64,
        mean: sizes.iter().sum::<f64>() / sizes.len() as f64,
        largest: sizes.iter().copied().fold(0.0, f64::max),
    };
    let mut all: Vec<DifferenceOfSequence> = rows.into_iter().map(summary).collect();
    all.sort_by(|a, b| b.mean.total_cmp(&a.mean));
    all.truncate(SEQUENCES);
    all
}

/// Returns the properties of tokens with which the difference grows or falls.
pub(super) fn trends(pairs: &[TokenPair], advantages: Option<&Array2<f64>>) -> Vec<DifferenceTrend> {
    if pairs.len() < FEWEST {
        return Vec::new();
    }
    let sizes: Vec<f64> = pairs.iter().map(size).collect();
    let by = |of: &dyn Fn(&TokenPair) -> f64| spearman(&sizes, &pairs.iter().map(of).collect::<Vec<f64>>());
    let mut all = vec![("position", by(&|pair| pair.t as f64)), ("−logp", by(&|pair| -pair.trainer))];
    if let Some(advantages) = advantages {
        all.push(("|advantage|", by(&|pair| advantages[[pair.b, pair.t]].abs())));
    }
    let strong = |(_, correlation): &(&str, f64)| correlation.abs() >= CORRELATED;
    let trend = |(with, correlation): (&str, f64)| DifferenceTrend { with: with.into(), correlation };
    all.into_iter().filter(strong).map(trend).collect()
}

/// Evaluates Spearman's rank correlation; NaN if one side has a single value.
fn spearman(a: &[f64], b: &[f64]) -> f64 {
    let [a, b] = [ranks(a), ranks(b)];
    let middle = (a.len() as f64 - 1.0) / 2.0;
    let product = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| (x - middle) * (y - middle)).sum::<f64>();
    product(&a, &b) / f64::sqrt(product(&a, &a) * product(&b, &b))
}

/// Returns the rank of each value, equal values having the mean of theirs.
fn ranks(values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*a].total_cmp(&values[*b]));
    let mut ranks = vec![0.0; values.len()];
    let mut from = 0;
    while from < order.len() {
        let equal = order[from..].iter().take_while(|i| values[**i] == values[order[from]]).count();
        let rank = from as f64 + (equal as f64 - 1.0) / 2.0;
        order[from..from + equal].iter().for_each(|i| ranks[*i] = rank);
        from += equal;
    }
    ranks
}
