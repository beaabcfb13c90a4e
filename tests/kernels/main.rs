//! The kernels that run any shape at once, and the Mosaic text of those that do not, against the reference.

#[path = "../common"]
mod common {
    pub(crate) mod variants;
}

mod lm_head;
mod match_reference;
mod mosaic;
mod mosaic_interpreter;
mod native;
