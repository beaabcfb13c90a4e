//! GGUF: llama.cpp's names of tensors and settings.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use candle_core::quantized::gguf_file::{Content, Value};

use super::{EMBEDDING, EndTokenIds, HEAD, Settings, rope_theta};
use assay_fixture::FixtureError;

/// Translates the name of a tensor from Hugging Face's to llama.cpp's.
pub(super) fn name_of(name: &str) -> String {
    const PARTS: [(&str, &str); 11] = [
        ("model.embed_tokens.", "token_embd."),
        ("model.norm.", "output_norm."),
        ("lm_head.", "output."),
        ("model.layers.", "blk."),
        ("self_attn.o_proj.", "attn_output."),
        ("post_attention_layernorm.", "ffn_norm."),
        ("input_layernorm.", "attn_norm."),
        ("mlp.gate_proj.", "ffn_gate."),
        ("mlp.up_proj.", "ffn_up."),
        ("mlp.down_proj.", "ffn_down."),
        ("self_attn.", "attn_"),
    ];
    // The parts are replaced in this order: an earlier one may contain a later, as `self_attn.o_proj.` contains
    // `self_attn.`.
    let renamed = PARTS.iter().fold(name.to_owned(), |name, (theirs, llama)| name.replace(theirs, llama));
    renamed.replace("_proj.", ".")
}

/// Reads the settings of a Qwen2 model from the metadata of a GGUF file.
pub(super) fn settings_of(path: &Path, content: &Content) -> Result<Settings, FixtureError> {
    let wrong = |key: &str, expected: &str| {
        let given = content.metadata.get(key).map_or("none".into(), |value| format!("{:?}", value.value_type()));
        FixtureError::invalid(path, &format!("`{key}`"), given, expected)
    };
    let integer = |key: &str| -> Result<usize, FixtureError> {
        let value = content.metadata.get(key).and_then(|value| value.to_u64().ok());
        value.and_then(|n| usize::try_from(n).ok()).ok_or_else(|| wrong(key, "an integer"))
    };
    let number = |key: &str| -> Result<f64, FixtureError> {
        match content.metadata.get(key) {
            Some(Value::F32(x)) => Ok(f64::from(*x)),
            Some(Value::F64(x)) => Ok(*x),
            _ => Err(wrong(key, "a number")),
        }
    };
    let id =
        |key: &str| content.metadata.get(key).and_then(|value| value.to_u64().ok()).and_then(|n| u32::try_from(n).ok());
    let architecture = content.metadata.get("general.architecture").and_then(|value| value.to_string().ok());
    let architecture = architecture.ok_or_else(|| wrong("general.architecture", "`qwen2`"))?;
    if architecture != "qwen2" {
        return Err(FixtureError::invalid(
            path,
            "`general.architecture`",
            format!("`{architecture}`"),
            "`qwen2`: Qwen2 or Qwen2.5",
        ));
    }
    // GGUF has no key for the vocabulary: it is the extent of the embedding.
    let embedding = name_of(EMBEDDING);
    let vocab_size = content.tensor_infos.get(&embedding).and_then(|info| info.shape.dims().first().copied());
    Ok(Settings {
        model_type: architecture.clone(),
        vocab_size: vocab_size
            .ok_or_else(|| FixtureError::invalid(path, &format!("tensor `{embedding}`"), "none", "one"))?,
        hidden_size: integer("qwen2.embedding_length")?,
        intermediate_size: integer("qwen2.feed_forward_length")?,
        num_hidden_layers: integer("qwen2.block_count")?,
        num_attention_heads: integer("qwen2.attention.head_count")?,
        num_key_value_heads: integer("qwen2.attention.head_count_kv")?,
        max_position_embeddings: integer("qwen2.context_length")?,
        // A file without a tensor for the head shares the embedding with it.
        tie_word_embeddings: !content.tensor_infos.contains_key(&name_of(HEAD)),
        rope_theta: if content.metadata.contains_key("qwen2.rope.freq_base") {
            number("qwen2.rope.freq_base")?
        } else {
            rope_theta()
        },
        rms_norm_eps: number("qwen2.attention.layer_norm_rms_epsilon")?,
        use_sliding_window: false,
        hidden_act: "silu".into(),
        rope_scaling: None,
        head_dim: None,
        eos_token_id: id("tokenizer.ggml.eos_token_id").map(EndTokenIds::One),
        pad_token_id: id("tokenizer.ggml.padding_token_id"),
    })
}

/// Refuses an alignment of 0, by which candle's reader divides.
pub(super) fn expect_alignment(path: &Path) -> Result<(), FixtureError> {
    /// The bytes that are searched: the key is among the first entries, before the vocabulary.
    const LOOKED_AT: u64 = 1 << 20;
    const KEY: &[u8] = b"general.alignment";
    let mut start = Vec::new();
    let read = File::open(path).and_then(|file| file.take(LOOKED_AT).read_to_end(&mut start));
    read.map_err(|reason| FixtureError::io(path, "read", reason))?;
    let zero = |rest: &[u8]| {
        // An integer type of 1, 2 or 4 bytes, and its value.
        let size = match rest.first_chunk::<4>().map(|kind| u32::from_le_bytes(*kind)) {
            Some(0 | 1) => 1,
            Some(2 | 3) => 2,
            Some(4 | 5) => 4,
            _ => return false,
        };
        rest.get(4..4 + size).is_some_and(|value| value.iter().all(|byte| *byte == 0))
    };
    // The header has not been parsed yet, as the parser is what must not see the 0: the key is searched in the bytes.
    if start.windows(KEY.len()).enumerate().any(|(at, window)| window == KEY && zero(&start[at + KEY.len()..])) {
        return Err(FixtureError::invalid(path, "`general.alignment`", "0", "a power of two"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gguf_tensors_have_the_names_of_llama_cpp() {
        let pairs = [
            (EMBEDDING, "token_embd.weight"),
            (HEAD, "output.weight"),
            ("model.norm.weight", "output_norm.weight"),
            ("model.layers.7.input_layernorm.weight", "blk.7.attn_norm.weight"),
            ("model.layers.7.self_attn.q_proj.bias", "blk.7.attn_q.bias"),
            ("model.layers.7.self_attn.o_proj.weight", "blk.7.attn_output.weight"),
            ("model.layers.7.post_attention_layernorm.weight", "blk.7.ffn_norm.weight"),
            ("model.layers.7.mlp.gate_proj.weight", "blk.7.ffn_gate.weight"),
            ("model.layers.7.mlp.down_proj.weight", "blk.7.ffn_down.weight"),
        ];
        for (name, llama) in pairs {
            assert_eq!(name_of(name), llama);
        }
    }
}
