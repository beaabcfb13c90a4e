//! [`PromptedSequences`]: prompts and what followed them, as a policy and a loss are given them.

use std::ops::Range;

use candle_core::{Device, Tensor};
use ndarray::{Array1, Array2};

use super::qwen2::Qwen2;
use super::{TrainBatch, TrainError};
use assay_core::problem::{Advantages, Extra};

/// The sequences of a step: a prompt and what followed, right-padded, and where its tokens are.
pub(super) struct PromptedSequences<'s> {
    pub(super) prompts: Vec<&'s [u32]>,
    pub(super) completions: Vec<&'s [u32]>,
    /// Whether the tokens of each completion count.
    pub(super) counts: Vec<bool>,
}

impl<'s> PromptedSequences<'s> {
    /// Returns the sequences of a range of rows.
    pub(super) fn rows(&self, rows: Range<usize>) -> PromptedSequences<'s> {
        let of = |all: &[&'s [u32]]| all[rows.clone()].to_vec();
        PromptedSequences {
            prompts: of(&self.prompts),
            completions: of(&self.completions),
            counts: self.counts[rows.clone()].to_vec(),
        }
    }

    /// Returns T, the length of the longest completion.
    pub(super) fn width(&self) -> usize {
        self.completions.iter().map(|completion| completion.len()).max().unwrap_or(0)
    }

    /// Fills an array `[B,T]` with `value` of each token of a completion, and 0 after its end.
    pub(super) fn per_token(&self, value: impl Fn(usize, usize) -> f64) -> Array2<f64> {
        Array2::from_shape_fn((self.completions.len(), self.width()), |(row, t)| {
            if t < self.completions[row].len() { value(row, t) } else { 0.0 }
        })
    }

    /// Returns the mask `[B,T]` of the tokens of completions, whether they count or not.
    pub(super) fn places(&self) -> Array2<bool> {
        self.per_token(|_, _| 1.0).mapv(|there| there == 1.0)
    }

    /// Creates the batch of the completions, as a loss takes it.
    pub(super) fn batch(&self, advantages: Array1<f64>, old_logp: Option<Array2<f64>>) -> TrainBatch {
        let shape = (self.completions.len(), self.width());
        TrainBatch {
            logits: (),
            ids: Array2::from_shape_fn(shape, |(row, t)| self.completions[row].get(t).copied().map_or(0, i64::from)),
            mask: Array2::from_shape_fn(shape, |(row, t)| self.counts[row] && t < self.completions[row].len()),
            advantages: Advantages::Sequence(advantages),
            old_logp,
            ref_logp: None,
            extra: Extra::default(),
        }
    }

    /// Computes the hidden states that score the tokens of the completions, `[B,T,H]`. After the end of a completion they are
    /// those of other tokens.
    pub(super) fn hidden(&self, policy: &Qwen2) -> Result<Tensor, TrainError> {
        let (rows, width) = (self.completions.len(), self.width());
        let all = || self.prompts.iter().zip(&self.completions);
        let length = all().map(|(prompt, completion)| prompt.len() + completion.len() - 1).max().unwrap_or(0);
        // Right-padded inputs, and for each token of a completion the position whose hidden state scores it: the one before.
        let mut ids = vec![0u32; rows * length];
        let mut scoring = Vec::with_capacity(rows * width);
        for (row, (prompt, completion)) in all().enumerate() {
            // The last token of a completion is scored and scores none.
            let tokens = prompt.iter().chain(&completion[..completion.len() - 1]);
            for (to, &id) in ids[row * length..].iter_mut().zip(tokens) {
                *to = id;
            }
            let first = row * length + prompt.len() - 1;
            scoring.extend((0..width).map(|t| (first + t.min(completion.len() - 1)) as u32));
        }
        let hidden = policy.hidden(&Tensor::from_vec(ids, (rows, length), &Device::Cpu)?, None)?;
        let extent = hidden.dim(2)?;
        let scoring = Tensor::from_vec(scoring, rows * width, &Device::Cpu)?;
        Ok(hidden.reshape((rows * length, extent))?.index_select(&scoring, 0)?.reshape((rows, width, extent))?)
    }
}
