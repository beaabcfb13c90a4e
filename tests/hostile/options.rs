//! Bad options, variables of the environment, outputs, and folders in which a command is started.

use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::process::Command;

use serde_json::Value;

use super::entries::{VALID, valid_bytes, words};
use super::kinds::{ESCAPES, Tensors};
use super::sandbox::{Content, Ends, Fault, Look, Trial};

/// Values of options. `[E]` stands for escapes.
const VALUES: &[(&str, &[&str])] = &[
    (
        "numbers",
        &["-1", "0", "1.5", "18446744073709551615", "9223372036854775808", "1e308", "1e999", "nan", "-inf", DIGITS],
    ),
    ("escapes", &["[E]"]),
    ("fields", &["", " ", "x", "1x", "1x2x3x4x5x6", "=", "a=b=c"]),
];

const DIGITS: &str = "999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999";

/// Commands with an option whose value is `[V]`, and a limit of work by which every valid value is done soon.
const OPTIONS: &[(&str, &str)] = &[
    ("check --timeout", "check --impl native --cases 1 --wide 0 --shapes 1x2x9 --no-power --timeout [V]"),
    ("check --seconds", "check --impl native --cases 1 --wide 0 --shapes 1x2x9 --no-power --seconds [V]"),
    ("check --seed", "check --impl native --cases 1 --wide 0 --shapes 1x2x9 --no-power --seed [V]"),
    ("check --dtypes", "check --impl native --cases 1 --wide 0 --shapes 1x2x9 --no-power --dtypes [V]"),
    ("check --impl", "check --cases 1 --wide 0 --no-power --impl [V]"),
    ("check --allow", "check --impl native --cases 1 --wide 0 --shapes 1x2x9 --no-power --allow [V]"),
    (
        "check --option",
        "check --impl native --cases 1 --wide 0 --shapes 1x2x9 --no-power --preset trl --option epsilon=[V]",
    ),
    ("check NAME=VALUE", "check --impl native --cases 1 --wide 0 --shapes 1x2x9 --no-power --preset trl [V]=1"),
    (
        "check --ids-per-token",
        "check --impl native --cases 1 --wide 0 --shapes 1x2x9 --no-power --logp --ids-per-token [V]",
    ),
    ("suite --shapes", "suite --cases 1 --wide 0 -o new --shapes 1x1x[V]"),
    ("suite --hidden", "suite --cases 1 --wide 0 -o new --lm-head --hidden [V]"),
    ("suite --wide", "suite --cases 1 --shapes 1x2x9 -o new --wide [V]"),
    ("suite --regimes", "suite --cases 1 --wide 0 --shapes 1x2x9 -o new --regimes [V]"),
    ("generate --shape", "generate -o new --shape 1x1x[V]"),
    ("generate --old-logp-noise-scale", "generate -o new --shape 1x2x9 --old-logp-noise-scale [V]"),
    ("spec --preset", "spec --preset [V]"),
    ("spec --option", "spec --preset verl --option [V]"),
    ("spec --num-items", "spec --preset trl --num-items [V]"),
    ("spec --function", "spec --preset trl --function [V]"),
    ("judge --logits", "judge --problem problem.safetensors --candidate candidate.safetensors --logits [V]"),
    ("metrics --old-logp", "metrics --problem problem.safetensors --old-logp [V]"),
    ("replay --devices", "replay problem.safetensors --impl native --devices [V]"),
    ("replay --impl", "replay problem.safetensors --impl [V]"),
    ("emit --target", "emit --shape 1x8x256 -o new --target [V]"),
    ("emit --shape", "emit --target v6e -o new --shape 1x1x[V]"),
    ("compile --target", "compile --shape 1x8x256 --target [V]"),
    ("compile --impl", "compile --target v6e --shape 1x8x256 --impl [V]"),
    ("compile --chunk-bytes", "compile --target v6e --impl tile-lm-head --shape 1x8x64x256 --chunk-bytes [V]"),
    ("list --plugin", "list --plugin [V]"),
    ("bench --shape", "bench --impl native --shape 1x1x[V]"),
    ("bench --threads", "bench --impl native --shape 1x2x9 --threads [V]"),
    ("mutants --only", "mutants --only [V]"),
    ("tolerances --class", "tolerances --measure --cases 1 --class [V]"),
    ("panel --kernel", "panel list.toml --python /bin/false --cases 1 --wide 0 --kernel [V]"),
    ("record --group", "record --model model --prompts prompts.jsonl --out new --max-tokens 2 --group [V]"),
    (
        "record --temperature",
        "record --model model --prompts prompts.jsonl --out new --group 2 --max-tokens 2 --temperature [V]",
    ),
    ("record --max-tokens", "record --model model --prompts prompts.jsonl --out new --group 2 --max-tokens [V]"),
    ("ab --seeds", "ab --config nowhere.yaml --seeds [V]"),
    ("a command", "[V]"),
];

/// Work without an end that somebody asks for is given; what these values ask for is that.
const IS_WORK: &[(&str, &str)] = &[("bench --shape", "18446744073709551615")];

/// A command that runs a plugin.
const CHECK_XLA: &str = "check --impl xla --cases 1 --wide 0 --shapes 1x2x9 --no-power";

/// Variables of the environment with bad values.
const ENVIRONMENT: &[(&str, &str, &str)] = &[
    ("RAYON_NUM_THREADS", "100000", "list -q"),
    ("RAYON_NUM_THREADS", "-1", "list -q"),
    ("RAYON_NUM_THREADS", "99999999999999999999", "list -q"),
    ("RAYON_NUM_THREADS", "[E]", "list -q"),
    ("XLA_FLAGS", "--no_such_flag=1", "list"),
    ("XLA_FLAGS", "no/such/file", "list"),
    ("XLA_FLAGS", "--xla_backend_optimization_level=high", CHECK_XLA),
    ("XLA_FLAGS", "--xla_force_host_platform_device_count=-1", CHECK_XLA),
    ("XLA_FLAGS", "--xla_dump_hlo_as_text=[E]", CHECK_XLA),
    ("XLA_FLAGS", "--no_such_flag=1", CHECK_XLA),
    ("ASSAY_PJRT_PLUGIN", "/dev/zero", "list -q"),
    ("ASSAY_PJRT_PLUGIN", "[E]", "list -q"),
    ("ASSAY_PJRT_PLUGIN", ".", "list -q"),
    ("TPU_LIBRARY_PATH", "[E]", "compile --target v6e --shape 1x8x256"),
    ("TPU_LIBRARY_PATH", "/dev/zero", "compile --target v6e --shape 1x8x256"),
    ("ASSAY_CUDA_PLUGIN", "[E]", "compile --target h100 --impl gpu-one-pass --shape 1x8x256"),
    ("ASSAY_CUDA_DRIVER", "[E]", "list"),
    ("ASSAY_CUDA_DRIVER", "/dev/zero", "list"),
    ("TMPDIR", "/nowhere", "spec --preset trl --json new"),
    ("LANG", "[E]", "spec --preset trl"),
];

fn trial(entry: &'static str, kind: &'static str, name: String, args: Vec<String>, ends: Ends) -> Trial {
    Trial {
        entry,
        kind,
        name,
        args,
        files: Vec::new(),
        environment: Vec::new(),
        ends,
        mentions: None,
        outputs: vec!["new".into(), "out".into()],
        hang: Fault::Unbounded,
        look: None,
    }
}

/// Returns the files of the valid folder that a command line names, or whose folder it names.
fn named_in(line: &str) -> Vec<(String, Content)> {
    let is_named = |name: &&String| line.split(' ').any(|word| word == **name || name.starts_with(&format!("{word}/")));
    VALID.iter().filter(|(name, _)| is_named(name)).map(|(name, content)| (name.clone(), content.clone())).collect()
}

/// Runs with bad options and variables.
pub(super) fn trials() -> Vec<Trial> {
    let mut all = Vec::new();
    for &(entry, line) in OPTIONS {
        for (kind, value) in VALUES.iter().flat_map(|(kind, values)| values.iter().map(move |value| (*kind, *value))) {
            if IS_WORK.contains(&(entry, value)) {
                continue;
            }
            let escaped = value.replace("[E]", ESCAPES);
            let args = words(line).into_iter().map(|word| word.replace("[V]", &escaped)).collect();
            let shown: String = value.chars().take(24).collect();
            let mut trial = trial(entry, kind, format!("{shown:?}"), args, Ends::Verdict);
            trial.files = named_in(line);
            all.push(trial);
        }
    }
    for &(variable, value, line) in ENVIRONMENT {
        let mut trial =
            trial("environment", "options", format!("{variable}={value:?} {line}"), words(line), Ends::Work);
        trial.environment = vec![(variable, value.replace("[E]", ESCAPES))];
        all.push(trial);
    }
    all
}

/// Runs of which each is the only one of its kind.
pub(super) fn singular() -> Vec<Trial> {
    [outputs(), folders(), sizes(), resumed(), vec![pasted()]].concat()
}

/// An output through a link into a file, whose mode is that of any new file and not that of a temporary one.
const KEPT: Look = |folder, _| {
    let of = |name: &str| fs::symlink_metadata(folder.join(name)).ok();
    let is_link = of("new.link").is_some_and(|of| of.is_symlink());
    let mode = of("new.target").map(|of| of.permissions().mode() & 0o7777);
    let is_json =
        fs::read(folder.join("new.target")).is_ok_and(|bytes| serde_json::from_slice::<Value>(&bytes).is_ok());
    let expected = of("new.beside").map(|of| of.permissions().mode() & 0o7777);
    let is_kept = is_link && is_json && mode == expected;
    is_kept
        .then_some(())
        .ok_or((Fault::Output, format!("a link {is_link}, JSON {is_json}, mode {mode:?} for {expected:?}")))
};

/// An output into a FIFO.
const STAYS_FIFO: Look = |folder, _| {
    let is_fifo = fs::symlink_metadata(folder.join("new.fifo")).is_ok_and(|of| of.file_type().is_fifo());
    is_fifo.then_some(()).ok_or((Fault::Output, "the FIFO became a file".into()))
};

/// All of stdout is JSON.
const IS_JSON: Look = |_, ran| {
    let parsed = serde_json::from_slice::<Value>(&ran.stdout);
    parsed.map(drop).map_err(|error| (Fault::Output, format!("stdout is no JSON: {error}")))
};

fn outputs() -> Vec<Trial> {
    let spec = "spec --preset trl -q --json";
    let mut all = Vec::new();
    let mut add = |name: &str, line: &str, files: Vec<(&str, Content)>, ends: Ends, look: Option<Look>| {
        let mut trial = trial("outputs", "outputs", name.into(), words(line), ends);
        trial.files = files.into_iter().map(|(name, content)| (name.into(), content)).chain(named_in(line)).collect();
        trial.look = look;
        all.push(trial);
    };
    let [target, beside] = ["new.target", "new.beside"].map(|name| (name, Content::of("{}")));
    let link = ("new.link", Content::Link("new.target".into()));
    add("a link", &format!("{spec} new.link"), vec![target, beside, link], Ends::Work, Some(KEPT));
    add("-", &format!("{spec} -"), vec![], Ends::Work, Some(IS_JSON));
    add("a FIFO", &format!("{spec} new.fifo"), vec![("new.fifo", Content::OpenFifo)], Ends::Work, Some(STAYS_FIFO));
    add("a folder", &format!("{spec} new"), vec![("new", Content::Folder)], Ends::Refused, None);
    add("a folder that is not there", &format!("{spec} no/such/folder"), vec![], Ends::Refused, None);
    add("a file as a folder", &format!("{spec} new.file/x"), vec![("new.file", Content::of(""))], Ends::Refused, None);
    add(
        "a link to itself",
        &format!("{spec} new.loop"),
        vec![("new.loop", Content::Link("new.loop".into()))],
        Ends::Refused,
        None,
    );
    add("a name of 300 letters", &format!("{spec} {}", "n".repeat(300)), vec![], Ends::Refused, None);
    add("a name of escapes", &format!("{spec} no/{}", ESCAPES.replace(' ', "")), vec![], Ends::Refused, None);
    add("a page into a folder", "report judge.json -o new", vec![("new", Content::Folder)], Ends::Refused, None);
    add(
        "a suite into a file",
        "suite --cases 1 --wide 0 --shapes 1x2x9 -o new",
        vec![("new", Content::of(""))],
        Ends::Refused,
        None,
    );
    add("a suite that is refused", "suite --cases 0 -o new", vec![], Ends::Refused, Some(NOTHING_NEW));
    add("a problem to stdout and JSON too", "generate --shape 1x2x9 -o - --json -", vec![], Ends::Refused, None);
    all
}

/// Nothing was written.
const NOTHING_NEW: Look =
    |folder, _| (!folder.join("new").exists()).then_some(()).ok_or((Fault::Message, "leaves an empty folder".into()));

/// Folders with code in which a command is started: it may not even be opened, which a FIFO shows by a hang.
fn folders() -> Vec<Trial> {
    let lines = [
        "list",
        "judge suite --candidates answers",
        "check --impl native --cases 1 --wide 0 --shapes 1x2x9 --no-power",
        "replay problem.safetensors --impl native",
        "compile --target v6e --shape 1x8x256",
        "compile --target h100 --impl gpu-one-pass --shape 1x8x256",
    ];
    let trials = lines.map(|line| {
        let mut trial = trial("working directory", "folders", line.into(), words(line), Ends::Verdict);
        let libraries = ["pjrt_cpu.so", "pjrt_cpu_0_81.so", "libtpu.so", "xla_cuda_plugin.so"];
        let fifos = libraries.map(|name| (format!(".plugins/{name}"), Content::Fifo));
        trial.files = named_in(line).into_iter().chain(fifos).collect();
        trial.hang = Fault::ForeignCode;
        trial
    });
    trials.into()
}

/// Suites whose few bytes ask for much work.
fn sizes() -> Vec<Trial> {
    let suite: Value = serde_json::from_slice(valid_bytes("suite/suite.json")).unwrap();
    let line = "judge suite --candidates answers";
    let mut all = Vec::new();
    for (field, value) in [
        ("cases", Value::from(10_000_000)),
        ("cases", u64::MAX.into()),
        ("wide", 10_000_000.into()),
        ("wide", u64::MAX.into()),
        ("shapes", serde_json::json!({"given": [[1, 1, 1_000_000_000]]})),
        ("shapes", serde_json::json!({"given": [[1_000_000, 1_000_000, 3]]})),
        ("shapes", serde_json::json!({"given": [[1_u64 << 32, 1_u64 << 32, 2]]})),
        ("shapes", serde_json::json!({"given": []})),
        ("regimes", Value::Array(Vec::new())),
        ("dtypes", Value::Array(Vec::new())),
        ("head", serde_json::json!({"hidden": [], "layout": "vh", "rounds_logits": false})),
        ("head", serde_json::json!({"hidden": [1_u64 << 62], "layout": "vh", "rounds_logits": false})),
    ] {
        let mut changed = suite.clone();
        changed["deck"][field] = value.clone();
        let mut trial = trial("judge SUITE", "sizes", format!("deck.{field}: {value}"), words(line), Ends::Verdict);
        trial.files = named_in(line);
        trial.files.retain(|(name, _)| name != "suite/suite.json");
        trial.files.push(("suite/suite.json".into(), Content::of(changed.to_string())));
        all.push(trial);
    }
    all
}

/// Folders of runs with something planted, or with a checkpoint of which one bit is another.
fn resumed() -> Vec<Trial> {
    let line = "train --config train.yaml";
    let run: Vec<(String, Content)> = VALID
        .iter()
        .filter(|(name, _)| *name == "train.yaml" || name.starts_with("out/"))
        .map(|(name, content)| (name.clone(), content.clone()))
        .collect();
    let mut all = Vec::new();
    for name in [".tmp-checkpoint.safetensors", ".tmp-summary.json", ".lock", "metrics.jsonl"] {
        let mut trial =
            trial("a run's folder", "files", format!("out/{name} is a link to a file"), words(line), Ends::Work);
        trial.files = vec![run.iter().find(|(name, _)| name == "train.yaml").unwrap().clone()];
        trial.files.push(("precious".into(), Content::of("precious\n")));
        trial.files.push((format!("out/{name}"), Content::Link("../precious".into())));
        all.push(trial);
    }
    let whole = valid_bytes("out/checkpoint.safetensors");
    let data = 8 + usize::try_from(u64::from_le_bytes(whole[..8].try_into().unwrap())).unwrap();
    for i in 0..8 {
        let mut flipped = whole.to_vec();
        let at = data + (whole.len() - data) / 8 * i;
        flipped[at] ^= 1 << (i % 8);
        let mut trial =
            trial("a run's checkpoint", "bytes", format!("a bit of byte {at} flipped"), words(line), Ends::Refused);
        trial.files = run.iter().filter(|(name, _)| name != "out/checkpoint.safetensors").cloned().collect();
        trial.files.push(("out/checkpoint.safetensors".into(), Content::of(flipped)));
        all.push(trial);
    }
    all
}

/// The shown command must have the awkward name as one word, and run nothing else.
const PASTES: Look = |folder, ran| {
    let text = String::from_utf8_lossy(&ran.stdout).into_owned();
    let Some(line) = text.lines().find_map(|line| line.find("assay ").map(|at| &line[at..])) else {
        return Err((Fault::Unquoted, format!("shows no command: {text:.200}")));
    };
    let script = format!("assay() {{ printf '%s\\n' \"$@\"; }}\n{line}");
    let pasted = Command::new("bash").args(["-c", &script]).current_dir(folder).output().unwrap();
    let pasted = String::from_utf8_lossy(&pasted.stdout).into_owned();
    let is_one = pasted.lines().any(|word| word == UNQUOTED);
    (is_one && !folder.join("pwned").exists()).then_some(()).ok_or((Fault::Unquoted, format!("shows: {line:.300}")))
};

/// A name that a shell takes apart.
const UNQUOTED: &str = "logits; touch pwned $(touch pwned)";

/// A failure whose tensor has a name that a shell takes apart.
fn pasted() -> Trial {
    let mut problem = Tensors::new(valid_bytes("problem.safetensors"));
    let logits = problem.header.remove("logits").unwrap();
    problem.header.insert(UNQUOTED.into(), logits);
    let mut candidate = Tensors::new(valid_bytes("candidate.safetensors"));
    let end = candidate.data.len();
    candidate.data[end / 2..].fill(0x3f);
    let mut args = words("judge --problem problem.safetensors --candidate candidate.safetensors --logits");
    args.push(UNQUOTED.into());
    let mut trial = trial("judge --logits", "escapes", "a name with a command".into(), args, Ends::Verdict);
    candidate.header.remove("__metadata__");
    trial.files = vec![
        ("problem.safetensors".into(), Content::of(problem.bytes())),
        ("candidate.safetensors".into(), Content::of(candidate.bytes())),
    ];
    trial.look = Some(PASTES);
    trial
}
