//! The oracle: the GRPO loss, entropy and dlogits in f64, written to be read beside the formulas.
//!
//! Inputs are widened exactly, sums are compensated ([`Sum`]), gradients are in closed form. Nothing here is shared
//! with any kernel, and nothing outside [`crate::spec`] and [`crate::problem`] is used.
//!
//! A masked token is never looked at: it is absent from every sum, whatever stands in its logits, id, advantage or
//! log-probabilities, and its dlogits are 0. Where a value cannot be finite (a NaN logit, `exp` beyond 1.8e308) the
//! result holds the NaN or ∞ and [`Reference::first_nonfinite`] names the token; other rows stay right.

mod gradient;
mod log_softmax;
mod objective;
mod reduction;
mod sum;

use ndarray::{Array2, Array3, Ix3, arr0};
use rayon::prelude::*;

pub use log_softmax::Softmax;
pub use objective::{Branch, Term, TokenInputs, clipped};
pub use sum::Sum;

use crate::problem::{FloatArray, Metrics, Outcome, Problem, ProblemError, Shape};
use crate::spec::{LossSpec, TemperatureDivides};

/// A softmax over logits divided by `divisor`.
#[derive(Clone, Copy, Debug)]
pub struct ScaledSoftmax {
    /// What divides the logits before the softmax.
    pub divisor: f64,
    /// Statistics of the divided row.
    pub stats: Softmax,
}

/// Everything the loss knows about one unmasked token.
#[derive(Clone, Copy, Debug)]
pub struct Token {
    /// The sampled id, `y`.
    pub id: usize,
    /// The softmax that `logp` is taken from.
    pub logp_softmax: ScaledSoftmax,
    /// The softmax that `entropy` is taken from: the same unless the temperature divides the log-probability.
    pub entropy_softmax: ScaledSoftmax,
    /// `1 − p_y`, summed over the other columns.
    pub probability_of_others: f64,
    /// `H`, nats.
    pub entropy: f64,
    /// `ℓ` and what it is compared with.
    pub inputs: TokenInputs,
    /// The smooth piece of the loss that the token is on.
    pub branch: Branch,
    /// Policy term.
    pub policy: Term,
    /// KL estimate, without `beta`.
    pub kl: Term,
    /// `policy + beta · kl`.
    pub token_loss: f64,
    /// Whether the token counts as clipped low.
    pub clipped_low: bool,
    /// Whether the token counts as clipped high.
    pub clipped_high: bool,
    /// `w_b`: what the reduction multiplies this token's loss by.
    pub weight: f64,
}

/// A problem, evaluated. Rows of dlogits are made on request, so that a large vocabulary needs no `[B,T,V]` of f64.
#[derive(Debug)]
pub struct Reference<'p> {
    spec: &'p LossSpec,
    logits: &'p FloatArray<Ix3>,
    shape: Shape,
    tokens: Array2<Option<Token>>,
    loss: f64,
    metrics: Metrics,
}

/// Evaluates `problem` under `spec`.
///
/// # Errors
/// [`ProblemError`] where the spec is out of range or the problem does not fit it.
pub fn evaluate<'p>(spec: &'p LossSpec, problem: &'p Problem) -> Result<Reference<'p>, ProblemError> {
    let shape = problem.check(spec)?;
    let positions: Vec<(usize, usize)> = ndarray::indices((shape.batch, shape.tokens)).into_iter().collect();
    let tokens = positions.into_par_iter().map(|(b, t)| problem.mask[[b, t]].then(|| token(spec, problem, b, t)));
    let mut tokens = Array2::from_shape_vec((shape.batch, shape.tokens), tokens.collect()).expect("one entry a token");
    let weights = reduction::row_weights(spec.reduction, &tokens);
    for ((b, _), token) in tokens.indexed_iter_mut() {
        if let Some(token) = token {
            token.weight = weights[b];
        }
    }
    let metrics = reduction::metrics(spec, &tokens);
    let loss = reduction::loss(spec, &tokens, metrics.entropy_mean);
    Ok(Reference { spec, logits: &problem.logits, shape, tokens, loss, metrics })
}

/// Everything about token `[b,t]` but its weight.
fn token(spec: &LossSpec, problem: &Problem, b: usize, t: usize) -> Token {
    let logits = problem.logits.row(b, t);
    let id = usize::try_from(problem.ids[[b, t]]).expect("checked: 0 ≤ id < V");
    let scaled = |divisor: f64| logits.iter().map(|x| x / divisor).collect::<Vec<_>>();

    let (logp_divisor, logp_factor) = match spec.temperature_divides {
        TemperatureDivides::Logits => (spec.temperature, 1.0),
        TemperatureDivides::Logp => (1.0, 1.0 / spec.temperature),
    };
    let z = scaled(logp_divisor);
    let logp_softmax = ScaledSoftmax { divisor: logp_divisor, stats: Softmax::of(&z) };
    let entropy_softmax = match spec.temperature_divides {
        TemperatureDivides::Logits => logp_softmax,
        TemperatureDivides::Logp => {
            ScaledSoftmax { divisor: spec.temperature, stats: Softmax::of(&scaled(spec.temperature)) }
        }
    };
    let logp = logp_softmax.stats.log_probability(z[id]) * logp_factor;

    let inputs = TokenInputs {
        logp,
        old_logp: objective::old_logp(spec, problem.old_logp.as_ref().map(|a| a[[b, t]]), logp),
        ref_logp: spec.kl.as_ref().and(problem.ref_logp.as_ref()).map(|a| a[[b, t]]),
        advantage: problem.advantages.at(b, t),
    };
    let branch = Branch::at(spec, &inputs);
    let policy = branch.policy(&inputs);
    let kl = spec.kl.as_ref().map_or(Term::default(), |kl| branch.kl(kl, &inputs));
    let (clipped_low, clipped_high) = clipped(spec, &inputs);
    Token {
        id,
        logp_softmax,
        entropy_softmax,
        probability_of_others: logp_softmax.stats.probability_of_others(&z, id),
        entropy: entropy_softmax.stats.entropy(),
        inputs,
        branch,
        policy,
        kl,
        token_loss: add_kl(spec, policy.value, kl.value),
        clipped_low,
        clipped_high,
        weight: 0.0,
    }
}

/// `policy + beta · kl`; `policy` alone where `beta` is 0, even if the KL estimate overflows.
fn add_kl(spec: &LossSpec, policy: f64, kl: f64) -> f64 {
    match &spec.kl {
        Some(term) if term.beta != 0.0 => policy + term.beta * kl,
        _ => policy,
    }
}

impl Reference<'_> {
    /// The loss.
    pub fn loss(&self) -> f64 {
        self.loss
    }

    /// What trainers log.
    pub fn metrics(&self) -> Metrics {
        self.metrics
    }

    /// `(B, T, V)`.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The spec this was evaluated under.
    pub fn spec(&self) -> &LossSpec {
        self.spec
    }

    /// `logits[b,t,:]`, exactly.
    pub fn logits_row(&self, b: usize, t: usize) -> Vec<f64> {
        self.logits.row(b, t)
    }

    /// Token `[b,t]`, or `None` where it is masked.
    pub fn token(&self, b: usize, t: usize) -> Option<&Token> {
        self.tokens[[b, t]].as_ref()
    }

    /// Number of unmasked tokens, `Σ m`.
    pub fn count(&self) -> usize {
        self.tokens.iter().flatten().count()
    }

    /// `policy + beta · kl` at `inputs`, on `branch`.
    pub fn token_loss(&self, inputs: &TokenInputs, branch: &Branch) -> f64 {
        let kl = self.spec.kl.as_ref().map_or(0.0, |kl| branch.kl(kl, inputs).value);
        add_kl(self.spec, branch.policy(inputs).value, kl)
    }

    /// `∂loss/∂ℓ` of a token, were it on `branch`: `w_b · (policy + beta · kl)′`.
    pub fn grad_logp(&self, token: &Token, branch: &Branch) -> f64 {
        let policy = branch.policy(&token.inputs).grad;
        let kl = self.spec.kl.as_ref().map_or(0.0, |kl| branch.kl(kl, &token.inputs).grad);
        token.weight * add_kl(self.spec, policy, kl)
    }

    /// `∂loss/∂H` of any token: `−entropy_coef / Σ m`.
    pub fn grad_entropy(&self) -> f64 {
        if self.spec.entropy_coef == 0.0 { 0.0 } else { -self.spec.entropy_coef / self.count() as f64 }
    }

    /// `dlogits[b,t,:]`; zeros where the token is masked.
    pub fn dlogits_row(&self, b: usize, t: usize) -> Vec<f64> {
        match self.token(b, t) {
            Some(token) => self.dlogits_row_on(b, t, &token.branch),
            None => vec![0.0; self.shape.vocab],
        }
    }

    /// `dlogits[b,t,:]` were the token on `branch`; zeros where it is masked.
    pub fn dlogits_row_on(&self, b: usize, t: usize, branch: &Branch) -> Vec<f64> {
        let Some(token) = self.token(b, t) else { return vec![0.0; self.shape.vocab] };
        let logits = self.logits.row(b, t);
        gradient::dlogits_row(&logits, token, self.spec.temperature, self.grad_logp(token, branch), self.grad_entropy())
    }

    /// The first unmasked token, in row-major order, with a NaN or infinite log-probability, entropy, loss or gradient.
    pub fn first_nonfinite(&self) -> Option<(usize, usize)> {
        self.tokens.indexed_iter().find_map(|(at, token)| token.as_ref().is_some_and(|t| !self.finite(t)).then_some(at))
    }

    /// Whether all of a token's values are finite.
    pub fn finite(&self, token: &Token) -> bool {
        let values = [token.inputs.logp, token.entropy, token.token_loss, self.grad_logp(token, &token.branch)];
        values.iter().all(|x| x.is_finite())
    }

    /// All outputs at once, `8·B·T·V` bytes of dlogits among them.
    pub fn outcome(&self) -> Outcome {
        let Shape { batch, tokens, vocab } = self.shape;
        let per_token = |value: &dyn Fn(&Token) -> f64| self.tokens.map(|token| token.as_ref().map_or(0.0, value));
        let rows = (0..batch * tokens).into_par_iter().flat_map_iter(|i| self.dlogits_row(i / tokens, i % tokens));
        Outcome {
            loss: arr0(self.loss).into(),
            logp: per_token(&|token| token.inputs.logp).into(),
            entropy: per_token(&|token| token.entropy).into(),
            token_loss: per_token(&|token| token.token_loss).into(),
            dlogits: Array3::from_shape_vec((batch, tokens, vocab), rows.collect()).expect("V values a token").into(),
            metrics: self.metrics,
        }
    }
}
