//! A campaign: one kernel before many problems.
//!
//! ```text
//! Deck ─▶ problems ─▶ UnderTest ─▶ judge ─▶ failures ─▶ causes: shrunk, named, told what they compute ─▶ report
//! ```
//!
//! A [`Deck`] deals problems under the constraints of one [`LossSpec`](assay_core::spec::LossSpec). An [`UnderTest`] answers them,
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

pub use campaign::{Campaign, CampaignError, Progress};
pub use deck::{Deals, Deck, FEW_SHAPES, HeadDeck, Shapes};
pub use kernel::{Fault, Local, UnderTest};
pub use neighbours::{Computed, computed, neighbours};
pub use run::dealt;
pub use shrink::simplify;
pub use subject::{Dealt, Subject};
pub use text::{covered, text};
