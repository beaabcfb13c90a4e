//! PTX as a kernel language: typed registers, instructions, and the text that an NVIDIA driver assembles.
//!
//! A [`PtxBuilder`] writes what one thread of a kernel does, in the order of its calls; whoever writes it says what a CTA of
//! threads and a cluster of CTAs share, and who waits for whom. Registers are [`PtxValue`]s of a type, and a mistake in types
//! does not compile. For the per-token loss it is an [`Arithmetic`](assay_algebra::arithmetic::Arithmetic) of f32.
//!
//! | in the language | PTX |
//! |---|---|
//! | [`PtxValue<f32>`](PtxValue), of `u16`, `u32`, `u64`, `bool` | registers `%f`, `%h`, `%r`, `%d`, `%p`; or a constant |
//! | [`PtxAddress`] | global memory, shared memory of the CTA, that of another CTA of the cluster |
//! | [`add_pair`](PtxBuilder::add_pair) and its like | one instruction on two f32 from `sm_100` on, two before |
//! | [`variable`](PtxBuilder::variable), [`set`](PtxBuilder::set) | `mov`: the only registers that change |
//! | [`when`](PtxBuilder::when), [`repeat`](PtxBuilder::repeat) | branches round or back |
//!
//! # Example
//! A kernel that doubles one number for each thread of a CTA:
//!
//! ```
//! use assay_core::device_dtype::DeviceDtype;
//! use assay_ptx::{PtxAddress, PtxBuilder, PtxLaunch, PtxTarget, PtxValue};
//!
//! let mut on = PtxBuilder::new("double", PtxTarget::Sm80);
//! let input = on.input("x", DeviceDtype::F32, &[32]);
//! let output = on.output("y", DeviceDtype::F32, &[32]);
//! let thread = on.thread();
//! let offset = on.mul_wide(thread, 4);
//! let from = on.add(input, offset);
//! let x: PtxValue<f32> = on.load(PtxAddress::Global(from, 0));
//! let twice = on.add(x, x);
//! let to = on.add(output, offset);
//! on.store(PtxAddress::Global(to, 0), twice);
//! let kernel = on.finish(PtxLaunch { grid: [1; 3], block: [32, 1, 1], cluster: 1, least_resident: 1 });
//!
//! println!("{}", kernel.text);
//! assert!(kernel.text.contains("add.rn.f32 %f1, %f0, %f0;"));
//! ```
//!
//! A text for `sm_80` and `sm_90` is `.version 8.0`: any driver since CUDA 12.0 takes it, and one for a newer chip assembles it for
//! that. One for `sm_100` is `.version 8.6`, of CUDA 12.7.

mod arithmetic;
mod build;
mod value;

pub use build::{Arrival, PackedFloat, PtxAddress, PtxBuilder};
pub use value::{PtxElement, PtxInteger, PtxNumber, PtxStorable, PtxValue};

use assay_core::device_dtype::DeviceDtype;

/// The oldest GPU architecture that a kernel's text runs on; later ones run it too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PtxTarget {
    /// Architecture of the A100.
    Sm80,
    /// Architecture of the H100, the first with clusters of CTAs.
    Sm90,
    /// B200: arithmetic on two f32 at once.
    Sm100,
}

impl PtxTarget {
    /// Returns the name of the architecture in PTX text, such as `sm_90`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sm80 => "sm_80",
            Self::Sm90 => "sm_90",
            Self::Sm100 => "sm_100",
        }
    }

    /// The version of PTX that a text for it is in, the lowest that has it.
    pub fn version(self) -> &'static str {
        match self {
            Self::Sm80 | Self::Sm90 => "8.0",
            Self::Sm100 => "8.6",
        }
    }

    /// The oldest CUDA whose driver takes a text for it, as CUDA counts versions: 12070 is 12.7.
    pub fn least_cuda(self) -> i32 {
        match self {
            Self::Sm80 | Self::Sm90 => 12_000,
            Self::Sm100 => 12_070,
        }
    }
}

/// Grid, block and cluster sizes of a kernel launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PtxLaunch {
    /// CTAs along x, y and z.
    pub grid: [u32; 3],
    /// Threads of a CTA along x, y and z.
    pub block: [u32; 3],
    /// CTAs of a cluster along x.
    pub cluster: u32,
    /// CTAs that should find room on a multiprocessor together: how many registers a thread has follows from it.
    pub least_resident: u32,
}

/// A kernel as text, and how it is launched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PtxKernel {
    /// The name of its entry.
    pub name: String,
    /// The PTX text of the module.
    pub text: String,
    /// CTAs along x, y and z.
    pub grid: [u32; 3],
    /// Threads of a CTA along x, y and z.
    pub block: [u32; 3],
    /// CTAs of a cluster; 1 where there is none. The text says `.reqnctapercluster` where it is more.
    pub cluster: u32,
    /// Dynamic shared memory of a CTA, bytes.
    pub shared_bytes: u32,
    /// The entry's parameters: one 64-bit pointer each, inputs first, then outputs, as an XLA call passes them. An
    /// output that is written over an input has a separate pointer with the same value.
    pub parameters: Vec<Parameter>,
}

/// The most bytes that a kernel reads or writes at once. An array that begins at a multiple of it suits every kernel.
pub const ALIGNMENT: u64 = 16;

/// An array of global memory that a kernel is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// The name of the array in documents and manifests.
    pub name: String,
    /// The dtype of each element.
    pub dtype: DeviceDtype,
    /// The extents of the array, row-major.
    pub shape: Vec<usize>,
    /// The array begins at a multiple of so many bytes, at most [`ALIGNMENT`]; the text says so too, and relies on it.
    pub alignment: u64,
    /// Whether it is read or written.
    pub role: Role,
}

/// The use that a kernel makes of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// An array that the kernel reads.
    Input,
    /// An array that the kernel writes.
    Output {
        /// The input, by its place among the parameters, over which it lies.
        over: Option<usize>,
    },
}

impl Parameter {
    /// Returns the size of the array in bytes.
    pub fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size()
    }
}

impl PtxKernel {
    /// The arrays that it reads, in order.
    pub fn inputs(&self) -> impl Iterator<Item = &Parameter> {
        self.parameters.iter().filter(|parameter| parameter.role == Role::Input)
    }

    /// Returns the arrays that the kernel writes, in order.
    pub fn outputs(&self) -> impl Iterator<Item = &Parameter> {
        self.parameters.iter().filter(|parameter| parameter.role != Role::Input)
    }

    /// Input and output that are one array, by their places among inputs and outputs.
    pub fn aliases(&self) -> Vec<(usize, usize)> {
        let over = |(output, parameter): (usize, &Parameter)| match parameter.role {
            Role::Output { over: Some(input) } => Some((input, output)),
            _ => None,
        };
        self.outputs().enumerate().filter_map(over).collect()
    }
}
