//! Ctrl-C, which ends a run between two of its steps.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What Ctrl-C sets, in place of ending the process: whoever looks at it ends in good order. Asked for once a process.
///
/// # Errors
/// That of the system, or of a second call.
pub fn stop_flag() -> Result<Arc<AtomicBool>, ctrlc::Error> {
    let stop = Arc::new(AtomicBool::new(false));
    let set = Arc::clone(&stop);
    ctrlc::set_handler(move || set.store(true, Ordering::Relaxed))?;
    Ok(stop)
}
