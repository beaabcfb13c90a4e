//! [`Implementation`]: something that computes a GRPO loss and can be judged; [`registry`]: all there are.
//!
//! The reference is not among them: it is what they are judged against.

use std::path::Path;
use std::sync::Arc;

use crate::native::Native;
use crate::problem::{Candidate, Dtype, Problem, ProblemError, Shape};
use crate::spec::LossSpec;
#[cfg(feature = "pjrt")]
use crate::{
    exported::{Exported, ExportedError},
    runtime::RuntimeError,
    xla::Xla,
};

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
    let mut all: Vec<Arc<dyn Implementation>> = vec![Arc::new(Native)];
    #[cfg(feature = "pjrt")]
    all.extend(Xla::all(plugin).into_iter().map(|xla| Arc::new(xla) as Arc<dyn Implementation>));
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
