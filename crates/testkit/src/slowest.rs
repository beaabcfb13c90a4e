//! The time that trials took, for harnesses that do not report it: `setup/test.sh` lists the slowest of a run.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

static TOOK: Mutex<Vec<(Duration, String)>> = Mutex::new(Vec::new());

/// Runs `check`, and keeps how long it took.
pub fn timed<T>(name: String, check: impl FnOnce() -> T) -> T {
    let started = Instant::now();
    let result = check();
    TOOK.lock().unwrap_or_else(PoisonError::into_inner).push((started.elapsed(), name));
    result
}

/// One line for each trial that ran, the slowest first.
pub fn print() {
    let mut all = TOOK.lock().unwrap_or_else(PoisonError::into_inner);
    all.sort_by(|a, b| b.cmp(a));
    for (took, name) in all.iter() {
        println!("took <{:.3}s> {name}", took.as_secs_f64());
    }
}
