//! [`Implementation`]: something that computes a GRPO loss and can be judged. The crate `assay-registry` lists all there
//! are.
//!
//! The reference is not among them: it is what they are judged against.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::memory::{CompiledMemory, DeviceMemory};
use ndarray::Ix3;

use crate::problem::{
    Candidate, Dtype, FloatArray, FloatView, HeadForm, HeadGradient, HeadGradientView, HeadProblem, HeadShape, Lend,
    Problem, ProblemError, Sequences, Shape,
};
use crate::spec::LossSpec;

/// What an implementation is given: a [`Problem`], whose logits are there, or a [`HeadProblem`], whose logits are a
/// product that is part of the work.
pub trait Workload: Clone + Send + Sync + 'static {
    /// Its extents.
    type Shape: Copy + PartialEq + fmt::Debug + fmt::Display + Send + Sync;
    /// How its arrays lie, where there is a choice.
    type Form: Copy + PartialEq + fmt::Debug + Send + Sync;
    /// The gradient that it comes to, borrowed.
    type View<'a>: Clone;
    /// The same, held.
    type Gradient: Clone + Send + Sync + for<'a> Lend<'a, View = Self::View<'a>>;
    /// What has the extents, and is given in a dtype.
    const ARRAY: &'static str;

    /// Its extents, after a check.
    ///
    /// # Errors
    /// [`ProblemError`] naming the first field that is wrong.
    fn checked_shape(&self, spec: &LossSpec) -> Result<Self::Shape, ProblemError>;

    /// The dtype of that array.
    fn dtype(&self) -> Dtype;

    /// How its arrays lie.
    fn form(&self) -> Self::Form;

    /// Which of its tokens make a sequence.
    fn which_sequences(&self) -> &Sequences;

    /// A form in words; nothing where there is no choice.
    fn describe(form: Self::Form) -> String;
}

impl Workload for Problem {
    type Shape = Shape;
    type Form = ();
    type View<'a> = FloatView<'a, Ix3>;
    type Gradient = FloatArray<Ix3>;
    const ARRAY: &'static str = "logits";

    fn checked_shape(&self, spec: &LossSpec) -> Result<Shape, ProblemError> {
        self.check(spec)
    }

    fn dtype(&self) -> Dtype {
        self.logits.dtype()
    }

    fn form(&self) {}

    fn which_sequences(&self) -> &Sequences {
        &self.extra.sequences
    }

    fn describe((): ()) -> String {
        String::new()
    }
}

impl Workload for HeadProblem {
    type Shape = HeadShape;
    type Form = HeadForm;
    type View<'a> = HeadGradientView<'a>;
    type Gradient = HeadGradient;
    const ARRAY: &'static str = "hidden";

    fn checked_shape(&self, spec: &LossSpec) -> Result<HeadShape, ProblemError> {
        self.check(spec)
    }

    fn dtype(&self) -> Dtype {
        self.logits.hidden.dtype()
    }

    fn form(&self) -> HeadForm {
        HeadForm { layout: self.logits.layout, rounds_logits: self.logits.rounds_logits }
    }

    fn which_sequences(&self) -> &Sequences {
        &self.extra.sequences
    }

    fn describe(form: HeadForm) -> String {
        let logits = if form.rounds_logits { "rounded" } else { "f32" };
        format!(" with a head {} and {logits} logits", form.layout.name())
    }
}

/// A kernel under test: of the loss on logits, or, as an `Implementation<HeadProblem>`, of the LM head and the loss.
pub trait Implementation<P: Workload = Problem>: Send + Sync {
    /// The name that commands and reports use.
    fn id(&self) -> &str;

    /// One line on what it is and where it runs.
    fn summary(&self) -> &str;

    /// The class of its arithmetic: which entries of `tolerances.toml` it is held to.
    fn class(&self) -> &str;

    /// Whether this machine can run it.
    ///
    /// # Errors
    /// [`Unavailable`], saying what is absent.
    fn available(&self) -> Result<(), Unavailable>;

    /// The device counts that it can be run on here, ascending; empty where it is not available. Of more than eight
    /// devices [`takes`](Self::takes) knows.
    fn device_counts(&self) -> Vec<usize> {
        vec![1]
    }

    /// Whether there is anything that it can be run on here with `devices` devices.
    fn takes(&self, devices: usize) -> bool {
        self.device_counts().contains(&devices)
    }

    /// How its tile kernels are written for the devices here, `loops` or `mosaic`; `None` where it has none, or there is no device.
    fn lowering(&self) -> Option<&'static str> {
        None
    }

    /// The instruction set that it uses, where it runs on this machine's cores.
    fn isa(&self) -> Option<&'static str> {
        None
    }

    /// Whether it computes `spec` on logits, or hidden states, of `shape` and `dtype` over `devices` devices.
    ///
    /// # Errors
    /// [`Unsupported`], naming the first thing it does not do.
    fn supports(&self, spec: &LossSpec, shape: P::Shape, dtype: Dtype, devices: usize) -> Result<(), Unsupported>;

    /// Whether it avoids every cancellation that can be avoided, as the grade `exact` asks. What does not is held to
    /// `standard`.
    fn keeps_digits(&self) -> bool {
        true
    }

    /// Whether it computes batches whose sequences are [packed](Sequences::Packed).
    fn takes_packed(&self) -> bool {
        false
    }

    /// [`supports`](Self::supports) of what is given, packed sequences too.
    ///
    /// # Errors
    /// [`Unsupported`], naming the first thing it does not do.
    fn supports_given(&self, spec: &LossSpec, given: Given<P>, devices: usize) -> Result<(), Unsupported> {
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

    /// Bytes of this machine's memory that a run takes beside the problem, of `shape` and `dtype`, and its outcome.
    fn host_bytes(&self, _shape: P::Shape, _dtype: Dtype) -> usize {
        0
    }

    /// Computes the loss on `devices` devices. Takes the problem by value, so that dlogits may be written over the
    /// logits.
    ///
    /// # Errors
    /// [`RunError`] where the problem is wrong or not supported, or a device fails.
    fn run(&self, spec: &LossSpec, problem: P, devices: usize) -> Result<Candidate<P::Gradient>, RunError>;

    /// Makes ready to evaluate problems of `given` extents, dtype and form again and again: what can be done before there
    /// is a problem, such as compiling, is done here. A step of an implementation that does not say otherwise is a
    /// [`run`](Self::run).
    ///
    /// # Errors
    /// [`RunError`] where the problem would not be supported, or a device fails.
    fn prepare<'s>(
        &'s self,
        spec: &'s LossSpec,
        given: Given<P>,
        devices: usize,
    ) -> Result<Box<dyn Prepared<P> + 's>, RunError> {
        self.supports_given(spec, given, devices)?;
        Ok(Box::new(Runs { implementation: self, spec, given, devices }))
    }
}

/// An implementation made ready for one shape, to be timed.
pub trait Prepared<P: Workload = Problem> {
    /// Puts a problem where a step reads it: on the devices, or in a copy that dlogits may be written over. The step
    /// holds that memory.
    ///
    /// # Errors
    /// [`RunError`] where the problem is wrong or of another shape or dtype, or a device fails.
    fn load<'p>(&'p self, problem: &'p P) -> Result<Step<'p, P>, RunError>;

    /// Bytes of this machine's memory that a step takes beside the problem and its outcome.
    fn host_bytes(&self) -> usize;

    /// What a step takes on each device, as the compiler counted.
    ///
    /// # Errors
    /// [`Unavailable`], saying why nobody counted.
    fn compiled_memory(&self) -> Result<CompiledMemory, Unavailable>;

    /// What the allocator of the first device says now.
    ///
    /// # Errors
    /// [`Unavailable`], saying why it says nothing.
    fn device_memory(&self) -> Result<DeviceMemory, Unavailable>;

    /// Holds a problem where steps are restored from without this machine's memory, and where kernels can be timed
    /// alone; `None` where an implementation has no such place, and each step is [loaded](Self::load) again.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    fn hold<'p>(&'p self, _problem: &'p P) -> Result<Option<Box<dyn Held<'p, P> + 'p>>, RunError> {
        Ok(None)
    }

    /// The device that a step runs on; `None` where it is this machine's cores.
    fn runs_on(&self) -> Option<RunsOn> {
        None
    }
}

/// A problem in a device's memory, beside a copy of what steps write over.
pub trait Held<'p, P: Workload = Problem> {
    /// Restores the problem for a step. An answer that was not fetched by then is lost.
    ///
    /// # Errors
    /// [`RunError`] where the device fails.
    fn load(&self) -> Result<Step<'p, P>, RunError>;

    /// Launches the kernels of a step `launches` times back to back, from the same problem each time, and times them
    /// by the device's own clock. The answer that is then there must have the bits of `judged`, which a step has
    /// given.
    ///
    /// # Errors
    /// [`RunError`] where the answer has other bits, or where the device fails.
    fn time_kernels(&self, judged: &Candidate<P::Gradient>, launches: usize) -> Result<KernelTimings, RunError>;
}

/// Times of kernels alone, by the device's own clock: without what starts them, and without what lies between.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelTimings {
    /// The kernels of a step, in order.
    pub kernels: Vec<KernelTiming>,
    /// Times of the copies that restored the problem between the launches, from the device's memory to the device's
    /// memory.
    pub copies: Vec<Duration>,
    /// Bytes that such a copy reads; it writes as many.
    pub copied_bytes: usize,
}

/// A kernel and its times.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelTiming {
    /// The driver's figures of the kernel.
    pub kernel: AssembledKernel,
    /// One time for each launch, in order.
    pub took: Vec<Duration>,
}

/// A kernel as a GPU's driver has assembled it, in the driver's own figures; `None` where it does not say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AssembledKernel {
    /// The kernel's entry.
    pub name: String,
    /// Registers of a thread.
    pub registers: Option<u32>,
    /// Local memory of a thread, bytes: registers are spilled there.
    pub local_bytes: Option<u32>,
    /// Static shared memory of a CTA, bytes.
    pub static_shared_bytes: u32,
    /// Dynamic shared memory of a CTA, bytes.
    pub dynamic_shared_bytes: u32,
    /// The most threads that a CTA may have.
    pub most_threads: Option<u32>,
    /// The version of PTX that it was assembled from: 80 is 8.0.
    pub ptx_version: Option<u32>,
    /// The architecture that it was assembled for: 90 is `sm_90`.
    pub binary_version: Option<u32>,
    /// CTAs that have room on a multiprocessor together.
    pub ctas_a_multiprocessor: Option<u32>,
    /// Clusters that have room on the device together; `None` also where there are no clusters.
    pub clusters: Option<u32>,
}

/// A device.
#[derive(Clone, Debug, PartialEq)]
pub struct RunsOn {
    /// What it is called.
    pub device: String,
    /// What its memory gives at most, bytes a second, where it says so itself.
    pub bytes_per_s: Option<f64>,
}

/// Evaluates a loaded problem, and returns when every output is there: what a bench times.
pub type Step<'p, P = Problem> = Box<dyn FnOnce() -> Result<Answer<'p, P>, RunError> + 'p>;

/// Fetches the outputs of a step, which hold memory until then.
pub type Answer<'p, P = Problem> = Box<dyn FnOnce() -> Result<Candidate<<P as Workload>::Gradient>, RunError> + 'p>;

/// What an implementation is made ready for.
pub struct Given<P: Workload = Problem> {
    /// Extents.
    pub shape: P::Shape,
    /// Element type.
    pub dtype: Dtype,
    /// How the arrays lie.
    pub form: P::Form,
    /// How many sequences are packed into the one row; `None` where each row is one.
    pub packed: Option<usize>,
}

#[expect(clippy::expl_impl_clone_on_copy, reason = "a derived one asks that problems be Copy")]
impl<P: Workload> Clone for Given<P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P: Workload> Copy for Given<P> {}

impl<P: Workload> PartialEq for Given<P> {
    fn eq(&self, other: &Self) -> bool {
        (self.shape, self.dtype, self.form, self.packed) == (other.shape, other.dtype, other.form, other.packed)
    }
}

impl<P: Workload> Given<P> {
    /// What `problem` is, after a check.
    ///
    /// # Errors
    /// [`ProblemError`] naming the first field that is wrong.
    pub fn of(spec: &LossSpec, problem: &P) -> Result<Self, ProblemError> {
        let shape = problem.checked_shape(spec)?;
        let packed = problem.which_sequences().packed();
        Ok(Self { shape, dtype: problem.dtype(), form: problem.form(), packed })
    }

    /// Checks `problem`, and that it is as given.
    ///
    /// # Errors
    /// [`RunError::NotPrepared`], with both; that of the problem where it is wrong.
    pub fn expect(&self, spec: &LossSpec, problem: &P) -> Result<(), RunError> {
        let given = Self::of(spec, problem)?;
        if given == *self {
            return Ok(());
        }
        Err(RunError::NotPrepared { given: given.to_string(), expected: self.to_string() })
    }
}

impl<P: Workload> fmt::Display for Given<P> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} {} of {}{}", self.dtype, P::ARRAY, self.shape, P::describe(self.form))?;
        self.packed.map_or(Ok(()), |sequences| write!(f, " with {sequences} packed sequences"))
    }
}

/// Steps that are whole runs, each on a copy of the problem.
struct Runs<'s, P: Workload, I: ?Sized> {
    implementation: &'s I,
    spec: &'s LossSpec,
    given: Given<P>,
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

    /// Those of a run: the copy becomes the outcome.
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

/// What the id of a user's own program begins with; the path of its manifest follows.
pub const FILE_PREFIX: &str = "file:";

/// Why this machine cannot run an implementation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not available here: {reason}")]
pub struct Unavailable {
    /// What is absent.
    pub reason: String,
}

/// What an implementation does not do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{implementation} does not support {field} {given}; it supports {supported}")]
pub struct Unsupported {
    /// The implementation's id.
    pub implementation: String,
    /// The option or property.
    pub field: &'static str,
    /// Its value.
    pub given: String,
    /// What would do.
    pub supported: String,
}

/// Why an implementation returned nothing.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RunError {
    /// The problem does not fit its spec.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// The implementation does not do this.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// It was made ready for another array.
    #[error("load: got {given}, expected {expected}, which the implementation was prepared for")]
    NotPrepared {
        /// That of the problem.
        given: String,
        /// The one prepared for.
        expected: String,
    },
    /// What runs the implementation failed: a plugin, its devices, or a program that does not do what its manifest says.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

/// The failure of what an implementation runs on, in that backend's own words. Clones are the same failure.
#[derive(Clone, Debug, thiserror::Error)]
#[error(transparent)]
pub struct BackendError(Arc<dyn std::error::Error + Send + Sync>);

impl BackendError {
    /// `error`, whatever the backend calls it.
    pub fn new(error: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self(Arc::new(error))
    }
}

impl PartialEq for BackendError {
    fn eq(&self, other: &Self) -> bool {
        self.to_string() == other.to_string()
    }
}
