//! The implementations that run through a PJRT plugin, on a few shapes and on one to eight devices. The devices of a CPU
//! plugin share the machine's cores and memory: there, more of them compute the same on smaller arrays.

#[path = "common/steps.rs"]
mod steps;

use assay::xla::Xla;
use criterion::{Criterion, criterion_group, criterion_main};

/// A small vocabulary, and Qwen's.
const SHAPES: [[usize; 3]; 2] = [[4, 64, 2049], [1, 64, 151_936]];

const DEVICES: [usize; 4] = [1, 2, 4, 8];

fn pjrt(criterion: &mut Criterion) {
    let all = Xla::all(None);
    steps::for_each_problem(criterion, &SHAPES, |group, known| {
        for implementation in &all {
            for devices in DEVICES {
                steps::bench_steps(group, implementation, known, devices);
            }
        }
    });
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(10);
    targets = pjrt
}
criterion_main!(benches);
