//! Programs compiled ahead of time for TPUs, on a machine that has none, and what the compiler says of them.
//!
//! [`compile`] hands a StableHLO text to libtpu in a child process. Of what comes back, three things are read:
//!
//! - the memory of one run ([`CompiledMemory`](assay_core::memory::CompiledMemory)), which is what a device really reserves;
//! - the final VLIW program of every kernel ([`schedule`]): bundles, loops and their trips, slots used;
//! - the optimized HLO ([`traffic`]): bytes that move between HBM and the cores.
//!
//! From these follow two lower bounds on the time of one run, [`Bound`]. They are bounds, not predictions: DMA
//! latency, stalls, collectives and `SparseCore` work are in neither. [`recorded`] holds what hardware measured, to
//! put beside them.

#[cfg(feature = "libtpu")]
pub mod compile;
mod error;
mod files;
pub mod recorded;
pub mod schedule;
pub mod target;
pub mod traffic;

use serde::Serialize;

#[cfg(feature = "libtpu")]
pub use compile::{Compiled, Compiler, Request};
pub use error::TpuError;
pub use target::{Chip, Target};

/// Which of two bounds is the larger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Limit {
    /// Instructions issue.
    Cycles,
    /// HBM delivers.
    Hbm,
}

/// Lower bounds on one run, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Bound {
    /// `cycles / clock`, at the assumed clock of [`Chip`].
    pub cycles_ms: f64,
    /// `bytes / bandwidth`, at the documented bandwidth of a device.
    pub hbm_ms: f64,
    /// The larger of the two: computing and moving overlap at best.
    pub predicted_ms: f64,
    /// Which it is.
    pub limit: Limit,
}

impl Bound {
    /// Of `cycles` on one core and `bytes` through one device's HBM.
    pub fn of(chip: &Chip, cycles: u64, bytes: u64) -> Bound {
        let cycles_ms = cycles as f64 / (chip.clock_ghz * 1e6);
        let hbm_ms = bytes as f64 / (chip.device_hbm_tb_per_s() * 1e9);
        let limit = if cycles_ms > hbm_ms { Limit::Cycles } else { Limit::Hbm };
        Bound { cycles_ms, hbm_ms, predicted_ms: cycles_ms.max(hbm_ms), limit }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_is_the_larger_of_cycles_and_bytes() {
        let chip = Target::parse("v6e").unwrap().chip;
        let bound = Bound::of(chip, 1_750_000, 1_638_000_000);
        assert_eq!((bound.cycles_ms, bound.hbm_ms), (1.0, 1.0));
        let more_cycles = Bound::of(chip, 3_500_000, 1_638_000_000);
        assert_eq!((more_cycles.predicted_ms, more_cycles.limit), (2.0, Limit::Cycles));
        let more_bytes = Bound::of(chip, 1_750_000, 4_914_000_000);
        assert_eq!((more_bytes.predicted_ms, more_bytes.limit), (3.0, Limit::Hbm));
    }
}
