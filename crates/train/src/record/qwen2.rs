//! The policy as a recorder runs it: a sequence at a time, hidden states before its head, and the head apart, so that logits
//! are made for a few positions at a time.

use candle_core::{Device, Tensor};

use super::RecordError;
use crate::checkpoint::Qwen2Checkpoint;
use crate::train::TrainError;
use crate::train::qwen2::{KvCache, Qwen2};

/// The number of positions whose logits are in memory at a time.
pub const CHUNK: usize = 32;

/// A model that has read the start of a sequence. Clones share what they have read.
#[derive(Clone)]
pub(super) struct Prefilled<'m> {
    model: &'m Qwen2,
    cache: KvCache,
    /// `[N,H]`: hidden states of the positions read last.
    pub(super) last: Tensor,
}

/// Reads the model of a checkpoint.
pub(super) fn load(checkpoint: Qwen2Checkpoint) -> Result<Qwen2, RecordError> {
    let config = checkpoint.config.clone();
    Ok(Qwen2::from_weights(config, checkpoint.weights()?))
}

/// Computes `hidden·lm_headᵀ`, `[N,H]` to `N·V` logits, row by row.
pub(super) fn logits(model: &Qwen2, hidden: &Tensor) -> candle_core::Result<Vec<f32>> {
    hidden.matmul(&model.lm_head().t()?)?.flatten_all()?.to_vec1()
}

impl<'m> Prefilled<'m> {
    /// `model` after a prompt, of which [`last`](Self::last) keeps the last position. `check` is asked before each chunk.
    pub(super) fn new(
        model: &'m Qwen2,
        prompt: &[u32],
        check: &dyn Fn() -> Result<(), RecordError>,
        failed: &dyn Fn(&TrainError) -> RecordError,
    ) -> Result<Self, RecordError> {
        // The last hidden state can be any tensor until the first chunk has been read. The keys and values of all
        // positions are in the cache, so that no other hidden state is needed later.
        let mut state = Self { model, cache: KvCache::default(), last: model.lm_head().clone() };
        for chunk in prompt.chunks(CHUNK) {
            check()?;
            let last = state.forward(chunk).and_then(|hidden| Ok(hidden.narrow(0, chunk.len() - 1, 1)?));
            state.last = last.map_err(|error| failed(&error))?;
        }
        Ok(state)
    }

    /// Reads more tokens, and returns the hidden states `[N,H]` of `ids`.
    pub(super) fn forward(&mut self, ids: &[u32]) -> Result<Tensor, TrainError> {
        let input = Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)?;
        Ok(self.model.hidden(&input, Some(&mut self.cache))?.squeeze(0)?)
    }
}
