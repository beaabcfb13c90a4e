//! The learning gate: whether two arms come to the same rewards, by the baseline's own spread.

use super::{Pair, Run};
use assay_schema::ab::Verdict;

/// Student's t, two-sided at 1 %, for 1, 2, … degrees of freedom.
const T: [f64; 9] = [63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250];

/// What a run has learned: the mean reward of the second half of its steps.
fn learned(run: &Run) -> f64 {
    let rewards: Vec<f64> = run.records.iter().map(|record| record.reward).collect();
    mean(&rewards[rewards.len() / 2..])
}

/// Where it began: the mean reward of the first tenth.
fn begun(run: &Run) -> f64 {
    let rewards: Vec<f64> = run.records.iter().map(|record| record.reward).collect();
    mean(&rewards[..rewards.len().div_ceil(10)])
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// The gate. With `x` the mean reward of the second half of a run's steps, in pairs of the same seed,
///
/// ```text
/// |mean(x_kernel − x_baseline)| ≤ t(1 %, n − 1) · s · √(2/n),    s the baseline's standard deviation over the n seeds
/// ```
///
/// A kernel that learns as the baseline does differs by as much in 1 % of the sets of seeds, or less, as seeds that are the same
/// in both arms have their part in `s`. The kernel's own spread decides nothing. Nothing is decided either where a run that
/// stays where the baseline began would pass too; the line then says so.
pub(super) fn verdict(pairs: &[Pair]) -> Verdict {
    let n = pairs.len();
    let [baseline, kernel] = [0, 1].map(|side| pairs.iter().map(|pair| learned(&pair.runs[side])).collect::<Vec<_>>());
    let difference = mean(&kernel) - mean(&baseline);
    let gain = mean(&baseline) - mean(&pairs.iter().map(|pair| begun(&pair.runs[0])).collect::<Vec<_>>());
    let limit = (n > 1).then(|| {
        let squares: f64 = baseline.iter().map(|x| (x - mean(&baseline)).powi(2)).sum();
        // Beyond the table, its last is larger than what is asked for.
        let t = T[(n - 2).min(T.len() - 1)];
        t * (squares / (n as f64 - 1.0)).sqrt() * (2.0 / n as f64).sqrt()
    });
    let decides = limit.is_some_and(|limit| limit < gain);
    let what = "training reward, second half of the steps, mean of the seeds";
    Verdict {
        what: match limit {
            _ if decides => what.into(),
            None => format!("{what}; not decided: one seed has no spread"),
            Some(_) => format!("{what}; not decided: the baseline's gain of {gain:.4} is within the limit"),
        },
        baseline: Some(mean(&baseline)),
        kernel: Some(mean(&kernel)),
        difference: Some(difference),
        limit,
        pass: limit.filter(|_| decides).map(|limit| difference.abs() <= limit),
    }
}
