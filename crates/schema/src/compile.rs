//! Programs compiled for TPUs that were not there: `assay compile`.

use serde::{Deserialize, Serialize};

use crate::number::{nan, or_nan};

/// What is known of one compiled program; all of one device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Compiled {
    /// Chip and topology.
    pub target: String,
    /// Devices of the target.
    #[serde(default)]
    pub devices: usize,
    /// Id of the implementation.
    #[serde(rename = "impl")]
    pub implementation: String,
    /// `[B, T, V]` or `[B, T, H, V]`.
    pub shape: Vec<usize>,
    /// What the shape is the extent of.
    #[serde(default)]
    pub held_by: HeldBy,
    /// Of logits, or of hidden states and head.
    pub dtype: String,
    /// Of one run.
    pub memory: Memory,
    /// Every kernel's final program.
    #[serde(default)]
    pub kernels: Vec<Launch>,
    /// Cycles of all kernels, one after another, each as often as it is launched.
    pub cycles: u64,
    /// Collectives whose cycles are not among them.
    #[serde(default)]
    pub cycles_uncounted: Vec<String>,
    /// Bytes read from HBM and written to it.
    pub hbm_bytes: u64,
    /// HLO instructions whose bytes are not among them.
    #[serde(default)]
    pub hbm_uncounted: Vec<String>,
    /// What libtpu was told.
    #[serde(default)]
    pub libtpu_flags: String,
    /// Lower bounds on the time of one run.
    pub bound: Bound,
    /// Three products of a bf16 head on one device at the chip's rate, in milliseconds: what any program of it takes at least.
    pub products_ms: Option<f64>,
    /// Assumed.
    pub clock_ghz: f64,
    /// Seconds that compiling took.
    #[serde(default = "nan", deserialize_with = "or_nan")]
    pub compile_s: f64,
    /// The recorded baseline of this target, shape and dtype.
    pub recorded: Option<Beside>,
    /// What the seed project's own kernel took there.
    pub recorded_kernel: Option<SeedMeasurement>,
}

/// What a shape is the extent of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HeldBy {
    /// Of each device's own arrays.
    #[default]
    EachDevice,
    /// Of arrays that are cut over the devices.
    AllDevices,
}

impl HeldBy {
    /// What stands before "devices".
    pub fn preposition(self) -> &'static str {
        match self {
            HeldBy::EachDevice => "on each of",
            HeldBy::AllDevices => "over",
        }
    }
}

/// Bytes that one run takes on each device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// Inputs.
    #[serde(default)]
    pub argument_bytes: i64,
    /// Outputs, those that lie over an input included.
    #[serde(default)]
    pub output_bytes: i64,
    /// Scratch.
    #[serde(default)]
    pub temp_bytes: i64,
    /// Outputs that lie over a donated input.
    #[serde(default)]
    pub alias_bytes: i64,
    /// The program itself.
    #[serde(default)]
    pub code_bytes: i64,
    /// `argument + output + temp − alias`: what is held while it runs.
    pub peak_bytes: i64,
}

/// A kind of slot in a bundle: an execution unit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SlotUse {
    /// libtpu's name: `VALU`, `VLOAD`, …
    pub name: String,
    /// Slots of this kind in one bundle.
    pub capacity: u64,
    /// Slots filled, over all trips that are counted.
    pub used: u64,
}

/// One loop of a kernel, without the loops inside it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Loop {
    /// 1 for a loop outside all others.
    pub depth: usize,
    /// Bundles of one trip, without those of inner loops and those that a branch may pass over.
    pub bundles: u64,
    /// Bundles that a branch may pass over, without those of inner loops: they count once, as if one trip ran them.
    pub passed_over: u64,
    /// Trips each time that it is entered; `None` where the program decides at run time.
    pub trips: Option<u64>,
    /// `bundles × trips` over the nest, and what is passed over once; `None` where some trips are unknown or it may be passed over.
    pub cycles: Option<u64>,
    /// Whether a branch outside it may pass over it, or over a loop around it.
    pub optional: bool,
    /// Slots filled, over all trips that are counted.
    pub slots: Vec<SlotUse>,
}

/// The program of one kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Launch {
    /// The HLO instruction, or a part of the top level.
    pub name: String,
    /// Bundles of the program.
    pub bundles: u64,
    /// Its loops, in order of their start.
    pub loops: Vec<Loop>,
    /// `Σ bundles × trips` of one launch; loops without known cycles count as one trip.
    pub cycles: u64,
    /// How often it is launched.
    pub runs: u64,
    /// Slots filled, over the same cycles.
    pub slots: Vec<SlotUse>,
    /// The slot with the highest use against capacity; `None` where none is used.
    pub binding: Option<String>,
}

impl Launch {
    /// Cycles of all launches.
    pub fn all_cycles(&self) -> u64 {
        self.cycles.saturating_mul(self.runs)
    }
}

/// Which of the bounds is the largest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Limit {
    /// Instructions issue.
    Cycles,
    /// HBM delivers.
    Hbm,
    /// Links between chips carry.
    Links,
}

impl Limit {
    /// Its word in tables and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Limit::Cycles => "cycles",
            Limit::Hbm => "hbm",
            Limit::Links => "links",
        }
    }
}

/// Lower bounds on one run, in milliseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bound {
    /// `cycles / clock`, at the assumed clock of the chip.
    pub cycles_ms: f64,
    /// `bytes / bandwidth`, at the documented bandwidth of a device.
    pub hbm_ms: f64,
    /// What collectives take on the links between chips, by the narrowest cut of each.
    #[serde(default)]
    pub links_ms: f64,
    /// Of that, what passes while nothing else is computed.
    #[serde(default)]
    pub links_exposed_ms: f64,
    /// The collective that takes most, and its cut; `None` where nothing crosses a link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub links: Option<String>,
    /// The largest of cycles, HBM and those links that are busy while something is computed, which overlap at best, and the other
    /// links on top.
    pub predicted_ms: f64,
    /// Which of cycles, HBM and links takes longest.
    pub limit: Limit,
}

/// What hardware measured at one shape.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SeedMeasurement {
    /// What ran.
    pub program: String,
    /// What each device held, as `BxTxV` or `BxTxHxV`.
    #[serde(default)]
    pub shape: String,
    /// Least and most milliseconds a step.
    pub step_ms: [f64; 2],
    /// `peak_bytes_in_use` of the process, which holds the step before's gradient too.
    pub peak_bytes_in_use: Option<u64>,
    /// `peak_bytes_reserved`: scratch.
    pub peak_bytes_reserved: Option<u64>,
}

/// That, and how the bound compares.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Beside {
    /// What was measured.
    #[serde(flatten)]
    pub recorded: SeedMeasurement,
    /// `bound / recorded`, the least of it; a lower bound that holds is at most 1.
    #[serde(default = "nan", deserialize_with = "or_nan")]
    pub ratio: f64,
}

/// Every recorded shape: `assay compile --table`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Table {
    /// A row for each shape and program.
    pub rows: Vec<Compiled>,
}
