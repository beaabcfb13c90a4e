//! The description of a spec in words and formulas, with its numbers inserted.

use super::{
    AdvantageLevel, Averaging, CrossEntropy, Divergence, DroppedTerm, KeptSupport, Kl, KlEstimator, KlGradient,
    KlImportance, LogitsTransform, LossSpec, LossTerms, Objective, OffPolicyMask, OldLogp, OutOfBounds, PositiveTokens,
    PpoClip, QuantilePrecision, Ratio, RatioLevel, Reduction, Rejection, RejectionEstimator, RejectionLevel,
    RolloutLevel, RolloutSource, RolloutWeights, Rows, SoftmaxRange, Support, Temperature, TemperatureDivides,
    TokenWeights, TopEntropy, TrustRegion, UnscoredWeight,
};

/// Returns the symbol of the log-probability that a ratio is taken against.
fn old(source: OldLogp) -> &'static str {
    match source {
        OldLogp::Given => "old_logp",
        OldLogp::Current => "sg(ℓ)",
        OldLogp::Rollout => "rollout_logp",
    }
}

/// Writes `x` with at most twelve digits after the point, or as a power of ten if it is small.
pub(super) fn number(x: f64) -> String {
    // Fixed notation would lose the digits of a small number.
    if x != 0.0 && x.abs() < 1e-3 {
        return format!("{x:e}");
    }
    let fixed = format!("{x:.12}");
    fixed.trim_end_matches('0').trim_end_matches('.').to_string()
}

impl LossSpec {
    /// Describes what the loss computes, one line per part.
    ///
    /// In it `ℓ` is the log-probability, `A` the advantage, `m` the mask, `H` the entropy, `n_b` the number of unmasked tokens of
    /// sequence `b`, and `sg` stops the gradient.
    ///
    /// ```
    /// # use assay_core as assay;
    /// let text = assay::spec::LossSpec::default().describe();
    /// assert!(text.starts_with("logp       ℓ = log_softmax(logits)[id], H of the same softmax\n"));
    /// ```
    pub fn describe(&self) -> String {
        // The order is that of the computation: log-probability, ratio, policy term, masks and weights.
        let mut lines = vec![("logp", self.logp_line())];
        if self.reads_ratio() {
            lines.push(("ratio", self.ratio.describe(self.old_logp)));
        }
        lines.push(("policy", self.policy_line()));
        lines.extend(self.rejection.iter().map(|rejection| ("rejection", rejection.describe())));
        lines.extend(self.off_policy_mask.map(|mask| ("mask", mask.describe())));
        lines.extend(self.top_entropy.map(|top| ("mask", top.describe())));
        lines.extend(self.rollout.as_ref().map(|rollout| {
            let in_vespo = matches!(self.objective, Objective::Vespo(_));
            ("weight", rollout.describe(in_vespo))
        }));
        lines.extend(self.token_weights.map(|weights| ("weight", weights.describe())));
        lines.extend(self.kl.as_ref().map(|kl| ("KL", kl.describe(self.touches_kl()))));
        // Then the other terms and the reduction.
        lines.push(("reduction", self.averaging().describe()));
        if self.entropy_coef != 0.0 {
            lines.push(("entropy", self.entropy_line()));
        }
        // The terms of logp from cotangents.
        if self.ids_per_token > 1 {
            lines.push((
                "others",
                format!("Σ m·Σ_k dlogp_k·ℓ_k, with its gradient: {} more ids per token", self.ids_per_token - 1),
            ));
        }
        if self.dentropy {
            lines.push(("entropy", "Σ m·dentropy·H, with its gradient: one dentropy per token".into()));
        }
        // The sum of all terms comes last.
        lines.push(("loss", self.loss_line()));
        lines.into_iter().fold(String::new(), |text, (name, line)| text + &format!("{name:<10} {line}\n"))
    }

    fn reads_ratio(&self) -> bool {
        // Every objective is named, so that a new one is asked.
        let objective = match self.objective {
            Objective::None | Objective::PolicyGradient | Objective::CrossEntropy(_) | Objective::Distillation(_) => {
                false
            }
            Objective::PpoClip(_)
            | Objective::Cispo(_)
            | Objective::Sapo(_)
            | Objective::Vespo(_)
            | Objective::ImportanceSampling(_)
            | Objective::MaskedRatio(_)
            | Objective::TrustRegion(_)
            | Objective::Dro(_)
            | Objective::KlCov(_)
            | Objective::ClipCov(_)
            | Objective::Topr(_)
            | Objective::Aspo(_) => true,
        };
        objective
            || self
                .kl
                .as_ref()
                .is_some_and(|kl| matches!(kl.importance, KlImportance::Ratio | KlImportance::TokenRatio))
    }

    /// Whether a mask or weight of the policy term applies to the KL penalty too.
    fn touches_kl(&self) -> bool {
        self.rejection.iter().any(|rejection| !rejection.counts || rejection.drops_from == LossTerms::PolicyAndKl)
            || self.rollout.as_ref().is_some_and(|rollout| rollout.applies_to == LossTerms::PolicyAndKl)
            || self.token_weights.is_some()
    }

    fn logp_line(&self) -> String {
        let logits = self.logits.describe();
        let one = self.temperature == Temperature::ONE;
        // A temperature of 1 is left out of the formula.
        let t = self.temperature.number().map_or("T".into(), number);
        let mut line = match self.temperature_divides {
            _ if one => format!("ℓ = log_softmax({logits})[id], H of the same softmax"),
            TemperatureDivides::Logits => format!("ℓ = log_softmax({logits} / {t})[id], H of the same softmax"),
            TemperatureDivides::Logp => format!("ℓ = log_softmax({logits})[id] / {t}, H of softmax({logits} / {t})"),
        };
        line += &self.support.describe();
        if self.temperature == Temperature::Given {
            line += "; T is given, one per sequence or token";
        }
        line
    }

    fn policy_line(&self) -> String {
        let advantage = match self.advantages {
            AdvantageLevel::Sequence => "one A per sequence",
            AdvantageLevel::Token if self.ids_per_token > 1 => "A = −dlogp of each token's first id",
            AdvantageLevel::Token if self.is_from_cotangents() => "A = −dlogp of each token",
            AdvantageLevel::Token => "one A per token",
        };
        match self.objective {
            Objective::None => "none".into(),
            Objective::CrossEntropy(_) | Objective::Distillation(_) => self.objective.describe(),
            _ => format!("{}; {advantage}", self.objective.describe()),
        }
    }

    fn entropy_line(&self) -> String {
        let over = match &self.entropy_averaging {
            Some(averaging) => averaging.describe(),
            None if self.top_entropy.is_some() => "mean over the unmasked tokens that the entropy mask keeps".into(),
            None => "mean over all unmasked tokens".into(),
        };
        format!("bonus of {} · mean(H), with its gradient: {over}", number(self.entropy_coef))
    }

    fn loss_line(&self) -> String {
        // The terms with the weights of a reduction.
        let mut terms = vec!["Σ w·m·policy".to_string()];
        if self.objective == Objective::None {
            terms.clear();
        }
        if let Some(kl) = &self.kl {
            terms.push(format!("Σ w·m·{}kl", times(kl.beta)));
        }
        let mut sum = terms.join(" + ");
        // The bonus is subtracted; a negative coefficient turns the sign around.
        if self.entropy_coef != 0.0 {
            let sign = if self.entropy_coef > 0.0 { "− " } else { "+ " };
            let lead = if sum.is_empty() && self.entropy_coef < 0.0 { "" } else { sign };
            let space = if sum.is_empty() { "" } else { " " };
            sum += &format!("{space}{lead}{}mean(H)", times(self.entropy_coef.abs()));
        }
        if self.ids_per_token > 1 {
            sum += " + Σ m·Σ_k dlogp_k·ℓ_k";
        }
        if self.dentropy {
            sum += if sum.is_empty() { "Σ m·dentropy·H" } else { " + Σ m·dentropy·H" };
        }
        if sum.is_empty() {
            sum = "0".into();
        }
        if self.scale == 1.0 { sum } else { format!("{} · ({sum})", number(self.scale)) }
    }
}

/// Returns `factor · `, or nothing if the factor is 1.
fn times(factor: f64) -> String {
    if factor == 1.0 { String::new() } else { format!("{}·", number(factor)) }
}

impl LogitsTransform {
    fn describe(&self) -> String {
        let mut logits = String::from(if self.bias { "(logits + bias)" } else { "logits" });
        if self.scale != 1.0 {
            logits = format!("{}·{logits}", number(self.scale));
        }
        match self.softcap.map(number) {
            Some(cap) => format!("{cap}·tanh({logits} / {cap})"),
            None => logits,
        }
    }
}

impl Support {
    fn describe(&self) -> String {
        let mut text = String::new();
        if let Some(vocab) = self.vocab {
            text += &format!(", over the first {vocab} columns");
        }
        if !self.excluded_ids.is_empty() {
            text += &format!(", without {} ids", self.excluded_ids.len());
        }
        if let Some(KeptSupport { entropy, kl }) = self.kept {
            text += ", over each token's kept_ids";
            let whole: Vec<&str> = [("entropy", entropy), ("kl", kl)]
                .into_iter()
                .filter_map(|(name, range)| (range == SoftmaxRange::Vocabulary).then_some(name))
                .collect();
            if !whole.is_empty() {
                text += &format!(", {} over the vocabulary", whole.join(" and "));
            }
        }
        if !self.is_whole() && self.keep_sampled {
            text += ", the sampled id kept";
        }
        text
    }
}

impl Ratio {
    fn describe(&self, source: OldLogp) -> String {
        let mut x = format!("ℓ − {}", old(source));
        let clamped = |x: &str, clamp| format!("clamp({x}, ±{})", number(clamp));
        // A product clamps its sum and not its terms.
        let of_product = self.level == RatioLevel::SequenceProduct;
        if let Some(clamp) = self.clamp.filter(|_| !of_product) {
            x = clamped(&x, clamp);
        }
        let count = if self.denominator_epsilon == 0.0 {
            "n_b".to_string()
        } else {
            format!("(n_b + {})", number(self.denominator_epsilon))
        };
        // The log-ratio of the level, capped.
        let mut level = match self.level {
            RatioLevel::Token => "x".to_string(),
            RatioLevel::Sequence | RatioLevel::SequenceToken => format!("Σ m·x / {count}"),
            RatioLevel::SequenceProduct => self.clamp.map_or("Σ m·x".into(), |clamp| clamped("Σ m·x", clamp)),
        };
        if let Some(cap) = self.cap {
            level = format!("min({level}, {})", number(cap));
        }
        let mut text = match self.level {
            RatioLevel::Token if self.cap.is_none() => format!("ρ = exp(x), x = {x}, per token"),
            RatioLevel::Token => format!("ρ = exp({level}), x = {x}, per token"),
            RatioLevel::Sequence => {
                format!("ρ = exp({level}), x = {x}: one for the row, with the gradient of the mean")
            }
            RatioLevel::SequenceProduct => {
                format!("ρ = exp({level}), x = {x}: one for the row, with the gradient of the sum")
            }
            RatioLevel::SequenceToken => {
                format!("ρ = exp({level}), x = {x}: the row's value, with the gradient of the token's own ℓ")
            }
        };
        if let Some(clip) = self.clip {
            let (low, high) = (number(clip.low), number(clip.high));
            text += &format!("; x ≤ {high} where A > 0, x ≥ −{low} where A < 0");
        }
        let stops = self.clamp.is_some() || self.clip.is_some() || (self.cap.is_some() && !self.straight_through);
        match (stops, self.straight_through) {
            (true, false) => text + "; no gradient beyond a bound",
            (true, true) => text + "; no gradient beyond a bound but the cap",
            (false, true) => text + "; beyond the cap the gradient of the capped ratio",
            (false, false) => text,
        }
    }
}

impl PpoClip {
    fn describe(&self) -> String {
        let (low, high) = (number(1.0 - self.epsilon_low), number(1.0 + self.epsilon_high));
        let ratio = self.delta.map_or("ρ".to_string(), |delta| format!("min(ρ, {})", number(delta)));
        let mut text = format!("−min({ratio}·A, clip(ρ, {low}, {high})·A)");
        if let Some(c) = self.dual_clip {
            text += &format!(", at most −{}·A where A < 0", number(c));
        }
        text
    }
}

impl TrustRegion {
    fn describe(&self) -> String {
        let term = match self.truncate {
            Some(most) => format!("−sg(min(ρ, {}))·A·ℓ", number(most)),
            None => "−ρ·A".into(),
        };
        let (low, high) = (number(self.low), number(self.high));
        let moved = match self.divergence {
            Divergence::TotalVariation => "|p − p_old|",
            Divergence::BinaryKl => "the binary KL of p_old and p",
        };
        let direction = if self.two_sided { "in either direction" } else { "in the direction of A" };
        let mut text = format!("{term} while p has not moved {direction} by {moved} > {high} (A > 0) or {low} (A ≤ 0)");
        if self.penalty != 0.0 {
            text += &format!("; plus {}·(ln ρ)²", number(self.penalty));
        }
        text
    }
}

impl Objective {
    fn describe(&self) -> String {
        match self {
            Objective::PpoClip(clip) => clip.describe(),
            Objective::Cispo(cispo) => match cispo.lower {
                Some(lower) => format!("−sg(clip(ρ, {}, {}))·A·ℓ", number(lower), number(cispo.upper)),
                None => format!("−sg(min(ρ, {}))·A·ℓ", number(cispo.upper)),
            },
            Objective::Sapo(sapo) => format!(
                "−(4/τ)·σ(τ(ρ − 1))·A with τ = {} where A > 0, else {}",
                number(sapo.tau_positive),
                number(sapo.tau_negative)
            ),
            Objective::Vespo(vespo) => format!(
                "−sg(e^λ·w^k·e^(−λw))·A·ℓ with w = exp(Σ m·clamp(ℓ − old, ±20) + Σ ln weight), (k, λ) = ({}, {}) where \
                 A ≥ 0, else ({}, {})",
                number(vespo.k_positive),
                number(vespo.lambda_positive),
                number(vespo.k_negative),
                number(vespo.lambda_negative)
            ),
            Objective::PolicyGradient => "−A·ℓ".into(),
            Objective::ImportanceSampling(sampling) if sampling.empty_rows => {
                "−ρ·A; a row without a token counts with −A".into()
            }
            Objective::ImportanceSampling(_) => "−ρ·A".into(),
            Objective::MaskedRatio(masked) => {
                let term = if masked.surrogate { "−ρ·A" } else { "−sg(ρ)·A·ℓ" };
                format!("{term} where {} < ρ < {}, else 0", number(masked.lower), number(masked.upper))
            }
            Objective::TrustRegion(region) => region.describe(),
            Objective::Dro(dro) => format!("−(A·ℓ − {}/2·x²)", number(dro.beta)),
            Objective::KlCov(cov) => {
                let which = cov.selection.map_or("the selected tokens".into(), |top| {
                    format!(
                        "the fraction {} of tokens with the largest (A − mean A)·(ℓ − mean ℓ)",
                        number(top.fraction)
                    )
                });
                format!("−ρ·A, plus {}·|ln ρ| on {which}", number(cov.coefficient))
            }
            Objective::ClipCov(cov) => {
                let which = cov.selection.map_or("the selected tokens".into(), |band| {
                    let (lower, upper) = (number(band.lower), number(band.upper));
                    format!(
                        "at most the fraction {} of tokens with (A − mean A)·(ℓ − mean ℓ) within ({lower}, {upper})",
                        number(band.fraction)
                    )
                });
                format!("{}, but 0 on {which}", cov.clip.describe())
            }
            Objective::Topr(topr) => {
                let which = match topr.positive {
                    PositiveTokens::Advantage => "A > 0",
                    PositiveTokens::Selected => "the token is selected",
                };
                let (positive, negative) = (times(topr.positive_weight), times(topr.negative_weight));
                format!("−{positive}A·ℓ where {which}, else −{negative}sg(min(ρ, {}))·A·ℓ", number(topr.upper))
            }
            Objective::Aspo(aspo) => {
                let bound = |own: f64, selected: Option<f64>| {
                    selected.map_or(number(own), |other| format!("{} ({} if selected)", number(own), number(other)))
                };
                let low = bound(1.0 - aspo.epsilon_low, aspo.selected.map(|widths| 1.0 - widths.epsilon_low));
                let high = bound(1.0 + aspo.epsilon_high, aspo.selected.map(|widths| 1.0 + widths.epsilon_high));
                let [positive, negative] = [aspo.dual_clip_positive, aspo.dual_clip_negative].map(number);
                format!(
                    "A > 0: −A·u/sg(u²), u = min(ρ, {high}), or −{positive}·A·ℓ where 1/u > {positive}; \
                     A < 0: −A·v, v = max(ρ, {low}), or −{negative}·A·ℓ where v > {negative}"
                )
            }
            Objective::CrossEntropy(cross_entropy) => cross_entropy.describe(),
            Objective::Distillation(distillation) => distillation.describe(),
            Objective::None => "none".into(),
        }
    }
}

impl CrossEntropy {
    fn describe(&self) -> String {
        let &Self { label_smoothing, z_loss } = self;
        let mut text = format!("−{}ℓ", times(1.0 - label_smoothing));
        if label_smoothing != 0.0 {
            text += &format!(" + {}(lse − mean of all z)", times(label_smoothing));
        }
        if z_loss != 0.0 {
            text += &format!(" + {}lse²", times(z_loss));
        }
        text + if self.reads_row() { ", lse = ln Σ exp(z) of the logits z of the softmax" } else { "" }
    }
}

impl Rejection {
    fn describe(&self) -> String {
        // The formula of one token, its variables, and the level of the statistic.
        let statistic = match self.estimator {
            RejectionEstimator::K1 => "−y",
            RejectionEstimator::K2 => "y²/2",
            RejectionEstimator::K3 => "e^y − 1 − y",
            RejectionEstimator::BinaryKl => "the binary KL of p and q",
            RejectionEstimator::TotalVariation => "|p − q|",
            RejectionEstimator::Probability => "q − p",
            RejectionEstimator::AbsoluteRatio => "e^|y|",
        };
        let of = match self.estimator {
            RejectionEstimator::K1 | RejectionEstimator::K2 | RejectionEstimator::K3 => {
                "y = clamp(old_logp − rollout_logp, ±20), 0 where rollout_logp is NaN"
            }
            RejectionEstimator::BinaryKl | RejectionEstimator::TotalVariation => {
                "p of the sampler and q of the old policy within 1e-6 and 1 − 1e-6, p = q where rollout_logp is NaN"
            }
            RejectionEstimator::Probability => "p of the sampler, q of the old policy, p = q where rollout_logp is NaN",
            RejectionEstimator::AbsoluteRatio => "y = old_logp − rollout_logp, 0 where rollout_logp is NaN",
        };
        let level = match self.level {
            RejectionLevel::Token => "of a token",
            RejectionLevel::SequenceSum => "summed over the row",
            RejectionLevel::SequenceMean => "in the row's mean",
            RejectionLevel::SequenceMax => "at the row's largest",
            RejectionLevel::SequenceMin => "at the row's smallest",
            RejectionLevel::SecondMoment => {
                let max = number(self.max);
                return format!(
                    "the largest y², as few as bring the mean of the batch's other tokens below {max}, \
                     y = old_logp − rollout_logp, 0 where rollout_logp is NaN; one token remains: as if masked"
                );
            }
        };
        let bounds = match self.min {
            Some(min) => format!("within {} and {}", number(min), number(self.max)),
            None => format!("at most {}", number(self.max)),
        };
        // The consequence for a token outside the bounds.
        let becomes = match (self.counts, self.drops_from) {
            (false, _) => "as if masked",
            (true, LossTerms::Policy) => "without a policy term, but counted",
            (true, LossTerms::PolicyAndKl) => "without a policy or KL term, but counted",
        };
        format!("where {statistic} {level} is not {bounds}, {of}: {becomes}")
    }
}

impl OffPolicyMask {
    fn describe(&self) -> String {
        let threshold = number(self.threshold);
        let unscored = if self.behaviour == OldLogp::Rollout { ", 0 where that is NaN," } else { "" };
        format!(
            "the policy term stays where A ≥ 0 or the row's mean of {} − ℓ{unscored} is ≤ {threshold}",
            old(self.behaviour)
        )
    }
}

impl TopEntropy {
    fn describe(&self) -> String {
        let what = match self.drops {
            DroppedTerm::PolicyTerm => "the policy term stays",
            DroppedTerm::Ratio => "a token is in its row's mean log-ratio",
        };
        let rounded = match self.precision {
            QuantilePrecision::Exact => "",
            QuantilePrecision::F32Threshold => ", which is taken in f32",
            QuantilePrecision::F32 => ", both in f32",
        };
        format!("{what} where H is at least the {} quantile of the batch{rounded}", number(1.0 - self.fraction))
    }
}

impl RolloutWeights {
    fn describe(&self, in_vespo: bool) -> String {
        let y = self.clamp.map_or("y".to_string(), |clamp| format!("clamp(y, ±{})", number(clamp)));
        let made = match (self.source, self.level) {
            (RolloutSource::Given, RolloutLevel::Geometric) => "geometric mean of the row's rollout_weights".into(),
            (RolloutSource::Given, _) => "rollout_weights, as given".into(),
            (RolloutSource::Logp, RolloutLevel::Token) => format!("exp({y}) of each token"),
            (RolloutSource::Logp, RolloutLevel::Sequence) => format!("exp({}) of the row", y.replace('y', "Σ m·y")),
            (RolloutSource::Logp, RolloutLevel::Geometric) => {
                format!("exp({}) of the row", y.replace('y', "Σ m·y / n_b"))
            }
            (RolloutSource::Logp, RolloutLevel::TokenGatedByGeometric) => {
                format!("exp({y}) of each token, where the row's geometric mean is within bounds")
            }
        };
        let difference = if self.source == RolloutSource::Logp { self.unscored.describe(self.level) } else { "" };
        // Given weights have no bounds; a gated weight is 0 outside, whatever `outside` says.
        let bounds = match (self.min, self.max) {
            _ if self.source == RolloutSource::Given => String::new(),
            (None, None) => String::new(),
            (min, max) => {
                let end = |bound: Option<f64>, none: &str| bound.map_or(none.to_string(), number);
                let gated = self.level == RolloutLevel::TokenGatedByGeometric;
                let outside = if self.outside == OutOfBounds::Mask || gated { "0 outside" } else { "clamped to" };
                format!(", {outside} [{}, {}]", end(min, "0"), end(max, "∞"))
            }
        };
        let normalized = if self.normalize { ", divided by its mean" } else { "" };
        let on = match self.applies_to {
            _ if in_vespo => "within w",
            LossTerms::Policy => "on the policy term",
            LossTerms::PolicyAndKl => "on the policy term and KL",
        };
        format!("{made}{difference}{bounds}{normalized}: {on}")
    }
}

impl UnscoredWeight {
    /// Describes the log-ratio `y`, and what a token with a NaN `rollout_logp`, which the sampler did not score, gets.
    fn describe(self, level: RolloutLevel) -> &'static str {
        match (self, level) {
            (UnscoredWeight::One, _) => ", y = old_logp − rollout_logp, or 0 where rollout_logp is NaN (not scored)",
            (UnscoredWeight::Zero, RolloutLevel::Token) => {
                ", y = old_logp − rollout_logp; where rollout_logp is NaN (not scored) the weight is 0, before bounds"
            }
            (UnscoredWeight::Zero, RolloutLevel::Sequence | RolloutLevel::Geometric) => {
                ", y = old_logp − rollout_logp; of a row with a NaN in rollout_logp (not scored) the weight is 0, before bounds"
            }
            (UnscoredWeight::Zero, RolloutLevel::TokenGatedByGeometric) => {
                ", y = old_logp − rollout_logp; where rollout_logp is NaN (not scored) y is 0 in the mean, and the weight 0"
            }
        }
    }
}

impl TokenWeights {
    fn describe(self) -> String {
        let on = match self.applies_to {
            LossTerms::Policy => "on the policy term",
            LossTerms::PolicyAndKl => "on the policy term and KL",
        };
        format!("token_weights, as given: {on}; 0 is as if masked")
    }
}

impl Kl {
    fn describe(&self, touched: bool) -> String {
        let difference = self
            .difference_clamp
            .map_or("ref_logp − ℓ".to_string(), |clamp| format!("clamp(ref_logp − ℓ, ±{})", number(clamp)));
        let estimate = match self.estimator {
            KlEstimator::K1 => "−d",
            KlEstimator::K2 => "d²/2",
            KlEstimator::K3 => "e^d − d − 1",
            KlEstimator::Abs => "|d|",
        };
        // Importance weight and clamp are nested in the order in which they are applied.
        let weighed = |estimate: String| match self.importance {
            KlImportance::One => estimate,
            KlImportance::Ratio => format!("ρ·({estimate})"),
            KlImportance::TokenRatio => format!("exp(x)·({estimate})"),
            KlImportance::Rollout => format!("exp(ℓ − rollout_logp)·({estimate})"),
            KlImportance::Score => format!("exp(ℓ − sg(ℓ))·({estimate})"),
        };
        let clamped = |value: String| {
            self.value_clamp.map_or(value.clone(), |clamp| format!("clamp({value}, ±{})", number(clamp)))
        };
        let value = if self.clamp_after_importance {
            clamped(weighed(estimate.into()))
        } else {
            weighed(clamped(estimate.into()))
        };
        let mut text = format!("{}·kl, kl = {value}, d = {difference}", number(self.beta));
        match self.gradient {
            KlGradient::Own => {}
            KlGradient::K2 => text += "; the gradient is that of d²/2",
            KlGradient::K2Weighted(bound) => {
                text += &format!("; the gradient is that of d²/2, times sg(min(exp(ℓ − old), {}))", number(bound));
            }
        }
        if self.importance == KlImportance::Rollout {
            text += "; kl is 0 where rollout_logp is NaN (not scored)";
        }
        if let Some(averaging) = &self.averaging {
            text += &format!("; {}", averaging.describe());
        }
        text + if touched { "" } else { "; no mask or weight of the policy term applies to it" }
    }
}

impl Averaging {
    fn describe(&self) -> String {
        // An epsilon is shown only if there is one.
        let plus = |count: &str| {
            if self.denominator_epsilon == 0.0 {
                count.to_string()
            } else {
                format!("({count} + {})", number(self.denominator_epsilon))
            }
        };
        let rows = |rows| match rows {
            Rows::All => "B".to_string(),
            Rows::NonEmpty => "B′".to_string(),
            Rows::Given(count) => number(count),
        };
        let meaning = |of: Rows| match of {
            Rows::All => ", empty rows counted",
            Rows::NonEmpty => ", B′ the rows with a token",
            Rows::Given(_) => "",
        };
        match self.reduction {
            Reduction::TokenMean => format!("w = 1/{}: mean over all unmasked tokens", plus("Σ m")),
            Reduction::SequenceMean { rows: of } => {
                format!("w = 1/({}·{}): mean over rows of their token means{}", rows(of), plus("n_b"), meaning(of))
            }
            Reduction::SequenceSum { rows: of } => {
                format!("w = 1/{}: mean over rows of their token sums{}", rows(of), meaning(of))
            }
            Reduction::FixedLength { rows: of, length } => {
                let length = length.map_or("T".to_string(), |length| length.to_string());
                format!("w = 1/({}·{length}): token sums over a fixed length{}", rows(of), meaning(of))
            }
            Reduction::Normalizer(count) => {
                format!("w = 1/{}: sum over all unmasked tokens by a given count", number(count))
            }
        }
    }
}
