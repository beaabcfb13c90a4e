//! PTX as a kernel language: a kernel, and how it is launched.

use assay_core::device_dtype::DeviceDtype;

/// A kernel as text, and how it is launched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// The name of its entry.
    pub name: String,
    /// The module, PTX text.
    pub text: String,
    /// CTAs along x, y and z.
    pub grid: [u32; 3],
    /// Threads of a CTA along x, y and z.
    pub block: [u32; 3],
    /// CTAs of a cluster; 1 where there is none. The text says `.reqnctapercluster` where it is more.
    pub cluster: u32,
    /// Dynamic shared memory of a CTA, bytes.
    pub shared_bytes: u32,
    /// What the entry takes: one 64-bit pointer each, inputs first, then outputs, as an XLA call hands them. An output that
    /// lies over an input has a pointer of its own, which is the input's again.
    pub parameters: Vec<Parameter>,
}

/// An array of global memory that a kernel is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// What it is called in docs and manifests.
    pub name: String,
    /// Its elements.
    pub dtype: DeviceDtype,
    /// Its extents, row-major.
    pub shape: Vec<usize>,
    /// Whether it is read or written.
    pub role: Role,
}

/// What a kernel does with an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It is read.
    Input,
    /// It is written.
    Output {
        /// The input, by its place among the parameters, over which it lies.
        over: Option<usize>,
    },
}
