//! The facts and bounds of one program that was compiled for a TPU, and the flags that libtpu compiles it best with.

use assay_core::problem::{Dtype, HeadShape, ProblemShape};
use assay_programs::{HeadProgram, LossProgram, Programs, StructuredSpec};
#[cfg(feature = "plugin")]
use assay_schema::compile as schema;
pub use assay_schema::compile::HeldBy;

use super::target::{TpuChip, TpuTarget};
#[cfg(feature = "plugin")]
use super::{
    TpuCompilation, TpuCompiler,
    mllm_jax::{self, BASELINE, PALLAS_KERNEL},
};
use crate::error::AheadError;
#[cfg(feature = "plugin")]
use crate::plugin::StableHloModule;
#[cfg(feature = "plugin")]
use crate::request::memory;
use crate::request::{CompileRequest, ProgramText, find_program, held_by};

/// VMEM for the windows of an LM head's products on a chip that has 128 MiB, in KiB: docs/tpu.md has what other sizes give.
const WINDOWS_KIB: usize = 73_728;

impl CompileRequest<TpuTarget> {
    /// Writes the program as StableHLO text.
    ///
    /// # Errors
    /// [`AheadError::Implementation`] for an id of no program of this kind; [`AheadError::Unsupported`].
    pub fn text(&self) -> Result<ProgramText, AheadError> {
        let (devices, machine) = (self.target.devices(), self.target.chip.machine());
        let loss = StructuredSpec::new(&self.options.spec);
        let (code, held_by) = match self.shape {
            ProblemShape::Logits(shape) => {
                let program = loss_program(&self.implementation)?;
                (program.program_for(loss, shape, self.options.dtype, devices, machine)?, held_by(program))
            }
            ProblemShape::Head(shape) => {
                let head = self.sized(head_program(&self.implementation)?);
                (head.program_for(loss, self.given_head(shape), devices, machine)?, held_by(head))
            }
        };
        Ok(ProgramText { code, kernels: vec![], held_by })
    }

    /// Compiles the program and collects its facts and bounds. A compiler without flags takes those of [`flags_for`].
    ///
    /// # Errors
    /// Those of [`text`](Self::text) and of [`TpuCompiler::compile`].
    #[cfg(feature = "plugin")]
    pub fn compile(&self, compiler: &TpuCompiler) -> Result<schema::TpuProgramReport, AheadError> {
        let text = self.text()?;
        let module = StableHloModule::replicated(&text.code, self.target.devices());
        let compiler = compiler.or_flags(&flags_for(&self.implementation, self.shape, self.target.chip));
        Ok(self.figures(text.held_by, &compiler.compile(&self.target, &module)?))
    }

    /// Collects the facts and bounds of this program from its compilation.
    #[cfg(feature = "plugin")]
    pub fn figures(&self, held_by: HeldBy, compiled: &TpuCompilation) -> schema::TpuProgramReport {
        let chip = self.target.chip;
        let bound = compiled.bound(chip);
        // The record has data-parallel devices alone: each held the whole shape.
        let recorded = |program| {
            let recorded = mllm_jax::find(program, &self.target, self.shape, self.options.dtype);
            recorded.filter(|_| held_by == HeldBy::EachDevice)
        };
        schema::TpuProgramReport {
            target: self.target.to_string(),
            devices: self.target.devices(),
            implementation: self.implementation.clone(),
            shape: self.shape.to_vec(),
            held_by,
            dtype: self.options.dtype.to_string(),
            memory: memory(&compiled.memory),
            kernels: compiled.kernels.clone(),
            cycles: compiled.cycles(),
            cycles_uncounted: compiled.uncounted.clone(),
            hbm_bytes: compiled.traffic.hbm_bytes,
            hbm_uncounted: compiled.traffic.uncounted.clone(),
            libtpu_flags: compiled.flags.clone(),
            products_ms: self.products_ms(held_by),
            clock_ghz: chip.clock_ghz,
            compile_s: compiled.compile_s,
            recorded: recorded(BASELINE).map(|recorded| schema::SeedComparison {
                recorded: recorded.into(),
                ratio: recorded.ratio(bound.predicted_ms),
            }),
            recorded_kernel: recorded(PALLAS_KERNEL).map(Into::into),
            bound,
        }
    }

    /// Returns the milliseconds of an LM head's three products, `3 · 2 · B · T · H · V` operations or a device's share of them, at the
    /// chip's bf16 rate. It is a lower bound for every program of that head; `None` for logits and for other dtypes.
    pub fn products_ms(&self, held_by: HeldBy) -> Option<f64> {
        let ProblemShape::Head(HeadShape { batch, tokens, hidden, vocab }) = self.shape else { return None };
        // Logits, dhidden and dlm_head: three products of the same size.
        let all = [3, batch, tokens, hidden, vocab].into_iter().map(|extent| extent as f64).product::<f64>();
        let devices = if held_by == HeldBy::AllDevices { self.target.devices() } else { 1 };
        (self.options.dtype == Dtype::Bf16).then(|| self.target.chip.products_ms(all / devices as f64))
    }
}

/// Returns the flags of libtpu that suit an implementation at this shape. XLA limits the windows of a product to 32 MiB of VMEM by default,
/// and its schedules of an LM head's products improve with more. Collectives overlap with products where `SparseCore`s execute them.
pub fn flags_for(implementation: &str, shape: ProblemShape, chip: &TpuChip) -> String {
    let ProblemShape::Head(_) = shape else { return String::new() };
    // 72 MiB of windows fit only where a core has 128 MiB of VMEM.
    let windows = (chip.core.vmem_mib >= 128).then(|| format!("--xla_tpu_scoped_vmem_limit_kib={WINDOWS_KIB}"));
    // Only programs that scatter their sums have all-gathers and reduce-scatters to overlap.
    let scatters = head_program(implementation).is_ok_and(Programs::scatters);
    let offloads = ["all_gather", "reduce_scatter"]
        .map(|collective| format!("--xla_tpu_enable_sparse_core_collective_offload_{collective}=true"));
    let offloads = (scatters && chip.offloads_collectives).then(|| offloads.join(" "));
    [windows, offloads].into_iter().flatten().collect::<Vec<_>>().join(" ")
}

/// Returns the program of a loss on logits with this id; every one compiles for TPUs.
///
/// # Errors
/// [`AheadError::Implementation`] with all ids.
pub fn loss_program(id: &str) -> Result<LossProgram, AheadError> {
    find_program(id, |_| true, "one that compiles for TPUs")
}

/// Returns the program of an LM head with this id; every one compiles for TPUs.
///
/// # Errors
/// [`AheadError::Implementation`] with all ids.
pub fn head_program(id: &str) -> Result<HeadProgram, AheadError> {
    find_program(id, |_| true, "one of an LM head")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libtpu_flags_of_lm_heads_have_more_vmem_where_it_fits() {
        let flags =
            |id, shape: &str, target| flags_for(id, shape.parse().unwrap(), TpuTarget::parse(target).unwrap().chip);
        let more = "--xla_tpu_scoped_vmem_limit_kib=73728";
        let of_head = |chip| flags("tile-lm-head", "1x8x16x64", chip);
        assert_eq!(["v5e", "v6e", "v5p", "v7x"].map(of_head), [more, more, "", ""]);
        assert_eq!(flags("tile-one-pass", "1x8x64", "v6e"), "");
    }

    #[test]
    fn libtpu_flags_of_scattered_heads_offload_collectives() {
        let flags = |target| {
            let chip = TpuTarget::parse(target).unwrap().chip;
            flags_for("tile-lm-head-vocab-scattered", "1x8x16x64".parse().unwrap(), chip)
        };
        let offload = "_offload_all_gather=true --xla_tpu_enable_sparse_core_collective_offload_reduce_scatter=true";
        assert!(["v6e", "v7x"].iter().all(|chip| flags(chip).ends_with(offload)), "{}", flags("v6e"));
        assert_eq!(["v5e", "v5p"].map(flags), ["--xla_tpu_scoped_vmem_limit_kib=73728", ""]);
    }
}
