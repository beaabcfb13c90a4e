//! The policy against its formula, and its gradients against differences of it.

use crate::common::checkpoint;
use crate::common::formula::Formula;

use assay::spec::LossSpec;
use assay::train::candle_core::{DType, Device, Tensor};
use assay::train::qwen2::{KvCache, PolicyWeights, initial_weights, read_checkpoint};
use assay::train::rollout::{Distribution, TokenSampling, generate};
use assay::train::{Qwen2, Qwen2Config};
use ndarray::{Array2, s};

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
fn weights(config: &Qwen2Config) -> PolicyWeights {
    let weights = initial_weights(config, 5).unwrap();
    for (i, weight) in weights.values().enumerate() {
        let count = weight.elem_count();
        let added: Vec<f32> = (0..count).map(|j| 0.3 * ((i * 7 + j * 3) as f32 * 0.7).sin()).collect();
        let added = Tensor::from_vec(added, weight.shape(), &Device::Cpu).unwrap();
        weight.set(&(weight.as_tensor() + added).unwrap()).unwrap();
    }
    weights
}

fn formula<'c>(config: &'c Qwen2Config, weights: &PolicyWeights) -> Formula<'c> {
    Formula::of(config, weights.iter().map(|(name, weight)| (name, weight.as_tensor())))
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
fn model_hidden_states_match_the_formula_with_or_without_cache() {
    for tied in [false, true] {
        let config = config(tied);
        let weights = weights(&config);
        let (policy, formula) = (Qwen2::detached(&config, &weights), formula(&config, &weights));
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
fn model_gradients_of_every_weight_match_differences() {
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
            let mut formula = formula(&config, &weights);
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
fn model_completions_hold_the_logp_that_the_policy_gives() {
    let config = config(false);
    let weights = weights(&config);
    let policy = Qwen2::detached(&config, &weights);
    let prompts: [&[u32]; 3] = [&[1, 2, 3], &[4, 5], &[6, 7, 8]];
    let (distribution, sampling) = (Distribution::from_spec(&LossSpec::default()), TokenSampling::Random { seed: 9 });
    let completions = generate(&policy, &prompts, 6, 10, &distribution, sampling).unwrap();
    let formula = formula(&config, &weights);
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
    assert_eq!(generate(&policy, &prompts[..1], 6, 10, &distribution, sampling).unwrap()[0], completions[0]);
}

/// A folder as Hugging Face writes it, in bf16 and in two parts.
#[test]
fn bf16_checkpoint_of_two_parts_is_widened() {
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
