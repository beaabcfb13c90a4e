//! Every implementation that runs on devices against the reference, through the judge: shapes, dtypes, device counts,
//! on every PJRT plugin that set-up installs, or on the one that `ASSAY_PJRT_PLUGIN` names.
//!
//! A program takes a quarter of a second to compile and a problem milliseconds to run, so each program is given many
//! problems, and a program is compiled where it can be wrong in a way of its own: see docs/device-tests.md, which also
//! says which changes of the lowerings these tests were seen to catch.
//!
//! A plugin that is absent, or has too few devices, reads *ignored*.

mod alternatives;
mod gpu;
mod interpreted;
mod tpu;

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};

use assay::cuda::DriverLogp;
use assay::cuda::driver::DRIVER_VARIABLE;
use assay::implementation::{Implementation, RunError};
use assay::judge::generate::{Recipe, Regime};
use assay::judge::invariance::Invariance;
use assay::judge::packed::Twins;
use assay::judge::report::on_devices;
use assay::judge::tolerance::Limits;
use assay::judge::variants::Variant;
use assay::parts;
use assay::problem::{Advantages, Candidate, Dtype, FloatArray, Problem, Shape};
use assay::runtime::{PLUGIN_VARIABLE, Plugin};
use assay::spec::{
    Averaging, Kl, KlEstimator, LogitsTransform, LossSpec, Objective, OffPolicyMask, OldLogp, PpoClip, Ratio,
    RatioLevel, Reduction, Rows, Support, TemperatureDivides,
};
use assay::suites;
use assay::suites::{covering, supported as variants};
use assay::xla::XlaEntropy;
use assay_testkit::Known;
use assay_testkit::arms::Arms;
use assay_testkit::plugins::client;
use assay_testkit::slowest;
use libtest_mimic::{Arguments, Failed, Trial};
use ndarray::{Axis, Ix2};

const DEVICE_COUNTS: [usize; 4] = [1, 2, 4, 8];

/// Random specs an implementation, each in another dtype. `ASSAY_DEVICE_CASES` asks for more.
const STRUCTURES: usize = 3;

fn structures() -> usize {
    env::var("ASSAY_DEVICE_CASES").ok().map_or(STRUCTURES, |text| text.parse().expect("a number of specs"))
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
    let load = |path: &PathBuf| {
        let plugin = Plugin::load(path)?;
        client(path)?;
        Ok(plugin)
    };
    paths
        .into_iter()
        .map(|path: PathBuf| match load(&path) {
            Ok(plugin) => {
                let (major, minor) = plugin.version();
                Under { name: format!("C API {major}.{minor}"), path, hindrance: None }
            }
            Err::<_, assay::runtime::RuntimeError>(error) => {
                Under { name: path.display().to_string(), path, hindrance: Some(error.to_string()) }
            }
        })
        .collect()
}

fn main() {
    let arguments = Arguments::from_args();
    let mut trials = Vec::new();
    let plugins = plugins();
    for (i, plugin) in plugins.iter().enumerate() {
        for implementation in assay::registry::compiled::<Problem>(&plugin.path) {
            let of = Trials { plugin, implementation, found: &mut trials };
            if i == 0 { of.all() } else { of.on_another_plugin() }
        }
        let path = plugin.path.clone();
        let name = format!("regressions_stay_mended: {}", plugin.name);
        trials.push(trial(name, &plugin.hindrance, move || regressions_stay_mended(&path)));
    }
    let path = plugins[0].path.clone();
    trials.push(trial("other_ways_to_write_xla_reach_their_grades".into(), &plugins[0].hindrance, move || {
        alternatives::reach_their_grades(&path)
    }));
    let path = plugins[0].path.clone();
    let name = "programs_for_gpus_of_several_ids_interpreted_match_reference";
    trials.push(trial(name.into(), &plugins[0].hindrance, move || interpreted::several_ids(&path)));
    trials.push(tpu_plugin());
    trials.push(trial("what_cudas_driver_is_handed_matches_reference".into(), &None, driver_without_a_device));
    trials.extend(gpu::trials());
    trials.extend(tpu::trials());
    let all = arguments.filter.is_none() && arguments.skip.is_empty() && !arguments.list && !arguments.ignored;
    let conclusion = libtest_mimic::run(&arguments, trials);
    slowest::print();
    if all && !conclusion.has_failed() {
        let judged = JUDGED.lock().unwrap_or_else(PoisonError::into_inner);
        let missing = judged.missing(&plugins[0]);
        if !missing.is_empty() {
            eprintln!("judged by no trial: {missing:#?}");
            std::process::exit(101);
        }
        eprintln!("no false alarm of compiled implementations in {} cases, each of a fixed seed", judged.cases);
    }
    conclusion.exit();
}

/// What a verdict was given on.
struct Judged {
    cases: usize,
    /// Implementations, each on a device count and in a dtype.
    placed: BTreeSet<(String, usize, Dtype)>,
    /// The specs that `xla` was given.
    specs: Arms,
}

static JUDGED: LazyLock<Mutex<Judged>> =
    LazyLock::new(|| Mutex::new(Judged { cases: 0, placed: BTreeSet::new(), specs: Arms::default() }));

impl Judged {
    /// What all trials together should have judged and did not: every implementation on every device count, and in every
    /// dtype, and every choice that a spec has under `xla`.
    fn missing(&self, plugin: &Under) -> Vec<String> {
        let mut missing = Vec::new();
        for implementation in assay::registry::compiled::<Problem>(&plugin.path) {
            let of = Trials { plugin, implementation: Arc::clone(&implementation), found: &mut Vec::new() };
            let placed = || self.placed.iter().filter(|(id, ..)| id == implementation.id());
            let counts = of.available_counts();
            let unplaced = counts.iter().filter(|&&n| placed().all(|&(_, devices, _)| devices != n));
            missing.extend(unplaced.map(|&n| on_devices(implementation.id(), n)));
            let unread = Dtype::KERNEL.into_iter().filter(|&dtype| placed().all(|&(.., of)| of != dtype));
            missing.extend(
                unread.filter(|_| !counts.is_empty()).map(|dtype| format!("{} in {dtype}", implementation.id())),
            );
            if implementation.id() == "xla" && of.hindrance(1).is_none() {
                let computed = variants::supported(&*implementation, 1);
                let computed = Arms::of_specs(computed.iter().map(|variant| &variant.spec));
                missing.extend(self.specs.missing_of(&computed).into_iter().map(|arm| format!("xla with {arm}")));
            }
        }
        missing
    }
}

/// The trials of one implementation on one plugin.
struct Trials<'t> {
    plugin: &'t Under,
    implementation: Arc<dyn Implementation>,
    found: &'t mut Vec<Trial>,
}

impl Trials<'_> {
    /// The device counts that it takes, were they there: of what is cut, those above one, where its program is that of
    /// what is whole (`programs_cut_over_one_device_are_those_of_what_is_whole`).
    fn counts(&self) -> Vec<usize> {
        let takes = |devices: &usize| takes(&*self.implementation, *devices);
        let counts: Vec<usize> = DEVICE_COUNTS.into_iter().filter(takes).collect();
        if counts.len() > 1 { counts.into_iter().filter(|&devices| devices > 1).collect() } else { counts }
    }

    /// Why `devices` of the plugin cannot be had, or not by this implementation.
    fn hindrance(&self, devices: usize) -> Hindrance {
        let counts = self.implementation.device_counts();
        let few = || format!("{devices} devices, of {counts:?}");
        let unavailable = || self.implementation.available().err().map(|absent| absent.reason);
        // What the driver launches needs no plugin.
        let of_plugin = self.plugin.hindrance.clone().filter(|_| !self.is_driven());
        of_plugin.or_else(unavailable).or_else(|| (!counts.contains(&devices)).then(few))
    }

    /// What it computes in f32.
    fn supports(&self) -> impl Fn(&LossSpec, Shape) -> bool {
        |spec, shape| self.implementation.supports(spec, shape, Dtype::F32, 1).is_ok()
    }

    /// Whether CUDA's driver launches it.
    fn is_driven(&self) -> bool {
        self.implementation.id().ends_with("-driver")
    }

    /// What can be had of [`counts`](Self::counts); the trial of the others reads *ignored*.
    fn available_counts(&self) -> Vec<usize> {
        self.counts().into_iter().filter(|&devices| self.hindrance(devices).is_none()).collect()
    }

    fn push(
        &mut self,
        claim: &str,
        devices: usize,
        detail: &str,
        check: impl FnOnce(Run) -> Result<usize, Failed> + Send + 'static,
    ) {
        let on = on_devices(self.implementation.id(), devices);
        let name = format!("{claim}: {on}{detail} {}", self.plugin.name);
        let implementation = Arc::clone(&self.implementation);
        let run = Run { implementation, devices, plugin: self.plugin.path.clone() };
        let check = move || match check(run)? {
            0 => Err("nothing was judged".into()),
            _ => Ok(()),
        };
        self.found.push(trial(name, &self.hindrance(devices), check));
    }

    fn all(mut self) {
        let id = self.implementation.id().to_string();
        let counts = self.counts();
        if let [devices] = counts[..] {
            return self.whole(&id, devices);
        }
        let available = self.available_counts();
        for devices in counts.iter().copied().filter(|devices| !available.contains(devices)) {
            self.push("all_outputs_any_spec_any_dtype_match_reference", devices, "", |_| Ok(0));
        }
        let (Some(&least), Some(&largest)) = (available.first(), available.last()) else { return };
        let listed = available.iter().skip(1).map(|devices| format!(" ×{devices}")).collect::<Vec<_>>().concat();
        let claim = "all_outputs_any_spec_any_dtype_match_reference";
        self.push(claim, least, &listed, move |run| run.any_spec(&available));
        // A tile kernel computes whole blocks of rows, however few a device has: where rows are cut, wide ones are left to few devices, and
        // where nothing else is cut, to one.
        let is_tile = id.starts_with("tile");
        let of_wide = if is_tile && !id.ends_with("-vocab") { least } else { largest };
        if !(is_tile && id.ends_with("-rows")) {
            self.push("all_outputs_qwen_vocabulary_match_reference", of_wide, "", |run| run.qwen_vocabulary());
        }
        self.push("all_outputs_of_parts_match_reference", largest, "", |run| run.parts());
        self.push("all_outputs_changed_logits_match_reference", largest, "", |run| run.changed_logits());
        if ["tile-one-pass-rows", "tile-two-pass-mesh"].contains(&id.as_str()) {
            self.push("all_outputs_awkward_shapes_match_reference", of_wide, "", |run| run.awkward_shapes());
        }
        if ["xla-rows", "xla-mesh", "tile-one-pass-rows", "tile-two-pass-mesh"].contains(&id.as_str()) {
            self.push("all_outputs_packed_sequences_match_reference", largest, "", |run| run.packed());
        }
        if ["xla-mesh", "tile-one-pass-rows", "tile-two-pass-vocab"].contains(&id.as_str()) {
            self.push("all_outputs_several_ids_match_reference", largest, "", |run| run.several_ids());
        }
        if id.ends_with("-vocab") {
            let claim = "all_outputs_extreme_logits_match_reference";
            self.push(claim, largest, "", |run| run.extreme_logits());
        }
        if id == "xla-mesh" {
            let claim = "all_outputs_every_sum_over_tokens_match_reference";
            self.push(claim, largest, "", |run| run.every_sum_over_tokens());
        }
    }

    /// The trials of what one device holds whole.
    fn whole(&mut self, id: &str, devices: usize) {
        let claim = "all_outputs_any_spec_any_dtype_match_reference";
        self.push(claim, devices, "", move |run| run.any_spec(&[devices]));
        self.push("all_outputs_qwen_vocabulary_match_reference", devices, "", |run| run.qwen_vocabulary());
        self.push("all_outputs_of_parts_match_reference", devices, "", |run| run.parts());
        self.push("all_outputs_changed_logits_match_reference", devices, "", |run| run.changed_logits());
        if ["tile", "gpu"].contains(&self.implementation.class()) {
            self.push("all_outputs_awkward_shapes_match_reference", devices, "", |run| run.awkward_shapes());
        }
        if ["xla", "tile-one-pass", "tile-two-pass"].contains(&id) {
            self.push("all_outputs_several_ids_match_reference", devices, "", |run| run.several_ids());
        }
        let claim = "all_outputs_extreme_logits_match_reference";
        self.push(claim, devices, "", |run| run.extreme_logits());
        if ["xla", "tile-two-pass"].contains(&id) {
            self.push("all_outputs_products_beyond_f32_match_reference", devices, "", |run| run.products_beyond_f32());
        }
        self.push("all_outputs_packed_sequences_match_reference", devices, "", |run| run.packed());
        // The loss of a token has two lowerings: around every core, and within the kernel that reads logits once, which the interpreter
        // judges.
        if id == "xla" {
            let specs = covering::pairs(&self.supports());
            for (part, specs) in specs.chunks(specs.len().div_ceil(2)).map(<[_]>::to_vec).enumerate() {
                let detail = format!(" {}/2", part + 1);
                let claim = "all_outputs_every_pair_of_structures_match_reference";
                self.push(claim, devices, &detail, |run| run.structures(specs, None));
            }
        }
        // Here, that this kernel is handed what it asks for. How logits are stored has no part in that, and f16, which the kernel takes apart, makes
        // the longest programs. Around the kernels that CUDA's driver launches twice the loss is computed as native's is.
        if id == "tile-one-pass" || id == "gpu-two-pass-driver" && self.hindrance(devices).is_none() {
            let specs = covering::choices(&self.supports());
            let claim = "all_outputs_every_structure_match_reference";
            self.push(claim, devices, "", |run| run.structures(specs, Some(Dtype::F32)));
        }
        if id == "xla" && self.hindrance(devices).is_none() {
            let mut fields: BTreeMap<&str, Vec<(usize, Variant)>> = BTreeMap::new();
            for (i, variant) in variants::supported(&*self.implementation, devices).into_iter().enumerate() {
                fields.entry(variant.field).or_default().push((i, variant));
            }
            for (field, variants) in fields {
                let claim = "all_outputs_every_variant_match_reference";
                self.push(claim, devices, &format!(" {field}"), |run| run.variants(variants, variants::SHAPE));
            }
        }
        let claim = "logp_entropy_forward_alone_match_reference";
        if id == "tile-two-pass" {
            self.push(claim, devices, "", |run| {
                let kernel = XlaEntropy::new(Some(&run.plugin));
                forward_alone(&["tile-entropy", "tile"], |spec, problem| kernel.logp_and_entropy(spec, problem))
            });
        }
        if id == "gpu-two-pass-driver" {
            self.push(claim, devices, "", |_| {
                let kernel = DriverLogp::default();
                forward_alone(&["gpu-logp", "gpu"], |spec, problem| kernel.logp_and_entropy(spec, problem))
            });
        }
    }

    /// What this crate computes is settled on the first plugin; of another it is asked whether it runs each kind of
    /// program: what is cut, on all its devices, and a tile kernel's loops.
    fn on_another_plugin(mut self) {
        if self.is_driven() {
            return;
        }
        let largest = *self.counts().last().expect("every implementation takes some count");
        if self.implementation.class() == "tile" {
            if self.implementation.id() == "tile-two-pass" {
                self.push("all_outputs_qwen_vocabulary_match_reference", 1, "", |run| run.qwen_vocabulary());
            }
        } else {
            let claim = "all_outputs_any_spec_any_dtype_match_reference";
            self.push(claim, largest, "", move |run| run.on(largest).specs(1, &[largest]));
        }
    }
}

/// The cases that once failed, each with its reason, through the command that a user replays them with.
fn regressions_stay_mended(plugin: &Path) -> Result<(), Failed> {
    let mut seen = 0;
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
        seen += 1;
    }
    if seen == 0 { Err("fixtures/regressions/devices holds no case".into()) } else { Ok(()) }
}

/// The trials of the kernels that CUDA's driver launches, in a process of its own, on a driver whose launches the interpreter of PTX
/// runs. On a machine with a GPU they run here too, on the real one.
fn driver_without_a_device() -> Result<(), Failed> {
    let driver = Path::new(env!("CARGO_BIN_EXE_assay")).with_file_name("examples").join("libfake_cuda.so");
    if !driver.is_file() {
        return Err(format!("{} is missing: `cargo build --workspace --examples`", driver.display()).into());
    }
    let mut trials = Command::new(env::current_exe()?);
    let output = trials.args(["--test-threads", "2", "pass-driver"]).env(DRIVER_VARIABLE, driver).output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let ran = |id: &str| text.lines().filter(|line| line.contains(id) && line.trim_end().ends_with("... ok")).count();
    let enough = ran("gpu-one-pass-driver") == 7 && ran("gpu-two-pass-driver") == 9;
    if output.status.success() && enough && text.contains(" 0 ignored") { Ok(()) } else { Err(text.into()) }
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
    Trial::test(name.clone(), move || slowest::timed(name, check)).with_ignored_flag(ignored)
}

/// Qwen's vocabulary, 151,936 = 128 × 1187, in three regimes.
fn qwen() -> &'static [(Recipe, Known<'static>)] {
    static KNOWN: OnceLock<Vec<(Recipe, Known<'static>)>> = OnceLock::new();
    KNOWN.get_or_init(|| {
        let spec = Box::leak(Box::new(LossSpec { entropy_coef: 0.01, temperature: 0.7.into(), ..LossSpec::default() }));
        let of = |regime| {
            let recipe = Recipe {
                shape: [1, 8, 151_936],
                dtype: Dtype::Bf16,
                regime,
                seed: 1,
                old_logp_noise_scale: 0.3,
                masked_garbage: true,
            };
            let problem: &Problem = Box::leak(Box::new(recipe.problem(spec).expect("a valid recipe")));
            (recipe, Known::of(spec, problem).expect("a valid problem"))
        };
        [Regime::Small, Regime::Peaked, Regime::Confident].map(of).into()
    })
}

/// Whether `|ref_logp − logp|` is at its kink to the last bit. XLA's CPU compiler works logp out twice in the loops of a tile kernel, for
/// the target and for the other columns, rounds it in two ways, and finds two signs: the row is then on no side of the kink.
fn at_a_kink((spec, recipe): &(LossSpec, Recipe)) -> bool {
    recipe.old_logp_noise_scale == 0.0 && spec.kl.as_ref().is_some_and(|kl| kl.estimator == KlEstimator::Abs)
}

/// Logp and entropy of a kernel that computes nothing else, of a name and a class.
fn forward_alone(
    [name, class]: &[&str; 2],
    kernel: impl Fn(&LossSpec, &Problem) -> Result<[FloatArray<Ix2>; 2], RunError>,
) -> Result<usize, Failed> {
    let mut judged = 0;
    for dtype in Dtype::KERNEL {
        for (spec, recipe) in suites::device_cases(dtype, 1, 5) {
            let LossSpec { temperature, temperature_divides, .. } = spec;
            let spec = LossSpec { temperature, temperature_divides, ..LossSpec::from_cotangents(false) };
            let problem = recipe.problem(&spec).expect("a valid recipe");
            let known = Known::of(&spec, &problem).expect("a valid problem");
            let [logp, entropy] = kernel(&spec, &problem)?.map(Some);
            let candidate = Candidate {
                loss: None,
                gradient: (),
                logp,
                logp_of_others: None,
                entropy,
                token_loss: None,
                metrics: None,
            };
            let verdicts = known.verdicts_of_forward(&candidate, &Limits::of(class)?)?;
            if let Some(verdict) = verdicts.iter().find(|verdict| !verdict.passed()) {
                return Err(known.explain(verdict, name, "this test").to_string().into());
            }
            judged += 1;
        }
    }
    Ok(judged)
}

/// One implementation on one device count. Its checks return how many cases were judged.
#[derive(Clone)]
struct Run {
    implementation: Arc<dyn Implementation>,
    devices: usize,
    plugin: PathBuf,
}

impl Run {
    fn on(&self, devices: usize) -> Self {
        Self { devices, ..self.clone() }
    }

    fn takes(&self, spec: &LossSpec, [batch, tokens, vocab]: [usize; 3], dtype: Dtype) -> bool {
        let shape = assay::problem::Shape { batch, tokens, vocab };
        self.implementation.supports(spec, shape, dtype, self.devices).is_ok()
    }

    /// Judges one case, which is supported.
    fn judge(&self, spec: &LossSpec, recipe: &Recipe) -> Result<Candidate, Failed> {
        let problem = recipe.problem(spec).map_err(|error| format!("{error}: {recipe:?} {spec:?}"))?;
        self.judge_known(&Known::of(spec, &problem).expect("a valid problem"), recipe)
    }

    fn judge_known(&self, known: &Known, recipe: &Recipe) -> Result<Candidate, Failed> {
        let (spec, id) = (known.spec, self.implementation.id());
        let name = on_devices(id, self.devices);
        let judged = known.run(&*self.implementation, self.devices);
        let judged = judged.map_err(|error| format!("{name}: {error}: {recipe:?} {spec:?}"))?;
        let config = serde_json::json!({
            "reason": "…",
            "batch": { "generate": recipe },
            "spec": spec,
            "kernel": { "enabled": true, "impl": id, "devices": self.devices },
        });
        let plugin = self.plugin.display();
        let replay = format!("save as NAME.json and run `assay gradcheck --plugin {plugin} --config` on it: {config}");
        if let Some(failure) = known.failures(&judged, &name, &replay).into_iter().next() {
            return Err(failure.into());
        }
        let mut all = JUDGED.lock().unwrap_or_else(PoisonError::into_inner);
        all.cases += 1;
        all.placed.insert((id.into(), self.devices, recipe.dtype));
        if id == "xla" {
            all.specs.spec(spec);
        }
        drop(all);
        Ok(judged.outcome)
    }

    fn any_spec(&self, counts: &[usize]) -> Result<usize, Failed> {
        self.specs(structures(), counts)
    }

    /// Random specs, each in another dtype and in every regime, on each of `counts`: each answer within the gates of the
    /// reference, and so of every other; shares of tokens, which are counts, the same to the bit. Where there are few specs, the first is
    /// run on fewest and most devices, and each other on another count. With `--nocapture`, which other outputs keep their bits.
    fn specs(&self, specs: usize, counts: &[usize]) -> Result<usize, Failed> {
        const DRAWN: usize = 32;
        let mut judged = 0;
        // Each implementation begins at another shape.
        let seed = self.implementation.id().bytes().map(u64::from).sum::<u64>();
        for i in 0..specs {
            let dtype = Dtype::KERNEL[i % Dtype::KERNEL.len()];
            let counts = match counts {
                [fewest, .., most] if specs <= STRUCTURES && i == 0 => vec![*fewest, *most],
                [_, _, ..] if specs <= STRUCTURES => vec![counts[i % counts.len()]],
                all => all.to_vec(),
            };
            let cases = suites::device_cases(dtype, DRAWN, seed + i as u64);
            let takes = |regimes: &&[(LossSpec, Recipe)]| {
                let (spec, recipe) = &regimes[0];
                let computed = counts.iter().all(|&devices| self.on(devices).takes(spec, recipe.shape, dtype));
                computed && !(self.implementation.class() == "tile" && regimes.iter().any(at_a_kink))
            };
            let Some(regimes) = cases.chunks(Regime::FINITE.len()).find(takes) else {
                return Err(format!("none of {DRAWN} specs in {dtype} is supported").into());
            };
            for (spec, recipe) in regimes {
                let mut first: Option<(usize, Candidate)> = None;
                for &devices in &counts {
                    let outcome = self.on(devices).judge(spec, recipe)?;
                    judged += 1;
                    match &first {
                        None => first = Some((devices, outcome)),
                        Some((fewest, first)) => self.agree((*fewest, first), (devices, &outcome))?,
                    }
                }
            }
        }
        Ok(judged)
    }

    fn agree(&self, (fewest, first): (usize, &Candidate), (devices, other): (usize, &Candidate)) -> Result<(), Failed> {
        let shares = |outcome: &Candidate| {
            let metrics = outcome.metrics.expect("ours return all outputs");
            [metrics.clip_low, metrics.clip_high, metrics.clip_region]
        };
        if shares(first) != shares(other) {
            let (one, many) = (shares(first), shares(other));
            return Err(format!("clip shares {one:?} on {fewest} devices, {many:?} on {devices}").into());
        }
        let bits = Invariance::between(first, other);
        println!("{} ×{devices} against ×{fewest}: {bits:?}", self.implementation.id());
        Ok(())
    }

    fn qwen_vocabulary(&self) -> Result<usize, Failed> {
        for (recipe, known) in qwen() {
            self.judge_known(known, recipe)?;
        }
        Ok(qwen().len())
    }

    /// Five sequences in one row, one of them without a token, whose ends no device's part and no tile ends at.
    fn packed(&self) -> Result<usize, Failed> {
        let rows = Averaging { reduction: Reduction::SequenceMean { rows: Rows::NonEmpty }, denominator_epsilon: 0.5 };
        let by_token = LossSpec {
            reduction: Reduction::SequenceMean { rows: Rows::All },
            kl: Some(Kl { averaging: Some(rows), ..Kl::plain(0.05, KlEstimator::K3) }),
            entropy_coef: 0.01,
            entropy_averaging: Some(rows),
            ..LossSpec::default()
        };
        let by_sequence = LossSpec {
            ratio: Ratio { level: RatioLevel::Sequence, ..Ratio::default() },
            off_policy_mask: Some(OffPolicyMask { threshold: 0.02, behaviour: OldLogp::Given }),
            ..by_token.clone()
        };
        let mut judged = 0;
        for (spec, dtype) in [(by_token, Dtype::F32), (by_sequence, Dtype::Bf16)] {
            let recipe = Recipe {
                shape: [5, 7, 131],
                dtype,
                regime: Regime::Normal,
                seed: 12,
                old_logp_noise_scale: 0.3,
                masked_garbage: true,
            };
            let mut padded = recipe.problem(&spec)?;
            padded.mask.row_mut(3).fill(false);
            let twins = Twins::of(&spec, &padded).expect("no weights");
            let lengths: Vec<usize> = twins.packed.sequences().iter().map(|sequence| sequence.tokens.len()).collect();
            assert!(lengths.contains(&0) && lengths.iter().sum::<usize>() > 2 * self.devices, "{lengths:?}");
            if self.takes(&twins.spec, [1, twins.packed.mask.ncols(), 131], dtype) {
                self.judge_known(&Known::of(&twins.spec, &twins.packed)?, &recipe)?;
                judged += 1;
            }
        }
        Ok(judged)
    }

    /// Products of seventeen ratios below and beyond f32's largest number, e^88.72, whichever sign the advantage has: the clip wins.
    fn products_beyond_f32(&self) -> Result<usize, Failed> {
        const SUMS: [f64; 4] = [88.0, 88.7, 88.8, 200.0];
        let spec = LossSpec {
            objective: Objective::PpoClip(PpoClip { dual_clip: Some(3.0), ..PpoClip::default() }),
            ratio: Ratio { level: RatioLevel::SequenceProduct, ..Ratio::default() },
            reduction: Reduction::SequenceMean { rows: Rows::All },
            ..LossSpec::default()
        };
        let recipe = Recipe {
            shape: [8, 17, 131],
            dtype: Dtype::F32,
            regime: Regime::Normal,
            seed: 3,
            old_logp_noise_scale: 0.3,
            masked_garbage: true,
        };
        let mut problem = recipe.problem(&spec)?;
        problem.advantages = Advantages::Sequence((0..8).map(|b| if b < 4 { 0.7 } else { -1.3 }).collect());
        let logp = assay::reference::evaluate(&spec, &problem)?.outcome().logp.to_f64();
        let counts = problem.mask.map_axis(Axis(1), |row| row.iter().filter(|counts| **counts).count() as f64);
        let old_logp = problem.old_logp.as_mut().expect("a recipe has one");
        for ((b, t), old_logp) in old_logp.indexed_iter_mut() {
            *old_logp = logp[[b, t]] - SUMS[b % 4] / counts[b];
        }
        let known = Known::of(&spec, &problem).expect("a valid problem");
        let judged = self.judge_known(&known, &recipe)?;
        let loss = judged.loss.expect("ours return all outputs").to_f64();
        assert!(loss.iter().all(|loss| loss.is_finite()), "{loss}");
        Ok(1)
    }

    /// One token, one column, vocabularies around registers and without a common factor with anything, rows that no block
    /// divides. What is cut takes those with something for each device, and not Qwen's vocabulary.
    fn awkward_shapes(&self) -> Result<usize, Failed> {
        let shapes = [[1, 1, 1], [1, 1, 127], [3, 7, 128], [1, 1, 129], [2, 17, 2049], [1, 8, 151_643]];
        let spec = LossSpec { kl: Some(Kl::plain(0.05, KlEstimator::K3)), entropy_coef: 0.01, ..LossSpec::default() };
        let mut judged = 0;
        for (i, shape) in shapes.into_iter().enumerate() {
            let recipe = Recipe {
                shape,
                dtype: Dtype::KERNEL[(i + self.devices) % Dtype::KERNEL.len()],
                regime: Regime::FINITE[(i + self.implementation.id().len()) % Regime::FINITE.len()],
                seed: i as u64,
                old_logp_noise_scale: 0.3,
                masked_garbage: true,
            };
            let is_whole = self.devices == 1;
            if self.takes(&spec, shape, recipe.dtype) && (is_whole || shape[2] < 10_000) {
                self.judge(&spec, &recipe)?;
                judged += 1;
            }
        }
        Ok(judged)
    }

    /// A cap and a bias, and columns that are left out: a few, and all from one on, which several of eight devices have alone. Targets
    /// among them are put back.
    fn changed_logits(&self) -> Result<usize, Failed> {
        let spec = LossSpec {
            logits: LogitsTransform { scale: 0.5, softcap: Some(5.0), bias: true },
            support: Support { vocab: Some(70), excluded_ids: vec![0, 3, 64], keep_sampled: true },
            temperature: 0.8.into(),
            temperature_divides: TemperatureDivides::Logp,
            entropy_coef: 0.02,
            ..LossSpec::default()
        };
        let dtype = Dtype::KERNEL[self.implementation.id().len() % Dtype::KERNEL.len()];
        for (seed, regime) in (0..).zip(Regime::FINITE) {
            let recipe =
                Recipe { shape: [4, 8, 131], dtype, regime, seed, old_logp_noise_scale: 0.3, masked_garbage: true };
            self.judge(&spec, &recipe)?;
        }
        Ok(Regime::FINITE.len())
    }

    /// Logp of four ids a token, some of them the same, and its gradient, with a cap, a bias and columns that are left out.
    fn several_ids(&self) -> Result<usize, Failed> {
        let spec = LossSpec {
            logits: LogitsTransform { scale: -0.5, softcap: Some(20.0), bias: true },
            support: Support { vocab: Some(129), excluded_ids: vec![0, 3, 64], keep_sampled: false },
            temperature: 0.8.into(),
            ids_per_token: 4,
            ..LossSpec::from_cotangents(false)
        };
        let dtype = Dtype::KERNEL[self.implementation.id().len() % Dtype::KERNEL.len()];
        for (seed, regime) in (0..).zip(Regime::FINITE) {
            let recipe =
                Recipe { shape: [4, 8, 131], dtype, regime, seed, old_logp_noise_scale: 0.3, masked_garbage: true };
            self.judge(&spec, &recipe)?;
        }
        Ok(Regime::FINITE.len())
    }

    /// In two parts, by the limits of the whole.
    fn parts(&self) -> Result<usize, Failed> {
        let tokens = Averaging { reduction: Reduction::TokenMean, denominator_epsilon: 0.0 };
        let spec = LossSpec {
            reduction: Reduction::SequenceMean { rows: Rows::NonEmpty },
            kl: Some(Kl { averaging: Some(tokens), ..Kl::plain(0.1, KlEstimator::K3) }),
            entropy_coef: 0.02,
            ..LossSpec::default()
        };
        let recipe = Recipe {
            shape: [8, 8, 96],
            dtype: Dtype::F32,
            regime: Regime::Normal,
            seed: 5,
            old_logp_noise_scale: 0.3,
            masked_garbage: true,
        };
        let problem = recipe.problem(&spec)?;
        let known = Known::of(&spec, &problem)?;
        let candidate = parts::run(&*self.implementation, &spec, &problem, 2, self.devices)?;
        let judged = known.judge(candidate, &Limits::of(self.implementation.class())?)?;
        let name = on_devices(self.implementation.id(), self.devices);
        match known.failures(&judged, &name, "this trial").into_iter().next() {
            Some(failure) => Err(failure.into()),
            None => Ok(1),
        }
    }

    /// Masks written as the lowest number of a dtype, in half of the columns; rows of nothing else; and rows around the largest
    /// number. Then tokens whose own logit is −∞: their ratio is 0, their logp −∞.
    fn extreme_logits(&self) -> Result<usize, Failed> {
        let spec = LossSpec { entropy_coef: 0.01, ..LossSpec::default() };
        let recipe = |dtype| Recipe {
            shape: [4, 8, 264],
            dtype,
            regime: Regime::Normal,
            seed: 1,
            old_logp_noise_scale: 0.3,
            masked_garbage: false,
        };
        let mut judged = 0;
        for dtype in Dtype::KERNEL {
            let recipe = recipe(dtype);
            let mut problem = recipe.problem(&spec)?;
            let lowest = match dtype {
                Dtype::F16 => f64::from(half::f16::MIN),
                Dtype::Bf16 => f64::from(half::bf16::MIN),
                _ => f64::from(f32::MIN),
            };
            let mut logits = problem.logits.to_f64();
            for ((b, t, v), x) in logits.indexed_iter_mut() {
                let sampled = usize::try_from(problem.ids[[b, t]])? == v;
                match b {
                    0 if v % 2 == 0 && !sampled => *x = lowest,
                    1 => *x = lowest,
                    2 => *x = -lowest - if sampled { 0.0 } else { -lowest / 256.0 },
                    _ => {}
                }
            }
            problem.logits = FloatArray::rounded_from(&logits, dtype);
            self.judge_known(&Known::of(&spec, &problem)?, &recipe)?;
            self.target_holes(&spec, &recipe)?;
            judged += 2;
        }
        // Columns that a sampler cut off.
        let recipe_of_sets = recipe(Dtype::Bf16);
        let problem = suites::sampler::within_top_k_and_top_p(&spec, &recipe_of_sets.problem(&spec)?, 20, 0.95);
        self.judge_known(&Known::of(&spec, &problem)?, &recipe_of_sets)?;
        judged += 1;
        // Another softmax for the bonus than for logp.
        if self.devices == 1 {
            let of_logp =
                LossSpec { temperature: 0.7.into(), temperature_divides: TemperatureDivides::Logp, ..spec.clone() };
            self.target_holes(&of_logp, &recipe(Dtype::Bf16))?;
            judged += 1;
        }
        Ok(judged)
    }

    fn target_holes(&self, spec: &LossSpec, recipe: &Recipe) -> Result<(), Failed> {
        let recipe = Recipe { regime: Regime::TargetHoles, masked_garbage: true, ..recipe.clone() };
        let problem = recipe.problem(spec)?;
        let known = Known::of(spec, &problem)?;
        let outcome = self.judge_known(&known, &recipe)?;
        let logp = outcome.logp.as_ref().ok_or("no logp")?;
        let of_reference = |(b, t)| known.reference.token(b, t).map(|token| token.inputs.logp);
        let counting = problem.mask.indexed_iter().filter(|(_, counts)| **counts).map(|(at, _)| at);
        let holes: Vec<_> = counting.filter(|&at| of_reference(at) == Some(f64::NEG_INFINITY)).collect();
        if holes.is_empty() || !known.reference.loss().is_finite() {
            return Err(format!("{recipe:?} shows little").into());
        }
        match holes.into_iter().find(|&(b, t)| logp.at(b, t) != f64::NEG_INFINITY) {
            Some((b, t)) => Err(format!("logp[{b},{t}] is {}: {recipe:?} {spec:?}", logp.at(b, t)).into()),
            None => Ok(()),
        }
    }

    /// Named choices of a spec, alone, each with its place among all.
    fn variants(&self, variants: Vec<(usize, Variant)>, shape: [usize; 3]) -> Result<usize, Failed> {
        const PROBLEMS: usize = 3;
        for (i, variant) in &variants {
            for step in 0..PROBLEMS {
                self.judge(&variant.spec, &Recipe { shape, ..variants::recipe(*i, step) })?;
            }
        }
        Ok(PROBLEMS * variants.len())
    }

    /// The named choices under which tokens of a row, or rows, share a number, where rows are cut as well as the batch:
    /// what differs from a program for one device is their sums.
    fn every_sum_over_tokens(&self) -> Result<usize, Failed> {
        let shares = |spec: &LossSpec| {
            spec.ratio.level != RatioLevel::Token
                || matches!(spec.objective, Objective::Vespo(_))
                || spec.off_policy_mask.is_some()
                || spec.reduction != Reduction::TokenMean
                || spec.entropy_averaging.is_some()
                || spec.kl.as_ref().is_some_and(|kl| kl.averaging.is_some())
        };
        let all = variants::supported(&*self.implementation, self.devices).into_iter().enumerate();
        // Six rows of six tokens: four devices a half of the columns, two for each half of the rows.
        self.variants(all.filter(|(_, variant)| shares(&variant.spec)).collect(), [6, 6, 33])
    }

    /// In `dtype`, or each in another.
    fn structures(&self, specs: Vec<LossSpec>, dtype: Option<Dtype>) -> Result<usize, Failed> {
        let mut judged = 0;
        for (i, spec) in specs.iter().enumerate() {
            // The last so far off that exponentials of a difference overflow.
            for (step, old_logp_noise_scale) in [0.5, 0.5, 60.0].into_iter().enumerate() {
                let recipe = variants::recipe(i, step);
                let dtype = dtype.unwrap_or(recipe.dtype);
                self.judge(spec, &Recipe { dtype, old_logp_noise_scale, ..recipe })?;
                judged += 1;
            }
        }
        Ok(judged)
    }
}
