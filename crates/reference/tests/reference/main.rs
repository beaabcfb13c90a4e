//! The reference against other ways to the same numbers: by hand, in 640 bits, by identities, and what published projects computed.

mod common {
    pub(crate) mod cases;
    pub(crate) mod coverage;
    pub(crate) mod draws;
    pub(crate) mod exact;
    pub(crate) mod family;
    pub(crate) mod real;
    pub(crate) mod running;
    pub(crate) mod softmax_condition;
    pub(crate) mod uniform;
}

mod by_hand;
mod cross_entropy;
mod distillation;
mod exponential;
mod family;
mod family_edges;
mod identities;
mod kept;
mod lm_head;
mod metrics;
mod peers;
mod preset_formulas;
mod presets;
mod regimes;
mod sum;
