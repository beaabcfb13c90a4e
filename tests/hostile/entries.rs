//! The commands that read somebody's files, with a valid folder for each.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use assay::fixture::{ProblemFile, write_candidate};
use assay::registry::find;
use assay::train::candle_core::quantized::GgmlDType;
use serde_json::{Value, json};

use super::kinds::{self, Bad, Format};
use super::sandbox::{Content, Ends, Fault, Sandbox, Trial, command_path, names_in};
use crate::common::checkpoint;

/// A command and the file that it reads.
pub(super) struct Entry {
    /// The line of the table.
    pub(super) name: &'static str,
    /// The command line, its words without blanks.
    pub(super) args: &'static str,
    /// The file that becomes a bad one.
    pub(super) file: &'static str,
    pub(super) format: Format,
    pub(super) ends: Ends,
    /// The starts of the names of the other files that the command reads.
    pub(super) needs: &'static [&'static str],
    pub(super) outputs: &'static [&'static str],
    /// The number of bad values that each field of the file is given.
    pub(super) per_field: usize,
    /// Whether a user names the file. What no user names must be a regular file.
    pub(super) named: bool,
}

const fn entry(name: &'static str, args: &'static str, file: &'static str, format: Format, ends: Ends) -> Entry {
    Entry { name, args, file, format, ends, needs: &[], outputs: &[], per_field: 0, named: true }
}

impl Entry {
    const fn needs(self, needs: &'static [&'static str]) -> Self {
        Self { needs, ..self }
    }

    const fn writes(self, outputs: &'static [&'static str]) -> Self {
        Self { outputs, ..self }
    }

    const fn fields(self, per_field: usize) -> Self {
        Self { per_field, ..self }
    }

    const fn unnamed(self) -> Self {
        Self { named: false, ..self }
    }
}

use Ends::{Verdict, Work};
use Format::{Gguf, Json, Library, Lines, Safetensors, Text, Toml, Yaml};

const TRAINS: &[&str] = &["out"];

/// Settings name the folder of the results, so that a bad name of one is another folder.
const ANYWHERE: &[&str] = &[""];

/// Every command that reads a file of a stranger.
pub(super) const ENTRIES: &[Entry] = &[
    entry("spec --spec .yaml", "spec --spec spec.yaml", "spec.yaml", Yaml, Work).fields(3),
    entry("spec --spec .toml", "spec --spec spec.toml", "spec.toml", Toml, Work).fields(2),
    entry("spec --spec .json", "spec --spec spec.json", "spec.json", Json, Work).fields(2),
    entry("generate --spec", "generate --shape 1x2x9 -o new --spec spec.yaml", "spec.yaml", Yaml, Work)
        .writes(&["new"]),
    entry("suite --spec", "suite --cases 1 --wide 0 --shapes 1x2x9 -o new --spec spec.yaml", "spec.yaml", Yaml, Work)
        .writes(&["new"]),
    entry("emit --spec", "emit --target v6e --shape 1x8x256 -o new --spec spec.yaml", "spec.yaml", Yaml, Work)
        .writes(&["new"]),
    entry(
        "check --spec",
        "check --impl native --cases 1 --wide 0 --shapes 1x2x9 --no-power --spec spec.yaml",
        "spec.yaml",
        Yaml,
        Verdict,
    ),
    entry("metrics --problem", "metrics --problem problem.safetensors", "problem.safetensors", Safetensors, Work),
    entry(
        "judge --problem",
        "judge --problem problem.safetensors --candidate candidate.safetensors",
        "problem.safetensors",
        Safetensors,
        Verdict,
    )
    .needs(&["candidate.safetensors"]),
    entry(
        "judge --candidate",
        "judge --problem problem.safetensors --candidate candidate.safetensors",
        "candidate.safetensors",
        Safetensors,
        Verdict,
    )
    .needs(&["problem.safetensors"]),
    entry(
        "judge --spec",
        "judge --problem problem.safetensors --candidate candidate.safetensors --spec spec.yaml",
        "spec.yaml",
        Yaml,
        Verdict,
    )
    .needs(&["problem.safetensors", "candidate.safetensors"]),
    entry("judge SUITE", "judge suite --candidates answers", "suite/suite.json", Json, Verdict)
        .needs(&["suite/", "answers/"])
        .fields(3)
        .unnamed(),
    entry("judge --candidates", "judge suite --candidates answers", "answers/0000.safetensors", Safetensors, Verdict)
        .needs(&["suite/", "answers/"])
        .unnamed(),
    entry("replay", "replay problem.safetensors --impl native", "problem.safetensors", Safetensors, Verdict),
    entry("replay --spec", "replay problem.safetensors --impl native --spec spec.yaml", "spec.yaml", Yaml, Verdict)
        .needs(&["problem.safetensors"]),
    entry("manifest.toml beside a problem", "replay problem.safetensors --impl native", "manifest.toml", Toml, Verdict)
        .needs(&["problem.safetensors"])
        .fields(3)
        .unnamed(),
    entry("fixtures/manifest.toml", "replay --impl native", "fixtures/manifest.toml", Toml, Verdict)
        .needs(&["fixtures/"])
        .fields(2)
        .unnamed(),
    entry("replay --impl file:", "replay problem.safetensors --impl file:export.toml", "export.toml", Toml, Verdict)
        .needs(&["problem.safetensors", "grpo_f32.mlir"])
        .fields(2),
    entry(
        "program of a manifest",
        "replay problem.safetensors --impl file:export.toml",
        "grpo_f32.mlir",
        Text,
        Verdict,
    )
    .needs(&["problem.safetensors", "export.toml"])
    .unnamed(),
    entry(
        "check --repros",
        "check --impl native --cases 1 --wide 0 --shapes 1x2x9 --no-power --repros kept",
        "kept/one.safetensors",
        Safetensors,
        Verdict,
    )
    .writes(&["kept/"])
    .unnamed(),
    entry("peers FILE", "peers run.json", "run.json", Json, Verdict).fields(2),
    entry("peers DIR", "peers runs", "runs/run.json", Json, Verdict).unnamed(),
    entry("report of judge", "report judge.json -o new", "judge.json", Json, Work).writes(&["new"]).fields(2),
    entry("report of check", "report check.json -o new", "check.json", Json, Work).writes(&["new"]).fields(2),
    entry("report of peers", "report peers.json -o new", "peers.json", Json, Work).writes(&["new"]).fields(2),
    entry("report of bench", "report bench.json -o new", "bench.json", Json, Work).writes(&["new"]).fields(2),
    entry("gradcheck --config", "gradcheck --config case.yaml", "case.yaml", Yaml, Verdict).fields(2),
    entry("bench --config", "bench --config case.yaml", "case.yaml", Yaml, Verdict).fields(1),
    entry("panel LIST", "panel list.toml --python /bin/false --cases 1 --wide 0", "list.toml", Toml, Verdict).fields(2),
    entry("tolerances --file", "tolerances --file limits.toml", "limits.toml", Toml, Work),
    entry("list --into", "list --markdown --into page.md", "page.md", Text, Work).writes(&["page.md", "data/"]),
    entry("list --plugin", "list -q --plugin plugin.so", "plugin.so", Library, Work),
    entry(
        "check --plugin",
        "check --impl xla --cases 1 --wide 0 --no-power --plugin plugin.so",
        "plugin.so",
        Library,
        Work,
    ),
    entry("compile --libtpu", "compile --target v6e --shape 1x8x256 --libtpu plugin.so", "plugin.so", Library, Work),
    entry(
        "compile --cuda-plugin",
        "compile --target h100 --impl gpu-one-pass --shape 1x8x256 --cuda-plugin plugin.so",
        "plugin.so",
        Library,
        Work,
    ),
    entry("train --config", "train --config train.yaml", "train.yaml", Yaml, Work).writes(ANYWHERE).fields(2),
    entry("ab --config", "ab --config ab.yaml --judge-every 0", "ab.yaml", Yaml, Verdict).writes(ANYWHERE),
    entry("a run's checkpoint", "train --config train.yaml", "out/checkpoint.safetensors", Safetensors, Work)
        .needs(&["train.yaml", "out/"])
        .writes(TRAINS)
        .unnamed(),
    entry("a run's journal", "train --config train.yaml", "out/metrics.jsonl", Lines, Work)
        .needs(&["train.yaml", "out/"])
        .writes(TRAINS)
        .fields(1)
        .unnamed(),
    entry("a run's warm start", "train --config warm.yaml", "warm.safetensors", Safetensors, Work)
        .needs(&["warm.yaml"])
        .writes(&["out", "warm.safetensors"])
        .unnamed(),
    entry("train of GSM8K", "train --config gsm.yaml", "gsm.jsonl", Lines, Work)
        .needs(&["gsm.yaml"])
        .writes(TRAINS)
        .fields(3)
        .unnamed(),
    entry("record: config.json", RECORD, "model/config.json", Json, Work)
        .needs(MODEL)
        .writes(&["new"])
        .fields(3)
        .unnamed(),
    entry("record: tokenizer.json", RECORD, "model/tokenizer.json", Json, Work)
        .needs(MODEL)
        .writes(&["new"])
        .fields(1)
        .unnamed(),
    entry("record: weights", RECORD, "model/model.safetensors", Safetensors, Work)
        .needs(MODEL)
        .writes(&["new"])
        .unnamed(),
    entry(
        "record: GGUF",
        "record --model tiny.gguf --prompts prompts.jsonl --out new --group 2 --max-tokens 2",
        "tiny.gguf",
        Gguf,
        Work,
    )
    .needs(&["prompts.jsonl"])
    .writes(&["new"]),
    entry("record --prompts", RECORD, "prompts.jsonl", Lines, Work).needs(MODEL).writes(&["new"]).fields(4),
];

const RECORD: &str = "record --model model --prompts prompts.jsonl --out new --group 2 --max-tokens 2";
const MODEL: &[&str] = &["model/", "prompts.jsonl"];

/// The bytes of every file of the valid folder.
pub(super) static VALID: LazyLock<BTreeMap<String, Content>> = LazyLock::new(valid);

/// Makes the valid folder, by the command under test where it writes such a file.
fn valid() -> BTreeMap<String, Content> {
    let sandbox = Sandbox::new(&[]);
    let write = |name: &str, text: String| Content::of(text).place(&sandbox.path(name));
    let assay = |args: &str| {
        let ran = sandbox.wait(sandbox.start(&words(args), &[]));
        assert!(ran.status.is_some_and(|status| status.code() == Some(0)), "{args}: {}", ran.text());
    };
    assay("generate --shape 2x5x1031 --dtype f32 --seed 4 -o problem.safetensors");
    assay("suite --cases 2 --wide 0 --shapes 1x2x5 -o suite");
    for (problem, answer) in [
        ("problem.safetensors", "candidate.safetensors"),
        ("suite/0000.safetensors", "answers/0000.safetensors"),
        ("suite/0001.safetensors", "answers/0001.safetensors"),
    ] {
        fs::create_dir_all(sandbox.path("answers")).unwrap();
        let file = ProblemFile::open(sandbox.path(problem)).unwrap();
        let spec = file.spec().unwrap().unwrap_or_default();
        let candidate =
            find("native", None).unwrap().run(&spec, file.problem("logits", Some("old_logps")).unwrap(), 1).unwrap();
        write_candidate(sandbox.path(answer), &candidate, &BTreeMap::new()).unwrap();
    }
    fs::create_dir(sandbox.path("kept")).unwrap();
    fs::copy(sandbox.path("suite/0000.safetensors"), sandbox.path("kept/one.safetensors")).unwrap();
    let suite: Value = serde_json::from_slice(&fs::read(sandbox.path("suite/suite.json")).unwrap()).unwrap();
    let spec = suite["spec"].clone();
    write("spec.yaml", spec.to_string());
    write("spec.json", spec.to_string());
    write("spec.toml", toml::to_string(&kinds::without_null(spec).unwrap()).unwrap());
    let tree = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
    fs::create_dir(sandbox.path("runs")).unwrap();
    for name in ["run.json", "runs/run.json"] {
        fs::copy(tree("fixtures/peers/trl_grpo_grad_accum.json"), sandbox.path(name)).unwrap();
    }
    fs::copy(tree("fixtures/exported/grpo_f32.toml"), sandbox.path("export.toml")).unwrap();
    fs::copy(tree("fixtures/exported/grpo_f32.mlir"), sandbox.path("grpo_f32.mlir")).unwrap();
    fs::copy(tree("tolerances.toml"), sandbox.path("limits.toml")).unwrap();
    assay("judge --problem problem.safetensors --candidate candidate.safetensors -q --json judge.json");
    assay("check --impl native --cases 2 --wide 0 --shapes 1x2x9 --no-power -q --json check.json");
    assay("peers run.json -q --json peers.json");
    assay("bench --impl native --shape 1x4x33 -q --json bench.json");
    let case = json!({
        "batch": {"generate": {"shape": [1, 2, 9], "dtype": "f32", "regime": "normal", "seed": 0}},
        "spec": {"objective": {"ppo_clip": {"epsilon_low": 0.2, "epsilon_high": 0.2}}},
        "kernel": {"enabled": true, "impl": "native"},
        "bench": {"warmup": 1, "steps": 1},
    });
    write("case.yaml", case.to_string());
    let kernel = json!({"name": "n", "serve": ["numpy_kernels", "textbook"], "expected": "right", "is": "closed form"});
    write("list.toml", toml::to_string(&json!({"kernel": [kernel]})).unwrap());
    write("page.md", "# Page\n<!-- assay list --markdown -->\n<!-- end of matrix -->\n".into());
    fs::write(sandbox.path("plugin.so"), kinds::library()).unwrap();

    // The manifests, with the sizes and hashes of files that are there.
    let problem = fs::read(sandbox.path("problem.safetensors")).unwrap();
    let hash = assay::fixture::sha256(fs::File::open(sandbox.path("problem.safetensors")).unwrap()).unwrap();
    let listed = json!({"name": "problem.safetensors", "bytes": problem.len(), "sha256": hash, "source": "a test", "licence": "MIT"});
    let manifest = toml::to_string(&json!({"file": [listed]})).unwrap();
    write("manifest.toml", manifest.clone());
    write("fixtures/manifest.toml", manifest);
    fs::copy(sandbox.path("problem.safetensors"), sandbox.path("fixtures/problem.safetensors")).unwrap();

    // Training: a run that is complete, and what others begin with.
    let train = train_settings();
    write("train.yaml", train.to_string());
    assay("train --config train.yaml -q");
    let mut warm = train.clone();
    warm["out"] = "out".into();
    warm["warm_start"]["cache"] = "./warm.safetensors".into();
    write("warm.yaml", warm.to_string());
    fs::rename(sandbox.path("out"), sandbox.path("complete")).unwrap();
    assay("train --config warm.yaml -q");
    fs::remove_dir_all(sandbox.path("out")).unwrap();
    fs::rename(sandbox.path("complete"), sandbox.path("out")).unwrap();
    let mut ab = train.clone();
    ab.as_object_mut().unwrap().remove("loss");
    write("ab.yaml", ab.to_string());
    let mut gsm = train;
    gsm["task"] = json!({"gsm8k": {"train": "gsm.jsonl", "evaluate": "gsm.jsonl"}});
    write("gsm.yaml", gsm.to_string());
    write("gsm.jsonl", json!({"question": "Two and two?", "answer": "It is\n#### 4"}).to_string() + "\n");

    checkpoint::write(&sandbox.path("model"), checkpoint::VOCAB, false);
    checkpoint::write_gguf(&sandbox.path("tiny.gguf"), GgmlDType::F32, &[]);
    write("prompts.jsonl", json!({"prompt": "what is 7 plus 5 ", "answer": 12}).to_string() + "\n");

    let bytes = |name: String| (name.clone(), Content::of(fs::read(sandbox.path(&name)).unwrap()));
    names_in(&sandbox.work()).into_iter().filter(|name| *name != "out/.lock").map(bytes).collect()
}

/// The settings of a training run of a second.
pub(super) fn train_settings() -> Value {
    json!({
        "steps": 3, "out": "out", "threads": 1, "checkpoint_every": 1, "evaluate_every": 3,
        "model": {"init": {
            "vocab_size": 257, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": true,
        }},
        "task": {"arithmetic": {"train": 8, "evaluate": 1, "largest": 5}},
        "warm_start": {"steps": 2, "batch": 2, "learning_rate": 1e-2},
        "rollout": {"prompts": 1, "group": 2, "max_new_tokens": 3},
        "loss": {"kl": {"beta": 0.04}},
    })
}

pub(super) fn words(line: &str) -> Vec<String> {
    line.split(' ').map(String::from).collect()
}

/// Returns the valid bytes of a file.
pub(super) fn valid_bytes(name: &str) -> &'static [u8] {
    let Some(Content::Bytes(bytes)) = VALID.get(name) else { panic!("no {name} in the valid folder") };
    bytes
}

impl Entry {
    /// A run with `content` in place of the file.
    pub(super) fn trial(&self, kind: &'static str, name: String, content: Content, ends: Ends) -> Trial {
        let is_needed = |name: &String| *name != self.file && self.needs.iter().any(|start| name.starts_with(start));
        let mut files: Vec<_> = VALID
            .iter()
            .filter(|(name, _)| is_needed(name))
            .map(|(name, content)| (name.clone(), content.clone()))
            .collect();
        files.push((self.file.into(), content));
        Trial {
            entry: self.name,
            kind,
            name,
            args: words(self.args),
            files,
            environment: Vec::new(),
            ends,
            mentions: None,
            outputs: self.outputs.iter().map(|name| (*name).into()).collect(),
            hang: Fault::Unbounded,
            look: None,
        }
    }

    /// The run with the valid file.
    pub(super) fn valid(&self) -> Trial {
        self.trial("valid", "the valid file".into(), VALID[self.file].clone(), self.ends)
    }

    /// All bad files in place of the valid one.
    pub(super) fn trials(&self) -> Vec<Trial> {
        let valid = valid_bytes(self.file);
        let mut all = kinds::foreign(valid, self.format);
        if !self.named {
            all.push(Bad { kind: "files", name: "a FIFO".into(), content: Content::Fifo, refused: true });
        }
        match self.format {
            Safetensors => all.extend(kinds::tensors(valid)),
            Gguf => all.extend(kinds::gguf(valid)),
            Toml if self.per_field > 0 => {
                let value: Value = toml::from_str(std::str::from_utf8(valid).unwrap()).unwrap();
                all.extend(kinds::fields(&value, Toml, self.per_field));
            }
            Lines => {
                let value: Value =
                    serde_json::from_str(std::str::from_utf8(valid).unwrap().lines().next().unwrap()).unwrap();
                all.extend(kinds::fields(&value, Lines, self.per_field));
            }
            _ if self.per_field > 0 => {
                all.extend(kinds::fields(&serde_json::from_slice(valid).unwrap(), self.format, self.per_field));
            }
            _ => {}
        }
        let last = self.file.rsplit('/').next().unwrap().to_string();
        let trials = all.into_iter().map(|Bad { kind, name, content, refused }| {
            // A file that nobody named may be absent, or be taken for another's; and a folder of answers is judged as it is.
            let ends = if refused && self.named { Ends::Refused } else { self.ends };
            let mut trial = self.trial(kind, name, content, ends);
            // A compiler that lacks another file may name that one.
            let is_named = refused && self.named && self.format != Library;
            trial.mentions = is_named.then(|| last.clone());
            trial
        });
        trials.collect()
    }

    /// A bad file under a name that a terminal and a shell would take for more, for files that a user names.
    pub(super) fn awkward(&self) -> Option<Trial> {
        const AWKWARD: &str = "a b;touch pwned;\u{1b}[2J\u{9b}1m\u{202e}$(touch pwned)";
        let is_named = self.named && words(self.args).iter().any(|word| word == self.file);
        is_named.then(|| {
            let mut trial = self.trial("escapes", "its name".into(), Content::Absent, self.ends);
            let name = format!("{AWKWARD}{}", self.file);
            trial.args.iter_mut().filter(|word| *word == self.file).for_each(|word| word.clone_from(&name));
            trial.files.pop();
            trial.files.push((name, Content::of("\u{1b}[")));
            trial
        })
    }
}

/// The version of the command under test, for the last line.
pub(super) fn version() -> String {
    let output = std::process::Command::new(command_path()).arg("--version").output().unwrap();
    String::from_utf8_lossy(&output.stdout).trim().into()
}
