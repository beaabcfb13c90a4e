//! The bank of wrong kernels before the suites: what each case, each project's tests and each class's own property catch.

mod elsewhere;
mod property;
mod run;
mod score;

pub use assay_mutants::{BANK, Bug, Class, Mutant, Specimen};
pub use elsewhere::{Cell, PROJECTS, Project, Tests};
pub use property::{head_property, property};
pub use run::{AtWidth, Case, Fate, Kill, Part, Production, Suite, head_cases, property_cases};
pub use score::{Outcome, Score, Trial};

/// The vocabulary of Qwen: no tile divides it evenly.
const QWEN_VOCABULARY: usize = 151_936;
