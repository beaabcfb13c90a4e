//! The list of implementations: every one there is, and the one that an id names.

use std::path::Path;
use std::sync::Arc;

use assay_core::implementation::{FILE_PREFIX, Implementation, Workload};
use assay_core::problem::{HeadProblem, Problem};
use assay_cuda::DriverLoss;
use assay_native::{Native, NativeHead};
#[cfg(feature = "pjrt")]
use assay_pjrt::exported::ExportedProgram;
#[cfg(feature = "pjrt")]
use assay_pjrt::xla::{Xla, XlaHead};

/// A kind of problem whose implementations are listed.
pub trait RegisteredProblem: Workload {
    /// Returns all implementations for this kind of problem, as [`registry`] does.
    fn all(plugin: Option<&Path>) -> Vec<Arc<dyn Implementation<Self>>>;

    /// See [`find`].
    ///
    /// # Errors
    /// A message that lists the ids there are.
    fn find(id: &str, plugin: Option<&Path>) -> Result<Arc<dyn Implementation<Self>>, String>;
}

impl RegisteredProblem for Problem {
    fn all(plugin: Option<&Path>) -> Vec<Arc<dyn Implementation>> {
        let mut all: Vec<Arc<dyn Implementation>> = vec![Arc::new(Native::default())];
        #[cfg(feature = "pjrt")]
        all.extend(Xla::all(plugin).into_iter().map(|xla| Arc::new(xla) as Arc<dyn Implementation>));
        #[cfg(not(feature = "pjrt"))]
        let _ = plugin;
        all.extend(DriverLoss::all().into_iter().map(|driven| Arc::new(driven) as Arc<dyn Implementation>));
        all
    }

    fn find(id: &str, plugin: Option<&Path>) -> Result<Arc<dyn Implementation>, String> {
        // A program from a manifest is in no list; every other id is searched for.
        if let Some(manifest) = id.strip_prefix(FILE_PREFIX) {
            return from_manifest(manifest, plugin);
        }
        let all = Self::all(plugin);
        called(id, &all).or_else(|| alternative(id, plugin)).ok_or_else(|| {
            // The id may belong to the other kind of problem, so the message lists both kinds.
            let (on_logits, heads) = (ids(&all), ids(&HeadProblem::all(plugin)));
            format!(
                "implementation: got `{id}`, expected one of: {on_logits}, {FILE_PREFIX}MANIFEST.toml; \
                 with an LM head: {heads}"
            )
        })
    }
}

impl RegisteredProblem for HeadProblem {
    fn all(plugin: Option<&Path>) -> Vec<Arc<dyn Implementation<Self>>> {
        #[allow(unused_mut, reason = "without PJRT there is but one")]
        let mut all: Vec<Arc<dyn Implementation<Self>>> = vec![Arc::new(NativeHead::default())];
        #[cfg(feature = "pjrt")]
        all.extend(XlaHead::all(plugin).into_iter().map(|head| Arc::new(head) as Arc<dyn Implementation<Self>>));
        #[cfg(not(feature = "pjrt"))]
        let _ = plugin;
        all
    }

    fn find(id: &str, plugin: Option<&Path>) -> Result<Arc<dyn Implementation<Self>>, String> {
        let all = Self::all(plugin);
        called(id, &all)
            .ok_or_else(|| format!("implementation: got `{id}`, expected one with an LM head: {}", ids(&all)))
    }
}

/// Every implementation there is of a kind of problem: `registry::<Problem>` of the loss on logits,
/// `registry::<HeadProblem>` of the LM head with the loss. Those that need a PJRT plugin use `plugin`, or where that is
/// `None` the one that the environment names or set-up installed. Tests, benches and commands iterate over it.
pub fn registry<P: RegisteredProblem>(plugin: Option<&Path>) -> Vec<Arc<dyn Implementation<P>>> {
    P::all(plugin)
}

/// Returns the implementations that run any shape without compiling: tests give them thousands of shapes.
pub fn immediate<P: RegisteredProblem>() -> Vec<Arc<dyn Implementation<P>>> {
    registry(None).into_iter().filter(|implementation| !compiles(&**implementation)).collect()
}

/// Returns the implementations that compile a program for each shape, on the devices of `plugin`: tests give them a few
/// shapes and every device count.
pub fn compiled<P: RegisteredProblem>(plugin: &Path) -> Vec<Arc<dyn Implementation<P>>> {
    registry(Some(plugin)).into_iter().filter(|implementation| compiles(&**implementation)).collect()
}

fn compiles<P: Workload>(implementation: &dyn Implementation<P>) -> bool {
    ["xla", "tile", "gpu"].contains(&implementation.class().trim_end_matches("-lm-head"))
}

/// The implementation called `id` in [`registry`], or another way to write `xla`; for `file:MANIFEST.toml` the program
/// that the manifest describes.
///
/// # Errors
/// A message that lists the ids there are, or says what is wrong with the manifest.
pub fn find<P: RegisteredProblem>(id: &str, plugin: Option<&Path>) -> Result<Arc<dyn Implementation<P>>, String> {
    P::find(id, plugin)
}

fn called<P: Workload>(id: &str, all: &[Arc<dyn Implementation<P>>]) -> Option<Arc<dyn Implementation<P>>> {
    all.iter().find(|implementation| implementation.id() == id).cloned()
}

fn ids<P: Workload>(all: &[Arc<dyn Implementation<P>>]) -> String {
    all.iter().map(|implementation| implementation.id()).collect::<Vec<_>>().join(", ")
}

/// Returns the program called `id` among the other ways to write `xla`, which are in no list and are only timed against
/// an implementation.
#[cfg(feature = "pjrt")]
fn alternative(id: &str, plugin: Option<&Path>) -> Option<Arc<dyn Implementation>> {
    let found = Xla::alternatives(plugin).into_iter().find(|program| program.id() == id)?;
    Some(Arc::new(found))
}

#[cfg(not(feature = "pjrt"))]
fn alternative(_: &str, _: Option<&Path>) -> Option<Arc<dyn Implementation>> {
    None
}

#[cfg(feature = "pjrt")]
fn from_manifest(manifest: &str, plugin: Option<&Path>) -> Result<Arc<dyn Implementation>, String> {
    let exported = ExportedProgram::read(manifest, plugin).map_err(|error| error.to_string())?;
    Ok(Arc::new(exported))
}

#[cfg(not(feature = "pjrt"))]
fn from_manifest(manifest: &str, _: Option<&Path>) -> Result<Arc<dyn Implementation>, String> {
    Err(format!("implementation: got `{FILE_PREFIX}{manifest}`, expected a build with the feature `pjrt`"))
}
