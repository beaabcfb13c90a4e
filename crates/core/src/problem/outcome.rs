use ndarray::{Axis, Dimension, Ix0, Ix2, Ix3, IxDyn, RemoveAxis, arr0, concatenate};
use serde::Serialize;

use super::{Dtype, FloatArray, FloatView, Sequences};

/// The complete result of a batch, from the reference or one of this project's kernels.
///
/// `gradient` is dlogits for a [`super::Problem`] and a [`HeadGradient`] for a [`super::HeadProblem`]. Each array has the dtype in
/// which the implementation computed it, so that the judge knows how it was rounded. Masked tokens have 0 in every array.
#[derive(Clone, Debug)]
pub struct Outcome<G = FloatArray<Ix3>> {
    /// The loss, a scalar.
    pub loss: FloatArray<Ix0>,
    /// The log-probability of each sampled token, `[B,T]`, nats.
    pub logp: FloatArray<Ix2>,
    /// The log-probabilities of each token's other ids, `[B,T,K−1]`, nats, if the spec has several [ids per
    /// token](crate::spec::LossSpec::ids_per_token).
    pub logp_of_others: Option<FloatArray<Ix3>>,
    /// The entropy of each token's distribution, `[B,T]`, nats.
    pub entropy: FloatArray<Ix2>,
    /// The policy term plus `beta · kl` of each token, `[B,T]`, before mask and normalizer, without the entropy bonus.
    pub token_loss: FloatArray<Ix2>,
    /// The gradient: for logits `[B,T,V]` it is `∂loss / ∂logits`, entropy bonus included.
    pub gradient: G,
    /// The means that trainers log.
    pub metrics: Metrics,
}

/// The gradient of the loss with respect to hidden states and an LM head, whose product are the logits.
#[derive(Clone, Debug)]
pub struct HeadGradient {
    /// The gradient `∂loss / ∂hidden`, `[B,T,H]`, entropy bonus included; 0 for a masked token.
    pub dhidden: FloatArray<Ix3>,
    /// The gradient `∂loss / ∂lm_head`, `[H,V]` or `[V,H]` as the problem's `lm_head`.
    pub dlm_head: FloatArray<Ix2>,
    /// The dtype to which dlogits were rounded before the two products.
    pub dlogits_dtype: Dtype,
}

/// A borrowed [`HeadGradient`], which is not copied to be judged.
#[derive(Clone, Debug)]
pub struct HeadGradientView<'a> {
    /// The gradient `∂loss / ∂hidden`, `[B,T,H]`.
    pub dhidden: FloatView<'a, Ix3>,
    /// The gradient `∂loss / ∂lm_head`, `[H,V]` or `[V,H]`.
    pub dlm_head: FloatView<'a, Ix2>,
    /// The dtype to which dlogits were rounded before the two products.
    pub dlogits_dtype: Dtype,
}

/// The gradient of a loss by its input, as a list of named arrays: dlogits, a [`HeadGradient`], or `()`.
///
/// As large as the logits or the head, it is borrowed to be judged.
pub trait Gradient: Clone + Send + Sync {
    /// The gradient with its arrays borrowed.
    type View<'a>: Clone;
    /// The names of the arrays. The first has the extents `[B,T,…]`, a second one those of a head.
    const ARRAYS: &'static [&'static str];
    /// The extents of the first array.
    const EXTENTS: &'static str;

    /// Borrows the gradient without copying it.
    fn lend(&self) -> Self::View<'_>;

    /// Borrows the arrays of a borrowed gradient, in the order of [`ARRAYS`](Self::ARRAYS).
    fn arrays<'v>(view: &'v Self::View<'_>) -> Vec<FloatView<'v, IxDyn>>;

    /// Returns the dtype to which dlogits were rounded before the products with a head; `None` without a head.
    fn dlogits_dtype(_view: &Self::View<'_>) -> Option<Dtype> {
        None
    }

    /// Makes a borrowed gradient of borrowed [`ARRAYS`](Self::ARRAYS). With a head, `dlogits_dtype` is the dtype of the
    /// first array unless it is given.
    ///
    /// # Panics
    /// If an array is missing or has another rank.
    fn view_from(arrays: Vec<FloatView<'_, IxDyn>>, dlogits_dtype: Option<Dtype>) -> Self::View<'_>;

    /// Makes a gradient of [`ARRAYS`](Self::ARRAYS), as [`view_from`](Self::view_from).
    ///
    /// # Panics
    /// If an array is missing or has another rank.
    fn from_arrays(arrays: Vec<FloatArray<IxDyn>>, dlogits_dtype: Option<Dtype>) -> Self;

    /// Copies the arrays of a borrowed gradient.
    fn to_owned(view: &Self::View<'_>) -> Self {
        let arrays = Self::arrays(view).iter().map(FloatView::to_owned).collect();
        Self::from_arrays(arrays, Self::dlogits_dtype(view))
    }
}

impl Gradient for () {
    type View<'a> = ();
    const ARRAYS: &'static [&'static str] = &[];
    const EXTENTS: &'static str = "nothing";

    fn lend(&self) {}

    fn arrays((): &()) -> Vec<FloatView<'_, IxDyn>> {
        Vec::new()
    }

    fn view_from(_: Vec<FloatView<'_, IxDyn>>, _: Option<Dtype>) {}

    fn from_arrays(_: Vec<FloatArray<IxDyn>>, _: Option<Dtype>) {}
}

/// Moves a gradient's arrays out of a list.
fn taken<A, const N: usize>(arrays: Vec<A>) -> [A; N] {
    arrays.try_into().ok().expect("as many arrays as the gradient has")
}

impl Gradient for FloatArray<Ix3> {
    type View<'a> = FloatView<'a, Ix3>;
    const ARRAYS: &'static [&'static str] = &["dlogits"];
    const EXTENTS: &'static str = "[B,T,V]";

    fn lend(&self) -> FloatView<'_, Ix3> {
        self.view()
    }

    fn arrays<'v>(view: &'v FloatView<'_, Ix3>) -> Vec<FloatView<'v, IxDyn>> {
        vec![view.view().into_dyn()]
    }

    fn view_from(arrays: Vec<FloatView<'_, IxDyn>>, _: Option<Dtype>) -> FloatView<'_, Ix3> {
        let [dlogits] = taken(arrays);
        dlogits.into_rank()
    }

    fn from_arrays(arrays: Vec<FloatArray<IxDyn>>, _: Option<Dtype>) -> Self {
        let [dlogits] = taken(arrays);
        dlogits.into_rank()
    }
}

impl Gradient for HeadGradient {
    type View<'a> = HeadGradientView<'a>;
    const ARRAYS: &'static [&'static str] = &["dhidden", "dlm_head"];
    const EXTENTS: &'static str = "[B,T,H]";

    fn lend(&self) -> HeadGradientView<'_> {
        let Self { dhidden, dlm_head, dlogits_dtype } = self;
        HeadGradientView { dhidden: dhidden.view(), dlm_head: dlm_head.view(), dlogits_dtype: *dlogits_dtype }
    }

    fn arrays<'v>(view: &'v HeadGradientView<'_>) -> Vec<FloatView<'v, IxDyn>> {
        vec![view.dhidden.view().into_dyn(), view.dlm_head.view().into_dyn()]
    }

    fn dlogits_dtype(view: &HeadGradientView<'_>) -> Option<Dtype> {
        Some(view.dlogits_dtype)
    }

    fn view_from(arrays: Vec<FloatView<'_, IxDyn>>, dlogits_dtype: Option<Dtype>) -> HeadGradientView<'_> {
        let [dhidden, dlm_head] = taken(arrays);
        let dlogits_dtype = dlogits_dtype.unwrap_or(dhidden.dtype());
        HeadGradientView { dhidden: dhidden.into_rank(), dlm_head: dlm_head.into_rank(), dlogits_dtype }
    }

    fn from_arrays(arrays: Vec<FloatArray<IxDyn>>, dlogits_dtype: Option<Dtype>) -> Self {
        let [dhidden, dlm_head] = taken(arrays);
        let dlogits_dtype = dlogits_dtype.unwrap_or(dhidden.dtype());
        Self { dhidden: dhidden.into_rank(), dlm_head: dlm_head.into_rank(), dlogits_dtype }
    }
}

/// Means over the unmasked tokens, as trainers log them; all 0 for a batch without any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Metrics {
    /// The fraction of tokens with `ρ < 1 − epsilon_low` and `A < 0`.
    pub clip_low: f64,
    /// The fraction of tokens with `ρ > 1 + epsilon_high` and `A > 0`.
    pub clip_high: f64,
    /// The fraction of tokens that are clipped on either side.
    pub clip_region: f64,
    /// The mean of the KL estimate with its importance weight and without `beta`; `None` without a KL term.
    pub kl_mean: Option<f64>,
    /// The mean entropy of the tokens, nats.
    pub entropy_mean: f64,
    /// The mean ratio `ρ` of the tokens.
    pub ratio_mean: f64,
}

/// The result that is judged: of one of this project's kernels, of a user's program, or read from a file.
///
/// Only `gradient` is always there, and may be `()`: an implementation without one is judged on the remaining outputs.
///
/// ```
/// # use assay_core as assay;
/// use assay::problem::{Candidate, FloatArray};
/// use ndarray::{Array3, arr0, arr2};
///
/// let candidate = Candidate {
///     loss: Some(arr0(-0.25_f32).into()),
///     gradient: FloatArray::from(Array3::<f32>::zeros((1, 2, 4))),
///     logp: Some(arr2(&[[-1.5_f32, -0.5]]).into()),
///     logp_of_others: None,
///     entropy: None,
///     token_loss: None,
///     metrics: None,
/// };
/// assert_eq!(candidate.lend().gradient.shape(), [1, 2, 4]);
/// ```
#[derive(Clone, Debug)]
pub struct Candidate<G = FloatArray<Ix3>> {
    /// The loss, a scalar; `None` if there is none, as for [logp from
    /// cotangents](crate::spec::LossSpec::is_from_cotangents).
    pub loss: Option<FloatArray<Ix0>>,
    /// The gradient: for logits `[B,T,V]` it is `∂loss / ∂logits`.
    pub gradient: G,
    /// The log-probability of each sampled token, `[B,T]`, nats.
    pub logp: Option<FloatArray<Ix2>>,
    /// The log-probabilities of each token's other ids, `[B,T,K−1]`, nats, if the spec has several [ids per
    /// token](crate::spec::LossSpec::ids_per_token).
    pub logp_of_others: Option<FloatArray<Ix3>>,
    /// The entropy of each token's distribution, `[B,T]`, nats.
    pub entropy: Option<FloatArray<Ix2>>,
    /// The policy term plus `beta · kl` of each token, `[B,T]`.
    pub token_loss: Option<FloatArray<Ix2>>,
    /// The means that trainers log.
    pub metrics: Option<Metrics>,
}

/// The candidate of a [`super::HeadProblem`], with a [`HeadGradient`].
pub type HeadCandidate = Candidate<HeadGradient>;

impl<G> Candidate<G> {
    /// Borrows the gradient, and copies the scalars and per-token arrays.
    pub fn lend(&self) -> Candidate<G::View<'_>>
    where
        G: Gradient,
    {
        self.with_gradient(self.gradient.lend())
    }

    /// Copies a candidate whose gradient is borrowed.
    pub fn from_lent(lent: &Candidate<G::View<'_>>) -> Self
    where
        G: Gradient,
    {
        lent.with_gradient(G::to_owned(&lent.gradient))
    }

    /// Copies the other outputs, and puts `gradient` in the place of the candidate's own.
    pub fn with_gradient<H>(&self, gradient: H) -> Candidate<H> {
        Candidate {
            loss: self.loss.clone(),
            gradient,
            logp: self.logp.clone(),
            logp_of_others: self.logp_of_others.clone(),
            entropy: self.entropy.clone(),
            token_loss: self.token_loss.clone(),
            metrics: self.metrics,
        }
    }
}

impl Candidate {
    /// Joins the outcomes `parts` of a batch that was cut between its [`Sequences`]: losses are added, and rows, or the
    /// tokens of packed sequences, are concatenated. Metrics are left out.
    ///
    /// # Panics
    /// Where there is no part, or one is of another width.
    #[must_use]
    pub fn from_parts(sequences: &Sequences, parts: &[Self]) -> Self {
        type PerToken = Option<FloatArray<Ix2>>;
        // Rows are concatenated along the batch, tokens of packed sequences along the one row.
        let axis = Axis(usize::from(sequences.packed().is_some()));
        let per_token = |of: fn(&Self) -> &PerToken| {
            // An output that any part lacks is missing from the whole.
            let all: Option<Vec<&FloatArray<Ix2>>> = parts.iter().map(|part| of(part).as_ref()).collect();
            all.map(|all| joined(axis, &all))
        };
        let others: Option<Vec<&FloatArray<Ix3>>> = parts.iter().map(|part| part.logp_of_others.as_ref()).collect();
        let losses: Option<Vec<f64>> = parts.iter().map(|part| part.loss.as_ref().map(FloatArray::value)).collect();
        Self {
            loss: losses.map(|losses| arr0(losses.iter().sum::<f64>()).into()),
            gradient: joined(axis, &parts.iter().map(|part| &part.gradient).collect::<Vec<_>>()),
            logp: per_token(|part| &part.logp),
            logp_of_others: others.map(|others| joined(axis, &others)),
            entropy: per_token(|part| &part.entropy),
            token_loss: per_token(|part| &part.token_loss),
            metrics: None,
        }
    }
}

/// Concatenates arrays along `axis`, in the dtype of the first.
///
/// # Panics
/// If there is no array, or their other extents differ.
pub fn joined<D: Dimension + RemoveAxis>(axis: Axis, arrays: &[&FloatArray<D>]) -> FloatArray<D> {
    let values: Vec<_> = arrays.iter().map(|array| array.to_f64()).collect();
    let views: Vec<_> = values.iter().map(|values| values.view()).collect();
    let values = concatenate(axis, &views).expect("parts of one width");
    FloatArray::rounded_from(&values, arrays[0].dtype())
}

impl<G> From<Outcome<G>> for Candidate<G> {
    fn from(outcome: Outcome<G>) -> Self {
        Self {
            loss: Some(outcome.loss),
            gradient: outcome.gradient,
            logp: Some(outcome.logp),
            logp_of_others: outcome.logp_of_others,
            entropy: Some(outcome.entropy),
            token_loss: Some(outcome.token_loss),
            metrics: Some(outcome.metrics),
        }
    }
}
