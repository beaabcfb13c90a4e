//! The text of small programs in the language of tiles.

mod golden;
mod stablehlo;
