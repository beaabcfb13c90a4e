//! How long one implementation takes for one batch, and how much memory: `assay bench`.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};

use crate::number::{nan, or_nan};

/// What was measured, under the seed project's keys. Times are seconds unless the key says otherwise, memory is bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bench {
    /// Id of the implementation.
    #[serde(rename = "impl")]
    pub implementation: String,
    /// Devices that it ran on.
    pub devices: usize,
    /// How its tile kernels were written for them: `loops` or `mosaic`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lowering: Option<String>,
    /// `[B, T, V]` or `[B, T, H, V]`.
    pub shape: Vec<usize>,
    /// Of logits, or of hidden states and head.
    pub dtype: String,
    /// With an LM head: the extents of what was judged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub judged_shape: Option<Vec<usize>>,
    /// With an LM head: how it lies, `hv` or `vh`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layout: Option<String>,
    /// With an LM head: whether its logits are rounded to the dtype.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rounds_logits: Option<bool>,
    /// Steps after the first, before any was timed.
    #[serde(default)]
    pub warmup: usize,
    /// Steps timed.
    pub steps: usize,
    /// Compiling, where the implementation does, and the first step.
    pub first_call_s: f64,
    /// The mean, in milliseconds.
    #[serde(default = "nan", deserialize_with = "or_nan")]
    pub avg_step_ms: f64,
    /// The mean.
    #[serde(default = "nan", deserialize_with = "or_nan")]
    pub step_s_mean: f64,
    /// The median: the smallest step that half of them do not exceed.
    pub step_s_p50: f64,
    /// The smallest step that nine in ten do not exceed.
    pub step_s_p90: f64,
    /// The fastest.
    pub step_s_min: f64,
    /// The slowest.
    pub step_s_max: f64,
    /// On logits: 10⁹ bytes a second over the median step, of logits read and dlogits written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gb_per_s: Option<f64>,
    /// What it ran on, where that is not this machine's cores.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Launches of the step's kernels that were timed alone, back to back, each on the same logits, restored from a
    /// copy on the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel_launches: Option<usize>,
    /// The kernels' median over these launches, by the device's own clock: without what starts them, and without what
    /// lies between.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel_s_p50: Option<f64>,
    /// The kernels' fastest launch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel_s_min: Option<f64>,
    /// Logits read once and dlogits written once over the kernels' median, 10⁹ bytes a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel_gb_per_s: Option<f64>,
    /// The median of the copies between these launches, which restore the logits from the device's memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_copy_s_p50: Option<f64>,
    /// 10⁹ bytes a second over that median, of bytes read and bytes written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_copy_gb_per_s: Option<f64>,
    /// The share of the copy's rate that the kernels reach: `kernel_gb_per_s` over `device_copy_gb_per_s`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_copy_share: Option<f64>,
    /// The kernels that were timed, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kernels: Vec<BenchKernel>,
    /// 10⁹ bytes a second that the device's memory gives at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_gb_per_s: Option<f64>,
    /// Who says so: `device`, by its clock and its bus, or `datasheet`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_gb_per_s_from: Option<String>,
    /// What part of that is reached by logits read once and dlogits written once, over the kernels' median where it is known, else over
    /// the median step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_share: Option<f64>,
    /// With an LM head: 10⁹ operations a second over the median step, of its three products.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gflop_per_s: Option<f64>,
    /// Threads of kernels on this machine's cores.
    pub threads: usize,
    /// The instruction set, where it runs on them.
    pub isa: Option<String>,
    /// The opponents that took turns with it.
    #[serde(flatten)]
    pub ratios: Ratios,
    /// The bound's median over the median step: what part of the time any implementation needs. The bound is a copy of the
    /// logits, or with an LM head its three products.
    pub roofline_share: Option<f64>,
    /// Of the first device, as is every figure of memory: bytes in use when the arguments lie there.
    pub mem_after_alloc: Option<i64>,
    /// Bytes in use when the outputs of the last step lie there.
    pub mem_after_run: Option<i64>,
    /// The most bytes that were in use.
    pub peak_bytes_in_use: Option<i64>,
    /// The most bytes that were reserved.
    pub peak_bytes_reserved: Option<i64>,
    /// Of the compiled program, as are the next three: inputs.
    pub argument_bytes: Option<i64>,
    /// Outputs, those that lie over an input included.
    pub output_bytes: Option<i64>,
    /// Scratch.
    pub temp_bytes: Option<i64>,
    /// Outputs that lie over an input.
    pub alias_bytes: Option<i64>,
    /// Why a figure is `null`, by its key.
    #[serde(default)]
    pub why_null: BTreeMap<String, String>,
}

/// A kernel of a step, as a GPU's driver has assembled it; a figure that the driver does not say is `null`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelFigures {
    /// Registers of a thread.
    pub registers: Option<u32>,
    /// Local memory of a thread, bytes: registers are spilled there.
    pub local_bytes: Option<u32>,
    /// Shared memory of a CTA that the kernel's text declares, bytes.
    pub static_shared_bytes: u32,
    /// Shared memory of a CTA that the launch gives, bytes.
    pub dynamic_shared_bytes: u32,
    /// The most threads that a CTA may have.
    pub most_threads: Option<u32>,
    /// The version of PTX that it was assembled from: 80 is 8.0.
    pub ptx_version: Option<u32>,
    /// The architecture that it was assembled for: 90 is `sm_90`.
    pub binary_version: Option<u32>,
    /// CTAs that have room on a multiprocessor together.
    pub ctas_a_multiprocessor: Option<u32>,
    /// Clusters that have room on the device together; `null` also where there are no clusters.
    pub clusters: Option<u32>,
}

/// A kernel of a step: its times, and what the driver made of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BenchKernel {
    /// The kernel's entry.
    pub name: String,
    /// The median launch, seconds.
    pub s_p50: f64,
    /// The fastest launch, seconds.
    pub s_min: f64,
    /// The driver's figures.
    #[serde(flatten)]
    pub assembled: KernelFigures,
}

/// The median step over that of each opponent, by the opponent's name. Each is written under a key of its own,
/// `ratio_to_copy` and the like.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ratios(pub BTreeMap<String, f64>);

/// How the keys of ratios begin.
const RATIO: &str = "ratio_to_";

impl Ratios {
    /// The key that the ratio to `opponent` is written under.
    pub fn key(opponent: &str) -> String {
        format!("{RATIO}{opponent}")
    }
}

impl Serialize for Ratios {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(opponent, ratio)| (Self::key(opponent), ratio)))
    }
}

impl<'de> Deserialize<'de> for Ratios {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(RatioVisitor)
    }
}

/// A number, or what is passed over.
#[derive(Deserialize)]
#[serde(untagged)]
enum Ratio {
    Number(f64),
    Other(IgnoredAny),
}

struct RatioVisitor;

impl<'de> Visitor<'de> for RatioVisitor {
    type Value = Ratios;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "an object whose keys with `{RATIO}` are ratios")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Ratios, A::Error> {
        let mut ratios = BTreeMap::new();
        while let Some(key) = map.next_key::<String>()? {
            let value = map.next_value::<Ratio>()?;
            if let (Some(opponent), Ratio::Number(ratio)) = (key.strip_prefix(RATIO), value) {
                ratios.insert(opponent.into(), ratio);
            }
        }
        Ok(Ratios(ratios))
    }
}
