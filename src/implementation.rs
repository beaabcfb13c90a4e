//! [`Implementation`]: something that computes a GRPO loss and can be judged; [`registry`]: all there are.
//!
//! The reference is not among them: it is what they are judged against.

use crate::native::Native;
use crate::problem::{Dtype, Outcome, Problem, ProblemError, Shape};
use crate::spec::LossSpec;

/// A kernel under test.
pub trait Implementation: Send + Sync {
    /// The name that commands and reports use.
    fn id(&self) -> &'static str;

    /// One line on what it is and where it runs.
    fn summary(&self) -> &'static str;

    /// The class of its arithmetic: which entries of `tolerances.toml` it is held to.
    fn class(&self) -> &'static str;

    /// Whether this machine can run it.
    ///
    /// # Errors
    /// [`Unavailable`], saying what is absent.
    fn available(&self) -> Result<(), Unavailable>;

    /// Whether it computes `spec` on logits of `shape` and `dtype` over `devices` devices.
    ///
    /// # Errors
    /// [`Unsupported`], naming the first thing it does not do.
    fn supports(&self, spec: &LossSpec, shape: Shape, dtype: Dtype, devices: usize) -> Result<(), Unsupported>;

    /// Computes the loss. Takes the problem by value, so that dlogits may be written over the logits.
    ///
    /// # Errors
    /// [`RunError`] where the problem is wrong or not supported.
    fn run(&self, spec: &LossSpec, problem: Problem) -> Result<Outcome, RunError>;
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
    pub implementation: &'static str,
    /// The option or property.
    pub field: &'static str,
    /// Its value.
    pub given: String,
    /// What would do.
    pub supported: &'static str,
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
}

/// Every implementation there is. Tests, benches and commands iterate over it.
pub fn registry() -> &'static [&'static dyn Implementation] {
    &[&Native]
}

/// The implementation called `id`.
///
/// # Errors
/// A message that lists the ids there are.
pub fn find(id: &str) -> Result<&'static dyn Implementation, String> {
    registry().iter().copied().find(|implementation| implementation.id() == id).ok_or_else(|| {
        let ids: Vec<_> = registry().iter().map(|implementation| implementation.id()).collect();
        format!("implementation: got `{id}`, expected one of: {}", ids.join(", "))
    })
}
