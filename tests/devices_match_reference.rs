//! Every implementation that runs on devices against the reference, through the judge: shapes, dtypes, device counts,
//! on every PJRT plugin that set-up installs, or on the one that `ASSAY_PJRT_PLUGIN` names.
//!
//! A plugin that is absent, or has too few devices, reads *ignored*.

#[path = "common/variants.rs"]
mod variants;

use std::env;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use assay::conformance::generate::{Recipe, Regime};
use assay::conformance::invariance::Invariance;
use assay::conformance::judge::judge;
use assay::conformance::report::{explain, on_devices};
use assay::conformance::suites;
use assay::conformance::tolerance::{Output, Tolerances};
use assay::implementation::Implementation;
use assay::problem::{Candidate, Dtype};
use assay::reference;
use assay::runtime::{Client, PLUGIN_VARIABLE, Plugin};
use assay::spec::{
    AdvantageLevel, Kl, KlEstimator, LossSpec, Objective, OldLogp, PpoClip, Reduction, Rows, TemperatureDivides,
};
use assay::xla::Xla;
use libtest_mimic::{Arguments, Failed, Trial};

const DEVICE_COUNTS: [usize; 4] = [1, 2, 4, 8];

/// Random specs a shape. `ASSAY_DEVICE_CASES` asks for more.
const STRUCTURES: usize = 3;

fn structures() -> usize {
    env::var("ASSAY_DEVICE_CASES").ok().map_or(STRUCTURES, |text| text.parse().expect("a number of specs a shape"))
}

/// Whether there is nothing to run on, and why.
type Hindrance = Option<String>;

/// A plugin under test.
struct Under {
    path: PathBuf,
    /// `C API 0.115`
    name: String,
    hindrance: Hindrance,
}

fn plugins() -> Vec<Under> {
    let given = env::var_os(PLUGIN_VARIABLE).map(PathBuf::from);
    let paths = given
        .map_or_else(|| vec![".plugins/pjrt_cpu.so".into(), ".plugins/pjrt_cpu_0_81.so".into()], |path| vec![path]);
    paths
        .into_iter()
        .map(|path: PathBuf| match Plugin::load(&path).and_then(|plugin| Client::shared(&path).map(|_| plugin)) {
            Ok(plugin) => {
                let (major, minor) = plugin.version();
                Under { name: format!("C API {major}.{minor}"), path, hindrance: None }
            }
            Err(error) => Under { name: path.display().to_string(), path, hindrance: Some(error.to_string()) },
        })
        .collect()
}

fn main() {
    let arguments = Arguments::from_args();
    let mut trials = Vec::new();
    for (first, plugin) in plugins().iter().enumerate().map(|(i, plugin)| (i == 0, plugin)) {
        for implementation in suites::compiled(&plugin.path) {
            let counts = implementation.device_counts();
            // What the tile kernels compute is settled on one plugin; of another it is asked whether it takes their loops.
            let tile = implementation.class() == "tile";
            if tile && !first {
                if takes(&*implementation, 1) {
                    let on =
                        Run { implementation: Arc::clone(&implementation), devices: 1, plugin: plugin.path.clone() };
                    let name =
                        format!("all_outputs_qwen_vocabulary_match_reference: {} {}", implementation.id(), plugin.name);
                    trials.push(trial(name, &plugin.hindrance, move || on.qwen_vocabulary()));
                }
                continue;
            }
            let several = Counts { implementation: Arc::clone(&implementation), plugin: plugin.path.clone() };
            if DEVICE_COUNTS.into_iter().filter(|&devices| takes(&*implementation, devices)).count() > 1 {
                let few = || format!("{} device counts, of {counts:?}", counts.len());
                let hindrance = plugin.hindrance.clone().or_else(|| (counts.len() < 2).then(few));
                let name =
                    format!("all_outputs_same_problem_any_device_count: {} {}", implementation.id(), plugin.name);
                trials.push(trial(name, &hindrance, move || several.agree()));
            }
            // Counts that this implementation never takes have no test; those that the plugin cannot give are ignored.
            for devices in DEVICE_COUNTS.into_iter().filter(|&devices| takes(&*implementation, devices)) {
                let hindrance = plugin.hindrance.clone().or_else(|| {
                    let few = format!("{devices} devices, of {counts:?}");
                    (!counts.contains(&devices)).then_some(few)
                });
                let on = Run { implementation: Arc::clone(&implementation), devices, plugin: plugin.path.clone() };
                let name = format!("{} {}", on_devices(implementation.id(), devices), plugin.name);
                for dtype in Dtype::KERNEL {
                    let on = on.clone();
                    let check = move || on.small_shapes(dtype);
                    trials.push(trial(
                        format!("all_outputs_{dtype}_any_spec_match_reference: {name}"),
                        &hindrance,
                        check,
                    ));
                }
                let check = {
                    let on = on.clone();
                    move || on.qwen_vocabulary()
                };
                trials.push(trial(format!("all_outputs_qwen_vocabulary_match_reference: {name}"), &hindrance, check));
                if implementation.id() == "tile-two-pass" {
                    let on = on.clone();
                    trials.push(trial(
                        format!("logp_entropy_forward_alone_match_reference: tile-entropy {}", plugin.name),
                        &hindrance,
                        move || on.forward_alone(),
                    ));
                }
                if tile && [1, 8].contains(&devices) {
                    let on = on.clone();
                    let check = move || on.awkward_shapes();
                    trials.push(trial(
                        format!("all_outputs_awkward_shapes_match_reference: {name}"),
                        &hindrance,
                        check,
                    ));
                }
                // The three that differ in what they compute, and rows that are cut: what tokens share is then on several devices.
                let differ = ["xla", "tile-one-pass", "tile-two-pass"].contains(&implementation.id());
                if first && (differ || implementation.id() == "xla-mesh" && devices == 8) {
                    let on = on.clone();
                    let check = move || on.every_variant();
                    trials.push(trial(format!("all_outputs_every_variant_match_reference: {name}"), &hindrance, check));
                }
                if first && ["xla", "tile-one-pass"].contains(&implementation.id()) {
                    let check = move || on.every_structure();
                    trials.push(trial(
                        format!("all_outputs_every_structure_match_reference: {name}"),
                        &hindrance,
                        check,
                    ));
                }
            }
        }
    }
    for plugin in plugins() {
        let name = format!("regressions_stay_mended: {}", plugin.name);
        trials.push(trial(name, &plugin.hindrance, move || regressions_stay_mended(&plugin.path)));
    }
    trials.push(tpu_plugin());
    let conclusion = libtest_mimic::run(&arguments, trials);
    let judged = JUDGED.load(Ordering::Relaxed);
    if judged > 0 && !conclusion.has_failed() {
        eprintln!("no false alarm of compiled implementations in {judged} cases, each of a fixed seed");
    }
    conclusion.exit();
}

/// Cases that a verdict was given on.
static JUDGED: AtomicUsize = AtomicUsize::new(0);

/// The cases that once failed, each with its reason, through the command that a user replays them with.
fn regressions_stay_mended(plugin: &Path) -> Result<(), Failed> {
    for entry in std::fs::read_dir("fixtures/regressions/devices")? {
        let path = entry?.path();
        if !std::fs::read_to_string(&path)?.starts_with("reason: ") {
            return Err(format!("{} does not say why it is kept", path.display()).into());
        }
        let mut gradcheck = assert_cmd::cargo::cargo_bin_cmd!("assay");
        let output = gradcheck.args(["gradcheck", "--config"]).arg(&path).arg("--plugin").arg(plugin).output()?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stdout).into_owned().into());
        }
    }
    Ok(())
}

/// libtpu, the newest C API there is, in a process of its own: it reads its settings when it is loaded, and may abort. It
/// creates a client where there is a TPU, and elsewhere says so in its own words: its argument structs were long enough.
fn tpu_plugin() -> Trial {
    const LIBTPU: &str = ".plugins/libtpu.so";
    let absent = !Path::new(LIBTPU).is_file();
    let hindrance = absent.then(|| format!("{LIBTPU} is missing: run `make setup-tpu`"));
    trial("libtpu_reaches_its_devices_or_says_that_there_are_none".into(), &hindrance, || {
        let mut list = assert_cmd::cargo::cargo_bin_cmd!("assay");
        let output = list.args(["list", "--plugin", LIBTPU]).env("TPU_SKIP_MDS_QUERY", "1").output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        // A reason is broken over lines.
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let reached =
            words.contains("device found") || text.lines().any(|line| line.contains("xla") && line.contains("yes"));
        if output.status.success() && reached { Ok(()) } else { Err(text.into()) }
    })
}

/// Whether an implementation takes so many devices for some shape, were they there.
fn takes(implementation: &dyn Implementation, devices: usize) -> bool {
    let shape = "8x8x64".parse().expect("a shape");
    implementation.supports(&LossSpec::default(), shape, Dtype::F32, devices).is_ok()
}

fn trial(name: String, hindrance: &Hindrance, check: impl FnOnce() -> Result<(), Failed> + Send + 'static) -> Trial {
    let ignored = hindrance.is_some();
    let name = hindrance.as_ref().map_or(name.clone(), |why| format!("{name} ({why})"));
    Trial::test(name, check).with_ignored_flag(ignored)
}

/// One implementation on every device count.
struct Counts {
    implementation: Arc<dyn Implementation>,
    plugin: PathBuf,
}

impl Counts {
    /// The same problems on every count: each answer within the gates of the reference, and so of every other; shares of
    /// tokens, which are counts, the same to the bit. With `--nocapture`, which other outputs keep their bits.
    fn agree(&self) -> Result<(), Failed> {
        for (spec, recipe) in suites::device_cases(Dtype::F32, 1, 1) {
            let mut first: Option<(usize, Candidate)> = None;
            for devices in self.implementation.device_counts() {
                let run =
                    Run { implementation: Arc::clone(&self.implementation), devices, plugin: self.plugin.clone() };
                let Some(outcome) = run.judge(&spec, &recipe)? else { continue };
                let Some((fewest, first)) = &first else {
                    first = Some((devices, outcome));
                    continue;
                };
                let shares = |outcome: &Candidate| {
                    let metrics = outcome.metrics.expect("ours return all outputs");
                    [metrics.clip_low, metrics.clip_high, metrics.clip_region]
                };
                if shares(first) != shares(&outcome) {
                    let (one, many) = (shares(first), shares(&outcome));
                    return Err(format!("clip shares {one:?} on {fewest} devices, {many:?} on {devices}").into());
                }
                println!(
                    "{} ×{devices} against ×{fewest}: {:?}",
                    run.implementation.id(),
                    Invariance::between(first, &outcome)
                );
            }
        }
        Ok(())
    }
}

/// One implementation on one device count.
#[derive(Clone)]
struct Run {
    implementation: Arc<dyn Implementation>,
    devices: usize,
    plugin: PathBuf,
}

impl Run {
    /// Judges one case; `None` where it is not supported.
    fn judge(&self, spec: &LossSpec, recipe: &Recipe) -> Result<Option<Candidate>, Failed> {
        let problem = recipe.problem(spec).expect("a valid recipe");
        let shape = problem.shape();
        if self.implementation.supports(spec, shape, recipe.dtype, self.devices).is_err() {
            return Ok(None);
        }
        let reference = reference::evaluate(spec, &problem).expect("a valid problem");
        let outcome =
            self.implementation.run(spec, problem.clone(), self.devices).map_err(|error| error.to_string())?;
        let id = self.implementation.id();
        let verdicts = judge(&reference, &outcome, self.implementation.class(), Tolerances::builtin());
        for verdict in verdicts.expect("every output has a tolerance") {
            if !verdict.passed() {
                let config = serde_json::json!({
                    "reason": "…",
                    "batch": { "generate": recipe },
                    "spec": spec,
                    "kernel": { "enabled": true, "impl": id, "devices": self.devices },
                });
                let plugin = self.plugin.display();
                let replay =
                    format!("save as NAME.json and run `assay gradcheck --plugin {plugin} --config` on it: {config}");
                let name = on_devices(id, self.devices);
                return Err(explain(&verdict, &reference, &problem, &name, &replay).into());
            }
        }
        JUDGED.fetch_add(1, Ordering::Relaxed);
        Ok(Some(outcome))
    }

    fn small_shapes(&self, dtype: Dtype) -> Result<(), Failed> {
        let mut judged = 0;
        // Each sharding and count begins at another shape.
        for (spec, recipe) in suites::device_cases(dtype, structures(), self.seed()) {
            judged += usize::from(self.judge(&spec, &recipe)?.is_some());
        }
        // Of any three shapes in turn, every count can cut one.
        if judged == 0 { Err("no case was supported".into()) } else { Ok(()) }
    }

    fn seed(&self) -> u64 {
        self.implementation.id().bytes().map(u64::from).sum::<u64>() + self.devices as u64
    }

    /// Qwen's vocabulary, 151,936 = 128 × 1187.
    fn qwen_vocabulary(&self) -> Result<(), Failed> {
        let spec = LossSpec { entropy_coef: 0.01, temperature: 0.7, ..LossSpec::default() };
        let mut judged = 0;
        for regime in [Regime::Small, Regime::Peaked, Regime::Confident] {
            let recipe = Recipe {
                shape: [1, 8, 151_936],
                dtype: Dtype::Bf16,
                regime,
                seed: 1,
                old_logp_noise_scale: 0.3,
                masked_garbage: true,
            };
            judged += usize::from(self.judge(&spec, &recipe)?.is_some());
        }
        if judged == 0 { Err("no case was supported".into()) } else { Ok(()) }
    }

    /// Logp and entropy of the kernel that computes nothing else; loss and gradient, which it lacks, are the reference's.
    fn forward_alone(&self) -> Result<(), Failed> {
        let all = Xla::all(Some(&self.plugin));
        let kernel = all.iter().find(|xla| xla.id() == "tile-entropy").expect("it is listed");
        for dtype in Dtype::KERNEL {
            for (spec, recipe) in suites::device_cases(dtype, 1, 5) {
                let problem = recipe.problem(&spec).expect("a valid recipe");
                let reference = reference::evaluate(&spec, &problem).expect("a valid problem");
                let [logp, entropy] = kernel.logp_and_entropy(&spec, &problem)?;
                let mut candidate: Candidate = reference.outcome().clone().into();
                (candidate.logp, candidate.entropy) = (Some(logp.into()), Some(entropy.into()));
                candidate.token_loss = None;
                candidate.metrics = None;
                let outputs = [Output::Logp, Output::Entropy];
                for verdict in judge(&reference, &candidate, "tile", Tolerances::builtin())? {
                    if outputs.contains(&verdict.gate.output) && !verdict.passed() {
                        return Err(explain(&verdict, &reference, &problem, "tile-entropy", "this test").into());
                    }
                }
            }
        }
        Ok(())
    }

    /// One token, one column, vocabularies around registers and without a common factor with anything, rows that no block
    /// divides.
    fn awkward_shapes(&self) -> Result<(), Failed> {
        let shapes = [[1, 1, 1], [1, 1, 127], [3, 7, 128], [1, 1, 129], [2, 17, 2049], [1, 8, 151_643]];
        let spec = LossSpec { kl: Some(Kl::plain(0.05, KlEstimator::K3)), entropy_coef: 0.01, ..LossSpec::default() };
        let mut judged = 0;
        for (i, shape) in shapes.into_iter().enumerate() {
            let recipe = Recipe {
                shape,
                dtype: Dtype::KERNEL[(i + self.devices) % Dtype::KERNEL.len()],
                regime: Regime::ALL[(i + self.implementation.id().len()) % Regime::ALL.len()],
                seed: i as u64,
                old_logp_noise_scale: 0.3,
                masked_garbage: true,
            };
            judged += usize::from(self.judge(&spec, &recipe)?.is_some());
        }
        if judged == 0 { Err("no case was supported".into()) } else { Ok(()) }
    }

    /// Every named choice of a spec, alone: a program to compile for each.
    fn every_variant(&self) -> Result<(), Failed> {
        for (i, variant) in variants::supported(&*self.implementation, self.devices).iter().enumerate() {
            for step in 0..3 {
                let judged = self.judge(&variant.spec, &variants::recipe(i, step))?;
                if judged.is_none() {
                    return Err(format!("{} is left out", variant.choice).into());
                }
            }
        }
        Ok(())
    }

    /// Every choice in a spec that shapes the program, with every other choice of another kind.
    fn every_structure(&self) -> Result<(), Failed> {
        let estimators = [KlEstimator::K1, KlEstimator::K2, KlEstimator::K3, KlEstimator::Abs];
        let reductions = [
            Reduction::TokenMean,
            Reduction::SequenceMean { rows: Rows::All },
            Reduction::SequenceMean { rows: Rows::NonEmpty },
            Reduction::FixedLength { rows: Rows::All, length: Some(7) },
        ];
        let temperatures =
            [(1.0, TemperatureDivides::Logits), (0.8, TemperatureDivides::Logits), (1.3, TemperatureDivides::Logp)];
        let others =
            [(OldLogp::Given, 0.0), (OldLogp::Given, 0.03), (OldLogp::Current, 0.0), (OldLogp::Current, -0.02)];
        // 5 estimators or none, 4 reductions and 3 temperatures have no common factor: 60 steps take each of all three.
        for step in 0..60 {
            let estimator = estimators.get(step % 5).copied();
            let (temperature, temperature_divides) = temperatures[step % 3];
            // Every fourth step holds the reduction; the quotient moves this choice past it.
            let (old_logp, entropy_coef) = others[(step + step / 4) % 4];
            let clip = PpoClip { delta: Some(1.7), dual_clip: Some(3.0), ..PpoClip::default() };
            let spec = LossSpec {
                objective: Objective::PpoClip(clip),
                advantages: if step % 2 == 0 { AdvantageLevel::Sequence } else { AdvantageLevel::Token },
                old_logp,
                temperature,
                temperature_divides,
                kl: estimator.map(|estimator| Kl::plain(0.07, estimator)),
                entropy_coef,
                reduction: reductions[step % 4],
                ..LossSpec::default()
            };
            let recipe = Recipe {
                shape: [3, 4, 33],
                dtype: Dtype::F32,
                regime: Regime::ALL[step % Regime::ALL.len()],
                seed: step as u64,
                old_logp_noise_scale: 0.5,
                masked_garbage: true,
            };
            self.judge(&spec, &recipe)?;
        }
        Ok(())
    }
}
