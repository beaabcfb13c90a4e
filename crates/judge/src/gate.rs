//! [`Gate`]: one comparison within a verdict: an output, the way it is compared, and the tokens it is of.

use std::fmt;

use serde::{Deserialize, Serialize};

/// An output of a candidate that is judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Output {
    /// The scalar loss.
    Loss,
    /// The log-probabilities of the sampled tokens, `[B,T]`, in nats.
    Logp,
    /// The entropies of the tokens' distributions, `[B,T]`, in nats.
    Entropy,
    /// The losses of the tokens before mask and normaliser, `[B,T]`.
    TokenLoss,
    /// The gradient of the loss by the logits, `[B,T,V]`.
    Dlogits,
    /// The gradient of the loss by the hidden states, `[B,T,H]`.
    Dhidden,
    /// The gradient of the loss by the LM head, `[H,V]` or `[V,H]`.
    DlmHead,
    /// The metric "mean entropy", in nats.
    EntropyMean,
    /// The metric "mean KL estimate", in nats.
    KlMean,
    /// The metric "mean ratio" of the policies' probabilities.
    RatioMean,
    /// The metric "share of tokens clipped at the lower bound".
    ClipLow,
    /// The metric "share of tokens clipped at the upper bound".
    ClipHigh,
    /// The metric "share of tokens clipped at either bound".
    ClipRegion,
    /// A scalar that was recorded with a fixture: it checks the reference itself.
    Recorded,
}

impl Output {
    /// All outputs, in the order of their gates.
    pub const ALL: [Output; 14] = [
        Output::Loss,
        Output::Logp,
        Output::Entropy,
        Output::TokenLoss,
        Output::Dlogits,
        Output::Dhidden,
        Output::DlmHead,
        Output::EntropyMean,
        Output::KlMean,
        Output::RatioMean,
        Output::ClipLow,
        Output::ClipHigh,
        Output::ClipRegion,
        Output::Recorded,
    ];

    /// Returns the name that files and reports use, such as `token_loss`.
    pub fn name(self) -> &'static str {
        match self {
            Output::Loss => "loss",
            Output::Logp => "logp",
            Output::Entropy => "entropy",
            Output::TokenLoss => "token_loss",
            Output::Dlogits => "dlogits",
            Output::Dhidden => "dhidden",
            Output::DlmHead => "dlm_head",
            Output::EntropyMean => "entropy_mean",
            Output::KlMean => "kl_mean",
            Output::RatioMean => "ratio_mean",
            Output::ClipLow => "clip_low",
            Output::ClipHigh => "clip_high",
            Output::ClipRegion => "clip_region",
            Output::Recorded => "recorded",
        }
    }

    /// Whether it is a gradient, the main purpose of a kernel.
    pub fn is_gradient(self) -> bool {
        matches!(self, Output::Dlogits | Output::Dhidden | Output::DlmHead)
    }
}

/// The way in which an output is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Model {
    /// Each element by itself: `|x̂ − x| ≤ ½ulp(x) + κ·u·scale + floor`.
    Elementwise,
    /// The norm of each token's row of dlogits without its target, of `dhidden`, or of each column of `dlm_head`:
    /// `‖x̂ − x‖₂ ≤ ‖½ulp(x) + floor‖₂ + κ·u·‖scale‖₂`.
    RowL2,
    /// The sum of each token's row of dlogits: `|Σ x̂ − Σ x| ≤ Σ ½ulp(x) + κ·u·Σ scale + Σ floor`.
    RowSum,
    /// A share of tokens, which must be exact up to tokens inside a tie band.
    Count,
}

impl Model {
    /// Returns the name that files use, such as `row_l2`.
    pub fn name(self) -> &'static str {
        match self {
            Model::Elementwise => "elementwise",
            Model::RowL2 => "row_l2",
            Model::RowSum => "row_sum",
            Model::Count => "count",
        }
    }
}

/// A class of tokens that is judged separately, so that a kernel's accuracy and its behaviour on extreme inputs are two statements.
///
/// A user waives a known edge by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Edge {
    /// A value on the way to the loss overflows f32, or is not finite in exact arithmetic.
    Overflow,
    /// A logit of the token is −∞, as filters write it.
    MinusInfinity,
    /// A logit of the token is finite and near its dtype's lowest number, below half of it: `finfo.min`, as masks are written.
    LowestFloat,
    /// The token is masked, so that its gradient is exactly 0.
    Masked,
}

impl Edge {
    /// All edges, in the order in which a token's edge is chosen.
    pub const ALL: [Edge; 4] = [Edge::Overflow, Edge::MinusInfinity, Edge::LowestFloat, Edge::Masked];

    /// Returns the name by which a user waives the edge.
    pub fn name(self) -> &'static str {
        match self {
            Edge::Overflow => "overflow",
            Edge::MinusInfinity => "minus_infinity",
            Edge::LowestFloat => "lowest_float",
            Edge::Masked => "masked",
        }
    }
}

impl fmt::Display for Edge {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Edge {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|edge| edge.name() == text).ok_or_else(|| {
            let names = Self::ALL.map(Edge::name).join(", ");
            format!("got `{text}`, expected one of {names}")
        })
    }
}

/// One comparison within a verdict: an output, the way it is compared, and the tokens it is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Gate {
    /// The output that is judged.
    pub output: Output,
    /// The way in which it is compared.
    pub model: Model,
    /// The edge that its tokens are at; `None` for tokens at no edge.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub edge: Option<Edge>,
}

impl Gate {
    /// Creates the gate of the tokens that are at no edge.
    pub const fn new(output: Output, model: Model) -> Self {
        Self { output, model, edge: None }
    }

    /// Returns the gate of the tokens that are at `edge`.
    #[must_use]
    pub const fn at(self, edge: Option<Edge>) -> Self {
        Self { edge, ..self }
    }
}

impl fmt::Display for Gate {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.output.name())?;
        match self.model {
            Model::Elementwise | Model::Count => {}
            Model::RowL2 => f.write_str(" row_l2")?,
            Model::RowSum => f.write_str(" row_sum")?,
        }
        self.edge.map_or(Ok(()), |edge| write!(f, " at {edge}"))
    }
}
