//! [`Campaign`]: what is asked, and why it cannot be made.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use assay_core::spec::LossSpec;
use assay_core::spec::presets::Preset;
use assay_core::text::{ForeignLines, ForeignText};
use assay_fixture::FixtureError;
use assay_judge::generate::RecipeError;
use assay_judge::tolerance::Grade;

use crate::deck::Deck;
use crate::invariance::AskedInvariance;

/// One kernel before a deck of problems.
#[derive(Clone, Debug)]
pub struct Campaign {
    /// The kernel's name in reports.
    pub kernel: String,
    /// The loss that the kernel is asked to compute.
    pub spec: LossSpec,
    /// The project and the options that the spec is of, where it is one's.
    pub project: Option<(Preset, Vec<String>)>,
    /// The constraints of the problems that are tried.
    pub deck: Deck,
    /// The grade of accuracy that every output must reach.
    pub grade: Grade,
    /// Names of causes, edges, mutants or faults that may fail.
    pub allow: Vec<String>,
    /// Whether some problems are asked twice, and others in memory that held one before. Not where answers are files.
    pub repeats: bool,
    /// Whether problems that fail are made smaller.
    pub shrink: bool,
    /// Whether wrong kernels are run on the deck.
    pub power: bool,
    /// The relations in which a token must have the same numbers; `None` asks none.
    pub invariance: Option<AskedInvariance>,
    /// The time after which no further problem is tried; `None` sets no limit.
    pub time: Option<Duration>,
    /// The folder that keeps problems which failed, and from which they are tried first the next time.
    pub repros: Option<PathBuf>,
    /// A flag that ends the campaign before its next problem once it is set.
    pub stop: Arc<AtomicBool>,
}

/// The counts of a running campaign, for progress lines.
#[derive(Clone, Copy, Debug)]
pub struct CampaignProgress {
    /// Problems that were tried so far.
    pub tried: u64,
    /// Problems that the campaign tries in all.
    pub cases: u64,
    /// Problems that failed so far.
    pub failed: u64,
}

/// A campaign that cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum CampaignError {
    /// A recipe in the deck is invalid.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// There is nothing to try.
    #[error("{field}: got {given}, expected {expected}")]
    Empty {
        /// The field of the deck that leaves nothing to try.
        field: &'static str,
        /// The value of the field.
        given: ForeignText,
        /// The values that would leave something to try.
        expected: &'static str,
    },
    /// A name that nothing has.
    #[error("allow: got `{given}`, expected {expected}")]
    Allow {
        /// The name that the caller wants to allow.
        given: ForeignText,
        /// The names that causes, edges, mutants and faults can have.
        expected: ForeignLines,
    },
    /// A file of an earlier campaign cannot be read, or a new one not written.
    #[error(transparent)]
    File(#[from] FixtureError),
    /// The wrong kernels' correct original failed: the judge is wrong.
    #[error("the correct kernel that mutants are made of fails {gate} on {case}: a false alarm of the judge")]
    FalseAlarm {
        /// The gate that the correct kernel failed.
        gate: String,
        /// The problem, as the deck labels it.
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
            invariance: None,
            time: None,
            repros: None,
            stop: Arc::default(),
        }
    }
}
