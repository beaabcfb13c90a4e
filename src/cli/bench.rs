//! `assay bench`: one implementation on one batch, timed.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{ArgGroup, Args, value_parser};
use comfy_table::{CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use serde_json::json;

use super::check::{seconds, words};
use super::head_choice::{AnyRecipe, HeadChoice};
use super::spec_choice::SpecChoice;
use super::{CliError, Passed, PluginChoice, Printing, stop_flag};
use crate::bench::{self, BenchError, BenchProgress, BenchResult, Options, WorkerTrial};
use crate::case::{BenchCase, CaseBatch};
use crate::config;
use crate::judge::generate::{Recipe, Regime};
use crate::judge::report::{self, on_devices, with_lowering};
use crate::problem::{Dtype, ProblemShape};
use crate::report::programs_text;
use crate::schema::bench as schema;
use crate::schema::verdicts::Grade;
use crate::text::shell_option;
use crate::worker::WorkerLaunch;

#[derive(Args)]
#[command(group(ArgGroup::new("what").required(true).args(["config", "implementation", "exec"])))]
pub(super) struct BenchCommand {
    /// The batch, the loss, the kernel and how many steps, in YAML, TOML or JSON
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The implementation, with the default loss
    #[arg(long = "impl", value_name = "ID")]
    implementation: Option<String>,
    /// A kernel of your own: a command that speaks the protocol `assay-check/1` and times its calls, quoted as for a shell
    #[arg(long, value_name = "CMD")]
    exec: Option<String>,
    #[command(flatten)]
    spec: SpecChoice,
    /// Calls that the command times
    #[arg(long, value_name = "N", requires = "exec", default_value_t = 10, value_parser = value_parser!(u16).range(1..=1000))]
    calls: u16,
    /// Seconds after which an answer of the command is waited for no longer
    #[arg(long, value_name = "S", requires = "exec", default_value_t = 600.0)]
    timeout: f64,
    /// Extents of the logits, half a gigabyte in bf16 if none are given; with an LM head `BxTxHxV`
    #[arg(long, value_name = "BxTxV", conflicts_with = "config", default_value = "1x1792x151936")]
    shape: ProblemShape,
    /// Dtype of the logits, or of hidden states and head
    #[arg(long, conflicts_with = "config", default_value = "bf16")]
    dtype: Dtype,
    #[command(flatten)]
    head: HeadChoice,
    /// Take turns with another implementation, with a copy of the logits, or with the products of an LM head
    #[arg(long, value_name = "ID|copy|gemm", conflicts_with = "exec")]
    against: Vec<String>,
    /// Threads of kernels on this machine's cores, of the copy and of the products; all cores if none are given
    #[arg(long, value_name = "N", value_parser = value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    #[command(flatten)]
    plugin: PluginChoice,
    #[command(flatten)]
    printing: Printing,
}

impl BenchCommand {
    pub(super) fn run(&self) -> Result<Passed, CliError> {
        if let Some(command) = &self.exec {
            return self.run_worker(command);
        }
        self.spec.expect_none(
            "--exec CMD beside it: an implementation is timed with the default loss, and a file has its own",
        )?;
        let (case, command) = self.case()?;
        let options = Options {
            file: self.config.clone().unwrap_or_default(),
            against: self.against.clone(),
            threads: self.threads.and_then(|threads| NonZeroUsize::new(threads.into())),
            plugin: self.plugin.checked_path()?.map(Into::into),
            command,
        };
        let progress = self.printing.progress(case.bench.all());
        let mut told = |said| match said {
            BenchProgress::Doing(what) => progress.set_message(what),
            BenchProgress::Step => progress.inc(1),
        };
        let measured = bench::run(&case, &options, &mut told);
        progress.finish_and_clear();
        match measured.map_err(|error| self.wrong(error))? {
            BenchResult::Right(figures) => {
                self.printing.finish(&table(&figures), &figures)?;
                Ok(Passed::Yes)
            }
            BenchResult::Wrong { verdicts, failures } => {
                for failure in failures {
                    super::print(&format!("{failure}\n"))?;
                }
                self.printing.finish(&report::table(&verdicts), &verdicts)?;
                Ok(Passed::No)
            }
        }
    }

    /// Times a kernel of the user's, in a process of its own.
    fn run_worker(&self, command: &str) -> Result<Passed, CliError> {
        let spec = self.spec.read()?;
        let (start, answer) = (seconds("--timeout", self.timeout)?, seconds("--timeout", self.timeout)?);
        let launch = WorkerLaunch { start, answer, stop: stop_flag()?, ..WorkerLaunch::new(words(command)?) };
        let trial = WorkerTrial {
            name: command.into(),
            spec: &spec,
            loss: self.spec.name(),
            launch,
            calls: self.calls.into(),
            grade: Grade::Standard,
        };
        let progress = self.printing.progress(0);
        let mut told = |said| {
            if let BenchProgress::Doing(what) = said {
                progress.set_message(what);
            }
        };
        let measured = bench::time_worker(&self.batch()?, trial, &mut told);
        progress.finish_and_clear();
        let measured = measured?;
        self.printing.finish(&programs_text(&measured), &measured)?;
        Ok(measured.programs.iter().all(|program| program.times.is_some()).into())
    }

    /// An error with the file or the option that it is about.
    fn wrong(&self, error: BenchError) -> CliError {
        match error {
            BenchError::Setting { .. } => CliError::Config {
                path: self.config.clone().unwrap_or_default().into(),
                reason: error.to_string().into(),
            },
            BenchError::Threads { given, reason } => CliError::Usage(format!("--threads {given}: {reason}").into()),
            other => other.into(),
        }
    }

    /// Returns the case to measure, and the command that measures it again.
    fn case(&self) -> Result<(BenchCase, String), CliError> {
        let Some(id) = &self.implementation else {
            let config = self.config.as_ref().expect("one of the two is required");
            return Ok((config::read(config)?, format!("assay bench{}", shell_option("--config", config))));
        };
        let (shape, dtype, head) = (self.shape, self.dtype, self.head.options());
        let command = format!("assay bench{} --shape {shape} --dtype {dtype}{head}", shell_option("--impl", id));
        Ok((BenchCase::new(self.batch()?, id), command))
    }

    /// Returns the batch of the extents that are given.
    fn batch(&self) -> Result<CaseBatch, CliError> {
        let recipe = Recipe {
            shape: self.shape.logits(),
            dtype: self.dtype,
            // The logits are as peaked as a trained model's.
            regime: Regime::Peaked,
            seed: 0,
            // So near to the policy that no token is clipped: one that is costs less.
            old_logp_noise_scale: 0.03,
            masked_garbage: false,
        };
        Ok(match self.head.recipe(self.shape, recipe)? {
            AnyRecipe::Logits(recipe) => CaseBatch::Generate(recipe),
            AnyRecipe::Head(recipe) => CaseBatch::GenerateHead(recipe),
        })
    }
}

fn table(figures: &schema::BenchFigures) -> String {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED);
    let shape: Vec<String> = figures.shape.iter().map(usize::to_string).collect();
    let name = with_lowering(on_devices(&figures.implementation, figures.devices), figures.lowering.as_deref());
    table.set_header([name, format!("{} {}", shape.join("x"), figures.dtype)]);
    table.column_mut(1).expect("two columns").set_cell_alignment(CellAlignment::Right);
    // As in JSON.
    let of_head = [
        ("judged_shape", figures.judged_shape.as_ref().map(|shape| json!(shape))),
        ("layout", figures.layout.as_ref().map(|layout| json!(layout))),
        ("rounds_logits", figures.rounds_logits.map(|rounds| json!(rounds))),
    ];
    for (key, value) in of_head {
        if let Some(value) = value {
            table.add_row([key.to_string(), value.to_string()]);
        }
    }
    table.add_row(["avg_step_ms".into(), format!("{:.3}", figures.avg_step_ms)]);
    let seconds = [
        ("first_call_s", figures.first_call_s),
        ("step_s_mean", figures.step_s_mean),
        ("step_s_p50", figures.step_s_p50),
        ("step_s_p90", figures.step_s_p90),
        ("step_s_min", figures.step_s_min),
        ("step_s_max", figures.step_s_max),
    ];
    for (key, seconds) in seconds {
        table.add_row([key.into(), format!("{seconds:.6}")]);
    }
    for (key, rate) in [("gb_per_s", figures.gb_per_s), ("gflop_per_s", figures.gflop_per_s)] {
        if let Some(rate) = rate {
            table.add_row([key.to_string(), format!("{rate:.2}")]);
        }
    }
    if let Some(device) = &figures.device {
        table.add_row(["device", device]);
    }
    add_kernels(&mut table, figures);
    if let (Some(rate), Some(from)) = (figures.device_gb_per_s, &figures.device_gb_per_s_from) {
        table.add_row(["device_gb_per_s".into(), format!("{rate:.2} ({from})")]);
    }
    if let Some(share) = figures.device_share {
        table.add_row(["device_share".into(), format!("{share:.3}")]);
    }
    table.add_row(["threads".into(), figures.threads.to_string()]);
    table.add_row(["isa", figures.isa.as_deref().unwrap_or("–")]);
    // A ratio is the kernel's median step over the opponent's: the kernel is the faster one below 1.
    for (opponent, ratio) in &figures.ratios.0 {
        table.add_row([schema::Ratios::key(opponent), format!("{ratio:.3}")]);
    }
    table.add_row(["roofline_share".into(), figures.roofline_share.map_or("–".into(), |share| format!("{share:.3}"))]);
    let bytes = [
        ("mem_after_alloc", figures.mem_after_alloc),
        ("mem_after_run", figures.mem_after_run),
        ("peak_bytes_in_use", figures.peak_bytes_in_use),
        ("peak_bytes_reserved", figures.peak_bytes_reserved),
        ("argument_bytes", figures.argument_bytes),
        ("output_bytes", figures.output_bytes),
        ("temp_bytes", figures.temp_bytes),
        ("alias_bytes", figures.alias_bytes),
    ];
    for (key, bytes) in bytes {
        table.add_row([key.into(), bytes.map_or("–".into(), |bytes| bytes.to_string())]);
    }
    let mut text = format!("{table}\n");
    // Keys without a figure are grouped by the reason, which several share.
    let reasons: BTreeSet<&String> = figures.why_null.values().collect();
    for reason in reasons {
        let keys = figures.why_null.iter().filter(|(_, why)| *why == reason).map(|(key, _)| key.as_str());
        let _ = writeln!(text, "ignored  {}: {reason}", keys.collect::<Vec<_>>().join(", "));
    }
    text
}

/// Adds what was seen of kernels that were timed alone.
fn add_kernels(table: &mut Table, figures: &schema::BenchFigures) {
    if let Some(launches) = figures.kernel_launches {
        table.add_row(["kernel_launches".into(), launches.to_string()]);
    }
    let seconds = |seconds: f64| format!("{seconds:.6}");
    let rate = |rate: f64| format!("{rate:.2}");
    let rows = [
        ("kernel_s_p50", figures.kernel_s_p50.map(seconds)),
        ("kernel_s_min", figures.kernel_s_min.map(seconds)),
        ("kernel_gb_per_s", figures.kernel_gb_per_s.map(rate)),
        ("device_copy_s_p50", figures.device_copy_s_p50.map(seconds)),
        ("device_copy_gb_per_s", figures.device_copy_gb_per_s.map(rate)),
        ("device_copy_share", figures.device_copy_share.map(|share| format!("{share:.3}"))),
    ];
    for (key, value) in rows {
        if let Some(value) = value {
            table.add_row([key.to_string(), value]);
        }
    }
    for schema::BenchKernel { name, s_p50, s_min, assembled } in &figures.kernels {
        let known = |figure: Option<u32>| figure.map_or("–".to_string(), |figure| figure.to_string());
        table.add_row([name.clone(), format!("{s_p50:.6}, fastest {s_min:.6}")]);
        let rows = [
            ("registers", known(assembled.registers)),
            ("local_bytes", known(assembled.local_bytes)),
            ("static_shared_bytes", assembled.static_shared_bytes.to_string()),
            ("dynamic_shared_bytes", assembled.dynamic_shared_bytes.to_string()),
            ("most_threads", known(assembled.most_threads)),
            ("ptx_version", known(assembled.ptx_version)),
            ("binary_version", known(assembled.binary_version)),
            ("ctas_a_multiprocessor", known(assembled.ctas_a_multiprocessor)),
            ("clusters", known(assembled.clusters)),
        ];
        for (key, value) in rows {
            table.add_row([format!("  {key}"), value]);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// The large ones are too large to run here.
    #[test]
    fn bench_configs_shipped_are_valid() {
        let mut shapes = Vec::new();
        for entry in fs::read_dir("configs").unwrap() {
            let path = entry.unwrap().path();
            if path.file_name().unwrap().to_string_lossy().starts_with("bench_") {
                let case: BenchCase = config::read(&path).unwrap_or_else(|error| panic!("{error}"));
                let (checked, recipe) = match &case.batch {
                    CaseBatch::Generate(recipe) => (recipe.check(&case.spec), recipe),
                    CaseBatch::GenerateHead(head) => (head.check(&case.spec), &head.recipe),
                    CaseBatch::Fixture(_) => panic!("{}: a bench is of a shape", path.display()),
                };
                checked.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
                assert!(case.bench.steps > 0 && !recipe.masked_garbage, "{}", path.display());
                shapes.push(recipe.shape);
            }
        }
        for shape in [[1, 2048, 151_643], [4, 1024, 151_643], [1, 4096, 151_936]] {
            assert!(shapes.contains(&shape), "MLLM-JAX's {shape:?} is shipped");
        }
    }
}
