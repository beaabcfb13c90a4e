//! Checks of a launch against the demands of an entry, and the arithmetic of grids.

use super::decode::MOST_SHARED;
use super::instruction::DecodedEntry;
use super::{GlobalArray, GridLaunch};

/// Returns the product of three extents, or None if one is 0 or the product overflows.
pub(super) fn volume(extents: [u32; 3]) -> Option<u32> {
    let [x, y, z] = extents;
    x.checked_mul(y)?.checked_mul(z).filter(|&volume| volume > 0)
}

/// Splits an index into coordinates, x fastest.
pub(super) fn split(index: u32, extents: [u32; 3]) -> [u32; 3] {
    [index % extents[0], index / extents[0] % extents[1], index / extents[0] / extents[1]]
}

/// Checks that the launch and the arrays fit the entry; the error says what does not.
pub(super) fn check(
    kernel: &DecodedEntry,
    launch: &GridLaunch,
    buffers: &[GlobalArray],
    arguments: &[usize],
) -> Result<(), String> {
    let GridLaunch { grid, block, cluster, dynamic_shared } = *launch;
    let threads = volume(block).filter(|&threads| threads <= 1024);
    let Some(threads) = threads else {
        return Err(format!("a block of {block:?} threads, expected 1 to 1024"));
    };
    if kernel.limits.block.is_some_and(|expected| expected != block) {
        return Err(format!(
            "a block of {block:?} threads, and .reqntid says {:?}",
            kernel.limits.block.unwrap_or_default()
        ));
    }
    if kernel.limits.most_threads.is_some_and(|most| threads > most) {
        return Err(format!("a block of {threads} threads, more than .maxntid says"));
    }
    // A launch gives the cluster of the directives, and whole clusters cover the grid.
    let expected = kernel.limits.cluster.unwrap_or([1, 1, 1]);
    if cluster != expected {
        return Err(format!("clusters of {cluster:?}, and .reqnctapercluster says {expected:?}"));
    }
    let whole = (0..3).all(|axis| cluster[axis] > 0 && grid[axis].is_multiple_of(cluster[axis]));
    let all = volume(grid)
        .and_then(|ctas| ctas.checked_mul(threads + kernel.barriers_of_a_cta as u32))
        .filter(|&all| all < u32::MAX - 1);
    if !whole || all.is_none() || volume(cluster).is_none_or(|ctas| ctas > 16) {
        return Err(format!("a grid of {grid:?} CTAs in clusters of {cluster:?}, expected whole clusters of 1 to 16"));
    }
    // Dynamic shared memory needs an array that takes it, and room behind the declared arrays.
    match kernel.dynamic {
        None if dynamic_shared > 0 => {
            return Err(format!("{dynamic_shared} bytes of dynamic shared memory, and no array that takes them"));
        }
        Some(start) if start.checked_add(dynamic_shared).is_none_or(|end| end >= MOST_SHARED) => {
            return Err(format!("{dynamic_shared} bytes of dynamic shared memory are too many"));
        }
        _ => {}
    }
    // Each parameter takes the address of a buffer.
    if arguments.len() != kernel.parameters.len() {
        let takes = kernel.parameters.join(", ");
        return Err(format!("{} arguments, and {} takes {takes}", arguments.len(), kernel.name));
    }
    if let Some(buffer) = arguments.iter().find(|&&buffer| buffer >= buffers.len()) {
        return Err(format!("argument {buffer} of {} buffers", buffers.len()));
    }
    let beyond = |GlobalArray { name, bytes, unwritten, .. }: &GlobalArray| {
        let range = unwritten.iter().find(|range| range.start > range.end || range.end > bytes.len())?;
        Some(format!("unwritten bytes {range:?} of {name}, which has {}", bytes.len()))
    };
    buffers.iter().find_map(beyond).map_or(Ok(()), Err)
}
