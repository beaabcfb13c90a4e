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
//! share a ratio, it is also moved by `C̄·u`, with `C̄` the row's mean of `C_ℓ + |old_logp| + |x|`, or its sum, and `G` takes what its
//! row's tokens owe to that ratio, terms and movement alike. `C_E = |E| q_j ((a_j + ā)(1 + a_j + ā) + ā₂)/T` carries the
//! entropy bonus.
//!
//! At [`Grade::Standard`] the target is `max(…, G_abs(1 + p_y(a_y + ā)) + (1−p_y)ΔG)/T`, as `G − G·p_y` rounds, and
//! `C_E = |E| q_j ((1 + a_j + ā)(2 + |ln q_j| + H) + ā₂)/T`, as `−q_j(ln q_j + H)` does; and SAPO's
//! `|policy′|` is `4ρ|A|σ(2σ − 1)` or more, as `σ(1 − σ)` rounds.
//!
//! Of several ids of a token, with cotangents `c_k`, `G_abs` is `W = Σ |c_k|` in every column that is none of them, and on an id's
//! column, with `C` of it the `Σ |c_k|` of its places and `R = W − C`,
//!
//! ```text
//! (C((1−p_y)(1 + ā) + Σ_{j≠y} p_j a_j) + R·p_y(1 + a_y + ā))/T + C_E
//! ```
//!
//! at [`Grade::Standard`] `(C(1 + p_y(a_y + ā)) + R·p_y(1 + a_y + ā))/T + C_E` or more, as `C − (C + R)·p_y` rounds. Sums of `K`
//! cotangents are off by `(K − 1)·u` of their terms' sizes beside, in any order of adding up.
//!
//! Beside each scale, which `κ·u` multiplies, stands a *floor*, an error that nothing multiplies: what f32 flushes to 0; what
//! follows from an error `ε_j` that each logit has of its own, where it is a product; and at [`Grade::Standard`] from an
//! offset, `offset·u·M` with `M` the size of the row's largest logit divided by T, as `x − logsumexp(x)` and `x/T` round.

use std::sync::Arc;

use ndarray::Array2;
use rayon::prelude::*;

use super::U;
use super::arm::{self, Arm};
use super::gate::Output;
use super::quantile;
use super::tolerance::{Grade, Limits};
use assay_core::problem::Shape;
use assay_core::spec::{
    Kl, KlEstimator, KlGradient, KlImportance, LossSpec, Objective, OldLogp, RatioLevel, TrustRegion,
};
use assay_reference::{Branch, Choice, Reference, ScaledSoftmax, SoftmaxColumns, Token, TokenInputs, clipped};

/// What is lost of a number below f32's normal ones where the device flushes it to 0.
pub(super) const FLUSHED: f64 = f32::MIN_POSITIVE as f64;

/// What of the limits a condition depends on: how near to a kink either side is right, and what a grade forgives.
#[derive(Clone, Copy, Debug)]
pub struct Bands {
    /// `κ` of logp.
    pub logp: f64,
    /// `κ` of entropy.
    pub entropy: f64,
    /// What is asked of cancellations.
    pub grade: Grade,
    /// By how much of `u·M` an exponent may be off.
    pub offset: f64,
}

impl Bands {
    /// No band, for what is far finer than any.
    pub const NONE: Bands = Bands { logp: 0.0, entropy: 0.0, grade: Grade::Exact, offset: 0.0 };
}

impl From<&Limits<'_>> for Bands {
    fn from(limits: &Limits) -> Self {
        Self {
            logp: limits.kappa(Output::Logp),
            entropy: limits.kappa(Output::Entropy),
            grade: limits.grade,
            offset: limits.offset(),
        }
    }
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
    /// Of logp, `C_ℓ`.
    pub logp: Bound,
    /// The same of the token's other ids, in order.
    pub others: Vec<Bound>,
    /// Of entropy, `C_H`.
    pub entropy: Bound,
    /// Of the token loss, the largest over the alternatives. Flushed may be the ratio, times `A` and times the KL estimate, and
    /// the loss itself.
    pub token_loss: Bound,
    /// Of the KL estimate.
    pub kl: Bound,
    /// Of the ratio.
    pub ratio: Bound,
    /// The pieces that rounding may have put the token on; the reference's own first.
    pub alternatives: Vec<Alternative>,
    /// Whether the token may or may not count as clipped low, and high.
    pub tied: (bool, bool),
    /// Whether f32 arithmetic overflows where f64 does not: any nonfinite value is then an honest answer.
    pub overflows: bool,
    pub(super) base: Base,
    pub(super) errors: LogitErrors,
    pub(super) moves: Moves,
    /// `Σ_u |∂loss/∂w_u|` over the row, terms before they cancel, and how far that moves.
    pub(super) row: RatioTerms,
    pub(super) grade: Grade,
}

/// How far a value may be off: `κ·u·scale + floor`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Bound {
    /// What `κ·u` multiplies.
    pub scale: f64,
    /// What nothing does.
    pub floor: f64,
}

/// How far, in units of `u`, rounding moves what a token's loss depends on; and by how much beyond, in nats.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moves {
    /// `C`: of `ℓ` and what it is compared with.
    logp: Bound,
    /// `C̄`: of the row's log-ratio.
    row: Bound,
    /// Of VESPO's `ln w`.
    weight: Bound,
}

/// What the tokens of a row bring to the ratio they share.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RatioTerms {
    /// `Σ |∂loss/∂w|`, terms before they cancel.
    pub(super) sum: f64,
    /// How far that moves.
    pub(super) moved: Bound,
    /// What of it may be flushed, in units of [`FLUSHED`].
    pub(super) flushed: f64,
}

/// What the logits of one token say.
#[derive(Clone, Copy, Debug)]
pub(super) struct Base {
    logp: Bound,
    entropy: Bound,
    /// `ā₂` of the softmax that entropy is taken from.
    pub(super) second_moment: f64,
    /// What the logits' own errors add to it.
    pub(super) spread: f64,
    /// `Σ p_j ε_j`, of the softmax that logp is taken from.
    pub(super) mean_error: f64,
    /// `offset·u·M`, of the softmax that logp is taken from and of the one that entropy is.
    pub(super) offsets: [f64; 2],
}

/// How far each logit of a token may be off before anything reads it, where it is a product.
#[derive(Clone, Debug, Default)]
pub struct LogitErrors {
    /// One a logit; none where logits are given. A bound of a few standard deviations, it is not held in f64.
    pub each: Arc<[f32]>,
    /// Where logits are rounded to a dtype, whose steps may be many nats: by how much at most an exponent grows with a logit.
    pub rate: Option<f64>,
}

impl LogitErrors {
    /// Of column `j`. A step is off by `(e^(2·rate·step) − 1)/rate`.
    ///
    /// A probability becomes `e^a(1 + Σ p_v(e^(a_v) − 1))⁻¹` of itself, where logits are off by `a` and `a_v`, times `rate`. That
    /// is at most `1 + (e^2|a| − 1) + Σ p_v(e^2|a_v| − 1)`, which is what errors that are added up come to.
    pub(super) fn at(&self, j: usize) -> f64 {
        let error = self.each.get(j).map_or(0.0, |error| f64::from(*error));
        match self.rate {
            Some(rate) if error > 0.0 => f64::exp_m1((2.0 * rate * error).min(160.0)) / rate,
            _ => error,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.each.is_empty()
    }
}

/// Those of token `[b,t]`.
pub type ErrorsOf<'e> = &'e (dyn Fn(usize, usize) -> LogitErrors + Sync);

/// Logits that are given.
pub const GIVEN: ErrorsOf = &|_, _| LogitErrors::default();

impl Condition {
    /// The conditions of every unmasked token.
    pub fn all(reference: &Reference, bands: Bands, errors: ErrorsOf) -> Array2<Option<Condition>> {
        let shape = reference.shape();
        let places: Vec<(usize, usize)> = ndarray::indices((shape.batch, shape.tokens)).into_iter().collect();
        let base = |(b, t): (usize, usize)| {
            let (token, errors) = (reference.token(b, t)?, errors(b, t));
            Some((Base::of(reference, (b, t), token, &errors, bands), errors))
        };
        let (bases, errors): (Vec<Option<Base>>, Vec<LogitErrors>) = places
            .into_par_iter()
            .map(|at| base(at).map_or((None, LogitErrors::default()), |(base, errors)| (Some(base), errors)))
            .unzip();
        let bases = Array2::from_shape_vec((shape.batch, shape.tokens), bases).expect("one entry a token");
        let of_batch = OfBatch::of(reference, &bases, bands);
        let mut all = Array2::from_elem(bases.dim(), None);
        for sequence in reference.problem().sequences() {
            let row = sequence.places().filter_map(|at| Some((at, reference.token(at.0, at.1)?, bases[at]?)));
            let row: Vec<((usize, usize), &Token, Base)> = row.collect();
            let of_row = OfRow::of(reference, bands, &of_batch, &row);
            for &(at @ (b, t), token, base) in &row {
                let errors = errors[b * shape.tokens + t].clone();
                all[at] = Some(Condition::of(reference, token, (base, errors), bands, &of_batch, &of_row));
            }
            // What one token owes to the ratio of its row reaches all of them.
            if reference.spec().ratio.level.is_shared() {
                let conditions = |at| all[at].as_ref().is_some_and(|condition: &Condition| condition.overflows);
                let overflows = sequence.places().any(conditions);
                for at in sequence.places() {
                    all[at].iter_mut().for_each(|condition: &mut Condition| condition.overflows = overflows);
                }
            }
        }
        all
    }

    fn of(
        reference: &Reference,
        token: &Token,
        (base, errors): (Base, LogitErrors),
        bands: Bands,
        batch: &OfBatch,
        row: &OfRow,
    ) -> Self {
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
            let importance = importance(spec, kl, inputs);
            token.kl.value.abs() + importance * (1.0 + d) + clamp_rounding(spec, kl, inputs)
        });
        // A token whose values are not finite is judged by that alone, and adds no scale to a sum.
        let token_loss = branches.iter().fold(Bound::default(), |most, branch| {
            let response = respond(&|inputs| reference.token_loss(inputs, branch));
            let scale = Arm::of(spec, inputs, branch, bands.grade).value + weighted(beta, kl_terms) + response.scale;
            most.or(Bound { scale, floor: response.floor }.tame())
        });
        let others: Vec<Bound> = reference
            .others(token)
            .iter()
            .map(|other| logp_bound(reference, token, other.id, (&errors, base.mean_error), bands))
            .collect();
        let of_others = of_others(reference, token, &others).tame();
        let flushed = {
            let arm = Arm::of(spec, inputs, &token.branch, bands.grade);
            let of_score = if arm.is_score && inputs.logp.is_finite() { inputs.logp.abs() * arm.flushed } else { 0.0 };
            let of_kl = weighted(beta, flushed_of_kl(spec, inputs, &token.branch)[0]);
            (1.0 + inputs.advantage.abs() * (1.0 + inputs.policy_weight) + of_score + of_kl) * FLUSHED
        };
        let flushed_of_kl = (1.0 + flushed_of_kl(spec, inputs, &token.branch)[0]) * FLUSHED;
        let beside = |scale: f64, response: Bound| Bound { scale: scale + response.scale, ..response }.tame();

        // k3's own exponential, which an importance ratio below 1 may bring back into range.
        let k3 = spec.kl.as_ref().filter(|kl| kl.estimator == KlEstimator::K3).map_or(0.0, |kl| {
            let d = inputs.ref_logp.map_or(0.0, |ref_logp| ref_logp - inputs.logp);
            d.min(kl.difference_clamp.unwrap_or(f64::INFINITY)).exp()
        });
        let largest = f64::from(f32::MAX) / 2.0;
        // A gradient is divided by the temperature before or after it is multiplied by a probability.
        let grad = reference.grad_logp(token, &token.branch, token.coupling) / token.temperature();
        let parts = [token.policy, token.kl].map(|term| [term.value, term.by_logp, term.by_log_ratio]);
        // A weight of its own may overflow though its product with a small estimate does not.
        let weighs = |kl: &&Kl| matches!(kl.importance, KlImportance::TokenRatio | KlImportance::Rollout);
        let weight = spec.kl.as_ref().filter(weighs).map_or(0.0, |kl| importance(spec, kl, inputs));
        let overflows = parts.as_flattened().iter().any(|x| x.abs() > largest)
            || (token.policy.by_log_ratio != 0.0 && ratio > largest)
            || k3 > largest
            || weight > largest
            || grad.abs() > largest
            || reference.others(token).iter().map(|other| other.grad_logp.abs() / token.temperature()).sum::<f64>()
                > largest;
        Self {
            logp: base.logp.tame(),
            others: others.into_iter().map(Bound::tame).collect(),
            entropy: base.entropy.tame(),
            token_loss: token_loss.and(flushed).plus(of_others),
            kl: beside(kl_terms, respond(&|inputs| kl_of(&token.branch, inputs))).and(flushed_of_kl),
            ratio: beside(ratio, respond(&|inputs| inputs.ratio(spec))),
            alternatives,
            tied,
            overflows,
            base,
            errors,
            moves,
            row: row.terms,
            grade: bands.grade,
        }
    }
}

impl Bound {
    /// With an error more that nothing multiplies.
    fn and(self, floor: f64) -> Self {
        Self { floor: self.floor + floor, ..self }
    }

    fn plus(self, other: Self) -> Self {
        Self { scale: self.scale + other.scale, floor: self.floor + other.floor }
    }

    pub(super) fn times(self, factor: f64) -> Self {
        Self { scale: self.scale * factor, floor: self.floor * factor }
    }

    /// The larger scale and the larger floor.
    pub(super) fn or(self, other: Self) -> Self {
        Self { scale: self.scale.max(other.scale), floor: self.floor.max(other.floor) }
    }

    /// 0 for what is not finite.
    fn tame(self) -> Self {
        let tame = |x: f64| if x.is_finite() { x } else { 0.0 };
        Self { scale: tame(self.scale), floor: tame(self.floor) }
    }
}

impl Base {
    fn of(reference: &Reference, (b, t): (usize, usize), token: &Token, errors: &LogitErrors, bands: Bands) -> Self {
        let spec = reference.spec();
        let error = |j: usize| spec.logits.scale.abs() * errors.at(j);
        let softmax = &token.logp_softmax;
        let rounded = rounded_of(reference, token, z_of(reference, token, token.id));
        let q = &token.entropy_softmax;
        // ∂H/∂z_j = q_j (a_j − ā), which is 0 where all gaps are equal: the squares of the errors count too.
        let (mut mean_error, mut spread) = (0.0, 0.0);
        if !errors.is_empty() {
            let row = reference.row(b, t, token);
            let SoftmaxColumns { z, probabilities } = row.entropy();
            let of_entropy = z.iter().zip(probabilities);
            for (j, (p_j, (z_j, &q_j))) in row.logp().probabilities.iter().zip(of_entropy).enumerate() {
                mean_error += p_j * error(j);
                let (gap, error) = (if q_j == 0.0 { 0.0 } else { q.stats.max - z_j }, error(j) / q.divisor);
                spread += q_j * ((gap - q.stats.mean_gap).abs() + error) * error;
            }
        }
        let offsets = [softmax, q].map(|softmax| offset_of(softmax, bands));
        let second_moment = q.stats.mean_square_gap;
        Self {
            logp: logp_bound(reference, token, token.id, (errors, mean_error), bands),
            entropy: Bound {
                scale: 1.0 + token.entropy + q.stats.mean_gap + second_moment + rounded * (1.0 + token.entropy),
                floor: spread + offsets[1] * (1.0 + token.entropy),
            },
            second_moment,
            spread,
            mean_error,
            offsets,
        }
    }
}

/// `z` of a token's column, of the softmax that logp is taken from.
fn z_of(reference: &Reference, token: &Token, id: usize) -> f64 {
    let (b, t) = token.at;
    reference.columns(b, t, token, id..id + 1).logp().z[0]
}

/// What rounding transformed logits adds to the exponents of a token's largest column and of one of `z`.
fn rounded_of(reference: &Reference, token: &Token, z: f64) -> f64 {
    // A logit of −∞ is not rounded.
    let both = [token.logp_softmax.stats.max, z].into_iter().filter(|z| z.is_finite());
    transform_rounding(reference.spec(), both.fold(0.0, |most, z| z.abs().max(most)))
}

/// `offset·u·M`
fn offset_of(softmax: &ScaledSoftmax, bands: Bands) -> f64 {
    let largest = softmax.stats.max.abs();
    if largest.is_finite() { bands.offset * U * largest } else { 0.0 }
}

/// `C_ℓ` of an id of a token, whose logits have errors, and `Σ p_j ε_j` of them.
fn logp_bound(
    reference: &Reference,
    token: &Token,
    id: usize,
    (errors, mean_error): (&LogitErrors, f64),
    bands: Bands,
) -> Bound {
    let (spec, softmax) = (reference.spec(), &token.logp_softmax);
    let z = z_of(reference, token, id);
    let (gap, log_p) = (softmax.stats.max - z, softmax.stats.log_probability(z));
    let rounded = rounded_of(reference, token, z);
    let own = spec.logits.scale.abs() * errors.at(id);
    let product = if errors.is_empty() { 0.0 } else { (own + mean_error) / softmax.divisor };
    // ∂ℓ/∂log p_y: 1, or 1/T where the temperature divides the log-probability.
    let factor = softmax.divisor / token.temperature();
    Bound {
        scale: (1.0 + gap + softmax.stats.mean_gap + log_p.abs() + 2.0 * rounded) * factor,
        floor: (product + offset_of(softmax, bands)) * factor,
    }
}

/// How far a sum of `K` terms may be off, added up in any order, of the sum of their sizes.
pub(super) fn of_sum(terms: usize) -> f64 {
    terms.saturating_sub(1) as f64 * U
}

/// How far `Σ dlogp_k · ℓ_k` of a token's other ids, whose logp is off by `bounds`, may be off; and its sum with that of the first.
fn of_others(reference: &Reference, token: &Token, bounds: &[Bound]) -> Bound {
    let others = reference.others(token);
    let mut all = Bound { scale: 0.0, floor: others.len() as f64 * FLUSHED };
    let mut sizes = token.policy.value.abs();
    for (other, bound) in others.iter().zip(bounds) {
        let (size, factor) = ((other.grad_logp * other.logp).abs(), other.grad_logp.abs());
        all = all.plus(Bound { scale: size + factor * bound.scale, floor: factor * bound.floor });
        sizes += size;
    }
    all.and(of_sum(others.len() + 1) * sizes)
}

/// What rounding transformed logits adds to an exponent: their own size.
pub(super) fn transform_rounding(spec: &LossSpec, largest: f64) -> f64 {
    let identity = spec.logits.scale == 1.0 && spec.logits.softcap.is_none() && !spec.logits.bias;
    if identity { 0.0 } else { largest.abs() }
}

/// How far each token's entropy may be off, as it is held in f32.
pub(super) fn errors_of_entropies(reference: &Reference, bands: Bands, errors: ErrorsOf) -> Array2<Option<f64>> {
    let Shape { batch, tokens, .. } = reference.shape();
    Array2::from_shape_fn((batch, tokens), |(b, t)| {
        let token = reference.token(b, t)?;
        Some(error_of_entropy(token, Base::of(reference, (b, t), token, &errors(b, t), bands), bands))
    })
}

fn error_of_entropy(token: &Token, base: Base, bands: Bands) -> f64 {
    U * (token.entropy.abs() + bands.entropy * base.entropy.scale) + base.entropy.floor
}

/// Near what a choice between the tokens of a batch is open.
struct OfBatch {
    /// Of its logps, the largest.
    logp: Bound,
    /// The largest.
    advantage: f64,
    /// Whether a token may be of high entropy or not, whatever the others are.
    open: Array2<bool>,
}

impl OfBatch {
    fn of(reference: &Reference, bases: &Array2<Option<Base>>, bands: Bands) -> Self {
        let spec = reference.spec();
        let mut open = Array2::from_elem(bases.dim(), false);
        if spec.top_entropy.is_some() && !quantile::is_counted(spec) {
            let error = |(b, t)| Some(error_of_entropy(reference.token(b, t)?, bases[[b, t]]?, bands));
            for at in quantile::open(reference, &Array2::from_shape_fn(bases.dim(), error)) {
                open[at] = true;
            }
        }
        let mut all = Self { logp: Bound::default(), advantage: 0.0, open };
        for ((b, t), base) in bases.indexed_iter() {
            let (Some(base), Some(token)) = (base, reference.token(b, t)) else { continue };
            all.logp = all.logp.or(base.logp);
            all.advantage = all.advantage.max(token.inputs.advantage.abs());
        }
        all
    }
}

/// Where rounding may have moved a token of a row, together with the others.
type Side<'s> = &'s dyn Fn(&Token, Base) -> TokenInputs;

/// What the tokens of a row share.
struct OfRow {
    /// The mean of `C_ℓ + |old_logp| + |x|`, and of the floors of logp.
    mean: Bound,
    /// `C̄`: the same, or of a product its sum.
    level: Bound,
    /// `Σ` of the same, and of the logarithms of its rollout weights.
    sum: Bound,
    /// What they owe to their ratio on each side of its kinks; their own first.
    couplings: Vec<f64>,
    terms: RatioTerms,
}

impl OfRow {
    fn of(reference: &Reference, bands: Bands, batch: &OfBatch, row: &[((usize, usize), &Token, Base)]) -> Self {
        let spec = reference.spec();
        let condition = |&(_, token, base): &((usize, usize), &Token, Base)| {
            let x = token.inputs.logp - token.inputs.old_logp;
            base.logp.scale + old_logp_size(spec, token) + if x.is_finite() { x.abs() } else { 0.0 }
        };
        let sum: f64 = row.iter().map(condition).sum();
        let floors: f64 = row.iter().map(|(_, _, base)| base.logp.floor).sum();
        let count = row.len().max(1) as f64;
        let shared = if spec.ratio.level == RatioLevel::SequenceProduct { 1.0 } else { count };
        let weights = row.first().map_or(0.0, |(_, token, _)| token.inputs.row_log_weight.abs());
        let mut of_row = Self {
            mean: Bound { scale: sum / count, floor: floors / count },
            level: Bound { scale: sum / shared, floor: floors / shared },
            sum: Bound { scale: sum + if weights.is_finite() { weights } else { 0.0 }, floor: floors },
            couplings: vec![row.first().map_or(0.0, |(_, token, _)| token.coupling)],
            terms: RatioTerms {
                flushed: row.iter().map(|(_, token, _)| flushed_of_grad(spec, token, &token.branch, bands.grade)).sum(),
                ..RatioTerms::default()
            },
        };
        if !spec.ratio.level.is_shared() {
            return of_row;
        }
        for &(_, token, base) in row {
            let moves = of_row.moves(spec, token, base);
            let moved =
                |inputs: &TokenInputs| reference.by_log_ratio(&Token { inputs: *inputs, ..*token }, &token.branch);
            let moved = response(spec, &token.inputs, moves, &moved);
            of_row.terms.sum += grad_terms(spec, token, &token.branch, bands.grade).1;
            of_row.terms.moved.scale += moved.scale;
            of_row.terms.moved.floor += moved.floor;
        }
        // All of the row's tokens to one side of what they share, or with every open choice made in one way.
        let band = of_row.band(bands);
        let coupling = |side: Side| {
            let of = |&(_, token, base): &((usize, usize), &Token, Base)| {
                reference.by_log_ratio(token, &Branch::at(spec, &side(token, base)))
            };
            row.iter().map(of).sum()
        };
        let mut couplings: Vec<f64> =
            within(band).map(|by| coupling(&|token, _| shift_row(&token.inputs, by))).collect();
        couplings.push(coupling(&|token, _| at_row_kink(&token.inputs, band).unwrap_or(token.inputs)));
        for holds in [true, false] {
            couplings.push(coupling(&|token, base| choose(token, base, bands, batch, &of_row, holds)));
        }
        let held = |&(_, token, _): &((usize, usize), &Token, Base)| {
            let nearby: Vec<TokenInputs> = within(band).map(|by| shift_row(&token.inputs, by)).collect();
            reference.by_log_ratio(token, &held_by_clip(spec, token, &nearby, bands).unwrap_or(token.branch))
        };
        couplings.push(row.iter().map(held).sum());
        for coupling in couplings {
            if of_row.couplings.iter().all(|known| (coupling - known).abs() > 1e-9 * of_row.terms.sum) {
                of_row.couplings.push(coupling);
            }
        }
        of_row
    }

    fn moves(&self, spec: &LossSpec, token: &Token, base: Base) -> Moves {
        let logp = base.logp.scale + old_logp_size(spec, token) + token.inputs.ref_logp.map_or(0.0, f64::abs);
        Moves { logp: Bound { scale: logp, ..base.logp }, row: self.level, weight: self.sum }
    }

    /// How near to a kink of the row's log-ratio both sides are right.
    fn band(&self, bands: Bands) -> f64 {
        U * (bands.logp * self.level.scale + 4.0) + self.level.floor
    }
}

fn old_logp_size(spec: &LossSpec, token: &Token) -> f64 {
    if spec.old_logp == OldLogp::Current { 0.0 } else { token.inputs.old_logp.abs() }
}

/// `Σ |terms|` of `∂loss/∂ℓ` at first hand, and of `∂loss/∂w`.
pub(super) fn grad_terms(spec: &LossSpec, token: &Token, branch: &Branch, grade: Grade) -> (f64, f64) {
    let inputs = &token.inputs;
    let arm = Arm::of(spec, inputs, branch, grade);
    let (mut by_logp, mut by_log_ratio) = (token.weight * arm.by_logp, token.weight * arm.by_log_ratio);
    if let Some(kl) = &spec.kl {
        let term = branch.kl(spec, kl, inputs);
        let rounded = clamp_rounding(spec, kl, inputs);
        let [own, of_ratio] = match kl.importance {
            KlImportance::One => [0.0, 0.0],
            KlImportance::Score | KlImportance::TokenRatio | KlImportance::Rollout => [term.value.abs() + rounded, 0.0],
            KlImportance::Ratio => [0.0, rounded],
        };
        by_logp += token.kl_weight * weighted(kl.beta, term.by_logp.abs() + own);
        by_log_ratio += token.kl_weight * weighted(kl.beta, term.by_log_ratio.abs() + of_ratio);
    }
    (by_logp, branch.cap_slope * by_log_ratio)
}

/// What a KL estimate is multiplied by.
fn importance(spec: &LossSpec, kl: &Kl, inputs: &TokenInputs) -> f64 {
    match kl.importance {
        KlImportance::One | KlImportance::Score => 1.0,
        KlImportance::Ratio => inputs.ratio(spec),
        KlImportance::TokenRatio => inputs.log_ratio(spec).value.exp(),
        KlImportance::Rollout => {
            let scored = inputs.rollout_logp.filter(|logp| !logp.is_nan());
            scored.map_or(0.0, |rollout_logp| (inputs.logp - rollout_logp).exp())
        }
    }
}

/// What rounding `difference_clamp` adds to an estimate that stands at it: `|d·e^d|` of k3, times the importance.
fn clamp_rounding(spec: &LossSpec, kl: &Kl, inputs: &TokenInputs) -> f64 {
    let (Some(clamp), Some(ref_logp)) = (kl.difference_clamp, inputs.ref_logp) else { return 0.0 };
    let d = ref_logp - inputs.logp;
    if kl.estimator != KlEstimator::K3 || d.abs() <= clamp {
        return 0.0;
    }
    importance(spec, kl, inputs) * inputs.kl_weight * clamp * (clamp * d.signum()).exp()
}

/// What of a KL estimate may be flushed with the ratio that it is multiplied by, and of its derivatives by `ℓ` and `w`.
fn flushed_of_kl(spec: &LossSpec, inputs: &TokenInputs, branch: &Branch) -> [f64; 2] {
    let weighed = |kl: &&Kl| {
        matches!(kl.importance, KlImportance::Ratio | KlImportance::TokenRatio | KlImportance::Rollout)
            || matches!(kl.gradient, KlGradient::K2Weighted(_))
    };
    let Some(kl) = spec.kl.as_ref().filter(weighed) else { return [0.0; 2] };
    let ratio_of_1 = TokenInputs {
        old_logp: inputs.logp,
        rollout_logp: inputs.rollout_logp.map(|_| inputs.logp),
        row_log_ratio: inputs.row_log_ratio.map(|_| 0.0),
        ..*inputs
    };
    let estimate = branch.kl(spec, kl, &ratio_of_1);
    let [value, derivatives] = [estimate.value.abs(), estimate.value.abs() + estimate.by_logp.abs()];
    [value, derivatives].map(|lost| if lost.is_finite() { lost } else { 0.0 })
}

/// What of `∂loss/∂ℓ` may be flushed on the way, in units of [`FLUSHED`].
pub(super) fn flushed_of_grad(spec: &LossSpec, token: &Token, branch: &Branch, grade: Grade) -> f64 {
    let beta = spec.kl.as_ref().map_or(0.0, |kl| kl.beta);
    let of_kl = weighted(beta, flushed_of_kl(spec, &token.inputs, branch)[1]);
    token.weight * Arm::of(spec, &token.inputs, branch, grade).flushed + token.kl_weight * of_kl
}

/// `beta · term`; 0 where `beta` is, even if the term overflows.
fn weighted(beta: f64, term: f64) -> f64 {
    if beta == 0.0 { 0.0 } else { beta * term }
}

/// How far `f` moves when what it depends on moves as rounding may move it: in units of `u`, and beyond. Under
/// [`OldLogp::Current`] the ratio stays 1.
pub(super) fn response(spec: &LossSpec, inputs: &TokenInputs, moves: Moves, f: &dyn Fn(&TokenInputs) -> f64) -> Bound {
    let here = f(inputs);
    let between = |inputs: [TokenInputs; 2]| {
        let [down, up] = inputs.map(|inputs| (f(&inputs) - here).abs());
        down.max(up)
    };
    let moved = |inputs: [TokenInputs; 2]| between(inputs) / U;
    let by_logp = |by: f64| [shift(spec, inputs, -by), shift(spec, inputs, by)];
    let by_row = |by: f64| [shift_row(inputs, -by), shift_row(inputs, by)];
    let of_logp = moved(by_logp(moves.logp.scale * U));
    // Each difference is rounded by itself. In ρ·k3 an error of ℓ cancels: ρ·e^d does not depend on it.
    let differences = [inputs.logp - inputs.old_logp, inputs.ref_logp.map_or(0.0, |ref_logp| ref_logp - inputs.logp)];
    let [x, d] = differences.map(|difference| if difference.is_finite() { difference * U } else { 0.0 });
    let old = |by: f64| TokenInputs { old_logp: inputs.old_logp + by, ..*inputs };
    let reference = |by: f64| TokenInputs { ref_logp: inputs.ref_logp.map(|ref_logp| ref_logp + by), ..*inputs };
    // Against the sampler too, where that weighs something.
    let s = inputs.rollout_logp.map(|rollout_logp| (inputs.logp - rollout_logp) * U).filter(|s| s.is_finite());
    let sampler = |by: f64| TokenInputs { rollout_logp: inputs.rollout_logp.map(|logp| logp + by), ..*inputs };
    let of_sampler = s.map_or(0.0, |s| moved([sampler(-s), sampler(s)]));
    let of_differences = moved([old(-x), old(x)]) + moved([reference(-d), reference(d)]) + of_sampler;
    let mut total = Bound { scale: of_logp.max(of_differences), floor: 0.0 };
    if moves.logp.floor > 0.0 {
        total.floor += between(by_logp(moves.logp.floor));
    }
    if inputs.row_log_ratio.is_some() {
        total.scale += moved(by_row(moves.row.scale * U));
        if moves.row.floor > 0.0 {
            total.floor += between(by_row(moves.row.floor));
        }
    }
    // A bound of the log-ratio is itself rounded.
    let level = inputs.level_log_ratio(spec);
    if level.slope * inputs.log_ratio(spec).slope == 0.0 && level.value.is_finite() {
        let at = |w: f64| TokenInputs { row_log_ratio: Some(w), ..*inputs };
        let by = level.value.abs() * U;
        total.scale += moved([at(level.value - by), at(level.value + by)]);
    }
    if matches!(spec.objective, Objective::Vespo(_)) {
        let weight =
            |by: f64| [-by, by].map(|by| TokenInputs { row_log_weight: inputs.row_log_weight + by, ..*inputs });
        total.scale += moved(weight(moves.weight.scale * U));
        total.floor += between(weight(moves.weight.floor));
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

/// How near each of a token's choices is to being made otherwise: on policy, selected.
fn choice_bands(token: &Token, base: Base, bands: Bands, batch: &OfBatch, row: &OfRow) -> [f64; 2] {
    let on_policy = U * (2.0 * bands.logp * row.mean.scale + 4.0) + 2.0 * row.mean.floor;
    let two = |kappa: f64, a: Bound, b: Bound| U * kappa * (a.scale + b.scale) + a.floor + b.floor;
    let logps = two(bands.logp, base.logp, batch.logp) + U * (8.0 + token.inputs.logp.abs());
    let selected = (token.inputs.advantage.abs() + batch.advantage) * logps;
    [on_policy, selected]
}

/// The token's inputs, with every open choice made as `holds`.
fn choose(token: &Token, base: Base, bands: Bands, batch: &OfBatch, row: &OfRow, holds: bool) -> TokenInputs {
    let [on_policy, selected] = choice_bands(token, base, bands, batch, row);
    let made = |choice: Choice, band: f64| if choice.margin <= band { Choice { holds, ..choice } } else { choice };
    let inputs = &token.inputs;
    TokenInputs { on_policy: made(inputs.on_policy, on_policy), selected: made(inputs.selected, selected), ..*inputs }
}

/// Both ends of a band around 0, and points in it where it is wide enough to hold a whole piece between two kinks, as between
/// the sides of a clip.
fn within(band: f64) -> impl Iterator<Item = f64> {
    let steps = if band < 1e-3 { 1 } else { 16 };
    (1..=steps).flat_map(move |i| [-1.0, 1.0].map(|side| side * band * f64::from(i) / f64::from(steps)))
}

/// One of a token's choices.
type ChoiceOf = fn(&mut TokenInputs) -> &mut bool;

/// Inputs around the token's own, which come first, on every side of what may be crossed.
///
/// The kinks of `|d|` and `|w|` are themselves among them when they are near: a kernel may find 0 exactly.
fn nearby(spec: &LossSpec, token: &Token, base: Base, bands: Bands, batch: &OfBatch, row: &OfRow) -> Vec<TokenInputs> {
    let here = token.inputs;
    let moves = row.moves(spec, token, base).logp;
    let band = U * (bands.logp * moves.scale + 4.0) + moves.floor;
    let mut all: Vec<TokenInputs> =
        std::iter::once(here).chain(within(band).map(|by| shift(spec, &here, by))).collect();
    let kinks = here.ref_logp.into_iter().chain([here.old_logp]);
    let near = kinks.filter(|&logp| logp <= 0.0 && (logp - here.logp).abs() <= band);
    all.extend(near.map(|logp| at_logp(spec, &here, logp)));
    if here.row_log_ratio.is_some() {
        let band = row.band(bands);
        let of_row = |inputs: &TokenInputs| {
            let inputs = *inputs;
            within(band).map(move |by| shift_row(&inputs, by)).chain(at_row_kink(&inputs, band))
        };
        let more: Vec<TokenInputs> = all.iter().flat_map(of_row).collect();
        all.extend(more);
    }
    let [on_policy, selected] = choice_bands(token, base, bands, batch, row);
    let choices: [(bool, ChoiceOf); 3] = [
        (here.on_policy.margin <= on_policy, |inputs| &mut inputs.on_policy.holds),
        (batch.open[token.at], |inputs| &mut inputs.top_entropy),
        (here.selected.margin <= selected, |inputs| &mut inputs.selected.holds),
    ];
    for (_, choice) in choices.into_iter().filter(|(open, _)| *open) {
        let otherwise = |inputs: &TokenInputs| {
            let mut inputs = *inputs;
            let holds = choice(&mut inputs);
            *holds = !*holds;
            inputs
        };
        let flipped: Vec<TokenInputs> = all.iter().map(otherwise).collect();
        all.extend(flipped);
    }
    all
}

/// The branches of `nearby`, each once.
fn branches(spec: &LossSpec, token: &Token, nearby: &[TokenInputs], moves: Moves, bands: Bands) -> Vec<Branch> {
    let mut specs = vec![];
    if let Objective::TrustRegion(region) = &spec.objective {
        let slack =
            U * arm::of_divergence(region, &token.inputs, bands.logp * moves.logp.scale + 4.0 + moves.logp.floor / U);
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
    if let Some(held) = held_by_clip(spec, token, nearby, bands).filter(|held| !branches.contains(held)) {
        branches.push(held);
    }
    branches
}

/// What grade `standard` forgives of automatic differentiation, where the ratio of `nearby` inputs is at a bound of PPO's clip. A band
/// that is wider than a value at a bound, as where logits were rounded by whole nats, is none.
fn held_by_clip(spec: &LossSpec, token: &Token, nearby: &[TokenInputs], bands: Bands) -> Option<Branch> {
    if bands.grade != Grade::Standard {
        return None;
    }
    let ratios = nearby.iter().map(|inputs| inputs.ratio(spec));
    let (low, high) = ratios.fold((f64::INFINITY, 0.0), |(low, high), x| (f64::min(low, x), f64::max(high, x)));
    token.branch.held_by_clip(spec, low..=high).filter(|_| high <= low * (1.0 + 1e-3))
}
