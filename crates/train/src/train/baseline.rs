//! [`Baseline`]: PPO-clip by candle's own operations, which its autograd differentiates.

use candle_core::{D, DType, Device, Tensor};
use candle_nn::ops::log_softmax;
use ndarray::Array2;

use super::{LossEvaluation, TrainBatch, TrainError};
use assay_core::problem::Metrics;
use assay_core::spec::{LossSpec, Objective, PpoClip, Reduction};

/// PPO-clip by `log_softmax`, `gather` and autograd: what a careful candle user would write, and what a kernel is compared
/// with.
///
/// ```text
/// loss = scale · Σ m · −min(ρ·A, clip(ρ, 1 − ε_low, 1 + ε_high)·A) / N,   ρ = exp(logp − old_logp)
/// ```
///
/// with `N = max(Σ m, 1)`, or a number that is given.
///
/// Logits are `[B,T,V]`, f64, f32, bf16 or f16; 16-bit ones are widened to f32, and everything is computed in what results.
/// Entropy and clip fractions, which trainers log, are computed outside the graph.
#[derive(Clone, Debug)]
pub struct Baseline {
    clip: PpoClip,
    reduction: Reduction,
    scale: f64,
}

impl Baseline {
    /// Creates the baseline of the loss `spec`.
    ///
    /// # Errors
    /// [`TrainError::Baseline`] for a spec other than PPO-clip with the mean over all tokens or over a number given.
    pub fn from_spec(spec: &LossSpec) -> Result<Self, TrainError> {
        let Objective::PpoClip(clip) = &spec.objective else {
            return Err(TrainError::Baseline { field: "objective" });
        };
        if clip.delta.is_some() || clip.dual_clip.is_some() {
            return Err(TrainError::Baseline { field: "objective.ppo_clip" });
        }
        if !matches!(spec.reduction, Reduction::TokenMean | Reduction::Normalizer(_)) {
            return Err(TrainError::Baseline { field: "reduction" });
        }
        // The spec must say nothing more than the baseline computes: the two are compared as a whole.
        let baseline = Self { clip: clip.clone(), reduction: spec.reduction, scale: spec.scale };
        if *spec == baseline.spec() { Ok(baseline) } else { Err(TrainError::Baseline { field: "spec" }) }
    }

    /// The loss of `logits`, `[B,T,V]`.
    ///
    /// # Errors
    /// [`TrainError`] where `batch` does not fit the logits.
    pub fn on_logits(&self, logits: &Tensor, batch: &TrainBatch) -> Result<LossEvaluation, TrainError> {
        let (rows, tokens, vocab) = logits.dims3()?;
        let shape = assay_core::problem::Shape { batch: rows, tokens, vocab };
        batch.tokens().check(&self.spec(), shape)?;
        let wide = match logits.dtype() {
            DType::BF16 | DType::F16 => logits.to_dtype(DType::F32)?,
            _ => logits.clone(),
        };
        // Masked tokens get 0 in every array, and id 0, so that nothing under the mask can make a NaN that `0 ·` would
        // keep.
        let per_token = |value: &dyn Fn(usize, usize) -> f64| {
            let values: Vec<f64> = ndarray::indices((rows, tokens))
                .into_iter()
                .map(|(b, t)| if batch.mask[[b, t]] { value(b, t) } else { 0.0 })
                .collect();
            Tensor::from_vec(values, (rows, tokens), &Device::Cpu)?.to_dtype(wide.dtype())
        };
        let old_logp = batch.old_logp.as_ref().expect("checked");
        let ids = batch.ids.indexed_iter().map(|(at, &id)| if batch.mask[at] { id } else { 0 }).collect();
        let ids = Tensor::from_vec(ids, (rows, tokens, 1), &Device::Cpu)?;
        let mask = per_token(&|_, _| 1.0)?;
        let advantages = per_token(&|b, t| batch.advantages.at(b, t))?;
        // The graph from here to the loss is what autograd differentiates: it keeps log-softmax and ratio, and makes
        // dlogits of them.
        let log_softmax = log_softmax(&wide, D::Minus1)?;
        let logp = log_softmax.gather(&ids, D::Minus1)?.squeeze(D::Minus1)?;
        // The mask multiplies the log-ratio before the exponential, which makes a masked ratio 1.
        let ratio = ((&logp - per_token(&|b, t| old_logp[[b, t]])?)? * &mask)?.exp()?;
        let clipped = ratio.clamp(1.0 - self.clip.epsilon_low, 1.0 + self.clip.epsilon_high)?;
        let policy = (&ratio * &advantages)?.minimum(&(clipped * &advantages)?)?.neg()?;
        let count = batch.mask.iter().filter(|counts| **counts).count().max(1) as f64;
        let denominator = if let Reduction::Normalizer(given) = self.reduction { given } else { count };
        let loss = ((policy * mask)?.sum_all()? * (self.scale / denominator))?;
        // Metrics are computed outside of the graph.
        let metrics = self.metrics(&log_softmax.detach(), &ratio.detach(), batch, count)?;
        let scored = logp.detach().to_dtype(DType::F64)?.flatten_all()?.to_vec1()?;
        let logp = Array2::from_shape_vec((rows, tokens), scored).expect("one a token");
        Ok(LossEvaluation { loss, metrics: Some(metrics), logp: Some(logp) })
    }

    /// The loss of the logits `hidden · lm_headᵀ`, from hidden states `[B,T,H]` and the LM head `[V,H]`.
    ///
    /// # Errors
    /// [`TrainError`] where the arrays do not fit each other.
    pub fn on_hidden(
        &self,
        hidden: &Tensor,
        lm_head: &Tensor,
        batch: &TrainBatch,
    ) -> Result<LossEvaluation, TrainError> {
        let (rows, tokens, width) = hidden.dims3()?;
        let logits = hidden.reshape((rows * tokens, width))?.matmul(&lm_head.t()?)?;
        self.on_logits(&logits.reshape((rows, tokens, ()))?, batch)
    }

    fn spec(&self) -> LossSpec {
        LossSpec {
            objective: Objective::PpoClip(self.clip.clone()),
            reduction: self.reduction,
            scale: self.scale,
            ..LossSpec::default()
        }
    }

    fn metrics(
        &self,
        log_softmax: &Tensor,
        ratio: &Tensor,
        batch: &TrainBatch,
        count: f64,
    ) -> Result<Metrics, TrainError> {
        // The metrics are summed on the host, in f64, as no gradient depends on them.
        let entropy = (log_softmax.exp()? * log_softmax)?.sum(D::Minus1)?.neg()?;
        let [entropy, ratio] = [entropy, ratio.clone()].map(|values| values.to_dtype(DType::F64)?.to_vec2::<f64>());
        let (entropy, ratio) = (entropy?, ratio?);
        let mut metrics = Metrics::default();
        for ((b, t), _) in batch.mask.indexed_iter().filter(|(_, counts)| **counts) {
            let (ratio, advantage) = (ratio[b][t], batch.advantages.at(b, t));
            metrics.entropy_mean += entropy[b][t] / count;
            metrics.ratio_mean += ratio / count;
            metrics.clip_low += f64::from(u8::from(ratio < 1.0 - self.clip.epsilon_low && advantage < 0.0)) / count;
            metrics.clip_high += f64::from(u8::from(ratio > 1.0 + self.clip.epsilon_high && advantage > 0.0)) / count;
        }
        metrics.clip_region = metrics.clip_low + metrics.clip_high;
        Ok(metrics)
    }
}
