//! A checkpoint on disk: a folder of safetensors, or a GGUF file. Nothing of the tensors is read before all of them have
//! been seen to be there in their shapes, and then one at a time.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Display;
use std::fs::{self, File};
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::quantized::tokenizer::TokenizerFromGguf;
use candle_core::{DType, Device, Tensor};
use candle_nn::{Activation, VarBuilder};
use candle_transformers::models::qwen2::{Config, Model};
use ndarray::IxDyn;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokenizers::Tokenizer;

use super::qwen2::Qwen2;
use super::{RecordError, Vocabulary, hash_of};
use crate::fixture::{self, FixtureError, SafetensorsFile};
use crate::problem::FloatArray;

/// Longest `config.json` and `tokenizer.json`; Qwen2.5's take 7 MB.
const LONGEST_SETTINGS: u64 = 64 << 20;

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// A checkpoint whose settings and tensor shapes have been checked.
pub(super) struct Checkpoint {
    path: PathBuf,
    pub(super) config: Config,
    /// Most positions that the model is for.
    pub(super) positions: usize,
    pub(super) vocabulary: Vocabulary,
    weights: Weights,
    /// What is said of the model in a fixture's metadata.
    pub(super) provenance: BTreeMap<String, String>,
}

enum Weights {
    /// The files, and which of them holds a tensor.
    Safetensors {
        files: Vec<SafetensorsFile>,
        holder: BTreeMap<String, usize>,
    },
    Gguf {
        file: BufReader<File>,
        content: Box<Content>,
    },
}

/// The settings of `config.json` that matter here. Those that would change the model and are not known here are refused.
#[derive(Deserialize)]
struct Settings {
    model_type: String,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    max_position_embeddings: usize,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default = "rope_theta")]
    rope_theta: f64,
    rms_norm_eps: f64,
    #[serde(default)]
    use_sliding_window: bool,
    hidden_act: String,
    #[serde(default)]
    rope_scaling: Option<serde_json::Value>,
    #[serde(default)]
    head_dim: Option<usize>,
    #[serde(default)]
    eos_token_id: Option<Ids>,
    #[serde(default)]
    pad_token_id: Option<u32>,
}

fn rope_theta() -> f64 {
    10_000.0
}

#[derive(Deserialize)]
struct Generation {
    #[serde(default)]
    eos_token_id: Option<Ids>,
    #[serde(default)]
    pad_token_id: Option<u32>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Ids {
    One(u32),
    Many(Vec<u32>),
}

impl From<Ids> for Vec<u32> {
    fn from(ids: Ids) -> Self {
        match ids {
            Ids::One(id) => vec![id],
            Ids::Many(ids) => ids,
        }
    }
}

impl Checkpoint {
    /// Reads what a checkpoint says of itself.
    pub(super) fn open(path: &Path) -> Result<Self, RecordError> {
        if path.is_dir() { Self::open_folder(path) } else { Self::open_gguf(path) }
    }

    fn open_folder(path: &Path) -> Result<Self, RecordError> {
        let settings_path = path.join("config.json");
        let settings: Settings = read_json(&settings_path)?;
        let config = config(&settings_path, &settings)?;
        let generation_path = path.join("generation_config.json");
        let generation: Option<Generation> =
            generation_path.exists().then(|| read_json(&generation_path)).transpose()?;
        let (end, padding) = match generation {
            Some(Generation { eos_token_id: Some(end), pad_token_id }) => {
                (Some(end), pad_token_id.or(settings.pad_token_id))
            }
            _ => (settings.eos_token_id, settings.pad_token_id),
        };
        let tokenizer_path = path.join("tokenizer.json");
        let tokenizer = Tokenizer::from_bytes(read_bounded(&tokenizer_path)?).map_err(|error| {
            FixtureError::invalid(&tokenizer_path, "tokenizer", one_line(&error), "what the tokenizers library reads")
        })?;

        let listing = |reason| FixtureError::io(path, "list", reason);
        let mut names: Vec<PathBuf> = Vec::new();
        for entry in fs::read_dir(path).map_err(listing)? {
            let file = entry.map_err(listing)?.path();
            if file.extension().is_some_and(|extension| extension == "safetensors") {
                names.push(file);
            }
        }
        names.sort();
        let mut provenance = BTreeMap::from([
            ("model".into(), name_of(path)),
            ("weights".into(), "safetensors, each tensor converted to f32".into()),
        ]);
        let (mut files, mut holder) = (Vec::new(), BTreeMap::new());
        for name in &names {
            let file = SafetensorsFile::open(name)?;
            for tensor in file.names() {
                if let Some(first) = holder.insert(tensor.to_owned(), files.len()) {
                    let given = format!("one here and one in {}", names[first].display());
                    return Err(FixtureError::invalid(name, &format!("tensor `{tensor}`"), given, "one").into());
                }
            }
            provenance.insert(format!("sha256_of.{}", name_of(name)), hash_of(name)?);
            files.push(file);
        }
        Checkpoint {
            path: path.into(),
            positions: config.max_position_embeddings,
            vocabulary: vocabulary(&tokenizer_path, tokenizer, &config, end.map_or_else(Vec::new, Vec::from), padding)?,
            config,
            weights: Weights::Safetensors { files, holder },
            provenance,
        }
        .checked()
    }

    fn open_gguf(path: &Path) -> Result<Self, RecordError> {
        let io = |reason| FixtureError::io(path, "read", reason);
        let mut file = BufReader::new(File::open(path).map_err(io)?);
        expect_alignment(path)?;
        let content = Content::read(&mut file).map_err(|error| {
            FixtureError::invalid(path, "header", one_line(&error), "a GGUF file, or a folder with config.json")
        })?;
        let settings = gguf_settings(path, &content)?;
        let config = config(path, &settings)?;
        let tokenizer = Tokenizer::from_gguf(&content).map_err(|error| {
            FixtureError::invalid(path, "tokenizer", one_line(&error), "a byte-level BPE in the GGUF's metadata")
        })?;
        let mut types: BTreeMap<String, usize> = BTreeMap::new();
        for info in content.tensor_infos.values() {
            *types.entry(format!("{:?}", info.ggml_dtype)).or_default() += 1;
        }
        let types = types.iter().map(|(name, count)| format!("{count} {name}")).collect::<Vec<_>>().join(", ");
        let named = content.metadata.get("general.name").and_then(|name| name.to_string().ok());
        let provenance = BTreeMap::from([
            ("model".into(), named.map_or_else(|| name_of(path), |name| fixture::one_line(name))),
            ("weights".into(), format!("GGUF, dequantised to f32: {types}")),
            ("gguf_file".into(), name_of(path)),
            ("gguf_sha256".into(), hash_of(path)?),
        ]);
        let end = settings.eos_token_id.map_or_else(Vec::new, Vec::from);
        Checkpoint {
            path: path.into(),
            positions: config.max_position_embeddings,
            vocabulary: vocabulary(path, tokenizer, &config, end, settings.pad_token_id)?,
            config,
            weights: Weights::Gguf { file, content: Box::new(content) },
            provenance,
        }
        .checked()
    }

    /// Itself, once every tensor is there in its shape.
    fn checked(self) -> Result<Self, RecordError> {
        for (name, expected) in tensors(&self.config) {
            let (held, given) = self.shape_of(&name)?;
            if given != expected {
                let field = format!("tensor `{held}`");
                return Err(FixtureError::invalid(
                    &self.path,
                    &field,
                    format!("shape {given:?}"),
                    format!("{expected:?}, as the settings say"),
                )
                .into());
            }
        }
        Ok(self)
    }

    /// The name of a tensor in the file, and its shape.
    fn shape_of(&self, name: &str) -> Result<(String, Vec<usize>), FixtureError> {
        let missing = |held: &str| {
            FixtureError::invalid(&self.path, &format!("tensor `{held}`"), "none", "one, as the settings say")
        };
        match &self.weights {
            Weights::Safetensors { files, holder } => {
                let file = &files[*holder.get(name).ok_or_else(|| missing(name))?];
                Ok((name.into(), file.info(name)?.1.to_vec()))
            }
            Weights::Gguf { content, .. } => {
                let held = gguf_name(name);
                let info = content.tensor_infos.get(&held).ok_or_else(|| missing(&held))?;
                Ok((held, info.shape.dims().to_vec()))
            }
        }
    }

    /// The weights, in f32, for sequences of at most `positions` tokens.
    pub(super) fn load(mut self, positions: usize) -> Result<Qwen2, RecordError> {
        let path = self.path.clone();
        let failed = |error: candle_core::Error| RecordError::Model { path: path.clone(), reason: one_line(&error) };
        let mut weights = HashMap::new();
        for (name, shape) in tensors(&self.config) {
            let tensor = match &mut self.weights {
                Weights::Safetensors { files, holder } => {
                    let values = single(files[holder[&name]].floats::<IxDyn>(&name)?);
                    Tensor::from_vec(values, shape, &Device::Cpu).map_err(failed)?
                }
                Weights::Gguf { file, content } => {
                    let tensor = content.tensor(file, &gguf_name(&name), &Device::Cpu);
                    tensor.and_then(|tensor| tensor.dequantize(&Device::Cpu)).map_err(failed)?
                }
            };
            weights.insert(name, tensor);
        }
        let lm_head = if self.config.tie_word_embeddings { weights[EMBEDDING].clone() } else { weights[HEAD].clone() };
        // The tables of the rotary embedding are as long as they need to be, whatever a stranger's settings say.
        let config = Config { max_position_embeddings: positions, sliding_window: positions, ..self.config };
        let weights = VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu);
        Ok(Qwen2 { body: Model::new(&config, weights).map_err(failed)?, lm_head })
    }
}

/// What candle's model is made from, once the settings are of a model that it computes.
fn config(path: &Path, settings: &Settings) -> Result<Config, FixtureError> {
    let expect = |holds: bool, field: &str, given: String, expected: &str| {
        if holds { Ok(()) } else { Err(FixtureError::invalid(path, &format!("`{field}`"), given, expected)) }
    };
    let s = settings;
    expect(s.model_type == "qwen2", "model_type", format!("`{}`", s.model_type), "`qwen2`: Qwen2 or Qwen2.5")?;
    expect(s.hidden_act == "silu", "hidden_act", format!("`{}`", s.hidden_act), "`silu`")?;
    expect(!s.use_sliding_window, "use_sliding_window", "true".into(), "false")?;
    expect(s.rope_scaling.is_none(), "rope_scaling", "a scaling".into(), "null")?;
    for (field, n) in [
        ("vocab_size", s.vocab_size),
        ("hidden_size", s.hidden_size),
        ("intermediate_size", s.intermediate_size),
        ("num_hidden_layers", s.num_hidden_layers),
        ("num_attention_heads", s.num_attention_heads),
        ("num_key_value_heads", s.num_key_value_heads),
        ("max_position_embeddings", s.max_position_embeddings),
    ] {
        expect((1..=i32::MAX as usize).contains(&n), field, n.to_string(), "an integer from 1 to 2^31 - 1")?;
    }
    let (hidden, heads, pairs) = (s.hidden_size, s.num_attention_heads, s.num_key_value_heads);
    expect(hidden % heads == 0, "hidden_size", hidden.to_string(), &format!("a multiple of the {heads} heads"))?;
    expect(
        (hidden / heads) % 2 == 0,
        "hidden_size",
        hidden.to_string(),
        "an even number of units a head, for rotation",
    )?;
    expect(heads % pairs == 0, "num_key_value_heads", pairs.to_string(), &format!("a divisor of the {heads} heads"))?;
    expect(
        s.head_dim.is_none_or(|n| n == hidden / heads),
        "head_dim",
        format!("{:?}", s.head_dim),
        "hidden_size / num_attention_heads",
    )?;
    expect(s.rope_theta.is_finite() && s.rope_theta > 0.0, "rope_theta", s.rope_theta.to_string(), "a number > 0")?;
    expect(
        s.rms_norm_eps.is_finite() && s.rms_norm_eps > 0.0,
        "rms_norm_eps",
        s.rms_norm_eps.to_string(),
        "a number > 0",
    )?;
    Ok(Config {
        vocab_size: s.vocab_size,
        hidden_size: hidden,
        intermediate_size: s.intermediate_size,
        num_hidden_layers: s.num_hidden_layers,
        num_attention_heads: heads,
        num_key_value_heads: pairs,
        max_position_embeddings: s.max_position_embeddings,
        sliding_window: s.max_position_embeddings,
        max_window_layers: s.num_hidden_layers,
        tie_word_embeddings: s.tie_word_embeddings,
        rope_theta: s.rope_theta,
        rms_norm_eps: s.rms_norm_eps,
        use_sliding_window: false,
        hidden_act: Activation::Silu,
    })
}

/// The tensors of a model, by the names of `config.json` checkpoints, with their shapes. Lazily: a stranger may claim any
/// number of layers.
fn tensors(config: &Config) -> impl Iterator<Item = (String, Vec<usize>)> {
    let &Config { vocab_size: v, hidden_size: h, intermediate_size: m, .. } = config;
    let of_keys = h / config.num_attention_heads * config.num_key_value_heads;
    let layer = move |i: usize| {
        [
            ("input_layernorm.weight", vec![h]),
            ("self_attn.q_proj.weight", vec![h, h]),
            ("self_attn.q_proj.bias", vec![h]),
            ("self_attn.k_proj.weight", vec![of_keys, h]),
            ("self_attn.k_proj.bias", vec![of_keys]),
            ("self_attn.v_proj.weight", vec![of_keys, h]),
            ("self_attn.v_proj.bias", vec![of_keys]),
            ("self_attn.o_proj.weight", vec![h, h]),
            ("post_attention_layernorm.weight", vec![h]),
            ("mlp.gate_proj.weight", vec![m, h]),
            ("mlp.up_proj.weight", vec![m, h]),
            ("mlp.down_proj.weight", vec![h, m]),
        ]
        .map(|(name, shape)| (format!("model.layers.{i}.{name}"), shape))
    };
    let head = (!config.tie_word_embeddings).then(|| (HEAD.to_owned(), vec![v, h]));
    let ends = [(EMBEDDING.to_owned(), vec![v, h]), ("model.norm.weight".to_owned(), vec![h])];
    ends.into_iter().chain(head).chain((0..config.num_hidden_layers).flat_map(layer))
}

/// What llama.cpp calls a tensor.
fn gguf_name(name: &str) -> String {
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
    let renamed = PARTS.iter().fold(name.to_owned(), |name, (theirs, llama)| name.replace(theirs, llama));
    renamed.replace("_proj.", ".")
}

/// The settings that a GGUF's metadata hold.
fn gguf_settings(path: &Path, content: &Content) -> Result<Settings, FixtureError> {
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
    let embedding = gguf_name(EMBEDDING);
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
        tie_word_embeddings: !content.tensor_infos.contains_key(&gguf_name(HEAD)),
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
        eos_token_id: id("tokenizer.ggml.eos_token_id").map(Ids::One),
        pad_token_id: id("tokenizer.ggml.padding_token_id"),
    })
}

/// Refuses an alignment of 0, by which candle's reader divides.
fn expect_alignment(path: &Path) -> Result<(), FixtureError> {
    /// The key stands among the first entries; a vocabulary comes later.
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
    if start.windows(KEY.len()).enumerate().any(|(at, window)| window == KEY && zero(&start[at + KEY.len()..])) {
        return Err(FixtureError::invalid(path, "`general.alignment`", "0", "a power of two"));
    }
    Ok(())
}

/// The tokenizer, once all of its ids are columns of the head.
fn vocabulary(
    path: &Path,
    mut tokenizer: Tokenizer,
    config: &Config,
    end: Vec<u32>,
    padding: Option<u32>,
) -> Result<Vocabulary, FixtureError> {
    let columns = config.vocab_size;
    let beyond = |id: u32| id as usize >= columns;
    if let Some((token, id)) =
        tokenizer.get_vocab(true).into_iter().max_by_key(|(_, id)| *id).filter(|(_, id)| beyond(*id))
    {
        let field = format!("token `{}`", fixture::one_line(&token));
        return Err(FixtureError::invalid(
            path,
            &field,
            format!("id {id}"),
            format!("ids below the model's vocabulary of {columns}"),
        ));
    }
    let padding = padding.or(end.first().copied()).unwrap_or(0);
    if let Some(id) = end.iter().copied().chain([padding]).find(|id| beyond(*id)) {
        let expected = format!("ids below the model's vocabulary of {columns}");
        return Err(FixtureError::invalid(path, "end or padding token", format!("id {id}"), expected));
    }
    // A prompt is what it is.
    tokenizer.with_padding(None);
    tokenizer
        .with_truncation(None)
        .map_err(|error| FixtureError::invalid(path, "truncation", one_line(&error), "none"))?;
    Ok(Vocabulary { tokenizer, end, padding })
}

fn single(values: FloatArray<IxDyn>) -> Vec<f32> {
    match values {
        FloatArray::F64(values) => values.iter().map(|&x| x as f32).collect(),
        FloatArray::F32(values) => values.into_raw_vec_and_offset().0,
        FloatArray::Bf16(values) => values.iter().map(|x| x.to_f32()).collect(),
        FloatArray::F16(values) => values.iter().map(|x| x.to_f32()).collect(),
    }
}

fn read_bounded(path: &Path) -> Result<Vec<u8>, FixtureError> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(LONGEST_SETTINGS + 1).read_to_end(&mut bytes));
    read.map_err(|reason| FixtureError::io(path, "read", reason))?;
    if bytes.len() as u64 > LONGEST_SETTINGS {
        let given = format!("more than {LONGEST_SETTINGS} bytes");
        return Err(FixtureError::invalid(path, "length", given, "settings"));
    }
    Ok(bytes)
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, FixtureError> {
    serde_json::from_slice(&read_bounded(path)?)
        .map_err(|error| FixtureError::invalid(path, "settings", one_line(&error), "those of a Qwen2 model, in JSON"))
}

fn name_of(path: &Path) -> String {
    fixture::one_line(&path.file_name().unwrap_or(path.as_os_str()).to_string_lossy())
}

/// The first line of an error: candle puts a backtrace behind it.
pub(super) fn one_line(error: &impl Display) -> String {
    fixture::one_line(error.to_string().lines().next().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_have_the_names_that_llama_cpp_gives_them() {
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
            assert_eq!(gguf_name(name), llama);
        }
    }
}
