//! Campaigns: one kernel is given many problems, and its failures are explained by their causes.
//!
//! ```text
//! Deck ─▶ problems ─▶ KernelUnderTest ─▶ judge ─▶ failures ─▶ causes: shrunk, named, told what they compute ─▶ report
//! ```
//!
//! A [`Deck`] draws problems under the constraints of one [`LossSpec`](assay_core::spec::LossSpec). A [`KernelUnderTest`]
//! answers them, and is judged by the limits for kernels of other projects. Failures that look alike are one cause: its smallest
//! problem is shrunk while it still fails in the same way, the mutants that fail alike give it their names, and the losses one
//! option away are compared with the kernel's numbers. The report ends with the mutation score: how many of the mutants that
//! this spec can distinguish from a correct kernel the campaign rejects.
//!
//! A campaign of the CPU kernel, which passes:
//!
//! ```
//! use assay_campaign::{Campaign, Deck, LocalKernel, TextForm, text};
//! use assay_core::problem::Problem;
//! use assay_core::spec::LossSpec;
//! use assay_native::Native;
//!
//! let deck = Deck { cases: 4, wide: 0, ..Deck::default() };
//! let campaign = Campaign { deck, power: false, ..Campaign::new("native", LossSpec::default()) };
//! let native = Native::default();
//! let report = campaign.run(&mut LocalKernel::<Problem>(&native), &mut |_| ()).unwrap();
//! assert!(report.passed, "{}", text(&report, &TextForm::default()));
//! ```

mod campaign;
mod cause;
mod common;
mod deck;
mod dependence;
mod examine;
mod invariance;
#[cfg(feature = "mutants")]
mod invariance_mutants;
mod kernel;
mod markdown;
mod memory;
#[cfg(feature = "mutants")]
mod naming;
mod neighbours;
#[cfg(feature = "mutants")]
mod outputs;
pub mod panel;
mod patterns;
#[cfg(feature = "mutants")]
mod power;
mod repeat;
mod repros;
mod run;
mod shrink;
mod subject;
mod text;
pub mod worker;

pub use campaign::{Campaign, CampaignError, CampaignProgress};
pub use deck::{DealtHead, DealtRecipe, Deck, DeckContent, DeckHead, DeckShapes, FEW_SHAPES, Feature, FeatureCounts};
pub use invariance::{AskedInvariance, InvarianceDemand};
pub use kernel::{CallWay, CallWayKind, Fault, KernelUnderTest, LocalKernel};
pub use markdown::markdown;
pub use memory::add_memory;
pub use neighbours::{ComputedLoss, computed, neighbours, short_name};
pub use shrink::simplify;
pub use subject::Subject;
pub use text::{TextForm, text};
