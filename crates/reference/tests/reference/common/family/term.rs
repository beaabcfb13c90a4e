//! The part of a loss that is differentiated: ratio, policy term, KL penalty and reduction.

use assay_core::spec::{
    AdvantageLevel, Aspo, Averaging, DroppedTerm, Kl, KlEstimator, KlGradient, KlImportance, LossSpec, MaskedRatio,
    Objective, OldLogp, PpoClip, Ratio, RatioLevel, Reduction, Rows, Sapo,
};

use super::{Frozen, Loss, Number, Policy, RowLoss, TokenLoss, all, at};

impl Loss<'_> {
    pub(super) fn old_logp<N: Number>(&self, base: &Policy<N>, b: usize, t: usize) -> N {
        match self.spec.old_logp {
            OldLogp::Given => N::from(at(self.problem.old_logp.as_ref(), "old_logp")(b, t)),
            OldLogp::Current => base.logp(b, t),
            OldLogp::Rollout => N::from(at(self.problem.extra.rollout_logp.as_ref(), "rollout_logp")(b, t)),
        }
    }

    /// `x = ℓ − old_logp`, clamped.
    pub(super) fn token_log_ratio<N: Number>(&self, frozen: &Frozen<N>, policy: &Policy<N>, b: usize, t: usize) -> N {
        let ratio = &self.spec.ratio;
        let logp = policy.logp(b, t);
        let x = match self.spec.old_logp {
            OldLogp::Current => logp.since(&frozen.base.logp(b, t)),
            OldLogp::Given | OldLogp::Rollout => logp - self.old_logp(&frozen.base, b, t),
        };
        let x = if ratio.level == RatioLevel::SequenceProduct { x } else { x.within(ratio.clamp) };
        let advantage = self.advantage(b, t);
        match ratio.clip {
            None => x,
            Some(clip) if advantage > 0.0 => x.min(N::from(clip.high)),
            Some(clip) if advantage < 0.0 => x.max(N::from(-clip.low)),
            Some(_) => N::from(0.0),
        }
    }

    /// `Σ x` over the tokens of the row that its ratio is made of, and how many they are.
    pub(super) fn sum_of_log_ratios<N: Number>(&self, frozen: &Frozen<N>, policy: &Policy<N>, b: usize) -> (N, usize) {
        let drops = self.spec.top_entropy.is_some_and(|top| top.drops == DroppedTerm::Ratio);
        let tokens = self.tokens_of(if drops { &frozen.top } else { &frozen.counts }, b);
        (tokens.iter().map(|t| self.token_log_ratio(frozen, policy, b, *t)).sum::<N>(), tokens.len())
    }

    /// `Σ x / Σ 1`
    pub(super) fn mean_log_ratio<N: Number>(&self, frozen: &Frozen<N>, policy: &Policy<N>, b: usize) -> N {
        let (sum, count) = self.sum_of_log_ratios(frozen, policy, b);
        sum / (N::from(count.max(1) as f64) + N::from(self.spec.ratio.denominator_epsilon))
    }

    /// `ln ρ`
    pub(super) fn log_ratio<N: Number>(&self, frozen: &Frozen<N>, policy: &Policy<N>, b: usize, t: usize) -> N {
        let log = match self.spec.ratio.level {
            RatioLevel::Token => self.token_log_ratio(frozen, policy, b, t),
            RatioLevel::Sequence => self.mean_log_ratio(frozen, policy, b),
            RatioLevel::SequenceToken => {
                policy.logp(b, t).since(&frozen.base.logp(b, t)) + self.mean_log_ratio(frozen, &frozen.base, b)
            }
            RatioLevel::SequenceProduct => self.sum_of_log_ratios(frozen, policy, b).0.within(self.spec.ratio.clamp),
        };
        let Some(cap) = self.spec.ratio.cap else { return log };
        if !self.spec.ratio.straight_through {
            return log.min(N::from(cap));
        }
        // `sg(min(x, cap)) + (x − sg(x))`
        let ratio = Ratio { cap: None, straight_through: false, ..self.spec.ratio.clone() };
        let uncapped = Loss { spec: &LossSpec { ratio, ..self.spec.clone() }, problem: self.problem };
        let base = uncapped.log_ratio(frozen, &frozen.base, b, t);
        base.clone().min(N::from(cap)) + log.since(&base)
    }

    /// `ρ` of every token of `m`, at the base point.
    pub(crate) fn ratios<N: Number>(&self, frozen: &Frozen<N>) -> Vec<N> {
        all(&frozen.counts).into_iter().map(|(b, t)| self.log_ratio(frozen, &frozen.base, b, t).exp()).collect()
    }

    /// The policy term, before masks and weights.
    pub(super) fn policy<N: Number>(&self, frozen: &Frozen<N>, policy: &Policy<N>, b: usize, t: usize) -> N {
        let advantage = self.advantage(b, t);
        let a = || N::from(advantage);
        let log_ratio = || self.log_ratio(frozen, policy, b, t);
        let surrogate = || -(log_ratio().exp() * a());
        let score = || -(frozen.score[[b, t]].clone() * a() * policy.logp(b, t));
        let selected = frozen.selected[[b, t]];
        match &self.spec.objective {
            Objective::PpoClip(clip) => ppo_clip(clip, &log_ratio().exp(), advantage),
            Objective::MaskedRatio(MaskedRatio { surrogate: true, .. }) => {
                if selected {
                    surrogate()
                } else {
                    N::from(0.0)
                }
            }
            Objective::Cispo(_) | Objective::Vespo(_) | Objective::PolicyGradient | Objective::MaskedRatio(_) => {
                score()
            }
            Objective::Sapo(Sapo { tau_positive, tau_negative }) => {
                let tau = || N::from(if advantage > 0.0 { *tau_positive } else { *tau_negative });
                let z = tau() * (log_ratio().exp() - N::from(1.0));
                let sigmoid = N::from(1.0) / (N::from(1.0) + (-z).exp());
                -(N::from(4.0) / tau() * sigmoid * a())
            }
            Objective::TrustRegion(region) => {
                let term = match (selected, region.truncate) {
                    (false, _) => N::from(0.0),
                    (true, None) => surrogate(),
                    (true, Some(_)) => score(),
                };
                term + N::from(region.penalty) * log_ratio().squared()
            }
            Objective::Dro(dro) => {
                -(a() * policy.logp(b, t) - N::from(dro.beta) / N::from(2.0) * log_ratio().squared())
            }
            Objective::KlCov(cov) if selected => surrogate() + N::from(cov.coefficient) * log_ratio().abs(),
            Objective::ImportanceSampling(_) | Objective::KlCov(_) => surrogate(),
            Objective::ClipCov(_) if selected => N::from(0.0),
            Objective::ClipCov(cov) => ppo_clip(&cov.clip, &log_ratio().exp(), advantage),
            Objective::Topr(_) => score(),
            Objective::Aspo(aspo) => self.aspo(aspo, frozen, policy, b, t),
            // It has tests of its own, as it reads the whole row.
            Objective::CrossEntropy(_) | Objective::None => N::from(0.0),
            Objective::Distillation(_) => unreachable!("a divergence has its own formula, in distillation.rs"),
        }
    }

    /// Archer2.0's `compute_policy_loss_archer`, with an ε for each sign, and others for the selected: a clipped ratio, over its own constant square where
    /// the advantage is positive, and a score function beyond the dual clip.
    pub(super) fn aspo<N: Number>(&self, aspo: &Aspo, frozen: &Frozen<N>, policy: &Policy<N>, b: usize, t: usize) -> N {
        let advantage = self.advantage(b, t);
        let a = || N::from(advantage);
        let selected = self.problem.extra.selected.as_ref().is_some_and(|selected| selected[[b, t]]);
        let widths = aspo.selected.filter(|_| selected);
        let epsilon_low = widths.map_or(aspo.epsilon_low, |widths| widths.epsilon_low);
        let epsilon_high = widths.map_or(aspo.epsilon_high, |widths| widths.epsilon_high);
        let clipped = |policy: &Policy<N>| {
            let ratio = self.log_ratio(frozen, policy, b, t).exp();
            if advantage > 0.0 {
                ratio.min(N::from(1.0) + N::from(epsilon_high))
            } else {
                ratio.max(N::from(1.0) - N::from(epsilon_low))
            }
        };
        let held = clipped(&frozen.base);
        let dual = |c: f64| -(N::from(c) * a() * policy.logp(b, t));
        if advantage > 0.0 {
            let inverse = N::from(1.0) / held.clone();
            if inverse.at_most(aspo.dual_clip_positive) {
                -(a() * clipped(policy) / (held.clone() * held))
            } else {
                dual(aspo.dual_clip_positive)
            }
        } else if held.at_most(aspo.dual_clip_negative) {
            -(a() * clipped(policy))
        } else {
            dual(aspo.dual_clip_negative)
        }
    }

    /// The KL estimate, with what multiplies it.
    pub(super) fn kl<N: Number>(&self, kl: &Kl, frozen: &Frozen<N>, policy: &Policy<N>, b: usize, t: usize) -> N {
        let reference = at(self.problem.ref_logp.as_ref(), "ref_logp")(b, t);
        let estimate_at = |policy: &Policy<N>| {
            let d = (N::from(reference) - policy.logp(b, t)).within(kl.difference_clamp);
            let estimate = match kl.estimator {
                KlEstimator::K1 => -d,
                KlEstimator::K2 => d.squared() / N::from(2.0),
                KlEstimator::K3 => d.exp_excess(),
                KlEstimator::Abs => d.abs(),
            };
            if kl.clamp_after_importance { estimate } else { estimate.within(kl.value_clamp) }
        };
        let beyond = |clamp: f64| !(N::from(reference) - frozen.base.logp(b, t)).abs().at_most(clamp);
        let k2_at = |policy: &Policy<N>| (N::from(reference) - policy.logp(b, t)).squared() / N::from(2.0);
        let estimate = match kl.gradient {
            KlGradient::Own => estimate_at(policy),
            // Straight through: the value of the estimate, the gradient of k2.
            KlGradient::K2 => k2_at(policy).since(&k2_at(&frozen.base)) + estimate_at(&frozen.base),
            KlGradient::K2Weighted(bound) => {
                let old = self.old_logp(&frozen.base, b, t);
                let weight = (frozen.base.logp(b, t) - old).exp().min(N::from(bound));
                weight * k2_at(policy).since(&k2_at(&frozen.base)) + estimate_at(&frozen.base)
            }
        };
        let importance = match kl.importance {
            KlImportance::One => {
                return if kl.clamp_after_importance { estimate.within(kl.value_clamp) } else { estimate };
            }
            KlImportance::Ratio => self.log_ratio(frozen, policy, b, t).exp(),
            KlImportance::TokenRatio => self.token_log_ratio(frozen, policy, b, t).exp(),
            KlImportance::Rollout => {
                let rollout = at(self.problem.extra.rollout_logp.as_ref(), "rollout_logp")(b, t);
                if rollout.is_nan() {
                    N::from(0.0)
                } else if kl.difference_clamp.is_some_and(beyond) {
                    (frozen.base.logp(b, t) - N::from(rollout)).exp()
                } else {
                    (policy.logp(b, t) - N::from(rollout)).exp()
                }
            }
            // NeMo holds the weight, too, where the difference is.
            KlImportance::Score if kl.difference_clamp.is_some_and(beyond) => N::from(1.0),
            KlImportance::Score => policy.logp(b, t).since(&frozen.base.logp(b, t)).exp(),
        };
        let product = importance * estimate;
        if kl.clamp_after_importance { product.within(kl.value_clamp) } else { product }
    }

    /// The weight of a token of row `b`.
    pub(crate) fn weight<N: Number>(&self, averaging: Averaging, frozen: &Frozen<N>, b: usize) -> N {
        let count = |b: usize| self.tokens_of(&frozen.counts, b).len();
        let rows = |rows: Rows| match rows {
            Rows::All => self.shape().0 as f64,
            Rows::NonEmpty => (0..self.shape().0).filter(|b| count(*b) > 0).count() as f64,
            Rows::Given(rows) => rows,
        };
        let plus_epsilon = |count: usize| N::from(count as f64) + N::from(averaging.denominator_epsilon);
        let denominator = match averaging.reduction {
            Reduction::TokenMean => plus_epsilon((0..self.shape().0).map(count).sum()),
            Reduction::SequenceMean { rows: b_prime } => N::from(rows(b_prime)) * plus_epsilon(count(b)),
            Reduction::SequenceSum { rows: b_prime } => N::from(rows(b_prime)),
            Reduction::FixedLength { rows: b_prime, length } => {
                N::from(rows(b_prime)) * N::from(length.unwrap_or(self.shape().1) as f64)
            }
            Reduction::Normalizer(normalizer) => N::from(normalizer),
        };
        N::from(1.0) / denominator
    }

    /// What the entropy of a token is multiplied by.
    pub(super) fn entropy_weight<N: Number>(&self, frozen: &Frozen<N>, b: usize, t: usize) -> N {
        let coef = N::from(self.spec.entropy_coef);
        if let Some(averaging) = self.spec.entropy_averaging {
            return coef * self.weight(averaging, frozen, b);
        }
        let drops_policy = self.spec.top_entropy.is_some_and(|top| top.drops == DroppedTerm::PolicyTerm);
        let kept = if drops_policy { &frozen.top } else { &frozen.counts };
        if kept[[b, t]] { coef / N::from(all(kept).len().max(1) as f64) } else { N::from(0.0) }
    }

    /// Row `b`: what it adds to the loss, and its tokens.
    pub(crate) fn row<N: Number>(&self, frozen: &Frozen<N>, policy: &Policy<N>, b: usize) -> RowLoss<N> {
        let spec = self.spec;
        let token = |t: usize| {
            frozen.counts[[b, t]].then(|| {
                let policy_term = if frozen.stays[[b, t]] {
                    frozen.policy_factor[[b, t]].clone() * self.policy(frozen, policy, b, t)
                } else {
                    N::from(0.0)
                };
                let factor = || frozen.kl_factor[[b, t]].clone();
                let kl = spec.kl.as_ref().map(|kl| factor() * self.kl(kl, frozen, policy, b, t));
                let beta = || N::from(spec.kl.as_ref().map_or(0.0, |kl| kl.beta));
                let penalty = kl.clone().map_or(N::from(0.0), |kl| beta() * kl);
                TokenLoss { loss: policy_term.clone() + penalty.clone(), policy: policy_term, kl, penalty }
            })
        };
        let tokens: Vec<Option<TokenLoss<N>>> = (0..self.shape().1).map(token).collect();
        let mut loss = self.empty_row(frozen, b);
        for (t, token) in tokens.iter().enumerate() {
            let Some(token) = token else { continue };
            loss = loss
                + self.weight(spec.averaging(), frozen, b) * token.policy.clone()
                + self.weight(spec.kl_averaging(), frozen, b) * token.penalty.clone();
            if spec.entropy_coef != 0.0 {
                loss = loss - self.entropy_weight(frozen, b, t) * policy.entropy(b, t);
            }
            if spec.dentropy {
                let dentropy = self.problem.extra.dentropy.as_ref().expect("the spec reads it")[[b, t]];
                loss = loss + N::from(dentropy) * policy.entropy(b, t);
            }
        }
        RowLoss { loss: N::from(spec.scale) * loss, tokens }
    }

    /// `−A/B` for a row without tokens, where the objective counts those.
    pub(super) fn empty_row<N: Number>(&self, frozen: &Frozen<N>, b: usize) -> N {
        let counts = matches!(&self.spec.objective, Objective::ImportanceSampling(sampling) if sampling.empty_rows);
        if !counts || !self.tokens_of(&frozen.counts, b).is_empty() {
            return N::from(0.0);
        }
        debug_assert_eq!(self.spec.advantages, AdvantageLevel::Sequence);
        -(N::from(self.advantage(b, 0)) / N::from(self.shape().0 as f64))
    }
}

/// `−min(min(ρ, δ)·A, clip(ρ, 1 − εl, 1 + εh)·A)`; with a dual clip and `A < 0` at most `−c·A`.
pub(super) fn ppo_clip<N: Number>(clip: &PpoClip, ratio: &N, advantage: f64) -> N {
    let a = || N::from(advantage);
    let unclipped = clip.delta.map_or(ratio.clone(), |delta| ratio.clone().min(N::from(delta)));
    let low = N::from(1.0) - N::from(clip.epsilon_low);
    let high = N::from(1.0) + N::from(clip.epsilon_high);
    let clipped = ratio.clone().max(low).min(high);
    let loss = -(unclipped * a()).min(clipped * a());
    match clip.dual_clip {
        Some(c) if advantage < 0.0 => loss.min(-(N::from(c) * a())),
        _ => loss,
    }
}
