//! A bank of kernels that are wrong on purpose. A suite is worth as much as the share of them that it rejects.
//!
//! [`Specimen`] is a correct kernel, of the loss on logits and of the LM head with the loss; each [`Mutant`] is one small
//! change to it.

mod bank;
mod corrections;
mod distillation;
mod kind;
mod kl;
mod launch;
mod lm_head;
mod logits;
mod loss;
mod policy;
mod rounding;
mod several;
mod sizes;
mod specimen;
mod top_entropy;

pub use bank::{BANK, Bug, Mutant};
pub use kind::MutantKind;
pub use sizes::BatchSizes;
pub use specimen::{DEVICE_COUNTS, Specimen};
