//! The judge rejects what is wrong and accepts what is right.

#[path = "../common"]
mod common {
    pub(crate) mod command;
}

mod mutants;
mod rejects;
mod tells_variants_apart;
mod tolerances;
