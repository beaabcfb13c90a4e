//! Rows over threads, each of which has its own buffer for exponentials.

use rayon::prelude::*;

use crate::row::SavedExponentials;

/// The computation of one row.
pub(crate) struct RowTask<'t, T> {
    columns: usize,
    /// Boxed, which costs nothing compared with a row, so that rayon's part of the loop, which is as long as a kernel, is not compiled
    /// for each kernel, dtype and way to come by rows.
    compute: Box<dyn FnOnce(&mut SavedExponentials) -> T + Send + 't>,
}

impl<'t, T> RowTask<'t, T> {
    /// Creates the task of a row of `columns` logits, which `compute` is called for with its thread's buffer for exponentials.
    pub(crate) fn new(columns: usize, compute: impl FnOnce(&mut SavedExponentials) -> T + Send + 't) -> Self {
        Self { columns, compute: Box::new(compute) }
    }
}

/// The number of logits up to which the calling thread computes all rows: ten or twenty microseconds of work.
///
/// A thread of the pool is woken in as much, and in milliseconds where callers are more than processors, as eight devices of JAX on two
/// cores are: those that wait for the pool and those that work for it take turns.
const ONE_THREAD: usize = 1 << 14;

/// Runs all tasks, each on a thread that is free, and returns their results in order; few logits are computed on the calling thread.
pub(crate) fn over_threads<'t, T: Send>(tasks: impl Iterator<Item = RowTask<'t, T>>) -> Vec<T> {
    fn all<T: Send>(tasks: Vec<RowTask<T>>) -> Vec<T> {
        if tasks.iter().map(|task| task.columns).sum::<usize>() <= ONE_THREAD {
            let mut saved = SavedExponentials::default();
            return tasks.into_iter().map(|task| (task.compute)(&mut saved)).collect();
        }
        let compute = |saved: &mut SavedExponentials, task: RowTask<T>| (task.compute)(saved);
        tasks.into_par_iter().map_init(SavedExponentials::default, compute).collect()
    }
    all(tasks.collect())
}
