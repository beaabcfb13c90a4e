//! Twins: one batch padded and [packed](assay_core::problem::Sequences::Packed), for what must be the same of both.

use ndarray::{Array2, Ix2, Ix3};

use super::invariance::Invariance;
use super::judgeable::Judgeable;
use assay_core::implementation::Workload;
use assay_core::problem::{Candidate, FloatArray, HeadCandidate, HeadGradient, HeadProblem, Problem};
use assay_core::spec::{LossSpec, Objective, RolloutSource};
use assay_reference::{HeadReference, Reference};

/// A batch, padded and packed, and a loss that is the same of both.
pub struct Twins<P = Problem> {
    /// Without a mean over the padded width, which the packed one does not have: the width is written out.
    pub spec: LossSpec,
    /// `[B,T]`
    pub padded: P,
    /// `[1,N]`
    pub packed: P,
    /// Where each token of the packed one is in the padded one.
    pub places: Vec<(usize, usize)>,
}

impl<P: Packable> Twins<P> {
    /// Of `padded`; `None` where `spec` reads weights of masked tokens, of which the packed one has fewer.
    pub fn of(spec: &LossSpec, padded: &P) -> Option<Self> {
        let given = spec.rollout.as_ref().is_some_and(|rollout| rollout.source == RolloutSource::Given);
        let masked_too = matches!(&spec.objective, Objective::Vespo(vespo) if vespo.weights_of_masked_tokens);
        let (packed, places) = padded.packed();
        let spec = spec.clone().with_width(padded.width());
        (!(given && masked_too)).then(|| Self { spec, padded: padded.clone(), packed, places })
    }

    fn tokens(&self, array: &FloatArray<Ix2>) -> FloatArray<Ix2> {
        let at = self.places.iter().map(|&(b, t)| array.at(b, t)).collect();
        let values = Array2::from_shape_vec((1, self.places.len()), at).expect("one entry a token");
        FloatArray::rounded_from(&values, array.dtype())
    }
}

impl<P: Packable> Twin<P> for Twins<P> {
    fn padded(&self) -> &P {
        &self.padded
    }

    fn between(&self, of_packed: &Candidate<P::Gradient>, of_padded: &Candidate<P::Gradient>) -> Invariance {
        let per_token = |array: &Option<FloatArray<Ix2>>| array.as_ref().map(|array| self.tokens(array));
        let at_places = Candidate {
            loss: of_padded.loss.clone(),
            gradient: P::at_places(&of_padded.gradient, &self.places),
            logp: per_token(&of_padded.logp),
            logp_of_others: of_padded.logp_of_others.as_ref().map(|others| others.at_places(&self.places)),
            entropy: per_token(&of_padded.entropy),
            token_loss: per_token(&of_padded.token_loss),
            metrics: of_padded.metrics,
        };
        Invariance::between(of_packed, &at_places)
    }
}

/// The padded twin of a packed batch.
pub trait Twin<P: Workload> {
    /// It.
    fn padded(&self) -> &P;

    /// Which outputs of the packed batch have the bits of the padded one's at the places of its tokens.
    fn between(&self, of_packed: &Candidate<P::Gradient>, of_padded: &Candidate<P::Gradient>) -> Invariance;
}

/// A problem that can be packed.
pub trait Packable: Judgeable {
    /// It packed, and where each token was.
    fn packed(&self) -> (Self, Vec<(usize, usize)>);

    /// `T`.
    fn width(&self) -> usize;

    /// What the reference comes to.
    fn outcome(reference: &Self::Reference<'_>) -> Candidate<Self::Gradient>;

    /// The gradient of the tokens at `places`.
    fn at_places(gradient: &Self::Gradient, places: &[(usize, usize)]) -> Self::Gradient;
}

impl Packable for Problem {
    fn packed(&self) -> (Self, Vec<(usize, usize)>) {
        self.pack()
    }

    fn width(&self) -> usize {
        self.mask.ncols()
    }

    fn outcome(reference: &Reference) -> Candidate {
        reference.outcome().into()
    }

    fn at_places(gradient: &FloatArray<Ix3>, places: &[(usize, usize)]) -> FloatArray<Ix3> {
        gradient.at_places(places)
    }
}

impl Packable for HeadProblem {
    fn packed(&self) -> (Self, Vec<(usize, usize)>) {
        self.pack()
    }

    fn width(&self) -> usize {
        self.mask.ncols()
    }

    fn outcome(reference: &HeadReference) -> HeadCandidate {
        reference.outcome().into()
    }

    fn at_places(gradient: &HeadGradient, places: &[(usize, usize)]) -> HeadGradient {
        HeadGradient {
            dhidden: gradient.dhidden.at_places(places),
            dlm_head: gradient.dlm_head.clone(),
            dlogits_dtype: gradient.dlogits_dtype,
        }
    }
}
