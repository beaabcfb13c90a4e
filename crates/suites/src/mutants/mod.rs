//! The bank of wrong kernels before the suites: what each case, each project's tests and each class's own property catch.

mod case;
mod peers;
mod production;
mod property;
mod run;
mod score;

pub use assay_mutants::{BANK, BatchSizes, Bug, Mutant, MutantKind, Specimen};
pub use case::MutantCase;
pub use peers::{PROJECTS, PeerOutcome, PeerProject, Tests};
pub use production::{AtWidth, ProductionPart, ProductionRun};
pub use property::{head_property, property};
pub use run::{Kill, MutantOutcome, MutantSuite, head_cases, property_cases};
pub use score::{MutantRecord, Score, Trial};

/// The vocabulary of Qwen: no tile divides it evenly.
const QWEN_VOCABULARY: usize = 151_936;
