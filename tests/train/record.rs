//! `assay record`: a tiny checkpoint of random weights, made here, as a folder and as a GGUF file. What is recorded is
//! replayed, compared with another way through the model, and refused where it should be.

use crate::common::checkpoint;
use crate::common::command;
use std::fs;
use std::path::{Path, PathBuf};

use crate::common::checkpoint::{END, HIDDEN, VOCAB, Weights, settings, tokenizer, tokens, weights};
use crate::common::command::{assay, assert_refused};
use crate::common::formula::Formula;
use crate::common::interruption::{interrupted, limited};
use assay::fixture::SafetensorsFile;
use assay::train::Qwen2Config;
use assay::train::candle_core::quantized::GgmlDType;
use assay::train::candle_core::quantized::gguf_file::Value;
use assay::train::candle_core::{DType, Device, Tensor};
use ndarray::{Array2, Ix1, Ix2, Ix3};
use serde_json::json;
use tempfile::TempDir;

const PROMPT: &str = "what is 7 plus 5 ";

/// A checkpoint and what is recorded of it.
struct Case {
    folder: TempDir,
}

impl Case {
    fn new() -> Self {
        Self::of(VOCAB, false)
    }

    fn of(vocab: usize, tied: bool) -> Self {
        let case = Self { folder: TempDir::new().unwrap() };
        checkpoint::write(&case.path("model"), vocab, tied);
        fs::create_dir(case.path("out")).unwrap();
        case.write("prompts.jsonl", &format!("{}\n", json!({"prompt": PROMPT, "answer": 12})));
        case
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    fn write_weights(&self, weights: &Weights) {
        checkpoint::write_weights(&self.path("model"), weights);
    }

    fn args(&self, model: &str, more: &[&str]) -> Vec<String> {
        let [model, prompts, out] =
            [model, "prompts.jsonl", "out/f.safetensors"].map(|name| self.path(name).display().to_string());
        let args = ["record", "--model", &model, "--prompts", &prompts, "--out", &out];
        args.iter().chain(more).map(ToString::to_string).collect()
    }

    #[track_caller]
    fn record(&self, model: &str, more: &[&str]) -> SafetensorsFile {
        let args = self.args(model, more);
        let output = assay(&args.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(output.code, 0, "{}", output.stderr);
        SafetensorsFile::open(self.path("out/f.safetensors")).unwrap()
    }

    #[track_caller]
    fn assert_refused(&self, model: &str, more: &[&str], parts: &[&str]) {
        let args = self.args(model, more);
        assert_refused(&args.iter().map(String::as_str).collect::<Vec<_>>(), parts);
        self.assert_nothing_written();
    }

    #[track_caller]
    fn assert_nothing_written(&self) {
        let left: Vec<_> = fs::read_dir(self.path("out")).unwrap().collect();
        assert!(left.is_empty(), "{left:?}");
    }

    /// The same weights as a GGUF file of `dtype`.
    fn write_gguf(&self, dtype: GgmlDType, metadata: &[(&str, Value)]) {
        checkpoint::write_gguf(&self.path("model.gguf"), dtype, metadata);
    }
}

/// Logits after each of `ids`, `[L,V]`.
fn logits_of(weights: &Weights, ids: &[u32]) -> Array2<f64> {
    // The settings of `config.json` that shape the model.
    let config = Qwen2Config {
        vocab_size: VOCAB,
        hidden_size: HIDDEN,
        intermediate_size: 96,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        rope_theta: 1e6,
        rms_norm_eps: 1e-6,
        tie_word_embeddings: false,
    };
    let formula = Formula::of(&config, weights.iter().map(|(name, weight)| (name, weight)));
    formula.hidden(ids).dot(&formula.weights["lm_head.weight"].t())
}

fn replay(file: &Path) -> command::Output {
    assay(&["replay", &file.display().to_string(), "--impl", "native"])
}

/// Every position against a forward over the whole sequence, without cache or chunks.
#[test]
fn record_logits_are_the_models_and_logps_those_of_drawn_ids() {
    let case = Case::new();
    let file = case.record("model", &["--group", "6", "--max-tokens", "60", "--seed", "3", "--dtype", "f32"]);
    let ids: Array2<i64> = file.integers::<Ix2>("ids").unwrap();
    let mask: Array2<f64> = file.numbers::<Ix2>("mask").unwrap();
    let logits = file.numbers::<Ix3>("logits").unwrap();
    let old_logps = file.numbers::<Ix2>("old_logps").unwrap();
    let characters = tokens();
    let id_of = |c: char| characters.iter().position(|token| token == &c.to_string().replace(' ', "Ġ")).unwrap() as u32;
    let prompt: Vec<u32> = PROMPT.chars().map(id_of).collect();
    assert_eq!(file.metadata()["prompt_ids"], format!("{:?}", [&prompt]).replace(' ', ""));
    let (weights, mut compared) = (weights(VOCAB, false), 0);
    let of_rows: Vec<Array2<f64>> = ids
        .rows()
        .into_iter()
        .map(|row| {
            let drawn = row.iter().map(|&id| u32::try_from(id).unwrap());
            logits_of(&weights, &prompt.iter().copied().chain(drawn).collect::<Vec<_>>())
        })
        .collect();
    for ((b, t), &counts) in mask.indexed_iter() {
        let expected = of_rows[b].row(prompt.len() - 1 + t);
        for (v, &x) in expected.iter().enumerate() {
            assert!((logits[[b, t, v]] - x).abs() < 1e-4, "[{b},{t},{v}]: {} {x}", logits[[b, t, v]]);
        }
        if counts == 1.0 {
            let lse = expected.iter().map(|x| x.exp()).sum::<f64>().ln();
            let logp = expected[usize::try_from(ids[[b, t]]).unwrap()] - lse;
            assert!((old_logps[[b, t]] - logp).abs() < 1e-4, "[{b},{t}]: {} {logp}", old_logps[[b, t]]);
            compared += 1;
        } else {
            assert_eq!((ids[[b, t]], old_logps[[b, t]]), (tokens().len() as i64 - 1, 0.0), "padding");
        }
    }
    assert_eq!(compared.to_string(), file.metadata()["expected.logits.n_tokens"]);
    assert!(mask.iter().any(|&counts| counts == 0.0), "completions of several lengths: {mask}");
}

#[test]
fn record_of_a_fixture_replays_as_it_is() {
    let case = Case::new();
    for dtype in ["bf16", "f32", "f16"] {
        let file = case.record("model", &["--group", "4", "--max-tokens", "12", "--dtype", dtype]);
        assert!(file.metadata()["expected.definition"].ends_with("temperature=1"), "{:?}", file.metadata());
        let output = replay(&case.path("out/f.safetensors"));
        assert_eq!(output.code, 0, "{dtype}: {}{}", output.stdout, output.stderr);
        assert!(output.stdout.contains("│ reference "), "{dtype}: {}", output.stdout);
    }
    // At another temperature the file carries the loss that its old log-probabilities belong to.
    let file = case.record("model", &["--temperature", "0.7", "--max-tokens", "12"]);
    let expected: Vec<_> = file.metadata().keys().filter(|key| key.starts_with("expected.")).collect();
    assert!(expected.is_empty() && file.metadata()["temperature"] == "0.7", "{expected:?}");
    let output = replay(&case.path("out/f.safetensors"));
    assert_eq!(output.code, 0, "{}{}", output.stdout, output.stderr);
    assert!(!output.stdout.contains("│ reference "), "{}", output.stdout);
}

#[test]
fn record_of_a_seed_repeats_and_of_another_differs() {
    let case = Case::new();
    let hashes = |seed: &str| {
        let file = case.record("model", &["--seed", seed, "--max-tokens", "9"]);
        ["ids", "logits", "old_logps"].map(|name| file.metadata()[&format!("sha256.{name}")].clone())
    };
    let first = hashes("1");
    assert_eq!(first, hashes("1"));
    assert_ne!(first, hashes("2"));
}

#[test]
fn record_of_a_gguf_of_the_same_weights_is_the_same_file() {
    let case = Case::new();
    let arrays = |file: SafetensorsFile| {
        ["ids", "logits", "old_logps", "hidden", "rewards", "advantages"]
            .map(|name| file.metadata()[&format!("sha256.{name}")].clone())
    };
    let options = ["--max-tokens", "10", "--group", "2"];
    let folder = arrays(case.record("model", &options));
    case.write_gguf(GgmlDType::F32, &[]);
    assert_eq!(arrays(case.record("model.gguf", &options)), folder);
    case.write_gguf(GgmlDType::Q8_0, &[]);
    let quantised = case.record("model.gguf", &options);
    assert!(quantised.metadata()["weights"].contains("Q8_0"), "{:?}", quantised.metadata());
    assert_eq!(replay(&case.path("out/f.safetensors")).code, 0);
}

#[test]
fn lm_head_that_is_tied_is_the_embedding() {
    let case = Case::of(VOCAB, true);
    let file = case.record("model", &["--max-tokens", "2", "--group", "1", "--dtype", "f32"]);
    let embedding = weights(VOCAB, true)[0].1.to_vec2::<f32>().unwrap();
    let hidden = file.numbers::<Ix3>("hidden").unwrap();
    let logits = file.numbers::<Ix3>("logits").unwrap();
    for (v, row) in embedding.iter().enumerate() {
        let product: f64 = row.iter().enumerate().map(|(h, &w)| f64::from(w) * hidden[[0, 0, h]]).sum();
        assert!((product - logits[[0, 0, v]]).abs() < 1e-4);
    }
}

#[test]
fn record_of_given_completions_is_scored_and_rewarded() {
    let case = Case::new();
    let line = |completion: &str, more: serde_json::Value| {
        let mut line = json!({"prompt": PROMPT, "completion": completion});
        line.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        format!("{line}\n")
    };
    let lines = [
        line(&format!("#### 12{END}"), json!({"answer": "so it is #### 12"})),
        line("it is 11", json!({"answer": 12})),
        line("12", json!({"reward": 0.125})),
    ];
    case.write("prompts.jsonl", &lines.concat());
    let file = case.record("model", &[]);
    assert_eq!(file.numbers::<Ix1>("rewards").unwrap().to_vec(), [1.5, 0.0, 0.125]);
    let advantages = file.numbers::<Ix1>("advantages").unwrap();
    assert!(advantages[0] > 0.0 && advantages[1] < 0.0 && advantages.sum().abs() < 1e-6, "{advantages}");
    let mask = file.numbers::<Ix2>("mask").unwrap();
    assert_eq!(mask.rows().into_iter().map(|row| row.sum()).collect::<Vec<_>>(), [8.0, 8.0, 2.0]);
    assert_eq!(file.metadata()["ended_by_itself"], "[true, false, false]");
    let output = replay(&case.path("out/f.safetensors"));
    assert_eq!(output.code, 0, "{}{}", output.stdout, output.stderr);
    case.write("prompts.jsonl", &lines.concat());
    fs::remove_file(case.path("out/f.safetensors")).unwrap();
    case.assert_refused("model", &["--group", "2"], &["prompts.jsonl", "completions", "nothing is sampled"]);
}

#[test]
fn record_checkpoints_that_do_not_fit_are_refused() {
    let case = Case::new();
    let refuse = |parts: &[&str]| case.assert_refused("model", &[], parts);
    let whole = weights(VOCAB, false);
    let without = |name: &str| whole.iter().filter(|(held, _)| held != name).cloned().collect::<Weights>();
    case.write_weights(&without("model.layers.1.mlp.up_proj.weight"));
    refuse(&["model.layers.1.mlp.up_proj.weight", "got none, expected one"]);
    let mut misshaped = without("model.norm.weight");
    misshaped.push(("model.norm.weight".into(), Tensor::zeros(HIDDEN - 1, DType::F32, &Device::Cpu).unwrap()));
    case.write_weights(&misshaped);
    refuse(&["model.norm.weight", "got shape [63], expected [64]"]);
    let mut of_integers = without("model.norm.weight");
    of_integers.push(("model.norm.weight".into(), Tensor::zeros(HIDDEN, DType::U32, &Device::Cpu).unwrap()));
    case.write_weights(&of_integers);
    refuse(&["model.norm.weight", "U32"]);
    let mut of_nan = without("lm_head.weight");
    let nan = Tensor::full(f32::NAN, (VOCAB, HIDDEN), &Device::Cpu).unwrap();
    of_nan.push(("lm_head.weight".into(), nan));
    case.write_weights(&of_nan);
    refuse(&["model", "got logits that are NaN"]);
    case.write_weights(&whole);

    for (key, value, parts) in [
        ("model_type", json!("llama"), ["`model_type`", "expected `qwen2`"]),
        ("num_key_value_heads", json!(3), ["`num_key_value_heads`: got 3", "divisor of the 4 heads"]),
        ("num_key_value_heads", json!(0), ["`num_key_value_heads`: got 0", "from 1"]),
        ("hidden_size", json!(66), ["`hidden_size`: got 66", "multiple of the 4 heads"]),
        ("rope_scaling", json!({"type": "yarn"}), ["`rope_scaling`", "expected null"]),
        ("use_sliding_window", json!(true), ["`use_sliding_window`", "expected false"]),
        ("num_hidden_layers", json!(2_000_000_000), ["model.layers.2.", "got none, expected one"]),
        ("vocab_size", json!("many"), ["config.json", "expected those of a Qwen2 model"]),
        ("vocab_size", json!(40), ["tokenizer.json", "id 42, expected ids below the model's vocabulary of 40"]),
        ("eos_token_id", json!([1, 64]), ["end or padding token", "id 64"]),
    ] {
        let mut settings = settings(VOCAB, false);
        settings[key] = value;
        case.write("model/config.json", &settings.to_string());
        refuse(&parts);
    }
    case.write("model/config.json", &settings(VOCAB, false).to_string());
    case.write("model/tokenizer.json", "{}");
    refuse(&["tokenizer.json", "expected what the tokenizers library reads"]);
    case.write("model/tokenizer.json", &tokenizer().to_string());
    fs::copy(case.path("model/model.safetensors"), case.path("model/second.safetensors")).unwrap();
    refuse(&["second.safetensors", "one here and one in"]);
    case.assert_refused("nowhere", &[], &["nowhere", "cannot read"]);
    case.assert_refused("prompts.jsonl", &[], &["prompts.jsonl", "expected a GGUF file"]);
}

#[test]
fn record_gguf_files_that_do_not_fit_are_refused() {
    let case = Case::new();
    let cases: [(&str, Value, &str); 5] = [
        ("general.architecture", Value::String("llama".into()), "expected `qwen2`"),
        ("general.alignment", Value::U32(0), "expected a power of two"),
        ("qwen2.block_count", Value::String("two".into()), "expected an integer"),
        ("qwen2.block_count", Value::U32(3), "blk.2.attn_norm.weight"),
        ("qwen2.embedding_length", Value::U32(32), "expected [64, 32]"),
    ];
    for (key, value, expected) in cases {
        case.write_gguf(GgmlDType::F32, &[(key, value)]);
        case.assert_refused("model.gguf", &[], &["model.gguf", expected]);
    }
    // Behind a long vocabulary of another key, and with a NUL at the key's end, which candle drops.
    let long = Value::Array(vec![Value::String("x".repeat(60)); 30_000]);
    case.write_gguf(GgmlDType::F32, &[("general.a", long), ("general.alignment\0", Value::U16(0))]);
    case.assert_refused("model.gguf", &[], &["model.gguf", "expected a power of two"]);
    case.write_gguf(GgmlDType::F32, &[]);
    let whole = fs::read(case.path("model.gguf")).unwrap();
    fs::write(case.path("model.gguf"), &whole[..whole.len() / 2]).unwrap();
    case.assert_refused("model.gguf", &[], &["model.gguf"]);
    // Behind a tensor's name are the number of its extents, in 4 bytes, and the extents, in 8 each.
    let name = b"token_embd.weight";
    let at = whole.windows(name.len()).position(|part| part == name).unwrap() + name.len() + 4;
    let mut huge = whole.clone();
    huge[at..at + 8].copy_from_slice(&(1_u64 << 63).to_le_bytes());
    fs::write(case.path("model.gguf"), &huge).unwrap();
    case.assert_refused(
        "model.gguf",
        &[],
        &["model.gguf: tensor `token_embd.weight`: got shape [", "a product that fits"],
    );
    // A hole of 1 TB after the tensors would be read for hours.
    fs::write(case.path("model.gguf"), &whole).unwrap();
    fs::OpenOptions::new().write(true).open(case.path("model.gguf")).unwrap().set_len(1 << 40).unwrap();
    case.assert_refused("model.gguf", &[], &["model.gguf: length: got 1099511627776 bytes, expected at most"]);
}

#[test]
fn record_prompts_that_say_nothing_are_refused() {
    let case = Case::new();
    let good = json!({"prompt": "a"}).to_string();
    for (text, parts) in [
        ("", vec!["lines: got none"]),
        ("\n \n", vec!["lines: got none"]),
        ("{\"prompt\": \"a\"", vec!["line 1", "expected a JSON object"]),
        ("{\"question\": \"a\"}", vec!["line 1", "question", "`prompt`"]),
        ("{\"prompt\": \"\"}", vec!["line 1, `prompt`: got no token"]),
        ("{\"prompt\": \"a\", \"answer\": \"none\"}", vec!["line 1, `answer`: got `none`"]),
        ("{\"prompt\": \"a\", \"reward\": 1}", vec!["`reward`", "not known yet"]),
        (&format!("{good}\n\n{}", json!({"prompt": "a", "completion": "b"})), vec!["line 3, `completion`: got one"]),
        (&json!({"prompt": "a".repeat(250)}).to_string(), vec!["line 1, `prompt`: got 250 tokens", "256 positions"]),
        (
            &json!({"prompt": "a".repeat((1 << 20) + 1)}).to_string(),
            vec!["line 1, `prompt`: got 1048577 bytes", "1048576"],
        ),
    ] {
        case.write("prompts.jsonl", text);
        let mut parts = parts;
        parts.push("prompts.jsonl");
        case.assert_refused("model", &[], &parts);
    }
    case.write("prompts.jsonl", &good);
    case.assert_refused("model", &["--temperature", "0"], &["--temperature: got 0"]);
    fs::write(case.path("prompts.jsonl"), [0xff, 0xfe]).unwrap();
    case.assert_refused("model", &[], &["prompts.jsonl", "cannot read"]);
}

/// A limit on the size of files stands for a full disk: both end a write with an error.
#[cfg(unix)]
#[test]
fn record_onto_a_full_disk_leaves_nothing() {
    let case = Case::new();
    let args = case.args("model", &["--group", "8", "--max-tokens", "64"]);
    let output = limited("trap '' XFSZ && ulimit -f 64", &args);
    assert_eq!(output.code, 2, "{}", output.stderr);
    assert!(output.stderr.contains("f.safetensors: cannot write: File too large"), "{}", output.stderr);
    case.assert_nothing_written();
}

/// The file is larger than the memory that the process may have.
#[cfg(target_os = "linux")]
#[test]
fn record_memory_does_not_grow_with_the_batch() {
    let case = Case::of(50_000, true);
    let options = ["--group", "4", "--max-tokens", "96", "--dtype", "f64"];
    let output = limited("ulimit -d 75000", &case.args("model", &options));
    assert_eq!(output.code, 0, "{}", output.stderr);
    let bytes = fs::metadata(case.path("out/f.safetensors")).unwrap().len();
    assert!(bytes > 110_000_000, "{bytes}");
}

#[cfg(unix)]
#[test]
fn record_interrupted_leaves_nothing() {
    let case = Case::of(50_000, true);
    let args = case.args("model", &["--group", "8", "--max-tokens", "64"]);
    // Once the file has been begun.
    let output = interrupted(&args, || fs::read_dir(case.path("out")).unwrap().next().is_some());
    assert_eq!(output.code, 2, "{}", output.stderr);
    assert!(output.stderr.contains("interrupted, nothing was written"), "{}", output.stderr);
    case.assert_nothing_written();
}

#[test]
fn record_numbers_beyond_any_machine_are_refused() {
    let case = Case::new();
    let most = u64::MAX.to_string();
    case.assert_refused("model", &["--group", &most], &["--group: got 18446744073709551615"]);
    case.assert_refused("model", &["--max-tokens", &most], &["prompts.jsonl", "positions"]);
}

#[test]
fn record_tokenizer_with_a_broken_decoder_is_refused() {
    let case = Case::new();
    let text = tokenizer().to_string();
    let within = text.find("\"decoder\":").unwrap() + 20;
    case.write("model/tokenizer.json", &text[..within]);
    case.assert_refused("model", &[], &["tokenizer.json: tokenizer: got"]);
}
