//! [`Aligned`], the allocator of this extension.

use std::alloc::{GlobalAlloc, Layout, System};

/// The system's allocator, with every block of [`LARGE`] bytes and more at a multiple of [`ALIGNMENT`].
pub(crate) struct Aligned;

/// The alignment in bytes that XLA on CPUs requires to use an array without copying it.
const ALIGNMENT: usize = 64;

/// The size in bytes from which a block may be an array that is shared.
const LARGE: usize = 1024;

/// Returns the layout that is requested from the system for `layout`. It depends on the layout alone, so that a block
/// is freed as it was allocated.
fn wide(layout: Layout) -> Layout {
    if layout.size() < LARGE {
        return layout;
    }
    layout.align_to(ALIGNMENT).unwrap_or(layout)
}

// SAFETY: every block comes from `System`, with a layout that is at least as strict as the one asked for, and returns to it
// with that same layout. No method panics.
unsafe impl GlobalAlloc for Aligned {
    // # Safety: as the trait has it.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's layout has a size other than 0, and so has the wider one.
        unsafe { System.alloc(wide(layout)) }
    }

    // # Safety: as the trait has it.
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as in `alloc`.
        unsafe { System.alloc_zeroed(wide(layout)) }
    }

    // # Safety: as the trait has it.
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the block was taken with this layout, so from `System` with the wider one.
        unsafe { System.dealloc(block, wide(layout)) }
    }

    // # Safety: as the trait has it.
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's new size is not 0 and does not overflow at its alignment.
        let new = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        if wide(layout).align() == wide(new).align() {
            // SAFETY: the block was taken with `wide(layout)`, and stays at that alignment.
            return unsafe { System.realloc(block, wide(layout), size) };
        }
        // SAFETY: `new` is a layout that the caller may ask for.
        let moved = unsafe { self.alloc(new) };
        if !moved.is_null() {
            // SAFETY: both blocks hold as many bytes, and are apart; the old one is given back as it was taken.
            unsafe {
                block.copy_to_nonoverlapping(moved, layout.size().min(size));
                self.dealloc(block, layout);
            }
        }
        moved
    }
}
