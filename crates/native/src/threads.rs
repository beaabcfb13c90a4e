//! Rows over threads, each of which has its own buffer for exponentials.

use rayon::prelude::*;

use crate::row::SavedExponentials;

/// A closure that computes one row, given its thread's buffer for exponentials.
pub(crate) type RowTask<'t, T> = Box<dyn FnOnce(&mut SavedExponentials) -> T + Send + 't>;

/// Runs all tasks, each on a thread that is free, and returns their results in order.
///
/// A task is boxed, which costs nothing compared with a row, so that rayon's part of the loop, which is as long as a
/// kernel, is not compiled for each kernel, dtype and way to come by rows.
pub(crate) fn over_threads<'t, T: Send>(tasks: impl Iterator<Item = RowTask<'t, T>>) -> Vec<T> {
    fn all<T: Send>(tasks: Vec<RowTask<T>>) -> Vec<T> {
        tasks.into_par_iter().map_init(SavedExponentials::default, |saved, task| task(saved)).collect()
    }
    all(tasks.collect())
}
