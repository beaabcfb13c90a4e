//! What can go wrong between this process and the driver.

use std::path::PathBuf;

use assay_ptx::{ALIGNMENT, Target};

/// A version as CUDA counts them, 12040, in digits: 12.4.
fn dotted(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// Why the driver did not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// There is no such library.
    #[error(
        "CUDA driver {library}: cannot be loaded: {reason}; expected a machine with an NVIDIA GPU and its driver, or one that \
         ASSAY_CUDA_DRIVER names; `native` computes the same on any CPU", library = library.display()
    )]
    NoDriver {
        /// What was looked for.
        library: PathBuf,
        /// The loader's message.
        reason: String,
    },
    /// A library that is no driver.
    #[error("CUDA driver {library}: it does not export `{symbol}`; expected a driver of CUDA 12.0 or newer", library = library.display())]
    NotADriver {
        /// The library.
        library: PathBuf,
        /// What it lacks.
        symbol: &'static str,
    },
    /// A driver that does not know the PTX that kernels are written in.
    #[error(
        "CUDA driver {library}: it is of CUDA {}; expected {} or newer, which takes PTX {}, in which kernels for {} \
         are written: update the driver",
        dotted(*given), dotted(target.least_cuda()), target.version(), target.name(), library = library.display()
    )]
    Version {
        /// The library.
        library: PathBuf,
        /// The driver's version, as CUDA counts them: 12040 is 12.4.
        given: i32,
        /// The kind of chip that the kernels are written for.
        target: Target,
    },
    /// It has no device.
    #[error("CUDA driver {library}: it has no device (CUDA_VISIBLE_DEVICES may hide some); `native` computes the same on any CPU", library = library.display())]
    NoDevice {
        /// The library.
        library: PathBuf,
    },
    /// It has no device of such a number.
    #[error(
        "CUDA driver {library}: it has no device {given}; expected one of 0 to {}", count - 1, library = library.display()
    )]
    NoSuchDevice {
        /// The library.
        library: PathBuf,
        /// Which was asked for, from 0 on.
        given: usize,
        /// How many there are.
        count: i32,
    },
    /// A device too old for a kernel.
    #[error("{device}: it is of sm_{}{}, {kernel} needs {needed}; {instead}", given.0, given.1)]
    Capability {
        /// Its name.
        device: String,
        /// Its compute capability.
        given: (i32, i32),
        /// What does not run on it.
        kernel: String,
        /// The least that would do.
        needed: &'static str,
        /// What runs there.
        instead: &'static str,
    },
    /// A kernel whose shared memory a CTA of the device has not.
    #[error(
        "{device}, kernel {kernel}: {given} bytes of shared memory a CTA, expected up to {most}; gpu-two-pass-driver needs less, \
         whatever the vocabulary"
    )]
    SharedMemory {
        /// Its name.
        device: String,
        /// The kernel's entry.
        kernel: String,
        /// Static and dynamic.
        given: usize,
        /// What a CTA may have if it asks.
        most: usize,
    },
    /// A device, or a part of one, on which no cluster of a kernel's CTAs has room.
    #[error(
        "{device}, kernel {kernel}: it has no room for a cluster of {cluster} CTAs with {shared} bytes of shared \
         memory each, expected room for one at least, which a slice of a GPU (MIG) may not have: use a larger slice \
         or the whole GPU, or gpu-two-pass-driver, whose kernels need no cluster"
    )]
    NoRoom {
        /// The device's name.
        device: String,
        /// The kernel's entry.
        kernel: String,
        /// CTAs of a cluster.
        cluster: u32,
        /// Static and dynamic shared memory of a CTA, bytes.
        shared: u32,
    },
    /// The driver's assembler refused the text.
    #[error("{device}, kernel {kernel}: the driver refused its PTX ({code}): {log}")]
    Refused {
        /// Its name.
        device: String,
        /// The kernel's entry.
        kernel: String,
        /// The driver's name of the error.
        code: String,
        /// Its own words.
        log: String,
    },
    /// The device's memory is full.
    #[error("{device}: {what} needs {needed} bytes, {free} of {total} are free; expected fewer tokens at once")]
    OutOfMemory {
        /// Its name.
        device: String,
        /// What was to be allocated.
        what: String,
        /// Bytes it takes.
        needed: usize,
        /// Bytes that are free.
        free: usize,
        /// Bytes there are.
        total: usize,
    },
    /// An array that a kernel would read in pieces that the hardware refuses.
    #[error(
        "kernel {kernel}, array {array}: it begins at {address:#x}, expected a multiple of {alignment}, because the \
         kernel reads or writes {alignment} bytes of it at a time: copy it to memory of its own"
    )]
    Misaligned {
        /// The kernel's entry.
        kernel: String,
        /// The array's name.
        array: String,
        /// Where it begins.
        address: u64,
        /// The bytes that it must begin at a multiple of.
        alignment: u64,
    },
    /// An output that has a place of its own, which does not suit that of the input.
    #[error(
        "kernel {kernel}, arrays {} and {}: they begin {} and {} bytes past a multiple of {ALIGNMENT}, expected both \
         equally far, because the kernel finds blocks of both by the address of the first: write over the first, or \
         begin the second as far past a multiple of {ALIGNMENT}",
        arrays[0], arrays[1], late[0], late[1]
    )]
    Apart {
        /// The kernel's entry.
        kernel: String,
        /// The names of the input and of the output.
        arrays: [String; 2],
        /// How many bytes past a multiple of [`ALIGNMENT`] each begins.
        late: [u64; 2],
    },
    /// A kernel that is to be loaded while its stream is captured.
    #[error(
        "kernel {kernel}: its stream is being captured into a CUDA graph, and the kernel is loaded at its first use, \
         which no graph can hold: make one run of the same loss, dtype and vocabulary before the capture"
    )]
    Capturing {
        /// The kernel's entry.
        kernel: String,
    },
    /// An answer that is not the one that was judged, though nothing else was computed.
    #[error(
        "{kernel}: after {launches} launches on the same logits {array} has {differing} of {all} numbers other than \
         in the answer that was judged, expected the same bits: nothing is reported; the kernel or the device is not \
         to be trusted"
    )]
    Differs {
        /// The implementation.
        kernel: String,
        /// The output that differs.
        array: &'static str,
        /// Numbers that differ.
        differing: usize,
        /// Numbers there are.
        all: usize,
        /// Launches that were timed.
        launches: usize,
    },
    /// More rows than a grid has CTAs for.
    #[error("kernel {kernel}: {given} rows, expected up to {most}")]
    Rows {
        /// The kernel's entry.
        kernel: String,
        /// How many were given.
        given: usize,
        /// How many a launch takes.
        most: usize,
    },
    /// An array of another size than a kernel takes.
    #[error("kernel {kernel}, array {array}: {given} bytes, expected {expected}")]
    Size {
        /// The kernel's entry.
        kernel: String,
        /// The array's name.
        array: String,
        /// What it has.
        given: usize,
        /// What the kernel reads or writes.
        expected: usize,
    },
    /// A call for which the device's context is no longer there.
    #[error(
        "{what}: {code}: {message}; expected the device's primary context, which this process holds until it ends: \
         call neither cudaDeviceReset nor cuDevicePrimaryCtxReset, hand over streams of the same device only, and \
         start the process again"
    )]
    Context {
        /// The operation that failed.
        what: String,
        /// The driver's name of the error.
        code: String,
        /// The driver's message.
        message: String,
    },
    /// Any other call that failed.
    #[error("{what}: {code}: {message}")]
    Call {
        /// What it was asked to do.
        what: String,
        /// The driver's name of the error.
        code: String,
        /// Its words.
        message: String,
    },
}
