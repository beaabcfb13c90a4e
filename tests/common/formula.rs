//! Qwen2 written out in f64.

use std::collections::BTreeMap;

use assay::train::Qwen2Config;
use assay::train::candle_core::Tensor;
use ndarray::{Array1, Array2, s};

/// Hidden states of one sequence, `[L,H]`, as Qwen2's paper and code have it, one number at a time.
pub(crate) struct Formula<'c> {
    pub(crate) config: &'c Qwen2Config,
    pub(crate) weights: BTreeMap<String, Array2<f64>>,
}

impl<'c> Formula<'c> {
    pub(crate) fn of<'w>(config: &'c Qwen2Config, weights: impl IntoIterator<Item = (&'w String, &'w Tensor)>) -> Self {
        let wide = |var: &Tensor| {
            let rows = if var.dims().len() == 2 { var.dims()[0] } else { 1 };
            let values: Vec<f64> =
                var.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f64::from).collect();
            let columns = values.len() / rows;
            Array2::from_shape_vec((rows, columns), values).unwrap()
        };
        Self { config, weights: weights.into_iter().map(|(name, weight)| (name.clone(), wide(weight))).collect() }
    }

    fn norm(&self, x: &Array2<f64>, name: &str) -> Array2<f64> {
        let mut normed = x.clone();
        for mut row in normed.rows_mut() {
            let root = (row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64 + self.config.rms_norm_eps).sqrt();
            for (x, w) in row.iter_mut().zip(&self.weights[&format!("{name}.weight")]) {
                *x *= w / root;
            }
        }
        normed
    }

    fn linear(&self, x: &Array2<f64>, name: &str) -> Array2<f64> {
        let product = x.dot(&self.weights[&format!("{name}.weight")].t());
        self.weights.get(&format!("{name}.bias")).map_or(product.clone(), |bias| product + bias)
    }

    /// Rotates the halves of a head against each other, by the position.
    fn rotated(&self, head: &Array1<f64>, position: usize) -> Array1<f64> {
        let half = head.len() / 2;
        Array1::from_shape_fn(head.len(), |i| {
            let angle = position as f64 * self.config.rope_theta.powf(-((i % half) as f64) / half as f64);
            let other = if i < half { -head[i + half] } else { head[i - half] };
            head[i] * angle.cos() + other * angle.sin()
        })
    }

    pub(crate) fn hidden(&self, ids: &[u32]) -> Array2<f64> {
        let (width, heads) = (self.config.hidden_size, self.config.num_attention_heads);
        let (dim, of_group) = (width / heads, heads / self.config.num_key_value_heads);
        let embedding = &self.weights["model.embed_tokens.weight"];
        let mut x = Array2::from_shape_fn((ids.len(), width), |(t, h)| embedding[[ids[t] as usize, h]]);
        for layer in 0..self.config.num_hidden_layers {
            let name = |of: &str| format!("model.layers.{layer}.{of}");
            let normed = self.norm(&x, &name("input_layernorm"));
            let [q, k, v] =
                ["q", "k", "v"].map(|which| self.linear(&normed, &name(&format!("self_attn.{which}_proj"))));
            let mut mixed = Array2::zeros((ids.len(), width));
            for (head, t) in (0..heads).flat_map(|head| (0..ids.len()).map(move |t| (head, t))) {
                let part =
                    |of: &Array2<f64>, t: usize, head: usize| of.slice(s![t, head * dim..(head + 1) * dim]).to_owned();
                let query = self.rotated(&part(&q, t, head), t);
                let shared = head / of_group;
                let scores: Vec<f64> = (0..=t)
                    .map(|u| (query.dot(&self.rotated(&part(&k, u, shared), u)) / (dim as f64).sqrt()).exp())
                    .collect();
                for (u, score) in scores.iter().enumerate() {
                    let share = score / scores.iter().sum::<f64>();
                    let mut to = mixed.slice_mut(s![t, head * dim..(head + 1) * dim]);
                    to.scaled_add(share, &part(&v, u, shared));
                }
            }
            x = x + self.linear(&mixed, &name("self_attn.o_proj"));
            let normed = self.norm(&x, &name("post_attention_layernorm"));
            let gate = self.linear(&normed, &name("mlp.gate_proj")).mapv(|x| x / (1.0 + (-x).exp()));
            x = x + self.linear(&(gate * self.linear(&normed, &name("mlp.up_proj"))), &name("mlp.down_proj"));
        }
        self.norm(&x, "model.norm")
    }
}
