//! The training loop on candle, its commands, and the recorder.

#[path = "../common"]
mod common {
    pub(crate) mod checkpoint;
    pub(crate) mod command;
    pub(crate) mod formula;
    pub(crate) mod interruption;
}

mod command;
mod loss;
mod model;
mod record;
