//! [`Campaign`]: what is asked, and why it cannot be made.

use std::path::PathBuf;
use std::time::Duration;

use assay_core::spec::LossSpec;
use assay_core::spec::presets::Preset;
use assay_fixture::FixtureError;
use assay_judge::generate::RecipeError;
use assay_judge::tolerance::Grade;

use crate::deck::Deck;

/// One kernel before a deck of problems.
#[derive(Clone, Debug)]
pub struct Campaign {
    /// What the kernel is called.
    pub kernel: String,
    /// The loss.
    pub spec: LossSpec,
    /// The project and the options that the spec is of, where it is one's.
    pub project: Option<(Preset, Vec<String>)>,
    /// The problems.
    pub deck: Deck,
    /// What is asked of accuracy.
    pub grade: Grade,
    /// Names of causes, edges, mutants or faults that may fail.
    pub allow: Vec<String>,
    /// Whether some problems are asked twice, and others in memory that held one before. Not where answers are files.
    pub repeats: bool,
    /// Whether problems that fail are made smaller.
    pub shrink: bool,
    /// Whether wrong kernels are run on the deck.
    pub power: bool,
    /// After which no problem more is tried.
    pub time: Option<Duration>,
    /// Where problems that failed are kept, and tried first the next time.
    pub repros: Option<PathBuf>,
}

/// What has been done so far.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Problems tried.
    pub tried: u64,
    /// Of so many.
    pub cases: u64,
    /// Problems that failed.
    pub failed: u64,
}

/// A campaign that cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum CampaignError {
    /// A problem of the deck is none.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// There is nothing to try.
    #[error("{field}: got {given}, expected {expected}")]
    Empty {
        /// Of the deck.
        field: &'static str,
        /// What it is.
        given: String,
        /// What would do.
        expected: &'static str,
    },
    /// A name that nothing has.
    #[error("allow: got `{given}`, expected {expected}")]
    Allow {
        /// The name.
        given: String,
        /// The names there are.
        expected: String,
    },
    /// A file of an earlier campaign cannot be read, or a new one not written.
    #[error(transparent)]
    File(#[from] FixtureError),
    /// The wrong kernels' correct original failed: the judge is wrong.
    #[error("the correct kernel that mutants are made of fails {gate} on {case}: a false alarm of the judge")]
    FalseAlarm {
        /// The gate.
        gate: String,
        /// The problem.
        case: String,
    },
}

impl Campaign {
    /// A campaign of 200 problems, at grade `standard`.
    pub fn new(kernel: &str, spec: LossSpec) -> Self {
        Self {
            kernel: kernel.into(),
            spec,
            project: None,
            deck: Deck::default(),
            grade: Grade::Standard,
            allow: Vec::new(),
            repeats: true,
            shrink: true,
            power: true,
            time: None,
            repros: None,
        }
    }
}
