//! Reads the outputs that a kernel returned as a candidate for the judge.

use std::ops::Range;

use ndarray::{Ix0, Ix2, Ix3, IxDyn};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyDictMethods, PyMapping};

use crate::error;
use crate::memory::{OutputArray, requires_grad};
use assay::implementation::Workload;
use assay::problem::{Candidate, Dtype, Gradient};
use assay::spec::LossSpec;
use assay::text::nearest;

/// The optional outputs with one value for each token.
const OF_TOKENS: [&str; 3] = ["logp", "entropy", "token_loss"];

/// The entry that names the dtype to which dlogits were rounded before the two products with an LM head.
const DLOGITS_DTYPE: &str = "dlogits_dtype";

/// Lists the arrays of the gradient for a problem: their names, their extents, and what these mean.
fn gradient_arrays<P: Workload>(problem: &P) -> Vec<(&'static str, Vec<usize>, String)> {
    let head = P::head_form(problem.form());
    let rows = if head.is_some() { "hidden states" } else { "logits" };
    let meanings = [format!("{} of the {rows}", P::Gradient::EXTENTS)].into_iter();
    let meanings = meanings.chain(head.map(|head| head.layout.name().into()));
    let arrays = P::Gradient::ARRAYS.iter().zip(problem.arrays()).zip(meanings);
    arrays.map(|((name, like), meaning)| (*name, like.shape().to_vec(), meaning)).collect()
}

/// The outputs of one call, each with the shape that the problem requires.
pub(crate) struct Returned {
    loss: Option<OutputArray>,
    /// The arrays of the gradient; empty if none was returned.
    gradient: Vec<OutputArray>,
    /// The outputs of the tokens, in the order of [`OF_TOKENS`].
    of_tokens: [Option<OutputArray>; 3],
    dlogits_dtype: Option<Dtype>,
}

impl Returned {
    /// Reads `outputs`, a mapping of names to arrays, without a copy. The loss may be absent if `spec` is defined by
    /// cotangents, and the gradient if `forward` is set and `logp` is there.
    ///
    /// # Errors
    /// `OutputError` naming the first output that is missing, has no place, or is no such array.
    pub(crate) fn read<P: Workload>(
        spec: &LossSpec,
        problem: &P,
        outputs: &Bound<'_, PyAny>,
        forward: bool,
    ) -> PyResult<Self> {
        let py = outputs.py();
        let gradient = gradient_arrays(problem);
        let required = || ["loss"].into_iter().chain(gradient.iter().map(|(name, ..)| *name));
        let known: Vec<&str> = required().chain(OF_TOKENS).collect();
        let names = known.join(", ");
        let Ok(mapping) = outputs.cast::<PyMapping>() else {
            let given = format!("{} from the kernel", outputs.get_type().qualname()?);
            return Err(error::output_error(py, "outputs", given, format!("a dict of {names}")));
        };
        // Copy the mapping into a dict, so that each name is looked up only once in the kernel's own type.
        let dictionary = PyDict::new(py);
        dictionary.update(mapping)?;
        // An unknown name is refused, as a misspelt output would silently not be judged.
        for (name, _) in &dictionary {
            let name = name.to_string();
            let is_said_of_a_head = name == DLOGITS_DTYPE && gradient.len() == 2;
            if !known.contains(&name.as_str()) && !is_said_of_a_head {
                let meant = nearest(&name, known.iter().copied());
                let meant = meant.map_or(String::new(), |meant| format!(": is `{meant}` meant?"));
                return Err(error::output_error(
                    py,
                    &name,
                    "an output that is not known",
                    format!("one of {names}{meant}"),
                ));
            }
        }
        // NumPy has no bf16: for such problems 16-bit integers are read as its bits.
        let bits = problem.dtype() == Dtype::Bf16;
        let optional = |name: &str| match dictionary.get_item(name)? {
            // A loss that is ready for `backward` is what a trainer has: its value is read.
            Some(object) if name == "loss" && requires_grad(&object) => {
                OutputArray::read(name, &object.call_method0("detach")?, bits).map(Some)
            }
            Some(object) => OutputArray::read(name, &object, bits).map(Some),
            None => Ok(None),
        };
        let required = |name: &str| {
            optional(name)?.ok_or_else(|| error::output_error(py, name, "nothing", format!("a dict of {names}")))
        };
        let fits = |name: &str, seen: OutputArray, shape: &[usize], meaning: &str| {
            if seen.shape() == shape {
                return seen.expect_dense(py, name);
            }
            let (given, expected) = (format!("shape {:?}", seen.shape()), format!("{shape:?}, {meaning}"));
            Err(error::output_error(py, name, given, expected))
        };
        let has = |name: &str| dictionary.contains(name);
        // A loss that is given by cotangents has no value of its own: a kernel may return its logp instead.
        let loss = if spec.is_from_cotangents() { optional("loss")? } else { Some(required("loss")?) };
        if loss.is_none() {
            required("logp")?;
        }
        if let Some(loss) = loss.as_ref().filter(|loss| !matches!(loss.shape(), [] | [1])) {
            return Err(error::output_error(py, "loss", format!("shape {:?}", loss.shape()), "a scalar, [] or [1]"));
        }
        let loss = loss.map(|loss| loss.expect_dense(py, "loss")).transpose()?;
        // The gradient is required unless a forward pass will do; half of a gradient is an error.
        let mut arrays = Vec::new();
        let given = gradient.iter().map(|(name, ..)| has(name)).collect::<PyResult<Vec<bool>>>()?;
        if !(forward && has("logp")?) || given.contains(&true) {
            for (name, shape, meaning) in &gradient {
                arrays.push(fits(name, required(name)?, shape, meaning)?);
            }
        }
        let shape = <[usize; 2]>::from(problem.batch().ids.dim());
        let of_token = |name| optional(name)?.map(|seen| fits(name, seen, &shape, "[B,T]")).transpose();
        let of_ids = |name| match spec.ids_per_token {
            1 => of_token(name),
            top => {
                let shape = [shape[0], shape[1], top];
                optional(name)?.map(|seen| fits(name, seen, &shape, "[B,T,K] of the ids")).transpose()
            }
        };
        let [logp, entropy, token_loss] = OF_TOKENS;
        let dlogits_dtype = dictionary.get_item(DLOGITS_DTYPE)?.map(|said| {
            let dtype = said.to_string().parse::<Dtype>();
            dtype.map_err(|_| error::output_error(py, DLOGITS_DTYPE, format!("`{said}`"), "f64, f32, bf16 or f16"))
        });
        Ok(Self {
            loss,
            gradient: arrays,
            of_tokens: [of_ids(logp)?, of_token(entropy)?, of_token(token_loss)?],
            dlogits_dtype: dlogits_dtype.transpose()?,
        })
    }

    /// Whether there is a gradient.
    pub(crate) fn has_gradient(&self) -> bool {
        !self.gradient.is_empty()
    }

    /// Returns the candidate for the judge: the gradient is borrowed, and the outputs of the tokens are copied.
    pub(crate) fn candidate<P: Workload>(&self, problem: &P) -> Candidate<P::View<'_>> {
        let arrays = self.gradient.iter().map(|seen| seen.view(IxDyn(seen.shape()))).collect();
        self.forward(problem).with_gradient(P::Gradient::view_from(arrays, self.dlogits_dtype))
    }

    /// Returns the candidate without its gradient.
    pub(crate) fn forward<P: Workload>(&self, problem: &P) -> Candidate<()> {
        let (batch, tokens) = problem.batch().ids.dim();
        let of_token = |seen: &Option<OutputArray>| seen.as_ref().map(|seen| seen.view(Ix2(batch, tokens)).to_owned());
        let [logp, entropy, token_loss] = &self.of_tokens;
        // Several ids a token have logp as `[B,T,K]`, whose first column is that of the sampled id.
        let (logp, logp_of_others) = match logp.as_ref().map(|seen| (seen, seen.shape())) {
            Some((seen, &[batch, tokens, top])) => {
                let (first, others) = seen.view(Ix3(batch, tokens, top)).to_owned().first_and_others();
                (Some(first), others)
            }
            _ => (of_token(logp), None),
        };
        Candidate {
            loss: self.loss.as_ref().map(|loss| loss.view(Ix0()).to_owned()),
            gradient: (),
            logp,
            logp_of_others,
            entropy: of_token(entropy),
            token_loss: of_token(token_loss),
            metrics: None,
        }
    }

    /// Returns the addresses that each output occupies, by name.
    pub(crate) fn addresses<G: Gradient>(&self) -> Vec<(&'static str, Range<usize>)> {
        let gradient = G::ARRAYS.iter().copied().zip(&self.gradient);
        let of_tokens = OF_TOKENS.into_iter().zip(&self.of_tokens);
        let of_tokens = of_tokens.filter_map(|(name, seen)| Some((name, seen.as_ref()?)));
        let all = self.loss.iter().map(|loss| ("loss", loss)).chain(gradient).chain(of_tokens);
        all.map(|(name, seen)| (name, seen.addresses())).collect()
    }
}
