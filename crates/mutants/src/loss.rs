//! The specimen's own loss: from log-probabilities to one number, and back to their gradients.

use ndarray::Array2;

use crate::bank::Bug;
use crate::corrections::token_weights;
use crate::kl::kl;
use crate::launch::{SpecimenEvaluation, SpecimenGradient, SpecimenLaunch, SpecimenScore, part};
use crate::policy::{SpecimenInputs, SpecimenTerm, policy, row_term};
use crate::top_entropy::HighEntropy;
use assay_core::problem::{Advantages, Sequence, Shape};
use assay_core::spec::{AdvantageLevel, Averaging, LogClip, OldLogp, RatioLevel, Reduction, Rows};

/// Evaluates the losses, their sum and their gradients.
pub(crate) fn evaluate(launch: &SpecimenLaunch, scored: Array2<Option<SpecimenScore>>) -> SpecimenEvaluation {
    let Shape { batch, tokens, .. } = launch.shape;
    let mut evaluated = Array2::from_elem((batch, tokens), None);
    let mut loss = 0.0;
    let sequences = launch.sequences();
    let high = HighEntropy::new(launch, &scored);
    // Each row shard evaluates its sequences; their losses are added up.
    for device_row in 0..launch.mesh.rows {
        let rows = part(batch, launch.mesh.rows, device_row);
        let weights = SequenceWeights::new(launch, &sequences, &high, device_row);
        let mut of_device = 0.0;
        for sequence in sequences.iter().filter(|sequence| rows.contains(&sequence.row)) {
            // Advantages are indexed by the sequence's number in the whole batch. The mutant counts from the device's
            // first row, and so reads those of the first device.
            let first = if launch.has(Bug::AdvantagesOfFirstDevice) { rows.start } else { 0 };
            let b = sequence.row;
            let row = sequence.tokens.clone().filter_map(|t| Some((t, scored[[b, t]].clone()?)));
            let row: Vec<(usize, SpecimenScore)> = row.collect();
            let advantages_of = sequence.index - first;
            for (t, token) in
                evaluate_sequence(launch, (sequence, advantages_of), &row, (&weights, &high), &mut of_device)
            {
                evaluated[[b, t]] = Some(token);
            }
        }
        if device_row == 0 || !launch.has(Bug::LossOfFirstDevice) {
            loss += of_device;
        }
    }
    SpecimenEvaluation { loss, tokens: evaluated }
}

/// The factors of token losses and entropies in the loss.
pub(crate) struct SequenceWeights {
    /// Factor of the policy terms of each sequence's tokens.
    pub(crate) rows: Vec<f64>,
    /// Factor of the penalties of each sequence's tokens.
    kl_rows: Vec<f64>,
    /// Derivative `∂loss/∂H` of an unmasked token.
    entropy: f64,
}

impl SequenceWeights {
    pub(crate) fn new(launch: &SpecimenLaunch, sequences: &[Sequence], high: &HighEntropy, device_row: usize) -> Self {
        let (spec, mask) = (launch.spec, launch.mask());
        let Shape { batch: rows, tokens, .. } = launch.shape;
        // Tokens that count, of each sequence.
        let weights = launch.has(Bug::TokenWeightsInDenominator).then(|| token_weights(launch));
        let weight = |at| weights.as_ref().map_or(1.0, |weights| weights[at]);
        let counted = |at| mask[at] && (high.policy[at] || !launch.has(Bug::TopEntropyOutOfDenominator));
        let count = |sequence: &Sequence| sequence.places().filter(|&at| counted(at)).map(weight).sum::<f64>();
        let counts: Vec<f64> = sequences.iter().map(count).collect();
        // Tokens that count over all row shards, after an all-reduce.
        let local = launch.has(Bug::NormaliserLocal);
        let summed = if local { part(rows, launch.mesh.rows, device_row) } else { 0..rows };
        let packed = launch.tokens.extra.sequences.packed().is_some();
        let least = if packed && launch.has(Bug::EmptySequenceCountsAToken) { 1.0 } else { 0.0 };
        let summed = sequences.iter().zip(&counts).filter(|(sequence, _)| summed.contains(&sequence.row));
        let kept = summed.clone().flat_map(|(sequence, _)| sequence.places()).filter(|&at| mask[at] && high.bonus[at]);
        let kept = kept.count().max(1) as f64;
        let summed: f64 = summed.map(|(_, n)| f64::max(*n, least)).sum();
        let (batch, width) = (counts.len(), tokens as f64);
        let total = match () {
            () if launch.has(Bug::NormaliserCountsPadding) => batch as f64 * width,
            // An empty shard divides nothing.
            () => summed.max(1.0),
        };
        let filled = counts.iter().filter(|&&n| n > 0.0).count() as f64;
        // Sequences that a mean over sequences divides by.
        let rows_of = |rows: Rows| match rows {
            Rows::All if launch.has(Bug::EmptyRowsLeftOut) => filled,
            Rows::NonEmpty if launch.has(Bug::EmptyRowsCounted) => batch as f64,
            Rows::All => batch as f64,
            Rows::NonEmpty => filled,
            Rows::Given(count) => count,
        };
        // The denominator of a sequence with `n` tokens.
        let denominator = |Averaging { reduction, denominator_epsilon }, n: f64| {
            let epsilon = if launch.has(Bug::DenominatorEpsilonForgotten) { 0.0 } else { denominator_epsilon };
            match reduction {
                Reduction::TokenMean if launch.has(Bug::MeanOfRowMeans) => (n + epsilon) * filled,
                Reduction::TokenMean => total + epsilon,
                Reduction::SequenceMean { .. } if launch.has(Bug::SequenceMeanOverTokens) => total + epsilon,
                Reduction::SequenceMean { rows } => (n + epsilon) * rows_of(rows),
                Reduction::SequenceSum { rows } if launch.has(Bug::LengthFactor) => rows_of(rows) * width / n,
                Reduction::SequenceSum { rows } => rows_of(rows),
                Reduction::FixedLength { rows, .. } if launch.has(Bug::FixedLengthOfWidth) => rows_of(rows) * width,
                Reduction::FixedLength { rows, length } => rows_of(rows) * length.map_or(width, |length| length as f64),
                Reduction::Normalizer(_) if launch.has(Bug::NormaliserOfBatchIgnored) => total,
                Reduction::Normalizer(given) => given,
            }
        };
        // The KL penalty may have a mean of its own.
        let own = Averaging { reduction: spec.reduction, denominator_epsilon: spec.denominator_epsilon };
        let of_kl = spec.kl.as_ref().and_then(|kl| kl.averaging).filter(|_| !launch.has(Bug::KlAveragingIgnored));
        let of_kl = of_kl.map_or(own, |of_kl| match of_kl.reduction {
            Reduction::SequenceMean { .. } if launch.has(Bug::KlAveragingCountsEmptyRows) => {
                Averaging { reduction: Reduction::SequenceMean { rows: Rows::All }, ..of_kl }
            }
            _ => of_kl,
        });
        let of_policy = if launch.has(Bug::KlAveragingOfPolicy) { of_kl } else { own };
        let weights_of = |of: Averaging| counts.iter().map(|&n| spec.scale / denominator(of, n.max(1.0))).collect();
        // The entropy bonus is a mean over all tokens, or over those of high entropy.
        let bonus_over = match () {
            () if launch.has(Bug::EntropyOverPadding) => batch as f64 * width,
            () if spec.top_entropy.is_some() => kept,
            () => total,
        };
        let sign = if launch.has(Bug::EntropyBonusSubtracted) { 1.0 } else { -1.0 };
        Self {
            rows: weights_of(of_policy),
            kl_rows: weights_of(of_kl),
            entropy: if spec.entropy_coef == 0.0 { 0.0 } else { sign * spec.entropy_coef * spec.scale / bonus_over },
        }
    }
}

/// Evaluates the tokens of a sequence, whose advantages are read at `advantages_of`; adds their losses to `sum`.
fn evaluate_sequence(
    launch: &SpecimenLaunch,
    (sequence, advantages_of): (&Sequence, usize),
    row: &[(usize, SpecimenScore)],
    (weights, high): (&SequenceWeights, &HighEntropy),
    sum: &mut f64,
) -> Vec<(usize, SpecimenGradient)> {
    let spec = launch.spec;
    let b = sequence.row;
    let (weight, kl_weight) = (weights.rows[sequence.index], weights.kl_rows[sequence.index]);
    let kl_gradient_weight = if launch.has(Bug::KlAveragingNotInGradient) { weight } else { kl_weight };
    // The policy term and the penalty of each token, with derivatives by ℓ and by the level's log-ratio.
    let inputs = inputs(launch, b, advantages_of, row, high);
    // A mask that multiplies has masked tokens here too.
    let factor = |t: usize| if launch.has(Bug::MaskMultiplied) && !launch.mask()[[b, t]] { 0.0 } else { 1.0 };
    let terms: Vec<[SpecimenTerm; 2]> =
        inputs.iter().map(|inputs| [policy(launch, inputs), kl(launch, inputs)]).collect();
    let through_level = |inputs: &SpecimenInputs, [policy, kl]: &[SpecimenTerm; 2]| {
        let (_, follows) = inputs.level;
        let by_log_ratio = weight * policy.by_log_ratio + kl_gradient_weight * kl.by_log_ratio;
        if follows || launch.has(Bug::RatioClampGradientKept) || launch.has(Bug::CapGradientKept) {
            by_log_ratio
        } else {
            0.0
        }
    };
    // The derivative of all losses together by a shared log-ratio.
    let owed: f64 = inputs.iter().zip(&terms).map(|(inputs, terms)| through_level(inputs, terms)).sum();

    // How that derivative comes back to the tokens depends on the level.
    let level = match spec.ratio.level {
        RatioLevel::Sequence if launch.has(Bug::SequenceGradientOfToken) => RatioLevel::SequenceToken,
        RatioLevel::SequenceToken if launch.has(Bug::TokenGradientOfSequence) => RatioLevel::Sequence,
        level => level,
    };
    let evaluated = row.iter().zip(inputs).zip(terms).map(|((&(t, ref scored), inputs), terms @ [policy, kl])| {
        let of_others: f64 = scored.others.iter().map(|of| of.grad_logp * of.logp).sum();
        let is_lost = launch.has(Bug::LossOfPolicyAlone);
        let of_row = row_term(launch, scored, inputs.factors[0]);
        let value = policy.value + if is_lost { 0.0 } else { kl.value } + of_others + of_row.value;
        let own = through_level(&inputs, &terms);
        let (_, follows) = inputs.own;
        let follows = follows || launch.has(Bug::RatioClampGradientKept) || launch.has(Bug::LogClipGradientKept);
        let through_ratio = match level {
            RatioLevel::Token if follows => own,
            RatioLevel::SequenceToken => own,
            RatioLevel::Sequence | RatioLevel::SequenceProduct if follows => inputs.share * owed,
            RatioLevel::Token | RatioLevel::Sequence | RatioLevel::SequenceProduct => 0.0,
        };
        let through_ratio = match spec.old_logp {
            OldLogp::Current if launch.has(Bug::CurrentNotDetached) => 0.0,
            _ if launch.has(Bug::RatioDetached) => 0.0,
            _ => through_ratio,
        };
        let direct = policy.by_logp + of_row.by_logp;
        let mut grad_logp = weight * direct + kl_gradient_weight * kl.by_logp + through_ratio;
        let entropy_weight = match &launch.tokens.extra.dentropy {
            Some(dentropy) if spec.dentropy => {
                spec.scale * dentropy[[b, if launch.has(Bug::DentropyOfFirstToken) { 0 } else { t }]]
            }
            _ if high.bonus[[b, t]] => weights.entropy,
            _ => 0.0,
        };
        let mut grad_entropy = entropy_weight;
        match () {
            () if launch.has(Bug::ScaleForgottenInGradient) => grad_logp /= spec.scale,
            () if launch.has(Bug::GradientOfLoss) => grad_logp *= spec.scale,
            () if launch.has(Bug::GradientNotNormalised) => grad_logp *= spec.scale / weight,
            () if launch.has(Bug::EntropyDetached) => grad_entropy = 0.0,
            () if launch.has(Bug::DentropySignFlipped) && spec.dentropy => grad_entropy = -grad_entropy,
            () if launch.has(Bug::DentropyDropped) && spec.dentropy => grad_entropy = 0.0,
            () if launch.has(Bug::DlogpSignFlipped) && spec.is_from_cotangents() => grad_logp = -grad_logp,
            () if launch.is_in_lost_block(t) => (grad_logp, grad_entropy) = (0.0, 0.0),
            () => {}
        }
        let of_kl = if is_lost { 0.0 } else { kl_weight * kl.value };
        *sum += (weight * (policy.value + of_others + of_row.value) + of_kl) * factor(t);
        if launch.has(Bug::LossSummedInBf16) {
            *sum = half::bf16::from_f64(*sum).to_f64();
        }
        if entropy_weight != 0.0 {
            *sum += entropy_weight * scored.entropy * factor(t);
        }
        let masked = factor(t) == 0.0;
        if masked {
            // As autodiff does it.
            grad_logp *= 0.0;
            grad_entropy *= 0.0;
        }
        let grad_row =
            of_row.slopes.map(|slope| if launch.is_in_lost_block(t) { 0.0 } else { weight * factor(t) * slope });
        (t, SpecimenGradient { scored: scored.clone(), loss: value, grad_logp, grad_entropy, grad_row })
    });
    evaluated.collect()
}

fn inputs(
    launch: &SpecimenLaunch,
    b: usize,
    advantages_of: usize,
    row: &[(usize, SpecimenScore)],
    high: &HighEntropy,
) -> Vec<SpecimenInputs> {
    let SpecimenLaunch { spec, tokens, .. } = launch;
    // An array that the batch does not have reads as NaN, so that a use of it shows.
    let at = |array: Option<&Array2<f64>>, b: usize, t: usize| array.map_or(f64::NAN, |array| array[[b, t]]);
    let rollout_logp = |t: usize| at(tokens.extra.rollout_logp.as_ref(), b, t);
    let given = |t: usize| {
        let t = if launch.has(Bug::OldLogpShifted) { t.saturating_sub(1) } else { t };
        let old_logp = at(tokens.old_logp, b, t);
        if launch.has(Bug::OldLogpInBf16) { half::bf16::from_f64(old_logp).to_f64() } else { old_logp }
    };
    let of_sampler = |t: usize| match () {
        () if launch.has(Bug::SamplerIgnored) => at(tokens.old_logp, b, t),
        // The first token has none before it.
        () if launch.has(Bug::SamplerShifted) => {
            rollout_logp(row.iter().map(|(u, _)| *u).filter(|u| *u < t).max().unwrap_or(t))
        }
        () if launch.has(Bug::SamplerInBf16) => half::bf16::from_f64(rollout_logp(t)).to_f64(),
        () => rollout_logp(t),
    };
    let old_logp = |t: usize, scored: &SpecimenScore| match spec.old_logp {
        OldLogp::Given => given(t),
        OldLogp::Current => scored.logp,
        OldLogp::Rollout => of_sampler(t),
    };
    let first = row.first().map_or(0, |(t, _)| *t);
    let upstream = |t: usize| match tokens.advantages {
        Advantages::Dlogp(_) => cotangent(launch, (b, t), first),
        _ => advantage(launch, (b, t), advantages_of),
    };
    let advantages: Vec<f64> = row.iter().map(|(t, _)| upstream(*t)).collect();
    // Log-ratios of the tokens, and of the sequence.
    let of_row = LogRatios::new(launch, b, row, &advantages, high, old_logp);
    // The off-policy mask: the mean fall of logp since the behaviour policy.
    let near = spec.off_policy_mask.is_none_or(|mask| {
        let behaviour = |t: usize| match mask.behaviour {
            OldLogp::Rollout if !launch.has(Bug::OffPolicyOfOldPolicy) => rollout_logp(t),
            _ => at(tokens.old_logp, b, t),
        };
        // A token that was not scored has fallen by 0, and is in the count of the mean.
        let fallen = |(t, scored): &(usize, SpecimenScore)| {
            let fallen = behaviour(*t) - scored.logp;
            if fallen.is_nan() && !launch.has(Bug::OffPolicyUnscoredNan) { 0.0 } else { fallen }
        };
        let count = if launch.has(Bug::OffPolicyOverWidth) { launch.shape.tokens } else { row.len() };
        let mean = row.iter().map(fallen).sum::<f64>() / count as f64;
        let mean = if launch.has(Bug::OffPolicySignFlipped) { -mean } else { mean };
        mean <= mask.threshold || launch.has(Bug::OffPolicyMaskIgnored)
    });
    let of_token = |(i, (t, scored)): (usize, &(usize, SpecimenScore))| {
        let ref_row = if launch.has(Bug::RefLogpOfFirstRow) { 0 } else { b };
        let advantage = advantages[i];
        SpecimenInputs {
            logp: scored.logp,
            ref_logp: at(tokens.ref_logp, ref_row, *t),
            old_logp: at(tokens.old_logp, b, *t),
            rollout_logp: rollout_logp(*t),
            advantage,
            is_selected: tokens.extra.selected.as_ref().is_some_and(|selected| selected[[b, *t]]),
            factors: launch.corrections.factors[[b, *t]],
            moved: scored.logp - old_logp(*t, scored),
            own: of_row.owns[i],
            level: of_row.level(i),
            share: of_row.shares[i],
            on_policy: near || (advantage >= 0.0 && !launch.has(Bug::OffPolicyMaskForPositive)),
            is_high: high.policy[[b, *t]],
        }
    };
    row.iter().enumerate().map(of_token).collect()
}

/// Returns the advantage of token `at`, whose sequence's advantage is at `advantages_of`.
fn advantage(launch: &SpecimenLaunch, at @ (_, t): (usize, usize), advantages_of: usize) -> f64 {
    let SpecimenLaunch { spec, tokens, shape, .. } = launch;
    let sequences = &tokens.extra.sequences;
    let is_packed = sequences.packed().is_some();
    let count = sequences.count(shape.batch);
    let row = match () {
        () if launch.has(Bug::AdvantageOfNeighbour) => (advantages_of + 1) % count,
        () if launch.has(Bug::PackTakenForRow) => sequences.owner(at).unwrap_or(0),
        // A gather beyond the last takes the last.
        () if launch.has(Bug::SegmentIdsFromOne) && is_packed => (advantages_of + 1).min(count - 1),
        () => launch.advantage_row(advantages_of),
    };
    if launch.has(Bug::PackedAdvantageZero) && is_packed {
        return 0.0;
    }
    let of_first = launch.has(Bug::AdvantageOfFirstToken) && spec.advantages == AdvantageLevel::Token;
    match tokens.advantages {
        Advantages::Sequence(advantages) => advantages[row],
        Advantages::Token(_) | Advantages::Dlogp(_) => {
            tokens.advantages.at(if is_packed { 0 } else { row }, if of_first { 0 } else { t })
        }
    }
}

/// Returns the cotangent of token `at` of a sequence whose first token that counts is at `first`.
fn cotangent(launch: &SpecimenLaunch, (b, t): (usize, usize), first: usize) -> f64 {
    let SpecimenLaunch { tokens, shape, .. } = launch;
    match () {
        () if launch.has(Bug::DlogpOfFirstToken) => {
            let first = tokens.mask.indexed_iter().find(|(_, counts)| **counts);
            first.map_or(0.0, |((b, t), _)| tokens.advantages.at(b, t))
        }
        () if launch.has(Bug::DlogpOfFirstInRow) => tokens.advantages.at(b, first),
        () if launch.has(Bug::DlogpOfNextRow) => tokens.advantages.at((b + 1) % shape.batch, t),
        () => tokens.advantages.at(b, t),
    }
}

/// A log-ratio after its bounds, and whether it still follows the log-ratio that they hold.
type FollowedRatio = (f64, bool);

/// The log-ratios of a sequence.
struct LogRatios<'l> {
    launch: &'l SpecimenLaunch<'l>,
    /// Log-ratio of each token, after its clamp and clip.
    owns: Vec<FollowedRatio>,
    /// Log-ratio of the sequence, which its tokens share, after the clamp of a product.
    row: FollowedRatio,
    /// Derivative of the sequence's log-ratio by that of each token.
    shares: Vec<f64>,
}

impl<'l> LogRatios<'l> {
    fn new(
        launch: &'l SpecimenLaunch<'l>,
        b: usize,
        row: &[(usize, SpecimenScore)],
        advantages: &[f64],
        high: &HighEntropy,
        old_logp: impl Fn(usize, &SpecimenScore) -> f64,
    ) -> Self {
        let ratio = &launch.spec.ratio;
        let held = |x: f64| match ratio.clamp {
            Some(clamp) if x.abs() > clamp && !launch.has(Bug::RatioClampIgnored) => (x.clamp(-clamp, clamp), false),
            _ => (x, true),
        };
        let capped = |(x, follows): FollowedRatio| match ratio.cap {
            Some(cap) if launch.has(Bug::CapOfTokens) && x > cap => (cap, false),
            _ => (x, follows),
        };
        // Of a product the sum is held.
        let of_product = ratio.level == RatioLevel::SequenceProduct;
        // Each token's own log-ratio: clamped, then clipped by GMPO.
        let own = |((t, scored), &advantage): (&(usize, SpecimenScore), &f64)| {
            let x = scored.logp - old_logp(*t, scored);
            let (x, follows) = if of_product { (x, true) } else { held(x) };
            let (x, still_follows) = clipped(launch, x, advantage);
            capped((x, follows && still_follows))
        };
        let owns: Vec<FollowedRatio> = row.iter().zip(advantages).map(own).collect();
        // The sequence's log-ratio is a mean, or the sum of a product.
        let is_in = |i: &usize| high.ratio[[b, row[*i].0]];
        let within: Vec<f64> = (0..row.len()).filter(is_in).map(|i| owns[i].0).collect();
        let count = match () {
            () if launch.has(Bug::RatioOverWidth) => launch.shape.tokens,
            () if launch.has(Bug::TopEntropyMeanOfAll) => row.len(),
            () => within.len(),
        };
        let count = count as f64 + ratio.denominator_epsilon;
        let total: f64 = within.iter().sum();
        let of_row = match () {
            () if within.is_empty() => (0.0, true),
            () if launch.has(Bug::SumOfRatios) => (within.iter().map(|x| x.exp()).sum::<f64>().ln(), true),
            () if of_product => held(total),
            () if launch.has(Bug::RatioOfSum) => (total, true),
            () if launch.has(Bug::MeanOfRatios) => ((within.iter().map(|x| x.exp()).sum::<f64>() / count).ln(), true),
            () if launch.has(Bug::LogClipOfMean) => clipped_to(launch, total / count, advantages[0]),
            () => (total / count, true),
        };
        let share = if of_product || launch.has(Bug::ShareForgotten) { 1.0 } else { 1.0 / count };
        // The derivative of ln Σ exp(x).
        let of_sum = |i: usize| if launch.has(Bug::SumOfRatios) { (owns[i].0 - of_row.0).exp() } else { share };
        let shares = (0..row.len()).map(|i| if is_in(&i) { of_sum(i) } else { 0.0 }).collect();
        Self { launch, owns, row: of_row, shares }
    }

    /// Returns the logarithm of a token's ratio, and whether it follows the token's log-ratio, or that of its sequence.
    fn level(&self, i: usize) -> FollowedRatio {
        let Self { launch, owns, row, .. } = self;
        let ratio = &launch.spec.ratio;
        // A token's own log-ratio, or its sequence's; then the cap, which bounds it from above.
        let of_own = ratio.level == RatioLevel::Token || launch.has(Bug::SequenceRatioOfTokens);
        // Whether a token's own log-ratio follows `ℓ` is asked separately.
        let (x, follows) = if of_own { (owns[i].0, true) } else { *row };
        match ratio.cap {
            Some(_) if launch.has(Bug::CapIgnored) || launch.has(Bug::CapOfTokens) => (x, follows),
            Some(cap) if launch.has(Bug::CapOfRatio) => (x.min(cap.ln()), follows && x.exp() <= cap),
            Some(cap) if launch.has(Bug::CapOfBothSides) && x < -cap => (-cap, false),
            Some(cap) if x > cap => (cap, ratio.straight_through && follows),
            _ => (x, follows),
        }
    }
}

/// Applies GMPO's clip to the log-ratio of a token.
fn clipped(launch: &SpecimenLaunch, x: f64, advantage: f64) -> FollowedRatio {
    if launch.has(Bug::LogClipIgnored) || launch.has(Bug::LogClipOfMean) {
        (x, true)
    } else {
        clipped_to(launch, x, advantage)
    }
}

/// Holds a log-ratio at most at `high` if `A > 0`, at least at `−low` if `A < 0`, and at 0 if `A` is 0.
fn clipped_to(launch: &SpecimenLaunch, x: f64, advantage: f64) -> FollowedRatio {
    let Some(LogClip { low, high }) = launch.spec.ratio.clip else { return (x, true) };
    let advantage = if launch.has(Bug::LogClipOnTheWrongSide) { -advantage } else { advantage };
    let bounded = match () {
        () if launch.has(Bug::LogClipOfBothSides) => x.clamp(-low, high),
        () if advantage > 0.0 => x.min(high),
        () if advantage < 0.0 => x.max(-low),
        () if launch.has(Bug::LogClipWithoutAdvantage) => x,
        () => return (0.0, false),
    };
    (bounded, bounded == x)
}
