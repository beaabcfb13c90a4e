//! A tiny checkpoint of random weights, as Hugging Face writes one.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use assay::train::candle_core::quantized::gguf_file::{self, Value};
use assay::train::candle_core::quantized::{GgmlDType, QTensor};
use assay::train::candle_core::{Device, Tensor};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::json;

/// A byte-level vocabulary of single characters; the last two are special. The head has columns without a token, as
/// Qwen's has.
pub(crate) const CHARACTERS: &str = "abcdefghijklmnopqrstuvwxyz0123456789#.,ĠĊ";
pub(crate) const END: &str = "<|im_end|>";
pub(crate) const PAD: &str = "<|endoftext|>";
pub(crate) const VOCAB: usize = 64;
pub(crate) const HIDDEN: usize = 64;

pub(crate) type Weights = Vec<(String, Tensor)>;

pub(crate) fn tokens() -> Vec<String> {
    CHARACTERS.chars().map(String::from).chain([END.into(), PAD.into()]).collect()
}

pub(crate) fn settings(vocab: usize, tied: bool) -> serde_json::Value {
    let end = tokens().len() - 2;
    json!({
        "model_type": "qwen2", "vocab_size": vocab, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "sliding_window": 256,
        "max_window_layers": 2, "tie_word_embeddings": tied, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
        "use_sliding_window": false, "hidden_act": "silu", "eos_token_id": end, "pad_token_id": end + 1,
    })
}

pub(crate) fn weights(vocab: usize, tied: bool) -> Weights {
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let mut draw = |name: &str, shape: &[usize], scale: f32, around: f32| {
        let n = shape.iter().product();
        let values: Vec<f32> = (0..n).map(|_| around + scale * rng.random_range(-1.0..1.0f32)).collect();
        (name.to_string(), Tensor::from_vec(values, shape, &Device::Cpu).unwrap())
    };
    let mut all = vec![
        draw("model.embed_tokens.weight", &[vocab, HIDDEN], 0.5, 0.0),
        draw("model.norm.weight", &[HIDDEN], 0.1, 1.0),
    ];
    if !tied {
        all.push(draw("lm_head.weight", &[vocab, HIDDEN], 0.3, 0.0));
    }
    for i in 0..2 {
        let mut layer = |name: &str, shape: &[usize], scale, around| {
            all.push(draw(&format!("model.layers.{i}.{name}"), shape, scale, around));
        };
        layer("input_layernorm.weight", &[HIDDEN], 0.1, 1.0);
        layer("post_attention_layernorm.weight", &[HIDDEN], 0.1, 1.0);
        for (name, out) in [("q", HIDDEN), ("k", HIDDEN / 2), ("v", HIDDEN / 2)] {
            layer(&format!("self_attn.{name}_proj.weight"), &[out, HIDDEN], 0.2, 0.0);
            layer(&format!("self_attn.{name}_proj.bias"), &[out], 0.2, 0.0);
        }
        layer("self_attn.o_proj.weight", &[HIDDEN, HIDDEN], 0.2, 0.0);
        layer("mlp.gate_proj.weight", &[96, HIDDEN], 0.2, 0.0);
        layer("mlp.up_proj.weight", &[96, HIDDEN], 0.2, 0.0);
        layer("mlp.down_proj.weight", &[HIDDEN, 96], 0.2, 0.0);
    }
    all
}

pub(crate) fn tokenizer() -> serde_json::Value {
    let all = tokens();
    let vocab: serde_json::Map<_, _> = all.iter().enumerate().map(|(id, token)| (token.clone(), id.into())).collect();
    let special = |id: usize| json!({"id": id, "content": all[id], "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true});
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [special(all.len() - 2), special(all.len() - 1)],
        "normalizer": null, "pre_tokenizer": bytes, "post_processor": null, "decoder": bytes,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    })
}

/// The whole folder.
pub(crate) fn write(folder: &Path, vocab: usize, tied: bool) {
    fs::create_dir(folder).unwrap();
    fs::write(folder.join("config.json"), settings(vocab, tied).to_string()).unwrap();
    fs::write(folder.join("tokenizer.json"), tokenizer().to_string()).unwrap();
    write_weights(folder, &weights(vocab, tied));
}

pub(crate) fn write_weights(folder: &Path, weights: &Weights) {
    let map: HashMap<_, _> = weights.iter().cloned().collect();
    assay::train::candle_core::safetensors::save(&map, folder.join("model.safetensors")).unwrap();
}

/// The weights as a GGUF file of `dtype`, with entries put over those of the metadata.
pub(crate) fn write_gguf(path: &Path, dtype: GgmlDType, metadata: &[(&str, Value)]) {
    let rename = |name: &str| {
        let pairs = [
            ("model.embed_tokens", "token_embd"),
            ("model.norm", "output_norm"),
            ("lm_head", "output"),
            ("model.layers", "blk"),
            ("self_attn.q_proj", "attn_q"),
            ("self_attn.k_proj", "attn_k"),
            ("self_attn.v_proj", "attn_v"),
            ("self_attn.o_proj", "attn_output"),
            ("input_layernorm", "attn_norm"),
            ("post_attention_layernorm", "ffn_norm"),
            ("mlp.gate_proj", "ffn_gate"),
            ("mlp.up_proj", "ffn_up"),
            ("mlp.down_proj", "ffn_down"),
        ];
        pairs.iter().fold(name.to_string(), |name, (a, b)| name.replace(a, b))
    };
    let tensors: Vec<(String, QTensor)> = weights(VOCAB, false)
        .into_iter()
        .map(|(name, tensor)| {
            let dtype = if tensor.rank() == 2 { dtype } else { GgmlDType::F32 };
            (rename(&name), QTensor::quantize(&tensor, dtype).unwrap())
        })
        .collect();
    let strings = |all: Vec<String>| Value::Array(all.into_iter().map(Value::String).collect());
    let end = tokens().len() as u32 - 2;
    let kinds = (0..=end + 1).map(|id| Value::I32(if id >= end { 3 } else { 1 })).collect();
    let mut all = vec![
        ("general.architecture", Value::String("qwen2".into())),
        ("general.name", Value::String("tiny".into())),
        ("qwen2.block_count", Value::U32(2)),
        ("qwen2.context_length", Value::U32(256)),
        ("qwen2.embedding_length", Value::U32(HIDDEN as u32)),
        ("qwen2.feed_forward_length", Value::U32(96)),
        ("qwen2.attention.head_count", Value::U32(4)),
        ("qwen2.attention.head_count_kv", Value::U32(2)),
        ("qwen2.rope.freq_base", Value::F32(1e6)),
        ("qwen2.attention.layer_norm_rms_epsilon", Value::F32(1e-6)),
        ("tokenizer.ggml.model", Value::String("gpt2".into())),
        ("tokenizer.ggml.pre", Value::String("qwen2".into())),
        ("tokenizer.ggml.tokens", strings(tokens())),
        ("tokenizer.ggml.token_type", Value::Array(kinds)),
        ("tokenizer.ggml.merges", strings(Vec::new())),
        ("tokenizer.ggml.eos_token_id", Value::U32(end)),
        ("tokenizer.ggml.padding_token_id", Value::U32(end + 1)),
    ];
    for (key, value) in metadata {
        match all.iter().position(|(held, _)| held == key) {
            Some(at) => all[at].1 = value.clone(),
            None => all.insert(0, (key, value.clone())),
        }
    }
    let metadata: Vec<(&str, &Value)> = all.iter().map(|(key, value)| (*key, value)).collect();
    let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let mut file = fs::File::create(path).unwrap();
    gguf_file::write(&mut file, &metadata, &tensors).unwrap();
}
