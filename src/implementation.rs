//! [`Implementation`]: something that computes a GRPO loss and can be judged; [`registry`]: all there are.
//!
//! The reference is not among them: it is what they are judged against.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

#[cfg(feature = "pjrt")]
use crate::exported::{Exported, ExportedError};
use crate::memory::{CompiledMemory, DeviceMemory};
use crate::native::Native;
use crate::problem::{Candidate, Dtype, Problem, ProblemError, Shape};
#[cfg(feature = "pjrt")]
use crate::runtime::RuntimeError;
use crate::spec::LossSpec;
#[cfg(feature = "pjrt")]
use crate::xla::Xla;

/// A kernel under test.
pub trait Implementation: Send + Sync {
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

    /// The device counts that it can be run on here, ascending; empty where it is not available.
    fn device_counts(&self) -> Vec<usize> {
        vec![1]
    }

    /// The instruction set that it uses, where it runs on this machine's cores.
    fn isa(&self) -> Option<&'static str> {
        None
    }

    /// Whether it computes `spec` on logits of `shape` and `dtype` over `devices` devices.
    ///
    /// # Errors
    /// [`Unsupported`], naming the first thing it does not do.
    fn supports(&self, spec: &LossSpec, shape: Shape, dtype: Dtype, devices: usize) -> Result<(), Unsupported>;

    /// Computes the loss on `devices` devices. Takes the problem by value, so that dlogits may be written over the
    /// logits.
    ///
    /// # Errors
    /// [`RunError`] where the problem is wrong or not supported, or a device fails.
    fn run(&self, spec: &LossSpec, problem: Problem, devices: usize) -> Result<Candidate, RunError>;

    /// Makes ready to evaluate problems of `shape` and `dtype` again and again: what can be done before there is a
    /// problem, such as compiling, is done here. A step of an implementation that does not say otherwise is a
    /// [`run`](Self::run).
    ///
    /// # Errors
    /// [`RunError`] where the problem would not be supported, or a device fails.
    fn prepare<'s>(
        &'s self,
        spec: &'s LossSpec,
        shape: Shape,
        dtype: Dtype,
        devices: usize,
    ) -> Result<Box<dyn Prepared + 's>, RunError> {
        self.supports(spec, shape, dtype, devices)?;
        Ok(Box::new(Runs { implementation: self, spec, logits: Logits { shape, dtype }, devices }))
    }
}

/// An implementation made ready for one shape, to be timed.
pub trait Prepared {
    /// Puts a problem where a step reads it: on the devices, or in a copy that dlogits may be written over. The step
    /// holds that memory.
    ///
    /// # Errors
    /// [`RunError`] where the problem is wrong or of another shape or dtype, or a device fails.
    fn load<'p>(&'p self, problem: &'p Problem) -> Result<Step<'p>, RunError>;

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
}

/// Evaluates a loaded problem, and returns when every output is there: what a bench times.
pub type Step<'p> = Box<dyn FnOnce() -> Result<Answer<'p>, RunError> + 'p>;

/// Fetches the outputs of a step, which hold memory until then.
pub type Answer<'p> = Box<dyn FnOnce() -> Result<Candidate, RunError> + 'p>;

/// The logits that an implementation was made ready for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Logits {
    /// Extents.
    pub shape: Shape,
    /// Element type.
    pub dtype: Dtype,
}

impl Logits {
    /// Checks `problem`, and that its logits are these.
    pub(crate) fn expect(self, spec: &LossSpec, problem: &Problem) -> Result<(), RunError> {
        let given = Logits { shape: problem.check(spec)?, dtype: problem.logits.dtype() };
        if given == self { Ok(()) } else { Err(RunError::NotPrepared { given, expected: self }) }
    }
}

impl fmt::Display for Logits {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} logits of {}", self.dtype, self.shape)
    }
}

/// Steps that are whole runs, each on a copy of the problem.
struct Runs<'s, I: ?Sized> {
    implementation: &'s I,
    spec: &'s LossSpec,
    logits: Logits,
    devices: usize,
}

impl<I: Implementation + ?Sized> Runs<'_, I> {
    fn uncounted(&self) -> Unavailable {
        Unavailable { reason: format!("{} runs no program whose memory is counted", self.implementation.id()) }
    }
}

impl<I: Implementation + ?Sized> Prepared for Runs<'_, I> {
    fn load<'p>(&'p self, problem: &'p Problem) -> Result<Step<'p>, RunError> {
        self.logits.expect(self.spec, problem)?;
        let problem = problem.clone();
        Ok(Box::new(move || {
            let outcome = self.implementation.run(self.spec, problem, self.devices)?;
            let answer: Answer<'p> = Box::new(move || Ok(outcome));
            Ok(answer)
        }))
    }

    /// The copy becomes the outcome.
    fn host_bytes(&self) -> usize {
        0
    }

    fn compiled_memory(&self) -> Result<CompiledMemory, Unavailable> {
        Err(self.uncounted())
    }

    fn device_memory(&self) -> Result<DeviceMemory, Unavailable> {
        Err(self.uncounted())
    }
}

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
    /// It was made ready for other logits.
    #[error("load: got {given}, expected {expected}, which the implementation was prepared for")]
    NotPrepared {
        /// The logits of the problem.
        given: Logits,
        /// Those prepared for.
        expected: Logits,
    },
    /// A plugin or its devices failed.
    #[cfg(feature = "pjrt")]
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    /// A user's program does not do what its manifest says.
    #[cfg(feature = "pjrt")]
    #[error(transparent)]
    Exported(#[from] ExportedError),
}

/// Every implementation there is; those that need a PJRT plugin use `plugin`, or where that is `None` the one that the
/// environment names or set-up installed. Tests, benches and commands iterate over it.
pub fn registry(plugin: Option<&Path>) -> Vec<Arc<dyn Implementation>> {
    #[allow(unused_mut, reason = "without PJRT there is but one")]
    let mut all: Vec<Arc<dyn Implementation>> = vec![Arc::new(Native::default())];
    #[cfg(feature = "pjrt")]
    let with_gradient = Xla::all(plugin).into_iter().filter(Xla::has_gradient);
    #[cfg(feature = "pjrt")]
    all.extend(with_gradient.map(|xla| Arc::new(xla) as Arc<dyn Implementation>));
    #[cfg(not(feature = "pjrt"))]
    let _ = plugin;
    all
}

/// What the id of a user's own program begins with; the path of its manifest follows.
pub const FILE_PREFIX: &str = "file:";

/// The implementation called `id` in [`registry`]; for `file:MANIFEST.toml` the program that the manifest describes.
///
/// # Errors
/// A message that lists the ids there are, or says what is wrong with the manifest.
pub fn find(id: &str, plugin: Option<&Path>) -> Result<Arc<dyn Implementation>, String> {
    if let Some(manifest) = id.strip_prefix(FILE_PREFIX) {
        return from_manifest(manifest, plugin);
    }
    let mut all = registry(plugin);
    let Some(at) = all.iter().position(|implementation| implementation.id() == id) else {
        let ids: Vec<_> = all.iter().map(|implementation| implementation.id()).collect();
        return Err(format!(
            "implementation: got `{id}`, expected one of: {}, {FILE_PREFIX}MANIFEST.toml",
            ids.join(", ")
        ));
    };
    Ok(all.swap_remove(at))
}

#[cfg(feature = "pjrt")]
fn from_manifest(manifest: &str, plugin: Option<&Path>) -> Result<Arc<dyn Implementation>, String> {
    let exported = Exported::read(manifest, plugin).map_err(|error| error.to_string())?;
    Ok(Arc::new(exported))
}

#[cfg(not(feature = "pjrt"))]
fn from_manifest(manifest: &str, _: Option<&Path>) -> Result<Arc<dyn Implementation>, String> {
    Err(format!("implementation: got `{FILE_PREFIX}{manifest}`, expected a build with the feature `pjrt`"))
}
