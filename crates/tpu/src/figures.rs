//! What is known of one program compiled for a TPU: memory, cycles, bytes, the bounds that follow, and what hardware took.

use assay_core::implementation::Given;
use assay_core::problem::{Dtype, Extents, HeadForm, HeadLayout, HeadShape};
use assay_core::spec::LossSpec;
use assay_programs::{HeadProgram, LossProgram, Programs, Shaped};
pub use assay_schema::compile::HeldBy;
#[cfg(feature = "libtpu")]
use assay_schema::compile::{self as schema, Memory};

use super::error::TpuError;
#[cfg(feature = "libtpu")]
use super::seed_measurements::{self, BASELINE, SEED_KERNEL};
use super::target::{Chip, Target};
#[cfg(feature = "libtpu")]
use super::{Compiled, Compiler, Request};

/// VMEM for the windows of an LM head's products on a chip that has 128 MiB, 2¹⁰ bytes: docs/tpu.md has what others give.
const WINDOWS_KIB: usize = 73_728;

/// What is compiled, and for what.
#[derive(Clone, Debug)]
pub struct Asked {
    /// For which devices.
    pub target: Target,
    /// The implementation's id.
    pub implementation: String,
    /// What each device holds; of an LM head over several devices what all of them hold together.
    pub shape: Extents,
    /// Of the logits, or of hidden states and head.
    pub dtype: Dtype,
    /// How an LM head lies.
    pub layout: HeadLayout,
    /// Whether logits of an LM head are rounded to the dtype.
    pub rounds_logits: bool,
    /// Bytes of logits that `tile-lm-head` holds at a time, at most; as many as it has of itself if none is given.
    pub chunk_bytes: Option<usize>,
    /// Bytes of its gradient that it sums over devices at a time, about; a quarter of it if none is given.
    pub sum_bytes: Option<usize>,
    /// The loss.
    pub spec: LossSpec,
    /// Flags of libtpu's own; [`flags_for`] has those that programs do well with.
    pub libtpu_flags: String,
}

impl Asked {
    /// The program, as StableHLO text, and what its shape is the extent of.
    ///
    /// # Errors
    /// [`TpuError::Implementation`] where the id is none of this kind; [`TpuError::Unsupported`].
    pub fn code(&self) -> Result<(String, HeldBy), TpuError> {
        let (devices, machine) = (self.target.devices(), self.target.chip.machine());
        let &Asked { dtype, layout, rounds_logits, ref spec, .. } = self;
        let loss = Shaped::of(spec);
        match self.shape {
            Extents::Logits(shape) => {
                let program = loss_program(&self.implementation)?;
                let held_by = if program.is_whole() { HeldBy::EachDevice } else { HeldBy::AllDevices };
                Ok((program.program_for(loss, shape, dtype, devices, machine)?, held_by))
            }
            Extents::Head(shape) => {
                let head = head_program(&self.implementation)?;
                let head = self.chunk_bytes.map_or(head, |bytes| head.chunk_bytes(bytes));
                let head = self.sum_bytes.map_or(head, |bytes| head.sum_bytes(bytes));
                let given = Given { shape, dtype, form: HeadForm { layout, rounds_logits }, packed: None };
                let held_by = if head.is_whole() { HeldBy::EachDevice } else { HeldBy::AllDevices };
                Ok((head.program_for(loss, given, devices, machine)?, held_by))
            }
        }
    }

    /// Compiles the program, and says what is known of it.
    ///
    /// # Errors
    /// As of [`code`](Self::code) and of [`Compiler::compile`].
    #[cfg(feature = "libtpu")]
    pub fn compile(&self, compiler: &Compiler) -> Result<schema::Compiled, TpuError> {
        let (code, held_by) = self.code()?;
        let request = Request { code: &code, target: &self.target, replicas: self.target.devices(), partitions: 1 };
        Ok(self.figures(held_by, &compiler.clone().flags(&self.libtpu_flags).compile(&request)?))
    }

    /// What is known of this program, which has been `compiled`.
    #[cfg(feature = "libtpu")]
    pub fn figures(&self, held_by: HeldBy, compiled: &Compiled) -> schema::Compiled {
        let chip = self.target.chip;
        let (cycles, hbm_bytes) = (compiled.cycles(), compiled.traffic.hbm_bytes);
        let bound = compiled.bound(chip);
        let recorded = |program| {
            let recorded = seed_measurements::find(program, &self.target, self.shape, self.dtype);
            recorded.filter(|_| held_by == HeldBy::EachDevice)
        };
        let memory = &compiled.memory;
        schema::Compiled {
            target: self.target.to_string(),
            devices: self.target.devices(),
            implementation: self.implementation.clone(),
            shape: self.shape.to_vec(),
            held_by,
            dtype: self.dtype.to_string(),
            memory: Memory {
                argument_bytes: memory.argument_bytes,
                output_bytes: memory.output_bytes,
                temp_bytes: memory.temp_bytes,
                alias_bytes: memory.alias_bytes,
                code_bytes: memory.code_bytes,
                peak_bytes: memory.peak_bytes(),
            },
            kernels: compiled.kernels.clone(),
            cycles,
            cycles_uncounted: compiled.uncounted.clone(),
            hbm_bytes,
            hbm_uncounted: compiled.traffic.uncounted.clone(),
            libtpu_flags: compiled.flags.clone(),
            bound: bound.clone(),
            products_ms: self.products_ms(held_by),
            clock_ghz: chip.clock_ghz,
            compile_s: compiled.compile_s,
            recorded: recorded(BASELINE).map(|recorded| schema::Beside {
                recorded: recorded.into(),
                ratio: recorded.ratio(bound.predicted_ms),
            }),
            recorded_kernel: recorded(SEED_KERNEL).map(Into::into),
        }
    }

    /// `3 · 2 · B · T · H · V` operations, or a device's part of them, at the chip's rate of bf16, in milliseconds: what any
    /// program of this LM head takes at least. `None` on logits, and in another dtype.
    pub fn products_ms(&self, held_by: HeldBy) -> Option<f64> {
        let Extents::Head(HeadShape { batch, tokens, hidden, vocab }) = self.shape else { return None };
        let all = [3, batch, tokens, hidden, vocab].into_iter().map(|extent| extent as f64).product::<f64>();
        let devices = if held_by == HeldBy::AllDevices { self.target.devices() } else { 1 };
        (self.dtype == Dtype::Bf16).then(|| self.target.chip.products_ms(all / devices as f64))
    }
}

/// What libtpu is best told of an implementation over arrays of `shape`. XLA keeps what a product works on within 32 MiB of VMEM unless
/// it is told otherwise, and its schedules of an LM head's products are better with more. Collectives that stand beside products run
/// beside them where `SparseCore`s take them.
pub fn flags_for(implementation: &str, shape: Extents, chip: &Chip) -> String {
    let Extents::Head(_) = shape else { return String::new() };
    let windows = (chip.core.vmem_mib >= 128).then(|| format!("--xla_tpu_scoped_vmem_limit_kib={WINDOWS_KIB}"));
    let scatters = head_program(implementation).is_ok_and(Programs::scatters);
    let offloads = ["all_gather", "reduce_scatter"]
        .map(|collective| format!("--xla_tpu_enable_sparse_core_collective_offload_{collective}=true"));
    let offloads = (scatters && chip.offloads_collectives).then(|| offloads.join(" "));
    [windows, offloads].into_iter().flatten().collect::<Vec<_>>().join(" ")
}

/// The programs called `id`, of a loss on logits: all of them compile for TPUs.
///
/// # Errors
/// [`TpuError::Implementation`], with the ids there are.
pub fn loss_program(id: &str) -> Result<LossProgram, TpuError> {
    let all = LossProgram::all();
    all.iter().copied().find(|program| program.id() == id).ok_or_else(|| {
        let ids = all.iter().map(|program| program.id()).collect::<Vec<_>>().join(", ");
        TpuError::Implementation { given: id.into(), expected: format!("one that compiles for TPUs: {ids}") }
    })
}

/// The programs called `id`, of an LM head: all of them compile for TPUs.
///
/// # Errors
/// [`TpuError::Implementation`], with the ids there are.
pub fn head_program(id: &str) -> Result<HeadProgram, TpuError> {
    let all = HeadProgram::all();
    all.iter().copied().find(|program| program.id() == id).ok_or_else(|| {
        let ids = all.iter().map(|program| program.id()).collect::<Vec<_>>().join(", ");
        TpuError::Implementation { given: id.into(), expected: format!("one of an LM head: {ids}") }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lm_heads_alone_have_more_vmem_where_there_is_enough() {
        let flags =
            |id, shape: &str, target| flags_for(id, shape.parse().unwrap(), Target::parse(target).unwrap().chip);
        let more = "--xla_tpu_scoped_vmem_limit_kib=73728";
        let of_head = |chip| flags("tile-lm-head", "1x8x16x64", chip);
        assert_eq!(["v5e", "v6e", "v5p", "v7x"].map(of_head), [more, more, "", ""]);
        assert_eq!(flags("tile-one-pass", "1x8x64", "v6e"), "");
    }

    #[test]
    fn what_scatters_leaves_collectives_to_sparse_cores_where_there_are_some() {
        let flags = |target| {
            let chip = Target::parse(target).unwrap().chip;
            flags_for("tile-lm-head-vocab-scattered", "1x8x16x64".parse().unwrap(), chip)
        };
        let offload = "_offload_all_gather=true --xla_tpu_enable_sparse_core_collective_offload_reduce_scatter=true";
        assert!(["v6e", "v7x"].iter().all(|chip| flags(chip).ends_with(offload)), "{}", flags("v6e"));
        assert_eq!(["v5e", "v5p"].map(flags), ["--xla_tpu_scoped_vmem_limit_kib=73728", ""]);
    }
}
