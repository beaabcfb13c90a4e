//! The judge rejects what is wrong and accepts what is right.

mod diagnoses;
mod entropy_quantile;
mod error_map;
mod false_passes;
mod invariance;
mod lm_head;
mod logp;
mod metric;
mod mutants;
mod rejects;
mod summary;
mod sums_in_lanes;
mod tells_variants_apart;
mod textbook;
mod tolerances;
