//! Twins: one batch padded and [packed](assay_core::problem::Sequences::Packed), for what must be the same of both.

use ndarray::{Array2, Ix2, Ix3};

use super::invariance::Invariance;
use super::judgeable::Judgeable;
use assay_core::problem::{Candidate, FloatArray, FloatView, Gradient, Problem};
use assay_core::spec::{LossSpec, Objective, RolloutSource};

/// A batch, padded and packed, and a loss that is the same of both.
pub struct Twins<P = Problem> {
    /// The loss, without a mean over the padded width, which the packed batch does not have: the width is written out.
    pub spec: LossSpec,
    /// The batch with a sequence in each row, `[B,T]`.
    pub padded: P,
    /// The batch with its sequences in one row, `[1,N]`.
    pub packed: P,
    /// The place in the padded batch of each token of the packed one.
    pub places: Vec<(usize, usize)>,
}

impl<P: Judgeable> Twins<P> {
    /// Makes the twins of `padded`; `None` where `spec` reads weights of masked tokens, of which the packed one has fewer.
    pub fn from_padded(spec: &LossSpec, padded: &P) -> Option<Self> {
        let given = spec.rollout.as_ref().is_some_and(|rollout| rollout.source == RolloutSource::Given);
        let masked_too = matches!(&spec.objective, Objective::Vespo(vespo) if vespo.weights_of_masked_tokens);
        let (packed, places) = padded.pack();
        let spec = spec.clone().with_width(padded.batch().mask.ncols());
        (!(given && masked_too)).then(|| Self { spec, padded: padded.clone(), packed, places })
    }

    /// Gathers the tokens of the packed batch from a gradient of the padded one.
    fn gradient(&self, of_padded: &P::Gradient) -> P::Gradient {
        let lent = of_padded.lend();
        let mut arrays: Vec<_> = P::Gradient::arrays(&lent).iter().map(FloatView::to_owned).collect();
        // Only the first array has tokens; the gradient of a head is that of the whole batch.
        let of_tokens: FloatArray<Ix3> = arrays.remove(0).into_rank();
        arrays.insert(0, of_tokens.at_places(&self.places).into_dyn());
        P::Gradient::from_arrays(arrays, P::Gradient::dlogits_dtype(&lent))
    }

    fn tokens(&self, array: &FloatArray<Ix2>) -> FloatArray<Ix2> {
        let at = self.places.iter().map(|&(b, t)| array.at(b, t)).collect();
        let values = Array2::from_shape_vec((1, self.places.len()), at).expect("one entry a token");
        FloatArray::rounded_from(&values, array.dtype())
    }

    /// Compares the outputs of the packed batch with those of the padded one at the places of its tokens.
    pub fn between(&self, of_packed: &Candidate<P::Gradient>, of_padded: &Candidate<P::Gradient>) -> Invariance {
        let per_token = |array: &Option<FloatArray<Ix2>>| array.as_ref().map(|array| self.tokens(array));
        let at_places = Candidate {
            loss: of_padded.loss.clone(),
            gradient: self.gradient(&of_padded.gradient),
            logp: per_token(&of_padded.logp),
            logp_of_others: of_padded.logp_of_others.as_ref().map(|others| others.at_places(&self.places)),
            entropy: per_token(&of_padded.entropy),
            token_loss: per_token(&of_padded.token_loss),
            metrics: of_padded.metrics,
        };
        Invariance::between(of_packed, &at_places)
    }
}
