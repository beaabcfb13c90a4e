//! [`AdamW`]: an optimizer whose state is saved with the weights.

use std::collections::BTreeMap;

use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor, Var};
use serde::{Deserialize, Serialize};

use super::TrainError;
use super::qwen2::PolicyWeights;

/// Added to the norm that gradients are clipped by, as `torch.nn.utils.clip_grad_norm_` does.
const CLIP_EPSILON: f64 = 1e-6;

/// Settings of AdamW (Loshchilov and Hutter 2019), with candle's defaults.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdamWConfig {
    /// The learning rate of each step.
    pub learning_rate: f64,
    /// The decay rate of the first moment.
    pub beta1: f64,
    /// The decay rate of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// The decoupled weight decay, λ below.
    pub weight_decay: f64,
    /// Gradients whose norm over all weights is larger are scaled to it, `> 0`.
    pub max_grad_norm: f64,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self { learning_rate: 1e-3, beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.01, max_grad_norm: 1.0 }
    }
}

/// AdamW over named weights.
///
/// ```text
/// m ← β₁m + (1 − β₁)g,   v ← β₂v + (1 − β₂)g²
/// w ← (1 − lr·λ)w − lr · (m/(1 − β₁ᵗ)) / (√(v/(1 − β₂ᵗ)) + ε)
/// ```
///
/// in f32, with `g` clipped by its norm over all weights, which is summed in f64 in the order of their names.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AdamW {
    steps: i32,
    moments: BTreeMap<String, Moments>,
}

/// The moments of one weight.
#[derive(Clone, Debug, PartialEq)]
struct Moments {
    first: Vec<f32>,
    second: Vec<f32>,
}

/// The gradients of a policy by the name of their weight.
pub type WeightGradients = BTreeMap<String, Tensor>;

/// Moves the gradients of `weights` out of `store` and adds them to `gradients`.
///
/// # Errors
/// [`TrainError`] where candle fails.
pub fn accumulate(
    gradients: &mut WeightGradients,
    store: &mut GradStore,
    weights: &PolicyWeights,
) -> Result<(), TrainError> {
    for (name, weight) in weights {
        // The micro-batches' losses are parts of one sum, so that their gradients add up.
        let Some(gradient) = store.remove(weight) else { continue };
        let sum = match gradients.remove(name) {
            Some(before) => (before + gradient)?,
            None => gradient,
        };
        gradients.insert(name.clone(), sum);
    }
    Ok(())
}

impl AdamW {
    /// Changes `weights` by `gradients`, and returns the norm of these before they were clipped.
    ///
    /// # Errors
    /// [`TrainError`] where a gradient is not finite; weights are then as they were.
    pub fn step(
        &mut self,
        config: &AdamWConfig,
        weights: &PolicyWeights,
        gradients: WeightGradients,
    ) -> Result<f64, TrainError> {
        let mut all = BTreeMap::new();
        // One norm over all weights, in f64 and in the order of names, so that the sum is the same in every run.
        let mut square = 0.0;
        for (name, gradient) in gradients {
            let values = gradient.flatten_all()?.to_vec1::<f32>()?;
            square += values.iter().map(|&g| f64::from(g) * f64::from(g)).sum::<f64>();
            all.insert(name, values);
        }
        let norm = square.sqrt();
        if !norm.is_finite() {
            return Err(TrainError::Diverged { what: "the gradient's norm", given: norm });
        }
        // Clipping scales all gradients alike; a norm below the limit leaves them as they are.
        let clip = (config.max_grad_norm / (norm + CLIP_EPSILON)).min(1.0) as f32;
        // The number may be a file's. Long before its end the corrections are 1.
        self.steps = self.steps.saturating_add(1);
        // The bias corrections of the moments, which begin at 0.
        let [first_scale, second_scale] =
            [config.beta1, config.beta2].map(|beta| (1.0 / (1.0 - beta.powi(self.steps))) as f32);
        let [beta1, beta2, rate] = [config.beta1, config.beta2, config.learning_rate].map(|x| x as f32);
        let (epsilon, keep) = (config.epsilon as f32, (1.0 - config.learning_rate * config.weight_decay) as f32);
        for (name, gradient) in all {
            let weight = &weights[&name];
            // A weight that has its first gradient now has moments of 0.
            let none = || Moments { first: vec![0.0; gradient.len()], second: vec![0.0; gradient.len()] };
            let Moments { first, second } = self.moments.entry(name).or_insert_with(none);
            let mut values = weight.flatten_all()?.to_vec1::<f32>()?;
            for (((w, g), m), v) in values.iter_mut().zip(gradient).zip(first).zip(second) {
                let g = g * clip;
                *m = beta1 * *m + (1.0 - beta1) * g;
                *v = beta2 * *v + (1.0 - beta2) * g * g;
                *w = keep * *w - rate * (*m * first_scale) / ((*v * second_scale).sqrt() + epsilon);
            }
            weight.set(&Tensor::from_vec(values, weight.shape(), &Device::Cpu)?)?;
        }
        Ok(norm)
    }

    /// Returns the number of steps that it has made.
    pub fn steps(&self) -> i32 {
        self.steps
    }

    /// Returns the moments as tensors, named `first.` or `second.` and the name of the weight.
    pub(super) fn tensors(&self) -> Result<Vec<(String, Tensor)>, TrainError> {
        let mut tensors = Vec::new();
        for (name, Moments { first, second }) in &self.moments {
            for (which, values) in [("first", first), ("second", second)] {
                tensors.push((format!("{which}.{name}"), Tensor::from_slice(values, values.len(), &Device::Cpu)?));
            }
        }
        Ok(tensors)
    }

    /// Restores the optimizer after `steps` steps; `tensor` reads its moments by name.
    pub(super) fn restored(
        steps: i32,
        weights: &BTreeMap<String, Var>,
        mut tensor: impl FnMut(&str, usize) -> Result<Vec<f32>, TrainError>,
    ) -> Result<Self, TrainError> {
        let mut moments = BTreeMap::new();
        for (name, weight) in weights.iter().filter(|_| steps > 0) {
            let count = weight.elem_count();
            let first = tensor(&format!("first.{name}"), count)?;
            moments.insert(name.clone(), Moments { first, second: tensor(&format!("second.{name}"), count)? });
        }
        Ok(Self { steps, moments })
    }
}

#[cfg(test)]
mod tests {
    use candle_nn::Optimizer;

    use super::*;

    /// Compares the steps with those of candle's AdamW, which rounds in another order.
    #[test]
    fn optimizer_steps_are_those_of_candles_adamw() {
        let config = AdamWConfig { max_grad_norm: 1e9, weight_decay: 0.1, ..AdamWConfig::default() };
        let start = Tensor::new(&[1.0f32, -2.0, 0.5], &Device::Cpu).unwrap();
        let (ours, theirs) = (Var::from_tensor(&start).unwrap(), Var::from_tensor(&start).unwrap());
        let weights = PolicyWeights::from([("w".to_string(), ours.clone())]);
        let params = candle_nn::ParamsAdamW {
            lr: config.learning_rate,
            weight_decay: config.weight_decay,
            ..candle_nn::ParamsAdamW::default()
        };
        let mut reference = candle_nn::AdamW::new(vec![theirs.clone()], params).unwrap();
        let mut optimizer = AdamW::default();
        for _ in 0..20 {
            let loss = |w: &Var| w.powf(4.0).unwrap().sum_all().unwrap();
            let mut gradients = WeightGradients::new();
            accumulate(&mut gradients, &mut loss(&ours).backward().unwrap(), &weights).unwrap();
            optimizer.step(&config, &weights, gradients).unwrap();
            reference.backward_step(&loss(&theirs)).unwrap();
        }
        let (ours, theirs) = (ours.to_vec1::<f32>().unwrap(), theirs.to_vec1::<f32>().unwrap());
        for (a, b) in ours.iter().zip(&theirs) {
            assert!((a - b).abs() <= 4.0 * f32::EPSILON * b.abs(), "{ours:?}, candle has {theirs:?}");
        }
        assert!(ours[0] < 0.99, "there were steps");
    }

    #[test]
    fn optimizer_clips_by_norm_and_nan_changes_nothing() {
        let config = AdamWConfig { max_grad_norm: 0.5, ..AdamWConfig::default() };
        let weight = Var::from_slice(&[0.0f32, 0.0], 2, &Device::Cpu).unwrap();
        let weights = PolicyWeights::from([("w".to_string(), weight.clone())]);
        let mut optimizer = AdamW::default();
        let gradient = |g: [f32; 2]| WeightGradients::from([("w".to_string(), Tensor::new(&g, &Device::Cpu).unwrap())]);
        assert_eq!(optimizer.step(&config, &weights, gradient([3.0, 4.0])).unwrap(), 5.0);
        let clipped = optimizer.moments["w"].first[1];
        assert!((clipped - 0.1 * 4.0 * 0.1).abs() < 1e-6, "{clipped}: 0.1·g of a gradient of norm 0.5");
        let before = (weight.to_vec1::<f32>().unwrap(), optimizer.clone());
        let error = optimizer.step(&config, &weights, gradient([f32::NAN, 0.0])).unwrap_err();
        assert_eq!(error.to_string(), "the gradient's norm is NaN: training diverged");
        assert_eq!((weight.to_vec1::<f32>().unwrap(), optimizer), before);
    }
}
