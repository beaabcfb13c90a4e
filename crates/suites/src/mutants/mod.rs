//! A bank of deliberately wrong kernels: what a suite is worth is what it catches.
//!
//! [`Specimen`] is a correct kernel, of the loss on logits and of the LM head with the loss; each [`Mutant`] is one small
//! change to it.

mod bank;
mod corrections;
mod elsewhere;
mod kl;
mod launch;
mod lm_head;
mod logits;
mod loss;
mod property;
mod run;
mod score;
mod several;
mod specimen;
mod top_entropy;

pub use bank::{BANK, Bug, Class, Mutant};
pub use elsewhere::{Cell, PROJECTS, Project, Tests};
pub use run::{AtWidth, Case, Fate, Kill, Part, Production, Suite, head_cases, property_cases};
pub use score::{Outcome, Score, Trial};
pub use specimen::Specimen;

/// The vocabulary of Qwen: no tile divides it evenly.
const QWEN_VOCABULARY: usize = 151_936;
