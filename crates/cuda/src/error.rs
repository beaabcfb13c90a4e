//! The errors between this process and CUDA's driver.

use assay_core::text::{ForeignLines, ShownPath};
use assay_ptx::{ALIGNMENT, PtxTarget};

/// Formats CUDA's version number 12040 as 12.4.
fn dotted(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// The reason why the driver failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// The library cannot be loaded, because the machine has no driver.
    #[error(
        "CUDA driver {library}: cannot be loaded: {reason}; expected a machine with an NVIDIA GPU and its driver, or one that \
         ASSAY_CUDA_DRIVER names; `native` computes the same on any CPU"
    )]
    NoDriver {
        /// The name or path of the library.
        library: ShownPath,
        /// The message of the system's loader.
        reason: String,
    },
    /// The library is not a CUDA driver.
    #[error("CUDA driver {library}: it does not export `{symbol}`; expected a driver of CUDA 12.0 or newer")]
    NotADriver {
        /// The name or path of the library.
        library: ShownPath,
        /// The function that the library does not export.
        symbol: &'static str,
    },
    /// The driver does not support the PTX version that kernels are written in.
    #[error(
        "CUDA driver {library}: it is of CUDA {}; expected {} or newer, which takes PTX {}, in which kernels for {} \
         are written: update the driver",
        dotted(*given), dotted(target.least_cuda()), target.version(), target.name()
    )]
    Version {
        /// The name or path of the library.
        library: ShownPath,
        /// The driver's version, as CUDA counts them: 12040 is 12.4.
        given: i32,
        /// The kind of chip that the kernels are written for.
        target: PtxTarget,
    },
    /// The driver has no device, or hides it.
    #[error(
        "CUDA driver {library}: it has no device (CUDA_VISIBLE_DEVICES may hide some); `native` computes the same on any CPU"
    )]
    NoDevice {
        /// The name or path of the library.
        library: ShownPath,
    },
    /// The driver has no device with this number.
    #[error(
        "CUDA driver {library}: it has no device {given}; expected one of 0 to {}", count - 1
    )]
    NoSuchDevice {
        /// The name or path of the library.
        library: ShownPath,
        /// The number that was asked for, from 0.
        given: usize,
        /// The number of devices that the driver has.
        count: i32,
    },
    /// The device is too old for a kernel.
    #[error("{device}: it is of sm_{}{}, {kernel} needs {needed}; {instead}", given.0, given.1)]
    Capability {
        /// The name of the device, as CUDA reports it.
        device: String,
        /// The compute capability of the device, major and minor version.
        given: (i32, i32),
        /// The kernel or implementation that needs more.
        kernel: String,
        /// The lowest capability that the kernel runs on.
        needed: &'static str,
        /// The alternative that runs on this device.
        instead: &'static str,
    },
    /// The kernel needs more shared memory than a CTA of the device may have.
    #[error(
        "{device}, kernel {kernel}: {given} bytes of shared memory a CTA, expected up to {most}; gpu-two-pass-driver needs less, \
         whatever the vocabulary"
    )]
    SharedMemory {
        /// The name of the device, as CUDA reports it.
        device: String,
        /// The name of the kernel's entry.
        kernel: String,
        /// The static and dynamic shared memory of a CTA, in bytes.
        given: usize,
        /// The most bytes that a CTA of this device may have.
        most: usize,
    },
    /// The device, or its slice, has no room for a cluster of the kernel's CTAs.
    #[error(
        "{device}, kernel {kernel}: it has no room for a cluster of {cluster} CTAs with {shared} bytes of shared \
         memory each, expected room for one at least, which a slice of a GPU (MIG) may not have: use a larger slice \
         or the whole GPU, or gpu-two-pass-driver, whose kernels need no cluster"
    )]
    NoRoom {
        /// The name of the device, as CUDA reports it.
        device: String,
        /// The name of the kernel's entry.
        kernel: String,
        /// The number of CTAs of a cluster.
        cluster: u32,
        /// The static and dynamic shared memory of a CTA, in bytes.
        shared: u32,
    },
    /// The driver's assembler refused the text.
    #[error("{device}, kernel {kernel}: the driver refused its PTX ({code}): {log}")]
    Refused {
        /// The name of the device, as CUDA reports it.
        device: String,
        /// The name of the kernel's entry.
        kernel: String,
        /// The driver's name of the error.
        code: String,
        /// The message of the driver's assembler.
        log: ForeignLines,
    },
    /// The device's memory is full.
    #[error("{device}: {what} needs {needed} bytes, {free} of {total} are free; expected fewer tokens at once")]
    OutOfMemory {
        /// The name of the device, as CUDA reports it.
        device: String,
        /// The purpose of the allocation.
        what: String,
        /// The size of the allocation, in bytes.
        needed: usize,
        /// The free memory of the device, in bytes.
        free: usize,
        /// The whole memory of the device, in bytes.
        total: usize,
    },
    /// An array starts at an address that the kernel's vector accesses do not allow.
    #[error(
        "kernel {kernel}, array {array}: it begins at {address:#x}, expected a multiple of {alignment}, because the \
         kernel reads or writes {alignment} bytes of it at a time: copy it to memory of its own"
    )]
    Misaligned {
        /// The name of the kernel's entry.
        kernel: String,
        /// The name of the array's parameter.
        array: String,
        /// The address of its first byte.
        address: u64,
        /// The alignment that the kernel needs, in bytes.
        alignment: u64,
    },
    /// An output is separate from its input, and the two start at different offsets modulo [`ALIGNMENT`].
    #[error(
        "kernel {kernel}, arrays {} and {}: they begin {} and {} bytes past a multiple of {ALIGNMENT}, expected both \
         equally far, because the kernel finds blocks of both by the address of the first: write over the first, or \
         begin the second as far past a multiple of {ALIGNMENT}",
        arrays[0], arrays[1], late[0], late[1]
    )]
    Apart {
        /// The name of the kernel's entry.
        kernel: String,
        /// The names of the input and of the output.
        arrays: [String; 2],
        /// The offsets of both arrays modulo [`ALIGNMENT`], in bytes.
        late: [u64; 2],
    },
    /// A kernel must be loaded while its stream is captured into a graph.
    #[error(
        "kernel {kernel}: its stream is being captured into a CUDA graph, and the kernel is loaded at its first use, \
         which no graph can hold: make one run of the same loss, dtype and vocabulary before the capture"
    )]
    Capturing {
        /// The name of the kernel's entry.
        kernel: String,
    },
    /// A timed launch changed its answer, though it computes the same each time.
    #[error(
        "{kernel}: after {launches} launches on the same logits {array} has {differing} of {all} numbers other than \
         in the answer that was judged, expected the same bits: nothing is reported; the kernel or the device is not \
         to be trusted"
    )]
    Differs {
        /// The id of the implementation.
        kernel: String,
        /// The name of the output that differs.
        array: &'static str,
        /// The number of elements that differ.
        differing: usize,
        /// The number of elements of the output.
        all: usize,
        /// The number of timed launches before the comparison.
        launches: usize,
    },
    /// The batch has more rows than a grid has CTAs.
    #[error("kernel {kernel}: {given} rows, expected up to {most}")]
    Rows {
        /// The name of the kernel's entry.
        kernel: String,
        /// The number of rows that were given.
        given: usize,
        /// The most rows that one launch takes.
        most: usize,
    },
    /// An array has another size than the kernel takes.
    #[error("kernel {kernel}, array {array}: {given} bytes, expected {expected}")]
    Size {
        /// The name of the kernel's entry.
        kernel: String,
        /// The name of the array's parameter.
        array: String,
        /// The size of the array, in bytes.
        given: usize,
        /// The bytes that the kernel reads or writes.
        expected: usize,
    },
    /// The device's primary context is gone.
    #[error(
        "{what}: {code}: {message}; expected the device's primary context, which this process holds until it ends: \
         call neither cudaDeviceReset nor cuDevicePrimaryCtxReset, hand over streams of the same device only, and \
         start the process again"
    )]
    Context {
        /// The operation that failed, as a verb.
        what: String,
        /// The driver's name of the error.
        code: String,
        /// The driver's message for the error.
        message: ForeignLines,
    },
    /// Any other call of the driver failed.
    #[error("{what}: {code}: {message}")]
    Call {
        /// The operation that failed, as a verb.
        what: String,
        /// The driver's name of the error.
        code: String,
        /// The driver's message for the error.
        message: ForeignLines,
    },
}
