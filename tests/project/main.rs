//! What holds for the whole project: its files, its layers, and that nothing escapes the suites.

#[path = "../common"]
mod common {
    pub(crate) mod arms;
}

mod coverage;
mod fixture_reader;
mod unsafe_code;
