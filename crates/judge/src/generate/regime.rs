//! [`Regime`]: the ways in which logits are drawn.

use std::fmt;

use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Normal, Uniform};
use serde::{Deserialize, Serialize};

/// A way of drawing logits, each of which shows a kind of bug that the others hide.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Regime {
    /// Uniform in ±0.1: every column counts alike, so that a padded or dropped one shows.
    Small,
    /// Normal with mean 0 and σ = 1.
    Normal,
    /// Normal, σ = 8: as peaked as a trained model.
    Peaked,
    /// Normal with σ = 1 around 10⁴: the maximum must be subtracted before rounding matters.
    ShiftedUp,
    /// Normal with σ = 1 around −10⁴.
    ShiftedDown,
    /// Normal, σ = 1, around −120: `exp` without the maximum subtracted is 0, and a maximum started at 0 is wrong.
    Negative,
    /// One column 30 to 60 nats above the rest, most often the sampled one.
    Confident,
    /// Normal, σ = 2, with a quarter of the columns other than the sampled one at −∞; if the first is, so is the first half, as a block
    /// of nothing else.
    Holes,
    /// As [`Regime::Holes`], with half of the sampled columns at −∞ too, as if a filter were applied that the sampler did not have: their
    /// logp is −∞.
    TargetHoles,
    /// Each logit is −1, 0 or 1, so that maxima and probabilities tie.
    Ties,
    /// Logits like a trained model's: a bulk 20 nats below the largest, above it a tail of columns whose gaps grow with the logarithm
    /// of their rank, and an id drawn from that softmax, with `p` of 1e-3 to 1 − 1e-6. Ids are at the first and the last column
    /// and at edges of tiles; masks are padded on either side and have gaps.
    Sampled,
    /// Most of the mass in columns with a probability around 1/V, after a peak in the first one: a sum that is already large loses
    /// what is added to it. Ids and masks are as in [`Regime::Sampled`].
    LongTail,
    /// Normal with σ = 1, and one column 90 to 1,000 nats above the rest, in the last eighth of the columns or the sampled one: the sums
    /// before it are nothing beside it, and exp of a difference overflows.
    FarColumn,
}

impl fmt::Display for Regime {
    /// Writes the name as users type it, such as `shifted_up`.
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.serialize(f)
    }
}

impl Regime {
    /// All regimes, in the order of their declaration.
    pub const ALL: [Regime; 13] = [
        Regime::Small,
        Regime::Normal,
        Regime::Peaked,
        Regime::ShiftedUp,
        Regime::ShiftedDown,
        Regime::Negative,
        Regime::Confident,
        Regime::Holes,
        Regime::TargetHoles,
        Regime::Ties,
        Regime::Sampled,
        Regime::LongTail,
        Regime::FarColumn,
    ];

    /// The regimes that suit any spec: a logp of −∞ makes many losses infinite, and one of −1,000 most ratios.
    pub const FINITE: [Regime; 11] = [
        Regime::Small,
        Regime::Normal,
        Regime::Peaked,
        Regime::ShiftedUp,
        Regime::ShiftedDown,
        Regime::Negative,
        Regime::Confident,
        Regime::Holes,
        Regime::Ties,
        Regime::Sampled,
        Regime::LongTail,
    ];

    /// Whether ids and masks are laid out by design instead of drawn uniformly.
    pub(super) fn is_designed(self) -> bool {
        matches!(self, Regime::Sampled | Regime::LongTail)
    }

    /// Whether some logits are −∞, which the product of an LM head cannot be.
    pub fn has_holes(self) -> bool {
        matches!(self, Regime::Holes | Regime::TargetHoles)
    }
}

/// The number of columns above the bulk of a row in [`Regime::Sampled`].
const HEAVY: usize = 32;

/// Draws a column from the softmax of `row`, among those with a probability from 1e-3 to 1 − 1e-6; the first with any if there is none.
fn draw_column(rng: &mut ChaCha8Rng, row: &[f64]) -> usize {
    let most = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = row.iter().map(|x| (x - most).exp()).sum();
    let probability = |x: &f64| {
        let p = (x - most).exp() / sum;
        if (1e-3..1.0 - 1e-6).contains(&p) { p } else { 0.0 }
    };
    // The draw walks the cumulative sum of the admitted probabilities; rounding may leave a rest at the end, for which
    // the first admitted column is taken.
    let mut left = rng.random_range(0.0..1.0) * row.iter().map(probability).sum::<f64>();
    let drawn = row.iter().position(|x| {
        left -= probability(x);
        left <= 0.0 && probability(x) > 0.0
    });
    drawn.or_else(|| row.iter().position(|x| probability(x) > 0.0)).unwrap_or(0)
}

/// Draws the column of a row that is far above all others: the sampled one, or more often a late one.
pub(super) fn far_column(rng: &mut ChaCha8Rng, id: usize, vocab: usize) -> usize {
    if rng.random_bool(0.3) { id } else { vocab - 1 - rng.random_range(0..vocab.div_ceil(8)) }
}

/// Draws the logits of one token, whose sampled id is `id`.
pub(super) fn draw_row(regime: Regime, rng: &mut ChaCha8Rng, row: &mut [f64], id: usize) {
    let normal = |mean, deviation| Normal::new(mean, deviation).expect("finite and positive");
    let mut fill = |distribution: &dyn Fn(&mut ChaCha8Rng) -> f64| row.iter_mut().for_each(|x| *x = distribution(rng));
    // First the bulk, which every column is drawn from alike.
    match regime {
        Regime::Small => {
            let uniform = Uniform::new(-0.1, 0.1).expect("a non-empty range");
            fill(&|rng| uniform.sample(rng));
        }
        Regime::Normal | Regime::Confident | Regime::FarColumn => fill(&|rng| normal(0.0, 1.0).sample(rng)),
        Regime::Peaked => fill(&|rng| normal(0.0, 8.0).sample(rng)),
        Regime::ShiftedUp => fill(&|rng| normal(1e4, 1.0).sample(rng)),
        Regime::ShiftedDown => fill(&|rng| normal(-1e4, 1.0).sample(rng)),
        Regime::Negative => fill(&|rng| normal(-120.0, 1.0).sample(rng)),
        Regime::Holes | Regime::TargetHoles => {
            fill(&|rng| if rng.random_bool(0.25) { f64::NEG_INFINITY } else { normal(0.0, 2.0).sample(rng) });
        }
        Regime::Ties => fill(&|rng| f64::from(rng.random_range(-1..=1))),
        Regime::Sampled => fill(&|rng| normal(-5.0, 2.4).sample(rng)),
        Regime::LongTail => fill(&|rng| normal(0.0, 0.7).sample(rng)),
    }
    // Then the columns that a regime treats apart: peaks, holes, and the sampled id.
    match regime {
        Regime::Sampled => {
            // In a recorded model the gap of the k-th column is about 2.7 ln k; a row may be flatter or steeper.
            let (peak, steepness) = (normal(15.0, 2.0).sample(rng), rng.random_range(1.0..6.0));
            // Gaps are scattered by a fifth, and several ranks may meet in one column: rows differ in shape and not
            // only in order.
            for rank in 1..=row.len().min(HEAVY) {
                let gap: f64 = steepness * f64::from(u32::try_from(rank).expect("few")).ln();
                row[rng.random_range(0..row.len())] = peak - gap * rng.random_range(0.8..1.2);
            }
            let drawn = draw_column(rng, row);
            row.swap(drawn, id);
        }
        Regime::LongTail => {
            // A peak of ln V ± a nat has about the weight of all other columns, so that a sum in f32 is already large
            // when the small terms come.
            let peak = (row.len() as f64).ln() + rng.random_range(-1.5..0.5);
            row[0] = peak;
            if rng.random_bool(0.3) {
                row[id] = peak - rng.random_range(0.0..2.0);
            }
        }
        Regime::Confident => {
            let peak = if rng.random_bool(0.8) { id } else { rng.random_range(0..row.len()) };
            row[peak] += rng.random_range(30.0..60.0);
        }
        Regime::FarColumn => row[far_column(rng, id, row.len())] += rng.random_range(90.0..1000.0),
        Regime::Holes | Regime::TargetHoles => {
            // A row that begins with −∞ has its whole first half so: a running maximum is then −∞ after a block, and −∞
            // − (−∞) is NaN in a careless rescaling.
            let leading = if row[0] == f64::NEG_INFINITY { row.len() / 2 } else { 0 };
            row[..leading].fill(f64::NEG_INFINITY);
            row[id] = normal(0.0, 2.0).sample(rng);
            // A sampled column at −∞ needs another finite one, or the softmax would be 0/0.
            let softmax_without_it = row.iter().enumerate().any(|(j, x)| j != id && x.is_finite());
            if regime == Regime::TargetHoles && softmax_without_it && rng.random_bool(0.5) {
                row[id] = f64::NEG_INFINITY;
            }
        }
        _ => {}
    }
}
