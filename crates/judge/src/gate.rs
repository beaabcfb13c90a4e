//! [`Gate`]: what is judged, and how.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Something that is judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Output {
    /// The scalar loss.
    Loss,
    /// `[B,T]` log-probabilities.
    Logp,
    /// `[B,T]` entropies.
    Entropy,
    /// `[B,T]` token losses.
    TokenLoss,
    /// `[B,T,V]` gradient.
    Dlogits,
    /// `[B,T,H]` gradient of the hidden states.
    Dhidden,
    /// `[H,V]` or `[V,H]` gradient of the LM head.
    DlmHead,
    /// Metric: mean entropy.
    EntropyMean,
    /// Metric: mean KL estimate.
    KlMean,
    /// Metric: mean ratio.
    RatioMean,
    /// Metric: share clipped low.
    ClipLow,
    /// Metric: share clipped high.
    ClipHigh,
    /// Metric: share clipped on either side.
    ClipRegion,
    /// A scalar recorded with a fixture, which checks the reference itself.
    Recorded,
}

impl Output {
    /// All of them.
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

    /// The name that files and reports use.
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

    /// Whether it is a gradient: what a kernel is there for.
    pub fn is_gradient(self) -> bool {
        matches!(self, Output::Dlogits | Output::Dhidden | Output::DlmHead)
    }
}

/// How an output is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Model {
    /// Every element: `|x̂ − x| ≤ ½ulp(x) + κ·u·scale + floor`.
    Elementwise,
    /// Each row of dlogits without its target, of `dhidden`, or column of `dlm_head`:
    /// `‖x̂ − x‖₂ ≤ ‖½ulp(x)‖₂ + κ·u·‖scale‖₂ + ‖floor‖₂`.
    RowL2,
    /// Each row of dlogits: `|Σ x̂ − Σ x| ≤ Σ ½ulp(x) + κ·u·Σ scale + Σ floor`.
    RowSum,
    /// A share of tokens: exact, but for tokens inside a tie band.
    Count,
}

impl Model {
    /// The name that files use.
    pub fn name(self) -> &'static str {
        match self {
            Model::Elementwise => "elementwise",
            Model::RowL2 => "row_l2",
            Model::RowSum => "row_sum",
            Model::Count => "count",
        }
    }
}

/// Inputs at the edge of what a kernel is used on. Tokens on one are judged in gates of their own, so that a kernel's accuracy
/// and what it does at its edges are two statements; a known edge is waived by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Edge {
    /// A value that the loss goes through is beyond f32, or not finite in exact arithmetic.
    Overflow,
    /// A logit of the token is −∞.
    MinusInfinity,
    /// A logit of the token is finite and near its dtype's lowest number, below half of it: `finfo.min`, as masks are written.
    LowestFloat,
    /// The token is masked: its gradient is exactly 0.
    Masked,
}

impl Edge {
    /// All of them.
    pub const ALL: [Edge; 4] = [Edge::Overflow, Edge::MinusInfinity, Edge::LowestFloat, Edge::Masked];

    /// The name by which it is waived.
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

/// An output, the way it is compared, and of which tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Gate {
    /// What is judged.
    pub output: Output,
    /// How.
    pub model: Model,
    /// At which edge its tokens are; `None` for all others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub edge: Option<Edge>,
}

impl Gate {
    /// Creates the gate of the tokens that are at no edge.
    pub const fn new(output: Output, model: Model) -> Self {
        Self { output, model, edge: None }
    }

    /// The same of tokens at `edge`.
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
