//! `assay compile`: a program compiled for TPUs that need not be there, and what its compiler says of it.

use std::path::PathBuf;
use std::time::Duration;
use std::{env, fmt::Write as _};

use clap::{Args, ValueEnum};
use comfy_table::{CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use serde::{Serialize, Serializer};

use super::compile_table::{self, Rows};
use super::{CliError, Passed, Printing, config};
use crate::implementation::{Implementation, RunError};
use crate::memory::CompiledMemory;
use crate::problem::{Dtype, Extents, HeadLayout, HeadShape};
use crate::spec::LossSpec;
use crate::tpu::recorded::{self, BASELINE, Recorded, SEED_KERNEL};
use crate::tpu::schedule::Kernel;
use crate::tpu::{self, Bound, Chip, Compiled, Compiler, Request, Target};
use crate::xla::{CHUNK_BYTES, Core, HeadArrays, Xla, XlaHead};

/// Kernels that take less than this part of all cycles share one row of the table.
const SMALL: f64 = 0.01;

/// VMEM for the windows of an LM head's products on a chip that has 128 MiB, 2¹⁰ bytes: docs/tpu.md has what others give.
const WINDOWS_KIB: usize = 73_728;

#[derive(Args)]
pub(super) struct Compile {
    /// Chip and topology: v5e, v5p, v6e or v7x, alone or as in v6e:2x4
    #[arg(long, value_name = "CHIP[:TOPOLOGY]", value_parser = Target::parse, required_unless_present = "table")]
    target: Option<Target>,
    /// The implementation: xla, tile-one-pass, tile-two-pass or tile-entropy; of an LM head, xla-lm-head or tile-lm-head,
    /// or one of these over rows, vocabulary or both (-rows, -vocab, -mesh)
    #[arg(long = "impl", value_name = "ID", default_value = "xla")]
    implementation: String,
    /// Sequences, tokens and vocabulary that each device holds; with an LM head `BxTxHxV`. Of -rows, -vocab and -mesh all
    /// that the devices hold together
    #[arg(long, value_name = "BxTxV", required_unless_present = "table")]
    shape: Option<Extents>,
    /// Dtype of the logits, or of hidden states and head: f32, bf16 or f16
    #[arg(long, default_value = "bf16")]
    dtype: Dtype,
    /// How the LM head lies
    #[arg(long, value_enum, default_value = "hv")]
    layout: Layout,
    /// Logits of an LM head stay in f32 instead of being rounded to the dtype
    #[arg(long)]
    f32_logits: bool,
    /// Bytes of logits that tile-lm-head holds at a time, at most
    #[arg(long, value_name = "BYTES", default_value_t = CHUNK_BYTES)]
    chunk_bytes: usize,
    /// The loss, in YAML, TOML or JSON; plain PPO-clip if none is given
    #[arg(long, value_name = "FILE")]
    spec: Option<PathBuf>,
    /// Every recorded shape with xla, tile-one-pass and tile-two-pass, or xla-lm-head and tile-lm-head, instead, in bf16 for
    /// v6e:2x4, as Markdown
    #[arg(long, conflicts_with_all = ["target", "shape", "implementation", "dtype", "spec"])]
    table: bool,
    /// Also put the tables between their marks in a document, such as docs/tpu.md
    #[arg(long, value_name = "FILE.md", requires = "table")]
    into: Option<PathBuf>,
    /// libtpu; the one that `TPU_LIBRARY_PATH` names, or that `make setup-tpu` installed, if none is given
    #[arg(long, value_name = "FILE.so")]
    libtpu: Option<PathBuf>,
    /// Flags of libtpu's own, as a job sets them in `LIBTPU_INIT_ARGS`. If this is not given, an LM head has
    /// `--xla_tpu_scoped_vmem_limit_kib=73728` on chips with 128 MiB of VMEM
    #[arg(long, value_name = "FLAGS", allow_hyphen_values = true)]
    libtpu_flags: Option<String>,
    /// Seconds that compiling may take
    #[arg(long, value_name = "SECONDS", default_value_t = tpu::compile::TIME_LIMIT.as_secs())]
    timeout: u64,
    #[command(flatten)]
    printing: Printing,
}

/// [`HeadLayout`], on the command line.
#[derive(Clone, Copy, ValueEnum)]
enum Layout {
    /// `[H,V]`
    Hv,
    /// `[V,H]`
    Vh,
}

/// A child of [`Compile`]: compiles what lies in a folder.
#[derive(Args)]
pub(super) struct Worker {
    folder: PathBuf,
}

impl Worker {
    pub(super) fn run(&self) -> Result<Passed, CliError> {
        tpu::compile::work(&self.folder)?;
        Ok(Passed::Yes)
    }
}

/// What is compiled, and for what.
struct Asked {
    target: Target,
    implementation: String,
    shape: Extents,
    dtype: Dtype,
    layout: HeadLayout,
    rounds_logits: bool,
    chunk_bytes: usize,
    spec: LossSpec,
    libtpu_flags: String,
}

impl Asked {
    fn compile(&self, compiler: &Compiler) -> Result<Figures, CliError> {
        let (devices, core) = (self.target.devices(), core_of(self.target.chip));
        let &Asked { dtype, layout, rounds_logits, ref spec, .. } = self;
        let (code, held_by) = match self.shape {
            Extents::Logits(shape) => {
                let code = find(&self.implementation)?.program_for(spec, shape, dtype, devices, core);
                (code, HeldBy::EachDevice)
            }
            Extents::Head(shape) => {
                let head = find_head(&self.implementation)?.chunk_bytes(self.chunk_bytes);
                let code = head.program_for(spec, HeadArrays { shape, dtype, layout, rounds_logits }, devices, core);
                (code, if head.sharding_is_whole() { HeldBy::EachDevice } else { HeldBy::AllDevices })
            }
        };
        let code = code.map_err(RunError::from)?;
        let request = Request { code: &code, target: &self.target, replicas: devices, partitions: 1 };
        Ok(Figures::new(self, held_by, &compiler.clone().flags(&self.libtpu_flags).compile(&request)?))
    }
}

impl Compile {
    pub(super) fn run(&self) -> Result<Passed, CliError> {
        let spec = config::read_spec(self.spec.as_deref())?.unwrap_or_default();
        let of = |implementation: &str, target: &Target, shape: Extents| Asked {
            target: target.clone(),
            implementation: implementation.into(),
            shape,
            dtype: self.dtype,
            layout: match self.layout {
                Layout::Hv => HeadLayout::HiddenByVocab,
                Layout::Vh => HeadLayout::VocabByHidden,
            },
            rounds_logits: !self.f32_logits,
            chunk_bytes: self.chunk_bytes,
            spec: spec.clone(),
            libtpu_flags: self.libtpu_flags.clone().unwrap_or_else(|| flags_for(shape, target.chip)),
        };
        let (Some(target), Some(shape)) = (&self.target, self.shape) else {
            let target = Target::parse(compile_table::TARGET)?;
            let rows = compile_table::rows().map(|(id, shape)| of(id, &target, shape));
            return self.run_table(&rows.collect::<Vec<_>>());
        };
        let asked = of(&self.implementation, target, shape);
        let progress = self.printing.progress(1);
        progress.set_message(format!("compiling for {target}"));
        let figures = asked.compile(&self.compiler()?)?;
        progress.finish_and_clear();
        self.printing.finish(&figures.table(), &figures)?;
        Ok(Passed::Yes)
    }

    fn run_table(&self, rows: &[Asked]) -> Result<Passed, CliError> {
        let compiler = self.compiler()?;
        let progress = self.printing.progress(rows.len());
        let compile = |asked: &Asked| {
            progress.set_message(format!("{} at {}", asked.implementation, asked.shape));
            let figures = asked.compile(&compiler);
            progress.inc(1);
            figures
        };
        let rows = Rows { rows: rows.iter().map(compile).collect::<Result<_, _>>()? };
        progress.finish_and_clear();
        if let Some(path) = &self.into {
            rows.write_into(path)?;
        }
        self.printing.finish(&rows.markdown(), &rows)?;
        Ok(Passed::Yes)
    }

    fn compiler(&self) -> Result<Compiler, CliError> {
        let worker = env::current_exe().map_err(|reason| CliError::Io {
            path: "this executable".into(),
            action: "find",
            reason,
        })?;
        let library = tpu::compile::locate(self.libtpu.as_deref())?;
        Ok(Compiler::new(library, worker).limit(Duration::from_secs(self.timeout)))
    }
}

/// What a chip's cores have for a kernel: of their VMEM one part in sixteen stays the compiler's own.
pub(super) fn core_of(chip: &Chip) -> Core {
    Core { vmem_bytes: (chip.vmem_mib << 20) / 16 * 15, bf16_arithmetic: chip.bf16_arithmetic }
}

/// What libtpu is told of programs over arrays of `shape`. XLA keeps what a product works on within 32 MiB of VMEM unless it
/// is told otherwise, and its schedules of an LM head's products are better with more.
fn flags_for(shape: Extents, chip: &Chip) -> String {
    match shape {
        Extents::Head(_) if chip.vmem_mib >= 128 => format!("--xla_tpu_scoped_vmem_limit_kib={WINDOWS_KIB}"),
        _ => String::new(),
    }
}

/// The implementation called `id`, which must be one that compiles for TPUs.
pub(super) fn find(id: &str) -> Result<Xla, CliError> {
    let all = Xla::all(None);
    let compiles = |xla: &Xla| xla.sharding_is_whole();
    let ids = all.iter().filter(|xla| compiles(xla)).map(Implementation::id).collect::<Vec<_>>().join(", ");
    all.into_iter().find(|xla| xla.id() == id && compiles(xla)).ok_or_else(|| {
        CliError::Usage(format!("implementation: got `{id}`, expected one that compiles for TPUs: {ids}"))
    })
}

/// The same, of an LM head: all of them do.
fn find_head(id: &str) -> Result<XlaHead, CliError> {
    let mut all = XlaHead::all(None);
    let Some(at) = all.iter().position(|head| head.id() == id) else {
        let ids = all.iter().map(Implementation::id).collect::<Vec<_>>().join(", ");
        return Err(CliError::Usage(format!("implementation: got `{id}`, expected one of an LM head: {ids}")));
    };
    Ok(all.swap_remove(at))
}

#[derive(Clone, Copy, Serialize)]
pub(super) struct Memory {
    #[serde(flatten)]
    pub(super) compiled: CompiledMemory,
    pub(super) peak_bytes: i64,
}

/// What hardware measured at this shape, and how the bound compares.
#[derive(Serialize)]
pub(super) struct Beside {
    #[serde(flatten)]
    pub(super) recorded: &'static Recorded,
    pub(super) ratio: f64,
}

/// What `shape` is the extent of.
#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum HeldBy {
    /// Of each device's own arrays.
    EachDevice,
    /// Of arrays that are cut over the devices.
    AllDevices,
}

impl HeldBy {
    fn text(self) -> &'static str {
        match self {
            HeldBy::EachDevice => "on each of",
            HeldBy::AllDevices => "over",
        }
    }
}

fn as_text<S: Serializer>(target: &Target, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(target)
}

/// What is known of one compiled program; all of one device.
#[derive(Serialize)]
pub(super) struct Figures {
    #[serde(serialize_with = "as_text")]
    pub(super) target: Target,
    devices: usize,
    #[serde(rename = "impl")]
    pub(super) implementation: String,
    pub(super) shape: Extents,
    held_by: HeldBy,
    pub(super) dtype: Dtype,
    pub(super) memory: Memory,
    kernels: Vec<Kernel>,
    pub(super) cycles: u64,
    /// Collectives whose cycles are not among them.
    cycles_uncounted: Vec<String>,
    pub(super) hbm_bytes: u64,
    /// HLO instructions whose bytes are not among them.
    hbm_uncounted: Vec<String>,
    libtpu_flags: String,
    pub(super) bound: Bound,
    /// Three products of a bf16 head on one device at the chip's rate: what any program of it takes at least.
    pub(super) products_ms: Option<f64>,
    /// Assumed.
    clock_ghz: f64,
    compile_s: f64,
    /// The recorded baseline of this target, shape and dtype.
    pub(super) recorded: Option<Beside>,
    /// What the seed project's own kernel took there.
    recorded_kernel: Option<&'static Recorded>,
}

impl Figures {
    fn new(asked: &Asked, held_by: HeldBy, compiled: &Compiled) -> Self {
        let chip = asked.target.chip;
        let (cycles, hbm_bytes) = (compiled.cycles(), compiled.traffic.hbm_bytes);
        let bound = Bound::of(chip, cycles, hbm_bytes);
        let devices = asked.target.devices();
        let products = match asked.shape {
            Extents::Head(HeadShape { batch, tokens, hidden, vocab }) if asked.dtype == Dtype::Bf16 => {
                let all = [3, batch, tokens, hidden, vocab].into_iter().map(|extent| extent as f64).product::<f64>();
                Some(if held_by == HeldBy::AllDevices { all / devices as f64 } else { all })
            }
            _ => None,
        };
        let recorded = |program| {
            let recorded = recorded::find(program, &asked.target, asked.shape, asked.dtype);
            recorded.filter(|_| held_by == HeldBy::EachDevice)
        };
        Self {
            target: asked.target.clone(),
            devices,
            implementation: asked.implementation.clone(),
            shape: asked.shape,
            held_by,
            dtype: asked.dtype,
            memory: Memory { compiled: compiled.memory, peak_bytes: compiled.memory.peak_bytes() },
            kernels: compiled.kernels.clone(),
            cycles,
            cycles_uncounted: compiled.uncounted.clone(),
            hbm_bytes,
            hbm_uncounted: compiled.traffic.uncounted.clone(),
            libtpu_flags: asked.libtpu_flags.clone(),
            bound,
            products_ms: products.map(|products| chip.products_ms(products)),
            clock_ghz: chip.clock_ghz,
            compile_s: compiled.compile_s,
            recorded: recorded(BASELINE).map(|recorded| Beside { recorded, ratio: recorded.ratio(bound.predicted_ms) }),
            recorded_kernel: recorded(SEED_KERNEL),
        }
    }

    fn table(&self) -> String {
        let mut kernels = Table::new();
        kernels.load_style(UTF8_FULL_CONDENSED);
        kernels.set_header(["kernel", "cycles", "loops: bundles × trips", "busiest slot"]);
        kernels.column_mut(1).expect("four columns").set_cell_alignment(CellAlignment::Right);
        let mut sorted: Vec<&Kernel> = self.kernels.iter().collect();
        sorted.sort_by_key(|kernel| std::cmp::Reverse(kernel.all_cycles()));
        let small = |kernel: &&Kernel| (kernel.all_cycles() as f64) < SMALL * self.cycles as f64;
        let (small, large): (Vec<&Kernel>, Vec<&Kernel>) = sorted.into_iter().partition(small);
        for kernel in large {
            let name =
                if kernel.runs == 1 { kernel.name.clone() } else { format!("{} × {}", kernel.runs, kernel.name) };
            kernels.add_row([name, kernel.all_cycles().to_string(), loops(kernel), busiest(kernel)]);
        }
        if !small.is_empty() {
            let cycles: u64 = small.iter().map(|kernel| kernel.all_cycles()).sum();
            kernels.add_row([format!("{} more", small.len()), cycles.to_string(), String::new(), String::new()]);
        }

        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED);
        table.set_header([
            format!("{} on {}", self.implementation, self.target),
            format!("{} {} {} {} devices", self.shape, self.dtype, self.held_by.text(), self.devices),
        ]);
        table.column_mut(1).expect("two columns").set_cell_alignment(CellAlignment::Right);
        let Memory { compiled, peak_bytes } = self.memory;
        let bytes = [
            ("argument_bytes", compiled.argument_bytes),
            ("output_bytes", compiled.output_bytes),
            ("temp_bytes", compiled.temp_bytes),
            ("alias_bytes", compiled.alias_bytes),
            ("peak_bytes", peak_bytes),
        ];
        for (key, bytes) in bytes {
            table.add_row([key.to_string(), bytes.to_string()]);
        }
        table.add_row(["hbm_bytes".into(), self.hbm_bytes.to_string()]);
        table.add_row(["cycles".into(), self.cycles.to_string()]);
        let Bound { cycles_ms, hbm_ms, predicted_ms, limit } = self.bound;
        table.add_row([format!("cycles at {} GHz (assumed)", self.clock_ghz), format!("{cycles_ms:.3} ms")]);
        table.add_row(["bytes at HBM bandwidth".into(), format!("{hbm_ms:.3} ms")]);
        table.add_row([
            format!("lower bound ({})", format!("{limit:?}").to_lowercase()),
            format!("{predicted_ms:.3} ms"),
        ]);
        if let Some(products_ms) = self.products_ms {
            let ratio = predicted_ms / products_ms;
            let label = format!("3 products at {} TFLOP/s", self.target.chip.bf16_tflops);
            table.add_row([label, format!("{products_ms:.3} ms; bound / products {ratio:.3}")]);
        }
        if let Some(Beside { recorded, ratio }) = &self.recorded {
            let label = format!("recorded: {}", recorded.program);
            table.add_row([label, format!("{:.2} ms; bound / recorded {ratio:.2}", recorded.step_ms.0)]);
        }
        if !self.libtpu_flags.is_empty() {
            table.add_row(["libtpu flags", &self.libtpu_flags]);
        }
        table.add_row(["compile_s".into(), format!("{:.2}", self.compile_s)]);

        let mut text = format!("{kernels}\n{table}\n");
        for instruction in &self.hbm_uncounted {
            let _ = writeln!(text, "not counted in hbm_bytes: the body of {instruction}");
        }
        for collective in &self.cycles_uncounted {
            let _ = writeln!(text, "not counted in cycles: {collective}");
        }
        text
    }
}

/// `1274 × 594, 12 × ?`, the heaviest first.
fn loops(kernel: &Kernel) -> String {
    const SHOWN: usize = 3;
    let mut loops: Vec<_> = kernel.loops.iter().collect();
    loops.sort_by_key(|l| std::cmp::Reverse(l.cycles.unwrap_or(l.bundles)));
    let trips = |trips: Option<u64>| trips.map_or("?".into(), |trips| trips.to_string());
    let one = |l: &&_| -> String {
        let l: &tpu::schedule::Loop = l;
        let optional = if l.optional { " (optional)" } else { "" };
        format!("{}{} × {}{optional}", ">".repeat(l.depth - 1), l.bundles, trips(l.trips))
    };
    let mut text = loops.iter().take(SHOWN).map(one).collect::<Vec<_>>().join(", ");
    if loops.len() > SHOWN {
        let _ = write!(text, ", {} more", loops.len() - SHOWN);
    }
    text
}

/// `VALU 62 %`
fn busiest(kernel: &Kernel) -> String {
    let slot = kernel.slots.iter().find(|slot| Some(&slot.name) == kernel.binding.as_ref());
    let percent = |used: u64, capacity: u64| 100.0 * used as f64 / (capacity * kernel.cycles) as f64;
    slot.map_or(String::new(), |slot| format!("{} {:.0} %", slot.name, percent(slot.used, slot.capacity)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lm_heads_alone_have_more_vmem_where_there_is_enough() {
        let flags = |shape: &str, target| flags_for(shape.parse().unwrap(), Target::parse(target).unwrap().chip);
        let more = "--xla_tpu_scoped_vmem_limit_kib=73728";
        assert_eq!(["v5e", "v6e", "v5p", "v7x"].map(|chip| flags("1x8x16x64", chip)), [more, more, "", ""]);
        assert_eq!(flags("1x8x64", "v6e"), "");
    }
}
