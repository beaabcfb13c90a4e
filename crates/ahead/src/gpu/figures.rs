//! The facts and bounds of one program that was compiled for a GPU.

use assay_core::implementation::ProblemFormat;
use assay_core::problem::ProblemShape;
use assay_programs::{Device, HeadProgram, LossProgram, Programs, StructuredSpec};
#[cfg(feature = "plugin")]
use assay_schema::{compile::HeldBy, gpu as schema};

use super::target::GpuTarget;
#[cfg(feature = "plugin")]
use super::{GpuCompilation, GpuCompiler};
use crate::error::AheadError;
#[cfg(feature = "plugin")]
use crate::plugin::StableHloModule;
#[cfg(feature = "plugin")]
use crate::request::memory;
use crate::request::{CompileRequest, ProgramText, find_program, held_by};

impl CompileRequest<GpuTarget> {
    /// Writes the program as StableHLO text, and its kernels as PTX.
    ///
    /// # Errors
    /// [`AheadError::Implementation`] for an id of no program that compiles for GPUs; [`AheadError::Unsupported`].
    pub fn text(&self) -> Result<ProgramText, AheadError> {
        let devices = self.target.devices();
        let loss = StructuredSpec::new(&self.options.spec);
        let target = self.target.chip.written_for();
        let device = Device::gpu(target);
        match self.shape {
            ProblemShape::Logits(shape) => {
                let program: LossProgram = gpu_program(&self.implementation)?;
                let dtype = self.options.dtype;
                let kernels = program.gpu_kernels_for(loss, shape, dtype, devices, target)?;
                let given = ProblemFormat { shape, dtype, form: (), packed: None };
                let code = program.text(loss, given, devices, device)?;
                Ok(ProgramText { code, kernels, held_by: held_by(program) })
            }
            ProblemShape::Head(shape) => {
                let program: HeadProgram = self.sized(gpu_program(&self.implementation)?);
                let kernels = program.gpu_kernels_for(loss, self.given_head(shape), devices, target)?;
                let code = program.text(loss, self.given_head(shape), devices, device)?;
                Ok(ProgramText { code, kernels, held_by: held_by(program) })
            }
        }
    }

    /// Compiles the program and collects its facts and bounds.
    ///
    /// # Errors
    /// Those of [`text`](Self::text) and of [`GpuCompiler::compile`].
    #[cfg(feature = "plugin")]
    pub fn compile(&self, compiler: &GpuCompiler) -> Result<schema::GpuProgramReport, AheadError> {
        let text = self.text()?;
        let module = StableHloModule {
            kernels: &text.kernels,
            ..StableHloModule::replicated(&text.code, self.target.devices())
        };
        Ok(self.figures(text.held_by, &compiler.compile(&self.target, &module)?))
    }

    /// Collects the facts and bounds of this program from its compilation.
    #[cfg(feature = "plugin")]
    fn figures(&self, held_by: HeldBy, compiled: &GpuCompilation) -> schema::GpuProgramReport {
        let chip = self.target.chip;
        schema::GpuProgramReport {
            target: self.target.to_string(),
            devices: self.target.devices(),
            implementation: self.implementation.clone(),
            shape: self.shape.to_vec(),
            held_by,
            dtype: self.options.dtype.to_string(),
            entropy_coef: self.options.spec.entropy_coef,
            memory: memory(&compiled.memory),
            launches: compiled.launches.clone(),
            hbm_bytes: compiled.traffic.hbm_bytes,
            hbm_uncounted: compiled.traffic.uncounted.clone(),
            collectives: compiled.traffic.moved.iter().map(|moved| moved.name.clone()).collect(),
            bound: compiled.bound(chip),
            clock_ghz: chip.clock_ghz,
            compile_s: compiled.compile_s,
        }
    }
}

/// Returns whether a program compiles for GPUs: tile kernels are for TPUs alone.
pub(crate) fn is_for_gpus(program: impl Programs) -> bool {
    program.is_for_gpus() || !program.has_kernels()
}

/// Returns the program of one kind with this id, if it compiles for GPUs.
///
/// # Errors
/// [`AheadError::Implementation`] with the ids that compile for GPUs.
pub fn gpu_program<P: Programs>(id: &str) -> Result<P, AheadError> {
    find_program(id, is_for_gpus, "one that compiles for GPUs")
}
