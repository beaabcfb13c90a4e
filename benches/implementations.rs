//! The implementations that need no plugin, on a few shapes.

#[path = "common/steps.rs"]
mod steps;

use assay::registry::find;
use criterion::{Criterion, criterion_group, criterion_main};

/// A small vocabulary, and Qwen's at two batch sizes.
const SHAPES: [[usize; 3]; 3] = [[4, 64, 2049], [1, 16, 151_936], [4, 16, 151_936]];

fn implementations(criterion: &mut Criterion) {
    let native = find("native", None).expect("it is in the registry");
    steps::for_each_problem(criterion, &SHAPES, |group, known| {
        steps::bench_steps(group, &*native, known, 1);
    });
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(10);
    targets = implementations
}
criterion_main!(benches);
