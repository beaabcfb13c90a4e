//! The memory bound: a copy and a read of a batch's logits, over the threads that a kernel has. Kernels on this machine
//! are compared with it.

use std::time::{Duration, Instant};

use bytemuck::pod_align_to;
use ndarray::Ix3;
use rayon::prelude::*;

use assay_core::device_dtype::ArrayBytes as _;
use assay_core::problem::FloatArray;

/// Two arrays of the size of a batch's logits, for timing a copy.
pub struct LogitsCopy<'l> {
    from: &'l FloatArray<Ix3>,
    to: FloatArray<Ix3>,
}

impl<'l> LogitsCopy<'l> {
    /// Allocates the copy of `logits`, in pages that the system has already provided.
    pub fn new(logits: &'l FloatArray<Ix3>) -> Self {
        Self { from: logits, to: logits.clone() }
    }

    /// Times one copy: row by row, or one stretch per thread, which is long enough for the C library to store past the
    /// caches; returns the shorter time.
    pub fn time(&mut self) -> Duration {
        // Both ways to copy are timed, since neither is faster on every machine.
        let row = bytes_a_row(self.from);
        let (from, to) = (self.from.bytes(), self.to.bytes_mut());
        let stretch = from.len().div_ceil(rayon::current_num_threads());
        let mut in_chunks = |chunk: usize| {
            let started = Instant::now();
            to.par_chunks_mut(chunk).zip(from.par_chunks(chunk)).for_each(|(to, from)| to.copy_from_slice(from));
            started.elapsed()
        };
        in_chunks(row).min(in_chunks(stretch))
    }
}

/// Times a read of every element once.
pub fn time_read(logits: &FloatArray<Ix3>) -> Duration {
    /// Combines a row's bytes, eight at a time.
    fn xor_row(row: &[u8]) -> u64 {
        let (head, words, tail) = pod_align_to::<u8, u64>(row);
        words.iter().fold(0, |all, x| all ^ x) ^ head.iter().chain(tail).fold(0, |all, x| all ^ u64::from(*x))
    }
    let rows = logits.bytes().par_chunks(bytes_a_row(logits));
    let started = Instant::now();
    std::hint::black_box(rows.map(xor_row).reduce(|| 0, |a, b| a ^ b));
    started.elapsed()
}

fn bytes_a_row(logits: &FloatArray<Ix3>) -> usize {
    logits.shape()[2] * logits.dtype().size()
}
