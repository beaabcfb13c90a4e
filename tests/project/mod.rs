//! What holds for the whole project: its files, its documents, and that nothing escapes the suites.

mod coverage;
mod dependencies;
mod documents;
mod fixture_reader;
mod fixture_stream;
#[cfg(all(feature = "pjrt", feature = "mutants", feature = "train", feature = "schema"))]
mod pages;
mod panel;
#[cfg(all(feature = "pjrt", feature = "mutants", feature = "train"))]
mod pasted_commands;
mod prose;
mod spreads;
mod text;
mod unit_tests;
mod unsafe_code;
