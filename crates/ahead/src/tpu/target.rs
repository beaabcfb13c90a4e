//! TPU targets: a chip, and the grid in which several of them are connected.
//!
//! # Names
//! A target is written `CHIP:TOPOLOGY`, or `CHIP` for the topology that has eight devices. Tried with libtpu 0.0.51:
//!
//! | target | name that libtpu takes | default | devices of it | a device is |
//! |---|---|---|---|---|
//! | `v5e` | `v5e:2x4` | 2x4 | 8 | a chip of one core |
//! | `v5p` | `v5p:2x2x2` | 2x2x2 | 8 | a chip, its two cores working as one (megacore) |
//! | `v6e` | `v6e:2x4` | 2x4 | 8 | a chip of one core |
//! | `v7x` | `tpu7x:2x2x1` (`v7x:…` is unknown to it) | 2x2x1 | 8 | a core, two a chip |
//!
//! A topology is one to three extents in chips, 1x1 included; those that hosts of 2x2 chips do not tile (`3x5`) are
//! refused by libtpu with a message. An extent of 0 would kill it by a signal, so that is refused here.
//!
//! # Environment
//! Only `TPU_SKIP_MDS_QUERY=1` is needed, for every chip alike: without it libtpu asks the metadata server of a cloud
//! machine. `TPU_WORKER_HOSTNAMES=localhost` and `TPU_ACCELERATOR_TYPE` (`v5litepod-8`, `v5p-8`, `v6e-8`, `tpu7x-8`)
//! only keep it from complaining on stderr: a wrong type gave one v6e program the same code size and memory.
//! `ALLOW_MULTIPLE_LIBTPU_LOAD=1` lets several processes compile at once; without it all but one may fail on
//! `/tmp/libtpu_lockfile`.
//!
//! # Figures
//! HBM size and bandwidth, cores and bf16 rate: Google's documents of each chip
//! (<https://cloud.google.com/tpu/docs/system-architecture-tpu-vm>) and, for VMEM, the table that JAX keeps for
//! Pallas (`jax/_src/pallas/mosaic/tpu_info.py`), which agrees but for v5p's bandwidth (2.46). No document names a
//! clock: those here are inferred from the bf16 rate and the number of MXUs, and are an assumption wherever a time
//! is printed.

use std::fmt;

use crate::error::AheadError;
use assay_programs::{TileMachine, TpuKind};
use assay_schema::compile::{TpuLimit, TpuTimeBound};

/// A generation of TPU. All figures are per chip unless they say otherwise.
#[derive(Debug, PartialEq)]
pub struct TpuChip {
    /// The name of the generation in targets, such as `v6e`.
    pub name: &'static str,
    /// The name of the generation in libtpu's topologies.
    libtpu: &'static str,
    /// The value of `TPU_ACCELERATOR_TYPE` for eight devices.
    accelerator: &'static str,
    /// The chips along each axis of a target without a topology.
    default_topology: &'static [usize],
    /// The HBM bandwidth of a chip, 10¹² bytes a second.
    pub hbm_tb_per_s: f64,
    /// The bandwidth of one link between two chips in each direction, 10⁹ bytes a second. Documents give the sum of all links in both
    /// directions.
    pub port_gb_per_s: f64,
    /// The number of chips along an axis from which its ends are connected to a ring.
    rings_of: usize,
    /// The HBM of a chip, 2³⁰ bytes.
    pub hbm_gib: f64,
    /// The kind of the chip's tensor cores.
    pub core: TpuKind,
    /// The number of tensor cores of a chip.
    pub cores: usize,
    /// The number of devices that a program sees on one chip.
    pub devices: usize,
    /// Whether libtpu can move all-gathers and reduce-scatters to `SparseCore`s, so that tensor cores compute at the same time. A v5e has
    /// no `SparseCore`, and on a v5p libtpu does not do it.
    pub offloads_collectives: bool,
    /// The assumed clock, 10⁹ cycles a second.
    pub clock_ghz: f64,
    /// The dense bf16 rate of a chip, 10¹² operations a second.
    pub bf16_tflops: f64,
    /// The bundles that issue after a branch before it takes effect.
    pub(super) branch_delay: usize,
}

impl TpuChip {
    /// Returns the HBM bandwidth of one device, 10¹² bytes a second.
    pub fn device_hbm_tb_per_s(&self) -> f64 {
        self.hbm_tb_per_s / self.devices as f64
    }

    /// Returns the resources that a kernel may use on one device.
    pub fn machine(&self) -> TileMachine {
        self.core.machine()
    }

    /// Whether an axis of this many chips is a ring.
    pub(super) fn wraps(&self, chips: usize) -> bool {
        chips >= self.rings_of
    }

    /// Returns the milliseconds that one device takes for `multiplications`, each with an addition, at the bf16 rate.
    pub fn products_ms(&self, multiplications: f64) -> f64 {
        2.0 * multiplications * self.devices as f64 / (self.bf16_tflops * 1e9)
    }

    /// Returns the lower bounds of `cycles` on one core and `bytes` through one device's HBM.
    pub fn bound(&self, cycles: u64, bytes: u64) -> TpuTimeBound {
        // Instructions and HBM overlap in the best case, so that the larger time bounds the run.
        let cycles_ms = cycles as f64 / (self.clock_ghz * 1e6);
        let hbm_ms = bytes as f64 / (self.device_hbm_tb_per_s() * 1e9);
        let limit = if cycles_ms > hbm_ms { TpuLimit::Cycles } else { TpuLimit::Hbm };
        let (links_ms, links_exposed_ms) = (0.0, 0.0);
        let predicted_ms = cycles_ms.max(hbm_ms);
        TpuTimeBound { cycles_ms, hbm_ms, links_ms, links_exposed_ms, links: None, predicted_ms, limit }
    }
}

/// All chips for which there is a target.
pub const CHIPS: [TpuChip; 4] = [
    TpuChip {
        name: "v5e",
        libtpu: "v5e",
        accelerator: "v5litepod-8",
        default_topology: &[2, 4],
        hbm_tb_per_s: 0.82,
        port_gb_per_s: 50.0,
        rings_of: 16,
        hbm_gib: 16.0,
        core: TpuKind::V5E,
        cores: 1,
        devices: 1,
        offloads_collectives: false,
        clock_ghz: 1.5,
        bf16_tflops: 197.0,
        branch_delay: 4,
    },
    TpuChip {
        name: "v5p",
        libtpu: "v5p",
        accelerator: "v5p-8",
        default_topology: &[2, 2, 2],
        hbm_tb_per_s: 2.77,
        port_gb_per_s: 100.0,
        rings_of: 4,
        hbm_gib: 95.0,
        core: TpuKind::V5P,
        cores: 2,
        devices: 1,
        offloads_collectives: false,
        clock_ghz: 1.75,
        bf16_tflops: 459.0,
        branch_delay: 4,
    },
    TpuChip {
        name: "v6e",
        libtpu: "v6e",
        accelerator: "v6e-8",
        default_topology: &[2, 4],
        hbm_tb_per_s: 1.638,
        port_gb_per_s: 100.0,
        rings_of: 16,
        hbm_gib: 32.0,
        core: TpuKind::V6E,
        cores: 1,
        devices: 1,
        offloads_collectives: true,
        clock_ghz: 1.75,
        bf16_tflops: 918.0,
        branch_delay: 4,
    },
    TpuChip {
        name: "v7x",
        libtpu: "tpu7x",
        accelerator: "tpu7x-8",
        default_topology: &[2, 2, 1],
        hbm_tb_per_s: 7.38,
        port_gb_per_s: 100.0,
        rings_of: 4,
        hbm_gib: 192.0,
        core: TpuKind::V7X,
        cores: 2,
        devices: 2,
        offloads_collectives: true,
        clock_ghz: 2.2,
        bf16_tflops: 2307.0,
        branch_delay: 6,
    },
];

/// The most chips of a target: the largest pod, of v7x, has 9,216.
const MOST_CHIPS: usize = 9_216;

/// A chip, and the grid of chips that are connected.
#[derive(Clone, Debug, PartialEq)]
pub struct TpuTarget {
    /// The chip that all devices of the target are part of.
    pub chip: &'static TpuChip,
    /// The chips along each axis of the grid.
    topology: Vec<usize>,
}

impl fmt::Display for TpuTarget {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}:{}", self.chip.name, self.extents())
    }
}

impl TpuTarget {
    /// Parses `v6e:2x4`, or `v6e` for the default topology. See [the module](self).
    ///
    /// # Errors
    /// [`AheadError::UnknownTarget`], which lists the chips there are and a target that works.
    pub fn parse(text: &str) -> Result<TpuTarget, AheadError> {
        let (name, topology) = text.split_once(':').map_or((text, None), |(name, topology)| (name, Some(topology)));
        let chip = CHIPS.iter().find(|chip| chip.name == name);
        // The error shows a valid topology of the chip that was meant, or of a v6e.
        let refused = || AheadError::UnknownTarget {
            given: text.into(),
            expected: CHIPS.map(|chip| chip.name).join(", "),
            devices: format!("a topology such as {}", TpuTarget::with_default_topology(chip.unwrap_or(&CHIPS[2]))),
        };
        let chip = chip.ok_or_else(refused)?;
        let Some(extents) = topology else { return Ok(TpuTarget::with_default_topology(chip)) };
        let topology: Vec<usize> =
            extents.split('x').map(|extent| extent.parse().map_err(|_| refused())).collect::<Result<_, _>>()?;
        // An extent of 0 kills libtpu, and absurd extents must not overflow.
        let chips = topology.iter().try_fold(1_usize, |chips, &extent| chips.checked_mul(extent));
        match chips {
            Some(1..=MOST_CHIPS) if topology.len() <= 3 => Ok(TpuTarget { chip, topology }),
            _ => Err(refused()),
        }
    }

    fn with_default_topology(chip: &'static TpuChip) -> TpuTarget {
        TpuTarget { chip, topology: chip.default_topology.to_vec() }
    }

    /// Returns a target of each chip, with the topology that has eight devices.
    pub fn defaults() -> impl Iterator<Item = TpuTarget> {
        CHIPS.iter().map(TpuTarget::with_default_topology)
    }

    /// Returns the number of devices that a program uses.
    pub fn devices(&self) -> usize {
        self.topology.iter().product::<usize>() * self.chip.devices
    }

    /// Returns the chips along each axis of the grid.
    pub fn topology(&self) -> &[usize] {
        &self.topology
    }

    fn extents(&self) -> String {
        self.topology.iter().map(ToString::to_string).collect::<Vec<_>>().join("x")
    }

    /// Returns the name that libtpu has for the topology.
    #[cfg(any(feature = "plugin", test))]
    pub(super) fn topology_name(&self) -> String {
        format!("{}:{}", self.chip.libtpu, self.extents())
    }

    /// Returns the environment variables that must be set before libtpu loads.
    #[cfg(feature = "plugin")]
    pub(super) fn environment(&self) -> [(&'static str, &'static str); 4] {
        [
            ("TPU_SKIP_MDS_QUERY", "1"),
            ("TPU_WORKER_HOSTNAMES", "localhost"),
            ("TPU_ACCELERATOR_TYPE", self.chip.accelerator),
            ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tpu_bound_is_the_larger_of_cycles_and_bytes() {
        let chip = TpuTarget::parse("v6e").unwrap().chip;
        let bound = chip.bound(1_750_000, 1_638_000_000);
        assert_eq!((bound.cycles_ms, bound.hbm_ms), (1.0, 1.0));
        let more_cycles = chip.bound(3_500_000, 1_638_000_000);
        assert_eq!((more_cycles.predicted_ms, more_cycles.limit), (2.0, TpuLimit::Cycles));
        let more_bytes = chip.bound(1_750_000, 4_914_000_000);
        assert_eq!((more_bytes.predicted_ms, more_bytes.limit), (3.0, TpuLimit::Hbm));
    }

    #[test]
    fn tpu_target_without_topology_has_eight_devices() {
        for target in TpuTarget::defaults() {
            assert_eq!(target.devices(), 8, "{target}");
            assert_eq!(TpuTarget::parse(target.chip.name).unwrap(), target);
            assert_eq!(TpuTarget::parse(&target.to_string()).unwrap(), target);
        }
    }

    #[test]
    fn tpu_devices_are_cores_on_v7x_and_chips_elsewhere() {
        let devices = |text| TpuTarget::parse(text).unwrap().devices();
        assert_eq!([devices("v5e:4x4"), devices("v5p:2x2x1"), devices("v7x:2x2x1")], [16, 4, 8]);
        assert_eq!(TpuTarget::parse("v7x").unwrap().topology_name(), "tpu7x:2x2x1");
    }

    #[test]
    fn tpu_target_unknown_is_refused_with_the_known_ones() {
        for text in ["", "v4", "v6e:", "v6e:0x4", "v6e:2x", "v6e:-1", "v6e:1x1x1x1", "v6e:99999x99999", "tpu7x:2x2x1"] {
            let message = TpuTarget::parse(text).unwrap_err().to_string();
            assert!(message.contains("v5e, v5p, v6e, v7x"), "{message}");
            assert!(message.contains("v6e:2x4"), "{message}");
        }
        assert!(TpuTarget::parse("v7x:2x").unwrap_err().to_string().contains("v7x:2x2x1"));
    }
}
