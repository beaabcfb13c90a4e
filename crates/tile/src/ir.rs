//! The program of a kernel: values, operations, statements.

use std::fmt;

use super::lower::stored_in;
use super::machine::TileMachine;
use assay_core::device_dtype::DeviceDtype;

/// Element type of a value, and its extents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileType {
    /// The dtype of every element.
    pub element: DeviceDtype,
    /// `[rows, columns]` of a tile; `None` for a scalar.
    pub tile: Option<[usize; 2]>,
}

impl TileType {
    /// Returns the type of one number.
    pub fn scalar(element: DeviceDtype) -> Self {
        Self { element, tile: None }
    }

    /// Returns the type of a tile `[rows, columns]`.
    pub fn tile(element: DeviceDtype, rows: usize, columns: usize) -> Self {
        Self { element, tile: Some([rows, columns]) }
    }
}

impl fmt::Display for TileType {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.tile {
            Some([rows, columns]) => write!(f, "{}[{rows},{columns}]", self.element),
            None => write!(f, "{}", self.element),
        }
    }
}

/// A value of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileValue(pub(super) usize);

/// Memory that a kernel reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TileMemory {
    /// A short array in SMEM, read as scalars.
    Scalars(usize),
    /// The window of an input. The kernel may write to it: its own copy, which is lost. On a TPU it is one because the
    /// operand is then asked to be in HBM.
    Input(usize),
    /// The window of an output.
    Output(usize),
    /// Scratch in VMEM. It keeps its contents from one step of the grid to the next.
    Scratch(usize),
}

/// The block of an array that each step of the grid sees.
///
/// Leading dimensions have blocks of one and are not seen by the kernel; the last two are the window's rows and
/// columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// Extents of a block. It may reach beyond the end of the array.
    pub block: Vec<usize>,
    /// The axis of the grid whose index is the block's index, for each dimension; `None` means block 0.
    pub along: Vec<Option<usize>>,
}

/// An array that a kernel is called with, or returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WindowedArray {
    pub element: DeviceDtype,
    pub shape: Vec<usize>,
    pub window: Window,
}

impl WindowedArray {
    /// `[rows, columns]` of its window.
    pub(super) fn tile(&self) -> [usize; 2] {
        let block = &self.window.block;
        [block[block.len() - 2], block[block.len() - 1]]
    }
}

/// Operations on one real number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unary {
    /// The negation `−a` of a number.
    Neg,
    /// The exponential `e^a` of a number.
    Exp,
    /// The exponential `2^a` of a number.
    Exp2,
    /// The natural logarithm `ln a`.
    Log,
}

/// Operations on two numbers of one type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Binary {
    Add,
    Sub,
    Mul,
    /// The quotient `a / b` of real numbers.
    Div,
    /// The larger number; NaN if either is NaN.
    Max,
    /// The smaller number; NaN if either is NaN.
    Min,
    /// Integers bit by bit, and truth values.
    And,
    /// The disjunction `a ∨ b` of truth values.
    Or,
    /// Integers; the sign is kept.
    ShiftRight,
}

/// Comparisons; all are false where a side is NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TileComparison {
    Equal,
    Less,
}

/// The operation by which a reduction combines two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fold {
    /// The sum, starting from 0.
    Add,
    /// Maximum, from −∞. NaN if any is.
    Max,
}

/// A column of a tile or of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColumnIndex<V> {
    Static(usize),
    /// A scalar i32, a multiple of the machine's lanes.
    Dynamic(V),
}

/// The operation that defines a value.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum TileOperation {
    /// One number in every place.
    Constant(f64),
    /// The index of this step along an axis of the grid, a scalar i32.
    GridIndex(usize),
    LoadScalar(usize, TileValue),
    /// All rows, as many columns as the value's type has.
    Load(TileMemory, ColumnIndex<TileValue>),
    Unary(Unary, TileValue),
    Binary(Binary, TileValue, TileValue),
    Compare(TileComparison, TileValue, TileValue),
    Select(TileValue, TileValue, TileValue),
    /// `0, 1, 2, …` along rows (0) or columns (1).
    Iota(usize),
    /// Conversion to the value's element type, rounded to nearest even.
    Convert(TileValue),
    /// Reinterpretation of the bits as the value's element type, f32 or i32.
    Bitcast(TileValue),
    /// A scalar, or a tile of one column or of one row, in every place.
    Broadcast(TileValue),
    /// Columns from the one given.
    Columns(TileValue, usize),
    /// A reduction along columns, which leaves one column.
    FoldLanes(Fold, TileValue),
}

/// A loop of a kernel.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TileLoop {
    pub(super) trips: usize,
    /// Scalar i32, `0 .. trips`.
    pub(super) index: TileValue,
    pub(super) initial: Vec<TileValue>,
    /// Names of the carried values inside the body.
    pub(super) carried: Vec<TileValue>,
    pub(super) body: Vec<TileStatement>,
    /// The values that the body passes to the next trip.
    pub(super) next: Vec<TileValue>,
    /// Names of the carried values after the last trip.
    pub(super) results: Vec<TileValue>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum TileStatement {
    Let(TileValue, TileOperation),
    Store {
        memory: TileMemory,
        place: ColumnIndex<TileValue>,
        value: TileValue,
    },
    For(TileLoop),
    /// Runs where a scalar truth value holds.
    When {
        condition: TileValue,
        body: Vec<TileStatement>,
    },
}

/// A complete kernel in the tile language.
#[derive(Clone, Debug, PartialEq)]
pub struct TileKernel {
    pub(super) name: String,
    pub(super) machine: TileMachine,
    pub(super) grid: Vec<usize>,
    /// Axes whose steps need nothing of one another, so that the cores of a device may share them.
    pub(super) parallel: Vec<usize>,
    /// Element type and length of each array in SMEM.
    pub(super) scalars: Vec<(DeviceDtype, usize)>,
    pub(super) inputs: Vec<WindowedArray>,
    pub(super) outputs: Vec<WindowedArray>,
    /// Input and output that share one array.
    pub(super) aliases: Vec<(usize, usize)>,
    pub(super) scratch: Vec<(DeviceDtype, [usize; 2])>,
    pub(super) types: Vec<TileType>,
    pub(super) body: Vec<TileStatement>,
}

impl TileKernel {
    /// Returns the name of the kernel.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Bytes of VMEM: two buffers for each window, one for each scratch.
    pub fn vmem_bytes(&self) -> usize {
        let windows = self.inputs.iter().chain(&self.outputs);
        let windows: usize = windows.map(|array| 2 * self.machine.tile_bytes(array.element, array.tile())).sum();
        windows + self.scratch.iter().map(|&(element, tile)| self.machine.tile_bytes(element, tile)).sum::<usize>()
    }

    /// Bytes between HBM and VMEM over the whole grid, each block once.
    pub fn hbm_bytes(&self) -> usize {
        let bytes = |array: &WindowedArray| array.shape.iter().product::<usize>() * array.element.size();
        self.inputs.iter().chain(&self.outputs).map(bytes).sum()
    }

    /// Element type and extents of its operands, scalars first.
    pub fn operands(&self) -> impl Iterator<Item = (DeviceDtype, Vec<usize>)> {
        let scalars = self.scalars.iter().map(|&(element, length)| (element, vec![length]));
        scalars.chain(self.inputs.iter().map(|array| (array.element, array.shape.clone())))
    }

    /// Element type and extents of its outputs.
    pub fn results(&self) -> impl Iterator<Item = (DeviceDtype, Vec<usize>)> {
        self.outputs.iter().map(|array| (array.element, array.shape.clone()))
    }

    /// Operand and output that share an array, operands counted with the scalars.
    pub fn shared(&self) -> Vec<(usize, usize)> {
        self.aliases.iter().map(|&(input, output)| (input + self.scalars.len(), output)).collect()
    }

    /// The inputs whose windows the kernel writes to, ascending.
    pub(super) fn written_inputs(&self) -> Vec<usize> {
        let stored = stored_in(&self.body);
        (0..self.inputs.len()).filter(|&input| stored.contains(&TileMemory::Input(input))).collect()
    }

    /// `[rows, columns]` of memory other than scalars.
    pub(super) fn tile_of(&self, memory: TileMemory) -> (DeviceDtype, [usize; 2]) {
        match memory {
            TileMemory::Scalars(i) => unreachable!("scalars {i} have no rows"),
            TileMemory::Input(i) => (self.inputs[i].element, self.inputs[i].tile()),
            TileMemory::Output(i) => (self.outputs[i].element, self.outputs[i].tile()),
            TileMemory::Scratch(i) => self.scratch[i],
        }
    }
}

/// The number of elementwise operations in one step of the grid.
#[derive(Clone, Copy, Default)]
struct OperationCount {
    flops: usize,
    transcendentals: usize,
}

impl TileKernel {
    /// Additions, products, comparisons and selections over the whole grid, one for each element, those of reductions included.
    pub fn flops(&self) -> usize {
        self.work(&self.body).flops * self.grid.iter().product::<usize>()
    }

    /// Exponentials, logarithms and divisions over the whole grid.
    pub fn transcendentals(&self) -> usize {
        self.work(&self.body).transcendentals * self.grid.iter().product::<usize>()
    }

    /// Returns the number of elements of a value: those of a tile, 1 for a scalar.
    fn places(&self, value: TileValue) -> usize {
        self.types[value.0].tile.map_or(1, |[rows, columns]| rows * columns)
    }

    fn work(&self, statements: &[TileStatement]) -> OperationCount {
        let mut work = OperationCount::default();
        for statement in statements {
            match statement {
                TileStatement::Let(value, operation) => {
                    let places = self.places(*value);
                    match operation {
                        TileOperation::Unary(Unary::Exp | Unary::Exp2 | Unary::Log, _)
                        | TileOperation::Binary(Binary::Div, ..) => {
                            work.transcendentals += places;
                        }
                        TileOperation::Unary(..)
                        | TileOperation::Binary(..)
                        | TileOperation::Compare(..)
                        | TileOperation::Select(..) => {
                            work.flops += places;
                        }
                        // A row of n columns takes n − 1 additions or comparisons, and has one place in the result.
                        TileOperation::FoldLanes(_, folded) => {
                            work.flops += self.places(*folded) - places;
                        }
                        TileOperation::Constant(_)
                        | TileOperation::GridIndex(_)
                        | TileOperation::LoadScalar(..)
                        | TileOperation::Load(..)
                        | TileOperation::Iota(_)
                        | TileOperation::Convert(_)
                        | TileOperation::Bitcast(_)
                        | TileOperation::Broadcast(_)
                        | TileOperation::Columns(..) => {}
                    }
                }
                TileStatement::Store { .. } => {}
                TileStatement::For(looped) => {
                    let inside = self.work(&looped.body);
                    work.flops += inside.flops * looped.trips;
                    work.transcendentals += inside.transcendentals * looped.trips;
                }
                TileStatement::When { body, .. } => {
                    // A conditional block counts as if it ran at every step, which makes the estimate an upper bound.
                    let inside = self.work(body);
                    work.flops += inside.flops;
                    work.transcendentals += inside.transcendentals;
                }
            }
        }
        work
    }
}
