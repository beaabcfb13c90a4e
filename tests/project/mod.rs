//! What holds for the whole project: its files, its documents, and that nothing escapes the suites.

mod coverage;
mod dependencies;
mod documents;
mod fixture_reader;
mod fixture_stream;
mod panel;
mod prose;
mod spreads;
mod text;
mod unit_tests;
mod unsafe_code;
