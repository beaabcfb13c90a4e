//! What is known of one program compiled for a GPU: memory, kernels, bytes, and the bounds that follow.

use assay_core::implementation::Given;
use assay_core::problem::{Dtype, Extents, HeadForm, HeadLayout};
use assay_core::spec::LossSpec;
use assay_programs::{Device, HeadProgram, LossProgram, Programs, Shaped};
use assay_ptx::PtxKernel;
use assay_schema::compile::HeldBy;
#[cfg(feature = "plugin")]
use assay_schema::compile::Memory;
#[cfg(feature = "plugin")]
use assay_schema::gpu as schema;

use crate::error::GpuError;
use crate::target::Target;
#[cfg(feature = "plugin")]
use crate::{Compiled, Compiler, Request};

/// What is compiled, and for what.
#[derive(Clone, Debug)]
pub struct Asked {
    /// For which devices.
    pub target: Target,
    /// The implementation's id.
    pub implementation: String,
    /// What one device holds, or of what is cut over several what all of them hold together.
    pub shape: Extents,
    /// Of the logits, or of hidden states and head.
    pub dtype: Dtype,
    /// How an LM head lies.
    pub layout: HeadLayout,
    /// Whether logits of an LM head are rounded to the dtype.
    pub rounds_logits: bool,
    /// Bytes of logits that an LM head with kernels holds at a time, at most; as many as it has of itself if none is given.
    pub chunk_bytes: Option<usize>,
    /// The loss.
    pub spec: LossSpec,
}

/// A program as text, and the kernels of PTX that it calls.
pub struct Code {
    /// StableHLO.
    pub text: String,
    /// In the order of their calls.
    pub kernels: Vec<PtxKernel>,
    /// What its shape is the extent of.
    pub held_by: HeldBy,
}

impl Asked {
    /// The program.
    ///
    /// # Errors
    /// [`GpuError::Implementation`] where the id is none that compiles for GPUs; [`GpuError::Unsupported`].
    pub fn code(&self) -> Result<Code, GpuError> {
        let devices = self.target.devices();
        let &Asked { dtype, layout, rounds_logits, ref spec, .. } = self;
        let loss = Shaped::of(spec);
        let target = self.target.chip.written_for();
        let device = Device::gpu(target);
        match self.shape {
            Extents::Logits(shape) => {
                let program = compiled_for_gpus::<LossProgram>(&self.implementation)?;
                let given = Given { shape, dtype, form: (), packed: None };
                let kernels = program.gpu_kernels_for(loss, shape, dtype, devices, target)?;
                Ok(Code { text: program.text(loss, given, devices, device)?, kernels, held_by: held_by(program) })
            }
            Extents::Head(shape) => {
                let program = compiled_for_gpus::<HeadProgram>(&self.implementation)?;
                let program = self.chunk_bytes.map_or(program, |bytes| program.chunk_bytes(bytes));
                let given = Given { shape, dtype, form: HeadForm { layout, rounds_logits }, packed: None };
                let kernels = program.gpu_kernels_for(loss, given, devices, target)?;
                Ok(Code { text: program.text(loss, given, devices, device)?, kernels, held_by: held_by(program) })
            }
        }
    }

    /// Compiles the program, and says what is known of it.
    ///
    /// # Errors
    /// As of [`code`](Self::code) and of [`Compiler::compile`].
    #[cfg(feature = "plugin")]
    pub fn compile(&self, compiler: &Compiler) -> Result<schema::Compiled, GpuError> {
        let code = self.code()?;
        let request = Request { code: &code.text, kernels: &code.kernels, target: &self.target };
        Ok(self.figures(code.held_by, &compiler.compile(&request)?))
    }

    /// What is known of this program, which has been `compiled`.
    #[cfg(feature = "plugin")]
    fn figures(&self, held_by: HeldBy, compiled: &Compiled) -> schema::Compiled {
        let (chip, memory) = (self.target.chip, &compiled.memory);
        schema::Compiled {
            target: self.target.to_string(),
            devices: self.target.devices(),
            implementation: self.implementation.clone(),
            shape: self.shape.to_vec(),
            held_by,
            dtype: self.dtype.to_string(),
            entropy_coef: self.spec.entropy_coef,
            memory: Memory {
                argument_bytes: memory.argument_bytes,
                output_bytes: memory.output_bytes,
                temp_bytes: memory.temp_bytes,
                alias_bytes: memory.alias_bytes,
                code_bytes: memory.code_bytes,
                peak_bytes: memory.peak_bytes(),
            },
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

fn held_by(program: impl Programs) -> HeldBy {
    if program.is_whole() { HeldBy::EachDevice } else { HeldBy::AllDevices }
}

/// Whether a program compiles for GPUs: tile kernels are a TPU's.
pub(crate) fn is_for_gpus(program: impl Programs) -> bool {
    program.is_for_gpus() || !program.has_kernels()
}

/// The programs called `id`, of one kind, if they compile for GPUs.
///
/// # Errors
/// [`GpuError::Implementation`], with the ids there are.
pub fn compiled_for_gpus<P: Programs>(id: &str) -> Result<P, GpuError> {
    let all: Vec<P> = P::all().into_iter().filter(|program| is_for_gpus(*program)).collect();
    all.iter().copied().find(|program| program.id() == id).ok_or_else(|| {
        let ids = all.iter().map(|program| program.id()).collect::<Vec<_>>().join(", ");
        GpuError::Implementation { given: id.into(), expected: format!("one that compiles for GPUs: {ids}") }
    })
}
