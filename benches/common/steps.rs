//! Steps under criterion: one evaluation of the loss and all its gradients. The answer is judged first; putting the
//! problem in place before each step and fetching the outputs after it are not timed.

use std::time::{Duration, Instant};

use assay::implementation::{Given, Implementation};
use assay::judge::generate::{Recipe, Regime};
use assay::judge::judge::judge;
use assay::judge::report::on_devices;
use assay::judge::tolerance::Tolerances;
use assay::problem::{Dtype, Problem};
use assay::reference::{self, Reference};
use assay::spec::LossSpec;
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput};

/// Calls `bench` with each shape and dtype, and a group whose throughput is bytes of logits read and dlogits written.
pub(crate) fn for_each_problem(
    criterion: &mut Criterion,
    shapes: &[[usize; 3]],
    mut bench: impl FnMut(&mut BenchmarkGroup<WallTime>, &Problem, &Reference),
) {
    let spec = LossSpec::default();
    for &shape in shapes {
        for dtype in Dtype::KERNEL {
            let recipe = Recipe {
                shape,
                dtype,
                regime: Regime::Peaked,
                seed: 0,
                old_logp_noise_scale: 0.3,
                masked_garbage: false,
            };
            let problem = recipe.unmasked_problem(&spec).expect("a valid recipe");
            let reference = reference::evaluate(&spec, &problem).expect("a valid problem");
            let [b, t, v] = shape;
            let mut group = criterion.benchmark_group(format!("{b}x{t}x{v} {dtype}"));
            group.throughput(Throughput::Bytes((2 * b * t * v * dtype.size()) as u64));
            bench(&mut group, &problem, &reference);
        }
    }
}

/// Times the steps of one implementation on so many devices, or says why it cannot.
pub(crate) fn bench_steps(
    group: &mut BenchmarkGroup<WallTime>,
    implementation: &dyn Implementation,
    problem: &Problem,
    reference: &Reference,
    devices: usize,
) {
    let name = on_devices(implementation.id(), devices);
    let (spec, shape, dtype) = (reference.spec(), problem.shape(), problem.logits.dtype());
    let hindrance = implementation
        .available()
        .map_err(|why| why.to_string())
        .and_then(|()| implementation.supports(spec, shape, dtype, devices).map_err(|why| why.to_string()));
    if let Err(why) = hindrance {
        println!("{shape} {dtype} {name}: ignored, {why}");
        return;
    }
    let prepared = implementation.prepare(spec, Given { shape, dtype, form: () }, devices).expect("supported");
    let load = || prepared.load(problem).expect("a valid problem");
    let outcome = load()().and_then(|answer| answer()).expect("supported");
    let verdicts = judge(reference, &outcome, implementation.class(), Tolerances::builtin());
    for verdict in verdicts.expect("every output has a tolerance") {
        assert!(verdict.passed(), "{name} fails {}: {verdict:?}", verdict.gate);
    }
    group.bench_function(BenchmarkId::from_parameter(name), |bencher| {
        bencher.iter_custom(|steps| {
            let timed = |_| {
                let step = load();
                let started = Instant::now();
                let answer = step().expect("as before");
                let took = started.elapsed();
                drop(answer);
                took
            };
            (0..steps).map(timed).sum::<Duration>()
        });
    });
}
