//! The largest `κ` that each gate has needed over fixed seeds, beside the one it is allowed.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use indicatif::HumanCount;
use serde::Serialize;

use assay_core::implementation::Implementation;
use assay_core::problem::{Dtype, HeadProblem, ProblemError};
use assay_core::spec::{Kl, KlEstimator, LossSpec, OldLogp};
use assay_judge::gate::Gate;
use assay_judge::generate::{HeadRecipe, Recipe, RecipeError, Regime};
use assay_judge::judge::Verdict;
use assay_judge::judgeable::Judgeable;
use assay_judge::trial::{self, JudgedProblem};

/// Random cases of a whole measurement; with fewer, the seeds of all other cases are fewer in proportion.
pub const CASES: usize = 20_000;

/// One problem for one implementation.
#[derive(Clone)]
pub struct MeasuredCase {
    work: CaseWork,
    /// File name of the plugin that it runs on.
    plugin: Option<String>,
    devices: usize,
    spec: LossSpec,
}

#[derive(Clone)]
enum CaseWork {
    Logits(Arc<dyn Implementation>, Recipe),
    Head(Arc<dyn Implementation<HeadProblem>>, HeadRecipe),
}

impl CaseWork {
    fn class(&self) -> &str {
        match self {
            CaseWork::Logits(implementation, _) => implementation.class(),
            CaseWork::Head(implementation, _) => implementation.class(),
        }
    }

    /// Returns the number of vocabulary entries `V`.
    fn vocab(&self) -> usize {
        match self {
            CaseWork::Logits(_, recipe) | CaseWork::Head(_, HeadRecipe { recipe, .. }) => recipe.shape[2],
        }
    }
}

impl fmt::Display for MeasuredCase {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match &self.work {
            CaseWork::Logits(implementation, recipe) => {
                write!(f, "{} on {}, {recipe:?}", implementation.id(), self.devices)?;
            }
            CaseWork::Head(implementation, recipe) => {
                write!(f, "{} on {}, {recipe:?}", implementation.id(), self.devices)?;
            }
        }
        write!(f, " {:?}", self.spec)
    }
}

/// The implementations that a measurement runs.
#[derive(Clone, Default)]
pub struct MeasuredImplementations {
    /// Implementations on logits that run any shape without compiling.
    pub immediate: Vec<Arc<dyn Implementation>>,
    /// Implementations with an LM head that run any shape without compiling.
    pub immediate_heads: Vec<Arc<dyn Implementation<HeadProblem>>>,
    /// Implementations that compile a program for each shape, by plugin.
    pub compiled: Vec<CompiledImplementations>,
}

/// The implementations that run on the devices of one plugin.
#[derive(Clone)]
pub struct CompiledImplementations {
    /// The path of the plugin's library.
    pub plugin: PathBuf,
    /// Implementations of the loss on logits.
    pub on_logits: Vec<Arc<dyn Implementation>>,
    /// Implementations of the loss with an LM head.
    pub heads: Vec<Arc<dyn Implementation<HeadProblem>>>,
}

/// The classes that there are measurements for, by what hinders them here.
///
/// ```
/// use std::sync::Arc;
///
/// use assay_native::Native;
/// use assay_suites::measure::{MeasuredImplementations, classes};
///
/// let all = MeasuredImplementations { immediate: vec![Arc::new(Native::default())], ..Default::default() };
/// assert_eq!(classes(&all)["native"], None);
/// ```
pub fn classes(all: &MeasuredImplementations) -> BTreeMap<String, Option<String>> {
    let mut classes = BTreeMap::new();
    let compiled = all.compiled.iter().flat_map(|on| &on.on_logits);
    // A class can be measured where any of its implementations can run.
    for implementation in all.immediate.iter().chain(compiled) {
        let hindrance = implementation.available().err().map(|why| why.reason);
        let found = classes.entry(implementation.class().to_string()).or_insert_with(|| hindrance.clone());
        if hindrance.is_none() {
            *found = None;
        }
    }
    let compiled = all.compiled.iter().flat_map(|on| &on.heads);
    for head in all.immediate_heads.iter().chain(compiled) {
        let hindrance = head.available().err().map(|why| why.reason);
        classes.entry(head.class().to_string()).or_insert(hindrance);
    }
    classes
}

/// The cases of a measurement, of one `class` or all: `random` random ones for what runs any shape at once, narrow and
/// wide vocabularies; for what compiles a program for each shape, the shapes and device counts of its tests, on each
/// plugin, and where the policy is the reference policy.
///
/// ```
/// use std::sync::Arc;
///
/// use assay_native::Native;
/// use assay_suites::measure::{Measurement, MeasuredImplementations, cases};
///
/// let all = MeasuredImplementations { immediate: vec![Arc::new(Native::default())], ..Default::default() };
/// let mut measured = Measurement::default();
/// for case in cases(Some("native"), 3, &all).iter().take(3) {
///     measured.add(case).unwrap();
/// }
/// assert!(measured.needed().all(|(_, needed)| needed.kappa <= needed.allowed));
/// ```
pub fn cases(class: Option<&str>, random: usize, all: &MeasuredImplementations) -> Vec<MeasuredCase> {
    // The number of all other seeds is in proportion to the random cases that are asked for.
    let seeds = |of_all: usize| of_all * random / CASES;
    let wanted = |implementation: &&Arc<dyn Implementation>| class.is_none_or(|class| class == implementation.class());
    let mut cases = Vec::new();
    for implementation in all.immediate.iter().filter(wanted) {
        let on = CasePlacement { implementation: Arc::clone(implementation), plugin: None, devices: 1 };
        on.any_shape(random, seeds, &mut cases);
    }
    let wanted_head = |head: &&Arc<dyn Implementation<HeadProblem>>| class.is_none_or(|class| class == head.class());
    for head in all.immediate_heads.iter().filter(wanted_head) {
        any_head(head, random / 2, seeds, &mut cases);
    }
    for (i, CompiledImplementations { plugin, on_logits, heads }) in all.compiled.iter().enumerate() {
        let on_logits: Vec<_> = on_logits.iter().filter(wanted).collect();
        for implementation in &on_logits {
            for on in CasePlacement::each_count(implementation, plugin, i == 0) {
                on.few_shapes(seeds, &mut cases);
            }
        }
        // Equal policies and heads are measured on the first plugin alone.
        if i == 0 {
            zero_kl(&on_logits, plugin, seeds, &mut cases);
            heads.iter().filter(wanted_head).for_each(|head| few_heads(head, plugin, seeds, &mut cases));
        }
    }
    cases
}

/// The implementation, plugin and device count of some cases.
struct CasePlacement {
    implementation: Arc<dyn Implementation>,
    plugin: Option<String>,
    devices: usize,
}

impl CasePlacement {
    fn compiled(implementation: &Arc<dyn Implementation>, plugin: &Path, devices: usize) -> Self {
        let plugin = plugin.file_name().map(|name| name.to_string_lossy().into_owned());
        Self { implementation: Arc::clone(implementation), plugin, devices }
    }

    /// The device counts of `implementation`. Tile kernels take long to compile as loops, and sum in an order of their
    /// own on any plugin; their rows are computed one by one, so that cutting the batch changes nothing.
    fn each_count(implementation: &Arc<dyn Implementation>, plugin: &Path, first: bool) -> Vec<Self> {
        // The largest count of devices cuts the vocabulary the most, and so has the most partial sums; smaller counts
        // of a tile kernel are left out.
        let tile = is_tile(&**implementation);
        let batch_cut = ["-rows", "-mesh"].iter().any(|end| implementation.id().ends_with(end));
        if tile && (batch_cut || !first) {
            return Vec::new();
        }
        let counts = implementation.device_counts();
        let most = counts.last().copied();
        let counts =
            counts.into_iter().filter(|devices| devices.is_power_of_two() && (!tile || Some(*devices) == most));
        counts.map(|devices| Self::compiled(implementation, plugin, devices)).collect()
    }

    fn case(&self, spec: &LossSpec, recipe: Recipe) -> MeasuredCase {
        let work = CaseWork::Logits(Arc::clone(&self.implementation), recipe);
        MeasuredCase { work, plugin: self.plugin.clone(), devices: self.devices, spec: spec.clone() }
    }

    fn any_shape(&self, random: usize, seeds: impl Fn(usize) -> usize, cases: &mut Vec<MeasuredCase>) {
        let mut drawn = crate::measured_cases();
        cases.extend(drawn.by_ref().take(random).map(|(spec, recipe)| self.case(&spec, recipe)));
        for dtype in Dtype::KERNEL {
            // A vocabulary of two has one column besides the target: an error there is that of the whole row, with
            // nothing to average it away. Equal logits round alike, so that a row's sum gathers their errors.
            for vocab in [2, 3, 5] {
                for (seed, (spec, recipe)) in (0..seeds(100) as u64).zip(&mut drawn) {
                    let narrow = Recipe { shape: [64, 64, vocab], dtype, seed, ..recipe };
                    cases.push(self.case(&spec, narrow.clone()));
                    cases.push(self.case(&spec, Recipe { regime: Regime::Ties, ..narrow }));
                }
            }
            for regime in Regime::FINITE {
                for (seed, (spec, recipe)) in (0..seeds(3) as u64).zip(&mut drawn) {
                    let wide = Recipe { shape: [1, 4, 151_936], dtype, regime, seed, ..recipe };
                    cases.push(self.case(&spec, wide));
                }
            }
        }
    }

    fn few_shapes(&self, seeds: impl Fn(usize) -> usize, cases: &mut Vec<MeasuredCase>) {
        // Every structure is another program to compile, which takes longest for tile kernels.
        let structures = if is_tile(&*self.implementation) { 4 } else { 8 };
        let specs = [
            LossSpec { entropy_coef: 0.02, temperature: 0.6.into(), ..LossSpec::default() },
            LossSpec { entropy_coef: 0.0, ..LossSpec::default() },
        ];
        let seed = self.devices as u64;
        for dtype in Dtype::KERNEL {
            let random = crate::device_cases(dtype, seeds(structures), seed);
            cases.extend(random.into_iter().map(|(spec, recipe)| self.case(&spec, recipe)));
            for (spec, regime) in specs.iter().flat_map(|spec| Regime::FINITE.map(|regime| (spec, regime))) {
                for shape in [[64, 64, 2], [64, 64, 5], [1, 8, 151_936]] {
                    let (old_logp_noise_scale, masked_garbage) = (0.3, false);
                    let recipe = Recipe { shape, dtype, regime, seed, old_logp_noise_scale, masked_garbage };
                    cases.push(self.case(spec, recipe));
                }
            }
        }
    }
}

/// Few programs for heads, on the largest device count.
fn few_heads(
    implementation: &Arc<dyn Implementation<HeadProblem>>,
    plugin: &Path,
    seeds: impl Fn(usize) -> usize,
    cases: &mut Vec<MeasuredCase>,
) {
    let Some(devices) = implementation.device_counts().into_iter().rfind(|devices| devices.is_power_of_two()) else {
        return;
    };
    let file = plugin.file_name().map(|name| name.to_string_lossy().into_owned());
    for dtype in Dtype::KERNEL {
        for (spec, recipe) in crate::device_heads(dtype, seeds(16), devices as u64) {
            let work = CaseWork::Head(Arc::clone(implementation), recipe);
            cases.push(MeasuredCase { work, plugin: file.clone(), devices, spec });
        }
    }
}

/// Adds cases of heads of any width, and of one token or one column besides the target, where no error is averaged
/// away.
fn any_head(
    implementation: &Arc<dyn Implementation<HeadProblem>>,
    random: usize,
    seeds: impl Fn(usize) -> usize,
    cases: &mut Vec<MeasuredCase>,
) {
    let case = |spec: LossSpec, recipe| MeasuredCase {
        work: CaseWork::Head(Arc::clone(implementation), recipe),
        plugin: None,
        devices: 1,
        spec,
    };
    let mut drawn = crate::measured_heads();
    cases.extend(drawn.by_ref().take(random).map(|(spec, recipe)| case(spec, recipe)));
    for shape in [[64, 64, 2], [64, 64, 3], [1, 1, 97]] {
        for (spec, head) in drawn.by_ref().take(seeds(300)) {
            let recipe = Recipe { shape, ..head.recipe };
            cases.push(case(spec, HeadRecipe { recipe, ..head }));
        }
    }
    // The width of Qwen2.5-0.5B.
    for (spec, head) in drawn.take(seeds(30)) {
        let recipe = Recipe { shape: [1, 4, 4099], ..head.recipe };
        cases.push(case(spec, HeadRecipe { hidden: 896, recipe, ..head }));
    }
}

fn is_tile(implementation: &dyn Implementation) -> bool {
    implementation.class() == "tile"
}

/// Adds cases in which the policy equals the reference policy: the gradient of the KL term is then rounding error
/// alone, and differs between candidate and reference.
fn zero_kl(
    all: &[&Arc<dyn Implementation>],
    plugin: &Path,
    seeds: impl Fn(usize) -> usize,
    cases: &mut Vec<MeasuredCase>,
) {
    const ON: [(&str, usize); 5] =
        [("xla", 1), ("xla-vocab", 2), ("tile-one-pass", 1), ("tile-two-pass", 1), ("tile-two-pass-vocab", 2)];
    let called = |id: &str| all.iter().find(|implementation| implementation.id() == id);
    let on: Vec<CasePlacement> = ON
        .into_iter()
        .filter_map(|(id, devices)| Some(CasePlacement::compiled(called(id)?, plugin, devices)))
        .filter(|on| on.implementation.device_counts().contains(&on.devices))
        .collect();
    for estimator in [KlEstimator::K1, KlEstimator::K2, KlEstimator::K3, KlEstimator::Abs] {
        for old_logp in [OldLogp::Given, OldLogp::Current] {
            for dtype in Dtype::KERNEL {
                for (seed, regime) in (0..seeds(40)).flat_map(|seed| Regime::FINITE.map(|regime| (seed, regime))) {
                    let beta = 0.01 + 0.02 * (seed % 25) as f64;
                    let spec = LossSpec { kl: Some(Kl::plain(beta, estimator)), old_logp, ..LossSpec::default() };
                    let recipe = Recipe {
                        shape: [2, 5, 131],
                        dtype,
                        regime,
                        seed: seed as u64,
                        old_logp_noise_scale: 0.0,
                        masked_garbage: false,
                    };
                    // Tile kernels take long to compile as loops, so they get the first seeds only.
                    let few = |on: &&CasePlacement| seed < 8 || !is_tile(&*on.implementation);
                    cases.extend(on.iter().filter(few).map(|on| on.case(&spec, recipe.clone())));
                }
            }
        }
    }
}

/// A gate of one class, at whatever edge its tokens are.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct MeasuredGate {
    /// The output and the comparison.
    #[serde(flatten)]
    pub gate: Gate,
    /// Dtype of the output; f64 is f32's arithmetic stored wider.
    pub dtype: Dtype,
    /// The arithmetic class of the implementation.
    pub class: String,
}

impl fmt::Display for MeasuredGate {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} {} {}", self.class, self.gate, self.dtype)
    }
}

/// The largest κ that the cases of a gate needed.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct NeededKappa {
    /// The largest `κ` of any case.
    pub kappa: f64,
    /// The `κ` it is allowed.
    pub allowed: f64,
    /// The case that needed it; empty where none needed any.
    pub case: String,
}

/// The ranges that the cases of one class covered.
#[derive(Clone, Debug, PartialEq, Eq)]
struct CoveredCases {
    cases: u64,
    vocab: [usize; 2],
    devices: [usize; 2],
    plugins: BTreeSet<String>,
}

impl CoveredCases {
    fn nothing() -> Self {
        let empty = [usize::MAX, 0];
        Self { cases: 0, vocab: empty, devices: empty, plugins: BTreeSet::new() }
    }

    fn add(&mut self, case: &MeasuredCase) {
        let widen = |range: &mut [usize; 2], x: usize| *range = [range[0].min(x), range[1].max(x)];
        self.cases += 1;
        widen(&mut self.vocab, case.work.vocab());
        widen(&mut self.devices, case.devices);
        self.plugins.extend(case.plugin.clone());
    }
}

impl fmt::Display for CoveredCases {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let count = |n: usize| HumanCount(n as u64);
        let [narrowest, widest] = self.vocab.map(count);
        write!(f, "{} cases, V = {narrowest} to {widest}", HumanCount(self.cases))?;
        if !self.plugins.is_empty() {
            let plugins: Vec<_> = self.plugins.iter().map(String::as_str).collect();
            write!(f, ", {} to {} devices of {}", self.devices[0], self.devices[1], plugins.join(", "))?;
        }
        Ok(())
    }
}

/// A case that could not be judged.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{case}: {reason}")]
pub struct MeasureError {
    /// A description of the case.
    pub case: String,
    /// The reason why it was not judged.
    pub reason: UnjudgedReason,
}

/// Why a case was not judged.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum UnjudgedReason {
    /// No problem comes of the recipe.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// The reference refused the problem.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// There is no verdict on it.
    #[error(transparent)]
    Trial(#[from] trial::NoVerdictReason),
}

/// Returns the verdicts on a case; `None` if the implementation does not support it.
fn verdicts(case: &MeasuredCase) -> Result<Option<Vec<Verdict>>, UnjudgedReason> {
    let MeasuredCase { work, devices, spec, .. } = case;
    match work {
        CaseWork::Logits(implementation, recipe) => {
            verdicts_on(&**implementation, spec, &recipe.problem(spec)?, *devices)
        }
        CaseWork::Head(implementation, recipe) => {
            verdicts_on(&**implementation, spec, &recipe.problem(spec)?, *devices)
        }
    }
}

fn verdicts_on<P: Judgeable>(
    implementation: &dyn Implementation<P>,
    spec: &LossSpec,
    problem: &P,
    devices: usize,
) -> Result<Option<Vec<Verdict>>, UnjudgedReason> {
    if implementation.supports(spec, problem.checked_shape(spec)?, problem.dtype(), devices).is_err() {
        return Ok(None);
    }
    Ok(Some(JudgedProblem::new(spec, problem)?.run(implementation, devices)?.verdicts))
}

/// The largest `κ` by gate, and what it was measured on by class.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Measurement {
    needed: BTreeMap<MeasuredGate, NeededKappa>,
    covered: BTreeMap<String, CoveredCases>,
}

impl Measurement {
    /// Judges one case, where it is supported, by the tolerances that are built in.
    ///
    /// # Errors
    /// [`MeasureError`], naming the case.
    pub fn add(&mut self, case: &MeasuredCase) -> Result<(), MeasureError> {
        self.judge(case).map_err(|reason| MeasureError { case: case.to_string(), reason })
    }

    fn judge(&mut self, case: &MeasuredCase) -> Result<(), UnjudgedReason> {
        let Some(verdicts) = verdicts(case)? else { return Ok(()) };
        let class = case.work.class();
        for verdict in verdicts {
            // Shares are counted and have no κ.
            let Some(allowed) = verdict.kappa else { continue };
            // An output that is stored in f64 by a kernel of f32 belongs to the gates of f32.
            let dtype = if verdict.dtype == Dtype::F64 { Dtype::F32 } else { verdict.dtype };
            // The edges of a gate are measured together: they have one limit.
            let subject = MeasuredGate { gate: verdict.gate.at(None), dtype, class: class.into() };
            self.need(subject, [verdict.tally.kappa_seen, allowed], case);
        }
        self.covered.entry(class.into()).or_insert_with(CoveredCases::nothing).add(case);
        Ok(())
    }

    fn need(&mut self, subject: MeasuredGate, [kappa, allowed]: [f64; 2], case: &MeasuredCase) {
        let worst = self.needed.entry(subject).or_insert_with(|| NeededKappa { allowed, ..NeededKappa::default() });
        if kappa > worst.kappa {
            *worst = NeededKappa { kappa, allowed, case: case.to_string() };
        }
    }

    /// Returns the κ that each gate needed, for the gates that a case reached.
    pub fn needed(&self) -> impl Iterator<Item = (&MeasuredGate, &NeededKappa)> {
        self.needed.iter()
    }

    /// The classes, each with its cases in words.
    pub fn classes(&self) -> impl Iterator<Item = (&str, String)> {
        self.covered.iter().map(|(class, covered)| (class.as_str(), covered.to_string()))
    }
}
