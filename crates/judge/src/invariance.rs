//! Whether an implementation gives the same bits on another number of devices.

use ndarray::Ix2;

use super::tolerance::Output;
use assay_core::problem::{Candidate, FloatArray, HeadCandidate};

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
    pub fn between(a: &Candidate, b: &Candidate) -> Self {
        Self::of([
            (Output::Loss, Some(a.loss.same_bits(&b.loss))),
            (Output::Logp, both(a.logp.as_ref(), b.logp.as_ref())),
            (Output::Entropy, both(a.entropy.as_ref(), b.entropy.as_ref())),
            (Output::TokenLoss, both(a.token_loss.as_ref(), b.token_loss.as_ref())),
            (Output::Dlogits, Some(a.dlogits.same_bits(&b.dlogits))),
        ])
    }

    /// The same of the LM head with the loss.
    pub fn between_heads(a: &HeadCandidate, b: &HeadCandidate) -> Self {
        Self::of([
            (Output::Loss, Some(a.loss.same_bits(&b.loss))),
            (Output::Logp, both(a.logp.as_ref(), b.logp.as_ref())),
            (Output::Entropy, both(a.entropy.as_ref(), b.entropy.as_ref())),
            (Output::TokenLoss, both(a.token_loss.as_ref(), b.token_loss.as_ref())),
            (Output::Dhidden, Some(a.dhidden.same_bits(&b.dhidden))),
            (Output::DlmHead, Some(a.dlm_head.same_bits(&b.dlm_head))),
        ])
    }

    /// All that were compared.
    pub fn outputs(&self) -> impl Iterator<Item = &'static str> {
        self.same.iter().chain(&self.other).copied()
    }

    fn of<const N: usize>(outputs: [(Output, Option<bool>); N]) -> Self {
        let named = |wanted: bool| {
            outputs.iter().filter(|(_, same)| *same == Some(wanted)).map(|(output, _)| output.name()).collect()
        };
        Self { same: named(true), other: named(false) }
    }
}

/// Whether two outputs have the same bits; `None` where one is lacking.
fn both(a: Option<&FloatArray<Ix2>>, b: Option<&FloatArray<Ix2>>) -> Option<bool> {
    a.zip(b).map(|(a, b)| a.same_bits(b))
}

#[cfg(test)]
mod tests {
    use ndarray::{arr0, arr2, arr3};

    use super::*;

    fn candidate(loss: f32, logp: Option<f32>, dlogit: f32) -> Candidate {
        Candidate {
            loss: arr0(loss).into(),
            dlogits: arr3(&[[[dlogit]]]).into(),
            logp: logp.map(|logp| arr2(&[[logp]]).into()),
            entropy: None,
            token_loss: None,
            metrics: None,
        }
    }

    #[test]
    fn bits_are_compared_not_values_and_only_where_both_have_the_output() {
        let one = candidate(0.0, Some(f32::NAN), 1.0);
        let other = candidate(-0.0, Some(f32::NAN), 1.0);
        let compared = Invariance::between(&one, &other);
        assert_eq!((compared.same, compared.other), (vec!["logp", "dlogits"], vec!["loss"]));
        let without = Invariance::between(&one, &candidate(0.0, None, 2.0));
        assert_eq!((without.same, without.other), (vec!["loss"], vec!["dlogits"]));
    }
}
