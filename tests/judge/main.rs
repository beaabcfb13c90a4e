//! The judge rejects what is wrong and accepts what is right.

#[cfg(feature = "mutants")]
#[path = "../common"]
mod common {
    pub(crate) mod command;
}

#[cfg(feature = "mutants")]
mod mutants;
mod rejects;
mod tells_variants_apart;
mod tolerances;
