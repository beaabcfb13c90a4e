//! What holds for the whole project: its files, its layers, and that nothing escapes the suites.

mod coverage;
mod fixture_reader;
mod fixture_stream;
mod text;
mod tolerances;
mod unsafe_code;
