//! One page from the JSON of other commands, as [`assay_schema`] has it: verdicts, times, memory, mutants, recorded runs and
//! training curves.
//!
//! The page is one HTML file that needs no network and no script. Every part carries the command that made its figures.
//! Inputs come from strangers: [`Input::read`] bounds them, their text is escaped wherever it appears, and what cannot be
//! drawn is said.
//!
//! Plots are SVG by `plotters`, whose colours are stand-ins that the page's style replaces, so that one drawing serves
//! light, dark and paper.

mod ab;
mod agreement;
mod bench;
mod campaign;
mod compiled;
mod compiled_gpu;
mod input;
pub mod junit;
mod mutants;
pub mod number;
mod page;
mod part;
mod peers;
pub mod plot;
mod programs;
mod verdicts;

pub use self::input::{Input, InputError, LONGEST};
pub use self::page::render;
pub use self::programs::{programs_markdown, programs_text};
