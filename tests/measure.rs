//! Measures `worst_seen`: the largest `κ` that each gate needs over fixed seeds. `make measure` runs it; its output goes
//! into `tolerances.toml` by hand, with the limit at no more than 4 times as much. `ASSAY_MEASURE_CLASS` names the one
//! class to measure.

#[cfg(feature = "pjrt")]
#[path = "common/device_cases.rs"]
mod device_cases;
#[path = "common/implementations.rs"]
mod implementations;

use std::collections::BTreeMap;
use std::env;
use std::sync::Arc;

use assay::conformance::cases;
use assay::conformance::generate::{Recipe, Regime};
use assay::conformance::judge::judge;
use assay::conformance::tolerance::Tolerances;
use assay::implementation::Implementation;
use assay::problem::Dtype;
use assay::reference;
use assay::spec::LossSpec;
#[cfg(feature = "pjrt")]
use assay::spec::{Kl, KlEstimator, OldLogp};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

const RANDOM_CASES: usize = 20_000;

#[test]
#[ignore = "a measurement of minutes, not a check: run by `make measure`"]
fn kappa_of_every_gate() {
    let immediate = implementations::immediate();
    let mut seen = Seen::default();
    let mut runner = TestRunner::new_with_rng(Config::default(), TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let cases = (cases::any_spec(), cases::any_recipe());
    let mut next = || cases.new_tree(&mut runner).expect("no filter rejects").current();
    for _ in 0..RANDOM_CASES {
        let (spec, recipe) = next();
        seen.run_all(&immediate, &spec, &recipe);
    }
    for dtype in Dtype::KERNEL {
        // One non-target column: an error there is the whole row's, with nothing to average it away.
        // Equal logits round alike, so that a row's sum gathers their errors.
        for vocab in [2, 3, 5] {
            for seed in 0..100 {
                let (spec, recipe) = next();
                let narrow = Recipe { shape: [64, 64, vocab], dtype, seed, ..recipe };
                seen.run_all(&immediate, &spec, &narrow);
                seen.run_all(&immediate, &spec, &Recipe { regime: Regime::Ties, ..narrow });
            }
        }
        for regime in Regime::ALL {
            for seed in 0..3 {
                let (spec, recipe) = next();
                let wide = Recipe { shape: [1, 4, 151_936], dtype, regime, seed, ..recipe };
                seen.run_all(&immediate, &spec, &wide);
            }
        }
    }
    seen.print();
}

/// The same for what compiles a program for each shape: the shapes and device counts of `devices_match_reference`, narrow
/// vocabularies, and Qwen's.
#[cfg(feature = "pjrt")]
#[test]
#[ignore = "a measurement of minutes, not a check: run by `make measure`"]
fn kappa_of_every_device_gate() {
    let mut seen = Seen::default();
    for plugin in [".plugins/pjrt_cpu.so", ".plugins/pjrt_cpu_0_81.so"] {
        for implementation in implementations::compiled(plugin.as_ref()) {
            // Tile kernels take long to compile as loops, and sum in an order of their own on any plugin. Their rows are
            // computed one by one, so that cutting the batch changes nothing.
            let tile = implementation.class() == "tile";
            let batch_cut = ["-rows", "-mesh"].iter().any(|end| implementation.id().ends_with(end));
            if tile && (batch_cut || plugin != ".plugins/pjrt_cpu.so") {
                continue;
            }
            let counts = implementation.device_counts();
            let most = counts.last().copied();
            let counts =
                counts.into_iter().filter(|devices| devices.is_power_of_two() && (!tile || Some(*devices) == most));
            let structures = if tile { 4 } else { 8 };
            for devices in counts {
                for dtype in Dtype::KERNEL {
                    for (spec, recipe) in device_cases::cases(dtype, structures, devices as u64) {
                        seen.run(&*implementation, devices, &spec, &recipe);
                    }
                    let specs = [
                        LossSpec { entropy_coef: 0.02, temperature: 0.6, ..LossSpec::default() },
                        LossSpec { entropy_coef: 0.0, ..LossSpec::default() },
                    ];
                    for (spec, regime) in specs.iter().flat_map(|spec| Regime::ALL.map(|regime| (spec, regime))) {
                        for shape in [[64, 64, 2], [64, 64, 5], [1, 8, 151_936]] {
                            let (seed, old_logp_noise_scale, masked_garbage) = (devices as u64, 0.3, false);
                            let recipe = Recipe { shape, dtype, regime, seed, old_logp_noise_scale, masked_garbage };
                            seen.run(&*implementation, devices, spec, &recipe);
                        }
                    }
                }
            }
        }
    }
    seen.print();
}

/// The same where the policy is the reference policy: the gradient of the KL term is then all rounding, and a candidate
/// rounds another number than the reference does.
#[cfg(feature = "pjrt")]
#[test]
#[ignore = "a measurement of minutes, not a check: run by `make measure`"]
fn kappa_of_every_device_gate_at_zero_kl() {
    let mut seen = Seen::default();
    let all = implementations::compiled(".plugins/pjrt_cpu.so".as_ref());
    let called = |id: &str| all.iter().find(|implementation| implementation.id() == id).expect("it is registered");
    let on_counts =
        [("xla", 1), ("xla-vocab", 2), ("tile-one-pass", 1), ("tile-two-pass", 1), ("tile-two-pass-vocab", 2)];
    for estimator in [KlEstimator::K1, KlEstimator::K2, KlEstimator::K3, KlEstimator::Abs] {
        for old_logp in [OldLogp::Given, OldLogp::Current] {
            for dtype in Dtype::KERNEL {
                for (seed, regime) in (0..40_u32).flat_map(|seed| Regime::ALL.map(|regime| (seed, regime))) {
                    let beta = 0.01 + 0.02 * f64::from(seed % 25);
                    let spec = LossSpec { kl: Some(Kl::plain(beta, estimator)), old_logp, ..LossSpec::default() };
                    let (shape, seed) = ([2, 5, 131], u64::from(seed));
                    let recipe =
                        Recipe { shape, dtype, regime, seed, old_logp_noise_scale: 0.0, masked_garbage: false };
                    for (id, devices) in on_counts {
                        if id.starts_with("tile") && seed >= 8 {
                            continue;
                        }
                        seen.run(&**called(id), devices, &spec, &recipe);
                    }
                }
            }
        }
    }
    seen.print();
}

/// The largest `κ` by gate, and the case that needed it.
#[derive(Default)]
struct Seen(BTreeMap<String, (f64, String)>);

impl Seen {
    fn print(&self) {
        for (gate, (kappa, case)) in &self.0 {
            println!("{gate:40} {kappa:10.6}   {case}");
        }
    }

    fn run_all(&mut self, implementations: &[Arc<dyn Implementation>], spec: &LossSpec, recipe: &Recipe) {
        for implementation in implementations {
            self.run(&**implementation, 1, spec, recipe);
        }
    }

    /// Judges one case, where it is supported.
    fn run(&mut self, implementation: &dyn Implementation, devices: usize, spec: &LossSpec, recipe: &Recipe) {
        if env::var("ASSAY_MEASURE_CLASS").is_ok_and(|class| class != implementation.class()) {
            return;
        }
        let problem = recipe.problem(spec).expect("a valid recipe");
        if implementation.supports(spec, problem.shape(), recipe.dtype, devices).is_err() {
            return;
        }
        let reference = reference::evaluate(spec, &problem).expect("a valid problem");
        let outcome = implementation.run(spec, problem.clone(), devices).expect("supported");
        let verdicts = judge(&reference, &outcome, implementation.class(), Tolerances::builtin());
        for verdict in verdicts.expect("every output has a tolerance") {
            let gate = format!("{} {} {}", implementation.class(), verdict.gate, verdict.dtype);
            let worst = self.0.entry(gate).or_default();
            if verdict.tally.kappa_seen > worst.0 {
                let id = implementation.id();
                *worst = (verdict.tally.kappa_seen, format!("{id} on {devices}, {recipe:?} {spec:?}"));
            }
        }
    }
}
