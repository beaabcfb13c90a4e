//! Devices that programs are written for.

use assay_ptx::PtxTarget;
use assay_tile::TileMachine;

/// The form in which a program contains its kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lowering {
    /// StableHLO loops, which any device runs.
    Loops,
    /// Mosaic kernels, which libtpu compiles.
    Mosaic,
    /// PTX kernels, which the driver of an NVIDIA GPU assembles. Tile kernels are loops on such a device.
    Ptx(PtxTarget),
}

impl Lowering {
    /// Returns the name of the lowering in reports.
    pub fn name(self) -> &'static str {
        match self {
            Lowering::Loops => "loops",
            Lowering::Mosaic => "mosaic",
            Lowering::Ptx(_) => "ptx",
        }
    }
}

/// Devices of one kind, and how kernels are written for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// One core of the device.
    pub machine: TileMachine,
    /// The form in which programs contain kernels.
    pub lowering: Lowering,
}

/// A core of a TPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TpuKind {
    /// The names by which PJRT calls devices of this kind.
    pub kinds: [&'static str; 2],
    /// The VMEM of a core in MiB, 2²⁰ bytes each.
    pub vmem_mib: usize,
    /// Whether its vector units compute in bf16.
    pub bf16_arithmetic: bool,
}

impl TpuKind {
    /// The core of a v5e.
    pub const V5E: TpuKind = TpuKind { kinds: ["TPU v5 lite", "TPU v5e"], vmem_mib: 128, bf16_arithmetic: false };
    /// The core of a v5p.
    pub const V5P: TpuKind = TpuKind { kinds: ["TPU v5", "TPU v5p"], vmem_mib: 64, bf16_arithmetic: false };
    /// The core of a v6e.
    pub const V6E: TpuKind = TpuKind { kinds: ["TPU v6 lite", "TPU v6e"], vmem_mib: 128, bf16_arithmetic: true };
    /// The core of a v7x.
    pub const V7X: TpuKind = TpuKind { kinds: ["TPU7x", "TPU v7x"], vmem_mib: 64, bf16_arithmetic: true };

    /// All that programs are written for.
    pub const ALL: [TpuKind; 4] = [TpuKind::V5E, TpuKind::V5P, TpuKind::V6E, TpuKind::V7X];

    /// Returns the machine that kernels are written for: one sixteenth of the VMEM is left to the compiler.
    pub const fn machine(self) -> TileMachine {
        TileMachine::tpu((self.vmem_mib << 20) / 16 * 15, self.bf16_arithmetic)
    }
}

/// Parts of the names by which PJRT calls GPUs, and the architecture that kernels are written for.
const GPU_KINDS: [(&str, PtxTarget); 4] =
    [("A100", PtxTarget::Sm80), ("H100", PtxTarget::Sm90), ("H200", PtxTarget::Sm90), ("B200", PtxTarget::Sm100)];

/// A TPU core with 128 MiB of VMEM, as a v6e has.
pub const ANY_TPU: TileMachine = TpuKind::V6E.machine();

/// Any other device: rows of its arrays follow one another, so that nothing is padded to be cut over several (`xla-vocab`
/// on eight CPU devices, 1x128x151936 bf16: 47 ms a step, 61 where 18,992 columns each were made 19,072). The kernels' loops take their
/// sums in a TPU's order, as they are there to be judged: lanes stay (32 of them took a CPU 0.9 of the time of `tile-one-pass` and 0.75 of
/// that of `tile-two-pass`, of blocks of a TPU's rows at 1x64x32000, 512 up to twice it). Rows, each summed alone, are fewer a block: a
/// block of them stays in cache, and XLA compiles code for each row's target (`tile-one-pass` at 1x64x32000 in bf16: 18 ms a step, 46 by a
/// TPU's blocks).
pub const ANY_DEVICE: TileMachine = TileMachine { sublanes: 2, memory_columns: 1, ..ANY_TPU };

impl Device {
    /// Any device but a TPU.
    pub const ANY: Device = Device { machine: ANY_DEVICE, lowering: Lowering::Loops };

    /// Returns an NVIDIA GPU whose kernels are PTX for `target`.
    pub const fn gpu(target: PtxTarget) -> Device {
        Device { machine: ANY_DEVICE, lowering: Lowering::Ptx(target) }
    }

    /// The devices of a PJRT platform, by the names that it gives itself and their kind. This is the one choice there is: kernels on
    /// a TPU and on a GPU that they are written for, loops anywhere else.
    ///
    /// # Errors
    /// The kinds of TPU that kernels are written for, where it is another.
    pub fn from_platform(platform: &str, kind: &str) -> Result<Device, String> {
        if platform == "cuda" {
            let known = GPU_KINDS.into_iter().find(|(name, _)| kind.contains(name));
            return Ok(known.map_or(Device::ANY, |(_, target)| Device::gpu(target)));
        }
        if platform != "tpu" {
            return Ok(Device::ANY);
        }
        let core = TpuKind::ALL.into_iter().find(|core| core.kinds.contains(&kind)).ok_or_else(|| {
            let kinds = TpuKind::ALL.map(|core| core.kinds[0]).join(", ");
            format!("{kinds}; or any, with tile kernels as loops ({LOOPS_VARIABLE}=1)")
        })?;
        Ok(Device { machine: core.machine(), lowering: Lowering::Mosaic })
    }

    /// Returns the device with loops in place of kernels, whatever its kind.
    pub fn in_loops(platform: &str, kind: &str) -> Device {
        let machine = Self::from_platform(platform, kind).map_or(ANY_TPU, |device| device.machine);
        Device { machine, lowering: Lowering::Loops }
    }
}

/// Asks for loops on a TPU too, where it is set to anything but nothing or 0: to compare, never to be timed as a kernel.
pub const LOOPS_VARIABLE: &str = "ASSAY_LOOPS";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn target_known_tpu_has_a_kernel_and_any_other_loops() {
        for kind in ["TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x", "TPU v6e"] {
            let device = Device::from_platform("tpu", kind).unwrap();
            assert_eq!((device.lowering, device.machine.memory_columns), (Lowering::Mosaic, 128), "{kind}");
            assert_eq!(Device::in_loops("tpu", kind), Device { lowering: Lowering::Loops, ..device });
        }
        assert_eq!(Device::from_platform("tpu", "TPU v5").unwrap().machine.vmem_bytes, 60 << 20);
        for platform in ["cpu", "cuda", "rocm"] {
            assert_eq!(Device::from_platform(platform, "whatever it is"), Ok(Device::ANY), "{platform}");
        }
        for (kind, target) in [
            ("NVIDIA A100-SXM4-80GB", PtxTarget::Sm80),
            ("NVIDIA H100 80GB HBM3", PtxTarget::Sm90),
            ("NVIDIA B200", PtxTarget::Sm100),
        ] {
            assert_eq!(Device::from_platform("cuda", kind), Ok(Device::gpu(target)), "{kind}");
            assert_eq!(Device::in_loops("cuda", kind), Device::ANY, "{kind}");
        }
        let error = Device::from_platform("tpu", "TPU v3").unwrap_err();
        assert!(
            error.contains("TPU v5 lite, TPU v5, TPU v6 lite, TPU7x") && error.contains("ASSAY_LOOPS=1"),
            "{error}"
        );
        assert_eq!(Device::in_loops("tpu", "TPU v3").lowering, Lowering::Loops);
    }
}
