//! [`Implementation`]: a kernel that computes a GRPO loss and can be judged. The crate `assay-registry` lists all of
//! them.
//!
//! The reference is not an implementation: implementations are judged against it.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::memory::{CompiledMemory, DeviceMemory};
use ndarray::{Ix3, IxDyn};

use crate::problem::{
    Candidate, CuSeqlens, Dtype, FloatArray, FloatView, Gradient, HeadForm, HeadGradient, HeadGradientView,
    HeadProblem, HeadShape, Problem, ProblemError, Projection, Shape,
};
use crate::spec::LossSpec;

/// The input of an implementation: a [`Problem`] with its logits, or a [`HeadProblem`] whose logits are a product that
/// is part of the work.
pub trait Workload:
    Borrow<Problem<<Self as Workload>::Logits>> + From<Problem<<Self as Workload>::Logits>> + Clone + Send + Sync + 'static
{
    /// The logits, or the factors whose product they are.
    type Logits: Clone;
    /// The shape of the input, such as `(B, T, V)`.
    type Shape: Copy + PartialEq + fmt::Debug + fmt::Display + Send + Sync + Into<Shape>;
    /// The layout of the arrays, if there is a choice.
    type Form: Copy + PartialEq + fmt::Debug + Send + Sync;
    /// The gradient of the loss by the input, borrowed.
    type View<'a>: Clone;
    /// The gradient of the loss by the input.
    type Gradient: for<'a> Gradient<View<'a> = Self::View<'a>>;
    /// The names of the arrays of [`Logits`](Self::Logits). The first, such as `logits`, has the shape and the dtype.
    const ARRAYS: &'static [&'static str];

    /// Checks the input under `spec` and returns its shape.
    ///
    /// # Errors
    /// [`ProblemError`] naming the first field that is wrong.
    fn checked_shape(&self, spec: &LossSpec) -> Result<Self::Shape, ProblemError>;

    /// Returns the shape of the input, which is not checked.
    fn shape(&self) -> Self::Shape;

    /// Returns the layout of the arrays.
    fn form(&self) -> Self::Form;

    /// Returns the layout of the head; `None` without a head.
    fn head_form(form: Self::Form) -> Option<HeadForm>;

    /// Borrows the arrays in the order of [`ARRAYS`](Self::ARRAYS).
    fn arrays(&self) -> Vec<FloatView<'_, IxDyn>>;

    /// Returns the array with a row for each token: logits or hidden states.
    fn rows(&self) -> &FloatArray<Ix3>;

    /// Returns the logits with `rows` in the place of [`rows`](Self::rows).
    fn with_rows(&self, rows: FloatArray<Ix3>) -> Self::Logits;

    /// Returns the batch itself, with its tokens.
    fn batch(&self) -> &Problem<Self::Logits> {
        self.borrow()
    }

    /// Returns the dtype of logits or hidden states.
    fn dtype(&self) -> Dtype {
        self.rows().dtype()
    }

    /// Packs the sequences, each without the tokens after its last unmasked one; also returns the former position of
    /// each token.
    fn pack(&self) -> (Self, Vec<(usize, usize)>) {
        let (packed, places) = self.batch().packed(|places| self.with_rows(self.rows().at_places(places)));
        (packed.into(), places)
    }

    /// Concatenates the tokens of all rows, `[1,B·T]`, and cuts them by `cu_seqlens` into as many sequences as there
    /// were rows. Sequence `s` keeps the advantage, and other values per sequence, of row `s`; tokens after the last
    /// sequence no longer count.
    ///
    /// # Panics
    /// If `cu_seqlens` has another number of sequences, or ends after `B·T`.
    #[must_use]
    fn laid_out(&self, cu_seqlens: CuSeqlens) -> Self {
        self.batch().in_one_row(self.with_rows(self.rows().in_one_row()), cu_seqlens).into()
    }
}

impl Workload for Problem {
    type Logits = FloatArray<Ix3>;
    type Shape = Shape;
    type Form = ();
    type View<'a> = FloatView<'a, Ix3>;
    type Gradient = FloatArray<Ix3>;
    const ARRAYS: &'static [&'static str] = &["logits"];

    fn checked_shape(&self, spec: &LossSpec) -> Result<Shape, ProblemError> {
        self.check(spec)
    }

    fn shape(&self) -> Shape {
        self.shape()
    }

    fn form(&self) {}

    fn head_form((): ()) -> Option<HeadForm> {
        None
    }

    fn arrays(&self) -> Vec<FloatView<'_, IxDyn>> {
        vec![self.logits.view().into_dyn()]
    }

    fn rows(&self) -> &FloatArray<Ix3> {
        &self.logits
    }

    fn with_rows(&self, rows: FloatArray<Ix3>) -> FloatArray<Ix3> {
        rows
    }
}

impl Workload for HeadProblem {
    type Logits = Projection;
    type Shape = HeadShape;
    type Form = HeadForm;
    type View<'a> = HeadGradientView<'a>;
    type Gradient = HeadGradient;
    const ARRAYS: &'static [&'static str] = &["hidden", "lm_head"];

    fn checked_shape(&self, spec: &LossSpec) -> Result<HeadShape, ProblemError> {
        self.check(spec)
    }

    fn shape(&self) -> HeadShape {
        self.shape()
    }

    fn form(&self) -> HeadForm {
        HeadForm { layout: self.logits.layout, rounds_logits: self.logits.rounds_logits }
    }

    fn head_form(form: HeadForm) -> Option<HeadForm> {
        Some(form)
    }

    fn arrays(&self) -> Vec<FloatView<'_, IxDyn>> {
        vec![self.logits.hidden.view().into_dyn(), self.logits.lm_head.view().into_dyn()]
    }

    fn rows(&self) -> &FloatArray<Ix3> {
        &self.logits.hidden
    }

    fn with_rows(&self, hidden: FloatArray<Ix3>) -> Projection {
        Projection { hidden, ..self.logits.clone() }
    }
}

/// A kernel under test: of the loss on logits, or, as an `Implementation<HeadProblem>`, of LM head and loss.
pub trait Implementation<P: Workload = Problem>: Send + Sync {
    /// Returns the name that commands and reports use, such as `native`.
    fn id(&self) -> &str;

    /// Returns one line about the kernel and the hardware that it runs on.
    fn summary(&self) -> &str;

    /// Returns the arithmetic class, which selects the entries of `tolerances.toml`: `native`, `xla`, `tile`, `gpu` or
    /// `external`.
    fn class(&self) -> &str;

    /// Checks whether this machine can run the kernel.
    ///
    /// # Errors
    /// [`Unavailable`], saying what is absent.
    fn available(&self) -> Result<(), Unavailable>;

    /// Returns the device counts that it can run on here, ascending; empty if it is not available. For more than eight
    /// devices ask [`takes`](Self::takes).
    fn device_counts(&self) -> Vec<usize> {
        vec![1]
    }

    /// Whether it can run on `devices` devices here, for any input.
    fn takes(&self, devices: usize) -> bool {
        self.device_counts().contains(&devices)
    }

    /// Returns the lowering of its tile kernels for the devices here, `loops` or `mosaic`; `None` if it has none, or
    /// there is no device.
    fn lowering(&self) -> Option<&'static str> {
        None
    }

    /// Returns the instruction set that it uses, if it runs on this machine's cores.
    fn isa(&self) -> Option<&'static str> {
        None
    }

    /// Checks whether it computes `spec` on logits, or hidden states, of `shape` and `dtype` over `devices` devices.
    ///
    /// # Errors
    /// [`Unsupported`], naming the first thing it does not do.
    fn supports(&self, spec: &LossSpec, shape: P::Shape, dtype: Dtype, devices: usize) -> Result<(), Unsupported>;

    /// Whether it avoids every cancellation that can be avoided, as the grade `exact` requires. Other kernels are held
    /// to `standard`.
    fn keeps_digits(&self) -> bool {
        true
    }

    /// Whether it computes batches with [packed](crate::problem::Sequences::Packed) sequences.
    fn takes_packed(&self) -> bool {
        false
    }

    /// Checks whether it computes `spec` on `given`, including packed sequences, as [`supports`](Self::supports) does.
    ///
    /// # Errors
    /// [`Unsupported`], naming the first thing it does not do.
    fn supports_given(&self, spec: &LossSpec, given: ProblemFormat<P>, devices: usize) -> Result<(), Unsupported> {
        self.supports(spec, given.shape, given.dtype, devices)?;
        match given.packed {
            Some(_) if !self.takes_packed() => Err(Unsupported {
                implementation: self.id().into(),
                field: "sequences",
                given: "packed".into(),
                supported: "one a row".into(),
            }),
            _ => Ok(()),
        }
    }

    /// Returns the bytes of this machine's memory that a run needs in addition to the problem, of `shape` and `dtype`,
    /// and its outcome.
    fn host_bytes(&self, _shape: P::Shape, _dtype: Dtype) -> usize {
        0
    }

    /// Computes the loss on `devices` devices. The problem is passed by value, so that dlogits may be written over the
    /// logits.
    ///
    /// # Errors
    /// [`RunError`] where the problem is wrong or not supported, or a device fails.
    fn run(&self, spec: &LossSpec, problem: P, devices: usize) -> Result<Candidate<P::Gradient>, RunError>;

    /// Prepares the evaluation of many problems of `given` shape, dtype and layout: everything that does not depend on
    /// a problem, such as compiling, is done here. By default a step is a [`run`](Self::run).
    ///
    /// # Errors
    /// [`RunError`] where the problem would not be supported, or a device fails.
    fn prepare<'s>(
        &'s self,
        spec: &'s LossSpec,
        given: ProblemFormat<P>,
        devices: usize,
    ) -> Result<Box<dyn Prepared<P> + 's>, RunError> {
        self.supports_given(spec, given, devices)?;
        Ok(Box::new(Runs { implementation: self, spec, given, devices }))
    }
}

/// An implementation that is prepared for one shape, to be timed.
pub trait Prepared<P: Workload = Problem> {
    /// Moves a problem to where a step reads it: to the devices, or into a copy that dlogits may overwrite. The step
    /// owns that memory.
    ///
    /// # Errors
    /// [`RunError`] where the problem is wrong or of another shape or dtype, or a device fails.
    fn load<'p>(&'p self, problem: &'p P) -> Result<Step<'p, P>, RunError>;

    /// Returns the bytes of this machine's memory that a step needs in addition to the problem and its outcome.
    fn host_bytes(&self) -> usize;

    /// Returns the memory of a step on each device, as the compiler counted it.
    ///
    /// # Errors
    /// [`Unavailable`], saying why nobody counted.
    fn compiled_memory(&self) -> Result<CompiledMemory, Unavailable>;

    /// Returns the current figures of the first device's allocator.
    ///
    /// # Errors
    /// [`Unavailable`], saying why it says nothing.
    fn device_memory(&self) -> Result<DeviceMemory, Unavailable>;

    /// Keeps a problem on the device, where steps restore it without this machine's memory and kernels can be timed
    /// alone; `None` if the implementation cannot, and each step is [loaded](Self::load) again.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    fn hold<'p>(&'p self, _problem: &'p P) -> Result<Option<Box<dyn ResidentProblem<'p, P> + 'p>>, RunError> {
        Ok(None)
    }

    /// Returns the device that a step runs on; `None` if it runs on this machine's cores.
    fn runs_on(&self) -> Option<RunsOn> {
        None
    }
}

/// A problem in a device's memory, with a copy of the arrays that steps overwrite.
pub trait ResidentProblem<'p, P: Workload = Problem> {
    /// Restores the problem for a step. An answer that was not fetched by then is lost.
    ///
    /// # Errors
    /// [`RunError`] where the device fails.
    fn load(&self) -> Result<Step<'p, P>, RunError>;

    /// Launches the kernels of a step `launches` times in a row, from the same problem each time, and times them by the
    /// device's own clock. The last answer must have the bits of `judged`, which a step has returned.
    ///
    /// # Errors
    /// [`RunError`] where the answer has other bits, or where the device fails.
    fn time_kernels(&self, judged: &Candidate<P::Gradient>, launches: usize) -> Result<KernelTimings, RunError>;
}

/// Times of kernels alone by the device's own clock, without their launch and without gaps.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelTimings {
    /// The kernels of a step, in order.
    pub kernels: Vec<KernelTiming>,
    /// The times of the copies that restored the problem between the launches, within the device's memory.
    pub copies: Vec<Duration>,
    /// The number of bytes that such a copy reads, and writes.
    pub copied_bytes: usize,
}

/// A kernel with its measured times.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelTiming {
    /// The driver's figures of the kernel.
    pub kernel: AssembledKernel,
    /// The time of each launch, in order.
    pub took: Vec<Duration>,
}

/// A kernel that a GPU's driver has assembled, with the driver's figures; `None` where it reports none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AssembledKernel {
    /// The name of the kernel's entry.
    pub name: String,
    /// The number of registers of a thread.
    pub registers: Option<u32>,
    /// The local memory of a thread, bytes: registers are spilled there.
    pub local_bytes: Option<u32>,
    /// The static shared memory of a CTA, bytes.
    pub static_shared_bytes: u32,
    /// The dynamic shared memory of a CTA, bytes.
    pub dynamic_shared_bytes: u32,
    /// The largest number of threads of a CTA.
    pub most_threads: Option<u32>,
    /// The version of PTX that it was assembled from: 80 is 8.0.
    pub ptx_version: Option<u32>,
    /// The architecture that it was assembled for: 90 is `sm_90`.
    pub binary_version: Option<u32>,
    /// The number of CTAs that fit on a multiprocessor together.
    pub ctas_a_multiprocessor: Option<u32>,
    /// The number of clusters that fit on the device together; `None` also without clusters.
    pub clusters: Option<u32>,
}

/// A device with its memory bandwidth.
#[derive(Clone, Debug, PartialEq)]
pub struct RunsOn {
    /// The name of the device, as its driver reports it.
    pub device: String,
    /// The peak bandwidth of its memory, bytes per second, if it reports one.
    pub bytes_per_s: Option<f64>,
}

/// Evaluates a loaded problem, and returns when every output is computed: a bench times this call.
pub type Step<'p, P = Problem> = Box<dyn FnOnce() -> Result<Answer<'p, P>, RunError> + 'p>;

/// Fetches the outputs of a step, which occupy memory until then.
pub type Answer<'p, P = Problem> = Box<dyn FnOnce() -> Result<Candidate<<P as Workload>::Gradient>, RunError> + 'p>;

/// The shape, dtype and layout that an implementation is prepared for.
pub struct ProblemFormat<P: Workload = Problem> {
    /// The shape of the input.
    pub shape: P::Shape,
    /// The element type of logits or hidden states.
    pub dtype: Dtype,
    /// The layout of the arrays, if there is a choice.
    pub form: P::Form,
    /// The number of sequences packed into the one row; `None` if each row is a sequence.
    pub packed: Option<usize>,
}

#[expect(clippy::expl_impl_clone_on_copy, reason = "a derived one asks that problems be Copy")]
impl<P: Workload> Clone for ProblemFormat<P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P: Workload> Copy for ProblemFormat<P> {}

impl<P: Workload> PartialEq for ProblemFormat<P> {
    fn eq(&self, other: &Self) -> bool {
        (self.shape, self.dtype, self.form, self.packed) == (other.shape, other.dtype, other.form, other.packed)
    }
}

impl<P: Workload> ProblemFormat<P> {
    /// Checks `problem` and returns its shape, dtype and layout.
    ///
    /// # Errors
    /// [`ProblemError`] naming the first field that is wrong.
    pub fn from_problem(spec: &LossSpec, problem: &P) -> Result<Self, ProblemError> {
        let shape = problem.checked_shape(spec)?;
        let packed = problem.batch().extra.sequences.packed();
        Ok(Self { shape, dtype: problem.dtype(), form: problem.form(), packed })
    }

    /// Checks `problem`, and that its shape, dtype and layout are these.
    ///
    /// # Errors
    /// [`RunError::NotPrepared`], with both; that of the problem where it is wrong.
    pub fn expect(&self, spec: &LossSpec, problem: &P) -> Result<(), RunError> {
        let given = Self::from_problem(spec, problem)?;
        if given == *self {
            return Ok(());
        }
        Err(RunError::NotPrepared { given: given.to_string(), expected: self.to_string() })
    }
}

impl<P: Workload> fmt::Display for ProblemFormat<P> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} {} of {}", self.dtype, P::ARRAYS[0], self.shape)?;
        if let Some(HeadForm { layout, rounds_logits }) = P::head_form(self.form) {
            let logits = if rounds_logits { "rounded" } else { "f32" };
            write!(f, " with a head {} and {logits} logits", layout.name())?;
        }
        self.packed.map_or(Ok(()), |sequences| write!(f, " with {sequences} packed sequences"))
    }
}

/// A preparation whose steps are whole runs, each on a copy of the problem.
struct Runs<'s, P: Workload, I: ?Sized> {
    implementation: &'s I,
    spec: &'s LossSpec,
    given: ProblemFormat<P>,
    devices: usize,
}

impl<P: Workload, I: Implementation<P> + ?Sized> Runs<'_, P, I> {
    fn uncounted(&self) -> Unavailable {
        Unavailable { reason: format!("{} runs no program whose memory is counted", self.implementation.id()) }
    }
}

impl<P: Workload, I: Implementation<P> + ?Sized> Prepared<P> for Runs<'_, P, I> {
    fn load<'p>(&'p self, problem: &'p P) -> Result<Step<'p, P>, RunError> {
        self.given.expect(self.spec, problem)?;
        let problem = problem.clone();
        Ok(Box::new(move || {
            let outcome = self.implementation.run(self.spec, problem, self.devices)?;
            let answer: Answer<'p, P> = Box::new(move || Ok(outcome));
            Ok(answer)
        }))
    }

    /// Returns the bytes of a run: the copy of the problem becomes the outcome.
    fn host_bytes(&self) -> usize {
        self.implementation.host_bytes(self.given.shape, self.given.dtype)
    }

    fn compiled_memory(&self) -> Result<CompiledMemory, Unavailable> {
        Err(self.uncounted())
    }

    fn device_memory(&self) -> Result<DeviceMemory, Unavailable> {
        Err(self.uncounted())
    }
}

/// The prefix of the id of a user's own program; the path of its manifest follows.
pub const FILE_PREFIX: &str = "file:";

/// The reason why this machine cannot run an implementation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not available here: {reason}")]
pub struct Unavailable {
    /// The thing that is missing, in words.
    pub reason: String,
}

/// An option or property that an implementation does not support.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{implementation} does not support {field} {given}; it supports {supported}")]
pub struct Unsupported {
    /// The id of the implementation.
    pub implementation: String,
    /// The name of the option or property.
    pub field: &'static str,
    /// The value that was given.
    pub given: String,
    /// The values that are supported, in words.
    pub supported: String,
}

/// The reason why an implementation returned no result.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RunError {
    /// The problem does not fit its spec.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// The implementation does not support the spec or the problem.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// The implementation was prepared for another shape, dtype or layout.
    #[error("load: got {given}, expected {expected}, which the implementation was prepared for")]
    NotPrepared {
        /// The shape, dtype and layout of the problem.
        given: String,
        /// The shape, dtype and layout that the implementation was prepared for.
        expected: String,
    },
    /// The backend failed: a plugin, its devices, or a program that contradicts its manifest.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

/// The failure of a backend, in its own words. Clones are the same failure.
#[derive(Clone, Debug, thiserror::Error)]
#[error(transparent)]
pub struct BackendError(Arc<dyn std::error::Error + Send + Sync>);

impl BackendError {
    /// Wraps an `error` of any backend.
    pub fn new(error: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self(Arc::new(error))
    }
}

impl PartialEq for BackendError {
    fn eq(&self, other: &Self) -> bool {
        self.to_string() == other.to_string()
    }
}
