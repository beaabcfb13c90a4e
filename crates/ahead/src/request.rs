//! A request to compile one implementation for one target, and the text that answers it.

use assay_core::implementation::ProblemFormat;
use assay_core::memory::CompiledMemory;
use assay_core::problem::{Dtype, HeadForm, HeadLayout, HeadProblem, HeadShape, ProblemShape};
use assay_core::spec::LossSpec;
use assay_programs::{HeadProgram, Programs};
use assay_ptx::PtxKernel;
use assay_schema::compile::{HeldBy, ProgramMemory};

use crate::error::AheadError;

/// The properties of a program that do not depend on the chip.
#[derive(Clone, Debug)]
pub struct CompileOptions {
    /// Dtype of the logits, or of hidden states and LM head.
    pub dtype: Dtype,
    /// Order of the axes of an LM head.
    pub layout: HeadLayout,
    /// Whether the logits of an LM head are rounded to the dtype.
    pub rounds_logits: bool,
    /// The most bytes of logits that an LM head with kernels holds at a time; its own default if `None`.
    pub chunk_bytes: Option<usize>,
    /// Approximate bytes of an LM head's gradient that are summed over devices at a time; a quarter of it if `None`. Only programs
    /// for TPUs read it.
    pub sum_bytes: Option<usize>,
    /// The loss that the program computes.
    pub spec: LossSpec,
}

impl CompileOptions {
    /// Creates options with the head `[H,V]`, rounded logits, and default sizes of chunks and sums.
    pub fn new(spec: LossSpec, dtype: Dtype) -> Self {
        let (layout, rounds_logits, chunk_bytes, sum_bytes) = (HeadLayout::HiddenByVocab, true, None, None);
        Self { dtype, layout, rounds_logits, chunk_bytes, sum_bytes, spec }
    }
}

/// One implementation at one shape, to be compiled for a target `T`.
///
/// ```
/// use assay_ahead::gpu::GpuTarget;
/// use assay_ahead::{CompileOptions, CompileRequest};
/// use assay_core::problem::Dtype;
/// use assay_core::spec::LossSpec;
///
/// let request = CompileRequest {
///     target: GpuTarget::parse("h100")?,
///     implementation: "gpu-one-pass".into(),
///     shape: "1x4096x151936".parse()?,
///     options: CompileOptions::new(LossSpec::default(), Dtype::Bf16),
/// };
/// // Writing the text needs no plugin; `CompileRequest::compile` hands it to one.
/// let text = request.text()?;
/// assert!(text.code.contains("stablehlo.custom_call"));
/// assert_eq!(text.kernels.len(), 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct CompileRequest<T> {
    /// The chip, and how many of them.
    pub target: T,
    /// The id of the implementation, as `assay list` prints it.
    pub implementation: String,
    /// The extents on one device; for a program that is cut over devices, the extents on all of them together.
    pub shape: ProblemShape,
    /// Dtype, loss and sizes of chunks.
    pub options: CompileOptions,
}

/// A program as text, before any compiler has seen it.
#[derive(Clone, Debug)]
pub struct ProgramText {
    /// The program as StableHLO text, in MLIR's syntax.
    pub code: String,
    /// The kernels of PTX in the order of their calls; empty for a TPU, whose kernels are inside the module.
    pub kernels: Vec<PtxKernel>,
    /// Whether the request's shape is that of one device or of all devices together.
    pub held_by: HeldBy,
}

impl<T> CompileRequest<T> {
    /// Returns what the program of an LM head of `shape` is given.
    pub(crate) fn given_head(&self, shape: HeadShape) -> ProblemFormat<HeadProblem> {
        let &CompileOptions { dtype, layout, rounds_logits, .. } = &self.options;
        ProblemFormat { shape, dtype, form: HeadForm { layout, rounds_logits }, packed: None }
    }

    /// Applies the requested sizes of chunks and sums to an LM head's program.
    pub(crate) fn sized(&self, head: HeadProgram) -> HeadProgram {
        let head = self.options.chunk_bytes.map_or(head, |bytes| head.chunk_bytes(bytes));
        self.options.sum_bytes.map_or(head, |bytes| head.sum_bytes(bytes))
    }
}

/// Returns whether one device holds the whole shape of `program`, or all devices together.
pub(crate) fn held_by(program: impl Programs) -> HeldBy {
    if program.is_whole() { HeldBy::EachDevice } else { HeldBy::AllDevices }
}

/// Converts the memory that a plugin reports to the form that is written to JSON.
#[cfg_attr(not(feature = "plugin"), expect(dead_code, reason = "a plugin reports it"))]
pub(crate) fn memory(compiled: &CompiledMemory) -> ProgramMemory {
    let &CompiledMemory { argument_bytes, output_bytes, temp_bytes, alias_bytes, code_bytes, .. } = compiled;
    ProgramMemory {
        argument_bytes,
        output_bytes,
        temp_bytes,
        alias_bytes,
        code_bytes,
        peak_bytes: compiled.peak_bytes(),
    }
}

/// Returns the program with this id among those that `accepted` admits.
///
/// # Errors
/// [`AheadError::Implementation`] with `expected` and the ids of all accepted programs.
pub fn find_program<P: Programs>(id: &str, accepted: impl Fn(P) -> bool, expected: &str) -> Result<P, AheadError> {
    let all: Vec<P> = P::all().into_iter().filter(|program| accepted(*program)).collect();
    all.iter().copied().find(|program| program.id() == id).ok_or_else(|| {
        let ids = all.iter().map(|program| program.id()).collect::<Vec<_>>().join(", ");
        AheadError::Implementation { given: id.into(), expected: format!("{expected}: {ids}") }
    })
}
