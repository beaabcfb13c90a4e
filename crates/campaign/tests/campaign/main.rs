//! Campaigns before kernels that are right, and before kernels that are wrong in known ways.

mod causes;
mod computes;
mod deck;
mod dependence;
mod finds;
mod invariance;
mod names;
mod packed;
mod report;
mod select;
mod sizes;
