//! A Qwen2 model that gives the hidden states before its head, and the head apart: logits are made for a few positions at
//! a time.

use std::path::Path;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Activation, VarBuilder};
use candle_transformers::models::qwen2::{Config, Model};

use super::RecordError;
use crate::checkpoint::{Checkpoint, one_line};

/// Positions whose logits are held at a time.
pub const CHUNK: usize = 32;

/// The model in f32.
pub(super) struct Qwen2 {
    body: Model,
    /// `[V,H]`.
    lm_head: Tensor,
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
    /// The model of a checkpoint, for sequences of at most `positions` tokens. `path` is where it comes from.
    pub(super) fn load(
        checkpoint: Checkpoint,
        positions: usize,
        path: &Path,
    ) -> std::result::Result<Self, RecordError> {
        let extents = checkpoint.config.clone();
        let config = Config {
            vocab_size: extents.vocab_size,
            hidden_size: extents.hidden_size,
            intermediate_size: extents.intermediate_size,
            num_hidden_layers: extents.num_hidden_layers,
            num_attention_heads: extents.num_attention_heads,
            num_key_value_heads: extents.num_key_value_heads,
            // The tables of the rotary embedding are as long as they need to be, whatever a stranger's settings say.
            max_position_embeddings: positions,
            sliding_window: positions,
            max_window_layers: extents.num_hidden_layers,
            tie_word_embeddings: extents.tie_word_embeddings,
            rope_theta: extents.rope_theta,
            rms_norm_eps: extents.rms_norm_eps,
            use_sliding_window: false,
            hidden_act: Activation::Silu,
        };
        let weights = checkpoint.weights()?;
        let lm_head = weights[extents.head_name()].clone();
        let weights = VarBuilder::from_tensors(weights.into_iter().collect(), DType::F32, &Device::Cpu);
        let body = Model::new(&config, weights)
            .map_err(|error| RecordError::Model { path: path.into(), reason: one_line(&error) })?;
        Ok(Self { body, lm_head })
    }

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
