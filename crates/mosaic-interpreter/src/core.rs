//! Rules of a core: blocks of whole tiles, and no more VMEM than it has.

use super::check::MosaicProgram;
use super::pipeline::WindowArrays;
use super::value::{ArrayType, ElementKind};
use super::{MosaicInterpretError, TpuCore};

/// Number of columns in a tile.
const LANES: usize = 128;
/// Number of rows in a tile of 32-bit elements.
const SUBLANES: usize = 8;

/// Returns the extents of a tile of `kind`.
fn tile(kind: ElementKind) -> [usize; 2] {
    [SUBLANES * 32 / kind.bits().clamp(8, 32) as usize, LANES]
}

/// Whether blocks of `extent` along an axis of `size` begin and end with its tiles of `tile`.
fn is_whole(extent: usize, size: usize, tile: usize) -> bool {
    extent == size || extent.is_multiple_of(tile)
}

impl TpuCore {
    /// Checks that the core can run `program` on `arrays`.
    pub(super) fn takes(self, program: &MosaicProgram, arrays: &WindowArrays) -> Result<(), MosaicInterpretError> {
        // Copies move whole tiles, so that blocks must consist of them.
        for (i, window) in program.windows.iter().enumerate() {
            let block = &window.ty;
            let array = &arrays.in_hbm[arrays.of_window[i]].ty.shape;
            let tile = tile(block.kind);
            let axes = block.shape.iter().zip(array).rev().zip(tile.iter().rev());
            if axes.clone().any(|((&extent, &size), &tile)| !is_whole(extent, size, tile)) {
                let inputs = arrays.inputs;
                let name = if i < inputs { format!("input {i}") } else { format!("output {}", i - inputs) };
                let [rows, columns] = tile;
                return Err(MosaicInterpretError::Core(format!(
                    "{name}: blocks of {block} over {array:?}, expected whole tiles of {rows} × {columns}, or all of an axis"
                )));
            }
        }
        // Every window is double-buffered; scratch is not.
        let windows: usize = program.windows.iter().map(|window| 2 * vmem_bytes(&window.ty)).sum();
        let scratch: usize = program.scratch.iter().map(vmem_bytes).sum();
        let (needed, most) = (windows + scratch, self.vmem_bytes);
        if needed > most {
            return Err(MosaicInterpretError::Core(format!(
                "two buffers of each window take {windows} bytes of VMEM and scratch {scratch}, expected at most {most} in all"
            )));
        }
        Ok(())
    }
}

/// Returns the bytes that an array takes in VMEM, in whole tiles.
fn vmem_bytes(ty: &ArrayType) -> usize {
    let mut extents = ty.shape.clone();
    for (extent, tile) in extents.iter_mut().rev().zip(tile(ty.kind).into_iter().rev()) {
        *extent = extent.next_multiple_of(tile);
    }
    if let [columns] = extents[..] {
        extents = vec![tile(ty.kind)[0], columns];
    }
    extents.iter().product::<usize>() * ty.kind.bits().clamp(8, 32) as usize / 8
}
