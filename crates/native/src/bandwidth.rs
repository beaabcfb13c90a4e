//! What memory allows: a copy and a read of a batch's logits, over the threads that a kernel is given. The bounds that a
//! kernel on this machine is measured against.

use std::time::{Duration, Instant};

use half::slice::HalfFloatSliceExt;
use ndarray::{Array3, Ix3};
use rayon::prelude::*;

use assay_core::problem::FloatArray;

/// Room for a copy of a batch's logits.
pub struct CopyOf<'l> {
    from: &'l FloatArray<Ix3>,
    to: FloatArray<Ix3>,
}

impl<'l> CopyOf<'l> {
    /// Room for `logits`, in memory that the system has handed out.
    pub fn of(logits: &'l FloatArray<Ix3>) -> Self {
        Self { from: logits, to: logits.clone() }
    }

    /// How long a copy takes: row by row, or a stretch for each thread, so long that the C library stores past the caches;
    /// whichever is faster.
    pub fn time(&mut self) -> Duration {
        match (self.from, &mut self.to) {
            (FloatArray::F64(from), FloatArray::F64(to)) => copy(from, to),
            (FloatArray::F32(from), FloatArray::F32(to)) => copy(from, to),
            (FloatArray::Bf16(from), FloatArray::Bf16(to)) => copy(from, to),
            (FloatArray::F16(from), FloatArray::F16(to)) => copy(from, to),
            _ => unreachable!("a clone has its original's dtype"),
        }
    }
}

fn copy<T: Copy + Send + Sync>(from: &Array3<T>, to: &mut Array3<T>) -> Duration {
    let row = from.dim().2;
    let (from, to) = (dense(from), to.as_slice_mut().expect("a clone is dense"));
    let stretch = from.len().div_ceil(rayon::current_num_threads());
    let mut in_chunks = |chunk: usize| {
        let started = Instant::now();
        to.par_chunks_mut(chunk).zip(from.par_chunks(chunk)).for_each(|(to, from)| to.copy_from_slice(from));
        started.elapsed()
    };
    in_chunks(row).min(in_chunks(stretch))
}

/// How long it takes to read every element once.
pub fn time_read(logits: &FloatArray<Ix3>) -> Duration {
    let started = Instant::now();
    let sum = match logits {
        FloatArray::F64(logits) => sum(logits, |row| row.iter().fold(0, |sum, x| sum ^ x.to_bits())),
        FloatArray::F32(logits) => sum(logits, |row| row.iter().fold(0, |sum, x| sum ^ x.to_bits()).into()),
        FloatArray::Bf16(logits) => sum(logits, |row| row.reinterpret_cast().iter().fold(0, |sum, x| sum ^ x).into()),
        FloatArray::F16(logits) => sum(logits, |row| row.reinterpret_cast().iter().fold(0, |sum, x| sum ^ x).into()),
    };
    std::hint::black_box(sum);
    started.elapsed()
}

fn sum<T: Sync>(logits: &Array3<T>, of_row: impl Fn(&[T]) -> u64 + Send + Sync) -> u64 {
    dense(logits).par_chunks(logits.dim().2).map(of_row).reduce(|| 0, |a, b| a ^ b)
}

fn dense<T>(logits: &Array3<T>) -> &[T] {
    logits.as_slice().expect("logits of a checked problem are dense")
}
