//! Whether two runs that must have the same numbers have them: the same problem on other devices, or its tokens in another batch.

mod answers;

use ndarray::Dimension;

use super::gate::Output;
use assay_core::problem::{Candidate, FloatArray, Gradient};

pub use answers::{BitDifferences, ChangedValue, ExactChange, LargestDifference, PlacesOfToken, TokenAnswers};

/// Which outputs of one run have the bits of another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invariance {
    /// Outputs with the same bits.
    pub same: Vec<&'static str>,
    /// Outputs with others.
    pub other: Vec<&'static str>,
}

impl Invariance {
    /// Compares what two runs on one problem both returned.
    pub fn between<G: Gradient>(a: &Candidate<G>, b: &Candidate<G>) -> Self {
        let others = both(a.logp_of_others.as_ref(), b.logp_of_others.as_ref());
        let of_tokens = [
            (Output::Loss.name(), both(a.loss.as_ref(), b.loss.as_ref())),
            (Output::Logp.name(), both(a.logp.as_ref(), b.logp.as_ref()).map(|same| same && others != Some(false))),
            (Output::Entropy.name(), both(a.entropy.as_ref(), b.entropy.as_ref())),
            (Output::TokenLoss.name(), both(a.token_loss.as_ref(), b.token_loss.as_ref())),
        ];
        let (a, b) = (a.gradient.lend(), b.gradient.lend());
        let gradients = G::arrays(&a).into_iter().zip(G::arrays(&b)).map(|(a, b)| Some(a.same_bits(&b)));
        let outputs: Vec<_> = of_tokens.into_iter().chain(G::ARRAYS.iter().copied().zip(gradients)).collect();
        let named = |wanted: bool| {
            outputs.iter().filter(|(_, same)| *same == Some(wanted)).map(|(output, _)| *output).collect()
        };
        Self { same: named(true), other: named(false) }
    }

    /// All that were compared.
    pub fn outputs(&self) -> impl Iterator<Item = &'static str> {
        self.same.iter().chain(&self.other).copied()
    }
}

/// Whether two outputs have the same bits; `None` where one is lacking.
fn both<D: Dimension>(a: Option<&FloatArray<D>>, b: Option<&FloatArray<D>>) -> Option<bool> {
    a.zip(b).map(|(a, b)| a.same_bits(b))
}
