//! What is known of a program compiled for a TPU, as a table and as JSON.

use std::fmt::Write as _;

use comfy_table::{CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use serde::{Serialize, Serializer};

use crate::memory::CompiledMemory;
use crate::problem::{Dtype, Extents, HeadLayout, HeadShape};
use crate::spec::LossSpec;
use crate::tpu::recorded::{self, BASELINE, Recorded, SEED_KERNEL};
use crate::tpu::schedule::{Kernel, Loop};
use crate::tpu::{Bound, Compiled, Target};

/// Kernels that take less than this part of all cycles share one row of the table.
const SMALL: f64 = 0.01;

/// What is compiled, and for what.
pub(super) struct Asked {
    pub(super) target: Target,
    pub(super) implementation: String,
    pub(super) shape: Extents,
    pub(super) dtype: Dtype,
    pub(super) layout: HeadLayout,
    pub(super) rounds_logits: bool,
    pub(super) chunk_bytes: usize,
    pub(super) spec: LossSpec,
    pub(super) libtpu_flags: String,
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
pub(super) enum HeldBy {
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
    pub(super) fn new(asked: &Asked, held_by: HeldBy, compiled: &Compiled) -> Self {
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

    pub(super) fn table(&self) -> String {
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
        let l: &Loop = l;
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
