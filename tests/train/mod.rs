//! The training loop on candle, its commands, and the recorder.

mod ab;
mod command;
mod loss;
mod model;
mod parts;
mod record;
mod resume;
mod rollout;
