//! The time and the memory that one implementation takes for one batch: `assay bench`.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};

use crate::number::{nan, or_nan};

/// The measurements of one implementation on one batch, under the keys of MLLM-JAX.
///
/// Times are seconds unless the key says otherwise, memory is bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BenchFigures {
    /// The id of the implementation.
    #[serde(rename = "impl")]
    pub implementation: String,
    /// The number of devices that it ran on.
    pub devices: usize,
    /// The lowering of its tile kernels: `loops` or `mosaic`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lowering: Option<String>,
    /// The extents of the batch, `[B, T, V]` or `[B, T, H, V]`.
    pub shape: Vec<usize>,
    /// The dtype of the logits, or of hidden states and head.
    pub dtype: String,
    /// The extents of the batch that was judged, if there is an LM head.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub judged_shape: Option<Vec<usize>>,
    /// The layout of the LM head, `hv` or `vh`, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layout: Option<String>,
    /// Whether the LM head's logits are rounded to the dtype, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rounds_logits: Option<bool>,
    /// The number of untimed steps after the first one.
    #[serde(default)]
    pub warmup: usize,
    /// The number of steps that were timed.
    pub steps: usize,
    /// The seconds of the first step, and of compiling if the implementation does so.
    pub first_call_s: f64,
    /// The mean step, in milliseconds.
    #[serde(default = "nan", deserialize_with = "or_nan")]
    pub avg_step_ms: f64,
    /// The mean step, in seconds.
    #[serde(default = "nan", deserialize_with = "or_nan")]
    pub step_s_mean: f64,
    /// The median step: the smallest one that half of them do not exceed.
    pub step_s_p50: f64,
    /// The smallest step that nine of ten do not exceed.
    pub step_s_p90: f64,
    /// The fastest step, in seconds.
    pub step_s_min: f64,
    /// The slowest step, in seconds.
    pub step_s_max: f64,
    /// The rate of logits read and dlogits written over the median step, in 10⁹ bytes per second; only without an LM head.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gb_per_s: Option<f64>,
    /// The device that it ran on, if that is not this machine's CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// The number of launches of the step's kernels that were timed alone, back to back, each on the same logits, restored from a copy on
    /// the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel_launches: Option<usize>,
    /// The kernels' median over these launches in seconds, by the device's own clock: without their start, and without the time between
    /// them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel_s_p50: Option<f64>,
    /// The kernels' fastest launch, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel_s_min: Option<f64>,
    /// The rate of logits read once and dlogits written once over the kernels' median, in 10⁹ bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel_gb_per_s: Option<f64>,
    /// The median of the copies between these launches, which restore the logits from the device's memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_copy_s_p50: Option<f64>,
    /// The rate of bytes read and bytes written over that median, in 10⁹ bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_copy_gb_per_s: Option<f64>,
    /// The share of the copy's rate that the kernels reach: `kernel_gb_per_s` over `device_copy_gb_per_s`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_copy_share: Option<f64>,
    /// The kernels that were timed, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kernels: Vec<BenchKernel>,
    /// The largest rate of the device's memory, in 10⁹ bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_gb_per_s: Option<f64>,
    /// The source of that rate: `device`, from its clock and bus, or `datasheet`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_gb_per_s_from: Option<String>,
    /// The share of that rate that logits read once and dlogits written once reach, over the kernels' median if it is known, otherwise over
    /// the median step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_share: Option<f64>,
    /// The rate of the LM head's three products over the median step, in 10⁹ operations per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gflop_per_s: Option<f64>,
    /// The number of threads of kernels on this machine's CPU.
    pub threads: usize,
    /// The instruction set, if the kernel runs on the CPU.
    pub isa: Option<String>,
    /// The opponents that were timed in turns with it.
    #[serde(flatten)]
    pub ratios: Ratios,
    /// The bound's median over the median step: the share of the time that any implementation needs. The bound is a copy of the
    /// logits, or with an LM head its three products.
    pub roofline_share: Option<f64>,
    /// The bytes in use when the arguments are on the device; all figures of memory are of the first device.
    pub mem_after_alloc: Option<i64>,
    /// The bytes in use when the outputs of the last step are on the device.
    pub mem_after_run: Option<i64>,
    /// The most bytes in use at any time.
    pub peak_bytes_in_use: Option<i64>,
    /// The most bytes reserved at any time.
    pub peak_bytes_reserved: Option<i64>,
    /// The bytes of the compiled program's inputs.
    pub argument_bytes: Option<i64>,
    /// The bytes of the compiled program's outputs, including those in the place of an input.
    pub output_bytes: Option<i64>,
    /// The bytes of the compiled program's scratch memory.
    pub temp_bytes: Option<i64>,
    /// The bytes of outputs in the place of an input.
    pub alias_bytes: Option<i64>,
    /// The reason why a figure is `null`, by its key.
    #[serde(default)]
    pub why_null: BTreeMap<String, String>,
}

/// The figures of a kernel as a GPU's driver has assembled it; a figure that the driver does not report is `null`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelFigures {
    /// The number of registers per thread.
    pub registers: Option<u32>,
    /// The bytes of local memory per thread, to which registers are spilled.
    pub local_bytes: Option<u32>,
    /// The bytes of shared memory per CTA that the kernel's text declares.
    pub static_shared_bytes: u32,
    /// The bytes of shared memory per CTA that the launch adds.
    pub dynamic_shared_bytes: u32,
    /// The largest number of threads of a CTA.
    pub most_threads: Option<u32>,
    /// The version of PTX that it was assembled from: 80 is 8.0.
    pub ptx_version: Option<u32>,
    /// The architecture that it was assembled for: 90 is `sm_90`.
    pub binary_version: Option<u32>,
    /// The number of CTAs that fit on a multiprocessor together.
    pub ctas_a_multiprocessor: Option<u32>,
    /// The number of clusters that fit on the device together; `null` also if there are no clusters.
    pub clusters: Option<u32>,
}

/// A kernel of a step: its times and the driver's figures.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BenchKernel {
    /// The name of the kernel's entry point.
    pub name: String,
    /// The median launch, in seconds.
    pub s_p50: f64,
    /// The fastest launch, in seconds.
    pub s_min: f64,
    /// The driver's figures of the assembled kernel.
    #[serde(flatten)]
    pub assembled: KernelFigures,
}

/// The median step over that of each opponent, by the opponent's name. Each is written under a key of its own,
/// `ratio_to_copy` and the like.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ratios(pub BTreeMap<String, f64>);

/// The prefix of the keys of ratios.
const RATIO: &str = "ratio_to_";

impl Ratios {
    /// Returns the key that the ratio to `opponent` is written under.
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

/// A value of the object: a number, or anything else, which is skipped.
#[derive(Deserialize)]
#[serde(untagged)]
enum RatioValue {
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
            let value = map.next_value::<RatioValue>()?;
            if let (Some(opponent), RatioValue::Number(ratio)) = (key.strip_prefix(RATIO), value) {
                ratios.insert(opponent.into(), ratio);
            }
        }
        Ok(Ratios(ratios))
    }
}
