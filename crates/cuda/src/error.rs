//! What can go wrong between this process and the driver.

use std::path::PathBuf;

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
    /// A driver that does not know this PTX.
    #[error(
        "CUDA driver {library}: it is of CUDA {}.{}; expected 12.0 or newer, which takes PTX 8.0: update the driver",
        given / 1000, given % 1000 / 10, library = library.display()
    )]
    Version {
        /// The library.
        library: PathBuf,
        /// As CUDA counts them: 12040 is 12.4.
        given: i32,
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
        "kernel {kernel}, array {array}: it begins at {address:#x}, expected a multiple of {}: kernels read and write 16 bytes at a time",
        assay_ptx::ALIGNMENT
    )]
    Misaligned {
        /// The kernel's entry.
        kernel: String,
        /// The array's name.
        array: String,
        /// Where it begins.
        address: u64,
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
