//! The `assay` command, in processes of its own.

mod bench;
mod check;
mod cli;
mod driver;
#[cfg(feature = "pjrt")]
mod emit;
mod generate;
mod gpu_record;
mod gradcheck;
mod judge;
mod list;
mod logp;
#[cfg(feature = "pjrt")]
mod meeting;
mod metrics;
#[cfg(feature = "mutants")]
mod mutants;
mod outputs;
mod panel;
mod pasted;
mod peers;
#[cfg(feature = "pjrt")]
mod plugin_choice;
mod regressions;
mod replay;
mod report;
mod spec;
mod strangers;
mod tolerances;
mod workplace;
