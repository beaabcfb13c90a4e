//! The `assay` command, in processes of its own.

mod bench;
mod check;
mod cli;
mod driver;
#[cfg(feature = "pjrt")]
mod emit;
mod gpu_record;
mod logp;
#[cfg(feature = "pjrt")]
mod meeting;
#[cfg(feature = "mutants")]
mod mutants;
mod panel;
mod peers;
#[cfg(feature = "pjrt")]
mod plugin_choice;
mod regressions;
mod report;
mod spec;
mod tolerances;
