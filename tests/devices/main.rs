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
mod run;
mod tpu;

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use assay::cuda::DriverLogp;
use assay::cuda::driver::DRIVER_VARIABLE;
use assay::implementation::Implementation;
use assay::judge::report::on_devices;
use assay::judge::variants::Variant;
use assay::problem::{Dtype, Shape};
use assay::runtime::{PLUGIN_VARIABLE, Plugin};
use assay::spec::LossSpec;
use assay::suites::{covering, supported as variants};
use assay::xla::XlaEntropy;
use assay_testkit::arms::Arms;
use assay_testkit::plugins::client;
use assay_testkit::slowest;
use libtest_mimic::{Arguments, Failed, Trial};
use run::{Check, Run, forward_alone};

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
        for implementation in assay::registry::compiled(&plugin.path) {
            let of = Trials { plugin, implementation, found: &mut trials };
            if i == 0 { of.all() } else { of.on_another_plugin() }
        }
        let path = plugin.path.clone();
        let name = format!("regressions_stay_mended: {}", plugin.name);
        trials.push(trial(name, &plugin.hindrance, move || regressions_stay_mended(&path)));
    }
    let path = plugins[0].path.clone();
    trials.push(trial("xla_alternatives_reach_their_grades".into(), &plugins[0].hindrance, move || {
        alternatives::reach_their_grades(&path)
    }));
    let path = plugins[0].path.clone();
    let name = "gpu_programs_of_several_ids_interpreted_match_reference";
    trials.push(trial(name.into(), &plugins[0].hindrance, move || interpreted::several_ids(&path)));
    trials.push(tpu_plugin());
    trials.push(trial("cuda_driver_without_a_device_matches_reference".into(), &None, driver_without_a_device));
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
struct JudgedTally {
    cases: usize,
    /// Implementations, each on a device count and in a dtype.
    placed: BTreeSet<(String, usize, Dtype)>,
    /// The specs that `xla` was given.
    specs: Arms,
}

static JUDGED: LazyLock<Mutex<JudgedTally>> =
    LazyLock::new(|| Mutex::new(JudgedTally { cases: 0, placed: BTreeSet::new(), specs: Arms::default() }));

impl JudgedTally {
    /// What all trials together should have judged and did not: every implementation on every device count, and in every
    /// dtype, and every choice that a spec has under `xla`.
    fn missing(&self, plugin: &Under) -> Vec<String> {
        let mut missing = Vec::new();
        for implementation in assay::registry::compiled(&plugin.path) {
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
                let computed = Arms::from_specs(computed.iter().map(|variant| &variant.spec));
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

    /// Adds the trials of every device count. What is cut is tried on counts above one; what one device holds whole has one count.
    fn all(mut self) {
        let counts = self.counts();
        let available = self.available_counts();
        for devices in counts.iter().copied().filter(|devices| !available.contains(devices) && counts.len() > 1) {
            self.push("all_outputs_any_spec_any_dtype_match_reference", devices, "", |_| Ok(0));
        }
        let is_whole = counts.len() == 1;
        let counts = if is_whole { counts } else { available };
        let (Some(&least), Some(&largest)) = (counts.first(), counts.last()) else { return };
        let listed = counts.iter().skip(1).map(|devices| format!(" ×{devices}")).collect::<Vec<_>>().concat();
        let claim = "all_outputs_any_spec_any_dtype_match_reference";
        self.push(claim, least, &listed, move |run| run.any_spec(&counts));
        // A tile kernel computes whole blocks of rows, however few a device has: where rows are cut, wide ones are left to few devices, and
        // where nothing else is cut, to one.
        let id = self.implementation.id().to_string();
        let wide = if id.starts_with("tile") && !id.ends_with("-vocab") { least } else { largest };
        for (claim, check, is_wide, applies) in self.checks(is_whole) {
            if applies {
                let claim = format!("all_outputs_{claim}_match_reference");
                self.push(&claim, if is_wide { wide } else { largest }, "", move |run| check(&run));
            }
        }
        if is_whole {
            self.whole(&id, least);
        }
    }

    /// The checks on problems of a kind: the claim, the check, whether its rows are wide, and whether this implementation is to make it.
    fn checks(&self, is_whole: bool) -> [(&'static str, Check, bool, bool); 9] {
        let (id, class) = (self.implementation.id(), self.implementation.class());
        let among = |ids: &[&str]| ids.contains(&id);
        let tiles_cut = among(&["tile-one-pass-rows", "tile-two-pass-mesh"]);
        let kernels_whole = is_whole && ["tile", "gpu"].contains(&class);
        let several =
            ["xla", "xla-mesh", "tile-one-pass", "tile-two-pass", "tile-one-pass-rows", "tile-two-pass-vocab"];
        [
            ("qwen_vocabulary", Run::qwen_vocabulary, true, is_whole || !(class == "tile" && id.ends_with("-rows"))),
            ("of_parts", Run::parts, false, true),
            ("changed_logits", Run::changed_logits, false, true),
            ("awkward_shapes", Run::awkward_shapes, true, kernels_whole || tiles_cut),
            ("several_ids", Run::several_ids, false, among(&several)),
            ("extreme_logits", Run::extreme_logits, false, is_whole || id.ends_with("-vocab")),
            ("products_beyond_f32", Run::products_beyond_f32, false, among(&["xla", "tile-two-pass"])),
            ("packed_sequences", Run::packed, false, is_whole || tiles_cut || among(&["xla-rows", "xla-mesh"])),
            ("every_sum_over_tokens", Run::every_sum_over_tokens, false, id == "xla-mesh"),
        ]
    }

    /// Adds the trials that only one device makes: of structures, variants, and of kernels without a gradient.
    fn whole(&mut self, id: &str, devices: usize) {
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
    trial("libtpu_reaches_its_devices_or_reports_none".into(), &hindrance, || {
        let mut list = assert_cmd::cargo::cargo_bin_cmd!("assay");
        let output = list.args(["list", "--plugin", LIBTPU]).env("TPU_SKIP_MDS_QUERY", "1").output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        // A reason is broken over lines.
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let reached =
            words.contains("device found") || text.lines().any(|line| line.contains("xla") && line.contains("yes"));
        // A plugin without a device cannot be used, and the command says so by its exit code too.
        let listed = matches!(output.status.code(), Some(0 | 2));
        if listed && reached { Ok(()) } else { Err(text.into()) }
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
