//! [`Qwen2`]: the policy, of operations that candle differentiates.
//!
//! ```text
//! x    = embed_tokens[ids]
//! x   += o_proj · attention(rope(q), rope(k), v)     q, k, v of RMSNorm(x), with bias; query heads share key heads
//! x   += down_proj · (silu(gate_proj · h) ∘ up_proj · h)     h = RMSNorm(x)
//! hidden = RMSNorm(x),   logits = hidden · lm_headᵀ,   lm_head = embed_tokens where tied
//! ```
//!
//! f32 throughout; weights of a checkpoint in bf16 or f16 are widened. Names of weights and configuration are those of Hugging
//! Face's `Qwen2ForCausalLM`, so that a directory of Qwen2 or Qwen2.5 loads as it is.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{D, DType, Device, Tensor, Var};
use candle_nn::ops::softmax;
use candle_nn::rotary_emb::rope_slow;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Normal};

use super::{Tokenizer, TrainError};
use crate::checkpoint::{EMBEDDING, Qwen2Checkpoint, Qwen2Config};
use assay_core::memory::expect_host_room;

/// Standard deviation of weights that are not loaded.
const INITIAL_STD: f32 = 0.02;

/// The weights of a policy by name, which an optimizer changes.
pub type PolicyWeights = BTreeMap<String, Var>;

/// Weights from a seed: normal with standard deviation 0.02, norms 1, biases 0.
///
/// # Errors
/// [`TrainError`] where candle fails.
pub fn initial_weights(config: &Qwen2Config, seed: u64) -> Result<PolicyWeights, TrainError> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let normal = Normal::new(0.0f32, INITIAL_STD).expect("a positive deviation");
    let mut weights = PolicyWeights::new();
    for (name, shape) in config.tensors() {
        // The names tell what a tensor is: norms begin at 1 and biases at 0, as they would be without effect.
        let count = shape.iter().product();
        let values: Vec<f32> = if name.ends_with("norm.weight") {
            vec![1.0; count]
        } else if name.ends_with("bias") {
            vec![0.0; count]
        } else {
            normal.sample_iter(&mut rng).take(count).collect()
        };
        weights.insert(name, Var::from_vec(values, shape, &Device::Cpu)?);
    }
    Ok(weights)
}

/// Reads a checkpoint of Qwen2 or Qwen2.5: a folder as Hugging Face writes it, or a GGUF file, dequantised. The tokenizer is
/// the checkpoint's own.
///
/// # Errors
/// [`TrainError`] naming the file, and the setting or tensor that is wrong.
pub fn read_checkpoint(path: &Path) -> Result<(Qwen2Config, PolicyWeights, Tokenizer), TrainError> {
    let checkpoint = Qwen2Checkpoint::open(path)?;
    let config = checkpoint.config.clone();
    let tokenizer = Tokenizer::from_vocabulary(&checkpoint.vocabulary, path)?;
    let variable = |(name, tensor)| Ok((name, Var::from_tensor(&tensor)?));
    let weights = checkpoint.weights()?.into_iter().map(variable).collect::<Result<_, TrainError>>()?;
    Ok((config, weights, tokenizer))
}

/// A policy over weights that it shares: they may change between calls.
pub struct Qwen2 {
    config: Qwen2Config,
    weights: BTreeMap<String, Tensor>,
}

/// Keys and values of the tokens so far, `[B,heads,L,head_dim]`, a layer each.
#[derive(Clone, Default)]
pub struct KvCache {
    layers: Vec<(Tensor, Tensor)>,
}

impl KvCache {
    /// Returns the number of tokens that it holds.
    fn len(&self) -> Result<usize, TrainError> {
        Ok(self.layers.first().map_or(Ok(0), |(key, _)| key.dim(2))?)
    }

    /// Keeps the sequences `rows` only.
    ///
    /// # Errors
    /// [`TrainError`] where candle fails.
    pub fn keep(&mut self, rows: &[u32]) -> Result<(), TrainError> {
        let rows = Tensor::new(rows, &Device::Cpu)?;
        for (key, value) in &mut self.layers {
            *key = key.index_select(&rows, 0)?;
            *value = value.index_select(&rows, 0)?;
        }
        Ok(())
    }
}

impl Qwen2 {
    /// Creates a policy of constant weights, by name.
    pub fn from_weights(config: Qwen2Config, weights: BTreeMap<String, Tensor>) -> Self {
        Self { config, weights }
    }

    /// Creates the policy that is trained: operations on its weights are recorded for autograd.
    pub fn recorded(config: &Qwen2Config, weights: &PolicyWeights) -> Self {
        let weights = weights.iter().map(|(name, var)| (name.clone(), var.as_tensor().clone())).collect();
        Self { config: config.clone(), weights }
    }

    /// Creates the policy that samples: nothing is recorded for autograd.
    pub fn detached(config: &Qwen2Config, weights: &PolicyWeights) -> Self {
        let weights = weights.iter().map(|(name, var)| (name.clone(), var.as_detached_tensor())).collect();
        Self { config: config.clone(), weights }
    }

    /// Returns the policy with weights rounded to `dtype`; its arithmetic stays f32.
    ///
    /// # Errors
    /// [`TrainError`] where candle fails.
    pub fn rounded(&self, dtype: DType) -> Result<Self, TrainError> {
        let rounded =
            |(name, weight): (&String, &Tensor)| Ok((name.clone(), weight.to_dtype(dtype)?.to_dtype(weight.dtype())?));
        let weights = self.weights.iter().map(rounded).collect::<Result<_, TrainError>>()?;
        Ok(Self { config: self.config.clone(), weights })
    }

    /// Returns the extents of the policy.
    pub fn config(&self) -> &Qwen2Config {
        &self.config
    }

    /// Returns the LM head, `[V,H]`: the embedding if they are tied.
    pub fn lm_head(&self) -> &Tensor {
        self.weight(self.config.head_name())
    }

    /// Computes the hidden states after the last norm, `[B,L,H]`, of the tokens `ids`, `[B,L]` u32, which follow those in
    /// `cache`.
    ///
    /// Attention is causal: sequences may be padded on the right, with tokens that do not affect those before them.
    ///
    /// # Errors
    /// [`TrainError`] where an id is beyond the vocabulary.
    pub fn hidden(&self, ids: &Tensor, mut cache: Option<&mut KvCache>) -> Result<Tensor, TrainError> {
        let (rows, length) = ids.dims2()?;
        let before = cache.as_ref().map_or(Ok(0), |cache| cache.len())?;
        self.expect_room(rows, length, before)?;
        let embedded = self.weight(EMBEDDING).index_select(&ids.flatten_all()?, 0)?;
        let mut x = embedded.reshape((rows, length, self.config.hidden_size))?;
        // Rotation and mask depend on positions alone and are shared by all layers.
        let positions = Positions::new(&self.config, before, length)?;
        for layer in 0..self.config.num_hidden_layers {
            let name = |of: &str| format!("model.layers.{layer}.{of}");
            let normed = self.norm(&x, &name("input_layernorm"))?;
            x = (x + self.attention(&normed, &name("self_attn"), &positions, (layer, cache.as_deref_mut()))?)?;
            // The gated feed-forward network, on the residual stream after attention.
            let normed = self.norm(&x, &name("post_attention_layernorm"))?;
            let gate = self.linear(&normed, &name("mlp.gate_proj"))?.silu()?;
            let inner = (gate * self.linear(&normed, &name("mlp.up_proj"))?)?;
            x = (x + self.linear(&inner, &name("mlp.down_proj"))?)?;
        }
        self.norm(&x, "model.norm")
    }

    /// Checks that there is memory for a layer's arrays of `rows` sequences: the attention of `length` tokens to themselves and to those
    /// `before` them, and the states before and after it.
    fn expect_room(&self, rows: usize, length: usize, before: usize) -> Result<(), TrainError> {
        let scores = self.config.num_attention_heads.saturating_mul(length.saturating_add(before));
        let states = self.config.hidden_size.saturating_add(self.config.intermediate_size);
        // Scores and probabilities, and each state before and after an operation: two arrays of either.
        let of_token = scores.saturating_add(states).saturating_mul(2 * size_of::<f32>());
        let what = || format!("a layer of the policy, for {rows} sequences of {length} tokens,");
        Ok(expect_host_room(what, of_token.saturating_mul(rows).saturating_mul(length))?)
    }

    fn weight(&self, name: &str) -> &Tensor {
        &self.weights[name]
    }

    /// Computes the RMS norm `x / √(mean x² + ε) · w`.
    fn norm(&self, x: &Tensor, name: &str) -> Result<Tensor, TrainError> {
        // The mean of squares is over the hidden units; the mean itself is not subtracted, which is what distinguishes
        // RMSNorm from LayerNorm.
        let square = (x.sqr()?.mean_keepdim(D::Minus1)? + self.config.rms_norm_eps)?;
        Ok(x.broadcast_div(&square.sqrt()?)?.broadcast_mul(self.weight(&format!("{name}.weight")))?)
    }

    /// Computes `x · wᵀ`, plus the bias if the weight has one.
    fn linear(&self, x: &Tensor, name: &str) -> Result<Tensor, TrainError> {
        // One matrix product serves all tokens of all sequences, `[B·L,H]`.
        let (rows, length, width) = x.dims3()?;
        let product = x.reshape((rows * length, width))?.matmul(&self.weight(&format!("{name}.weight")).t()?)?;
        let product = match self.weights.get(&format!("{name}.bias")) {
            Some(bias) => product.broadcast_add(bias)?,
            None => product,
        };
        Ok(product.reshape((rows, length, ()))?)
    }

    /// Computes `softmax(q kᵀ / √head_dim + mask) v` and its output projection.
    fn attention(
        &self,
        x: &Tensor,
        name: &str,
        positions: &Positions,
        (layer, cache): (usize, Option<&mut KvCache>),
    ) -> Result<Tensor, TrainError> {
        let (rows, length, width) = x.dims3()?;
        let (heads, shared, dim) =
            (self.config.num_attention_heads, self.config.num_key_value_heads, self.config.head_dim());
        // Heads come before positions, `[B,heads,L,dim]`, so that each head is a matrix of its own.
        let by_head = |name: &str, heads: usize| -> Result<Tensor, TrainError> {
            let projected = self.linear(x, name)?.reshape((rows, length, heads, dim))?;
            Ok(projected.transpose(1, 2)?.contiguous()?)
        };
        let query = positions.rotated(&by_head(&format!("{name}.q_proj"), heads)?)?;
        let mut key = positions.rotated(&by_head(&format!("{name}.k_proj"), shared)?)?;
        let mut value = by_head(&format!("{name}.v_proj"), shared)?;
        // Keys and values of this layer are appended to those of the tokens before.
        if let Some(cache) = cache {
            if let Some((keys, values)) = cache.layers.get(layer) {
                key = Tensor::cat(&[keys, &key], 2)?;
                value = Tensor::cat(&[values, &value], 2)?;
            }
            let entry = (key.clone(), value.clone());
            match cache.layers.get_mut(layer) {
                Some(kept) => *kept = entry,
                None => cache.layers.push(entry),
            }
        }
        // The query heads that share a key head are adjacent: one product serves the group.
        let query = (query / (dim as f64).sqrt())?.reshape((rows, shared, heads / shared * length, dim))?;
        let scores = query.matmul(&key.t()?.contiguous()?)?.reshape((rows, heads, length, ()))?;
        let scores = scores.broadcast_add(&positions.mask)?;
        let weights = softmax(&scores, D::Minus1)?.reshape((rows, shared, heads / shared * length, ()))?;
        let mixed = weights.matmul(&value)?.reshape((rows, heads, length, dim))?;
        self.linear(&mixed.transpose(1, 2)?.reshape((rows, length, width))?, &format!("{name}.o_proj"))
    }
}

/// The rotation and the mask of `length` tokens after `before` others.
struct Positions {
    /// The cosines of the rotation angles, `[L, head_dim/2]`.
    cos: Tensor,
    sin: Tensor,
    /// The causal mask, `[L, before + L]`: −∞ for later tokens.
    mask: Tensor,
}

impl Positions {
    fn new(config: &Qwen2Config, before: usize, length: usize) -> Result<Self, TrainError> {
        let half = config.head_dim() / 2;
        // Unit i of a half turns by position · theta^(−i/half): the first by whole radians, the last hardly at all.
        let angle = |position: usize, i: usize| position as f64 / config.rope_theta.powf(i as f64 / half as f64);
        let table = |of: fn(f64) -> f64| {
            let values: Vec<f32> = (before..before + length)
                .flat_map(|p| (0..half).map(move |i| (p, i)))
                .map(|(p, i)| of(angle(p, i)) as f32)
                .collect();
            Tensor::from_vec(values, (length, half), &Device::Cpu)
        };
        // A token sees those in the cache, the earlier ones of its own chunk, and itself.
        let mask = (0..length)
            .flat_map(|i| (0..before + length).map(move |j| if j > before + i { f32::NEG_INFINITY } else { 0.0 }))
            .collect();
        Ok(Self {
            cos: table(f64::cos)?,
            sin: table(f64::sin)?,
            mask: Tensor::from_vec(mask, (length, before + length), &Device::Cpu)?,
        })
    }

    fn rotated(&self, x: &Tensor) -> Result<Tensor, TrainError> {
        Ok(rope_slow(x, &self.cos, &self.sin)?)
    }
}
