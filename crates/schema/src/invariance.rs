//! Relations between two calls of a kernel in which a token must have the same numbers, and what a campaign found of each.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A change of a call that must not change the numbers of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum InvarianceRelation {
    /// A second call for the same problem, after a call for another one.
    Repeat,
    /// Another order of the sequences.
    Order,
    /// Other content in the other sequences.
    Neighbours,
    /// Fewer or more sequences: one alone, half of them, or all of them twice.
    Batch,
    /// More masked tokens, before and after.
    Length,
    /// One row into which the sequences are packed.
    Packing,
    /// More vocabulary entries, of probability 0.
    Vocabulary,
    /// Other offsets and strides of the same values.
    Alignment,
    /// Another variant of the kernel, such as one with other chunks.
    Chunk,
    /// One rank in place of several.
    Ranks,
}

impl InvarianceRelation {
    /// Every relation, in the order in which reports list them.
    pub const ALL: [Self; 10] = [
        Self::Repeat,
        Self::Order,
        Self::Neighbours,
        Self::Batch,
        Self::Length,
        Self::Packing,
        Self::Vocabulary,
        Self::Alignment,
        Self::Chunk,
        Self::Ranks,
    ];

    /// Returns the name in options, reports and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Repeat => "repeat",
            Self::Order => "order",
            Self::Neighbours => "neighbours",
            Self::Batch => "batch",
            Self::Length => "length",
            Self::Packing => "packing",
            Self::Vocabulary => "vocabulary",
            Self::Alignment => "alignment",
            Self::Chunk => "chunk",
            Self::Ranks => "ranks",
        }
    }

    /// Returns the name of the cause of failures, by which they can be allowed.
    pub fn cause(self) -> &'static str {
        match self {
            Self::Repeat => "repeat-invariance",
            Self::Order => "order-invariance",
            Self::Neighbours => "neighbours-invariance",
            Self::Batch => "batch-invariance",
            Self::Length => "length-invariance",
            Self::Packing => "packing-invariance",
            Self::Vocabulary => "vocabulary-invariance",
            Self::Alignment => "alignment-invariance",
            Self::Chunk => "chunk-invariance",
            Self::Ranks => "ranks-invariance",
        }
    }

    /// Returns the change in words, as they follow "when".
    pub fn words(self) -> &'static str {
        match self {
            Self::Repeat => "the same problem is asked again after another one",
            Self::Order => "the sequences are in another order",
            Self::Neighbours => "other sequences have other content",
            Self::Batch => "fewer or more sequences are in the batch",
            Self::Length => "masked tokens are added",
            Self::Packing => "the sequences are packed",
            Self::Vocabulary => "entries of −∞ are added to the vocabulary",
            Self::Alignment => "the same values are at other offsets and strides",
            Self::Chunk => "another variant of the kernel computes them",
            Self::Ranks => "one rank computes them in place of several",
        }
    }
}

impl fmt::Display for InvarianceRelation {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for InvarianceRelation {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|relation| relation.name() == name).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            format!("expected one of {names}")
        })
    }
}

/// The demand of a relation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum InvarianceGrade {
    /// Equal bits; NaN equals NaN.
    Bits,
    /// Differences that another order of the row's sums explains.
    Limits,
}

impl fmt::Display for InvarianceGrade {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Self::Bits => "bits",
            Self::Limits => "limits",
        })
    }
}

/// The findings of a campaign about one relation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RelationFinding {
    /// The relation that was asked.
    pub relation: InvarianceRelation,
    /// The grade that was asked for.
    pub grade: InvarianceGrade,
    /// The number of problems for which it was asked.
    pub problems: u64,
    /// The number of those that failed.
    pub failed: u64,
    /// The number of pairs of tokens that were compared.
    pub tokens: u64,
    /// The number of those pairs of which an output has other bits.
    pub other_bits: u64,
    /// The outputs that had other bits.
    pub outputs: Vec<String>,
    /// The outputs that were not compared where they change by design: a mean over the batch, a choice among all of its tokens.
    pub by_design: Vec<String>,
    /// The largest quotient of a difference and its limit; `None` if no bits differed, or the differences have no limit.
    pub difference_over_limit: Option<f64>,
    /// The reason why it was not asked; `None` if it was.
    pub not_asked: Option<String>,
}

impl RelationFinding {
    /// Creates findings of a relation that no problem was asked of yet.
    pub fn new(relation: InvarianceRelation, grade: InvarianceGrade) -> Self {
        Self {
            relation,
            grade,
            problems: 0,
            failed: 0,
            tokens: 0,
            other_bits: 0,
            outputs: Vec::new(),
            by_design: Vec::new(),
            difference_over_limit: None,
            not_asked: None,
        }
    }
}
