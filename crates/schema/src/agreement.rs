//! The agreement of two programs' log-probabilities, as `assay compare-logp` writes it.

use serde::{Deserialize, Serialize};

/// Two arrays of log-probabilities of the same tokens, a trainer's and a sampler's, and what explains their difference.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LogpAgreement {
    /// Whether both sides are what they declare to be; `None` if there are no logits to know it by.
    pub agrees: Option<bool>,
    /// The conclusion, in one sentence.
    pub conclusion: String,
    /// The number of tokens that count.
    pub tokens: u64,
    /// The tokens at which one side is NaN or ±∞, the first of them. They are in no figure.
    pub nonfinite: Vec<TokenPair>,
    /// The number of those tokens.
    pub nonfinite_tokens: u64,
    /// The figures that projects log of such a pair, under their names.
    pub figures: Vec<AgreementFigure>,
    /// The distance that rounding alone may put between the sides; `None` if there are no logits.
    pub floor: Option<RoundingFloor>,
    /// The computation that each side's numbers are those of, the trainer's first; empty if there are no logits.
    pub sides: Vec<SideFinding>,
    /// The difference by position in the sequence.
    pub positions: Vec<DifferenceAtPosition>,
    /// The sequences whose difference is largest.
    pub sequences: Vec<DifferenceOfSequence>,
    /// The rank correlation of the size of the difference with other properties of a token, where it is worth a word.
    pub trends: Vec<DifferenceTrend>,
    /// The tokens that differ most.
    pub worst: Vec<TokenPair>,
    /// Tokens for a picture: all of them if they are few, else the worst and some of the rest.
    pub points: Vec<TokenPair>,
}

/// One token with both sides' numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenPair {
    /// The index of the sequence.
    pub b: usize,
    /// The index of the token in its row.
    pub t: usize,
    /// The trainer's log-probability of the token, nats.
    #[serde(deserialize_with = "super::number::or_nan")]
    pub trainer: f64,
    /// The sampler's log-probability of the token, nats.
    #[serde(deserialize_with = "super::number::or_nan")]
    pub sampler: f64,
    /// The distance that rounding alone may put between the two, nats; `None` if there are no logits.
    pub floor: Option<f64>,
}

/// A figure that a project logs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AgreementFigure {
    /// The name, with the project whose it is.
    pub name: String,
    /// The value of the figure over all tokens.
    #[serde(deserialize_with = "super::number::or_nan")]
    pub value: f64,
    /// The formula by which it is computed.
    pub definition: String,
}

/// The distances that rounding alone may put between two correct sides, from logits to log-probabilities.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RoundingFloor {
    /// The median over tokens, nats.
    pub median: f64,
    /// The largest over all tokens, nats.
    pub largest: f64,
    /// The number of tokens that differ by more than their floor.
    pub beyond: u64,
    /// The bounds of the ratio `exp(trainer − sampler)` that a clip would have.
    pub bounds: [f64; 2],
    /// An upper bound of the number of tokens that rounding can carry across one of them.
    pub may_cross: u64,
}

/// The computation that one side's numbers are those of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SideFinding {
    /// The name of the side, `trainer` or `sampler`.
    pub side: String,
    /// Whether the numbers are those of the declared computation.
    pub declared: bool,
    /// The computations that have these numbers; several where they are the same within the limits, none if nothing explains them.
    pub computes: Vec<String>,
    /// The largest error / limit against the declared computation.
    #[serde(deserialize_with = "super::number::or_nan")]
    pub declared_error: f64,
    /// The largest error / limit against what it computes; `None` if nothing explains the numbers.
    pub explained_error: Option<f64>,
}

/// The difference at a range of positions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DifferenceAtPosition {
    /// The first position of the range.
    pub from: usize,
    /// The last position of the range.
    pub to: usize,
    /// The number of tokens that count there.
    pub tokens: u64,
    /// The mean of |trainer − sampler|, nats.
    pub mean: f64,
    /// The largest |trainer − sampler|, nats.
    pub largest: f64,
}

/// The difference in one sequence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DifferenceOfSequence {
    /// The index of the sequence.
    pub sequence: usize,
    /// The number of tokens that count there.
    pub tokens: u64,
    /// The mean of |trainer − sampler|, nats.
    pub mean: f64,
    /// The largest |trainer − sampler|, nats.
    pub largest: f64,
}

/// A property of a token with which the difference grows or falls.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DifferenceTrend {
    /// The property: `position`, `|advantage|` or `−logp`.
    pub with: String,
    /// Spearman's rank correlation with |trainer − sampler|.
    pub correlation: f64,
}
