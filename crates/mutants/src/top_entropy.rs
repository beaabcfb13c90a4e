//! The tokens of the highest entropy, as the specimen selects them.

#![expect(clippy::cast_sign_loss, reason = "a place among entropies is ≥ 0")]

use ndarray::Array2;

use crate::bank::Bug;
use crate::launch::{SpecimenLaunch, SpecimenScore, part};
use assay_core::spec::{DroppedTerm, QuantilePrecision, TopEntropy};

/// The terms that each token has a part in, `[B,T]`.
pub(crate) struct HighEntropy {
    /// Whether the token keeps its policy term.
    pub(crate) policy: Array2<bool>,
    /// Whether the token counts in its sequence's log-ratio.
    pub(crate) ratio: Array2<bool>,
    /// Whether the token keeps its part in the entropy bonus.
    pub(crate) bonus: Array2<bool>,
}

impl HighEntropy {
    pub(crate) fn new(launch: &SpecimenLaunch, scored: &Array2<Option<SpecimenScore>>) -> Self {
        let all = Array2::from_elem(scored.dim(), true);
        let Some(top) = launch.spec.top_entropy.filter(|_| !launch.has(Bug::TopEntropyIgnored)) else {
            return Self { policy: all.clone(), ratio: all.clone(), bonus: all };
        };
        let high = above_quantile(launch, &top, scored);
        let drops_ratio = (top.drops == DroppedTerm::Ratio) != launch.has(Bug::TopEntropyDropsTheOther);
        let (policy, ratio) = if drops_ratio { (all.clone(), high) } else { (high, all.clone()) };
        let bonus = if launch.has(Bug::TopEntropyBonusOfAll) { all } else { policy.clone() };
        Self { policy, ratio, bonus }
    }
}

/// Whether the entropy of each token is at least the quantile of its group, which is the whole batch in the correct
/// kernel.
fn above_quantile(launch: &SpecimenLaunch, top: &TopEntropy, scored: &Array2<Option<SpecimenScore>>) -> Array2<bool> {
    let (rows, devices) = (launch.shape.batch, launch.mesh.rows);
    // The quantile is one of the whole batch; the mutants take one of each row, or of the rows of each device.
    let group = |b: usize| match () {
        () if launch.has(Bug::TopEntropyOfRow) => b,
        () if launch.has(Bug::TopEntropyOfDevice) => {
            (0..devices).find(|&i| part(rows, devices, i).contains(&b)).unwrap_or(0)
        }
        () => 0,
    };
    // A masked token has an entropy of 0 in the kernel's output array, which a quantile over that array would count.
    let padding = launch.has(Bug::TopEntropyOverPadding).then_some(0.0);
    let rounded = |entropy: f64| match top.precision {
        QuantilePrecision::F32 => f64::from(entropy as f32),
        QuantilePrecision::Exact | QuantilePrecision::F32Threshold => entropy,
    };
    let mut high = Array2::from_elem(scored.dim(), true);
    for of in 0..rows {
        let of_group = scored.indexed_iter().filter(|((b, _), _)| group(*b) == of);
        let mut ascending: Vec<f64> =
            of_group.clone().filter_map(|(_, token)| token.as_ref().map(|token| token.entropy).or(padding)).collect();
        ascending.sort_by(f64::total_cmp);
        // Each group has its own threshold, and tokens are compared with it in the precision that the spec names.
        let threshold = quantile(launch, top, &ascending);
        for (at, token) in of_group {
            let Some(token) = token else { continue };
            let entropy = rounded(token.entropy);
            high[at] = match () {
                () if launch.has(Bug::TopEntropyLowest) => entropy <= threshold,
                () if launch.has(Bug::TopEntropyAbove) => entropy > threshold,
                () => entropy >= threshold,
            };
        }
    }
    high
}

/// Interpolates ascending entropies at `(1 − fraction)·(n − 1)`, linearly between neighbours.
fn quantile(launch: &SpecimenLaunch, top: &TopEntropy, ascending: &[f64]) -> f64 {
    let Some(last) = ascending.len().checked_sub(1) else { return 0.0 };
    let takes_fraction = launch.has(Bug::TopEntropyOfFraction) || launch.has(Bug::TopEntropyLowest);
    let share = if takes_fraction { top.fraction } else { 1.0 - top.fraction };
    let in_f32 = top.precision != QuantilePrecision::Exact;
    let place = if in_f32 { f64::from(share as f32) } else { share } * last as f64;
    let (below, above) = (ascending[place as usize], ascending[(place as usize + 1).min(last)]);
    let beyond = place.fract();
    if launch.has(Bug::TopEntropyNotInterpolated) {
        return below;
    }
    if !in_f32 {
        return below + beyond * (above - below);
    }
    // As torch's `lerp`: from the nearer end.
    let (below, above, beyond) = (below as f32, above as f32, beyond as f32);
    let step = above - below;
    f64::from(if beyond < 0.5 { below + beyond * step } else { above - step * (1.0 - beyond) })
}
