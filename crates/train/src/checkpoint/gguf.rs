//! GGUF: llama.cpp's names of tensors and settings.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;

use candle_core::quantized::gguf_file::{Content, TensorInfo, Value};

use super::{EMBEDDING, EndTokenIds, HEAD, Settings, first_line, rope_theta};
use assay_core::files::open_regular;
use assay_core::text::ForeignText;
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

/// Reads the header of a GGUF file, and checks that the file ends with its tensors.
pub(super) fn read_header(path: &Path) -> Result<(BufReader<File>, Content), FixtureError> {
    /// Bytes with which a writer may have padded each tensor, and the file.
    const PADDING: u64 = 64 << 10;
    let io = |reason| FixtureError::io(path, "read", reason);
    expect_alignment(path)?;
    let mut file = BufReader::new(open_regular(path).map_err(io)?);
    let content = Content::read(&mut file).map_err(|error| {
        FixtureError::invalid(path, "header", first_line(&error), "a GGUF file, or a folder with config.json")
    })?;
    // candle multiplies the extents without a look.
    let elements = |info: &TensorInfo| info.shape.dims().iter().try_fold(1_usize, |n, extent| n.checked_mul(*extent));
    let too_large = content.tensor_infos.iter().filter(|(_, info)| elements(info).is_none());
    if let Some((name, info)) = too_large.min_by_key(|(name, _)| *name) {
        let field = format!("tensor `{:.200}`", ForeignText::from(name.as_str()));
        let given = format!("shape {:?}", info.shape.dims());
        return Err(FixtureError::invalid(path, &field, given, "a product that fits 64 bits"));
    }
    // The rest of a longer file would be read for its hash, and a hole has no end that is worth waiting for.
    let bytes = |info: &TensorInfo| {
        let blocks = (elements(info).unwrap_or(usize::MAX) / info.ggml_dtype.block_size().max(1)) as u64;
        blocks.saturating_mul(info.ggml_dtype.type_size() as u64).saturating_add(PADDING)
    };
    let start = content.tensor_data_offset.saturating_add(PADDING);
    let longest = content.tensor_infos.values().fold(start, |end, info| end.saturating_add(bytes(info)));
    let length = file.get_ref().metadata().map_err(io)?.len();
    if length > longest {
        let expected = format!("at most {longest}, which its tensors take");
        return Err(FixtureError::invalid(path, "length", format!("{length} bytes"), expected));
    }
    Ok((file, content))
}

/// Refuses an alignment of 0, by which candle's reader divides.
///
/// The metadata is walked as candle does, without being kept. What candle refuses ends the walk, and has its error from candle.
fn expect_alignment(path: &Path) -> Result<(), FixtureError> {
    let file = open_regular(path).map_err(|reason| FixtureError::io(path, "read", reason))?;
    match MetadataWalk::alignment_is_zero(BufReader::new(file)) {
        Ok(true) => Err(FixtureError::invalid(path, "`general.alignment`", "0", "a power of two")),
        _ => Ok(()),
    }
}

/// A walk over the metadata of a GGUF file.
struct MetadataWalk {
    file: BufReader<File>,
    /// Whether lengths and counts have 4 bytes, as in version 1, and not 8.
    counts_are_u32: bool,
}

impl MetadataWalk {
    /// The longest string, in bytes, and the most arrays within each other, as candle reads them.
    const LONGEST: u64 = 1 << 30;
    const DEEPEST: usize = 64;

    fn alignment_is_zero(file: BufReader<File>) -> io::Result<bool> {
        let mut walk = Self { file, counts_are_u32: false };
        let [_magic, version] = [walk.u32()?, walk.u32()?];
        walk.counts_are_u32 = version == 1;
        let [_tensors, entries] = [walk.count()?, walk.count()?];
        let mut is_zero = false;
        for _ in 0..entries {
            let len = walk.count()?;
            let mut key = Vec::new();
            if len > Self::LONGEST || (&mut walk.file).take(len).read_to_end(&mut key)? as u64 != len {
                return Err(io::ErrorKind::InvalidData.into());
            }
            // candle drops NULs at the end, and takes the last of entries with one key.
            while key.pop_if(|last| *last == 0).is_some() {}
            let kind = walk.u32()?;
            if key == b"general.alignment" {
                is_zero = walk.integer(kind)? == Some(0);
            } else {
                walk.skip_value(kind, 0)?;
            }
        }
        Ok(is_zero)
    }

    fn bytes<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.file.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn u32(&mut self) -> io::Result<u32> {
        Ok(u32::from_le_bytes(self.bytes()?))
    }

    fn count(&mut self) -> io::Result<u64> {
        if self.counts_are_u32 { self.u32().map(u64::from) } else { Ok(u64::from_le_bytes(self.bytes()?)) }
    }

    /// Reads an integer of up to 4 bytes; any other value is skipped.
    fn integer(&mut self, kind: u32) -> io::Result<Option<u32>> {
        Ok(match kind {
            0 | 1 => self.bytes::<1>().map(|[byte]| Some(u32::from(byte)))?,
            2 | 3 => Some(u32::from(u16::from_le_bytes(self.bytes()?))),
            4 | 5 => Some(self.u32()?),
            _ => self.skip_value(kind, 0).map(|()| None)?,
        })
    }

    fn skip_value(&mut self, kind: u32, depth: usize) -> io::Result<()> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidData);
        let len = match (kind, size_of(kind)) {
            (_, Some(size)) => Some(size),
            (8, _) => Some(self.count()?),
            (9, _) if depth < Self::DEEPEST => {
                let kind = self.u32()?;
                let count = self.count()?;
                match size_of(kind) {
                    Some(size) => count.checked_mul(size),
                    // Each of these has a length in the file, so that the file's end ends the loop.
                    None => return (0..count).try_for_each(|_| self.skip_value(kind, depth + 1)),
                }
            }
            _ => None,
        };
        // A place after the end is an error of the next read.
        self.file.seek_relative(len.and_then(|len| i64::try_from(len).ok()).ok_or_else(invalid)?)
    }
}

/// Returns the size of a number or a truth value of a GGUF type, in bytes; `None` for strings, arrays and unknown types.
fn size_of(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
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
