//! The CPU kernel: one walk over the rows, dlogits written over the logits.
//!
//! Arithmetic: each element in f32 (`m − x`, `exp`, the products of dlogits), every sum and everything that is done once
//! a token in f64, outputs rounded once. Extra memory: one or two rows of f32 a thread. Rows are independent and the
//! loss is summed in row order, so results have the same bits for any number of threads.

mod reduction;
mod row;

use half::{bf16, f16};
use ndarray::{Array2, Array3, Ix3, arr0};
use rayon::prelude::*;

use crate::implementation::{Implementation, RunError, Unavailable, Unsupported};
use crate::problem::{Candidate, Dtype, FloatArray, Outcome, Problem, Shape};
use crate::spec::LossSpec;
use row::{Element, RowKernel, RowResult};

/// The CPU kernel. See [the module](self).
pub struct Native;

impl Implementation for Native {
    fn id(&self) -> &'static str {
        "native"
    }

    fn summary(&self) -> &'static str {
        "CPU, f32 elements and f64 sums, rows over threads, dlogits in place"
    }

    fn class(&self) -> &'static str {
        "native"
    }

    fn available(&self) -> Result<(), Unavailable> {
        Ok(())
    }

    fn supports(&self, spec: &LossSpec, _: Shape, dtype: Dtype, devices: usize) -> Result<(), Unsupported> {
        let unsupported = |field, given, supported: &str| {
            Err(Unsupported { implementation: self.id().into(), field, given, supported: supported.into() })
        };
        if dtype == Dtype::F64 {
            return unsupported("logits dtype", dtype.to_string(), "f32, bf16 and f16");
        }
        if devices != 1 {
            return unsupported("device count", devices.to_string(), "1");
        }
        if let Err((field, given)) = crate::kernels::family::beyond_kernels(spec) {
            return unsupported(field, given, "the PPO-clip family");
        }
        Ok(())
    }

    fn run(&self, spec: &LossSpec, problem: Problem, devices: usize) -> Result<Candidate, RunError> {
        let shape = problem.check(spec)?;
        self.supports(spec, shape, problem.logits.dtype(), devices)?;
        let Problem { logits, ids, mask, advantages, old_logp, ref_logp, extra: _ } = problem;
        let batch = Batch { ids, mask, advantages, old_logp, ref_logp };
        let outcome = match logits {
            FloatArray::F64(_) => unreachable!("`supports` rejects f64"),
            FloatArray::F32(logits) => forward_backward::<f32>(spec, &batch, logits),
            FloatArray::Bf16(logits) => forward_backward::<bf16>(spec, &batch, logits),
            FloatArray::F16(logits) => forward_backward::<f16>(spec, &batch, logits),
        };
        Ok(outcome.into())
    }
}

/// A problem without its logits.
struct Batch {
    ids: Array2<i64>,
    mask: Array2<bool>,
    advantages: crate::problem::Advantages,
    old_logp: Option<Array2<f64>>,
    ref_logp: Option<Array2<f64>>,
}

/// Evaluates a checked batch and writes dlogits over `logits`.
fn forward_backward<E: Element>(spec: &LossSpec, batch: &Batch, mut logits: Array3<E>) -> Outcome
where
    FloatArray<Ix3>: From<Array3<E>>,
{
    let (rows, tokens, vocab) = logits.dim();
    let weights = reduction::row_weights(spec.reduction, &batch.mask);
    let count = batch.mask.iter().filter(|&&counts| counts).count();
    let kernel = RowKernel::new(spec, count);
    let results: Vec<Option<RowResult>> = logits
        .as_slice_mut()
        .expect("checked: dense row-major")
        .par_chunks_mut(vocab)
        .enumerate()
        .map_init(
            || kernel.scratch(vocab),
            |scratch, (i, row)| {
                let (b, t) = (i / tokens, i % tokens);
                if !batch.mask[[b, t]] {
                    row.fill(E::from_f32(0.0));
                    return None;
                }
                let token = row::TokenInputs {
                    id: usize::try_from(batch.ids[[b, t]]).expect("checked: 0 ≤ id < V"),
                    advantage: batch.advantages.at(b, t),
                    old_logp: batch.old_logp.as_ref().map(|a| a[[b, t]]),
                    ref_logp: batch.ref_logp.as_ref().map(|a| a[[b, t]]),
                    weight: weights[b],
                };
                Some(kernel.run(row, &token, scratch))
            },
        )
        .collect();

    let metrics = reduction::metrics(spec, &results, count);
    let loss = reduction::loss(spec, &results, &weights, tokens, metrics.entropy_mean);
    let per_token = |value: fn(&RowResult) -> f64| -> FloatArray<_> {
        let values = results.iter().map(|result| result.as_ref().map_or(0.0, value) as f32).collect();
        Array2::from_shape_vec((rows, tokens), values).expect("one result a token").into()
    };
    Outcome {
        loss: arr0(loss as f32).into(),
        logp: per_token(|row| row.logp),
        entropy: per_token(|row| row.entropy),
        token_loss: per_token(|row| row.token_loss),
        dlogits: logits.into(),
        metrics,
    }
}
