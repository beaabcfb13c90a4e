//! Whether an implementation gives the same bits on another number of devices.

use ndarray::{Dimension, Ix3};

use super::gate::Output;
use assay_core::problem::{Candidate, FloatArray, HeadGradient};

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
            (Output::Loss, both(a.loss.as_ref(), b.loss.as_ref())),
            (Output::Logp, both(a.logp.as_ref(), b.logp.as_ref()).map(|same| same && others != Some(false))),
            (Output::Entropy, both(a.entropy.as_ref(), b.entropy.as_ref())),
            (Output::TokenLoss, both(a.token_loss.as_ref(), b.token_loss.as_ref())),
        ];
        let gradients = a.gradient.same_bits(&b.gradient).into_iter().map(|(output, same)| (output, Some(same)));
        let outputs: Vec<_> = of_tokens.into_iter().chain(gradients).collect();
        let named = |wanted: bool| {
            outputs.iter().filter(|(_, same)| *same == Some(wanted)).map(|(output, _)| output.name()).collect()
        };
        Self { same: named(true), other: named(false) }
    }

    /// All that were compared.
    pub fn outputs(&self) -> impl Iterator<Item = &'static str> {
        self.same.iter().chain(&self.other).copied()
    }
}

/// The gradient of a candidate, array by array.
pub trait Gradient {
    /// Which of its arrays have the bits of another's.
    fn same_bits(&self, other: &Self) -> Vec<(Output, bool)>;
}

impl Gradient for FloatArray<Ix3> {
    fn same_bits(&self, other: &Self) -> Vec<(Output, bool)> {
        vec![(Output::Dlogits, FloatArray::same_bits(self, other))]
    }
}

impl Gradient for HeadGradient {
    fn same_bits(&self, other: &Self) -> Vec<(Output, bool)> {
        vec![
            (Output::Dhidden, self.dhidden.same_bits(&other.dhidden)),
            (Output::DlmHead, self.dlm_head.same_bits(&other.dlm_head)),
        ]
    }
}

/// Whether two outputs have the same bits; `None` where one is lacking.
fn both<D: Dimension>(a: Option<&FloatArray<D>>, b: Option<&FloatArray<D>>) -> Option<bool> {
    a.zip(b).map(|(a, b)| a.same_bits(b))
}
