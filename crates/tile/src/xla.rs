//! A kernel as StableHLO: the same program as `while` loops, for any PJRT device.
//!
//! The grid is one loop over its steps. Windows are slices of arrays that are padded to whole blocks; memory is a value
//! that stores replace, carried by every loop that writes it.

use std::collections::HashMap;
use std::f64::consts::LN_2;
use std::mem;

use super::ir::{
    Binary, ColumnIndex, TileComparison, TileKernel, TileMemory, TileOperation, TileType, Unary, WindowedArray,
};
use super::lower::{KernelLowering, LoopBody, LoweredOperand, lower};
use super::{POISON, POISON_16};
use crate::stablehlo::{self, HloBuilder, HloType, HloValue};
use assay_core::device_dtype::DeviceDtype;

/// Writes `kernel` called with `operands`, scalars first, and returns its outputs.
pub fn inline(kernel: &TileKernel, builder: &mut HloBuilder, operands: &[HloValue]) -> Vec<HloValue> {
    let (scalars, inputs) = operands.split_at(kernel.scalars.len());
    let whole = |array: &WindowedArray| -> Vec<usize> {
        let blocks = |along: &Option<usize>| along.map_or(1, |axis| kernel.grid[axis]);
        let window = array.window.block.iter().zip(&array.window.along);
        window.map(|(block, along)| block * blocks(along)).collect()
    };
    // Inputs are padded to whole blocks, so that every window is a slice of constant size.
    let padded: Vec<HloValue> = kernel
        .inputs
        .iter()
        .zip(inputs)
        .map(|(array, &input)| {
            let poison = poison(builder, array.element, &[]);
            builder.pad(input, poison, &whole(array))
        })
        .collect();

    // An output that shares an input's memory starts with that input's contents.
    let shared = |output: usize| kernel.aliases.iter().find(|alias| alias.1 == output).map(|alias| alias.0);
    let index = HloType::new(DeviceDtype::I32, &[]);
    // The loop carries the step, all outputs and all scratch.
    let mut carried = vec![builder.constant(0.0, index.clone())];
    for (i, array) in kernel.outputs.iter().enumerate() {
        let start = shared(i).map_or_else(|| poison(builder, array.element, &whole(array)), |input| padded[input]);
        carried.push(start);
    }
    for (element, tile) in &kernel.scratch {
        carried.push(poison(builder, *element, tile));
    }
    let steps: usize = kernel.grid.iter().product();
    let results = builder.while_loop(
        &carried,
        |builder, carried| {
            let end = builder.constant(steps as f64, index.clone());
            builder.compare(stablehlo::HloComparison::Less, carried[0], end)
        },
        // A region is written into the same text as the operations around it: the builder moves into the step and back
        // out.
        |builder, carried| {
            let (arrays, scratch) = carried[1..].split_at(kernel.outputs.len());
            let builder_so_far = mem::take(builder);
            let mut step = GridStep {
                builder: builder_so_far,
                scalars: scalars.to_vec(),
                grid: Vec::new(),
                memory: HashMap::new(),
            };
            step.grid = step.grid_indices(&kernel.grid, carried[0]);
            for (i, array) in kernel.inputs.iter().enumerate() {
                // An input whose memory an output takes is read from where that output is written.
                let output = kernel.aliases.iter().find(|alias| alias.0 == i).map(|alias| alias.1);
                let window = step.read(array, output.map_or(padded[i], |output| arrays[output]));
                step.memory.insert(TileMemory::Input(i), window);
            }
            for (i, array) in kernel.outputs.iter().enumerate() {
                // A block that the next step sees again keeps what this one wrote; any other starts as garbage, which a
                // kernel must not read.
                let window = if revisited(kernel, array) {
                    step.read(array, arrays[i])
                } else {
                    poison(&mut step.builder, array.element, &array.tile())
                };
                step.memory.insert(TileMemory::Output(i), window);
            }
            for (i, &value) in scratch.iter().enumerate() {
                step.memory.insert(TileMemory::Scratch(i), value);
            }
            // The body of the kernel reads and replaces the contents of windows and scratch.
            lower(kernel, &mut step);
            let one = step.builder.constant(1.0, index.clone());
            let mut next = vec![step.builder.add(carried[0], one)];
            for (i, array) in kernel.outputs.iter().enumerate() {
                next.push(step.write_back(array, arrays[i], step.memory[&TileMemory::Output(i)]));
            }
            next.extend((0..kernel.scratch.len()).map(|i| step.memory[&TileMemory::Scratch(i)]));
            *builder = step.builder;
            next
        },
    );
    // The padding of outputs is cut off again.
    let outputs = kernel.outputs.iter().zip(&results[1..]);
    outputs.map(|(array, &whole)| builder.slice(whole, &vec![0; array.shape.len()], &array.shape)).collect()
}

/// Returns the poison value beyond the end of an array: NaN, or a conspicuous integer.
fn poison(builder: &mut HloBuilder, element: DeviceDtype, shape: &[usize]) -> HloValue {
    let x = match element {
        DeviceDtype::I16 => f64::from(POISON_16),
        element if element.is_float() => f64::NAN,
        _ => f64::from(POISON),
    };
    builder.constant(x, HloType::new(element, shape))
}

/// Whether steps that follow one another may see the same block.
fn revisited(kernel: &TileKernel, array: &WindowedArray) -> bool {
    // The last axis runs fastest: an array that does not move along it has one block for all of its steps.
    let last = kernel.grid.len() - 1;
    kernel.grid[last] > 1 && !array.window.along.contains(&Some(last))
}

/// A step of the grid while it is being written.
struct GridStep {
    /// The text so far; empty while a region that is nested in this one is written.
    builder: HloBuilder,
    scalars: Vec<HloValue>,
    /// The indices of the grid.
    grid: Vec<HloValue>,
    /// The contents of windows and scratch, now.
    memory: HashMap<TileMemory, HloValue>,
}

impl GridStep {
    fn integer(&mut self, x: usize) -> HloValue {
        self.builder.constant(x as f64, HloType::new(DeviceDtype::I32, &[]))
    }

    /// The indices of step `step` of a grid, the last axis fastest.
    fn grid_indices(&mut self, grid: &[usize], step: HloValue) -> Vec<HloValue> {
        // The last axis runs fastest: remainders of divisions by the extents, from the last axis on.
        let mut indices = vec![step; grid.len()];
        let mut rest = step;
        for axis in (1..grid.len()).rev() {
            let extent = self.integer(grid[axis]);
            let whole = self.builder.divide(rest, extent);
            let full = self.builder.multiply(whole, extent);
            indices[axis] = self.builder.subtract(rest, full);
            rest = whole;
        }
        indices[0] = rest;
        indices
    }

    /// Returns the first element of this step's window in its array.
    fn starts(&mut self, array: &WindowedArray) -> Vec<HloValue> {
        let window = array.window.block.iter().zip(&array.window.along);
        window
            .map(|(&block, along)| match along {
                Some(axis) => {
                    let block = self.integer(block);
                    self.builder.multiply(self.grid[*axis], block)
                }
                None => self.integer(0),
            })
            .collect()
    }

    fn read(&mut self, array: &WindowedArray, whole: HloValue) -> HloValue {
        let starts = self.starts(array);
        let block = self.builder.dynamic_slice(whole, &starts, &array.window.block);
        self.builder.reshape(block, &array.tile())
    }

    fn write_back(&mut self, array: &WindowedArray, whole: HloValue, window: HloValue) -> HloValue {
        let starts = self.starts(array);
        let block = self.builder.reshape(window, &array.window.block);
        self.builder.dynamic_update_slice(whole, block, &starts)
    }

    fn column(&mut self, place: ColumnIndex<HloValue>) -> Vec<HloValue> {
        let column = match place {
            ColumnIndex::Static(column) => self.integer(column),
            ColumnIndex::Dynamic(column) => column,
        };
        vec![self.integer(0), column]
    }

    fn load(&mut self, memory: TileMemory, place: ColumnIndex<HloValue>, ty: &HloType) -> HloValue {
        let contents = self.memory[&memory];
        match place {
            ColumnIndex::Static(column) => self.builder.slice(contents, &[0, column], &ty.shape),
            ColumnIndex::Dynamic(_) => {
                let start = self.column(place);
                self.builder.dynamic_slice(contents, &start, &ty.shape)
            }
        }
    }

    /// Writes a nested region. Memory holds afterwards what it held before: what the region stores, it returns.
    fn inside(&mut self, builder: &mut HloBuilder, write: impl FnOnce(&mut Self) -> Vec<HloValue>) -> Vec<HloValue> {
        // Values defined inside a region cannot be used outside it, so memory is restored afterwards.
        let before = self.memory.clone();
        self.builder = mem::take(builder);
        let values = write(self);
        *builder = mem::take(&mut self.builder);
        self.memory = before;
        values
    }

    fn stored(&self, memory: &[TileMemory]) -> Vec<HloValue> {
        memory.iter().map(|memory| self.memory[memory]).collect()
    }

    fn set(&mut self, memory: &[TileMemory], contents: &[HloValue]) {
        self.memory.extend(memory.iter().copied().zip(contents.iter().copied()));
    }
}

fn spelled(ty: TileType) -> HloType {
    HloType::new(ty.element, ty.tile.as_ref().map_or(&[], <[usize; 2]>::as_slice))
}

impl KernelLowering for GridStep {
    type Value = HloValue;

    fn operation(
        &mut self,
        ty: TileType,
        operation: &TileOperation,
        operands: &[LoweredOperand<HloValue>],
    ) -> HloValue {
        let ty = spelled(ty);
        let value = |i: usize| operands[i].value;
        match operation {
            TileOperation::Constant(x) => self.builder.constant(*x, ty),
            TileOperation::GridIndex(axis) => self.grid[*axis],
            TileOperation::LoadScalar(i, _) => {
                let one = self.builder.dynamic_slice(self.scalars[*i], &[value(0)], &[1]);
                self.builder.reshape(one, &[])
            }
            TileOperation::Load(memory, ColumnIndex::Static(column)) => {
                self.load(*memory, ColumnIndex::Static(*column), &ty)
            }
            TileOperation::Load(memory, ColumnIndex::Dynamic(_)) => {
                self.load(*memory, ColumnIndex::Dynamic(value(0)), &ty)
            }
            TileOperation::Unary(op, _) => match op {
                Unary::Neg => self.builder.negate(value(0)),
                Unary::Exp => self.builder.exponential(value(0)),
                Unary::Exp2 => {
                    // StableHLO has no exp2, so the base changes by one product, which rounds once more.
                    let ln_2 = self.builder.constant(LN_2, ty);
                    let exponent = self.builder.multiply(value(0), ln_2);
                    self.builder.exponential(exponent)
                }
                Unary::Log => self.builder.log(value(0)),
            },
            TileOperation::Binary(op, ..) => {
                let (a, b) = (value(0), value(1));
                match op {
                    Binary::Add => self.builder.add(a, b),
                    Binary::Sub => self.builder.subtract(a, b),
                    Binary::Mul => self.builder.multiply(a, b),
                    Binary::Div => self.builder.divide(a, b),
                    // In f32, which is as exact: of a bf16 array that is read as such and as f32, and written over, a CPU plugin (C API
                    // 0.115) makes another answer each time.
                    Binary::Max if ty.element == DeviceDtype::Bf16 => {
                        let [a, b] = [a, b].map(|x| self.builder.convert(x, DeviceDtype::F32));
                        let max = self.builder.maximum(a, b);
                        self.builder.convert(max, ty.element)
                    }
                    Binary::Max => self.builder.maximum(a, b),
                    Binary::Min => self.builder.minimum(a, b),
                    Binary::And if ty.element == DeviceDtype::Pred => self.builder.and(a, b),
                    Binary::And => self.builder.bit_and(a, b),
                    Binary::Or => self.builder.or(a, b),
                    Binary::ShiftRight => self.builder.shift_right(a, b),
                }
            }
            TileOperation::Compare(comparison, ..) => {
                let comparison = match comparison {
                    TileComparison::Equal => stablehlo::HloComparison::Equal,
                    TileComparison::Less => stablehlo::HloComparison::Less,
                };
                self.builder.compare(comparison, value(0), value(1))
            }
            TileOperation::Select(..) => self.builder.select(value(0), value(1), value(2)),
            TileOperation::Iota(axis) => self.builder.iota(*axis, ty),
            TileOperation::Convert(_) => self.builder.convert(value(0), ty.element),
            TileOperation::Bitcast(_) => self.builder.bitcast(value(0), ty.element),
            TileOperation::Broadcast(_) => {
                // A tile keeps its two dimensions, of which those of extent 1 are repeated; a scalar has none.
                let dimensions: &[usize] = if operands[0].ty.tile.is_some() { &[0, 1] } else { &[] };
                self.builder.broadcast(value(0), dimensions, &ty.shape)
            }
            TileOperation::Columns(_, start) => self.builder.slice(value(0), &[0, *start], &ty.shape),
            TileOperation::FoldLanes(fold, _) => {
                let folded = self.builder.reduce(*fold, value(0), &[1]);
                self.builder.reshape(folded, &ty.shape)
            }
        }
    }

    fn store(&mut self, memory: TileMemory, place: ColumnIndex<HloValue>, value: LoweredOperand<HloValue>) {
        let start = self.column(place);
        let contents = self.builder.dynamic_update_slice(self.memory[&memory], value.value, &start);
        self.memory.insert(memory, contents);
    }

    fn for_loop(
        &mut self,
        trips: usize,
        initial: &[LoweredOperand<HloValue>],
        stored: &[TileMemory],
        body: LoopBody<'_, Self>,
    ) -> Vec<HloValue> {
        // The loop's index, the carried values and the memory that the body writes go from trip to trip together.
        let mut carried = vec![self.integer(0)];
        carried.extend(initial.iter().map(|operand| operand.value));
        carried.extend(self.stored(stored));
        let index = HloType::new(DeviceDtype::I32, &[]);
        let mut builder = mem::take(&mut self.builder);
        let results = builder.while_loop(
            &carried,
            |builder, carried| {
                let end = builder.constant(trips as f64, index.clone());
                builder.compare(stablehlo::HloComparison::Less, carried[0], end)
            },
            |builder, carried| {
                self.inside(builder, |step| {
                    let (values, contents) = carried[1..].split_at(initial.len());
                    step.set(stored, contents);
                    let next = body(step, carried[0], values);
                    let one = step.integer(1);
                    let mut after = vec![step.builder.add(carried[0], one)];
                    after.extend(next.iter().map(|operand| operand.value));
                    after.extend(step.stored(stored));
                    after
                })
            },
        );
        self.builder = builder;
        let (values, contents) = results[1..].split_at(initial.len());
        self.set(stored, contents);
        values.to_vec()
    }

    fn when(&mut self, condition: HloValue, stored: &[TileMemory], body: &mut dyn FnMut(&mut Self)) {
        // If the condition does not hold, memory keeps its contents.
        let before = self.stored(stored);
        let mut builder = mem::take(&mut self.builder);
        let after = builder.if_else(
            condition,
            |builder| {
                self.inside(builder, |step| {
                    body(step);
                    step.stored(stored)
                })
            },
            &before,
        );
        self.builder = builder;
        self.set(stored, &after);
    }
}
