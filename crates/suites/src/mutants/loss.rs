//! The specimen's own loss: from log-probabilities to one number, and back to their gradients.

use ndarray::Array2;

use super::bank::Bug;
use super::corrections::{Factor, token_weights};
use super::launch::{Evaluation, Graded, Launch, Scored, part};
use assay_core::problem::{Advantages, Sequence, Shape};
use assay_core::spec::{
    AdvantageLevel, Aspo, Cispo, Kl, KlEstimator, KlGradient, KlImportance, LossSpec, Objective, OldLogp, Positive,
    PpoClip, RatioLevel, Reduction, Rows, Topr,
};

/// A term of the loss, with its derivatives by `ℓ` and by the log-ratio of the token's level.
#[derive(Clone, Copy, Default)]
struct Term {
    value: f64,
    by_logp: f64,
    by_log_ratio: f64,
}

impl Term {
    /// `factor` times the term; 0 where the factor is, even if the term overflows.
    fn times(self, factor: f64) -> Self {
        if factor == 0.0 {
            return Self::default();
        }
        Self { value: self.value * factor, by_logp: self.by_logp * factor, by_log_ratio: self.by_log_ratio * factor }
    }

    /// The same with a weight that a bug may leave out of the gradient.
    fn weighed(self, by: Factor) -> Self {
        if by.value == 0.0 {
            return Self::default();
        }
        let Factor { value, gradient } = by;
        Self { value: self.value * value, by_logp: self.by_logp * gradient, by_log_ratio: self.by_log_ratio * gradient }
    }

    fn plus(self, other: Self) -> Self {
        Self {
            value: self.value + other.value,
            by_logp: self.by_logp + other.by_logp,
            by_log_ratio: self.by_log_ratio + other.by_log_ratio,
        }
    }
}

/// What a token's loss depends on.
#[derive(Clone, Copy)]
struct Inputs {
    logp: f64,
    ref_logp: f64,
    old_logp: f64,
    rollout_logp: f64,
    advantage: f64,
    is_selected: bool,
    /// What the policy term and the penalty are multiplied by.
    factors: [Factor; 2],
    /// `ℓ` less the ratio's denominator.
    moved: f64,
    /// The token's own log-ratio after its clamp, and whether it follows `ℓ` there.
    own: (f64, bool),
    /// That of its level.
    log_ratio: f64,
    on_policy: bool,
}

/// Losses, their sum and their gradients.
pub(super) fn evaluate(launch: &Launch, scored: Array2<Option<Scored>>) -> Evaluation {
    let Shape { batch, tokens, .. } = launch.shape;
    let mut graded = Array2::from_elem((batch, tokens), None);
    let mut loss = 0.0;
    let sequences = launch.sequences();
    for device_row in 0..launch.mesh.rows {
        let rows = part(batch, launch.mesh.rows, device_row);
        let weights = Weights::of(launch, &sequences, device_row);
        let mut of_device = 0.0;
        for sequence in sequences.iter().filter(|sequence| rows.contains(&sequence.row)) {
            let first = if launch.has(Bug::AdvantagesOfFirstDevice) { rows.start } else { 0 };
            let b = sequence.row;
            let row = sequence.tokens.clone().filter_map(|t| Some((t, scored[[b, t]]?)));
            let row: Vec<(usize, Scored)> = row.collect();
            for (t, token) in grade(launch, (sequence, sequence.index - first), &row, &weights, &mut of_device) {
                graded[[b, t]] = Some(token);
            }
        }
        if device_row == 0 || !launch.has(Bug::LossOfFirstDevice) {
            loss += of_device;
        }
    }
    Evaluation { loss, tokens: graded }
}

/// What multiplies token losses and entropies.
struct Weights {
    /// Of the tokens of each sequence.
    rows: Vec<f64>,
    /// `∂loss/∂H`
    entropy: f64,
}

impl Weights {
    fn of(launch: &Launch, sequences: &[Sequence], device_row: usize) -> Self {
        let (spec, mask) = (launch.spec, launch.mask());
        let Shape { batch: rows, tokens, .. } = launch.shape;
        let weights = launch.has(Bug::TokenWeightsInDenominator).then(|| token_weights(launch));
        let weight = |at| weights.as_ref().map_or(1.0, |weights| weights[at]);
        let count = |sequence: &Sequence| sequence.places().filter(|&at| mask[at]).map(weight).sum::<f64>();
        let counts: Vec<f64> = sequences.iter().map(count).collect();
        let local = launch.has(Bug::NormaliserLocal);
        let summed = if local { part(rows, launch.mesh.rows, device_row) } else { 0..rows };
        let packed = launch.tokens.extra.sequences.packed().is_some();
        let least = if packed && launch.has(Bug::EmptySequenceCountsAToken) { 1.0 } else { 0.0 };
        let summed = sequences.iter().zip(&counts).filter(|(sequence, _)| summed.contains(&sequence.row));
        let summed: f64 = summed.map(|(_, n)| f64::max(*n, least)).sum();
        let (batch, width) = (counts.len(), tokens as f64);
        let total = match () {
            () if launch.has(Bug::NormaliserCountsPadding) => batch as f64 * width,
            // An empty shard divides nothing.
            () => summed.max(1.0),
        };
        let filled = counts.iter().filter(|&&n| n > 0.0).count() as f64;
        let rows_of = |rows: Rows| match rows {
            Rows::All if launch.has(Bug::EmptyRowsLeftOut) => filled,
            Rows::NonEmpty if launch.has(Bug::EmptyRowsCounted) => batch as f64,
            Rows::All => batch as f64,
            Rows::NonEmpty => filled,
            Rows::Given(count) => count,
        };
        let epsilon = if launch.has(Bug::DenominatorEpsilonForgotten) { 0.0 } else { spec.denominator_epsilon };
        let denominator = |n: f64| match spec.reduction {
            Reduction::TokenMean => total + epsilon,
            Reduction::SequenceMean { .. } if launch.has(Bug::SequenceMeanOverTokens) => total + epsilon,
            Reduction::SequenceMean { rows } => (n + epsilon) * rows_of(rows),
            Reduction::SequenceSum { rows } if launch.has(Bug::LengthFactor) => rows_of(rows) * width / n,
            Reduction::SequenceSum { rows } => rows_of(rows),
            Reduction::FixedLength { rows, .. } if launch.has(Bug::FixedLengthOfWidth) => rows_of(rows) * width,
            Reduction::FixedLength { rows, length } => rows_of(rows) * length.map_or(width, |length| length as f64),
            Reduction::Normalizer(_) if launch.has(Bug::NormaliserOfBatchIgnored) => total,
            Reduction::Normalizer(given) => given,
        };
        let bonus_over = if launch.has(Bug::EntropyOverPadding) { batch as f64 * width } else { total };
        let sign = if launch.has(Bug::EntropyBonusSubtracted) { 1.0 } else { -1.0 };
        Self {
            rows: counts.iter().map(|&n| spec.scale / denominator(n.max(1.0))).collect(),
            entropy: if spec.entropy_coef == 0.0 { 0.0 } else { sign * spec.entropy_coef * spec.scale / bonus_over },
        }
    }
}

/// The tokens of a sequence, whose advantages are read at `advantages_of`; adds their losses to `sum`.
fn grade(
    launch: &Launch,
    (sequence, advantages_of): (&Sequence, usize),
    row: &[(usize, Scored)],
    weights: &Weights,
    sum: &mut f64,
) -> Vec<(usize, Graded)> {
    let spec = launch.spec;
    let b = sequence.row;
    let weight = weights.rows[sequence.index];
    let inputs = inputs(launch, b, advantages_of, row);
    // A mask that multiplies has masked tokens here too.
    let factor = |t: usize| if launch.has(Bug::MaskMultiplied) && !launch.mask()[[b, t]] { 0.0 } else { 1.0 };
    let terms: Vec<[Term; 2]> = inputs.iter().map(|inputs| [policy(launch, inputs), kl(launch, inputs)]).collect();
    let share = share(launch, row.len());
    let owed: f64 = terms.iter().map(|[policy, kl]| weight * (policy.by_log_ratio + kl.by_log_ratio)).sum();

    let level = match spec.ratio.level {
        RatioLevel::Sequence if launch.has(Bug::SequenceGradientOfToken) => RatioLevel::SequenceToken,
        RatioLevel::SequenceToken if launch.has(Bug::TokenGradientOfSequence) => RatioLevel::Sequence,
        level => level,
    };
    let graded = row.iter().zip(inputs).zip(terms).map(|((&(t, scored), inputs), [policy, kl])| {
        let Term { value, by_logp, by_log_ratio } = policy.plus(kl);
        let (_, follows) = inputs.own;
        let follows = follows || launch.has(Bug::RatioClampGradientKept);
        let through_ratio = match level {
            RatioLevel::Token if follows => weight * by_log_ratio,
            RatioLevel::SequenceToken => weight * by_log_ratio,
            RatioLevel::Sequence | RatioLevel::SequenceProduct if follows => share * owed,
            RatioLevel::Token | RatioLevel::Sequence | RatioLevel::SequenceProduct => 0.0,
        };
        let through_ratio = match spec.old_logp {
            OldLogp::Current if launch.has(Bug::CurrentNotDetached) => 0.0,
            _ if launch.has(Bug::RatioDetached) => 0.0,
            _ => through_ratio,
        };
        let mut grad_logp = weight * by_logp + through_ratio;
        let entropy_weight = match &launch.tokens.extra.dentropy {
            Some(dentropy) if spec.dentropy => {
                spec.scale * dentropy[[b, if launch.has(Bug::DentropyOfFirstToken) { 0 } else { t }]]
            }
            _ => weights.entropy,
        };
        let mut grad_entropy = entropy_weight;
        match () {
            () if launch.has(Bug::ScaleForgottenInGradient) => grad_logp /= spec.scale,
            () if launch.has(Bug::GradientOfLoss) => grad_logp *= spec.scale,
            () if launch.has(Bug::GradientNotNormalised) => grad_logp *= spec.scale / weight,
            () if launch.has(Bug::EntropyDetached) => grad_entropy = 0.0,
            () if launch.has(Bug::DentropySignFlipped) && spec.dentropy => grad_entropy = -grad_entropy,
            () if launch.has(Bug::DentropyDropped) && spec.dentropy => grad_entropy = 0.0,
            () if launch.has(Bug::DlogpSignFlipped) && spec.is_of_cotangents() => grad_logp = -grad_logp,
            () => {}
        }
        let counted = if launch.has(Bug::LossOfPolicyAlone) { policy.value } else { value };
        *sum += weight * counted * factor(t);
        if entropy_weight != 0.0 {
            *sum += entropy_weight * scored.entropy * factor(t);
        }
        let masked = factor(t) == 0.0;
        if masked {
            // As autodiff does it.
            grad_logp *= 0.0;
            grad_entropy *= 0.0;
        }
        (t, Graded { scored, loss: value, grad_logp, grad_entropy })
    });
    graded.collect()
}

/// `1 / (n + ε)`
fn share(launch: &Launch, tokens: usize) -> f64 {
    let tokens = if launch.has(Bug::RatioOverWidth) { launch.shape.tokens } else { tokens };
    let of_product = launch.spec.ratio.level == RatioLevel::SequenceProduct;
    if launch.has(Bug::ShareForgotten) || of_product {
        1.0
    } else {
        1.0 / (tokens as f64 + launch.spec.ratio.denominator_epsilon)
    }
}

fn inputs(launch: &Launch, b: usize, advantages_of: usize, row: &[(usize, Scored)]) -> Vec<Inputs> {
    let Launch { spec, tokens, shape, .. } = launch;
    let at = |array: Option<&Array2<f64>>, b: usize, t: usize| array.map_or(f64::NAN, |array| array[[b, t]]);
    let given = |t: usize| {
        let t = if launch.has(Bug::OldLogpShifted) { t.saturating_sub(1) } else { t };
        let old_logp = at(tokens.old_logp, b, t);
        if launch.has(Bug::OldLogpInBf16) { half::bf16::from_f64(old_logp).to_f64() } else { old_logp }
    };
    let old_logp = |t: usize, scored: &Scored| if spec.old_logp == OldLogp::Current { scored.logp } else { given(t) };
    let held = |x: f64| match spec.ratio.clamp {
        Some(clamp) if x.abs() > clamp && !launch.has(Bug::RatioClampIgnored) => (x.clamp(-clamp, clamp), false),
        _ => (x, true),
    };
    // Of a product the sum is held.
    let of_product = spec.ratio.level == RatioLevel::SequenceProduct;
    let own = |&(t, ref scored): &(usize, Scored)| {
        let x = scored.logp - old_logp(t, scored);
        if of_product { (x, true) } else { held(x) }
    };
    let mut owns: Vec<(f64, bool)> = row.iter().map(own).collect();
    let count = if launch.has(Bug::RatioOverWidth) { shape.tokens } else { row.len() } as f64;
    let count = count + spec.ratio.denominator_epsilon;
    let mut total: f64 = owns.iter().map(|(x, _)| x).sum();
    if of_product {
        let (of_row, follows) = held(total);
        total = of_row;
        for own in &mut owns {
            own.1 = follows;
        }
    }
    let mean = match () {
        () if launch.has(Bug::RatioOfSum) || of_product => total,
        () if launch.has(Bug::MeanOfRatios) => (owns.iter().map(|(x, _)| x.exp()).sum::<f64>() / count).ln(),
        () => total / count,
    };
    let near = spec.off_policy_mask.is_none_or(|mask| {
        let count = if launch.has(Bug::OffPolicyOverWidth) { shape.tokens } else { row.len() };
        let fallen = row.iter().map(|(t, scored)| at(tokens.old_logp, b, *t) - scored.logp).sum::<f64>() / count as f64;
        let fallen = if launch.has(Bug::OffPolicySignFlipped) { -fallen } else { fallen };
        fallen <= mask.threshold || launch.has(Bug::OffPolicyMaskIgnored)
    });
    let of_own = spec.ratio.level == RatioLevel::Token || launch.has(Bug::SequenceRatioOfTokens);
    let of_token = |((t, scored), own): (&(usize, Scored), (f64, bool))| {
        let sequences = &tokens.extra.sequences;
        let count = sequences.count(shape.batch);
        let row = match () {
            () if launch.has(Bug::AdvantageOfNeighbour) => (advantages_of + 1) % count,
            () if launch.has(Bug::PackTakenForRow) => sequences.owner((b, *t)).unwrap_or(0),
            () => advantages_of,
        };
        let of_first = launch.has(Bug::AdvantageOfFirstToken) && spec.advantages == AdvantageLevel::Token;
        let advantage = match tokens.advantages {
            Advantages::Sequence(advantages) => advantages[row],
            Advantages::Token(_) | Advantages::Dlogp(_) => {
                let row = if sequences.packed().is_some() { 0 } else { row };
                tokens.advantages.at(row, if of_first { 0 } else { *t })
            }
        };
        let ref_row = if launch.has(Bug::RefLogpOfFirstRow) { 0 } else { b };
        Inputs {
            logp: scored.logp,
            ref_logp: at(tokens.ref_logp, ref_row, *t),
            old_logp: at(tokens.old_logp, b, *t),
            rollout_logp: at(tokens.extra.rollout_logp.as_ref(), b, *t),
            advantage,
            is_selected: tokens.extra.selected.as_ref().is_some_and(|selected| selected[[b, *t]]),
            factors: launch.corrections.factors[[b, *t]],
            moved: scored.logp - old_logp(*t, scored),
            own,
            log_ratio: if of_own { own.0 } else { mean },
            on_policy: near || (advantage >= 0.0 && !launch.has(Bug::OffPolicyMaskForPositive)),
        }
    };
    row.iter().zip(owns).map(of_token).collect()
}

/// `ρ`, in f32.
fn ratio(launch: &Launch, inputs: &Inputs) -> f64 {
    if launch.has(Bug::RatioToFirstOrder) {
        return 1.0 + inputs.log_ratio;
    }
    f64::from((inputs.log_ratio as f32).exp())
}

/// The policy term.
fn policy(launch: &Launch, inputs: &Inputs) -> Term {
    let idle = inputs.advantage == 0.0 && !launch.has(Bug::ZeroAdvantageTimesRatio);
    if idle || !inputs.on_policy {
        return Term::default();
    }
    let term = match &launch.spec.objective {
        Objective::PpoClip(clip) => ppo_clip(launch, clip, inputs),
        Objective::Cispo(cispo) => cispo_weight(launch, cispo, inputs),
        Objective::PolicyGradient => score(1.0, inputs),
        Objective::Topr(topr) => tapered(launch, topr, inputs),
        Objective::Aspo(aspo) => upside_down(launch, aspo, inputs),
        _ => Term::default(),
    };
    term.weighed(inputs.factors[0])
}

/// `−coefficient·A·ℓ`, the coefficient held.
fn score(coefficient: f64, inputs: &Inputs) -> Term {
    let by_logp = -coefficient * inputs.advantage;
    Term { value: by_logp * inputs.logp, by_logp, by_log_ratio: 0.0 }
}

/// `−min(min(ρ, δ)·A, clip(ρ)·A)`, for `A < 0` at most `−c·A`. It follows the ratio where it is the ratio.
fn ppo_clip(launch: &Launch, clip: &PpoClip, inputs: &Inputs) -> Term {
    let (ratio, advantage) = (ratio(launch, inputs), inputs.advantage);
    let (epsilon_low, epsilon_high) = match () {
        () if launch.has(Bug::EpsilonsSwapped) => (clip.epsilon_high, clip.epsilon_low),
        () => (clip.epsilon_low, clip.epsilon_high),
    };
    // ε_low may exceed 1 once it is not itself.
    let (low, high) = (1.0 - epsilon_low, 1.0 + epsilon_high);
    let delta = if launch.has(Bug::DeltaIgnored) { None } else { clip.delta };
    let bounded = delta.map_or(ratio, |delta| ratio.min(delta));
    let clipped = if launch.has(Bug::ClipIgnored) { bounded } else { ratio.clamp(low, high) };
    let smaller = advantage > 0.0 || launch.has(Bug::ClipOnTheWrongSide);
    let mut k = match () {
        () if launch.has(Bug::ClipWithoutMin) => clipped,
        () if smaller => bounded.min(clipped),
        () => bounded.max(clipped),
    };
    let stops = advantage < 0.0 || launch.has(Bug::DualClipForPositive);
    if let Some(most) = clip.dual_clip.filter(|_| stops && !launch.has(Bug::DualClipIgnored)) {
        k = k.min(most);
    }
    let mut follows = k == ratio;
    if launch.has(Bug::DeltaStopsGradient) {
        follows &= delta.is_none_or(|delta| ratio <= delta);
    }
    let by_log_ratio = match () {
        () if launch.has(Bug::OverflowingRatioTimesZero) => -ratio * advantage * f64::from(u8::from(follows)),
        () if follows || launch.has(Bug::ClipGradientKept) => -ratio * advantage,
        () => 0.0,
    };
    Term { value: -k * advantage, by_logp: 0.0, by_log_ratio }
}

/// `−sg(clip(ρ))·A·ℓ`
fn cispo_weight(launch: &Launch, cispo: &Cispo, inputs: &Inputs) -> Term {
    let ratio = ratio(launch, inputs);
    let lower = cispo.lower.filter(|_| !launch.has(Bug::CispoLowerIgnored)).unwrap_or(f64::NEG_INFINITY);
    let upper = if launch.has(Bug::CispoBoundFromOne) { 1.0 + cispo.upper } else { cispo.upper };
    let weight = ratio.clamp(lower, upper);
    let term = score(weight, inputs);
    if launch.has(Bug::CispoGradientClipped) && weight != ratio {
        return Term { by_logp: 0.0, ..term };
    }
    if launch.has(Bug::CispoWithoutLogp) {
        return Term { value: term.value, by_logp: 0.0, by_log_ratio: term.value };
    }
    term
}

/// `−w₊·A·ℓ` where the token is positive, `−w₋·sg(min(ρ, upper))·A·ℓ` elsewhere.
fn tapered(launch: &Launch, topr: &Topr, inputs: &Inputs) -> Term {
    let ratio = ratio(launch, inputs);
    let k = match () {
        () if launch.has(Bug::ToprClipIgnored) => ratio,
        () if launch.has(Bug::ToprClipFromBelow) => ratio.max(topr.upper),
        () => ratio.min(topr.upper),
    };
    let given = topr.positive == Positive::Selected && !launch.has(Bug::ToprSelectedIgnored);
    let is_positive = if given { inputs.is_selected } else { inputs.advantage > 0.0 };
    let (of_positive, of_others) = match () {
        () if launch.has(Bug::ToprWeightsSwapped) => (topr.negative_weight, topr.positive_weight),
        () if launch.has(Bug::ToprNegativeWeightForgotten) => (topr.positive_weight, 1.0),
        () => (topr.positive_weight, topr.negative_weight),
    };
    if is_positive {
        return score(if launch.has(Bug::ToprRatioForPositive) { of_positive * k } else { of_positive }, inputs);
    }
    let term = score(of_others * k, inputs);
    match () {
        () if launch.has(Bug::ToprRatioNotDetached) && k == ratio => Term { by_log_ratio: term.value, ..term },
        () if launch.has(Bug::ToprGradientClipped) && k != ratio => Term { by_logp: 0.0, ..term },
        () => term,
    }
}

/// For `A > 0` `−A·u/sg(u²)` with `u = min(ρ, 1 + εh)`, for `A < 0` `−A·v` with `v = max(ρ, 1 − εl)`; `−sg(c)·A·ℓ` where `1/u`, or
/// `v`, is above `c`.
fn upside_down(launch: &Launch, aspo: &Aspo, inputs: &Inputs) -> Term {
    let (ratio, advantage) = (ratio(launch, inputs), inputs.advantage);
    let (epsilon_low, epsilon_high) = match () {
        () if launch.has(Bug::AspoEpsilonsSwapped) => (aspo.epsilon_high, aspo.epsilon_low),
        () => (aspo.epsilon_low, aspo.epsilon_high),
    };
    let (of_positive, of_negative) = match () {
        () if launch.has(Bug::AspoDualClipsSwapped) => (aspo.dual_clip_negative, aspo.dual_clip_positive),
        () => (aspo.dual_clip_positive, aspo.dual_clip_negative),
    };
    let is_inverted =
        if advantage > 0.0 { !launch.has(Bug::AspoRatioNotInverted) } else { launch.has(Bug::AspoInvertedForAll) };
    // 1/u of the clipped ratio where A > 0.
    let (clipped, compared, most) = if advantage > 0.0 {
        let clipped = ratio.min(1.0 + epsilon_high);
        let compared = if launch.has(Bug::AspoDualClipOfRatio) { ratio } else { clipped.recip() };
        (clipped, compared, of_positive)
    } else {
        let clipped = ratio.max(1.0 - epsilon_low);
        (clipped, clipped, of_negative)
    };
    if compared > most && !launch.has(Bug::AspoDualClipIgnored) {
        let value = -most * advantage;
        let without_logp = Term { value, by_logp: 0.0, by_log_ratio: 0.0 };
        return if launch.has(Bug::AspoDualClipWithoutLogp) { without_logp } else { score(most, inputs) };
    }
    let mut k = if is_inverted { clipped.recip() } else { clipped };
    let mut follows = clipped == ratio;
    if launch.has(Bug::AspoClipAfterInverting) && advantage > 0.0 {
        k = ratio.recip().min(1.0 + epsilon_high);
        follows = k == ratio.recip();
    }
    let value = -k * advantage;
    let by_log_ratio = match () {
        () if !follows && !launch.has(Bug::AspoGradientKept) => 0.0,
        () if is_inverted && launch.has(Bug::AspoGradientOfInverse) => -value,
        () => value,
    };
    Term { value, by_logp: 0.0, by_log_ratio }
}

/// The derivative of the estimate, of that it is or of k2 in its place: `−d`, perhaps times `min(exp(ℓ − old_logp), bound)`.
fn kl_gradient(launch: &Launch, kl: &Kl, inputs: &Inputs, own: f64) -> f64 {
    let d = inputs.ref_logp - inputs.logp;
    let of_k2 = if launch.has(Bug::KlK2SignFlipped) { d } else { -d };
    match kl.gradient {
        KlGradient::Own => own,
        KlGradient::K2 | KlGradient::K2Weighted(_) if launch.has(Bug::KlK2Ignored) => own,
        KlGradient::K2 => of_k2,
        KlGradient::K2Weighted(_) if launch.has(Bug::KlK2WeightForgotten) => of_k2,
        KlGradient::K2Weighted(bound) => {
            let moved = if launch.has(Bug::KlK2WeightOfSequence) { inputs.log_ratio } else { inputs.moved };
            let bound = if launch.has(Bug::KlK2WeightUnbounded) { f64::INFINITY } else { bound };
            of_k2 * moved.exp().min(bound)
        }
    }
}

/// The penalty times what weighs it, with its gradient.
fn weighed_kl(launch: &Launch, kl: &Kl, inputs: &Inputs, (value, by_logp): (f64, f64)) -> Term {
    let of_level = |by: &Inputs| {
        let ratio = ratio(launch, by);
        let by_log_ratio = if launch.has(Bug::BiasCorrectionDetached) { 0.0 } else { ratio * value };
        Term { value: ratio * value, by_logp: ratio * by_logp, by_log_ratio }
    };
    // Of the token's own log-ratio: `follows` is whether the weight has a gradient.
    let own = |log_weight: f64, follows: bool| {
        let weight = log_weight.exp();
        let of_weight = if follows { weight * value } else { 0.0 };
        Term { value: weight * value, by_logp: weight * by_logp + of_weight, by_log_ratio: 0.0 }
    };
    let (own_log_ratio, follows) = inputs.own;
    match kl.importance {
        KlImportance::Ratio if launch.has(Bug::BiasCorrectionIgnored) => Term { value, by_logp, by_log_ratio: 0.0 },
        KlImportance::Ratio if launch.has(Bug::KlRatioOfToken) => own(own_log_ratio, follows),
        KlImportance::Ratio => of_level(inputs),
        KlImportance::TokenRatio if launch.has(Bug::KlTokenRatioOfSequence) => of_level(inputs),
        KlImportance::TokenRatio => own(own_log_ratio, follows && !launch.has(Bug::KlTokenRatioDetached)),
        KlImportance::Rollout => {
            let policy = if launch.has(Bug::KlRolloutOfOldPolicy) { inputs.old_logp } else { inputs.logp };
            let log_weight = policy - inputs.rollout_logp;
            let is_detached = launch.has(Bug::KlRolloutDetached) || launch.has(Bug::KlRolloutOfOldPolicy);
            match () {
                () if launch.has(Bug::KlRolloutIgnored) => own(0.0, false),
                () if log_weight.is_nan() && launch.has(Bug::KlUnscoredAsOne) => own(0.0, false),
                () if log_weight.is_nan() && !launch.has(Bug::KlUnscoredNan) => Term::default(),
                () if launch.has(Bug::KlRolloutInverted) => own(-log_weight, !is_detached),
                () => own(log_weight, !is_detached),
            }
        }
        KlImportance::Score => match () {
            () if launch.has(Bug::KlScoreForgotten) => own(0.0, false),
            () if launch.has(Bug::KlScoreAlone) => Term { value, by_logp: value, by_log_ratio: 0.0 },
            () if launch.has(Bug::KlScoreInValue) => Term { value: value * inputs.logp, ..own(0.0, true) },
            () => own(0.0, true),
        },
        KlImportance::One => Term { value, by_logp, by_log_ratio: 0.0 },
    }
}

/// `beta · kl`
fn kl(launch: &Launch, inputs: &Inputs) -> Term {
    let spec: &LossSpec = launch.spec;
    let Some(kl) = &spec.kl else { return Term::default() };
    if launch.has(Bug::KlMaskedByOffPolicyMask) && !inputs.on_policy {
        return Term::default();
    }
    let compared = if launch.has(Bug::KlAgainstOldPolicy) { inputs.old_logp } else { inputs.ref_logp };
    let d = compared - inputs.logp;
    let estimator = match kl.estimator {
        KlEstimator::K2 if launch.has(Bug::KlEstimatorsSwapped) => KlEstimator::K3,
        KlEstimator::K3 if launch.has(Bug::KlEstimatorsSwapped) => KlEstimator::K2,
        KlEstimator::Abs if launch.has(Bug::K1ForAbs) => KlEstimator::K1,
        _ if kl.gradient != KlGradient::Own && launch.has(Bug::KlK2InValue) => KlEstimator::K2,
        other => other,
    };
    let (value, by_logp) = match estimator {
        KlEstimator::K1 => (-d, 1.0),
        KlEstimator::K2 => (d * d / 2.0, -d),
        KlEstimator::K3 if launch.has(Bug::K3SignFlipped) => ((-d).exp_m1() + d, (-d).exp_m1()),
        KlEstimator::K3 if launch.has(Bug::K3GradientOfK1) => (d.exp_m1() - d, 1.0),
        KlEstimator::K3 => (d.exp_m1() - d, -d.exp_m1()),
        KlEstimator::Abs => (d.abs(), if d == 0.0 { 0.0 } else { -d.signum() }),
    };
    let by_logp = kl_gradient(launch, kl, inputs, by_logp);
    let mut term = weighed_kl(launch, kl, inputs, (value, by_logp)).times(kl.beta).weighed(inputs.factors[1]);
    if launch.has(Bug::BetaTwiceInGradient) {
        term.by_logp *= kl.beta;
    }
    let clipped = || matches!(spec.objective, Objective::PpoClip(_)) && policy(launch, inputs).by_log_ratio == 0.0;
    if launch.has(Bug::KlDetached) || (launch.has(Bug::KlClipped) && clipped()) {
        (term.by_logp, term.by_log_ratio) = (0.0, 0.0);
    }
    term
}
