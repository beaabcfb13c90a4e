//! The CPU kernel: one walk over the rows of logits, dlogits written over them; two walks where tokens share a ratio.
//!
//! Arithmetic: each element in f32 (`m − x`, `exp`, the products of dlogits), every sum and everything that is done once
//! a token in f64, outputs rounded once. Extra memory: one or two rows of f32 a thread, one more where the spec changes
//! logits before their softmax. Rows of logits are independent, and what tokens share is summed in their order, so
//! results have the same bits for any number of threads.

mod head;
mod loss;
mod reduction;
mod row;

use half::{bf16, f16};
use ndarray::{Array2, Array3, Ix3, arr0};
use rayon::prelude::*;

use crate::implementation::{Implementation, RunError, Unavailable, Unsupported};
use crate::kernels::family::Reach;
use crate::kernels::rollout::Settled;
use crate::kernels::structure::{Input, Structure};
use crate::problem::{Candidate, Dtype, FloatArray, Outcome, Problem, Shape};
use crate::spec::{LossSpec, Objective};
use head::Head;
use loss::{Graded, Known, Loss};
use reduction::Weights;
use row::{Element, Gradients, Scores, Scratch, Softmaxes};

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
        match Reach::RowAndHead.expect(spec) {
            Ok(()) => Ok(()),
            Err(beyond) => unsupported(beyond.field, beyond.given, beyond.supported),
        }
    }

    fn run(&self, spec: &LossSpec, problem: Problem, devices: usize) -> Result<Candidate, RunError> {
        let shape = problem.check(spec)?;
        self.supports(spec, shape, problem.logits.dtype(), devices)?;
        let settled = Settled::of(spec, &problem);
        let Problem { logits, ids, advantages, extra, .. } = problem;
        let batch = Batch {
            spec,
            structure: Structure::of(spec),
            ids,
            advantage: Array2::from_shape_fn(settled.mask.dim(), |(b, t)| advantages.at(b, t)),
            head: Head::of(spec, extra.bias.as_ref(), shape.vocab),
            weights: Weights::of(spec, &settled.mask),
            settled,
        };
        let outcome = match logits {
            FloatArray::F64(_) => unreachable!("`supports` rejects f64"),
            FloatArray::F32(logits) => batch.forward_backward::<f32>(logits),
            FloatArray::Bf16(logits) => batch.forward_backward::<bf16>(logits),
            FloatArray::F16(logits) => batch.forward_backward::<f16>(logits),
        };
        Ok(outcome.into())
    }
}

/// A checked problem without its logits.
struct Batch<'s> {
    spec: &'s LossSpec,
    structure: Structure,
    ids: Array2<i64>,
    advantage: Array2<f64>,
    settled: Settled,
    weights: Weights,
    /// What comes before the softmax, if anything does.
    head: Option<Head>,
}

/// What a thread needs of its own.
struct Room {
    softmax: Scratch,
    /// Logits after the head.
    h: Vec<f32>,
}

impl Batch<'_> {
    /// Evaluates the batch and writes dlogits over `logits`.
    fn forward_backward<E: Element>(&self, mut logits: Array3<E>) -> Outcome
    where
        FloatArray<Ix3>: From<Array3<E>>,
    {
        let (_, tokens, vocab) = logits.dim();
        let rows = logits.as_slice_mut().expect("checked: dense row-major");
        let loss = Loss::of(self.spec, self.structure, [self.ids.nrows(), tokens]);
        let softmaxes = Softmaxes::of(self.spec);
        let room = || Room { softmax: softmaxes.scratch(vocab), h: Vec::new() };
        let input = |input: Input, at: (usize, usize)| self.settled.input(input).map(|values| values[at]);
        let place = |i: usize| (i / tokens, i % tokens);

        let graded: Vec<Option<Graded>> = if self.structure.couples_rows() {
            let scores: Vec<Option<Scores>> = rows
                .par_chunks(vocab)
                .enumerate()
                .map_init(room, |room, (i, row)| {
                    let at = place(i);
                    self.settled.mask[at].then(|| self.score(softmaxes, row, at, room))
                })
                .collect();
            let of_row = |(b, scores): (usize, &[Option<Scores>])| {
                let there = scores.iter().enumerate().filter_map(|(t, scores)| Some((self.known((b, t)), (*scores)?)));
                let mut graded = loss.grade(&there.collect::<Vec<_>>(), input).into_iter();
                scores.iter().map(|scores| scores.and_then(|_| graded.next())).collect::<Vec<_>>()
            };
            let graded: Vec<Option<Graded>> = scores.chunks(tokens).enumerate().flat_map(of_row).collect();
            rows.par_chunks_mut(vocab).enumerate().for_each_init(room, |room, (i, row)| {
                match (&scores[i], &graded[i]) {
                    (Some(scores), Some(graded)) => {
                        self.write(softmaxes, row, place(i), room, Pass::Second, (scores, graded));
                    }
                    _ => row.fill(E::from_f32(0.0)),
                }
            });
            graded
        } else {
            rows.par_chunks_mut(vocab)
                .enumerate()
                .map_init(room, |room, (i, row)| {
                    let at = place(i);
                    if !self.settled.mask[at] {
                        row.fill(E::from_f32(0.0));
                        return None;
                    }
                    let scores = self.score(softmaxes, row, at, room);
                    let graded = loss.grade(&[(self.known(at), scores)], input).pop()?;
                    self.write(softmaxes, row, at, room, Pass::Only, (&scores, &graded));
                    Some(graded)
                })
                .collect()
        };
        let graded = Array2::from_shape_vec(self.ids.dim(), graded).expect("one entry a token");
        self.outcome(&graded, logits.into())
    }

    fn id(&self, at: (usize, usize)) -> usize {
        usize::try_from(self.ids[at]).expect("checked: 0 ≤ id < V")
    }

    fn known(&self, at: (usize, usize)) -> Known {
        let (weight, kl) = (self.weights.policy[at.0], self.weights.kl[at.0]);
        Known { advantage: self.advantage[at], weight, kl_share: kl / weight, at }
    }

    /// Reads the row of an unmasked token.
    fn score<E: Element>(&self, softmaxes: Softmaxes, row: &[E], at: (usize, usize), room: &mut Room) -> Scores {
        let id = self.id(at);
        let Some(head) = &self.head else { return softmaxes.score(row, id, &mut room.softmax) };
        head.forward(row, id, &mut room.h);
        softmaxes.score(&room.h, id, &mut room.softmax)
    }

    /// Writes dlogits over the row of an unmasked token.
    fn write<E: Element>(
        &self,
        softmaxes: Softmaxes,
        row: &mut [E],
        at: (usize, usize),
        room: &mut Room,
        pass: Pass,
        (scores, graded): (&Scores, &Graded),
    ) {
        let id = self.id(at);
        let grad = Gradients { logp: graded.grad_logp, entropy: self.weights.entropy[at.0] };
        let Some(head) = &self.head else {
            if pass == Pass::Second {
                softmaxes.exponentials(row, scores, &mut room.softmax);
            }
            softmaxes.write_dlogits(row, id, scores, &room.softmax, grad);
            return;
        };
        if pass == Pass::Second {
            head.forward(row, id, &mut room.h);
            softmaxes.exponentials(&room.h, scores, &mut room.softmax);
        }
        softmaxes.write_dlogits(&mut room.h, id, scores, &room.softmax, grad);
        head.backward(row, &room.h);
    }

    fn outcome(&self, graded: &Array2<Option<Graded>>, dlogits: FloatArray<Ix3>) -> Outcome {
        let mut loss = reduction::loss(graded, &self.weights);
        if let Objective::ImportanceSampling(sampling) = &self.spec.objective
            && sampling.empty_rows
        {
            loss += reduction::empty_rows(self.spec, &self.settled.mask, |b| self.advantage[[b, 0]]);
        }
        let per_token = |value: fn(&Graded) -> f64| -> FloatArray<_> {
            graded.map(|graded| graded.as_ref().map_or(0.0, value) as f32).into()
        };
        Outcome {
            loss: arr0(loss as f32).into(),
            logp: per_token(|graded| graded.logp),
            entropy: per_token(|graded| graded.entropy),
            token_loss: per_token(|graded| graded.token.loss),
            dlogits,
            metrics: reduction::metrics(self.spec, graded),
        }
    }
}

/// Whether the row's exponentials are still there from when it was read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    Only,
    Second,
}
