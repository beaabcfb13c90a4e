//! The `assay` command, in processes of its own.

#[path = "../common"]
mod common {
    pub(crate) mod command;
}

mod bench;
mod cli;
#[cfg(feature = "pjrt")]
mod emit;
#[cfg(feature = "pjrt")]
mod plugin_choice;
mod report;
mod spec;
mod tolerances;
