//! A small language for TPU kernels, embedded in Rust, and [`stablehlo`] text.
//!
//! A [`TileKernel`] walks a grid. At each step it sees *windows*: blocks of arrays in HBM that were fetched into VMEM, or
//! that are written back from it, where an index map says which block belongs to which step. Beside them it has scratch
//! in VMEM that lives from step to step, and short arrays in SMEM whose elements are read as scalars. Its values are
//! scalars and tiles `[rows, columns]`. How long registers are and how much memory there is, a [`TileMachine`] says. The [`TileBuilder`] checks every shape and element type when an operation is written;
//! a mistake there is a bug of this crate and panics.
//!
//! # Example
//! A kernel that doubles an array in place, as Mosaic text:
//!
//! ```
//! use assay_core::device_dtype::DeviceDtype;
//! use assay_tile::{TileBuilder, TileColumn, TileMachine, Window, mosaic};
//!
//! let mut on = TileBuilder::new("double", &[1], TileMachine::tpu(120 << 20, true));
//! let window = Window { block: vec![8, 128], along: vec![None, None] };
//! let input = on.input(DeviceDtype::F32, &[8, 128], window);
//! let output = on.output_over(input);
//! let x = on.load(input, TileColumn::Static(0), 128);
//! let twice = on.add(x, x);
//! on.store(output, TileColumn::Static(0), twice);
//! let kernel = on.finish();
//!
//! println!("{}", mosaic::text(&kernel));
//! assert_eq!(kernel.vmem_bytes(), 2 * 2 * 8 * 128 * 4);
//! ```
//!
//! Two lowerings walk the same program:
//!
//! * [`mosaic`]: the text that libtpu compiles for a TPU;
//! * [`xla`]: StableHLO, `while` loops over the grid, which any PJRT device executes.
//!
//! | in the language | Mosaic | StableHLO |
//! |---|---|---|
//! | window | fetched and written back by a double-buffered pipeline | `dynamic_slice` of an array padded with NaN |
//! | scratch, stores | VMEM buffers, `tpu.vector_store` | arrays carried by the loops, `dynamic_update_slice` |
//! | scalar of SMEM | `memref.load` | one-element `dynamic_slice` |
//! | `exp2` | `math.exp2` | `exp(x·ln 2)`: StableHLO has no `exp2` |
//! | fold of lanes | `vector.multi_reduction` | `reduce` |
//! | loop, predicated block | `scf.for`, `scf.if` | `while`, `if` |
//!
//! What lies in a window beyond the end of its array is garbage on a TPU, and NaN (for integers [`POISON`] or [`POISON_16`]) in the
//! StableHLO lowering, so that a kernel which reads it shows. What is written there is dropped by both.

mod build;
mod ir;
mod lower;
mod machine;
pub mod mosaic;
pub mod stablehlo;
pub mod xla;

pub use build::{TileBuilder, TileColumn};
pub use ir::{Fold, TileKernel, TileMemory, TileType, TileValue, Window};
pub use machine::TileMachine;

/// The value that an i32 beyond the end of an array reads as.
pub const POISON: i32 = 0x5A5A_5A5A;

/// The value that an i16 beyond the end of an array reads as: NaN, to a kernel that interprets it as f16.
pub const POISON_16: i16 = 0x7E00;
