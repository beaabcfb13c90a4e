//! [`Extents`]: of logits, or of hidden states and an LM head.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use super::{HeadShape, Shape};

/// Extents of the arrays that a loss is computed from: of logits, written `BxTxV`, or of hidden states and an LM head,
/// `BxTxHxV`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extents {
    /// Of logits.
    Logits(Shape),
    /// Of hidden states and an LM head.
    Head(HeadShape),
}

impl Extents {
    /// `[B,T,V]`, also where logits are a product.
    pub fn logits(self) -> [usize; 3] {
        let Shape { batch, tokens, vocab } = match self {
            Extents::Logits(shape) => shape,
            Extents::Head(shape) => shape.logits(),
        };
        [batch, tokens, vocab]
    }

    /// `[B,T,V]` or `[B,T,H,V]`.
    pub fn to_vec(self) -> Vec<usize> {
        match self {
            Extents::Logits(Shape { batch, tokens, vocab }) => vec![batch, tokens, vocab],
            Extents::Head(HeadShape { batch, tokens, hidden, vocab }) => vec![batch, tokens, hidden, vocab],
        }
    }
}

impl Serialize for Extents {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.to_vec())
    }
}

impl FromStr for Extents {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let head = text.matches('x').count() == 3;
        if head { text.parse().map(Extents::Head) } else { text.parse().map(Extents::Logits) }
    }
}

impl fmt::Display for Extents {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Extents::Logits(shape) => shape.fmt(f),
            Extents::Head(shape) => shape.fmt(f),
        }
    }
}
