//! How strongly f32 rounding shows in each output: the `scale` of every limit.
//!
//! Derived in `docs/tolerances.md`. With the gaps `a_j = m − z_j`, `ā = Σ p_j a_j`, `ā₂ = Σ p_j a_j²`:
//!
//! | output | scale |
//! |---|---|
//! | logp | `C_ℓ = (1 + a_y + ā + |log p_y|)·∂ℓ/∂log p_y` |
//! | entropy | `C_H = 1 + H + ā + ā₂` |
//! | token loss | `|policy| + β(1 + |kl| + |d|) + Δ(token loss)` |
//! | `G = ∂loss/∂ℓ` | `w(|policy′| + β|kl′| + Δ(policy′ + β·kl′))` |
//! | dlogits, `j ≠ y` | `p_j (G_abs(1 + a_j + ā) + ΔG)/T + C_E` |
//! | dlogits, `j = y` | `(G_abs((1−p_y)(1 + ā) + Σ_{j≠y} p_j a_j) + (1−p_y)ΔG)/T + C_E` |
//!
//! `Δ(f)` is how far `f` moves, in units of `u`, when `ℓ` moves by `C·u` with `C = C_ℓ + |old_logp| + |ref_logp|`, or, if
//! that is more, when the log-ratio `x` and the difference `d` move by `|x|·u` and `|d|·u`, each by itself. Where tokens
//! share a ratio, it is also moved by `C̄·u`, with `C̄` the row's mean of `C_ℓ + |old_logp| + |x|`, and `G` takes what its
//! row's tokens owe to that ratio, terms and movement alike. Where logits are products, each has an error `e_j` of its own,
//! which is added to its gap and, weighted by p, to `ā`. `C_E = |E| q_j ((a_j + ā)(1 + a_j + ā) + ā₂)/T` carries the
//! entropy bonus.

use ndarray::Array2;
use rayon::prelude::*;

use super::U;
use assay_core::spec::{
    Divergence, Kl, KlEstimator, KlImportance, LossSpec, Objective, OldLogp, RatioLevel, TrustRegion,
};
use assay_reference::{Branch, Choice, Reference, Scaled, ScaledSoftmax, Token, TokenInputs, clipped};

/// What is lost of a number below f32's normal ones where the device flushes it to 0.
pub(super) const FLUSHED: f64 = f32::MIN_POSITIVE as f64;

/// The limits of a class that say how near to a kink either side is right.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bands {
    /// `κ` of logp.
    pub logp: f64,
    /// `κ` of entropy.
    pub entropy: f64,
}

/// One of the pieces that rounding may have put a token on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Alternative {
    /// Its own piece.
    pub branch: Branch,
    /// What its row's tokens owe to the ratio they share, on theirs.
    pub coupling: f64,
}

/// The conditions of one unmasked token.
#[derive(Clone, Debug)]
pub struct Condition {
    /// `C_ℓ`.
    pub logp: f64,
    /// `C_H`.
    pub entropy: f64,
    /// Scale of the token loss, the largest over the alternatives.
    pub token_loss: f64,
    /// What of the token loss may be lost where f32 flushes numbers below its normal ones: the ratio, times `A` and times
    /// the KL estimate, and the loss itself.
    pub token_loss_floor: f64,
    /// Scale of the KL estimate.
    pub kl: f64,
    /// What of it may be flushed.
    pub kl_floor: f64,
    /// Scale of the ratio.
    pub ratio: f64,
    /// The pieces that rounding may have put the token on; the reference's own first.
    pub alternatives: Vec<Alternative>,
    /// Whether the token may or may not count as clipped low, and high.
    pub tied: (bool, bool),
    /// Whether f32 arithmetic overflows where f64 does not: any nonfinite value is then an honest answer.
    pub overflows: bool,
    /// `ā₂` of the softmax that entropy is taken from.
    second_moment: f64,
    /// How far each logit may be off where it is a product; empty where logits are given.
    errors: Vec<f64>,
    /// Their mean, `Σ p_j e_j`, of the softmax that logp is taken from.
    mean_error: f64,
    moves: Moves,
    /// `Σ_u |∂loss/∂w_u|` over the row, terms before they cancel, and how far that moves.
    row: (f64, f64),
    /// What of it may be flushed, in units of [`FLUSHED`].
    row_floor: f64,
}

/// How far, in units of `u`, rounding moves what a token's loss depends on.
#[derive(Clone, Copy, Debug)]
struct Moves {
    /// `C`: of `ℓ` and what it is compared with.
    logp: f64,
    /// `C̄`: of the row's mean log-ratio.
    row: f64,
    /// Of VESPO's `ln w`.
    weight: f64,
}

/// What the logits of one token say.
#[derive(Clone, Copy)]
struct Base {
    logp: f64,
    entropy: f64,
    second_moment: f64,
    mean_error: f64,
}

/// How far each logit of a token may be off before anything reads it, in units of `u`; none where logits are given.
pub type LogitErrors<'e> = &'e (dyn Fn(usize, usize) -> Vec<f64> + Sync);

impl Condition {
    /// The conditions of every unmasked token.
    pub fn all(reference: &Reference, bands: Bands, errors: LogitErrors) -> Array2<Option<Condition>> {
        let shape = reference.shape();
        let places: Vec<(usize, usize)> = ndarray::indices((shape.batch, shape.tokens)).into_iter().collect();
        let base = |(b, t): (usize, usize)| {
            let (token, errors) = (reference.token(b, t)?, errors(b, t));
            Some((Base::of(reference, (b, t), token, &errors), errors))
        };
        let (bases, mut errors): (Vec<Option<Base>>, Vec<Vec<f64>>) = places
            .into_par_iter()
            .map(|at| base(at).map_or((None, Vec::new()), |(base, errors)| (Some(base), errors)))
            .unzip();
        let bases = Array2::from_shape_vec((shape.batch, shape.tokens), bases).expect("one entry a token");
        let of_batch = OfBatch::of(reference, &bases);
        let mut all = Array2::from_elem(bases.dim(), None);
        for b in 0..shape.batch {
            let row: Vec<(usize, &Token, Base)> =
                (0..shape.tokens).filter_map(|t| Some((t, reference.token(b, t)?, bases[[b, t]]?))).collect();
            let of_row = OfRow::of(reference, bands, &of_batch, &row);
            for &(t, token, base) in &row {
                let errors = std::mem::take(&mut errors[b * shape.tokens + t]);
                let condition = Condition::of(reference, token, base, bands, &of_batch, &of_row);
                all[[b, t]] = Some(Condition { errors, ..condition });
            }
            // What one token owes to the ratio of its row reaches all of them.
            let mut row = all.row_mut(b);
            if reference.spec().ratio.level == RatioLevel::Sequence {
                let overflows = row.iter().flatten().any(|condition: &Condition| condition.overflows);
                row.iter_mut().flatten().for_each(|condition| condition.overflows = overflows);
            }
        }
        all
    }

    fn of(reference: &Reference, token: &Token, base: Base, bands: Bands, batch: &OfBatch, row: &OfRow) -> Self {
        let spec = reference.spec();
        let moves = row.moves(spec, token, base);
        let nearby = nearby(spec, token, base, bands, batch, row);
        let branches = branches(spec, token, &nearby, moves, bands);
        let tied = nearby.iter().fold((false, false), |tied, inputs| {
            let (low, high) = clipped(spec, inputs);
            (tied.0 || low != token.clipped_low, tied.1 || high != token.clipped_high)
        });
        let couplings = row.couplings.iter();
        let alternatives: Vec<Alternative> = couplings
            .flat_map(|&coupling| branches.iter().map(move |&branch| Alternative { branch, coupling }))
            .collect();

        let inputs = &token.inputs;
        let respond = |f: &dyn Fn(&TokenInputs) -> f64| response(spec, inputs, moves, f);
        let beta = spec.kl.as_ref().map_or(0.0, |kl| kl.beta);
        let kl_of = |branch: &Branch, inputs: &TokenInputs| {
            spec.kl.as_ref().map_or(0.0, |kl| branch.kl(spec, kl, inputs).value)
        };
        let ratio = inputs.ratio(spec);
        let kl_terms = spec.kl.as_ref().map_or(0.0, |kl| {
            let d = inputs.ref_logp.map_or(0.0, |ref_logp| ref_logp - inputs.logp);
            let d = d.abs().min(kl.difference_clamp.unwrap_or(f64::INFINITY));
            let importance = if kl.importance == KlImportance::Ratio { ratio } else { 1.0 };
            token.kl.value.abs() + importance * (1.0 + d) + clamp_rounding(spec, kl, inputs)
        });
        let token_loss = branches.iter().map(|branch| {
            let response = respond(&|inputs| reference.token_loss(inputs, branch));
            policy_terms(spec, inputs, branch) + weighted(beta, kl_terms) + response
        });

        // k3's own exponential, which an importance ratio below 1 may bring back into range.
        let k3 = spec.kl.as_ref().filter(|kl| kl.estimator == KlEstimator::K3).map_or(0.0, |kl| {
            let d = inputs.ref_logp.map_or(0.0, |ref_logp| ref_logp - inputs.logp);
            d.min(kl.difference_clamp.unwrap_or(f64::INFINITY)).exp()
        });
        let largest = f64::from(f32::MAX) / 2.0;
        let parts = [token.policy, token.kl].map(|term| [term.value, term.by_logp, term.by_log_ratio]);
        let overflows = parts.as_flattened().iter().any(|x| x.abs() > largest)
            || (token.policy.by_log_ratio != 0.0 && ratio > largest)
            || k3 > largest;
        // A token whose values are not finite is judged by that alone, and adds no scale to a sum.
        let tame = |scale: f64| if scale.is_finite() { scale } else { 0.0 };
        Self {
            logp: tame(base.logp),
            entropy: tame(base.entropy),
            token_loss: token_loss.map(tame).fold(0.0, f64::max),
            token_loss_floor: {
                let reach = if is_score(&spec.objective) { inputs.logp.abs() } else { 0.0 };
                let of_score = if reach.is_finite() { reach * flushed_of_policy(spec, inputs) } else { 0.0 };
                let of_kl = weighted(beta, flushed_of_kl(spec, inputs, &token.branch)[0]);
                (1.0 + inputs.advantage.abs() * (1.0 + inputs.policy_weight) + of_score + of_kl) * FLUSHED
            },
            kl: tame(kl_terms + respond(&|inputs| kl_of(&token.branch, inputs))),
            kl_floor: (1.0 + flushed_of_kl(spec, inputs, &token.branch)[0]) * FLUSHED,
            ratio: tame(ratio + respond(&|inputs| inputs.ratio(spec))),
            alternatives,
            tied,
            overflows,
            second_moment: base.second_moment,
            errors: Vec::new(),
            mean_error: base.mean_error,
            moves,
            row: row.ratio_terms,
            row_floor: row.floor,
        }
    }

    /// Scales and underflow floors of a row of dlogits, were the token on `alternative`.
    pub fn dlogits(
        &self,
        reference: &Reference,
        token: &Token,
        scaled: &Scaled,
        alternative: &Alternative,
    ) -> Vec<(f64, f64)> {
        let spec = reference.spec();
        let Alternative { branch, coupling } = alternative;
        let on_branch =
            |inputs: &TokenInputs| reference.grad_logp(&Token { inputs: *inputs, ..*token }, branch, *coupling);
        let (by_logp, by_log_ratio) = grad_terms(spec, token, branch);
        let through_ratio = match spec.ratio.level {
            RatioLevel::Token => branch.slope * by_log_ratio,
            RatioLevel::SequenceToken => by_log_ratio,
            RatioLevel::Sequence => branch.slope * token.share * self.row.0,
        };
        let grad = by_logp + through_ratio;
        let mut grad_response = response(spec, &token.inputs, self.moves, &on_branch);
        if spec.ratio.level == RatioLevel::Sequence {
            grad_response += branch.slope * token.share * self.row.1;
        }
        let grad_entropy = reference.grad_entropy(token).abs();
        let lost_of_row = if spec.ratio.level == RatioLevel::Sequence { token.share * self.row_floor } else { 0.0 };
        let lost_of_grad = flushed_of_grad(spec, token, branch) + lost_of_row;

        let (logp, entropy) = (&token.logp_softmax, &token.entropy_softmax);
        let others = token.probability_of_others;
        let mean_gap = logp.stats.mean_gap;
        let columns = scaled.logits.len() as f64;
        let rounded = transform_rounding(spec, logp.stats.max);
        let column = |(j, &x): (usize, &f64)| {
            let (p, gap) = probability_and_gap(logp, x);
            let error = spec.logits.scale.abs() * self.errors.get(j).copied().unwrap_or(0.0);
            let gap = gap + rounded + error / logp.divisor;
            let mean_gap = mean_gap + rounded + self.mean_error / logp.divisor;
            let policy = if j == token.id {
                let gaps_of_others = (mean_gap - p * gap).max(0.0);
                grad * (others * (1.0 + mean_gap) + gaps_of_others) + others * grad_response
            } else {
                p * (grad * (1.0 + gap + mean_gap) + grad_response)
            };
            // f32 flushes exp below its smallest normal number: once a column, and V times on the target.
            let flushed = if j == token.id { columns } else { 1.0 };
            let mut scale = if grad == 0.0 { 0.0 } else { policy };
            let mut floor = 1.0 + grad * flushed + lost_of_grad;
            let mut value = grad * if j == token.id { others } else { p };
            if grad_entropy > 0.0 {
                let (q, gap) = probability_and_gap(entropy, x);
                let gap = gap + rounded + (error + self.mean_error) / entropy.divisor;
                let span = gap + entropy.stats.mean_gap;
                scale += grad_entropy * q * (span * (1.0 + span) + self.second_moment);
                value += grad_entropy * q * span;
                // ā may lose e·a of every column, at most where e is the smallest number that stays.
                let lost_of_mean_gap = columns * -FLUSHED.ln();
                floor += 1.0 + grad_entropy * (1.0 + span + q * lost_of_mean_gap);
            }
            // 1 − tanh² is rounded at the size of 1.
            let slope = scaled.slope(j).abs();
            let slope_rounding =
                spec.logits.softcap.map_or(0.0, |cap| spec.logits.scale.abs() * value * (1.0 + 2.0 * error / cap));
            let scale = scale * slope + slope_rounding;
            // What is flushed before the transform of logits is multiplied by its slope.
            let floor = floor * slope.max(1.0);
            (scale / spec.temperature, floor / spec.temperature.min(1.0) * FLUSHED)
        };
        scaled.logits.iter().enumerate().map(column).collect()
    }
}

impl Base {
    fn of(reference: &Reference, (b, t): (usize, usize), token: &Token, errors: &[f64]) -> Self {
        let spec = reference.spec();
        let error = |j: usize| spec.logits.scale.abs() * errors.get(j).copied().unwrap_or(0.0);
        let row = reference.scaled_row(b, t, token).logits;
        let softmax = &token.logp_softmax;
        let z = row[token.id] / softmax.divisor;
        let (gap, log_p) = (softmax.stats.max - z, softmax.stats.log_probability(z));
        // ∂ℓ/∂log p_y: 1, or 1/T where the temperature divides the log-probability.
        let factor = softmax.divisor / spec.temperature;
        // A logit of −∞ is not rounded.
        let largest =
            [softmax.stats.max, z].into_iter().filter(|z| z.is_finite()).fold(0.0, |most, z| z.abs().max(most));
        let rounded = transform_rounding(spec, largest);
        let q = &token.entropy_softmax;
        // ∂H/∂z_j = q_j (a_j − ā), which is 0 where all gaps are equal: the squares of the errors count too.
        let (mut mean_error, mut spread) = (0.0, 0.0);
        if !errors.is_empty() {
            for (j, &x) in row.iter().enumerate() {
                mean_error += probability_and_gap(softmax, x).0 * error(j);
                let (q_j, gap) = probability_and_gap(q, x);
                let error = error(j) / q.divisor;
                spread += q_j * ((gap - q.stats.mean_gap).abs() + U * error) * error;
            }
        }
        let product = if errors.is_empty() { 0.0 } else { (error(token.id) + mean_error) / softmax.divisor };
        let second_moment = second_moment(q, &row) + spread;
        Self {
            logp: (1.0 + gap + softmax.stats.mean_gap + log_p.abs() + 2.0 * rounded + product) * factor,
            entropy: 1.0 + token.entropy + q.stats.mean_gap + second_moment + rounded * (1.0 + token.entropy),
            second_moment,
            mean_error,
        }
    }
}

/// What rounding transformed logits adds to an exponent: their own size.
fn transform_rounding(spec: &LossSpec, largest: f64) -> f64 {
    let identity = spec.logits.scale == 1.0 && spec.logits.softcap.is_none() && !spec.logits.bias;
    if identity { 0.0 } else { largest.abs() }
}

/// The largest conditions of a batch, near which a choice between its tokens is open.
struct OfBatch {
    entropy: f64,
    logp: f64,
    advantage: f64,
}

impl OfBatch {
    fn of(reference: &Reference, bases: &Array2<Option<Base>>) -> Self {
        let mut all = Self { entropy: 0.0, logp: 0.0, advantage: 0.0 };
        for ((b, t), base) in bases.indexed_iter() {
            let (Some(base), Some(token)) = (base, reference.token(b, t)) else { continue };
            all.entropy = all.entropy.max(base.entropy);
            all.logp = all.logp.max(base.logp);
            all.advantage = all.advantage.max(token.inputs.advantage.abs());
        }
        all
    }
}

/// Where rounding may have moved a token of a row, together with the others.
type Side<'s> = &'s dyn Fn(&Token, Base) -> TokenInputs;

/// What the tokens of a row share.
struct OfRow {
    /// `C̄`.
    mean: f64,
    /// `Σ` of the same, and of the logarithms of its rollout weights.
    sum: f64,
    /// What they owe to their ratio on each side of its kinks; their own first.
    couplings: Vec<f64>,
    /// `Σ |∂loss/∂w|`, terms before they cancel, and how far that moves.
    ratio_terms: (f64, f64),
    /// What of that may be flushed, in units of [`FLUSHED`].
    floor: f64,
}

impl OfRow {
    fn of(reference: &Reference, bands: Bands, batch: &OfBatch, row: &[(usize, &Token, Base)]) -> Self {
        let spec = reference.spec();
        let condition = |&(_, token, base): &(usize, &Token, Base)| {
            let x = token.inputs.logp - token.inputs.old_logp;
            base.logp + old_logp_size(spec, token) + if x.is_finite() { x.abs() } else { 0.0 }
        };
        let sum: f64 = row.iter().map(condition).sum();
        let weights = row.first().map_or(0.0, |(_, token, _)| token.inputs.row_log_weight.abs());
        let mut of_row = Self {
            mean: sum / row.len().max(1) as f64,
            sum: sum + if weights.is_finite() { weights } else { 0.0 },
            couplings: vec![row.first().map_or(0.0, |(_, token, _)| token.coupling)],
            ratio_terms: (0.0, 0.0),
            floor: row.iter().map(|(_, token, _)| flushed_of_grad(spec, token, &token.branch)).sum(),
        };
        if spec.ratio.level != RatioLevel::Sequence {
            return of_row;
        }
        for &(_, token, base) in row {
            let moves = of_row.moves(spec, token, base);
            let moved =
                |inputs: &TokenInputs| reference.by_log_ratio(&Token { inputs: *inputs, ..*token }, &token.branch);
            of_row.ratio_terms.0 += grad_terms(spec, token, &token.branch).1;
            of_row.ratio_terms.1 += response(spec, &token.inputs, moves, &moved);
        }
        // All of the row's tokens to one side of what they share, or with every open choice made in one way.
        let band = of_row.band(bands);
        let sides: [Side; 5] = [
            &|token, _| shift_row(&token.inputs, -band),
            &|token, _| shift_row(&token.inputs, band),
            &|token, _| at_row_kink(&token.inputs, band).unwrap_or(token.inputs),
            &|token, base| choose(token, base, bands, batch, &of_row, true),
            &|token, base| choose(token, base, bands, batch, &of_row, false),
        ];
        let couplings = sides.map(|side| {
            row.iter()
                .map(|&(_, token, base)| reference.by_log_ratio(token, &Branch::at(spec, &side(token, base))))
                .sum()
        });
        let own = of_row.couplings[0];
        let others = couplings.into_iter().filter(|x: &f64| (x - own).abs() > 1e-9 * of_row.ratio_terms.0);
        of_row.couplings.extend(others);
        of_row
    }

    fn moves(&self, spec: &LossSpec, token: &Token, base: Base) -> Moves {
        let logp = base.logp + old_logp_size(spec, token) + token.inputs.ref_logp.map_or(0.0, f64::abs);
        Moves { logp, row: self.mean, weight: self.sum }
    }

    /// How near to a kink of the row's log-ratio both sides are right.
    fn band(&self, bands: Bands) -> f64 {
        U * (bands.logp * self.mean + 4.0)
    }
}

fn old_logp_size(spec: &LossSpec, token: &Token) -> f64 {
    if spec.old_logp == OldLogp::Current { 0.0 } else { token.inputs.old_logp.abs() }
}

/// `Σ |terms|` of the policy term's value: those that cancel in it are counted apart.
fn policy_terms(spec: &LossSpec, inputs: &TokenInputs, branch: &Branch) -> f64 {
    let term = branch.policy(spec, inputs);
    let w = inputs.level_log_ratio(spec).value;
    let parts = match &spec.objective {
        Objective::Dro(_) | Objective::KlCov(_) | Objective::TrustRegion(_) => {
            (term.by_logp * inputs.logp).abs() + (term.by_log_ratio * w).abs()
        }
        _ => 0.0,
    };
    term.value.abs().max(parts) * exponent_terms(spec, inputs)
}

/// `Σ |terms|` of `∂loss/∂ℓ` at first hand, and of `∂loss/∂w`.
fn grad_terms(spec: &LossSpec, token: &Token, branch: &Branch) -> (f64, f64) {
    let inputs = &token.inputs;
    let policy = branch.policy(spec, inputs);
    let (mut by_logp, mut by_log_ratio) =
        (token.weight * policy.by_logp.abs(), token.weight * policy.by_log_ratio.abs());
    if let Objective::KlCov(cov) = &spec.objective {
        by_log_ratio += 2.0 * token.weight * cov.coefficient * inputs.policy_weight;
    }
    by_logp *= exponent_terms(spec, inputs);
    if let Some(kl) = &spec.kl {
        let term = branch.kl(spec, kl, inputs);
        let rounded = clamp_rounding(spec, kl, inputs);
        let [own, of_ratio] = match kl.importance {
            KlImportance::One => [0.0, 0.0],
            KlImportance::Score => [term.value.abs() + rounded, 0.0],
            KlImportance::Ratio => [0.0, rounded],
        };
        by_logp += token.kl_weight * weighted(kl.beta, term.by_logp.abs() + own);
        by_log_ratio += token.kl_weight * weighted(kl.beta, term.by_log_ratio.abs() + of_ratio);
    }
    (by_logp, branch.cap_slope * by_log_ratio)
}

/// What rounding `difference_clamp` adds to an estimate that stands at it: `|d·e^d|` of k3, times the importance.
fn clamp_rounding(spec: &LossSpec, kl: &Kl, inputs: &TokenInputs) -> f64 {
    let (Some(clamp), Some(ref_logp)) = (kl.difference_clamp, inputs.ref_logp) else { return 0.0 };
    let d = ref_logp - inputs.logp;
    if kl.estimator != KlEstimator::K3 || d.abs() <= clamp {
        return 0.0;
    }
    let importance = if kl.importance == KlImportance::Ratio { inputs.ratio(spec) } else { 1.0 };
    importance * inputs.kl_weight * clamp * (clamp * d.signum()).exp()
}

/// Whether the policy term is a constant times `A·ℓ`.
fn is_score(objective: &Objective) -> bool {
    match objective {
        Objective::Cispo(_)
        | Objective::Vespo(_)
        | Objective::PolicyGradient
        | Objective::MaskedRatio(_)
        | Objective::Dro(_) => true,
        Objective::TrustRegion(region) => region.truncate.is_some(),
        _ => false,
    }
}

/// What of a policy term, or its derivative by `ℓ` or `w`, may be flushed on the way: its coefficient, that times `A`, and
/// that times the sampler's weight.
fn flushed_of_policy(spec: &LossSpec, inputs: &TokenInputs) -> f64 {
    match &spec.objective {
        Objective::PpoClip(_) => inputs.advantage.abs(),
        _ => (1.0 + inputs.advantage.abs()) * (1.0 + inputs.policy_weight),
    }
}

/// What of a KL estimate may be flushed with the ratio that it is multiplied by, and of its derivatives by `ℓ` and `w`.
fn flushed_of_kl(spec: &LossSpec, inputs: &TokenInputs, branch: &Branch) -> [f64; 2] {
    let Some(kl) = spec.kl.as_ref().filter(|kl| kl.importance == KlImportance::Ratio) else { return [0.0; 2] };
    let ratio_of_1 = TokenInputs { old_logp: inputs.logp, row_log_ratio: inputs.row_log_ratio.map(|_| 0.0), ..*inputs };
    let estimate = branch.kl(spec, kl, &ratio_of_1);
    let [value, derivatives] = [estimate.value.abs(), estimate.value.abs() + estimate.by_logp.abs()];
    [value, derivatives].map(|lost| if lost.is_finite() { lost } else { 0.0 })
}

/// What of `∂loss/∂ℓ` may be flushed on the way, in units of [`FLUSHED`].
fn flushed_of_grad(spec: &LossSpec, token: &Token, branch: &Branch) -> f64 {
    let beta = spec.kl.as_ref().map_or(0.0, |kl| kl.beta);
    let of_kl = weighted(beta, flushed_of_kl(spec, &token.inputs, branch)[1]);
    token.weight * flushed_of_policy(spec, &token.inputs) + token.kl_weight * of_kl
}

/// By how much the rounding of an exponent's terms is larger than that of its value: VESPO's `λ + k·ln w − λ·w`.
fn exponent_terms(spec: &LossSpec, inputs: &TokenInputs) -> f64 {
    let Objective::Vespo(vespo) = &spec.objective else { return 1.0 };
    let log_weight = inputs.row_log_weight.clamp(1e-8_f64.ln(), 20.0);
    let (k, lambda) = if inputs.advantage >= 0.0 {
        (vespo.k_positive, vespo.lambda_positive)
    } else {
        (vespo.k_negative, vespo.lambda_negative)
    };
    1.0 + lambda.abs() + (k * log_weight).abs() + lambda.abs() * log_weight.exp()
}

/// `beta · term`; 0 where `beta` is, even if the term overflows.
fn weighted(beta: f64, term: f64) -> f64 {
    if beta == 0.0 { 0.0 } else { beta * term }
}

/// `p_j` and `a_j`; a column of probability 0 has no gap worth speaking of.
fn probability_and_gap(softmax: &ScaledSoftmax, x: f64) -> (f64, f64) {
    let z = x / softmax.divisor;
    let p = softmax.stats.probability(z);
    if p == 0.0 { (0.0, 0.0) } else { (p, softmax.stats.max - z) }
}

/// `Σ p_j a_j²`.
fn second_moment(softmax: &ScaledSoftmax, row: &[f64]) -> f64 {
    row.iter().map(|&x| probability_and_gap(softmax, x)).map(|(p, gap)| p * gap * gap).sum()
}

/// How far `f` moves, in units of `u`, when what it depends on moves as rounding may move it. Under
/// [`OldLogp::Current`] the ratio stays 1.
fn response(spec: &LossSpec, inputs: &TokenInputs, moves: Moves, f: &dyn Fn(&TokenInputs) -> f64) -> f64 {
    let here = f(inputs);
    let moved = |inputs: [TokenInputs; 2]| {
        let [down, up] = inputs.map(|inputs| (f(&inputs) - here).abs());
        down.max(up) / U
    };
    let by = moves.logp * U;
    let of_logp = moved([shift(spec, inputs, -by), shift(spec, inputs, by)]);
    // Each difference is rounded by itself. In ρ·k3 an error of ℓ cancels: ρ·e^d does not depend on it.
    let differences = [inputs.logp - inputs.old_logp, inputs.ref_logp.map_or(0.0, |ref_logp| ref_logp - inputs.logp)];
    let [x, d] = differences.map(|difference| if difference.is_finite() { difference * U } else { 0.0 });
    let old = |by: f64| TokenInputs { old_logp: inputs.old_logp + by, ..*inputs };
    let reference = |by: f64| TokenInputs { ref_logp: inputs.ref_logp.map(|ref_logp| ref_logp + by), ..*inputs };
    let of_differences = moved([old(-x), old(x)]) + moved([reference(-d), reference(d)]);
    let mut total = of_logp.max(of_differences);
    if inputs.row_log_ratio.is_some() {
        let by = moves.row * U;
        total += moved([shift_row(inputs, -by), shift_row(inputs, by)]);
    }
    // A bound of the log-ratio is itself rounded.
    let level = inputs.level_log_ratio(spec);
    if level.slope * inputs.log_ratio(spec).slope == 0.0 && level.value.is_finite() {
        let at = |w: f64| TokenInputs { row_log_ratio: Some(w), ..*inputs };
        let by = level.value.abs() * U;
        total += moved([at(level.value - by), at(level.value + by)]);
    }
    if matches!(spec.objective, Objective::Vespo(_)) {
        let weight = |by: f64| TokenInputs { row_log_weight: inputs.row_log_weight + by, ..*inputs };
        let by = moves.weight * U;
        total += moved([weight(-by), weight(by)]);
    }
    total
}

/// With `ℓ` moved, which stays the logarithm of a probability.
fn shift(spec: &LossSpec, inputs: &TokenInputs, by: f64) -> TokenInputs {
    let logp = inputs.logp + by;
    at_logp(spec, inputs, if logp > 0.0 { 0.0 } else { logp })
}

/// With another `ℓ`, and under [`OldLogp::Current`] the same ratio.
fn at_logp(spec: &LossSpec, inputs: &TokenInputs, logp: f64) -> TokenInputs {
    let current = spec.old_logp == OldLogp::Current;
    let old_logp = if current { logp + (inputs.old_logp - inputs.logp) } else { inputs.old_logp };
    TokenInputs { logp, old_logp, ..*inputs }
}

fn shift_row(inputs: &TokenInputs, by: f64) -> TokenInputs {
    TokenInputs { row_log_ratio: inputs.row_log_ratio.map(|x| x + by), ..*inputs }
}

/// The kink of `|w|` itself, where the row's ratio is near it.
fn at_row_kink(inputs: &TokenInputs, band: f64) -> Option<TokenInputs> {
    let near = inputs.row_log_ratio.is_some_and(|x| x.abs() <= band);
    near.then_some(TokenInputs { row_log_ratio: Some(0.0), ..*inputs })
}

/// How near each of a token's choices is to being made otherwise: on policy, top entropy, selected.
fn choice_bands(token: &Token, base: Base, bands: Bands, batch: &OfBatch, row: &OfRow) -> [f64; 3] {
    let on_policy = U * (2.0 * bands.logp * row.mean + 4.0);
    let entropy = U * (bands.entropy * (base.entropy + batch.entropy) + 8.0);
    let logps = bands.logp * (base.logp + batch.logp) + 8.0 + token.inputs.logp.abs();
    let selected = U * (token.inputs.advantage.abs() + batch.advantage) * logps;
    [on_policy, entropy, selected]
}

/// The token's inputs, with every open choice made as `holds`.
fn choose(token: &Token, base: Base, bands: Bands, batch: &OfBatch, row: &OfRow, holds: bool) -> TokenInputs {
    let [on_policy, entropy, selected] = choice_bands(token, base, bands, batch, row);
    let made = |choice: Choice, band: f64| if choice.margin <= band { Choice { holds, ..choice } } else { choice };
    let inputs = &token.inputs;
    TokenInputs {
        on_policy: made(inputs.on_policy, on_policy),
        top_entropy: made(inputs.top_entropy, entropy),
        selected: made(inputs.selected, selected),
        ..*inputs
    }
}

/// Inputs around the token's own, which come first, on every side of what may be crossed.
///
/// The kinks of `|d|` and `|w|` are themselves among them when they are near: a kernel may find 0 exactly.
fn nearby(spec: &LossSpec, token: &Token, base: Base, bands: Bands, batch: &OfBatch, row: &OfRow) -> Vec<TokenInputs> {
    let here = token.inputs;
    let band = U * (bands.logp * row.moves(spec, token, base).logp + 4.0);
    let mut all = vec![here, shift(spec, &here, -band), shift(spec, &here, band)];
    let kinks = here.ref_logp.into_iter().chain([here.old_logp]);
    let near = kinks.filter(|&logp| logp <= 0.0 && (logp - here.logp).abs() <= band);
    all.extend(near.map(|logp| at_logp(spec, &here, logp)));
    if here.row_log_ratio.is_some() {
        let band = row.band(bands);
        let of_row = |inputs: &TokenInputs| {
            let sides = [shift_row(inputs, -band), shift_row(inputs, band)];
            sides.into_iter().chain(at_row_kink(inputs, band))
        };
        let more: Vec<TokenInputs> = all.iter().flat_map(of_row).collect();
        all.extend(more);
    }
    for (i, band) in choice_bands(token, base, bands, batch, row).into_iter().enumerate() {
        let flip = |choice: &mut Choice| choice.holds = !choice.holds;
        if [here.on_policy, here.top_entropy, here.selected][i].margin <= band {
            let flipped: Vec<TokenInputs> = all
                .iter()
                .map(|inputs| {
                    let mut inputs = *inputs;
                    flip([&mut inputs.on_policy, &mut inputs.top_entropy, &mut inputs.selected][i]);
                    inputs
                })
                .collect();
            all.extend(flipped);
        }
    }
    all
}

/// The branches of `nearby`, each once.
fn branches(spec: &LossSpec, token: &Token, nearby: &[TokenInputs], moves: Moves, bands: Bands) -> Vec<Branch> {
    let mut specs = vec![];
    if let Objective::TrustRegion(region) = &spec.objective {
        let slack = U * divergence_condition(region, &token.inputs, bands.logp * moves.logp + 4.0);
        for slack in [-slack, slack] {
            let moved = TrustRegion { low: region.low + slack, high: region.high + slack, ..region.clone() };
            specs.push(LossSpec { objective: Objective::TrustRegion(moved), ..spec.clone() });
        }
    }
    let mut branches = vec![token.branch];
    for spec in std::iter::once(spec).chain(&specs) {
        for inputs in nearby {
            let branch = Branch::at(spec, inputs);
            if !branches.contains(&branch) {
                branches.push(branch);
            }
        }
    }
    branches
}

/// By how many `u` rounding moves a trust region's divergence, with `ℓ` moved by `moved·u`.
fn divergence_condition(region: &TrustRegion, inputs: &TokenInputs, moved: f64) -> f64 {
    let (p, p_old) = (inputs.logp.exp(), inputs.old_logp.exp());
    match region.divergence {
        Divergence::TotalVariation => p * moved + 2.0 * (1.0 + p_old) + region.low.max(region.high),
        Divergence::BinaryKl => {
            let others = 2.0 / (1.0 - p_old + 1e-8) + (2.0 + p * moved) / (1.0 - p + 1e-8);
            p_old * (moved + (inputs.old_logp - inputs.logp).abs()) + (1.0 - p_old).abs() * others + 4.0
        }
    }
}
