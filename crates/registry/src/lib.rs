//! The list of implementations: every one there is, and the one that an id names.

use std::path::Path;
use std::sync::Arc;

use assay_core::implementation::{FILE_PREFIX, Implementation, Workload};
use assay_core::problem::{HeadProblem, Problem};
use assay_core::text::ForeignText;
use assay_cuda::DriverLoss;
use assay_native::{Native, NativeHead};
#[cfg(feature = "pjrt")]
use assay_pjrt::exported::ExportedProgram;
#[cfg(feature = "pjrt")]
use assay_pjrt::xla::{Xla, XlaHead};

/// The reason why a build without the feature `pjrt` has fewer implementations, and how to build one that has all.
#[cfg(not(feature = "pjrt"))]
pub const LACKS_PLUGINS: &str = "this build has no PJRT plugins, which xla, tile-…, gpu-… without -driver and file:… run through; in the \
     project's sources, with Rust, `make setup` and `cargo install --path .` build and install an `assay` that has them";

/// The result of a search for an implementation; the error lists the ids there are.
pub type FoundImplementation<P> = Result<Arc<dyn Implementation<P>>, String>;

/// Lists every implementation of the loss on logits. Those that need a PJRT plugin use `plugin`, or where that is `None` the
/// one that the environment names or set-up installed. Tests, benches and commands iterate over it.
pub fn registry(plugin: Option<&Path>) -> Vec<Arc<dyn Implementation>> {
    let mut all: Vec<Arc<dyn Implementation>> = vec![Arc::new(Native::default())];
    #[cfg(feature = "pjrt")]
    all.extend(Xla::all(plugin).into_iter().map(|xla| Arc::new(xla) as Arc<dyn Implementation>));
    #[cfg(not(feature = "pjrt"))]
    let _ = plugin;
    all.extend(DriverLoss::all().into_iter().map(|driven| Arc::new(driven) as Arc<dyn Implementation>));
    all
}

/// Lists every implementation of the LM head with the loss, as [`registry`] does for the loss on logits.
pub fn head_registry(plugin: Option<&Path>) -> Vec<Arc<dyn Implementation<HeadProblem>>> {
    #[allow(unused_mut, reason = "without PJRT there is but one")]
    let mut all: Vec<Arc<dyn Implementation<HeadProblem>>> = vec![Arc::new(NativeHead::default())];
    #[cfg(feature = "pjrt")]
    all.extend(XlaHead::all(plugin).into_iter().map(|head| Arc::new(head) as Arc<dyn Implementation<HeadProblem>>));
    #[cfg(not(feature = "pjrt"))]
    let _ = plugin;
    all
}

/// Returns the implementations that run any shape without compiling: tests give them thousands of shapes.
pub fn immediate() -> Vec<Arc<dyn Implementation>> {
    registry(None).into_iter().filter(|implementation| !compiles(&**implementation)).collect()
}

/// Returns the implementations with an LM head that run any shape without compiling.
pub fn immediate_heads() -> Vec<Arc<dyn Implementation<HeadProblem>>> {
    head_registry(None).into_iter().filter(|head| !compiles(&**head)).collect()
}

/// Returns the implementations that compile a program for each shape, on the devices of `plugin`: tests give them a few
/// shapes and every device count.
pub fn compiled(plugin: &Path) -> Vec<Arc<dyn Implementation>> {
    registry(Some(plugin)).into_iter().filter(|implementation| compiles(&**implementation)).collect()
}

/// Returns the implementations with an LM head that compile a program for each shape, on the devices of `plugin`.
pub fn compiled_heads(plugin: &Path) -> Vec<Arc<dyn Implementation<HeadProblem>>> {
    head_registry(Some(plugin)).into_iter().filter(|head| compiles(&**head)).collect()
}

fn compiles<P: Workload>(implementation: &dyn Implementation<P>) -> bool {
    ["xla", "tile", "gpu"].contains(&implementation.class().trim_end_matches("-lm-head"))
}

/// Returns the implementation called `id` in [`registry`], or another way to write `xla`; for `file:MANIFEST.toml` the
/// program that the manifest describes.
///
/// # Errors
/// A message that lists the ids there are, or says what is wrong with the manifest.
pub fn find(id: &str, plugin: Option<&Path>) -> FoundImplementation<Problem> {
    // A program from a manifest is in no list; every other id is searched for.
    if let Some(manifest) = id.strip_prefix(FILE_PREFIX) {
        return from_manifest(manifest, plugin);
    }
    let all = registry(plugin);
    called(id, &all).or_else(|| alternative(id, plugin)).ok_or_else(|| {
        // The id may belong to the other kind of problem, so the message lists both kinds.
        let (given, on_logits, heads) = (ForeignText::from(id), ids(&all), ids(&head_registry(plugin)));
        format!(
            "implementation: got `{given}`, expected one of: {on_logits}, {FILE_PREFIX}MANIFEST.toml; \
             with an LM head: {heads}{}",
            about_plugins()
        )
    })
}

/// Returns the implementation called `id` in [`head_registry`].
///
/// # Errors
/// A message that lists the ids there are.
pub fn find_head(id: &str, plugin: Option<&Path>) -> FoundImplementation<HeadProblem> {
    let all = head_registry(plugin);
    called(id, &all).ok_or_else(|| {
        let given = ForeignText::from(id);
        format!("implementation: got `{given}`, expected one with an LM head: {}{}", ids(&all), about_plugins())
    })
}

/// Returns the end of an error about an id: nothing, or why a build lacks most ids.
#[cfg(feature = "pjrt")]
fn about_plugins() -> String {
    String::new()
}

#[cfg(not(feature = "pjrt"))]
fn about_plugins() -> String {
    format!("; {LACKS_PLUGINS}")
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
fn from_manifest(manifest: &str, plugin: Option<&Path>) -> FoundImplementation<Problem> {
    let exported = ExportedProgram::read(manifest, plugin).map_err(|error| error.to_string())?;
    Ok(Arc::new(exported))
}

#[cfg(not(feature = "pjrt"))]
fn from_manifest(manifest: &str, _: Option<&Path>) -> FoundImplementation<Problem> {
    Err(format!("implementation: got `{FILE_PREFIX}{manifest}`, expected one without a plugin: {LACKS_PLUGINS}"))
}
