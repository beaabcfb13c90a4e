//! Every implementation in the registry on a few shapes, in bytes of logits read and dlogits written a second.
//!
//! Each answer is judged before it is timed.

use std::hint::black_box;

use assay::conformance::generate::{Recipe, Regime};
use assay::conformance::judge::judge;
use assay::conformance::tolerance::Tolerances;
use assay::implementation::{Implementation, registry};
use assay::problem::{Dtype, Problem};
use assay::reference;
use assay::spec::LossSpec;
use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

/// A small vocabulary, and Qwen's at two batch sizes.
const SHAPES: [[usize; 3]; 3] = [[4, 64, 2049], [1, 16, 151_936], [4, 16, 151_936]];

fn implementations(criterion: &mut Criterion) {
    let spec = LossSpec::default();
    for shape in SHAPES {
        for dtype in Dtype::KERNEL {
            let recipe = Recipe {
                shape,
                dtype,
                regime: Regime::Peaked,
                seed: 0,
                old_logp_noise_scale: 0.3,
                masked_garbage: false,
            };
            let mut problem = recipe.problem(&spec).expect("a valid recipe");
            // Masked rows cost nothing to read; a bench of bytes has none.
            problem.mask.fill(true);
            let [b, t, v] = shape;
            let mut group = criterion.benchmark_group(format!("{b}x{t}x{v} {dtype}"));
            group.throughput(Throughput::Bytes((2 * b * t * v * dtype.size()) as u64));
            for implementation in registry(None) {
                let supported = implementation.supports(&spec, problem.shape(), dtype, 1).is_ok();
                if implementation.available().is_err() || !supported {
                    println!("{}: ignored, not supported here", implementation.id());
                    continue;
                }
                expect_right(&*implementation, &spec, &problem);
                group.bench_function(BenchmarkId::from_parameter(implementation.id()), |bencher| {
                    bencher.iter_batched(
                        || problem.clone(),
                        |problem| black_box(implementation.run(&spec, problem, 1).expect("supported")),
                        BatchSize::PerIteration,
                    );
                });
            }
        }
    }
}

fn expect_right(implementation: &dyn Implementation, spec: &LossSpec, problem: &Problem) {
    let reference = reference::evaluate(spec, problem).expect("a valid problem");
    let outcome = implementation.run(spec, problem.clone(), 1).expect("supported");
    let verdicts = judge(&reference, &outcome, implementation.class(), Tolerances::builtin());
    for verdict in verdicts.expect("every output has a tolerance") {
        assert!(verdict.passed(), "{} fails {}: {verdict:?}", implementation.id(), verdict.gate);
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(10);
    targets = implementations
}
criterion_main!(benches);
