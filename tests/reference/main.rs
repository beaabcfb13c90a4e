//! The reference against other ways to the same numbers: by hand, in 640 bits, by identities, and what published projects computed.

#[path = "../common"]
mod common {
    pub(crate) mod cases;
    pub(crate) mod command;
    pub(crate) mod draws;
    pub(crate) mod family;
    pub(crate) mod family_cases;
    pub(crate) mod multiprecision;
    pub(crate) mod real;
    pub(crate) mod running;
    pub(crate) mod softmax_condition;
    pub(crate) mod uniform;
}

mod by_hand;
mod family;
mod identities;
mod metrics;
mod multiprecision;
mod parity;
mod peers;
mod presets;
