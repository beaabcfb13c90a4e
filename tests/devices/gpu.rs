//! Programs compiled for GPUs with XLA's CUDA plugin and NVIDIA's assembler. Without what `make setup-gpu` installs the trials that need it
//! read *ignored*; no trial needs a GPU.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use assay::ahead::{AheadError, StableHloModule};
use assay::gpu::compile::{CALL, locate};
use assay::gpu::{CudaToolkit, GpuCompiler, GpuTarget};
use assay::implementation::ProblemFormat;
use assay::problem::{Dtype, Shape};
use assay::programs::operation::{BatchForm, Cotangents, OperationKernel, OperationText};
use assay::programs::{Device, LossProgram, Programs, PtxTarget, StructuredSpec};
use assay::spec::LossSpec;
use assay_algebra::structure::Structure;
use assay_core::device_dtype::DeviceDtype;
use assay_ptx::PtxKernel;
use assay_testkit::slowest;
use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

type Plain = fn() -> Result<(), Failed>;

/// Its trials, named `gpu::…`.
pub(crate) fn trials() -> Vec<Trial> {
    let needing_tools: [(&str, Plain); 11] = [
        ("compile_reports_memory_pipes_bytes_for_every_chip", a_small_shape_compiles),
        ("one_pass_at_a_qwen_shape_is_within_its_limits", one_pass_at_a_qwen_shape),
        ("lm_head_memory_at_a_qwen_shape_is_a_chunks_logits", lm_head_at_a_qwen_shape),
        ("one_pass_of_odd_vocabularies_compiles_without_spills", odd_vocabularies_compile),
        ("operation_kernels_assemble_for_every_target", operation_kernels_assemble),
        ("xla_for_several_devices_names_its_collectives", several_devices),
        ("one_pass_on_an_a100_is_refused_with_an_alternative", one_pass_on_an_a100),
        ("vocabulary_beyond_a_clusters_memory_is_refused", too_wide_a_vocabulary),
        ("ptx_with_an_error_is_refused_in_ptxas_words", bad_ptx_is_refused),
        ("plugin_without_the_ptx_call_is_named", a_plugin_without_the_call),
        ("toolkit_without_ptxas_is_named", a_toolkit_without_ptxas),
    ];
    let absent = locate(None).err().or(CudaToolkit::locate().err()).map(|error| error.to_string());
    let mut trials: Vec<Trial> = needing_tools
        .into_iter()
        .map(|(name, check)| match &absent {
            None => trial(name.into(), check),
            Some(why) => trial(format!("{name} [{why}]"), check).with_ignored_flag(true),
        })
        .collect();
    trials.push(trial("compile_with_bad_options_is_refused".into(), bad_usage_is_refused));
    trials
}

fn trial(name: String, check: Plain) -> Trial {
    let name = format!("gpu::{name}");
    Trial::test(name.clone(), move || slowest::timed(name, check))
}

fn assay(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_assay"));
    command.args(arguments);
    command
}

/// A loss with an entropy bonus.
const ENTROPY_BONUS: &str = "entropy_coef: 0.01";

/// What `assay compile` writes of a target, an implementation, a shape and a dtype.
fn compiled(target: &str, id: &str, shape: &str, dtype: &str) -> Result<Value, Failed> {
    compiled_of("{}", target, id, shape, dtype)
}

/// The same of a spec.
fn compiled_of(spec: &str, target: &str, id: &str, shape: &str, dtype: &str) -> Result<Value, Failed> {
    let folder = tempfile::tempdir()?;
    let [json, yaml] = ["figures.json", "spec.yaml"].map(|name| folder.path().join(name));
    fs::write(&yaml, spec)?;
    let mut command = assay(&["compile", "-q", "--target", target, "--impl", id, "--shape", shape, "--dtype", dtype]);
    command.arg("--spec").arg(&yaml);
    let output = command.arg("--json").arg(&json).output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned().into());
    }
    Ok(serde_json::from_str(&fs::read_to_string(&json)?)?)
}

/// A number of the figures, by its path.
fn number(figures: &Value, path: &str) -> f64 {
    figures.pointer(path).and_then(Value::as_f64).unwrap_or_else(|| panic!("{path} in {figures}"))
}

/// Every other chip by the kernel, the others, A100s among them, by XLA alone.
fn a_small_shape_compiles() -> Result<(), Failed> {
    for (target, id) in GpuTarget::all().zip(["xla", "gpu-one-pass"].into_iter().cycle()) {
        let logits = f64::from(2 * 16 * 1000 * 2);
        let figures = compiled(&target.to_string(), id, "2x16x1000", "bf16")?;
        let of = |path| number(&figures, path);
        assert!(of("/memory/alias_bytes") >= logits, "dlogits lie over the logits: {figures}");
        assert!(of("/hbm_bytes") >= 2.0 * logits, "{figures}");
        let launches = figures["launches"].as_array().expect("launches");
        assert_eq!(launches.len(), usize::from(id != "xla"), "{figures}");
        for launch in launches {
            assert_eq!((launch["runs"].as_u64(), launch["spill_bytes"].as_u64()), (Some(1), Some(0)), "{launch}");
            assert!((1.0..=255.0).contains(&number(launch, "/registers")), "{launch}");
            assert!(number(launch, "/resident") >= 1.0, "{launch}");
            // An exponential, and more, of each of 32,000 logits.
            let pipes = launch["pipes"].as_array().expect("pipes");
            let of = |name: &str| pipes.iter().find(|pipe| pipe["name"] == name).expect("it is used");
            assert!(number(of("xu"), "/instructions") >= 32_000.0 / 32.0, "{launch}");
            assert!(number(of("issue"), "/instructions") > 10.0 * 32_000.0 / 32.0, "{launch}");
            // No loop was unrolled, no instruction is unknown: what a masked token takes is all that is left out.
            let uncounted = launch["uncounted"].as_array().expect("a list");
            let of_batch = |what: &Value| what.as_str().is_some_and(|what| what.ends_with("numbers of the batch"));
            assert!(uncounted.iter().all(of_batch), "{launch}");
        }
    }
    Ok(())
}

/// Checks (1, 4096, 151936) bf16: peak at most 1.001 × logits, no spills, HBM bytes at most 1.002 × one read and one write, and no pipe
/// that takes longer than its share of what HBM does.
fn one_pass_at_a_qwen_shape() -> Result<(), Failed> {
    let logits = 4096.0 * 151_936.0 * 2.0;
    // The issue slots of an H100 and all pipes of a B200 have the least to spare.
    let cases = [
        ("h100", false, [0.38, 0.42]),
        ("h200", false, [0.54, 0.6]),
        ("b200", false, [0.7; 2]),
        ("b200", true, [0.8; 2]),
    ];
    for (target, bonus, [most_issued, most]) in cases {
        let spec = if bonus { ENTROPY_BONUS } else { "{}" };
        let figures = compiled_of(spec, target, "gpu-one-pass", "1x4096x151936", "bf16")?;
        let of = |path| number(&figures, path);
        assert!(of("/memory/peak_bytes") <= 1.001 * logits, "{figures}");
        assert!((2.0 * logits..=1.002 * 2.0 * logits).contains(&of("/hbm_bytes")), "{figures}");
        assert_eq!(of("/launches/0/spill_bytes"), 0.0, "{figures}");
        let pipes = figures["launches"][0]["pipes"].as_array().expect("pipes");
        let issue = pipes.iter().find(|pipe| pipe["name"] == "issue").expect("issue slots");
        for (ms, most) in [(number(issue, "/ms"), most_issued), (of("/bound/pipe_ms"), most)] {
            let ratio = ms / of("/bound/hbm_ms");
            assert!(ratio <= most, "{target}, bonus {bonus}: {ratio}, expected {most} at most");
        }
        // An exponential of each logit or two, 32 of which a warp computes at once.
        let xu = pipes.iter().find(|pipe| pipe["name"] == "xu").expect("exponentials");
        let a_logit = number(xu, "/instructions") * 32.0 / (logits / 2.0);
        assert!((1.0..2.5).contains(&a_logit), "{a_logit} of the transcendental unit's instructions a logit");
    }
    Ok(())
}

/// Of (1, 8192, 4096, 151936) bf16, four chunks in a loop: temporary at most 1.06 × a chunk's logits, each kernel in its place, called once
/// a chunk.
fn lm_head_at_a_qwen_shape() -> Result<(), Failed> {
    let sequence = "ratio: {level: sequence}";
    let logits = 2048.0 * 151_936.0 * 2.0;
    for (target, spec, kernels) in
        [("h100", "{}", ["grpo_one_pass"].as_slice()), ("a100", sequence, &["grpo_statistics", "grpo_dlogits"])]
    {
        let figures = compiled_of(spec, target, "gpu-lm-head", "1x8192x4096x151936", "bf16")?;
        let of = |path| number(&figures, path);
        assert!((logits..=1.06 * logits).contains(&of("/memory/temp_bytes")), "{target}: {figures}");
        // Hidden states under their gradient.
        assert!(of("/memory/alias_bytes") >= 8192.0 * 4096.0 * 2.0, "{target}: {figures}");
        let launches = figures["launches"].as_array().expect("launches");
        let called: Vec<_> = launches.iter().filter_map(|launch| launch["name"].as_str()).collect();
        assert_eq!(called, kernels, "{target}");
        assert!(launches.iter().all(|launch| launch["runs"] == 4 && launch["spill_bytes"] == 0), "{target}: {figures}");
        assert_eq!(figures["hbm_uncounted"], serde_json::json!([]), "{target}");
    }
    let cut = compiled("h100:8", "gpu-lm-head-vocab", "1x2048x1024x151936", "bf16")?;
    assert_eq!(cut["launches"].as_array().map(Vec::len), Some(2), "{cut}");
    assert!(cut["collectives"].as_array().is_some_and(|named| !named.is_empty()), "{cut}");
    Ok(())
}

fn odd_vocabularies_compile() -> Result<(), Failed> {
    for (vocab, dtype) in [(151_643, "f32"), (255_999, "f16")] {
        let figures = compiled("h200", "gpu-one-pass", &format!("1x64x{vocab}"), dtype)?;
        let bytes = if dtype == "f32" { 4.0 } else { 2.0 };
        assert!(number(&figures, "/memory/peak_bytes") <= 1.01 * 64.0 * f64::from(vocab) * bytes, "{figures}");
        assert_eq!(number(&figures, "/launches/0/spill_bytes"), 0.0, "{figures}");
    }
    Ok(())
}

/// The kernels that a framework's operation launches one after another, by the assembler alone.
fn operation_kernels_assemble() -> Result<(), Failed> {
    let spec: LossSpec = serde_json::from_value(json!({
        "ratio": {"level": "sequence"}, "kl": {"beta": 0.04, "estimator": "k3"}, "entropy_coef": 0.01,
        "temperature": "given", "logits": {"softcap": 30.0, "bias": true},
    }))?;
    // As the kernels that read logits are compiled elsewhere: registers hold what becomes of plain logits.
    let of_rows = LossSpec { logits: LossSpec::default().logits, ..spec.clone() };
    let of_one_token = LossSpec { ratio: LossSpec::default().ratio, ..of_rows.clone() };
    let cotangents = Cotangents { logp: true, entropy: true, unless_used: false };
    let unless_used = Cotangents { logp: false, entropy: false, unless_used: true };
    let kernels = [
        (OperationKernel::Count, &spec),
        (OperationKernel::Tokens, &spec),
        (OperationKernel::Statistics, &of_rows),
        (OperationKernel::Losses, &spec),
        (OperationKernel::Sums, &spec),
        (OperationKernel::Dlogits(cotangents), &of_rows),
        (OperationKernel::Dlogits(unless_used), &of_rows),
        (OperationKernel::Multiply, &of_rows),
    ];
    let form = BatchForm { token_temperatures: true, bias: true, ..BatchForm::default() };
    let folder = tempfile::tempdir()?;
    let ptxas = CudaToolkit::locate()?.root().join("bin/ptxas");
    for (target, one_pass) in [(PtxTarget::Sm80, false), (PtxTarget::Sm90, true), (PtxTarget::Sm100, true)] {
        let of_tokens = one_pass.then_some((OperationKernel::OnePass, &of_one_token));
        for (kernel, spec) in kernels.into_iter().chain(of_tokens) {
            let structure = Structure::from_spec(spec);
            let text = OperationText::new(kernel, structure, form, [4096, 1, 33_001], DeviceDtype::Bf16).write(target);
            let [file, binary] = ["kernel.ptx", "kernel.cubin"].map(|name| folder.path().join(name));
            fs::write(&file, &text.ptx.text)?;
            let mut command = Command::new(&ptxas);
            command.args(["-v", "--gpu-name", target.name(), "--output-file"]).args([&binary, &file]);
            let output = command.output()?;
            let said = String::from_utf8_lossy(&output.stderr);
            let fits = output.status.success() && said.contains("0 bytes spill stores, 0 bytes spill loads");
            assert!(fits, "{kernel:?} for {}: {said}", target.name());
        }
    }
    Ok(())
}

fn several_devices() -> Result<(), Failed> {
    let [one, eight] =
        [("h100", "xla"), ("h100:8", "xla-vocab")].map(|(target, id)| compiled(target, id, "1x16x8000", "f32"));
    let (one, eight) = (one?, eight?);
    assert!(number(&eight, "/memory/peak_bytes") < 0.25 * number(&one, "/memory/peak_bytes"), "{eight}");
    assert_eq!(one["collectives"].as_array().map(Vec::len), Some(0));
    assert!(eight["collectives"].as_array().is_some_and(|named| !named.is_empty()), "{eight}");
    Ok(())
}

/// The error of a command that is refused.
fn refused(output: Output) -> Result<String, Failed> {
    let stderr = String::from_utf8(output.stderr)?;
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    Ok(stderr)
}

pub(crate) fn expect_parts(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "`{part}` not in: {message}");
    }
}

fn one_pass_on_an_a100() -> Result<(), Failed> {
    let output = assay(&["compile", "--target", "a100", "--impl", "gpu-one-pass", "--shape", "1x8x1000"]).output()?;
    expect_parts(&refused(output)?, &["gpu-one-pass", "sm_80", "sm_90 and up"]);
    Ok(())
}

fn too_wide_a_vocabulary() -> Result<(), Failed> {
    let output =
        assay(&["compile", "--target", "h100", "--impl", "gpu-one-pass", "--shape", "1x8x1000000"]).output()?;
    expect_parts(&refused(output)?, &["vocabulary", "1000000", "up to", "bf16", "shared memory"]);
    Ok(())
}

fn compiler(plugin: PathBuf) -> Result<GpuCompiler, AheadError> {
    let compiler = GpuCompiler::new(plugin, CudaToolkit::locate()?, env!("CARGO_BIN_EXE_assay").into());
    Ok(compiler.with_limit(Duration::from_mins(5)))
}

/// A program with the kernel of one pass, and that kernel.
fn small() -> Result<(String, Vec<PtxKernel>), Failed> {
    let (target, spec, shape) =
        (GpuTarget::parse("h100")?, LossSpec::default(), Shape { batch: 1, tokens: 8, vocab: 1000 });
    let program =
        LossProgram::all().into_iter().find(|program| program.id() == "gpu-one-pass").ok_or("no gpu-one-pass")?;
    let (loss, target) = (StructuredSpec::new(&spec), target.chip.written_for());
    let given = ProblemFormat { shape, dtype: Dtype::Bf16, form: (), packed: None };
    let text = program.text(loss, given, 1, Device::gpu(target))?;
    Ok((text, program.gpu_kernels_for(loss, shape, Dtype::Bf16, 1, target)?))
}

fn bad_ptx_is_refused() -> Result<(), Failed> {
    let (code, mut kernels) = small()?;
    let target = GpuTarget::parse("h100")?;
    kernels[0].text = kernels[0].text.replace("ex2.approx", "ex3.approx");
    let code = code.replace("ex2.approx", "ex3.approx");
    let module = StableHloModule::replicated(&code, 1);
    let compiler = compiler(locate(None)?)?;
    let error =
        compiler.compile(&target, &StableHloModule { kernels: &kernels, ..module }).err().ok_or("it was assembled")?;
    assert!(matches!(error, AheadError::Assembler { .. }), "{error}");
    expect_parts(&error.to_string(), &["h100", "ptxas refused it", "known instruction: 'ex3'", "more lines"]);
    // The plugin would take it.
    compiler.compile(&target, &module)?;
    Ok(())
}

/// As a plugin says it that does not know the call: this one, asked for another of such a name.
fn a_plugin_without_the_call() -> Result<(), Failed> {
    let (code, _) = small()?;
    let unknown = code.replace(CALL, &format!("{CALL}2"));
    assert_ne!(code, unknown);
    let target = GpuTarget::parse("h100")?;
    let error = compiler(locate(None)?)?.compile(&target, &StableHloModule::replicated(&unknown, 1)).err();
    let error = error.ok_or("it compiled")?;
    assert!(matches!(error, AheadError::NoPtx { .. }), "{error}");
    expect_parts(&error.to_string(), &["does not know", CALL, "make setup-gpu", "xla"]);
    Ok(())
}

fn a_toolkit_without_ptxas() -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let installed = CudaToolkit::locate()?;
    for part in ["bin/nvdisasm", "nvvm/libdevice/libdevice.10.bc"] {
        let path = folder.path().join(part);
        fs::create_dir_all(path.parent().ok_or("a folder")?)?;
        symlink(fs::canonicalize(installed.root().join(part))?, path)?;
    }
    let mut command = assay(&["compile", "--target", "h100", "--shape", "1x8x1000"]);
    let message = refused(command.env("ASSAY_CUDA_TOOLKIT", folder.path()).output()?)?;
    expect_parts(&message, &["ptxas: not found", "bin/ptxas", "make setup-gpu", "ASSAY_CUDA_TOOLKIT"]);
    // One that is there and does not assemble.
    let ptxas = folder.path().join("bin/ptxas");
    fs::write(&ptxas, "#!/bin/sh\necho 'ptxas fatal: no licence' >&2; exit 1\n")?;
    fs::set_permissions(&ptxas, fs::Permissions::from_mode(0o755))?;
    let mut command = assay(&["compile", "--target", "h100", "--impl", "gpu-one-pass", "--shape", "1x8x1000"]);
    let message = refused(command.env("ASSAY_CUDA_TOOLKIT", folder.path()).output()?)?;
    expect_parts(&message, &["h100", "ptxas refused it", "no licence"]);
    Ok(())
}

fn bad_usage_is_refused() -> Result<(), Failed> {
    let cases: [(&[&str], &[&str]); 7] = [
        (&["--target", "h100:9"], &["got `h100:9`", "a100, h100, h200, b200", "h100:8"]),
        (&["--target", "v100"], &["got `v100`", "v5e, v5p, v6e, v7x", "a100, h100, h200, b200"]),
        (&["--target", "h100", "--libtpu-flags", "--x"], &["--libtpu-flags", "expected none", "a GPU"]),
        (&["--target", "v6e", "--cuda-plugin", "x.so"], &["--cuda-plugin", "expected none", "a TPU"]),
        (
            &["--target", "h100", "--cuda-plugin", "/nowhere/x.so"],
            &["/nowhere/x.so", "make setup-gpu", "--cuda-plugin"],
        ),
        (&["--target", "a100", "--dtype", "f64", "--cuda-plugin", "Cargo.toml"], &["f64", "f32, bf16 and f16"]),
        (
            &["--target", "h100", "--impl", "tile-one-pass", "--cuda-plugin", "Cargo.toml"],
            &["tile-one-pass", "compiles for GPUs: xla"],
        ),
    ];
    for (arguments, parts) in cases {
        let folder = tempfile::tempdir()?;
        let toolkit = a_toolkit_of_nothing(folder.path())?;
        let mut command = assay(&["compile", "--shape", "1x8x256"]);
        let output = command.args(arguments).env("ASSAY_CUDA_TOOLKIT", toolkit).output()?;
        expect_parts(&refused(output)?, parts);
    }
    Ok(())
}

/// Files that are there, for what is refused before any is run.
fn a_toolkit_of_nothing(folder: &Path) -> Result<&Path, Failed> {
    for part in ["bin/ptxas", "bin/nvdisasm", "nvvm/libdevice/libdevice.10.bc"] {
        let path = folder.join(part);
        fs::create_dir_all(path.parent().ok_or("a folder")?)?;
        fs::write(path, "")?;
    }
    Ok(folder)
}
