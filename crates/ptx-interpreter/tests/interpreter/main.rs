//! The interpreter of PTX: what it computes, what it refuses, and what it finds.

mod rules;
mod small;
mod softmax;
