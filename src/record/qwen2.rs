//! A Qwen2 model that gives the hidden states before its head, and the head apart: logits are made for a few positions at
//! a time.

use candle_core::{Device, Result, Tensor};
use candle_transformers::models::qwen2::Model;

use super::RecordError;

/// Positions whose logits are held at a time.
pub const CHUNK: usize = 32;

/// The model in f32.
pub(super) struct Qwen2 {
    pub(super) body: Model,
    /// `[V,H]`.
    pub(super) lm_head: Tensor,
}

/// A model that has read the start of a sequence. Clones share what they have read.
#[derive(Clone)]
pub(super) struct Prefilled {
    body: Model,
    read: usize,
    /// `[N,H]`: hidden states of the positions read last.
    pub(super) last: Tensor,
}

impl Qwen2 {
    pub(super) fn vocab(&self) -> usize {
        self.lm_head.dims()[0]
    }

    pub(super) fn width(&self) -> usize {
        self.lm_head.dims()[1]
    }

    /// Reads a prompt, of which [`Prefilled::last`] keeps the last position. `check` is asked before each chunk.
    pub(super) fn prefill(
        &self,
        ids: &[u32],
        check: &dyn Fn() -> std::result::Result<(), RecordError>,
        failed: &dyn Fn(&candle_core::Error) -> RecordError,
    ) -> std::result::Result<Prefilled, RecordError> {
        let mut state = Prefilled { body: self.body.clone(), read: 0, last: self.lm_head.clone() };
        for chunk in ids.chunks(CHUNK) {
            check()?;
            let hidden = state.forward(chunk).map_err(|error| failed(&error))?;
            state.last = hidden.narrow(0, chunk.len() - 1, 1).map_err(|error| failed(&error))?;
        }
        Ok(state)
    }

    /// `hidden·lm_headᵀ`, `[N,H]` to `N·V` logits, row by row.
    pub(super) fn logits(&self, hidden: &Tensor) -> Result<Vec<f32>> {
        hidden.matmul(&self.lm_head.t()?)?.flatten_all()?.to_vec1()
    }
}

impl Prefilled {
    /// Reads on: the hidden states `[N,H]` of `ids`.
    pub(super) fn forward(&mut self, ids: &[u32]) -> Result<Tensor> {
        let input = Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)?;
        let hidden = self.body.forward(&input, self.read, None)?.squeeze(0)?;
        self.read += ids.len();
        Ok(hidden)
    }
}
