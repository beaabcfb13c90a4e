//! [`ProblemShape`]: the shape of a problem, on logits or with an LM head.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use super::{HeadShape, Shape};

/// The shape of a problem: of logits, written `BxTxV`, or of hidden states and an LM head, `BxTxHxV`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProblemShape {
    /// The shape of logits, `BxTxV`.
    Logits(Shape),
    /// The shape of hidden states and an LM head, `BxTxHxV`.
    Head(HeadShape),
}

impl ProblemShape {
    /// Returns the shape of the logits, `[B,T,V]`, also if they are a product.
    pub fn logits(self) -> [usize; 3] {
        let Shape { batch, tokens, vocab } = match self {
            ProblemShape::Logits(shape) => shape,
            ProblemShape::Head(shape) => shape.logits(),
        };
        [batch, tokens, vocab]
    }

    /// Returns the dimensions `[B,T,V]` or `[B,T,H,V]`.
    pub fn to_vec(self) -> Vec<usize> {
        match self {
            ProblemShape::Logits(Shape { batch, tokens, vocab }) => vec![batch, tokens, vocab],
            ProblemShape::Head(HeadShape { batch, tokens, hidden, vocab }) => vec![batch, tokens, hidden, vocab],
        }
    }
}

impl Serialize for ProblemShape {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.to_vec())
    }
}

impl FromStr for ProblemShape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let head = text.matches('x').count() == 3;
        if head { text.parse().map(ProblemShape::Head) } else { text.parse().map(ProblemShape::Logits) }
    }
}

impl fmt::Display for ProblemShape {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            ProblemShape::Logits(shape) => shape.fmt(f),
            ProblemShape::Head(shape) => shape.fmt(f),
        }
    }
}
