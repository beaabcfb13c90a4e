//! An interpreter of the Mosaic text that libtpu compiles. It checks the emitter's text and shares no code with the emitter.
//!
//! [`run`] takes a module in MLIR's generic form, every operation but the module renamed
//! `stable_mosaic.<dialect>.<op>`, and the arrays of the custom call that carries it. It knows the forms that JAX 0.10.2
//! prints for version 11; an operation, attribute or type that it does not know is an error, never a guess. The text is
//! not trusted: parsing, checking and running end with an error that names the line, the operation and what was
//! expected, and sizes and work are bounded.
//!
//! # Arithmetic
//!
//! f32 computes in f32. bf16 and f16 compute in f32 and round to nearest even after every operation. A reduction folds
//! by halves; a TPU may sum in another order, so sums agree to rounding only. The transcendental functions are those of the host.
//! `index` has 32 bits. `tpu.assume_multiple` is checked. Results that MLIR leaves undefined are errors (division by zero, shifts
//! beyond the width) or poison (`fptosi` out of range).
//!
//! # Memory
//!
//! Memory that was not written is poison: NaN for floats, `0x5A5A5A5A` cut to the width for integers, but `0x7E00`, the NaN of f16,
//! for i16. That holds for an output's window when it moves to a block, for scratch before the first step, for the elements of a
//! window beyond its array, and for the elements of an output that no step wrote. Window elements beyond the array are dropped on
//! the way back. A body may write to an input's window, a private copy of its block, if every step has another block. If the window
//! stays, its content at a later step depends on the pipeline, and the store is an error.
//!
//! # Pipeline
//!
//! Steps run in order, the grid's last dimension fastest. At each step, a window is at the block that its transform gives:
//! block index × window extent, in every dimension. Copies overlap the bodies, as a double-buffered pipeline has them:
//!
//! - The block that an input needs at step j is fetched, if its index is not that of step j − 1, at some time between
//!   the beginning of body j − 1 and that of body j.
//! - The block that an output leaves after step i is written at some time between the end of body i and that of body
//!   i + 1, or the end of the run.
//!
//! Fetches are made at the earliest of these times and write-backs at the latest. With an output that overwrites an
//! input in place the times could matter: a fetch for step j may meet a write-back of step j − 2, which is under way
//! when the fetch begins, or one of step j − 1, which begins before the fetch must end. A fetch that shares an element
//! with either is an error. Those of step j and later cannot touch it, since the fetch is over; those of step j − 3 and
//! earlier have landed, and the fetch reads what they wrote. So a run without an error has one result, whatever the
//! times.
//!
//! Cores of a device may share the steps of a `parallel` dimension, each with separate scratch. So it is an error to read scratch
//! that a step of another index along it wrote, to stay at an output's block, or to touch an element of an array that is
//! overwritten in place.
//!
//! An output that comes back to a block that it left is an error (its contents are gone from VMEM), and so is a block
//! that is entirely outside its array.
//!
//! # A core
//!
//! Where a [`TpuCore`] is given, its rules hold too. Arrays lie in tiles, 8 rows of 128 columns of 32 bits, and of narrower elements as
//! many more rows: a window's block must be whole tiles, or all of an axis, since copies move tiles. Two blocks that share no
//! element then share no tile, so that no copies race within one. Two buffers of each window, and scratch, must fit VMEM.

mod check;
mod core;
mod elementwise;
mod operation;
mod parse;
mod pipeline;
mod run;
mod value;

use pipeline::{HbmArray, WindowArrays};
use value::{ArrayType, ElementBuffer, ElementKind};

use assay_core::device_dtype::DeviceDtype;

/// Largest number of elements that a run handles by default: some minutes of work.
const MOST_WORK: u64 = 1 << 36;

/// The accuracy of exponentials, logarithms and quotients, and the order in which lanes are summed. The accuracy of a
/// TPU's units is not published: a kernel that is right with all of these is right with any unit whose errors are no
/// larger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MosaicUnits {
    /// The host's functions, and sums by halves.
    Host,
    /// Results further from 0 by [`OFF_ULP`], and sums by pairs of neighbours.
    Above,
    /// Results nearer to 0 by [`OFF_ULP`], and sums by pairs of neighbours.
    Below,
}

/// Error of [`MosaicUnits::Above`] and [`MosaicUnits::Below`] in units in the last place; for a logarithm between −1
/// and 1, in multiples of 2⁻²⁴.
pub const OFF_ULP: i32 = 8;

/// The conditions under which a module is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MosaicOptions {
    /// Accuracy of the arithmetic units.
    pub units: MosaicUnits,
    /// Core whose rules must hold; `None` if none must.
    pub core: Option<TpuCore>,
    /// Largest number of elements that the run may handle before it is given up.
    pub most_work: u64,
}

impl Default for MosaicOptions {
    fn default() -> Self {
        Self { units: MosaicUnits::Host, core: None, most_work: MOST_WORK }
    }
}

/// A TPU's core, as far as it bounds a kernel. See [the module](self).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TpuCore {
    /// Bytes of VMEM that a kernel may use.
    pub vmem_bytes: usize,
}

/// A dense row-major array in the memory of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostArray {
    /// Element type of the array: f32, bf16, f16, i16 or i32.
    pub element: DeviceDtype,
    /// Extents of the array, outermost first.
    pub shape: Vec<usize>,
    /// Elements of the array in row-major order, little-endian.
    pub bytes: Vec<u8>,
}

/// The reason why a module was not run to its end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MosaicInterpretError {
    /// The text is not a module in the generic form, or uses a part of it that is not supported.
    #[error("line {line}: {problem}")]
    Text {
        /// Line of the text, counted from 1.
        line: usize,
        /// Description of the text that was found and of the expected one.
        problem: String,
    },
    /// An operation is unknown, is wrong in itself, or failed when it ran.
    #[error("line {line}: {name}: {problem}")]
    Operation {
        /// Line of the operation, counted from 1.
        line: usize,
        /// Dialect and name of the operation.
        name: String,
        /// Description of the operation's mistake, with the expected form.
        problem: String,
    },
    /// A window is outside its array, or is read and written at once.
    #[error("{window}, at grid step {step:?}: {problem}")]
    Window {
        /// Name of the window, `input 0` or `output 1`.
        window: String,
        /// Grid indices of the step.
        step: Vec<usize>,
        /// Description of the window's mistake, with the expected place.
        problem: String,
    },
    /// The caller's arrays do not fit the module.
    #[error("{0}")]
    Arrays(String),
    /// The core's rules do not allow the kernel.
    #[error("core: {0}")]
    Core(String),
    /// The run was given up, because it handled too many elements.
    #[error("not finished after {most} elements: the module is too large to be interpreted, or does not end")]
    Endless {
        /// Largest number of elements that the run may handle.
        most: u64,
    },
}

impl MosaicInterpretError {
    /// Adds the grid step at which an operation failed.
    fn at(self, step: &[usize]) -> Self {
        match self {
            MosaicInterpretError::Operation { line, name, problem } => {
                MosaicInterpretError::Operation { line, name, problem: format!("{problem}, at grid step {step:?}") }
            }
            other => other,
        }
    }
}

/// Runs the kernel of `module` on `operands` and returns the `outputs`, each of the given type.
///
/// Operands come in the custom call's order: the arrays for scalar memory, then the inputs. Each of `aliases` names an
/// operand and the output that takes its memory. See [the module](self) for what a run does.
///
/// # Errors
/// When the text is malformed or not supported, when the arrays are not those that it takes, and when the run breaks a
/// rule: a place out of range, a broken assumption, a fetch and a write-back that race.
pub fn run(
    module: &str,
    operands: Vec<HostArray>,
    outputs: &[(DeviceDtype, Vec<usize>)],
    aliases: &[(usize, usize)],
) -> Result<Vec<HostArray>, MosaicInterpretError> {
    run_with(MosaicOptions::default(), module, operands, outputs, aliases)
}

/// Runs a module like [`run`], under the given `options`.
///
/// # Errors
/// As [`run`], and where a rule of the core is broken.
pub fn run_with(
    options: MosaicOptions,
    module: &str,
    mut operands: Vec<HostArray>,
    outputs: &[(DeviceDtype, Vec<usize>)],
    aliases: &[(usize, usize)],
) -> Result<Vec<HostArray>, MosaicInterpretError> {
    // Parse and check the module, then match it with the caller's arrays.
    let program = check::check(&parse::parse(module)?)?;
    let (prefetched, windows) = (program.prefetch.len(), program.windows.len());
    if operands.len() < prefetched || operands.len() - prefetched + outputs.len() != windows {
        return Err(MosaicInterpretError::Arrays(format!(
            "{} operands and {} outputs, expected {prefetched} arrays for scalar memory and {windows} inputs and outputs",
            operands.len(),
            outputs.len()
        )));
    }
    // Arrays for scalar memory must have exactly the types that the kernel declares.
    let inputs = operands.split_off(prefetched);
    let mut prefetch = Vec::new();
    for (i, (array, expected)) in operands.into_iter().zip(&program.prefetch).enumerate() {
        let array = hbm_array(array, expected.kind, &format!("operand {i}"))?;
        if array.ty != *expected {
            return Err(MosaicInterpretError::Arrays(format!("operand {i} is {}, expected {expected}", array.ty)));
        }
        prefetch.push(array.elements);
    }
    // Inputs move under windows, whose kind their elements must have.
    let mut arrays = WindowArrays { in_hbm: Vec::new(), of_window: (0..inputs.len()).collect(), inputs: inputs.len() };
    let kinds: Vec<ElementKind> = program.windows.iter().map(|window| window.ty.kind).collect();
    for (i, array) in inputs.into_iter().enumerate() {
        arrays.in_hbm.push(hbm_array(array, kinds[i], &format!("operand {}", prefetched + i))?);
    }
    // Outputs take the memory of an input, or begin as poison.
    let sources = alias_sources(aliases, prefetched, &arrays, outputs.len())?;
    for (i, ((element, shape), source)) in outputs.iter().zip(sources).enumerate() {
        let output = unwritten(*element, shape, kinds[arrays.inputs + i], &format!("output {i}"))?;
        let place = source.unwrap_or(arrays.in_hbm.len());
        match arrays.in_hbm.get(place) {
            Some(input) if input.ty != output => {
                return Err(MosaicInterpretError::Arrays(format!(
                    "output {i} is {output} and overwrites {}",
                    input.ty
                )));
            }
            Some(_) => {}
            None => arrays.in_hbm.push(HbmArray { elements: ElementBuffer::poison(&output), ty: output }),
        }
        arrays.of_window.push(place);
    }
    // A window has as many dimensions as its array.
    for (window, &array) in program.windows.iter().zip(&arrays.of_window) {
        let array = &arrays.in_hbm[array].ty;
        if array.shape.len() != window.ty.shape.len() {
            return Err(MosaicInterpretError::Arrays(format!("an array of {array} under a window of {}", window.ty)));
        }
    }
    if let Some(core) = options.core {
        core.takes(&program, &arrays)?;
    }
    pipeline::run(&program, prefetch, &mut arrays, options)?;
    // The results are the outputs' arrays after the last write-back.
    let written = arrays.of_window[arrays.inputs..].iter().map(|&array| &arrays.in_hbm[array]);
    let results = written.zip(outputs).map(|(array, (element, shape))| HostArray {
        element: *element,
        shape: shape.clone(),
        bytes: array.elements.to_bytes(array.ty.kind),
    });
    Ok(results.collect())
}

/// Returns for each output the input whose array it overwrites, if any.
fn alias_sources(
    aliases: &[(usize, usize)],
    prefetched: usize,
    arrays: &WindowArrays,
    outputs: usize,
) -> Result<Vec<Option<usize>>, MosaicInterpretError> {
    let mut sources = vec![None; outputs];
    for &(operand, output) in aliases {
        // Operands count the prefetched arrays first, windows do not. An input is overwritten by one output at most,
        // and an output overwrites one input.
        let input = operand.checked_sub(prefetched).filter(|&input| input < arrays.inputs);
        let free = input.is_some_and(|input| !sources.contains(&Some(input)));
        match sources.get_mut(output) {
            Some(source @ None) if free => *source = input,
            _ => {
                let problem = format!("operand {operand} cannot be overwritten by output {output}");
                return Err(MosaicInterpretError::Arrays(problem));
            }
        }
    }
    Ok(sources)
}

/// Returns the type of a caller's array, which must hold elements of `kind`.
fn unwritten(
    element: DeviceDtype,
    shape: &[usize],
    kind: ElementKind,
    name: &str,
) -> Result<ArrayType, MosaicInterpretError> {
    if kind.element() != Some(element) {
        return Err(MosaicInterpretError::Arrays(format!("{name} holds {element}, expected {kind}")));
    }
    ArrayType::new(kind, shape.to_vec()).ok_or_else(|| {
        MosaicInterpretError::Arrays(format!("{name} of {shape:?} is larger than any array that is run"))
    })
}

fn hbm_array(array: HostArray, kind: ElementKind, name: &str) -> Result<HbmArray, MosaicInterpretError> {
    let ty = unwritten(array.element, &array.shape, kind, name)?;
    let expected = ty.len() * array.element.size();
    if array.bytes.len() != expected {
        let problem = format!("{name} has {} bytes, expected {expected} for {ty}", array.bytes.len());
        return Err(MosaicInterpretError::Arrays(problem));
    }
    Ok(HbmArray { elements: ElementBuffer::from_bytes(kind, &array.bytes), ty })
}
