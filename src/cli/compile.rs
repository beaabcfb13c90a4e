//! `assay compile`: a program compiled for TPUs or GPUs that need not be there, and what its compilers say of it.

use std::env;
use std::fmt::{self, Write as _};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use comfy_table::{CellAlignment, presets::UTF8_FULL_CONDENSED};
use serde::Serialize;

use super::document::{self, Marks};
use super::target_choice::AnyTarget;
use super::{CliError, Passed, Printing, compile_gpu};
use crate::ahead::{AheadError, CompileOptions, CompileRequest};
use crate::compile_worker;
use crate::config;
use crate::gpu::{self, CudaToolkit, GpuCompiler};
use crate::problem::{Dtype, HeadLayout, ProblemShape};
use crate::schema::compile::{
    Loop, ProgramMemory, SeedComparison, TpuLaunch, TpuProgramReport, TpuTable, TpuTimeBound,
};
use crate::schema::gpu::GpuTable;
use crate::tpu::{self, TpuCompiler, TpuTarget};

/// Kernels that take less than this part of all cycles share one row of the table.
const SMALL: f64 = 0.01;

/// The marks around each table in a document: logits, LM heads, and the ways to write `xla`.
const MARKS: [Marks; 3] = [
    ["<!-- assay compile --table -->", "<!-- end of table -->"],
    ["<!-- assay compile --table, LM heads -->", "<!-- end of table, LM heads -->"],
    ["<!-- assay compile --table, ways to write xla -->", "<!-- end of table, ways to write xla -->"],
];

#[derive(Args)]
pub(super) struct CompileCommand {
    /// A TPU and its topology: v5e, v5p, v6e or v7x, alone or as in v6e:2x4; or a GPU: a100, h100, h200 or b200, alone or, as in
    /// h100:8, so many of them
    #[arg(long, value_name = "CHIP[:TOPOLOGY]", value_parser = AnyTarget::parse, required_unless_present = "table")]
    target: Option<AnyTarget>,
    /// The implementation: xla or another way to write it (xla-seed, xla-wide-gather, xla-kept, xla-logsumexp, xla-online),
    /// tile-one-pass, tile-two-pass or tile-entropy; for a GPU gpu-one-pass, gpu-two-pass or gpu-logp; of an LM head, xla-lm-head, xla-lm-head-seed or tile-lm-head, for a GPU gpu-lm-head; or one of these over rows, vocabulary or both (-rows, -vocab, -mesh); xla-lm-head or tile-lm-head with what is summed in parts (-rows-scattered, -vocab-scattered)
    #[arg(long = "impl", value_name = "ID", default_value = "xla")]
    implementation: String,
    /// Sequences, tokens and vocabulary on each device; with an LM head `BxTxHxV`. For a program that is cut over devices, the extents on
    /// all of them together
    #[arg(long, value_name = "BxTxV", required_unless_present = "table")]
    shape: Option<ProblemShape>,
    /// Dtype of the logits, or of hidden states and head: f32, bf16 or f16
    #[arg(long, default_value = "bf16")]
    dtype: Dtype,
    /// Order of the axes of the LM head
    #[arg(long, value_enum, default_value = "hv")]
    layout: HeadAxes,
    /// Logits of an LM head stay in f32 instead of being rounded to the dtype
    #[arg(long)]
    f32_logits: bool,
    /// Most bytes of logits that tile-lm-head or gpu-lm-head holds at a time; 640000000 if none is given. -rows-scattered takes as many as
    /// the head's gradient has in f32, if that is more
    #[arg(long, value_name = "BYTES")]
    chunk_bytes: Option<NonZeroUsize>,
    /// Approximate bytes of its gradient that tile-lm-head sums over devices at a time, in sixteen parts at most; a quarter of it if none
    /// is given, a sixteenth for -rows-scattered
    #[arg(long, value_name = "BYTES")]
    sum_bytes: Option<NonZeroUsize>,
    /// The loss, in YAML, TOML or JSON; plain PPO-clip if none is given
    #[arg(long, value_name = "FILE")]
    spec: Option<PathBuf>,
    /// Compile whole tables and print them as Markdown. tpus: every recorded shape with xla, MLLM-JAX's program and the tile kernels, or
    /// the same with an LM head, in bf16 for v6e:2x4; two of the shapes for the other chips; and the ways to write xla. gpus: every kernel
    /// for every chip, and xla
    #[arg(
        long, value_name = "CHIPS", num_args = 0..=1, default_missing_value = "tpus",
        conflicts_with_all = ["target", "shape", "implementation", "dtype", "spec"]
    )]
    table: Option<ChipKind>,
    /// Also put the tables between their marks in a document, such as docs/tpu.md or docs/gpu.md
    #[arg(long, value_name = "FILE.md", requires = "table")]
    into: Option<PathBuf>,
    /// libtpu; the one that `TPU_LIBRARY_PATH` names, or that `make setup-tpu` installed, if none is given
    #[arg(long, value_name = "FILE.so")]
    libtpu: Option<PathBuf>,
    /// Flags of libtpu, as a job sets them in `LIBTPU_INIT_ARGS`. Without this option an LM head has
    /// `--xla_tpu_scoped_vmem_limit_kib=73728` on chips with 128 MiB of VMEM, and a program that scatters has those that move all-gathers
    /// and reduce-scatters to `SparseCore`s, on v6e and v7x
    #[arg(long, value_name = "FLAGS", allow_hyphen_values = true)]
    libtpu_flags: Option<String>,
    /// XLA's CUDA plugin; the one that `ASSAY_CUDA_PLUGIN` names, or that `make setup-gpu` installed, if none is given
    #[arg(long, value_name = "FILE.so")]
    cuda_plugin: Option<PathBuf>,
    /// Seconds that compiling may take
    #[arg(long, value_name = "SECONDS", default_value_t = compile_worker::TIME_LIMIT.as_secs())]
    timeout: u64,
    #[command(flatten)]
    printing: Printing,
}

/// The kind of chip that a table is about.
#[derive(Clone, Copy, ValueEnum)]
enum ChipKind {
    Tpus,
    Gpus,
}

/// The layout of an LM head, [`HeadLayout`], on the command line.
#[derive(Clone, Copy, ValueEnum)]
enum HeadAxes {
    /// The head as `[H,V]`, hidden units by vocabulary
    Hv,
    /// The head as `[V,H]`, vocabulary by hidden units
    Vh,
}

impl From<HeadAxes> for HeadLayout {
    fn from(layout: HeadAxes) -> Self {
        match layout {
            HeadAxes::Hv => Self::HiddenByVocab,
            HeadAxes::Vh => Self::VocabByHidden,
        }
    }
}

/// The arguments of [`Compile`]'s child process, which compiles the job in a folder.
#[derive(Args)]
pub(super) struct CompileWorkerArgs {
    folder: PathBuf,
}

impl CompileWorkerArgs {
    pub(super) fn run(&self) -> Result<Passed, CliError> {
        compile_worker::work(&self.folder)?;
        Ok(Passed::Yes)
    }
}

impl CompileCommand {
    pub(super) fn run(&self) -> Result<Passed, CliError> {
        let options = CompileOptions {
            dtype: self.dtype,
            layout: self.layout.into(),
            rounds_logits: !self.f32_logits,
            chunk_bytes: self.chunk_bytes.map(NonZeroUsize::get),
            sum_bytes: self.sum_bytes.map(NonZeroUsize::get),
            spec: config::read_spec(self.spec.as_deref())?.unwrap_or_default(),
        };
        let on_gpu = matches!(self.target, Some(AnyTarget::Gpu(_))) || matches!(self.table, Some(ChipKind::Gpus));
        self.expect_options_of(on_gpu)?;
        match (&self.target, self.shape) {
            (Some(AnyTarget::Tpu(target)), Some(shape)) => {
                let request = self.request(target, shape, options);
                // The text is written first, so that a spec without a program is reported even if libtpu is not installed.
                request.text()?;
                let compiler = self.tpu_compiler()?;
                self.run_one(&request, |request| request.compile(&compiler), table_of)
            }
            (Some(AnyTarget::Gpu(target)), Some(shape)) => {
                let (request, compiler) = (self.request(target, shape, options), self.gpu_compiler()?);
                self.run_one(&request, |request| request.compile(&compiler), compile_gpu::table_of)
            }
            // The programs of a table share one compiler, which is located before the first of them is compiled.
            _ if on_gpu => {
                let compiler = self.gpu_compiler()?;
                let gpu_rows = self.run_all(&gpu::table::requests(&options), |request| request.compile(&compiler))?;
                let table = GpuTable { gpu_rows };
                let tables = gpu::table::markdown(&table);
                if let Some(path) = &self.into {
                    let [logits, heads] = compile_gpu::MARKS;
                    document::put_with_data(
                        path,
                        logits,
                        "gpu-programs",
                        &tables[0],
                        &compile_gpu::summary(&tables[0]),
                    )?;
                    document::put_into(path, [(heads, tables[1].as_str())])?;
                }
                self.printing.finish(&tables.join("\n"), &table)?;
                Ok(Passed::Yes)
            }
            _ => {
                let compiler = self.tpu_compiler()?;
                let rows = self.run_all(&tpu::table::requests(&options), |request| request.compile(&compiler))?;
                let table = TpuTable { rows };
                self.finish_table(MARKS, &tpu::table::markdown(&table), &table)
            }
        }
    }

    /// Refuses options of the other kind of chip, which would have no effect.
    fn expect_options_of(&self, on_gpu: bool) -> Result<(), CliError> {
        let (kind, others) = if on_gpu {
            let others = [
                ("--libtpu", self.libtpu.is_some()),
                ("--libtpu-flags", self.libtpu_flags.is_some()),
                ("--sum-bytes", self.sum_bytes.is_some()),
            ];
            ("a GPU", others.to_vec())
        } else {
            ("a TPU", vec![("--cuda-plugin", self.cuda_plugin.is_some())])
        };
        match others.into_iter().find(|(_, given)| *given) {
            Some((option, _)) => {
                Err(CliError::Usage(format!("{option}: got one, expected none where the target is {kind}").into()))
            }
            None => Ok(()),
        }
    }

    fn request<T: Clone>(&self, target: &T, shape: ProblemShape, options: CompileOptions) -> CompileRequest<T> {
        CompileRequest { target: target.clone(), implementation: self.implementation.clone(), shape, options }
    }

    /// Compiles one program and prints `table` of its figures.
    fn run_one<T: fmt::Display, F: Serialize>(
        &self,
        request: &CompileRequest<T>,
        compile: impl Fn(&CompileRequest<T>) -> Result<F, AheadError>,
        table: impl Fn(&CompileRequest<T>, &F) -> String,
    ) -> Result<Passed, CliError> {
        let progress = self.printing.progress(1);
        progress.set_message(format!("compiling for {}", request.target));
        let figures = compile(request)?;
        progress.finish_and_clear();
        self.printing.finish(&table(request, &figures), &figures)?;
        Ok(Passed::Yes)
    }

    /// Compiles the programs of a table one after another.
    fn run_all<T: fmt::Display, F>(
        &self,
        requests: &[CompileRequest<T>],
        compile: impl Fn(&CompileRequest<T>) -> Result<F, AheadError>,
    ) -> Result<Vec<F>, CliError> {
        let progress = self.printing.progress(requests.len());
        let mut figures = Vec::new();
        for request in requests {
            let CompileRequest { target, implementation, shape, .. } = request;
            progress.set_message(format!("{implementation} for {target} at {shape}"));
            figures.push(compile(request)?);
            progress.inc(1);
        }
        progress.finish_and_clear();
        Ok(figures)
    }

    /// Prints the tables in Markdown, and puts them into the document that `--into` names.
    fn finish_table<const N: usize>(
        &self,
        marks: [Marks; N],
        tables: &[String; N],
        table: &impl Serialize,
    ) -> Result<Passed, CliError> {
        if let Some(path) = &self.into {
            document::put_into(path, marks.into_iter().zip(tables.iter().map(String::as_str)))?;
        }
        self.printing.finish(&tables.join("\n"), table)?;
        Ok(Passed::Yes)
    }

    fn tpu_compiler(&self) -> Result<TpuCompiler, CliError> {
        let library = tpu::compile::locate(self.libtpu.as_deref())?;
        super::hand_on([library.as_path()]);
        let compiler = TpuCompiler::new(library, this_executable()?).with_limit(Duration::from_secs(self.timeout));
        Ok(match &self.libtpu_flags {
            Some(flags) => compiler.with_flags(flags),
            None => compiler,
        })
    }

    fn gpu_compiler(&self) -> Result<GpuCompiler, CliError> {
        let plugin = gpu::compile::locate(self.cuda_plugin.as_deref())?;
        let toolkit = CudaToolkit::locate()?;
        super::hand_on([plugin.as_path(), toolkit.root()]);
        let compiler = GpuCompiler::new(plugin, toolkit, this_executable()?);
        Ok(compiler.with_limit(Duration::from_secs(self.timeout)))
    }
}

/// Returns the running executable, which is also the worker.
fn this_executable() -> Result<PathBuf, CliError> {
    env::current_exe().map_err(|reason| CliError::Io { path: "this executable".into(), action: "find", reason })
}

/// Formats the kernels, the most cycles first, and the other figures.
fn table_of(request: &CompileRequest<TpuTarget>, figures: &TpuProgramReport) -> String {
    let mut kernels = comfy_table::Table::new();
    kernels.load_style(UTF8_FULL_CONDENSED);
    kernels.set_header(["kernel", "cycles", "loops: bundles × trips + once", "busiest slot"]);
    kernels.column_mut(1).expect("four columns").set_cell_alignment(CellAlignment::Right);
    let mut sorted: Vec<&TpuLaunch> = figures.kernels.iter().collect();
    sorted.sort_by_key(|kernel| std::cmp::Reverse(kernel.all_cycles()));
    // Small kernels are many and say little one by one: together they get one row.
    let small = |kernel: &&TpuLaunch| (kernel.all_cycles() as f64) < SMALL * figures.cycles as f64;
    let (small, large): (Vec<&TpuLaunch>, Vec<&TpuLaunch>) = sorted.into_iter().partition(small);
    for kernel in large {
        let name = if kernel.runs == 1 { kernel.name.clone() } else { format!("{} × {}", kernel.runs, kernel.name) };
        kernels.add_row([name, kernel.all_cycles().to_string(), loops(kernel), busiest(kernel)]);
    }
    if !small.is_empty() {
        let cycles: u64 = small.iter().map(|kernel| kernel.all_cycles()).sum();
        kernels.add_row([format!("{} more", small.len()), cycles.to_string(), String::new(), String::new()]);
    }

    let TpuProgramReport { target, devices, held_by, memory, hbm_bytes, .. } = figures;
    let mut table = table_of_memory(request, [target, held_by.preposition()], *devices, memory, *hbm_bytes);
    table.add_row(["cycles".into(), figures.cycles.to_string()]);
    let TpuTimeBound { cycles_ms, hbm_ms, links_ms, links_exposed_ms, predicted_ms, limit, .. } = figures.bound;
    table.add_row([format!("cycles at {} GHz (assumed)", figures.clock_ghz), format!("{cycles_ms:.3} ms")]);
    table.add_row(["bytes at HBM bandwidth".into(), format!("{hbm_ms:.3} ms")]);
    if let Some(links) = &figures.bound.links {
        let exposed = format!("{links_ms:.3} ms, {links_exposed_ms:.3} while nothing is computed");
        table.add_row(["bytes at the links between chips".into(), exposed]);
        table.add_row(["narrowest".into(), links.clone()]);
    }
    table.add_row([format!("lower bound ({})", limit.name()), format!("{predicted_ms:.3} ms")]);
    // The three products of an LM head are the least that any implementation computes, so their time at the chip's peak
    // is what the bound is compared with.
    if let Some(products_ms) = figures.products_ms {
        let ratio = predicted_ms / products_ms;
        let label = format!("3 products at {} TFLOP/s", request.target.chip.bf16_tflops);
        table.add_row([label, format!("{products_ms:.3} ms; bound / products {ratio:.3}")]);
    }
    if let Some(SeedComparison { recorded, ratio }) = &figures.recorded {
        let label = format!("recorded: {}", recorded.program);
        table.add_row([label, format!("{:.2} ms; bound / recorded {ratio:.2}", recorded.step_ms[0])]);
    }
    if !figures.libtpu_flags.is_empty() {
        table.add_row(["libtpu flags", &figures.libtpu_flags]);
    }
    table.add_row(["compile_s".into(), format!("{:.2}", figures.compile_s)]);

    let mut text = format!("{kernels}\n{table}\n");
    for instruction in &figures.hbm_uncounted {
        let _ = writeln!(text, "not counted in hbm_bytes: the body of {instruction}");
    }
    for collective in &figures.cycles_uncounted {
        let _ = writeln!(text, "not counted in cycles: {collective}");
    }
    text
}

/// Starts the table of a program with its memory and its HBM bytes; `place` has the target and the word before "devices".
pub(super) fn table_of_memory<T>(
    request: &CompileRequest<T>,
    [target, preposition]: [&str; 2],
    devices: usize,
    memory: &ProgramMemory,
    hbm_bytes: u64,
) -> comfy_table::Table {
    let CompileRequest { implementation, shape, options, .. } = request;
    let mut table = comfy_table::Table::new();
    table.load_style(UTF8_FULL_CONDENSED);
    table.set_header([
        format!("{implementation} on {target}"),
        format!("{shape} {} {preposition} {devices} devices", options.dtype),
    ]);
    table.column_mut(1).expect("two columns").set_cell_alignment(CellAlignment::Right);
    let bytes = [
        ("argument_bytes", memory.argument_bytes),
        ("output_bytes", memory.output_bytes),
        ("temp_bytes", memory.temp_bytes),
        ("alias_bytes", memory.alias_bytes),
        ("peak_bytes", memory.peak_bytes),
    ];
    for (key, bytes) in bytes {
        table.add_row([key.to_string(), bytes.to_string()]);
    }
    table.add_row(["hbm_bytes".into(), hbm_bytes.to_string()]);
    table
}

/// Formats the loops of a kernel as `1274 × 594, 12 × ?`, the most cycles first.
fn loops(kernel: &TpuLaunch) -> String {
    const SHOWN: usize = 3;
    let mut loops: Vec<_> = kernel.loops.iter().collect();
    // A loop whose cycles are unknown sorts by the bundles of one trip.
    loops.sort_by_key(|l| std::cmp::Reverse(l.cycles.unwrap_or(l.bundles)));
    let trips = |trips: Option<u64>| trips.map_or("?".into(), |trips| trips.to_string());
    let one = |l: &&_| -> String {
        let l: &Loop = l;
        let optional = if l.optional { " (optional)" } else { "" };
        let once = if l.passed_over > 0 { format!(" + {}", l.passed_over) } else { String::new() };
        format!("{}{} × {}{once}{optional}", ">".repeat(l.depth - 1), l.bundles, trips(l.trips))
    };
    let mut text = loops.iter().take(SHOWN).map(one).collect::<Vec<_>>().join(", ");
    if loops.len() > SHOWN {
        let _ = write!(text, ", {} more", loops.len() - SHOWN);
    }
    text
}

/// Formats the use of the busiest slot as `VALU 62 %`.
fn busiest(kernel: &TpuLaunch) -> String {
    let slot = kernel.slots.iter().find(|slot| Some(&slot.name) == kernel.binding.as_ref());
    // A slot is used at most `capacity` times in each cycle.
    let percent = |used: u64, capacity: u64| 100.0 * used as f64 / (capacity * kernel.cycles) as f64;
    slot.map_or(String::new(), |slot| format!("{} {:.0} %", slot.name, percent(slot.used, slot.capacity)))
}
