//! Programs compiled for TPUs without the chip: what `assay compile` writes.

use serde::{Deserialize, Serialize};

use crate::number::{nan, or_nan};

/// The figures of one program compiled for a TPU; all are of one device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TpuProgramReport {
    /// The chip and topology of the target.
    pub target: String,
    /// The number of devices of the target.
    #[serde(default)]
    pub devices: usize,
    /// The id of the implementation.
    #[serde(rename = "impl")]
    pub implementation: String,
    /// The extents of the batch, `[B, T, V]` or `[B, T, H, V]`.
    pub shape: Vec<usize>,
    /// The arrays that the shape describes: each device's, or all devices' together.
    #[serde(default)]
    pub held_by: HeldBy,
    /// The dtype of the logits, or of hidden states and head.
    pub dtype: String,
    /// The memory of one run.
    pub memory: ProgramMemory,
    /// The final program of each kernel.
    #[serde(default)]
    pub kernels: Vec<TpuLaunch>,
    /// The cycles of all kernels, one after another, each as often as it is launched.
    pub cycles: u64,
    /// The collectives whose cycles are not counted.
    #[serde(default)]
    pub cycles_uncounted: Vec<String>,
    /// The bytes read from HBM and written to it.
    pub hbm_bytes: u64,
    /// The HLO instructions whose bytes are not counted.
    #[serde(default)]
    pub hbm_uncounted: Vec<String>,
    /// The flags that libtpu was given.
    #[serde(default)]
    pub libtpu_flags: String,
    /// The lower bounds on the time of one run.
    pub bound: TpuTimeBound,
    /// The least milliseconds of any program with a bf16 head: its three products on one device at the chip's rate.
    pub products_ms: Option<f64>,
    /// The clock that is assumed, in GHz.
    pub clock_ghz: f64,
    /// The seconds that compiling took.
    #[serde(default = "nan", deserialize_with = "or_nan")]
    pub compile_s: f64,
    /// The recorded measurement of the baseline for this target, shape and dtype.
    pub recorded: Option<SeedComparison>,
    /// The recorded measurement of MLLM-JAX's own kernel there.
    pub recorded_kernel: Option<SeedMeasurement>,
}

/// The arrays that a shape describes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HeldBy {
    /// The arrays of each device.
    #[default]
    EachDevice,
    /// The whole arrays, which are cut over the devices.
    AllDevices,
}

impl HeldBy {
    /// Returns the preposition before "devices" in a sentence.
    pub fn preposition(self) -> &'static str {
        match self {
            HeldBy::EachDevice => "on each of",
            HeldBy::AllDevices => "over",
        }
    }
}

/// The bytes that one run takes on each device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramMemory {
    /// The bytes of the inputs.
    #[serde(default)]
    pub argument_bytes: i64,
    /// The bytes of the outputs, including those in the place of an input.
    #[serde(default)]
    pub output_bytes: i64,
    /// The bytes of scratch memory.
    #[serde(default)]
    pub temp_bytes: i64,
    /// The bytes of outputs in the place of a donated input.
    #[serde(default)]
    pub alias_bytes: i64,
    /// The bytes of the program itself.
    #[serde(default)]
    pub code_bytes: i64,
    /// The bytes held while it runs: `argument + output + temp − alias`.
    pub peak_bytes: i64,
}

/// A kind of slot in a bundle: an execution unit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SlotUse {
    /// The name that libtpu uses: `VALU`, `VLOAD`, …
    pub name: String,
    /// The number of slots of this kind in one bundle.
    pub capacity: u64,
    /// The number of slots filled, over all trips that are counted.
    pub used: u64,
}

/// One loop of a kernel, without the loops inside it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Loop {
    /// The nesting depth; 1 for an outermost loop.
    pub depth: usize,
    /// The bundles of one trip, without those of inner loops and those that a branch may skip.
    pub bundles: u64,
    /// The bundles that a branch may skip, without those of inner loops: they count once, as if one trip ran them.
    pub passed_over: u64,
    /// The number of trips each time it is entered; `None` if the program decides at run time.
    pub trips: Option<u64>,
    /// The cycles `bundles × trips` over the nest, and those that may be skipped once; `None` if some trips are unknown or it may be
    /// skipped.
    pub cycles: Option<u64>,
    /// Whether a branch outside it may skip it, or a loop around it.
    pub optional: bool,
    /// The slots filled, over all trips that are counted.
    pub slots: Vec<SlotUse>,
}

/// The program of one kernel, and its launches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TpuLaunch {
    /// The name of the HLO instruction, or of a part of the top level.
    pub name: String,
    /// The number of bundles of the program.
    pub bundles: u64,
    /// The loops, in the order of their start.
    pub loops: Vec<Loop>,
    /// The cycles `Σ bundles × trips` of one launch; loops without known cycles count as one trip.
    pub cycles: u64,
    /// The number of launches in one run.
    pub runs: u64,
    /// The slots filled, over the same cycles.
    pub slots: Vec<SlotUse>,
    /// The slot with the highest use relative to capacity; `None` if none is used.
    pub binding: Option<String>,
}

impl TpuLaunch {
    /// Returns the cycles of all launches together.
    pub fn all_cycles(&self) -> u64 {
        self.cycles.saturating_mul(self.runs)
    }
}

/// The largest of the lower bounds on time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TpuLimit {
    /// The issue of instructions takes longest.
    Cycles,
    /// The transfers from and to HBM take longest.
    Hbm,
    /// The transfers between chips take longest.
    Links,
}

impl TpuLimit {
    /// Returns the word for it in tables and JSON.
    pub fn name(self) -> &'static str {
        match self {
            TpuLimit::Cycles => "cycles",
            TpuLimit::Hbm => "hbm",
            TpuLimit::Links => "links",
        }
    }
}

/// The lower bounds on the time of one run, in milliseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TpuTimeBound {
    /// The bound `cycles / clock`, at the assumed clock of the chip.
    pub cycles_ms: f64,
    /// The bound `bytes / bandwidth`, at the documented bandwidth of a device.
    pub hbm_ms: f64,
    /// The time of collectives on the links between chips, by the narrowest cut of each.
    #[serde(default)]
    pub links_ms: f64,
    /// The part of that time in which nothing else is computed.
    #[serde(default)]
    pub links_exposed_ms: f64,
    /// The collective that takes longest, and its cut; `None` if nothing crosses a link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub links: Option<String>,
    /// The largest of cycles, HBM and those links that are busy while something is computed, which overlap at best, and the other
    /// links on top.
    pub predicted_ms: f64,
    /// The one of cycles, HBM and links that takes longest.
    pub limit: TpuLimit,
}

/// A recorded measurement on hardware at one shape.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SeedMeasurement {
    /// The program that was measured.
    pub program: String,
    /// The extents on each device, as `BxTxV` or `BxTxHxV`.
    #[serde(default)]
    pub shape: String,
    /// The least and the most milliseconds of a step.
    pub step_ms: [f64; 2],
    /// The `peak_bytes_in_use` of the process, which also holds the gradient of the step before.
    pub peak_bytes_in_use: Option<u64>,
    /// The `peak_bytes_reserved` of the process: scratch memory.
    pub peak_bytes_reserved: Option<u64>,
}

/// A recorded measurement, and the bound relative to it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SeedComparison {
    /// The recorded measurement on hardware.
    #[serde(flatten)]
    pub recorded: SeedMeasurement,
    /// The quotient `bound / recorded`, with the fastest step; a lower bound that holds is at most 1.
    #[serde(default = "nan", deserialize_with = "or_nan")]
    pub ratio: f64,
}

/// The table of every recorded shape, as `assay compile --table` writes it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TpuTable {
    /// The lines of the table, one per shape and program.
    pub rows: Vec<TpuProgramReport>,
}
