//! GRPO losses on logits as programs for PJRT devices: one frame around each of several cores, on one device or cut over several.
//!
//! | id | what computes a device's tokens |
//! |---|---|
//! | `xla` | plain XLA operations, the baseline |
//! | `tile-one-pass` | a TPU kernel that reads logits once |
//! | `tile-two-pass` | two that stream over the columns |
//! | `tile-entropy` | the first of those two alone: logp and entropy, no gradient |
//! | `gpu-one-pass` | a kernel for NVIDIA's GPUs that reads logits once |
//! | `gpu-two-pass` | two that stream over the columns |
//! | `gpu-logp` | the first of those two alone |
//! | `xla-seed`, … | other ways to write the baseline, only to be compiled beside it: `alternatives` has them |
//!
//! | ending | what a device holds of `[B,T,V]` |
//! |---|---|
//! | none | all of it |
//! | `-rows` | some sequences; where the devices outnumber them, some tokens of some sequences |
//! | `-vocab` | some columns of every row, as a tensor-parallel head leaves them |
//! | `-mesh` | some columns of some rows |
//!
//! A tile kernel is part of the program in one of two ways: as StableHLO loops, which any device runs, or as a kernel that
//! libtpu compiles, in the programs that [`LossProgram::program_for`] writes for TPUs.
//!
//! An extent that the devices do not divide is padded: with tokens that the mask leaves out, and with columns that hold
//! NaN and that the program sets to −∞ before it looks at them. [`assay_tile::stablehlo`] writes the program.
//!
//! Arithmetic: logits widened to f32, every sum and everything per token in f32, in the order that XLA chooses; dlogits
//! rounded once. dlogits lie over the logits on every device.

use assay_algebra::family::{KernelScope, expect_around_one_id, expect_one_id, expect_plain_logits};
use assay_algebra::structure::{Structure, StructuredSpec};
use assay_core::device_dtype::DeviceDtype;
use assay_core::implementation::{self, Unsupported};
use assay_core::problem::{Dtype, Problem, Shape};
use assay_core::spec::LossSpec;

use crate::alternatives::BaselineAlternative;
use crate::frame::{self, LogitsParameter};
use crate::mesh::Mesh;
use crate::one_pass::{most_tokens, one_pass, rows_of_a_block};
use crate::program::{CoreInputs, CoreOutputs, DeviceShare, Program, local_shape};
use crate::rows::in_rows;
use crate::sharding::Sharding;
use crate::tiled::{self, KernelCalls, TpuKernel};
use crate::two_pass::LocalLogits;
use crate::{
    ANY_DEVICE, ANY_TPU, Device, Lowering, MEETING_VARIABLE, MeetingMethod, NamedArray, Programs, PtxTarget, baseline,
    gpu, unsupported,
};
use assay_tile::TileMachine;
use assay_tile::stablehlo::HloValue;

/// The parameters and outputs of a program on each device, in order.
pub struct Signature {
    /// The parameters of the program.
    pub inputs: Vec<NamedArray>,
    /// The outputs of the program, the first written over the first parameter.
    pub outputs: Vec<NamedArray>,
    /// The values of the parameter `numbers`, by name.
    pub numbers: Vec<(&'static str, f32)>,
}

/// The part of a program that computes the loss of a device's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LossCore {
    /// Plain XLA operations: the baseline.
    Baseline,
    Alternative(BaselineAlternative),
    OnePass,
    TwoPass,
    GpuOnePass,
    GpuTwoPass,
    /// The first of its two passes.
    GpuLogp,
    /// The first of the two passes: logp and entropy, no loss and no gradient.
    Entropy,
}

/// The programs of one loss kernel under one sharding. See [the module](self).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LossProgram {
    core: LossCore,
    sharding: Sharding,
}

impl Programs for LossProgram {
    type Problem = Problem;

    fn all() -> Vec<LossProgram> {
        let cores: [(LossCore, &[Sharding]); 7] = [
            (LossCore::Baseline, &Sharding::ALL),
            // The sums of a row stay in the kernel.
            (LossCore::OnePass, &[Sharding::Whole, Sharding::Rows]),
            (LossCore::TwoPass, &Sharding::ALL),
            (LossCore::GpuOnePass, &[Sharding::Whole, Sharding::Rows]),
            (LossCore::GpuTwoPass, &Sharding::ALL),
            (LossCore::GpuLogp, &[Sharding::Whole]),
            (LossCore::Entropy, &[Sharding::Whole]),
        ];
        let shardings = cores.into_iter().flat_map(|(core, shardings)| shardings.iter().map(move |&s| (core, s)));
        let alternatives =
            BaselineAlternative::ALL.map(|alternative| (LossCore::Alternative(alternative), Sharding::Whole));
        shardings.chain(alternatives).map(|(core, sharding)| LossProgram { core, sharding }).collect()
    }

    fn sharding(self) -> Sharding {
        self.sharding
    }

    fn id(self) -> &'static str {
        match (self.core, self.sharding) {
            (LossCore::Baseline, Sharding::Whole) => "xla",
            (LossCore::Baseline, Sharding::Rows) => "xla-rows",
            (LossCore::Baseline, Sharding::Vocab) => "xla-vocab",
            (LossCore::Baseline, Sharding::RowsAndVocab) => "xla-mesh",
            (LossCore::OnePass, Sharding::Whole) => "tile-one-pass",
            (LossCore::OnePass, _) => "tile-one-pass-rows",
            (LossCore::TwoPass, Sharding::Whole) => "tile-two-pass",
            (LossCore::TwoPass, Sharding::Rows) => "tile-two-pass-rows",
            (LossCore::TwoPass, Sharding::Vocab) => "tile-two-pass-vocab",
            (LossCore::TwoPass, Sharding::RowsAndVocab) => "tile-two-pass-mesh",
            (LossCore::GpuOnePass, Sharding::Whole) => "gpu-one-pass",
            (LossCore::GpuOnePass, _) => "gpu-one-pass-rows",
            (LossCore::GpuTwoPass, Sharding::Whole) => "gpu-two-pass",
            (LossCore::GpuTwoPass, Sharding::Rows) => "gpu-two-pass-rows",
            (LossCore::GpuTwoPass, Sharding::Vocab) => "gpu-two-pass-vocab",
            (LossCore::GpuTwoPass, Sharding::RowsAndVocab) => "gpu-two-pass-mesh",
            (LossCore::GpuLogp, _) => "gpu-logp",
            (LossCore::Entropy, _) => "tile-entropy",
            (LossCore::Alternative(alternative), _) => alternative.id(),
        }
    }

    fn summary(self) -> &'static str {
        match (self.core, self.sharding) {
            (LossCore::Baseline, Sharding::Whole) => {
                "XLA through PJRT, log-softmax as plain operations, f32 statistics, dlogits in place"
            }
            (LossCore::OnePass, Sharding::Whole) => "TPU kernel, rows resident in VMEM, as loops on any PJRT device",
            (LossCore::TwoPass, Sharding::Whole) => "TPU kernels, columns streamed twice, as loops on any PJRT device",
            (LossCore::GpuOnePass, Sharding::Whole) => {
                "PTX kernel, rows resident in a cluster's shared memory, on NVIDIA GPUs of sm_90"
            }
            (LossCore::GpuTwoPass, Sharding::Whole) => "PTX kernels, columns streamed twice, on NVIDIA GPUs of sm_80",
            (LossCore::GpuLogp, Sharding::Whole) => "PTX kernel, logp and entropy alone, on NVIDIA GPUs of sm_80",
            (LossCore::Entropy, Sharding::Whole) => "TPU kernel, logp and entropy alone, as loops on any PJRT device",
            (LossCore::Alternative(alternative), _) => alternative.summary(),
            (_, Sharding::Rows) => "the same, rows over devices",
            (_, Sharding::Vocab) => "the same, vocabulary over devices",
            (_, Sharding::RowsAndVocab) => "the same, rows × vocabulary over devices",
        }
    }

    fn class(self) -> &'static str {
        if self.is_xla() {
            "xla"
        } else if self.is_for_gpus() {
            "gpu"
        } else {
            "tile"
        }
    }

    fn supports(self, spec: &LossSpec, shape: Shape, dtype: Dtype, devices: usize) -> Result<(), Unsupported> {
        let changes = match self.core {
            LossCore::Alternative(_) => expect_one_id(spec).and_then(|()| expect_plain_logits(spec)),
            // Softmaxes alone are asked by their reach.
            _ => expect_around_one_id(spec),
        };
        changes
            .and_then(|()| self.reach().expect(spec))
            .map_err(|beyond| unsupported(self, beyond.field, beyond.given, beyond.supported))?;
        if dtype == Dtype::F64 {
            return Err(unsupported(self, "logits dtype", dtype, "f32, bf16 and f16"));
        }
        if let LossCore::Alternative(alternative) = self.core
            && let Some((field, given, supported)) = alternative.lacks(spec)
        {
            return Err(unsupported(self, field, given, supported));
        }
        // Columns and ids are i32 on the device.
        if i32::try_from(shape.vocab).is_err() {
            return Err(unsupported(self, "vocabulary", shape.vocab, "up to 2147483647"));
        }
        let mesh = self.mesh(shape, devices)?;
        self.expect_fits(Structure::from_spec(spec), local_shape(shape, mesh, ANY_DEVICE), dtype, ANY_TPU)?;
        // So are the rows that kernels are given.
        let tokens = shape.batch.checked_mul(shape.tokens).filter(|&tokens| i32::try_from(tokens).is_ok());
        if !self.is_xla() && tokens.is_none() {
            return Err(unsupported(self, "tokens", format!("{}x{}", shape.batch, shape.tokens), "up to 2147483647"));
        }
        self.meeting().map(|_| ())
    }

    fn is_implementation(self) -> bool {
        !matches!(self.core, LossCore::Entropy | LossCore::GpuLogp | LossCore::Alternative(_))
    }

    fn text(
        self,
        loss: StructuredSpec,
        given: implementation::ProblemFormat<Problem>,
        devices: usize,
        device @ Device { machine, lowering }: Device,
    ) -> Result<String, Unsupported> {
        let implementation::ProblemFormat { shape, dtype, form: (), packed } = given;
        self.expect_device(device)?;
        self.supports(loss.spec, shape, dtype, devices)?;
        let mesh = self.mesh(shape, devices)?;
        let calls = KernelCalls { dtype, lowering, machine, ptx: self.ptx_target(lowering) };
        self.program(loss.structure, (shape, packed), mesh, calls)
    }

    fn has_kernels(self) -> bool {
        !self.is_xla()
    }

    fn keeps_digits(self) -> bool {
        !matches!(self.core, LossCore::Alternative(alternative) if !alternative.keeps_digits())
    }

    fn takes_row_major(self, device: Device) -> bool {
        device.lowering == Lowering::Mosaic
    }

    fn least_target(self) -> Option<PtxTarget> {
        match self.core {
            LossCore::GpuOnePass => Some(PtxTarget::Sm90),
            LossCore::GpuTwoPass | LossCore::GpuLogp => Some(PtxTarget::Sm80),
            _ => None,
        }
    }
}

impl LossProgram {
    /// The one that returns logp and entropy alone.
    pub fn entropy() -> LossProgram {
        LossProgram { core: LossCore::Entropy, sharding: Sharding::Whole }
    }

    /// Whether it is made of XLA's operations alone.
    fn is_xla(self) -> bool {
        matches!(self.core, LossCore::Baseline | LossCore::Alternative(_))
    }

    /// Other ways to write `xla`, to be compiled beside it.
    pub fn alternatives() -> impl Iterator<Item = LossProgram> {
        Self::all().into_iter().filter(|program| matches!(program.core, LossCore::Alternative(_)))
    }

    /// The program of one device of `mesh`.
    fn program(
        self,
        structure: Structure,
        (shape, packed): (Shape, Option<usize>),
        mesh: Mesh,
        calls: KernelCalls,
    ) -> Result<String, Unsupported> {
        let KernelCalls { dtype, lowering, machine, ptx } = calls;
        let logits = LogitsParameter {
            dtype,
            to_kernels: lowering == Lowering::Mosaic && !self.is_xla(),
            row_major: lowering == Lowering::Mosaic,
            // Dlogits are written over the logits, but not by programs that have none or by the alternative that keeps
            // its logits.
            donated: !matches!(
                self.core,
                LossCore::Entropy | LossCore::GpuLogp | LossCore::Alternative(BaselineAlternative::Kept)
            ),
        };
        let share = DeviceShare::new(shape, packed, mesh, machine);
        let write = |inside: &dyn Fn(&mut Program, &CoreInputs, HloValue) -> CoreOutputs| {
            frame::program(structure, share, logits, |on, given, logits| inside(on, given, logits))
        };
        Ok(match self.core {
            LossCore::Baseline => write(&|on, given, logits| baseline::core(on, structure, given, logits, dtype)),
            LossCore::Alternative(alternative) => {
                write(&|on, given, logits| alternative.core(on, structure, given, logits, dtype))
            }
            LossCore::OnePass => {
                let kernel = self.one_pass(structure, share.local, dtype, machine)?;
                write(&|on, given, logits| tiled::tile_one_pass_core(on, &kernel, structure, given, logits, calls))
            }
            LossCore::GpuOnePass => {
                let target = ptx.expect("checked: a GPU's");
                let kernel = gpu::one_pass(structure, in_rows(share.local), dtype.into(), target, self.meeting()?);
                write(&|on, given, logits| tiled::gpu_one_pass_core(on, &kernel, structure, given, logits))
            }
            LossCore::TwoPass | LossCore::GpuTwoPass => {
                write(&|on, given, logits| tiled::two_pass_core(on, structure, given, logits, calls))
            }
            LossCore::Entropy | LossCore::GpuLogp => frame::forward(structure, share, logits, |on, given| {
                let rows = tiled::rows(on, structure, given, calls);
                [rows.logp, rows.entropy]
            }),
        })
    }

    /// The program of each of `devices`. Of what is whole, `local` is what one device holds: logits of its own, all of them together
    /// one batch. Of the others it is the batch, cut as the [sharding](Self::sharding) says. A text for compilers: nothing is
    /// run. Tile kernels are called as kernels for a TPU that is `machine`.
    ///
    /// # Errors
    /// [`Unsupported`], for f64 logits, for a vocabulary or a batch beyond i32, and for devices that do not cut the logits.
    pub fn program_for(
        self,
        loss: StructuredSpec,
        local: Shape,
        dtype: Dtype,
        devices: usize,
        machine: TileMachine,
    ) -> Result<String, Unsupported> {
        self.expect_device(Device { machine, lowering: Lowering::Mosaic })?;
        if !self.is_whole() {
            let mesh = self.mesh(local, devices)?;
            self.expect_fits(loss.structure, local_shape(local, mesh, machine), dtype, machine)?;
            self.supports(loss.spec, local, dtype, devices)?;
            return self.program(
                loss.structure,
                (local, None),
                mesh,
                KernelCalls { dtype, lowering: Lowering::Mosaic, machine, ptx: None },
            );
        }
        // The limit of the machine asked for comes before that of any other.
        self.expect_fits(loss.structure, local_shape(local, Mesh::ONE, machine), dtype, machine)?;
        self.supports(loss.spec, local, dtype, 1)?;
        // The batch of all devices is what the program is written for; each device has `local` of it, which is a mesh
        // along the batch alone.
        let batch = local.batch.checked_mul(devices).filter(|&batch| i32::try_from(batch).is_ok());
        let Some(batch) = batch else {
            let supported = format!("up to {} on {devices} devices", i32::MAX as usize / devices.max(1));
            return Err(unsupported(self, "sequences a device", local.batch, supported));
        };
        let mesh = Mesh { batch: devices, tokens: 1, vocab: 1 };
        self.program(
            loss.structure,
            (Shape { batch, ..local }, None),
            mesh,
            KernelCalls { dtype, lowering: Lowering::Mosaic, machine, ptx: None },
        )
    }

    /// Returns the shape `[b,t,v]` of each device's logits, of a `shape` as [`program_for`](Self::program_for) takes
    /// it.
    ///
    /// # Errors
    /// As there.
    pub fn held_by_each(self, shape: Shape, devices: usize, machine: TileMachine) -> Result<[usize; 3], Unsupported> {
        let mesh = if self.is_whole() { Mesh::ONE } else { self.mesh(shape, devices)? };
        Ok(local_shape(shape, mesh, machine))
    }

    /// The tile kernels of that program, in the order that it calls them; none of the baseline.
    ///
    /// # Errors
    /// As [`program_for`](Self::program_for).
    pub fn kernels_for(
        self,
        loss: StructuredSpec,
        shape: Shape,
        dtype: Dtype,
        devices: usize,
        machine: TileMachine,
    ) -> Result<Vec<TpuKernel>, Unsupported> {
        let devices = if self.is_whole() { 1 } else { devices };
        self.expect_device(Device { machine, lowering: Lowering::Mosaic })?;
        self.supports(loss.spec, shape, dtype, devices)?;
        let (structure, mesh) = (loss.structure, self.mesh(shape, devices)?);
        let local = local_shape(shape, mesh, machine);
        let rows = LocalLogits::new(local, shape.vocab, mesh);
        Ok(match self.core {
            LossCore::Baseline
            | LossCore::Alternative(_)
            | LossCore::GpuOnePass
            | LossCore::GpuTwoPass
            | LossCore::GpuLogp => vec![],
            LossCore::OnePass => {
                vec![tiled::describe_one_pass(&self.one_pass(structure, local, dtype, machine)?, structure)]
            }
            LossCore::TwoPass => tiled::describe_two_pass(structure, rows, dtype.into(), machine).into(),
            LossCore::Entropy => {
                let [statistics, _] = tiled::describe_two_pass(structure, rows, dtype.into(), machine);
                vec![statistics]
            }
        })
    }

    /// The kernels of PTX that [`text`](Programs::text) calls for a GPU, in the order of their calls; none of a program that has none.
    ///
    /// # Errors
    /// As of [`expect_device`](Programs::expect_device) and [`supports`](Programs::supports).
    pub fn gpu_kernels_for(
        self,
        loss: StructuredSpec,
        shape: Shape,
        dtype: Dtype,
        devices: usize,
        target: PtxTarget,
    ) -> Result<Vec<assay_ptx::PtxKernel>, Unsupported> {
        self.gpu_kernels_that_meet(loss, shape, dtype, devices, (target, self.meeting()?))
    }

    /// Returns the way in which the CTAs of a cluster meet that the environment chooses.
    fn meeting(self) -> Result<MeetingMethod, Unsupported> {
        if self.core != LossCore::GpuOnePass {
            return Ok(MeetingMethod::default());
        }
        MeetingMethod::chosen().map_err(|given| unsupported(self, MEETING_VARIABLE, given, "`barrier` and `stores`"))
    }

    /// Writes the kernels of [`gpu_kernels_for`](Self::gpu_kernels_for) with clusters whose CTAs meet as `meeting` says.
    ///
    /// # Errors
    /// Fails where [`gpu_kernels_for`](Self::gpu_kernels_for) does.
    pub fn gpu_kernels_that_meet(
        self,
        loss: StructuredSpec,
        shape: Shape,
        dtype: Dtype,
        devices: usize,
        (target, meeting): (PtxTarget, MeetingMethod),
    ) -> Result<Vec<assay_ptx::PtxKernel>, Unsupported> {
        self.expect_device(Device::gpu(target))?;
        self.supports(loss.spec, shape, dtype, devices)?;
        let mesh = self.mesh(shape, devices)?;
        let local = local_shape(shape, mesh, ANY_DEVICE);
        let (structure, element, rows) = (loss.structure, dtype.into(), LocalLogits::new(local, shape.vocab, mesh));
        let statistics = || gpu::two_pass::statistics(target, structure, rows, element);
        Ok(match self.core {
            LossCore::GpuOnePass => vec![gpu::one_pass(structure, in_rows(local), element, target, meeting)],
            LossCore::GpuTwoPass => {
                vec![statistics(), gpu::two_pass::dlogits(target, structure, rows, element, gpu::Factors::Scales)]
            }
            LossCore::GpuLogp => vec![statistics()],
            _ => vec![],
        })
    }

    /// Returns the parameters and outputs of the program that [`program_for`](Self::program_for) writes.
    ///
    /// # Errors
    /// As [`program_for`](Self::program_for).
    pub fn signature_for(
        self,
        loss: StructuredSpec,
        shape: Shape,
        dtype: Dtype,
        devices: usize,
        machine: TileMachine,
    ) -> Result<Signature, Unsupported> {
        // Whole programs are described for one device, and the numbers of their reductions for the batch of all of
        // them.
        let [of_mesh, times] = if self.is_whole() { [1, devices] } else { [devices, 1] };
        self.supports(loss.spec, shape, dtype, of_mesh)?;
        let mesh = self.mesh(shape, of_mesh)?;
        let local = local_shape(shape, mesh, machine);
        let [mut inputs, outputs] = match self.core {
            LossCore::Entropy | LossCore::GpuLogp => frame::forward_signature(loss.structure, local, dtype),
            _ => frame::signature(loss.structure, local, dtype, !self.is_xla()),
        };
        if mesh.vocab > 1 {
            inputs.push(NamedArray { name: "first_column", dtype: DeviceDtype::I32, shape: vec![], columns: vec![] });
        }
        let values = loss.program_numbers([shape.batch.saturating_mul(times), shape.tokens]);
        let numbers = values.into_iter().map(|(number, value)| (number.name(), value)).collect();
        Ok(Signature { inputs, outputs, numbers })
    }

    /// Checks that a row of the vocabulary fits the VMEM of `machine` and the ids of all tokens its SMEM, where they must.
    fn expect_fits(
        self,
        structure: Structure,
        local: [usize; 3],
        dtype: Dtype,
        machine: TileMachine,
    ) -> Result<(), Unsupported> {
        if self.is_for_gpus() {
            let rows = in_rows(local);
            // Two limits of a GPU: a row of the one-pass kernel must fit a cluster's shared memory, one of the two-pass
            // kernel the offsets of 32 bits.
            let one_pass = self.core == LossCore::GpuOnePass;
            let fits = if one_pass { gpu::expect_one_pass_fits } else { gpu::expect_two_pass_fits };
            return fits(rows, dtype.into()).map_err(|gpu::CapacityError { field, given, most, room }| {
                unsupported(self, field, given, format!("up to {most} of {dtype} {room}"))
            });
        }
        if self.core != LossCore::OnePass {
            return Ok(());
        }
        // SMEM holds the ids of all tokens at once, since scalars come in no windows.
        let tokens = local[0].saturating_mul(local[1]);
        let most = most_tokens(machine);
        if tokens > most {
            let supported = format!("up to {most}, whose ids fit SMEM; tile-two-pass takes any number");
            return Err(unsupported(self, "tokens a device", tokens, supported));
        }
        rows_of_a_block(structure, in_rows(local), dtype.into(), machine).map(|_| ()).map_err(|largest| {
            let mebibytes = machine.vmem_bytes >> 20;
            let supported = format!("up to {largest} of {dtype} in {mebibytes} MiB of VMEM; tile-two-pass takes any");
            unsupported(self, "vocabulary", local[2], supported)
        })
    }

    /// The one-pass kernel for `local` logits.
    fn one_pass(
        self,
        structure: Structure,
        local: [usize; 3],
        dtype: Dtype,
        machine: TileMachine,
    ) -> Result<assay_tile::TileKernel, Unsupported> {
        self.expect_fits(structure, local, dtype, machine)?;
        Ok(one_pass(structure, in_rows(local), dtype.into(), machine).expect("checked: it fits"))
    }

    /// Returns how much of a batch the program sees when it computes a token's loss.
    fn reach(self) -> KernelScope {
        match self.core {
            LossCore::Baseline => KernelScope::RowAndColumns,
            LossCore::Alternative(_) | LossCore::TwoPass | LossCore::GpuTwoPass => KernelScope::Row,
            LossCore::OnePass | LossCore::GpuOnePass => KernelScope::Token,
            LossCore::Entropy | LossCore::GpuLogp => KernelScope::Softmax,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HeadProgram;
    use assay_core::implementation::ProblemFormat;
    use assay_core::problem::{HeadForm, HeadLayout, HeadShape};
    use assay_core::spec::{Ratio, RatioLevel};

    #[test]
    fn batch_shape_does_not_change_the_kernels_of_its_rows() {
        let text = |xla: &LossProgram, batch, tokens| {
            let shape = Shape { batch, tokens, vocab: 1031 };
            let kernels =
                xla.kernels_for(StructuredSpec::new(&LossSpec::default()), shape, Dtype::Bf16, 1, ANY_DEVICE).unwrap();
            kernels.into_iter().map(|kernel| kernel.text).collect::<Vec<_>>()
        };
        for xla in LossProgram::all().iter().filter(|xla| xla.is_whole() && xla.class() == "tile" && !xla.is_for_gpus())
        {
            let one_sequence = text(xla, 1, 48);
            assert!(!one_sequence.is_empty());
            for (batch, tokens) in [(48, 1), (16, 3), (2, 24)] {
                assert!(text(xla, batch, tokens) == one_sequence, "{} {batch}x{tokens}", xla.id());
            }
        }
    }

    /// 18,992 columns a device fill no registers of 128: only where memory is of registers are there 19,072.
    #[test]
    fn vocabulary_is_padded_to_registers_on_a_tpu_alone() {
        let shape = HeadShape { batch: 1, tokens: 8, hidden: 16, vocab: 151_936 };
        let spec = LossSpec::default();
        let form = HeadForm { layout: HeadLayout::HiddenByVocab, rounds_logits: true };
        let columns = |platform| {
            let device = Device::in_loops(platform, "TPU v6 lite");
            let given = ProblemFormat { shape: shape.logits(), dtype: Dtype::Bf16, form: (), packed: None };
            let cut = LossProgram::all().into_iter();
            let cut = cut.filter(|xla| xla.sharding == Sharding::Vocab && !xla.is_for_gpus());
            let texts = cut.map(|xla| xla.text(StructuredSpec::new(&spec), given, 8, device).unwrap());
            let given = ProblemFormat { shape, dtype: Dtype::Bf16, form, packed: None };
            let cut = HeadProgram::all().into_iter();
            let cut = cut.filter(|head| head.sharding() == Sharding::Vocab && !head.is_for_gpus());
            let of_heads = cut.map(|head| head.text(StructuredSpec::new(&spec), given, 8, device).unwrap());
            let held = |text: String| {
                let parameters = text.lines().find(|line| line.contains("@main(")).unwrap();
                [18_992, 19_072].map(|columns| parameters.contains(&format!("x{columns}xbf16>")))
            };
            texts.chain(of_heads).map(held).collect::<Vec<_>>()
        };
        for platform in ["cpu", "cuda"] {
            assert_eq!(columns(platform), [[true, false]; 6], "{platform}");
        }
        assert_eq!(columns("tpu"), [[false, true]; 6]);
    }

    /// The tests on devices run what is whole in place of what is cut over one device.
    #[test]
    fn programs_cut_over_one_device_are_those_of_what_is_whole() {
        let sequence = Ratio { level: RatioLevel::Sequence, ..LossSpec::default().ratio };
        let specs = [
            LossSpec { entropy_coef: 0.01, temperature: 0.7.into(), ..LossSpec::default() },
            LossSpec { ratio: sequence, ..LossSpec::default() },
        ];
        let (all, heads) = (LossProgram::all(), HeadProgram::all());
        let shape = HeadShape { batch: 3, tokens: 5, hidden: 16, vocab: 131 };
        let (mut same, mut same_heads) = (0, 0);
        for spec in &specs {
            let takes = |xla: &&LossProgram| xla.supports(spec, shape.logits(), Dtype::Bf16, 1).is_ok();
            let text = |xla: &LossProgram| {
                let mesh = xla.mesh(shape.logits(), 1).unwrap();
                assert_eq!(mesh, Mesh::ONE);
                let given = ProblemFormat { shape: shape.logits(), dtype: Dtype::Bf16, form: (), packed: None };
                xla.text(StructuredSpec::new(spec), given, 1, Device::ANY).unwrap()
            };
            for cut in all.iter().filter(|xla| !xla.is_whole() && !xla.is_for_gpus()).filter(takes) {
                let whole = all.iter().find(|xla| xla.is_whole() && xla.core == cut.core).unwrap();
                assert!(text(cut) == text(whole), "{}", cut.id());
                same += 1;
            }
            let form = HeadForm { layout: HeadLayout::HiddenByVocab, rounds_logits: true };
            let given = ProblemFormat { shape, dtype: Dtype::Bf16, form, packed: None };
            let cut = heads.iter().filter(|head| !head.is_whole());
            for cut in cut.filter(|head| head.supports(spec, shape, Dtype::Bf16, 1).is_ok()) {
                let of_gpus = cut.is_for_gpus();
                let alike = |head: &&HeadProgram| head.class() == cut.class() && head.is_for_gpus() == of_gpus;
                let whole = heads.iter().filter(alike).find(|head| head.is_whole()).unwrap();
                let device = if of_gpus { Device::gpu(PtxTarget::Sm90) } else { Device::ANY };
                let text = |head: &HeadProgram| head.text(StructuredSpec::new(spec), given, 1, device).unwrap();
                assert!(text(cut) == text(whole), "{}", cut.id());
                same_heads += 1;
            }
        }
        // Rows and vocabulary of each, of heads with sums whole and in parts; the one-pass kernel knows no sequence and cuts no vocabulary.
        assert_eq!((same, same_heads), (9, 20));
    }
}
