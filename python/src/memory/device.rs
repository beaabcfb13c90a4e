//! Handles for a framework's memory on a GPU, of which only the address is known here.

use assay::cuda::driver::{BorrowedArray, CudaStream};

/// The array of so many bytes at an address.
pub(crate) fn lent(address: u64, bytes: usize) -> BorrowedArray {
    // SAFETY: the package hands over what its own tensors say of themselves. Their framework frees memory in the order of the stream
    // that it was used on, which is the one that kernels are enqueued on, as those of any other operation are.
    unsafe { BorrowedArray::new(address, bytes) }
}

/// The stream of a `CUstream`.
pub(crate) fn stream(handle: usize) -> CudaStream {
    // SAFETY: it is the framework's current one on the device of the tensors, in the primary context; it keeps its streams.
    unsafe { CudaStream::new(handle) }
}
