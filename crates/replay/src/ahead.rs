//! [`compile_ahead`]: implementations run one by one, while the programs of the next are compiled.

use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;

use assay_core::implementation::{Implementation, ProblemFormat};
use assay_core::spec::LossSpec;
use assay_judge::judgeable::Judgeable;

/// Implementations whose programs are compiled before they run. Fewer programs than are kept for who asks again, on as many device
/// counts as there are.
const AHEAD: usize = 8;

/// The device counts to run on: those `asked` for, or the most that `implementation` takes the problem on.
pub(crate) fn device_counts<P: Judgeable>(
    asked: &[usize],
    implementation: &dyn Implementation<P>,
    spec: &LossSpec,
    problem: &P,
) -> Vec<usize> {
    if !asked.is_empty() {
        return asked.to_vec();
    }
    let counts = implementation.device_counts();
    let supported = |devices: &usize| {
        let supports = |given| implementation.supports_given(spec, given, *devices);
        ProblemFormat::from_problem(spec, problem).is_ok_and(|given| supports(given).is_ok())
    };
    vec![counts.iter().rev().copied().find(supported).or(counts.first().copied()).unwrap_or(1)]
}

/// Calls `run` with each of `implementations` in order, until one returns an error. While one runs and is judged, the programs of the next
/// [`AHEAD`] are compiled for the device counts `asked` for, one a thread: half of a compile leaves the other cores idle.
pub(crate) fn compile_ahead<P: Judgeable + Sync, E>(
    implementations: &[Arc<dyn Implementation<P>>],
    (spec, problem): (&LossSpec, &P),
    asked: &[usize],
    mut run: impl FnMut(&dyn Implementation<P>) -> Result<(), E>,
) -> Result<(), E> {
    let (next, ahead) = mpsc::channel::<&dyn Implementation<P>>();
    let ahead = Mutex::new(ahead);
    let take = || ahead.lock().unwrap_or_else(PoisonError::into_inner).recv();
    let compile = || {
        while let Ok(implementation) = take() {
            for devices in device_counts(asked, implementation, spec, problem) {
                // Whatever hinders it is said where it is run.
                if let Ok(given) = ProblemFormat::from_problem(spec, problem) {
                    drop(implementation.prepare(spec, given, devices));
                }
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..rayon::current_num_threads().min(AHEAD) {
            scope.spawn(compile);
        }
        let mut left = implementations.iter();
        let mut compile_one = || {
            if let Some(one) = left.next() {
                next.send(&**one).expect("`ahead` outlives this");
            }
        };
        (0..AHEAD).for_each(|_| compile_one());
        let checked = implementations.iter().try_for_each(|implementation| {
            compile_one();
            run(&**implementation)
        });
        drop(next);
        // Where one has ended in an error, none is left to compile.
        while take().is_ok() {}
        checked
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use assay_core::implementation::{Prepared, RunError, Unavailable, Unsupported};
    use assay_core::problem::{Candidate, Dtype, Problem, Shape};
    use assay_judge::generate::{Recipe, Regime};
    use assay_registry::find;

    use super::*;

    /// The number of implementations that were prepared and run, and the most that were prepared and not yet run.
    #[derive(Debug, Default)]
    struct RunCounts {
        prepared: usize,
        run: usize,
        most: usize,
    }

    /// The implementation `native`, which counts its calls.
    struct CountedImplementation {
        native: Arc<dyn Implementation>,
        counts: Arc<Mutex<RunCounts>>,
    }

    impl Implementation for CountedImplementation {
        fn id(&self) -> &str {
            self.native.id()
        }

        fn summary(&self) -> &str {
            self.native.summary()
        }

        fn class(&self) -> &str {
            self.native.class()
        }

        fn available(&self) -> Result<(), Unavailable> {
            Ok(())
        }

        fn supports(&self, spec: &LossSpec, shape: Shape, dtype: Dtype, devices: usize) -> Result<(), Unsupported> {
            self.native.supports(spec, shape, dtype, devices)
        }

        fn run(&self, spec: &LossSpec, problem: Problem, devices: usize) -> Result<Candidate, RunError> {
            // Whoever compiles has time to go too far.
            while self.counts.lock().unwrap().prepared < AHEAD {
                thread::yield_now();
            }
            thread::sleep(Duration::from_millis(2));
            self.counts.lock().unwrap().run += 1;
            self.native.run(spec, problem, devices)
        }

        fn prepare<'s>(
            &'s self,
            spec: &'s LossSpec,
            given: ProblemFormat<Problem>,
            devices: usize,
        ) -> Result<Box<dyn Prepared + 's>, RunError> {
            let mut counts = self.counts.lock().unwrap();
            counts.prepared += 1;
            counts.most = counts.most.max(counts.prepared - counts.run);
            self.native.prepare(spec, given, devices)
        }
    }

    #[test]
    fn replay_compiles_ahead_of_runs_but_not_all_at_once() {
        let (native, counts) = (find("native", None).unwrap(), Arc::default());
        let counting = |_| Arc::new(CountedImplementation { native: Arc::clone(&native), counts: Arc::clone(&counts) });
        let implementations: Vec<Arc<dyn Implementation>> = (0..3 * AHEAD).map(|i| counting(i) as Arc<_>).collect();
        let spec = LossSpec::default();
        let (shape, dtype, regime) = ([1, 2, 5], Dtype::F32, Regime::Normal);
        let recipe = Recipe { shape, dtype, regime, seed: 1, old_logp_noise_scale: 0.3, masked_garbage: false };
        let problem = recipe.problem(&spec).unwrap();
        let run = |one: &dyn Implementation| one.run(&spec, problem.clone(), 1).map(drop);
        compile_ahead(&implementations, (&spec, &problem), &[], run).unwrap();
        let RunCounts { prepared, run, most } = &*counts.lock().unwrap();
        assert_eq!([prepared, run], [&implementations.len(); 2]);
        assert!((AHEAD..=AHEAD + 1).contains(most), "{most} were compiled before they ran");
    }
}
