//! Checkpoints of Qwen2 and Qwen2.5 on disk: a folder of safetensors as Hugging Face writes it, or a GGUF file.
//!
//! Nothing of the tensors is read before all of them have been seen to be there in their shapes, and then one at a time.

mod gguf;

use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs::{self, File};
use std::io::BufReader;
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::Content;
use candle_core::quantized::tokenizer::TokenizerFromGguf;
use candle_core::{Device, Tensor};
use ndarray::IxDyn;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokenizers::Tokenizer;

use assay_core::files::{open_regular, read_regular};
use assay_core::memory::{Shortage, expect_host_room};
use assay_core::problem::FloatArray;
use assay_core::text::{ForeignText, ShownNumber, ShownPath};
use assay_fixture::{FixtureError, SafetensorsFile, hexadecimal, sha256};

/// Longest `config.json` and `tokenizer.json`; Qwen2.5's take 7 MB.
const LONGEST_SETTINGS: u64 = 64 << 20;

/// The name of the embedding, and of the head where it is another tensor.
pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
pub(crate) const HEAD: &str = "lm_head.weight";

/// Extents of a policy, named as in `config.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "Hugging Face's names")]
pub struct Qwen2Config {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    #[serde(default = "rope_theta")]
    pub rope_theta: f64,
    #[serde(default = "rms_norm_eps")]
    pub rms_norm_eps: f64,
    #[serde(default)]
    pub tie_word_embeddings: bool,
}

fn rope_theta() -> f64 {
    10_000.0
}

fn rms_norm_eps() -> f64 {
    1e-6
}

/// A setting of a policy that is out of range, or does not fit the others.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{field}`: got {given}, expected {expected}")]
pub struct Misfit {
    field: &'static str,
    given: String,
    expected: String,
}

impl Qwen2Config {
    /// Checks that the extents fit each other.
    ///
    /// # Errors
    /// [`Misfit`], the first that does not.
    pub fn check(&self) -> Result<(), Misfit> {
        let expect = |holds: bool, field: &'static str, given: String, expected: &str| {
            if holds { Ok(()) } else { Err(Misfit { field, given, expected: expected.into() }) }
        };
        for (field, n) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
        ] {
            expect((1..=i32::MAX as usize).contains(&n), field, n.to_string(), "an integer from 1 to 2^31 - 1")?;
        }
        // The rotation pairs the units of a head, and query heads share key heads evenly: both need whole quotients.
        let (hidden, heads, pairs) = (self.hidden_size, self.num_attention_heads, self.num_key_value_heads);
        let given = hidden.to_string();
        expect(
            hidden.is_multiple_of(heads),
            "hidden_size",
            given.clone(),
            &format!("a multiple of the {heads} heads"),
        )?;
        let even = "an even number of units a head, for rotation";
        expect(self.head_dim().is_multiple_of(2), "hidden_size", given, even)?;
        let divisor = format!("a divisor of the {heads} heads");
        expect(heads.is_multiple_of(pairs), "num_key_value_heads", pairs.to_string(), &divisor)?;
        for (field, x) in [("rope_theta", self.rope_theta), ("rms_norm_eps", self.rms_norm_eps)] {
            expect(x.is_finite() && x > 0.0, field, ShownNumber(x).to_string(), "a number > 0")?;
        }
        Ok(())
    }

    /// Returns the width of an attention head, `hidden_size / num_attention_heads`.
    pub(crate) fn head_dim(&self) -> usize {
        self.hidden_size / self.num_attention_heads
    }

    /// Returns the bytes that the weights take in f32; `usize::MAX` if they are more.
    pub(crate) fn weight_bytes(&self) -> usize {
        let of = |layers: usize| {
            let bytes = |(_, shape): (String, Vec<usize>)| {
                shape.iter().fold(size_of::<f32>(), |bytes, n| bytes.saturating_mul(*n)).saturating_add(TENSOR_BYTES)
            };
            Self { num_hidden_layers: layers, ..self.clone() }.tensors().map(bytes).fold(0, usize::saturating_add)
        };
        // All layers are alike, and settings from elsewhere may ask for any number of them.
        let ends = of(0);
        of(1).saturating_sub(ends).saturating_mul(self.num_hidden_layers).saturating_add(ends)
    }

    /// The extents by which the size of the weights is determined, in words.
    pub(crate) fn extents(&self) -> String {
        let Self { vocab_size, hidden_size, intermediate_size, num_hidden_layers, .. } = self;
        format!(
            "vocab_size {vocab_size}, hidden_size {hidden_size}, intermediate_size {intermediate_size}, num_hidden_layers {num_hidden_layers}"
        )
    }

    /// The name of the LM head's tensor.
    pub(crate) fn head_name(&self) -> &'static str {
        if self.tie_word_embeddings { EMBEDDING } else { HEAD }
    }

    /// Iterates over the names of the tensors in a folder, and their shapes. It is lazy: a file from elsewhere may claim any
    /// number of layers.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = (String, Vec<usize>)> + use<> {
        let &Self { vocab_size: v, hidden_size: h, intermediate_size: m, .. } = self;
        let of_keys = self.head_dim() * self.num_key_value_heads;
        // Linear weights are `[out, in]`. Only the projections to queries, keys and values have a bias.
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
        let head = (!self.tie_word_embeddings).then(|| (HEAD.to_owned(), vec![v, h]));
        let ends = [(EMBEDDING.to_owned(), vec![v, h]), ("model.norm.weight".to_owned(), vec![h])];
        ends.into_iter().chain(head).chain((0..self.num_hidden_layers).flat_map(layer))
    }
}

/// The fewest bytes that a tensor takes besides its values: for its name, shape and strides.
const TENSOR_BYTES: usize = 256;

/// A tokenizer whose ids are all columns of the LM head, and the ids of its special tokens.
#[derive(Clone)]
pub(crate) struct Vocabulary {
    pub(crate) tokenizer: Tokenizer,
    /// Ids that end a completion.
    pub(crate) end: Vec<u32>,
    /// The id that fills masked positions.
    pub(crate) padding: u32,
}

/// A checkpoint whose settings and tensor shapes have been checked.
pub(crate) struct Qwen2Checkpoint {
    path: PathBuf,
    pub(crate) config: Qwen2Config,
    /// The most positions that the model is made for.
    pub(crate) positions: usize,
    pub(crate) vocabulary: Vocabulary,
    weights: TensorSource,
    /// The entries about the model that go into a fixture's metadata.
    pub(crate) provenance: BTreeMap<String, String>,
}

enum TensorSource {
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
    eos_token_id: Option<EndTokenIds>,
    #[serde(default)]
    pad_token_id: Option<u32>,
}

#[derive(Deserialize)]
struct Generation {
    #[serde(default)]
    eos_token_id: Option<EndTokenIds>,
    #[serde(default)]
    pad_token_id: Option<u32>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum EndTokenIds {
    One(u32),
    Many(Vec<u32>),
}

impl From<EndTokenIds> for Vec<u32> {
    fn from(ids: EndTokenIds) -> Self {
        match ids {
            EndTokenIds::One(id) => vec![id],
            EndTokenIds::Many(ids) => ids,
        }
    }
}

impl Qwen2Checkpoint {
    /// Reads the settings and the tensor shapes of a checkpoint, and none of its weights.
    ///
    /// # Errors
    /// [`FixtureError`] where a file cannot be read, a setting is unknown here, a tensor is missing or has another
    /// shape than the settings say, or the tokenizer has ids beyond the vocabulary.
    pub(crate) fn open(path: &Path) -> Result<Self, FixtureError> {
        if path.is_dir() { Self::open_folder(path) } else { Self::open_gguf(path) }
    }

    fn open_folder(path: &Path) -> Result<Self, FixtureError> {
        let settings_path = path.join("config.json");
        let settings: Settings = read_json(&settings_path)?;
        let config = config(&settings_path, &settings)?;
        let generation_path = path.join("generation_config.json");
        let generation: Option<Generation> =
            generation_path.exists().then(|| read_json(&generation_path)).transpose()?;
        // The generation settings override those of the model, as in Hugging Face's loader.
        let (end, padding) = match generation {
            Some(Generation { eos_token_id: Some(end), pad_token_id }) => {
                (Some(end), pad_token_id.or(settings.pad_token_id))
            }
            _ => (settings.eos_token_id, settings.pad_token_id),
        };
        let tokenizer_path = path.join("tokenizer.json");
        let tokenizer = parse_tokenizer(&read_bounded(&tokenizer_path)?).map_err(|error| {
            FixtureError::invalid(&tokenizer_path, "tokenizer", first_line(&error), "what the tokenizers library reads")
        })?;

        let listing = |reason| FixtureError::io(path, "list", reason);
        let mut names: Vec<PathBuf> = Vec::new();
        for entry in fs::read_dir(path).map_err(listing)? {
            let file = entry.map_err(listing)?.path();
            if file.extension().is_some_and(|extension| extension == "safetensors") {
                names.push(file);
            }
        }
        // Files are taken in the order of their names, so that an error does not depend on how the file system lists
        // them.
        names.sort();
        let mut provenance = BTreeMap::from([
            ("model".into(), name_of(path)),
            ("weights".into(), "safetensors, each tensor converted to f32".into()),
        ]);
        let (mut files, mut holder) = (Vec::new(), BTreeMap::new());
        // A tensor may be in any of the files, but only in one.
        for name in &names {
            let file = SafetensorsFile::open(name)?;
            for tensor in file.names() {
                if let Some(first) = holder.insert(tensor.to_owned(), files.len()) {
                    let given = format!("one here and one in {}", ShownPath(&names[first]));
                    return Err(FixtureError::invalid(name, &format!("tensor `{tensor}`"), given, "one"));
                }
            }
            provenance.insert(format!("sha256_of.{}", name_of(name)), hash_of(name, u64::MAX)?);
            files.push(file);
        }
        Qwen2Checkpoint {
            path: path.into(),
            positions: settings.max_position_embeddings,
            vocabulary: vocabulary(&tokenizer_path, tokenizer, &config, end.map_or_else(Vec::new, Vec::from), padding)?,
            config,
            weights: TensorSource::Safetensors { files, holder },
            provenance,
        }
        .checked()
    }

    fn open_gguf(path: &Path) -> Result<Self, FixtureError> {
        let (file, content) = gguf::read_header(path)?;
        let settings = gguf::settings_of(path, &content)?;
        let config = config(path, &settings)?;
        let tokenizer = Tokenizer::from_gguf(&content).map_err(|error| {
            FixtureError::invalid(path, "tokenizer", first_line(&error), "a byte-level BPE in the GGUF's metadata")
        })?;
        // The quantisations of the tensors, for the metadata of fixtures.
        let mut types: BTreeMap<String, usize> = BTreeMap::new();
        for info in content.tensor_infos.values() {
            *types.entry(format!("{:?}", info.ggml_dtype)).or_default() += 1;
        }
        let types = types.iter().map(|(name, count)| format!("{count} {name}")).collect::<Vec<_>>().join(", ");
        let named = content.metadata.get("general.name").and_then(|name| name.to_string().ok());
        let provenance = BTreeMap::from([
            ("model".into(), named.map_or_else(|| name_of(path), |name| ForeignText::from(name).to_string())),
            ("weights".into(), format!("GGUF, dequantised to f32: {types}")),
            ("gguf_file".into(), name_of(path)),
            ("gguf_sha256".into(), hash_of(path, u64::MAX)?),
        ]);
        let end = settings.eos_token_id.map_or_else(Vec::new, Vec::from);
        Qwen2Checkpoint {
            path: path.into(),
            positions: settings.max_position_embeddings,
            vocabulary: vocabulary(path, tokenizer, &config, end, settings.pad_token_id)?,
            config,
            weights: TensorSource::Gguf { file, content: Box::new(content) },
            provenance,
        }
        .checked()
    }

    /// Returns the checkpoint, once every tensor is found in its shape.
    fn checked(self) -> Result<Self, FixtureError> {
        // Every tensor is looked up before any is read: a missing one is found in milliseconds and not after gigabytes.
        for (name, expected) in self.config.tensors() {
            let (held, given) = self.shape_of(&name)?;
            if given != expected {
                let field = format!("tensor `{held}`");
                return Err(FixtureError::invalid(
                    &self.path,
                    &field,
                    format!("shape {given:?}"),
                    format!("{expected:?}, as the settings say"),
                ));
            }
        }
        // The weights are widened to f32, so that a file of a few bits a weight may need more memory than its size.
        let needed = self.config.weight_bytes();
        expect_host_room(String::new, needed).map_err(|Shortage { needed, available, .. }| {
            let expected = format!("at most {available}, which are available");
            FixtureError::invalid(&self.path, "weights in f32", format!("{needed} bytes"), expected)
        })?;
        Ok(self)
    }

    /// Returns the name of a tensor in the file, and its shape.
    fn shape_of(&self, name: &str) -> Result<(String, Vec<usize>), FixtureError> {
        let missing = |held: &str| {
            FixtureError::invalid(&self.path, &format!("tensor `{held}`"), "none", "one, as the settings say")
        };
        match &self.weights {
            TensorSource::Safetensors { files, holder } => {
                let file = &files[*holder.get(name).ok_or_else(|| missing(name))?];
                Ok((name.into(), file.info(name)?.1.to_vec()))
            }
            TensorSource::Gguf { content, .. } => {
                let held = gguf::name_of(name);
                let info = content.tensor_infos.get(&held).ok_or_else(|| missing(&held))?;
                Ok((held, info.shape.dims().to_vec()))
            }
        }
    }

    /// Reads the weights in f32, by their names in a folder.
    ///
    /// # Errors
    /// [`FixtureError`] where one cannot be read.
    pub(crate) fn weights(mut self) -> Result<BTreeMap<String, Tensor>, FixtureError> {
        let mut weights = BTreeMap::new();
        // One tensor at a time is widened to f32 or dequantised: the file's own form and the result are never both
        // there as a whole.
        for (name, shape) in self.config.tensors() {
            let tensor = match &mut self.weights {
                TensorSource::Safetensors { files, holder } => single_tensor(&files[holder[&name]], &name, &shape)?,
                TensorSource::Gguf { file, content } => {
                    let held = gguf::name_of(&name);
                    let tensor = content.tensor(file, &held, &Device::Cpu);
                    tensor.and_then(|tensor| tensor.dequantize(&Device::Cpu)).map_err(|error| {
                        let field = format!("tensor `{held}`");
                        FixtureError::invalid(&self.path, &field, first_line(&error), "what candle reads")
                    })?
                }
            };
            weights.insert(name, tensor);
        }
        Ok(weights)
    }
}

/// A tensor of a safetensors file, in f32.
///
/// # Errors
/// [`FixtureError`] where it is missing, has another shape, or is not of floats.
pub(crate) fn single_tensor(file: &SafetensorsFile, name: &str, shape: &[usize]) -> Result<Tensor, FixtureError> {
    file.expect_shape(name, shape, "as the settings say")?;
    let values = match file.floats::<IxDyn>(name)? {
        FloatArray::F64(values) => values.iter().map(|&x| x as f32).collect(),
        FloatArray::F32(values) => values.into_raw_vec_and_offset().0,
        FloatArray::Bf16(values) => values.iter().map(|x| x.to_f32()).collect(),
        FloatArray::F16(values) => values.iter().map(|x| x.to_f32()).collect(),
    };
    Ok(Tensor::from_vec(values, shape, &Device::Cpu).expect("as many values as the shape says"))
}

/// The extents, once the settings are of a model that is known here.
fn config(path: &Path, s: &Settings) -> Result<Qwen2Config, FixtureError> {
    let config = Qwen2Config {
        vocab_size: s.vocab_size,
        hidden_size: s.hidden_size,
        intermediate_size: s.intermediate_size,
        num_hidden_layers: s.num_hidden_layers,
        num_attention_heads: s.num_attention_heads,
        num_key_value_heads: s.num_key_value_heads,
        rope_theta: s.rope_theta,
        rms_norm_eps: s.rms_norm_eps,
        tie_word_embeddings: s.tie_word_embeddings,
    };
    config.check().map_err(|Misfit { field, given, expected }| {
        FixtureError::invalid(path, &format!("`{field}`"), given, expected)
    })?;
    // Settings that would change what the model computes are refused, not ignored.
    let expect = |holds: bool, field: &str, given: String, expected: &str| {
        if holds { Ok(()) } else { Err(FixtureError::invalid(path, &format!("`{field}`"), given, expected)) }
    };
    expect(s.model_type == "qwen2", "model_type", format!("`{}`", s.model_type), "`qwen2`: Qwen2 or Qwen2.5")?;
    expect(s.hidden_act == "silu", "hidden_act", format!("`{}`", s.hidden_act), "`silu`")?;
    expect(!s.use_sliding_window, "use_sliding_window", "true".into(), "false")?;
    expect(s.rope_scaling.is_none(), "rope_scaling", "a scaling".into(), "null")?;
    expect(
        s.head_dim.is_none_or(|n| n == config.head_dim()),
        "head_dim",
        format!("{:?}", s.head_dim),
        "hidden_size / num_attention_heads",
    )?;
    expect(s.max_position_embeddings > 0, "max_position_embeddings", "0".into(), "at least 1")?;
    Ok(config)
}

/// Returns the tokenizer, once all of its ids are columns of the LM head.
fn vocabulary(
    path: &Path,
    mut tokenizer: Tokenizer,
    config: &Qwen2Config,
    end: Vec<u32>,
    padding: Option<u32>,
) -> Result<Vocabulary, FixtureError> {
    let columns = config.vocab_size;
    let beyond = |id: u32| id as usize >= columns;
    // A token beyond the head would have no logit.
    if let Some((token, id)) =
        tokenizer.get_vocab(true).into_iter().max_by_key(|(_, id)| *id).filter(|(_, id)| beyond(*id))
    {
        let field = format!("token `{:.200}`", ForeignText::from(token));
        return Err(FixtureError::invalid(
            path,
            &field,
            format!("id {id}"),
            format!("ids below the model's vocabulary of {columns}"),
        ));
    }
    // A padding id is fed to the model, so it must be an id: the end token serves where none is named.
    let padding = padding.or(end.first().copied()).unwrap_or(0);
    if let Some(id) = end.iter().copied().chain([padding]).find(|id| beyond(*id)) {
        let expected = format!("ids below the model's vocabulary of {columns}");
        return Err(FixtureError::invalid(path, "end or padding token", format!("id {id}"), expected));
    }
    // Prompts are encoded as they are, neither padded nor cut.
    tokenizer.with_padding(None);
    tokenizer
        .with_truncation(None)
        .map_err(|error| FixtureError::invalid(path, "truncation", first_line(&error), "none"))?;
    Ok(Vocabulary { tokenizer, end, padding })
}

/// Reads settings or a tokenizer.
pub(crate) fn read_bounded(path: &Path) -> Result<Vec<u8>, FixtureError> {
    read_regular(path, LONGEST_SETTINGS).map_err(|reason| FixtureError::io(path, "read", reason))
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, FixtureError> {
    serde_json::from_slice(&read_bounded(path)?)
        .map_err(|error| FixtureError::invalid(path, "settings", first_line(&error), "those of a Qwen2 model, in JSON"))
}

fn name_of(path: &Path) -> String {
    ForeignText::from(path.file_name().unwrap_or(path.as_os_str()).to_string_lossy()).to_string()
}

/// Computes the SHA-256 of a file of at most `longest` bytes.
pub(crate) fn hash_of(path: &Path, longest: u64) -> Result<String, FixtureError> {
    let io = |reason| FixtureError::io(path, "read", reason);
    let file = open_regular(path).map_err(io)?;
    let length = file.metadata().map_err(io)?.len();
    if length > longest {
        return Err(FixtureError::invalid(path, "length", format!("{length} bytes"), format!("at most {longest}")));
    }
    sha256(file).map_err(io)
}

/// Computes the SHA-256 of a file of tensors, once its header says that it is as long as they are.
fn hash_of_tensors(path: &Path) -> Result<String, FixtureError> {
    if path.extension().is_some_and(|extension| extension == "safetensors") {
        SafetensorsFile::open(path)?;
    } else {
        gguf::read_header(path)?;
    }
    hash_of(path, u64::MAX)
}

/// Computes the SHA-256 of the files that a checkpoint is read from: a GGUF file, or a folder's settings, tokenizer and weights, by their names in it.
///
/// # Errors
/// [`FixtureError`] where one cannot be read.
pub(crate) fn content_hash(path: &Path) -> Result<String, FixtureError> {
    if !path.is_dir() {
        return hash_of_tensors(path);
    }
    let listing = |reason| FixtureError::io(path, "list", reason);
    let mut files: Vec<PathBuf> = Vec::new();
    for entry in fs::read_dir(path).map_err(listing)? {
        let file = entry.map_err(listing)?.path();
        let read =
            ["config.json", "generation_config.json", "tokenizer.json"].map(|name| path.join(name)).contains(&file);
        if read || file.extension().is_some_and(|extension| extension == "safetensors") {
            files.push(file);
        }
    }
    // One line a file, in the order of names, as sha256sum prints: its own hash is that of the content.
    files.sort();
    let is_json = |file: &PathBuf| file.extension().is_some_and(|extension| extension == "json");
    let hash = |file| if is_json(file) { hash_of(file, LONGEST_SETTINGS) } else { hash_of_tensors(file) };
    let lines = files.iter().map(|file| Ok(format!("{} {}\n", hash(file)?, name_of(file))));
    let all = lines.collect::<Result<String, FixtureError>>()?;
    Ok(hexadecimal(Sha256::new_with_prefix(all)))
}

/// Parses a `tokenizer.json`.
///
/// # Errors
/// The parser's message.
pub(crate) fn parse_tokenizer(bytes: &[u8]) -> Result<Tokenizer, String> {
    /// The part whose parser in the tokenizers library panics at an error of syntax, so that it is read twice.
    #[derive(Deserialize)]
    struct DecoderSyntax {
        #[serde(default, rename = "decoder")]
        _decoder: serde_json::Value,
    }
    serde_json::from_slice::<DecoderSyntax>(bytes).map_err(|error| error.to_string())?;
    Tokenizer::from_bytes(bytes).map_err(|error| error.to_string())
}

/// Returns the first line of an error, without the backtrace that candle appends.
pub(crate) fn first_line(error: &impl Display) -> String {
    ForeignText::from(error.to_string().lines().next().unwrap_or_default()).to_string()
}
