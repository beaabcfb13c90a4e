//! The policy against its formula, written out in f64, and its gradients against differences of it.

#[path = "common/checkpoint.rs"]
mod checkpoint;

use std::collections::BTreeMap;

use assay::train::qwen2::{KvCache, Weights, initial_weights, read_checkpoint};
use assay::train::rollout::{Sampling, generate};
use assay::train::{Qwen2, Qwen2Config};
use candle_core::{DType, Device, Tensor, Var};
use ndarray::{Array1, Array2, s};

fn config(tied: bool) -> Qwen2Config {
    Qwen2Config {
        vocab_size: 11,
        hidden_size: 16,
        intermediate_size: 24,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        rope_theta: 100.0,
        rms_norm_eps: 1e-6,
        tie_word_embeddings: tied,
    }
}

/// Large enough that every part has an effect.
fn weights(config: &Qwen2Config) -> Weights {
    let weights = initial_weights(config, 5).unwrap();
    for (i, weight) in weights.values().enumerate() {
        let count = weight.elem_count();
        let added: Vec<f32> = (0..count).map(|j| 0.3 * ((i * 7 + j * 3) as f32 * 0.7).sin()).collect();
        let added = Tensor::from_vec(added, weight.shape(), &Device::Cpu).unwrap();
        weight.set(&(weight.as_tensor() + added).unwrap()).unwrap();
    }
    weights
}

/// Hidden states of one sequence, `[L,H]`, as Qwen2's paper and code have it, one number at a time.
struct Formula<'c> {
    config: &'c Qwen2Config,
    weights: BTreeMap<String, Array2<f64>>,
}

impl<'c> Formula<'c> {
    fn of(config: &'c Qwen2Config, weights: &Weights) -> Self {
        let wide = |var: &Var| {
            let rows = if var.dims().len() == 2 { var.dims()[0] } else { 1 };
            let values: Vec<f64> =
                var.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f64::from).collect();
            let columns = values.len() / rows;
            Array2::from_shape_vec((rows, columns), values).unwrap()
        };
        Self { config, weights: weights.iter().map(|(name, var)| (name.clone(), wide(var))).collect() }
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

    fn hidden(&self, ids: &[u32]) -> Array2<f64> {
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

fn ids(rows: &[&[u32]]) -> Tensor {
    Tensor::from_vec(rows.concat(), (rows.len(), rows[0].len()), &Device::Cpu).unwrap()
}

fn expect_close(given: &Tensor, expected: &Array2<f64>) {
    let given = given.to_vec2::<f32>().unwrap();
    for ((t, h), &expected) in expected.indexed_iter() {
        let given = f64::from(given[t][h]);
        assert!((given - expected).abs() < 1e-5 * (1.0 + expected.abs()), "[{t},{h}]: {given}, expected {expected}");
    }
}

#[test]
fn hidden_states_are_those_of_the_formula_with_and_without_a_cache() {
    for tied in [false, true] {
        let config = config(tied);
        let weights = weights(&config);
        let (policy, formula) = (Qwen2::detached(&config, &weights), Formula::of(&config, &weights));
        let rows: [&[u32]; 2] = [&[3, 1, 4, 1, 5], &[9, 2, 6, 5, 3]];
        let hidden = policy.hidden(&ids(&rows), None).unwrap();
        for (row, tokens) in rows.iter().enumerate() {
            expect_close(&hidden.get(row).unwrap(), &formula.hidden(tokens));
        }
        let mut cache = KvCache::default();
        policy.hidden(&ids(&[&rows[0][..2], &rows[1][..2]]), Some(&mut cache)).unwrap();
        cache.keep(&[1]).unwrap();
        let last = policy.hidden(&ids(&[&rows[1][2..]]), Some(&mut cache)).unwrap();
        expect_close(&last.get(0).unwrap(), &formula.hidden(rows[1]).slice(s![2.., ..]).to_owned());
    }
}

/// Along a direction through all elements of each weight, by differences of the formula.
#[test]
fn gradients_of_every_weight_are_differences_of_the_formula() {
    let config = config(true);
    let weights = weights(&config);
    let tokens = [3, 1, 4, 1, 5];
    let along = |t: usize, h: usize| ((t * 16 + h) as f64 * 1.3).cos();
    let toward =
        Tensor::from_vec((0..80).map(|i| along(i / 16, i % 16) as f32).collect::<Vec<_>>(), (1, 5, 16), &Device::Cpu);
    let hidden = Qwen2::recorded(&config, &weights).hidden(&ids(&[&tokens]), None).unwrap();
    let gradients = (hidden * toward.unwrap()).unwrap().sum_all().unwrap().backward().unwrap();
    for (name, weight) in &weights {
        let gradient = gradients.get(weight).unwrap_or_else(|| panic!("{name} has no gradient"));
        let gradient = gradient.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        // Along the gradient's own signs: no element hides behind another.
        let direction = |i: usize| f64::from(gradient[i].signum()) * (1.5 + (i as f64 * 0.9 + 0.4).sin());
        let given: f64 = gradient.iter().enumerate().map(|(i, &g)| f64::from(g) * direction(i)).sum();
        let value = |step: f64| {
            let mut formula = Formula::of(&config, &weights);
            let moved = formula.weights.get_mut(name).unwrap();
            moved.iter_mut().enumerate().for_each(|(i, w)| *w += step * direction(i));
            formula.hidden(&tokens).indexed_iter().map(|((t, h), x)| x * along(t, h)).sum::<f64>()
        };
        let expected = (value(1e-5) - value(-1e-5)) / 2e-5;
        let limit = 1e-5 * (1.0 + given.abs());
        assert!((given - expected).abs() < limit, "{name}: {given}, expected {expected} within {limit}");
        // Keys' biases turn all scores alike.
        assert!(expected > 1e-2 || name.ends_with("k_proj.bias"), "{name}: {expected} tells nothing");
    }
}

#[test]
fn completions_hold_the_log_probabilities_that_the_policy_gives_them() {
    let config = config(false);
    let weights = weights(&config);
    let policy = Qwen2::detached(&config, &weights);
    let prompts: [&[u32]; 3] = [&[1, 2, 3], &[4, 5], &[6, 7, 8]];
    let sampling = Sampling::Softmax { temperature: 1.0, seed: 9 };
    let completions = generate(&policy, &prompts, 6, 10, sampling).unwrap();
    let formula = Formula::of(&config, &weights);
    for (prompt, completion) in prompts.iter().zip(&completions) {
        assert_eq!(completion.ended, completion.ids.last() == Some(&10));
        assert!(completion.ended || completion.ids.len() == 6);
        let all: Vec<u32> = prompt.iter().chain(&completion.ids).copied().collect();
        let logits = formula.hidden(&all).dot(&formula.weights["lm_head.weight"].t());
        for (t, (&id, &logp)) in completion.ids.iter().zip(&completion.logp).enumerate() {
            let row = logits.row(prompt.len() + t - 1);
            let expected = row[id as usize] - row.iter().map(|x| x.exp()).sum::<f64>().ln();
            assert!((logp - expected).abs() < 1e-5, "token {t}: {logp}, expected {expected}");
        }
    }
    // A sequence's random numbers are its own: they do not depend on who goes along.
    assert_eq!(generate(&policy, &prompts[..1], 6, 10, sampling).unwrap()[0], completions[0]);
}

/// A folder as Hugging Face writes it, in bf16 and in two parts.
#[test]
fn a_checkpoint_of_two_parts_in_bf16_is_widened() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    checkpoint::write(&model, checkpoint::VOCAB, false);
    let round = |tensor: &Tensor| tensor.to_dtype(DType::BF16).unwrap();
    let mut written = checkpoint::weights(checkpoint::VOCAB, false);
    for (_, tensor) in &mut written {
        *tensor = round(tensor);
    }
    let (first, second) = written.split_at(7);
    checkpoint::write_weights(&model, &first.to_vec());
    std::fs::rename(model.join("model.safetensors"), model.join("model-00001-of-00002.safetensors")).unwrap();
    checkpoint::write_weights(&model, &second.to_vec());
    std::fs::rename(model.join("model.safetensors"), model.join("model-00002-of-00002.safetensors")).unwrap();
    let (config, loaded, tokenizer) = read_checkpoint(&model).unwrap();
    assert_eq!((config.vocab_size, config.hidden_size, config.tie_word_embeddings), (64, 64, false));
    assert_eq!(tokenizer.end() as usize, checkpoint::tokens().len() - 2);
    let values =
        |tensor: &Tensor| tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(loaded.len(), written.len());
    for (name, tensor) in &written {
        assert_eq!(values(tensor), values(&loaded[name]), "{name}");
    }
}
