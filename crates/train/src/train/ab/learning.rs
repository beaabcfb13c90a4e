//! The learning gate: whether two arms reach the same rewards, within the baseline's own spread.

use super::{AbPair, AbRun};
use assay_schema::ab::AbVerdict;

/// Student's t, two-sided at 1 %, for 1, 2, … degrees of freedom.
const T: [f64; 9] = [63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250];

/// Computes the mean reward of the second half of a run's steps.
fn learned(run: &AbRun) -> f64 {
    let rewards: Vec<f64> = run.records.iter().map(|record| record.reward).collect();
    mean(&rewards[rewards.len() / 2..])
}

/// Computes the mean reward of the first tenth of a run's steps.
fn begun(run: &AbRun) -> f64 {
    let rewards: Vec<f64> = run.records.iter().map(|record| record.reward).collect();
    mean(&rewards[..rewards.len().div_ceil(10)])
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// The gate. With `x` the mean reward of the second half of a run's steps, in pairs of the same seed, and `e` the distance of the
/// baseline from itself with other random numbers in its rollouts,
///
/// ```text
/// |mean(x_kernel − x_baseline)| ≤ t(1 %, n) · √(Σ e² / n) / √n,     e = x_redrawn − x_baseline
/// ```
///
/// Arms that differ by rounding come apart no further than those that draw other completions: of a kernel that learns as the
/// baseline does at most 1 % of the sets of seeds are beyond. The kernel's own spread decides nothing. Nothing is decided either
/// where a run that stays where the baseline began would pass too; the line then says so.
pub(super) fn verdict(pairs: &[AbPair]) -> AbVerdict {
    let n = pairs.len();
    let [baseline, kernel] = [0, 1].map(|side| pairs.iter().map(|pair| learned(&pair.runs[side])).collect::<Vec<_>>());
    // The gain of the baseline: a limit above it would pass a run that learns nothing.
    let difference = mean(&kernel) - mean(&baseline);
    let gain = mean(&baseline) - mean(&pairs.iter().map(|pair| begun(&pair.runs[0])).collect::<Vec<_>>());
    // The spread is that of the baseline against itself with other random numbers, in pairs of one seed.
    let apart: Option<Vec<f64>> =
        pairs.iter().zip(&baseline).map(|(pair, x)| Some(learned(pair.redrawn.as_ref()?) - x)).collect();
    let limit = apart.filter(|_| n > 1).map(|apart| {
        let squares: f64 = apart.iter().map(|e| e * e).sum();
        // Beyond the table, its last is larger than what is asked for.
        T[(n - 1).min(T.len() - 1)] * squares.sqrt() / n as f64
    });
    let decides = limit.is_some_and(|limit| limit < gain);
    let what = "training reward, second half of the steps, mean of the seeds";
    AbVerdict {
        what: match limit {
            _ if decides => what.into(),
            None => format!("{what}; not decided: a single seed, or no baseline that was redrawn"),
            Some(_) => format!("{what}; not decided: the baseline's gain of {gain:.4} is within the limit"),
        },
        baseline: Some(mean(&baseline)),
        kernel: Some(mean(&kernel)),
        difference: Some(difference),
        limit,
        pass: limit.filter(|_| decides).map(|limit| difference.abs() <= limit),
    }
}
