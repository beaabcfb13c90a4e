//! [`BenchCase`]: one batch, one loss, one kernel. What `assay gradcheck` and `assay bench` read from a file.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::implementation::{FILE_PREFIX, Workload};
use crate::judge::generate::{HeadRecipe, Recipe};
use crate::registry::FoundImplementation;
use crate::spec::LossSpec;

/// The implementations that `kernel.enabled: false` selects: the first that can run here.
const BASELINES: [&str; 4] = ["xla", "native", "xla-lm-head", "native-lm-head"];

/// One batch, one loss, one kernel.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BenchCase {
    /// Why the case is kept, for the cases that are.
    #[serde(default, rename = "reason")]
    _reason: String,
    /// The problem that is computed.
    pub batch: CaseBatch,
    /// The loss that is computed.
    #[serde(default)]
    pub spec: LossSpec,
    /// The implementation that computes it.
    #[serde(default)]
    pub kernel: KernelSettings,
    /// The number of steps of a bench; `assay gradcheck` ignores it.
    #[serde(default)]
    pub bench: StepCounts,
}

/// The source of a problem.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CaseBatch {
    /// The recipe of a generated problem.
    Generate(Recipe),
    /// Hidden states and an LM head that are drawn.
    GenerateHead(HeadRecipe),
    /// The file of a recorded problem.
    Fixture(FixtureBatch),
}

/// A problem from a file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FixtureBatch {
    /// Relative to the folder of the case.
    pub path: PathBuf,
    /// The logits tensor, where there is no LM head.
    #[serde(default = "default_logits")]
    pub logits: String,
    /// The old log-probabilities; `None` where the loss reads none.
    #[serde(default = "default_old_logp")]
    pub old_logp: Option<String>,
}

fn default_logits() -> String {
    "logits".into()
}

#[expect(clippy::unnecessary_wraps, reason = "serde's default has the field's type")]
fn default_old_logp() -> Option<String> {
    Some("old_logps".into())
}

/// The implementation that computes the loss, and its number of devices.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelSettings {
    /// Whether it is the implementation named; else it is a baseline that this machine has.
    pub enabled: bool,
    /// An id; the path of a manifest in it is relative to the folder of the case.
    #[serde(rename = "impl", default = "default_implementation")]
    pub implementation: String,
    /// The number of devices.
    #[serde(default = "one_device")]
    pub devices: usize,
}

fn one_device() -> usize {
    1
}

impl Default for KernelSettings {
    fn default() -> Self {
        Self { enabled: true, implementation: default_implementation(), devices: one_device() }
    }
}

fn default_implementation() -> String {
    "native".into()
}

/// The number of steps of a bench.
#[derive(Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StepCounts {
    /// The untimed steps after the first.
    pub warmup: usize,
    /// The number of timed steps.
    pub steps: usize,
}

impl Default for StepCounts {
    fn default() -> Self {
        Self { warmup: 2, steps: 10 }
    }
}

impl StepCounts {
    /// All steps: the first, those of the warm-up and those that are timed.
    pub fn all(self) -> usize {
        self.warmup.saturating_add(self.steps).saturating_add(1)
    }
}

impl BenchCase {
    /// `batch` with the default loss and the implementation `id`, on one device.
    pub fn new(batch: CaseBatch, id: &str) -> Self {
        Self {
            _reason: String::new(),
            batch,
            spec: LossSpec::default(),
            kernel: KernelSettings::with_id(id),
            bench: StepCounts::default(),
        }
    }
}

/// `path`, relative to the folder of the file `case`.
pub(crate) fn beside(case: &Path, path: impl AsRef<Path>) -> PathBuf {
    case.parent().unwrap_or(Path::new("")).join(path)
}

impl KernelSettings {
    /// The implementation `id`, on one device.
    pub fn with_id(id: &str) -> Self {
        Self { enabled: true, implementation: id.into(), devices: one_device() }
    }

    /// Returns the implementation, once it is known to run here. `case` is the file that this was read from; `find` searches
    /// for an id, as [`find`](crate::registry::find) and [`find_head`](crate::registry::find_head) do.
    ///
    /// # Errors
    /// A message that lists the ids there are, or says why the one asked for does not run here.
    pub fn implementation<P: Workload>(
        &self,
        case: &Path,
        find: impl Fn(&str) -> FoundImplementation<P>,
    ) -> FoundImplementation<P> {
        // The baseline is the first of the list that runs here.
        if !self.enabled {
            let baseline = |id: &&str| find(id).ok().filter(|found| found.available().is_ok());
            return BASELINES.iter().find_map(baseline).ok_or_else(|| "kernel: no baseline runs here".into());
        }
        // A manifest in the id is found from where the case is, so that a case can be read from any folder.
        let implementation = match self.implementation.strip_prefix(FILE_PREFIX) {
            Some(manifest) => find(&format!("{FILE_PREFIX}{}", beside(case, manifest).to_string_lossy())),
            None => find(&self.implementation),
        }?;
        implementation.available().map_err(|why| format!("{}: {why}", implementation.id()))?;
        Ok(implementation)
    }
}
