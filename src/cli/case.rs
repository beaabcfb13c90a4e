//! The file that `assay gradcheck` and `assay bench` take: one batch, one loss, one kernel.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;

use super::CliError;
use super::head_choice::AnyRecipe;
use super::problem_choice::AnyProblem;
use crate::fixture::{ProblemFile, verify};
use crate::implementation::{FILE_PREFIX, Implementation};
use crate::judge::generate::{HeadRecipe, Recipe};
use crate::registry::Listed;
use crate::spec::LossSpec;

/// What `kernel.enabled: false` runs, the first of its kind that this machine can.
const BASELINES: [&str; 4] = ["xla", "native", "xla-lm-head", "native-lm-head"];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Case {
    /// Why the case is kept, for the cases that are.
    #[serde(default, rename = "reason")]
    _reason: String,
    pub(super) batch: Batch,
    #[serde(default)]
    pub(super) spec: LossSpec,
    #[serde(default)]
    pub(super) kernel: Kernel,
    /// What `assay bench` does beside; `assay gradcheck` leaves it alone.
    #[serde(default)]
    pub(super) bench: Counts,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Batch {
    Generate(Recipe),
    GenerateHead(HeadRecipe),
    Fixture(FixtureBatch),
}

/// A problem from a file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FixtureBatch {
    /// Relative to the folder of the case.
    path: PathBuf,
    #[serde(default = "default_logits")]
    logits: String,
    #[serde(default = "default_old_logp")]
    old_logp: Option<String>,
}

fn default_logits() -> String {
    "logits".into()
}

#[expect(clippy::unnecessary_wraps, reason = "serde's default has the field's type")]
fn default_old_logp() -> Option<String> {
    Some("old_logps".into())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Kernel {
    enabled: bool,
    /// An id; the path of a manifest in it is relative to the folder of the case.
    #[serde(rename = "impl", default = "default_implementation")]
    implementation: String,
    #[serde(default = "one_device")]
    pub(super) devices: usize,
}

fn one_device() -> usize {
    1
}

impl Default for Kernel {
    fn default() -> Self {
        Self { enabled: true, implementation: default_implementation(), devices: one_device() }
    }
}

fn default_implementation() -> String {
    "native".into()
}

/// How many steps a bench makes.
#[derive(Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Counts {
    /// After the first, before any is timed.
    pub(super) warmup: usize,
    /// Timed.
    pub(super) steps: usize,
}

impl Default for Counts {
    fn default() -> Self {
        Self { warmup: 2, steps: 10 }
    }
}

impl Case {
    /// A generated batch, the default loss and one implementation.
    pub(super) fn of(recipe: AnyRecipe, implementation: &str) -> Self {
        Self {
            _reason: String::new(),
            batch: match recipe {
                AnyRecipe::Logits(recipe) => Batch::Generate(recipe),
                AnyRecipe::Head(recipe) => Batch::GenerateHead(recipe),
            },
            spec: LossSpec::default(),
            kernel: Kernel::of(implementation),
            bench: Counts::default(),
        }
    }
}

impl Batch {
    /// The problem; `case` is the file that this batch stands in.
    pub(super) fn problem(&self, spec: &LossSpec, case: &Path) -> Result<AnyProblem, CliError> {
        match self {
            Batch::Generate(recipe) => Ok(AnyProblem::Logits(recipe.problem(spec)?)),
            Batch::GenerateHead(recipe) => Ok(AnyProblem::Head(recipe.problem(spec)?)),
            Batch::Fixture(batch) => {
                let path = beside(case, &batch.path);
                verify(&path)?;
                AnyProblem::read(&ProblemFile::open(&path)?, &batch.logits, batch.old_logp.as_deref())
            }
        }
    }
}

/// `path`, relative to the folder of the case.
fn beside(case: &Path, path: impl AsRef<Path>) -> PathBuf {
    case.parent().unwrap_or(Path::new("")).join(path)
}

impl Kernel {
    /// The implementation `id`, on one device.
    pub(super) fn of(id: &str) -> Self {
        Self { enabled: true, implementation: id.into(), devices: one_device() }
    }

    /// The implementation, once it is known to run here.
    pub(super) fn implementation<P: Listed>(
        &self,
        case: &Path,
        plugin: Option<&Path>,
    ) -> Result<Arc<dyn Implementation<P>>, CliError> {
        let implementation = self.chosen(case, plugin)?;
        implementation.available().map_err(|why| CliError::Usage(format!("{}: {why}", implementation.id())))?;
        Ok(implementation)
    }

    fn chosen<P: Listed>(&self, case: &Path, plugin: Option<&Path>) -> Result<Arc<dyn Implementation<P>>, CliError> {
        if self.enabled {
            let id = match self.implementation.strip_prefix(FILE_PREFIX) {
                Some(manifest) => format!("{FILE_PREFIX}{}", beside(case, manifest).display()),
                None => self.implementation.clone(),
            };
            return P::find(&id, plugin).map_err(CliError::Usage);
        }
        let baseline = |id: &&str| P::find(id, plugin).ok().filter(|found| found.available().is_ok());
        BASELINES.iter().find_map(baseline).ok_or_else(|| CliError::Usage("kernel: no baseline runs here".into()))
    }
}
