//! Steps under criterion: one evaluation of the loss and all its gradients. The answer is judged first; putting the
//! problem in place before each step and fetching the outputs after it are not timed.

use std::time::{Duration, Instant};

use assay::implementation::{Implementation, ProblemFormat};
use assay::judge::generate::{Recipe, Regime};
use assay::judge::report::on_devices;
use assay::judge::tolerance::Limits;
use assay::judge::trial::{JudgedProblem, hindrance};
use assay::problem::Dtype;
use assay::spec::LossSpec;
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput};

/// Calls `bench` with each shape and dtype, and a group whose throughput is bytes of logits read and dlogits written.
pub(crate) fn for_each_problem(
    criterion: &mut Criterion,
    shapes: &[[usize; 3]],
    mut bench: impl FnMut(&mut BenchmarkGroup<WallTime>, &JudgedProblem),
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
            let known = JudgedProblem::new(&spec, &problem).expect("a valid problem");
            let [b, t, v] = shape;
            let mut group = criterion.benchmark_group(format!("{b}x{t}x{v} {dtype}"));
            group.throughput(Throughput::Bytes((2 * b * t * v * dtype.size()) as u64));
            bench(&mut group, &known);
        }
    }
}

/// Times the steps of one implementation on so many devices, or says why it cannot.
pub(crate) fn bench_steps(
    group: &mut BenchmarkGroup<WallTime>,
    implementation: &dyn Implementation,
    known: &JudgedProblem,
    devices: usize,
) {
    let name = on_devices(implementation.id(), devices);
    let &JudgedProblem { spec, problem, .. } = known;
    let (shape, dtype) = (problem.shape(), problem.logits.dtype());
    if let Some(why) = hindrance(implementation, spec, problem, devices) {
        println!("{shape} {dtype} {name}: ignored, {why}");
        return;
    }
    let prepared = implementation
        .prepare(spec, ProblemFormat { shape, dtype, form: (), packed: None }, devices)
        .expect("supported");
    let load = || prepared.load(problem).expect("a valid problem");
    let outcome = load()().and_then(|answer| answer()).expect("supported");
    let judged = known
        .judge(outcome, &Limits::for_class(implementation.class()).expect("a class of ours"))
        .expect("every output has a tolerance");
    assert_eq!(known.failures(&judged, &name, "this bench"), Vec::<String>::new());
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
