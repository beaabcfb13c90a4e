//! [`Cancellation`]: the step of a textbook formula that loses digits, and so keeps values from grade `exact`.

use std::fmt;

use crate::gate::{Gate, Model};
use crate::metric::Comparison;
use crate::objective;
use crate::tolerance::{Grade, Limits};
use assay_core::spec::Objective;
use assay_reference::{Reference, Token};

/// A step of a textbook formula that loses digits by cancellation, which a careful formula avoids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
        if limits.sums_in_lanes() {
            return Cancellation::LaneSum;
        }
        let token = worst.and_then(|worst| reference.token(worst.at.b?, worst.at.t?));
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
