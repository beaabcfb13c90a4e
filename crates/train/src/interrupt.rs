//! Ctrl-C, which ends a run between two of its steps.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Installs a handler of Ctrl-C that sets the returned flag instead of ending the process, so that a run can end after a
/// step. It can be installed once a process.
///
/// # Errors
/// The error of the system, or of a second call.
pub fn stop_flag() -> Result<Arc<AtomicBool>, ctrlc::Error> {
    let stop = Arc::new(AtomicBool::new(false));
    let set = Arc::clone(&stop);
    ctrlc::set_handler(move || set.store(true, Ordering::Relaxed))?;
    Ok(stop)
}
