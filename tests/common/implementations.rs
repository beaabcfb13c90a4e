//! Which of the two property suites an implementation belongs to. It is in one of them, whatever it is.

use std::path::Path;
use std::sync::Arc;

use assay::implementation::{Implementation, registry};

/// Those that run any shape at once: `implementations_match_reference` gives them thousands of shapes.
#[allow(dead_code, reason = "each suite takes one of the two")]
pub(crate) fn immediate() -> Vec<Arc<dyn Implementation>> {
    registry(None).into_iter().filter(|implementation| !compiles(&**implementation)).collect()
}

/// Those that compile a program for each shape, on the devices of `plugin`: `devices_match_reference` gives them a few
/// shapes and every device count.
#[allow(dead_code, reason = "each suite takes one of the two")]
pub(crate) fn compiled(plugin: &Path) -> Vec<Arc<dyn Implementation>> {
    registry(Some(plugin)).into_iter().filter(|implementation| compiles(&**implementation)).collect()
}

fn compiles(implementation: &dyn Implementation) -> bool {
    ["xla", "tile"].contains(&implementation.class())
}
