//! Whether an implementation gives the same bits on another number of devices.

use serde::Serialize;

use super::tolerance::Output;
use crate::problem::Candidate;

/// Which outputs of one run have the bits of another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Invariance {
    /// Outputs with the same bits.
    pub same: Vec<&'static str>,
    /// Outputs with others.
    pub other: Vec<&'static str>,
}

impl Invariance {
    /// Compares what two runs on one problem both returned. A NaN has other bits than anything.
    pub fn between(a: &Candidate, b: &Candidate) -> Self {
        let outputs = [
            (Output::Loss, Some(a.loss == b.loss)),
            (Output::Logp, a.logp.as_ref().zip(b.logp.as_ref()).map(|(a, b)| a == b)),
            (Output::Entropy, a.entropy.as_ref().zip(b.entropy.as_ref()).map(|(a, b)| a == b)),
            (Output::TokenLoss, a.token_loss.as_ref().zip(b.token_loss.as_ref()).map(|(a, b)| a == b)),
            (Output::Dlogits, Some(a.dlogits == b.dlogits)),
        ];
        let named = |wanted: bool| {
            outputs.iter().filter(|(_, same)| *same == Some(wanted)).map(|(output, _)| output.name()).collect()
        };
        Self { same: named(true), other: named(false) }
    }
}
