//! The GRPO loop on candle ([`train`]), and fixtures of a model's own logits ([`record`]).
//!
//! Without the default feature `candle` there is nothing here.

#![cfg(feature = "candle")]

mod checkpoint;
pub mod interrupt;
pub mod record;
pub mod train;
