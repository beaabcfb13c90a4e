//! [`Cancellation`]: the step of a textbook formula that loses digits, and so keeps values from grade `exact`.

use std::fmt;

use crate::gate::{Gate, Model, Output};
use crate::metric::Comparison;
use crate::objective;
use crate::tolerance::{Grade, Limits};
use assay_core::spec::Objective;
use assay_reference::{Reference, Token};

/// A step of a textbook formula that loses digits by cancellation, which a careful formula avoids.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Cancellation {
    /// The difference `G − G·p` at the target.
    Target,
    /// The sum in an entropy bonus's gradient, `−p·(log p + H)`.
    EntropyGradient,
    /// The difference `x − logsumexp(x)`, or the quotient `x/T`, rounded at the size of the largest logit.
    Offset,
    /// The slope `σ(1 − σ)` of SAPO's gate where the gate is open.
    Gate,
    /// The sum of a long row's exponentials, added up in f32, one term after another in lanes.
    LaneSum,
    /// The sums of a long row's exponentials and of its terms `p·ln p`, added up in f32, one term after another in lanes.
    EntropySum,
    /// The difference `lse − Σ p·z` of which an entropy is made, and in a gradient the error of that entropy.
    EntropyDifference {
        /// The logarithm of the sum of exponentials, in nats.
        lse: f64,
        /// The entropy that is left, in nats.
        entropy: f64,
    },
    /// Two equal arguments of PPO's `min`, of which automatic differentiation takes a part each.
    Bound,
}

impl fmt::Display for Cancellation {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Cancellation::Target => "the target's gradient cancels: 1 − p is computed as a difference",
            Cancellation::EntropyGradient => "the entropy gradient cancels: −p·(log p + H), for p·(gap − mean gap)",
            Cancellation::Offset => {
                "logits are rounded at the size of the largest before it is subtracted: x − logsumexp(x), or x/T"
            }
            Cancellation::LaneSum => {
                "the exponentials of the row are added up in f32, one after another in lanes: add parts of a few hundred, or in f64"
            }
            Cancellation::EntropySum => {
                "the terms p·log p of the row, or its exponentials, are added up in f32, one after another in lanes: add parts of a few hundred, or in f64"
            }
            Cancellation::EntropyDifference { lse, entropy } => {
                return write!(
                    f,
                    "entropy is lse − Σ p·x: two numbers near {lse:.4} cancel to {entropy:.4}; subtract the largest logit from x first"
                );
            }
            Cancellation::Bound => {
                "the ratio is at a bound of the clip, and automatic differentiation takes a part of each of two equal arguments"
            }
            Cancellation::Gate => {
                "SAPO's gate is open, and the slope of its sigmoid cancels: σ·(1 − σ), for σ(x)·σ(−x)"
            }
        })
    }
}

impl Cancellation {
    /// Names the cancellation that most likely explains `worst`, an error of `gate` beyond its limit at grade `exact`.
    ///
    /// The causes are tried from the most specific to the most general.
    pub(super) fn explaining(reference: &Reference, gate: Gate, worst: Option<Comparison>, limits: &Limits) -> Self {
        let token = worst.and_then(|worst| reference.token(worst.at.b?, worst.at.t?));
        if limits.entropy_as_difference() {
            let lse = |token: &Token| token.entropy_softmax.stats.max + token.entropy_softmax.stats.log_sum;
            // A value of all tokens is explained by the one of whose numbers most cancels.
            let token = token.or_else(|| largest_by(reference, |token| lse(token).abs()));
            return token.map_or(Cancellation::EntropyDifference { lse: 0.0, entropy: 0.0 }, |token| {
                Cancellation::EntropyDifference { lse: lse(token), entropy: token.entropy }
            });
        }
        if limits.sums_in_lanes() {
            let has_gradient = token.is_some_and(|token| token.grad_entropy != 0.0) && gate.output.is_gradient();
            let of_entropy = has_gradient || matches!(gate.output, Output::Entropy | Output::EntropyMean);
            return if of_entropy { Cancellation::EntropySum } else { Cancellation::LaneSum };
        }
        if let Some(token) = token.filter(|_| gate.output.is_gradient()) {
            let ratio = token.inputs.ratio(reference.spec());
            if let Objective::Sapo(sapo) = &reference.spec().objective
                && objective::sapo_gate(sapo, ratio, token.inputs.advantage) > 0.99
            {
                return Cancellation::Gate;
            }
            // A hundred roundings of a log-probability move the ratio by about 1e-5 of itself.
            let near = ratio * (1.0 - 1e-5)..=ratio * (1.0 + 1e-5);
            if token.branch.held_by_clip(reference.spec(), near).is_some() {
                return Cancellation::Bound;
            }
        }
        let is_id = |token: &Token, v| v == token.id || reference.others(token).iter().any(|other| other.id == v);
        let at_target = token.is_none_or(|token| worst.is_some_and(|worst| worst.at.v.is_none_or(|v| is_id(token, v))));
        let offset =
            token.map_or(0.0, |token| token.logp_softmax.stats.max.abs()) * limits.at(Grade::Standard).offset();
        // An offset larger than the few roundings that a probability has anyway outweighs every other cause.
        if !gate.output.is_gradient() || (!at_target && offset > limits.kappa(gate.output)) {
            Cancellation::Offset
        } else if at_target && gate.model != Model::RowL2 {
            Cancellation::Target
        } else {
            Cancellation::EntropyGradient
        }
    }
}

/// Finds the unmasked token with the largest finite `size`.
fn largest_by<'r>(reference: &'r Reference, size: impl Fn(&Token) -> f64) -> Option<&'r Token> {
    let shape = reference.shape();
    let tokens = ndarray::indices((shape.batch, shape.tokens)).into_iter();
    let tokens = tokens.filter_map(|(b, t)| reference.token(b, t)).filter(|token| size(token).is_finite());
    tokens.max_by(|a, b| size(a).total_cmp(&size(b)))
}
