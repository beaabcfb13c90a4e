//! Campaigns: one kernel is given many problems, and its failures are explained by their causes.
//!
//! ```text
//! Deck ─▶ problems ─▶ KernelUnderTest ─▶ judge ─▶ failures ─▶ causes: shrunk, named, told what they compute ─▶ report
//! ```
//!
//! A [`Deck`] deals problems under the constraints of one [`LossSpec`](assay_core::spec::LossSpec). An [`KernelUnderTest`] answers them,
//! and is judged as kernels that are not ours are. Failures that look alike are one cause: its smallest problem is made smaller
//! while it still fails the same way, the mutants that fail so too give it their names, and the losses one option away are asked
//! whether theirs are the numbers. At the end stands how many of the wrong kernels that this spec can tell from the right one
//! the campaign would have caught.

mod campaign;
mod cause;
mod deck;
mod examine;
mod kernel;
mod neighbours;
pub mod panel;
#[cfg(feature = "mutants")]
mod power;
mod repros;
mod run;
mod shrink;
mod subject;
mod text;
pub mod worker;

pub use campaign::{Campaign, CampaignError, CampaignProgress};
pub use deck::{Deck, DeckShapes, FEW_SHAPES, HeadDeck, ProblemDeck};
pub use kernel::{Fault, KernelUnderTest, LocalKernel};
pub use neighbours::{ComputedLoss, computed, neighbours};
pub use run::dealt;
pub use shrink::simplify;
pub use subject::{DeckRecipe, Subject};
pub use text::{covered, text};
