//! The part of a loss that is held constant while it is differentiated.

use assay_core::spec::{
    Cispo, ClipCov, DroppedTerm, KlCov, LossTerms, MaskedRatio, Objective, PositiveTokens, Topr, TrustRegion,
};
use ndarray::Array2;

use super::{Frozen, Loss, Number, Policy, Undetermined, grid};

impl Loss<'_> {
    /// Everything that is constant, from the policy at the base point.
    pub(crate) fn freeze<N: Number>(&self, base: Policy<N>) -> Result<Frozen<N>, Undetermined> {
        let shape = self.shape();
        let [counts, stays, stays_for_kl] = self.rejected::<N>();
        let top = self.top(&base, &counts);
        let weights = self.spec.rollout.as_ref().map(|rollout| self.rollout_weights::<N>(rollout));
        let weight = |b, t| weights.as_ref().map_or(N::from(1.0), |weights| weights[[b, t]].clone());
        // VESPO has the weights within φ, and does not multiply its policy term by them.
        let vespo = matches!(self.spec.objective, Objective::Vespo(_));
        let weighs_kl = self.spec.rollout.as_ref().is_some_and(|rollout| rollout.applies_to == LossTerms::PolicyAndKl);
        let drops_policy = self.spec.top_entropy.is_some_and(|top| top.drops == DroppedTerm::PolicyTerm);
        let near = grid(shape, |b, t| counts[[b, t]] && self.near_policy(&base, &counts, b, t));
        let policy_factor = grid(shape, |b, t| {
            let keeps = stays[[b, t]] && (!drops_policy || top[[b, t]]) && near[[b, t]];
            let own = || N::from(self.token_weight(b, t));
            match keeps {
                true if vespo => own(),
                true => weight(b, t) * own(),
                false => N::from(0.0),
            }
        });
        let own_weighs_kl = self.spec.token_weights.is_some_and(|weights| weights.applies_to == LossTerms::PolicyAndKl);
        let kl_factor = grid(shape, |b, t| {
            let own = N::from(if own_weighs_kl { self.token_weight(b, t) } else { 1.0 });
            match (stays_for_kl[[b, t]], weighs_kl) {
                (false, _) => N::from(0.0),
                (true, false) => own,
                (true, true) => weight(b, t) * own,
            }
        });
        let mut frozen = Frozen {
            base,
            stays,
            near,
            policy_factor,
            kl_factor,
            top,
            score: Array2::from_elem(shape, N::from(0.0)),
            selected: Array2::from_elem(shape, false),
            counts,
        };
        frozen.selected = self.selected(&frozen)?;
        frozen.score =
            grid(
                shape,
                |b, t| {
                    if frozen.counts[[b, t]] { self.score(&frozen, weights.as_ref(), b, t) } else { N::from(0.0) }
                },
            );
        Ok(frozen)
    }

    pub(super) fn selected<N: Number>(&self, frozen: &Frozen<N>) -> Result<Array2<bool>, Undetermined> {
        let given = || self.problem.extra.selected.clone().expect("an objective without `selection`");
        match &self.spec.objective {
            Objective::KlCov(KlCov { selection, .. }) => {
                Ok(selection.map_or_else(given, |top| self.most_covariant(top, frozen)))
            }
            Objective::ClipCov(ClipCov { selection, clip }) => {
                selection.map_or_else(|| Ok(given()), |band| self.within_band(band, clip, frozen))
            }
            Objective::Topr(topr) => Ok(match topr.positive {
                PositiveTokens::Selected => given(),
                PositiveTokens::Advantage => grid(self.shape(), |b, t| self.advantage(b, t) > 0.0),
            }),
            Objective::TrustRegion(region) => {
                Ok(grid(self.shape(), |b, t| frozen.counts[[b, t]] && self.trusted(region, &frozen.base, b, t)))
            }
            Objective::MaskedRatio(masked) => Ok(grid(self.shape(), |b, t| {
                frozen.counts[[b, t]] && inside(masked, &self.log_ratio(frozen, &frozen.base, b, t).exp())
            })),
            _ => Ok(Array2::from_elem(self.shape(), false)),
        }
    }

    pub(super) fn score<N: Number>(&self, frozen: &Frozen<N>, weights: Option<&Array2<N>>, b: usize, t: usize) -> N {
        let ratio = || self.log_ratio(frozen, &frozen.base, b, t).exp();
        match &self.spec.objective {
            Objective::Cispo(Cispo { lower, upper }) => {
                let ratio = lower.map_or(ratio(), |lower| ratio().max(N::from(lower)));
                ratio.min(N::from(*upper))
            }
            Objective::Vespo(vespo) => self.gamma_weight(vespo, frozen, weights, b, t),
            Objective::PolicyGradient | Objective::Dro(_) => N::from(1.0),
            Objective::MaskedRatio(masked) => {
                if inside(masked, &ratio()) {
                    ratio()
                } else {
                    N::from(0.0)
                }
            }
            Objective::TrustRegion(TrustRegion { truncate: Some(truncate), .. }) => ratio().min(N::from(*truncate)),
            Objective::Topr(Topr { positive_weight, negative_weight, upper, .. }) => {
                if frozen.selected[[b, t]] {
                    N::from(*positive_weight)
                } else {
                    N::from(*negative_weight) * ratio().min(N::from(*upper))
                }
            }
            _ => N::from(0.0),
        }
    }
}

/// `lower < ρ < upper`
fn inside<N: Number>(masked: &MaskedRatio, ratio: &N) -> bool {
    !ratio.at_most(masked.lower) && !ratio.at_least(masked.upper)
}
