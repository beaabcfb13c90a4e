//! The judge rejects what is wrong and accepts what is right.

mod diagnoses;
mod distillation;
mod entropy_difference;
mod entropy_quantile;
mod entropy_sums;
mod error_map;
mod false_passes;
mod head_distillation;
mod invariance;
mod kept;
mod lane_kernel;
mod lm_head;
mod logp;
mod metric;
mod mutants;
mod rejects;
mod smallest_defects;
mod summary;
mod sums_in_lanes;
mod tells_variants_apart;
mod textbook;
mod tolerances;
