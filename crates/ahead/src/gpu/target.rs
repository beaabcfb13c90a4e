//! GPU targets: a chip, and the number of them in one machine.
//!
//! # Names
//! A target is written `h100`, or `h100:8` for eight of them. XLA's CUDA plugin gets it as two options of a topology of the
//! platform `cuda`: `topology`, `1x1x8` (slices, hosts of one, devices of one), and `target_config`, a `GpuTargetConfigProto` as
//! text. It needs no GPU, no driver and no other library.
//!
//! # Figures
//! The plugin gets the description that openxla/xla keeps in `xla/backends/gpu/target_config/specs` (`a100_sxm_80`, `h100_sxm`, `h200`,
//! `b200.txtpb`). HBM bandwidth: NVIDIA's datasheets of the A100 80GB SXM, H100 SXM, H200 SXM and DGX B200. The clock is the boost
//! clock of the same files of XLA, and an assumption wherever a time is printed: under load a chip may run slower.
//!
//! Rates of a multiprocessor: CUDA C++ Best Practices Guide 13, 12.1.1, "Throughput of Native Arithmetic Instructions", in results a
//! clock (<https://docs.nvidia.com/cuda/cuda-c-best-practices-guide/#throughput-of-native-arithmetic-instructions>), columns 8.0, 9.0 and
//! 10.0; half-precision there counts both halves up to 9.0. openxla/xla quotes f32, f16 and i32 of the same table
//! (`xla/stream_executor/cuda/cuda_core_info_table.cc`). Which instruction takes which pipe:
//! Nsight Compute's documentation, "Pipelines" (`pipes`). Banks of shared memory give 4 bytes a clock each, 32 of them (CUDA
//! C++ Programming Guide). Where no document has a rate, the fastest possible one is used, because a bound must not be too large.

use std::fmt;

use crate::error::AheadError;

/// A generation of GPU with the figures that bounds depend on.
#[derive(Debug, PartialEq)]
pub struct GpuChip {
    /// The name of the chip in targets, such as `h100`.
    pub name: &'static str,
    /// The name that CUDA reports for the device.
    device: &'static str,
    /// The compute capability, major and minor version.
    pub capability: (u32, u32),
    /// The number of streaming multiprocessors.
    pub multiprocessors: u32,
    /// The boost clock, 10⁹ cycles a second.
    pub clock_ghz: f64,
    /// The HBM bandwidth of the datasheet, 10¹² bytes a second.
    pub hbm_tb_per_s: f64,
    /// The HBM bandwidth that XLA's configuration has, in bytes a second.
    xla_bandwidth: u64,
    /// The size of the HBM, in bytes.
    memory_bytes: u64,
    /// The size of the L2 cache, in bytes.
    l2_bytes: u64,
    /// The shared memory of a multiprocessor, in bytes.
    pub shared_bytes: u32,
    /// The most shared memory that one CTA may have, static and dynamic, in bytes.
    pub shared_bytes_a_cta: u32,
    /// The most CTAs of a cluster that every device of this kind runs; 1 if the chip has no clusters.
    pub largest_cluster: u32,
    /// The rates of the execution units of a multiprocessor.
    pub rates: GpuRates,
}

/// The number of threads whose instruction a multiprocessor executes in one clock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GpuRates {
    /// Additions, multiplications and fused multiply-adds of f32.
    pub f32: f64,
    /// Additions, multiplications and fused multiply-adds of two f16 a thread.
    pub f16x2: f64,
    /// Additions, multiplications and fused multiply-adds of two bf16 a thread.
    pub bf16x2: f64,
    /// Minimum and maximum of two f32.
    pub f32_min_max: f64,
    /// Integer additions, logic, shifts, comparisons and selections.
    pub integer: f64,
    /// Integer multiplications, with or without an addition.
    pub integer_product: f64,
    /// Exponential, logarithm and reciprocal, of the special function unit.
    pub transcendental: f64,
    /// Conversions between two float types or two integer types, and roundings.
    pub conversion: f64,
    /// Loads, stores and shuffles of any size.
    pub memory: f64,
}

/// The threads whose instructions start in one clock: a warp on each quarter of a multiprocessor.
pub(crate) const ISSUED: f64 = 128.0;

/// The bytes that the banks of shared memory deliver in a clock.
pub(crate) const SHARED_BYTES_A_CLOCK: f64 = 128.0;

/// The number of threads of a warp.
pub const WARP: u32 = 32;

/// The limits that all these chips have in common: threads of a CTA here; threads, registers and CTAs of a multiprocessor below.
pub(crate) const THREADS_A_CTA: u32 = 1024;
const THREADS: u32 = 2048;
const REGISTERS: u32 = 65_536;
const SLOTS: u32 = 32;

/// The shared memory that CUDA reserves in each CTA, in bytes.
const RESERVED: u32 = 1024;

/// All chips for which there is a target.
pub const CHIPS: [GpuChip; 4] = [
    GpuChip {
        name: "a100",
        device: "NVIDIA A100-SXM4-80GB",
        capability: (8, 0),
        multiprocessors: 108,
        clock_ghz: 1.41,
        hbm_tb_per_s: 2.039,
        xla_bandwidth: 2_039_040_000_000,
        memory_bytes: 85_100_068_864,
        l2_bytes: 41_943_040,
        shared_bytes: 167_936,
        shared_bytes_a_cta: 166_912,
        largest_cluster: 1,
        rates: GpuRates {
            f32: 64.0,
            f16x2: 128.0,
            bf16x2: 64.0,
            f32_min_max: 64.0,
            integer: 64.0,
            integer_product: 64.0,
            transcendental: 16.0,
            conversion: 16.0,
            memory: 32.0,
        },
    },
    GpuChip {
        name: "h100",
        device: "NVIDIA H100 80GB HBM3",
        capability: (9, 0),
        multiprocessors: 132,
        clock_ghz: 1.98,
        hbm_tb_per_s: 3.35,
        xla_bandwidth: 3_352_320_000_000,
        memory_bytes: 84_942_979_072,
        l2_bytes: 52_428_800,
        shared_bytes: 233_472,
        shared_bytes_a_cta: 232_448,
        largest_cluster: 8,
        rates: HOPPER,
    },
    GpuChip {
        name: "h200",
        device: "NVIDIA H200 141GB HBM3e",
        capability: (9, 0),
        multiprocessors: 132,
        clock_ghz: 1.98,
        hbm_tb_per_s: 4.8,
        xla_bandwidth: 4_800_000_000_000,
        memory_bytes: 151_397_597_184,
        l2_bytes: 52_428_800,
        shared_bytes: 233_472,
        shared_bytes_a_cta: 232_448,
        largest_cluster: 8,
        rates: HOPPER,
    },
    GpuChip {
        name: "b200",
        device: "NVIDIA B200",
        capability: (10, 0),
        multiprocessors: 148,
        clock_ghz: 1.965,
        hbm_tb_per_s: 8.0,
        xla_bandwidth: 7_672_320_000_000,
        memory_bytes: 191_514_411_008,
        l2_bytes: 132_644_864,
        shared_bytes: 233_472,
        shared_bytes_a_cta: 232_448,
        largest_cluster: 8,
        rates: GpuRates { f16x2: 64.0, bf16x2: 64.0, f32_min_max: 128.0, ..HOPPER },
    },
];

const HOPPER: GpuRates = GpuRates {
    f32: 128.0,
    f16x2: 128.0,
    bf16x2: 128.0,
    f32_min_max: 64.0,
    integer: 64.0,
    integer_product: 64.0,
    transcendental: 16.0,
    conversion: 64.0,
    memory: 32.0,
};

impl GpuChip {
    /// Returns the chip that a driver or a plugin calls `device`, such as `NVIDIA H100 80GB HBM3`.
    pub fn with_device_name(device: &str) -> Option<&'static Self> {
        CHIPS.iter().find(|chip| device == chip.device)
    }

    /// Returns the architecture that `ptxas` takes, such as `sm_90`.
    pub fn architecture(&self) -> String {
        let (major, minor) = self.capability;
        format!("sm_{major}{minor}")
    }

    /// Returns the target for which kernels of this chip are written.
    pub fn written_for(&self) -> assay_ptx::PtxTarget {
        use assay_ptx::PtxTarget::{Sm80, Sm90, Sm100};
        match self.capability.0 {
            ..9 => Sm80,
            9 => Sm90,
            10.. => Sm100,
        }
    }

    /// Returns the milliseconds that `bytes` take at the HBM bandwidth.
    pub fn hbm_ms(&self, bytes: u64) -> f64 {
        bytes as f64 / (self.hbm_tb_per_s * 1e9)
    }

    /// Returns the milliseconds that `clocks`, summed over all multiprocessors, take if they are evenly distributed.
    pub(crate) fn ms(&self, clocks: f64) -> f64 {
        clocks / (f64::from(self.multiprocessors) * self.clock_ghz * 1e6)
    }

    /// Returns how many CTAs are resident on a multiprocessor at once, and the resource that limits them.
    pub fn resident(&self, threads: u32, registers: u32, shared_bytes: u32) -> (u32, &'static str) {
        let warps = threads.div_ceil(WARP).max(1);
        // Each quarter has its registers, given to a warp by 256.
        let of_a_warp = registers.next_multiple_of(8).max(8) * WARP;
        // Each limit gives a number of CTAs, and the smallest of them decides.
        let by_registers = 4 * (REGISTERS / 4 / of_a_warp) / warps;
        let by_shared = self.shared_bytes / (shared_bytes + RESERVED).next_multiple_of(128);
        let by_threads = THREADS / WARP / warps;
        let all =
            [(by_registers, "registers"), (by_shared, "shared memory"), (by_threads, "threads"), (SLOTS, "slots")];
        all.into_iter().min_by_key(|(ctas, _)| *ctas).expect("four")
    }

    /// Writes the description of the chip that the plugin takes, a `GpuTargetConfigProto` as text.
    pub fn target_config(&self) -> String {
        let Self { device, multiprocessors, clock_ghz, xla_bandwidth, memory_bytes, l2_bytes, .. } = self;
        let Self { shared_bytes, shared_bytes_a_cta, rates, capability: (major, minor), .. } = self;
        let fpus = rates.f32;
        format!(
            "gpu_device_info {{
  threads_per_block_limit: {THREADS_A_CTA}
  threads_per_warp: {WARP}
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_bytes}
  threads_per_core_limit: {THREADS}
  core_count: {multiprocessors}
  fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {xla_bandwidth}
  l2_cache_size: {l2_bytes}
  clock_rate_ghz: {clock_ghz}
  device_memory_size: {memory_bytes}
  shared_memory_per_block_optin: {shared_bytes_a_cta}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: {REGISTERS}
  registers_per_block_limit: {REGISTERS}
}}
platform_name: \"CUDA\"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: \"{device}\"
"
        )
    }
}

/// The most devices of a target: those of one machine.
const MOST_DEVICES: usize = 8;

/// A chip, and the number of devices of it.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuTarget {
    /// The chip that all devices of the target are.
    pub chip: &'static GpuChip,
    devices: usize,
}

impl fmt::Display for GpuTarget {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.devices {
            1 => write!(f, "{}", self.chip.name),
            devices => write!(f, "{}:{devices}", self.chip.name),
        }
    }
}

impl GpuTarget {
    /// Parses `h100`, or `h100:8` for eight devices. See [the module](self).
    ///
    /// # Errors
    /// [`AheadError::UnknownTarget`], which lists the chips there are.
    pub fn parse(text: &str) -> Result<GpuTarget, AheadError> {
        let refused = || AheadError::UnknownTarget {
            given: text.into(),
            expected: CHIPS.map(|chip| chip.name).join(", "),
            devices: "a number of devices up to 8 as in h100:8".into(),
        };
        let (name, devices) = text.split_once(':').unwrap_or((text, "1"));
        let chip = CHIPS.iter().find(|chip| chip.name == name).ok_or_else(refused)?;
        let devices = devices.parse().ok().filter(|devices| (1..=MOST_DEVICES).contains(devices));
        Ok(GpuTarget { chip, devices: devices.ok_or_else(refused)? })
    }

    /// Whether `text` starts with the name of a GPU, even if the rest of it is invalid.
    pub fn is_meant(text: &str) -> bool {
        let name = text.split_once(':').map_or(text, |(name, _)| name);
        CHIPS.iter().any(|chip| chip.name == name)
    }

    /// Returns a target with one device of each chip.
    pub fn all() -> impl Iterator<Item = GpuTarget> {
        CHIPS.iter().map(|chip| GpuTarget { chip, devices: 1 })
    }

    /// Returns the number of devices that a program uses.
    pub fn devices(&self) -> usize {
        self.devices
    }

    /// Returns the options by which the plugin is told the topology and the chip.
    #[cfg(feature = "plugin")]
    pub(crate) fn options(&self) -> [(&'static str, String); 2] {
        [("topology", format!("1x1x{}", self.devices)), ("target_config", self.chip.target_config())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpu_target_is_a_chip_and_a_number_of_devices() {
        for target in GpuTarget::all() {
            assert_eq!(GpuTarget::parse(target.chip.name).unwrap(), target);
        }
        let eight = GpuTarget::parse("h200:8").unwrap();
        assert_eq!((eight.devices(), eight.to_string().as_str()), (8, "h200:8"));
        for text in ["", "v100", "h100:0", "h100:9", "h100:x", "H100"] {
            let message = GpuTarget::parse(text).unwrap_err().to_string();
            assert!(message.contains("a100, h100, h200, b200"), "{message}");
        }
    }

    /// The expected figures are those of NVIDIA's occupancy calculator.
    #[test]
    fn resident_ctas_are_limited_by_the_scarcest_resource() {
        let h100 = GpuTarget::parse("h100").unwrap().chip;
        assert_eq!(h100.resident(512, 64, 82_700), (2, "registers"));
        assert_eq!(h100.resident(256, 64, 82_700), (2, "shared memory"));
        assert_eq!(h100.resident(256, 64, 45_000), (4, "registers"));
        assert_eq!(h100.resident(1024, 32, 0), (2, "registers"));
        assert_eq!(h100.resident(1024, 16, 0), (2, "threads"));
        assert_eq!(h100.resident(32, 16, 0), (32, "slots"));
        assert_eq!(h100.resident(256, 65, 0), (3, "registers"));
        assert_eq!(h100.resident(256, 64, 232_448), (1, "shared memory"));
    }
}
