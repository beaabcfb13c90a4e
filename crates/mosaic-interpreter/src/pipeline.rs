//! Runs the steps of the grid, and the copies between HBM and VMEM that overlap them.

use std::collections::BTreeSet;

use super::check::{MosaicProgram, MosaicWindow};
use super::run::{InterpreterState, MosaicValue};
use super::value::{ArrayType, BlockOrigin, ElementBuffer, advance};
use super::{MosaicInterpretError, MosaicOptions};

/// An array of the caller in HBM.
pub(super) struct HbmArray {
    pub(super) ty: ArrayType,
    pub(super) elements: ElementBuffer,
}

/// The arrays over which a program's windows move.
pub(super) struct WindowArrays {
    pub(super) in_hbm: Vec<HbmArray>,
    /// Index in `in_hbm` of each window's array; an output shares that of the input that it overwrites.
    pub(super) of_window: Vec<usize>,
    /// Number of windows that are inputs; the rest are outputs.
    pub(super) inputs: usize,
}

/// Index of a block in its array, one number per dimension.
type BlockIndex = Vec<usize>;

/// The contents of an output's window, on their way to HBM.
struct WriteBack {
    window: usize,
    block: BlockIndex,
    elements: ElementBuffer,
}

struct Pipeline<'a> {
    program: &'a MosaicProgram,
    machine: InterpreterState,
    arrays: &'a mut WindowArrays,
    /// Write-backs that were issued after the step before.
    pending: Vec<WriteBack>,
    /// Blocks that each output's window has left.
    left: Vec<BTreeSet<BlockIndex>>,
    /// Whether each input's window had one block in two successive steps.
    stays: Vec<bool>,
    /// Blocks of arrays that are read and written, if dimensions of the grid are parallel.
    touched: Vec<TouchedBlocks>,
}

/// A block of an array that some core reads or writes.
struct TouchedBlocks {
    array: usize,
    region: BlockRegion,
    turn: i32,
    writes: bool,
}

/// Start and extents of a block within its array.
type BlockRegion = (Vec<usize>, Vec<usize>);

/// Runs every step of `program` on `arrays`, whose types are those of its windows.
pub(super) fn run(
    program: &MosaicProgram,
    prefetch: Vec<ElementBuffer>,
    arrays: &mut WindowArrays,
    options: MosaicOptions,
) -> Result<(), MosaicInterpretError> {
    // On-chip memory: prefetched arrays, then windows and scratch, which begin as poison.
    let on_chip = program.windows.iter().map(|window| &window.ty).chain(&program.scratch);
    let mut memory = prefetch;
    memory.extend(on_chip.map(ElementBuffer::poison));
    let left = vec![BTreeSet::new(); program.windows.len()];
    let stays = vec![false; arrays.inputs];
    let mut machine = InterpreterState::new(memory, options);
    // If cores share steps, scratch remembers which turn wrote each element.
    if program.parallel.contains(&true) {
        let scratch = machine.written.len() - program.scratch.len();
        for (written, ty) in machine.written[scratch..].iter_mut().zip(&program.scratch) {
            *written = Some(ElementBuffer::Int(vec![0; ty.len()]));
        }
    }
    Pipeline { program, machine, arrays, pending: Vec::new(), left, stays, touched: Vec::new() }.run()
}

impl Pipeline<'_> {
    fn run(&mut self) -> Result<(), MosaicInterpretError> {
        let grid = &self.program.grid;
        let steps: usize = grid.iter().product();
        let mut step = vec![0; grid.len()];
        // The blocks of the first step are fetched before it.
        let mut blocks = self.blocks(&step)?;
        for (window, block) in blocks.iter().enumerate().take(self.arrays.inputs) {
            self.touch(window, block, &step, self.machine.turn, false)?;
            let fetched = self.fetch(window, block)?;
            *self.window_memory(window) = fetched;
        }
        // Each trip runs one step. It knows the blocks of the next step, since copies for that overlap the body.
        for number in 1..=steps {
            let mut next_step = step.clone();
            advance(&mut next_step, grid);
            let next = if number < steps { Some(self.blocks(&next_step)?) } else { None };
            let moves = |window: usize| next.as_ref().is_none_or(|next| next[window] != blocks[window]);
            // A core of another turn may run the next step: it would not find an output's block that stays.
            let turn = self.turn(&next_step);
            if next.is_some() && turn != self.machine.turn {
                let outputs = self.arrays.inputs..self.program.windows.len();
                if let Some(window) = outputs.into_iter().find(|&window| !moves(window)) {
                    let problem =
                        format!("stays at block {:?} for another index along a parallel dimension", blocks[window]);
                    return Err(self.window_error(window, &next_step, problem));
                }
            }

            // Fetches for the next step, at the earliest time: before this body. They must not meet a write-back that has not landed.
            let mut fetched = Vec::new();
            if let Some(next) = &next {
                for window in (0..self.arrays.inputs).filter(|&window| moves(window)) {
                    self.touch(window, &next[window], &next_step, turn, false)?;
                    self.expect_settled(window, &next[window], &next_step, &blocks, moves)?;
                    fetched.push((window, self.fetch(window, &next[window])?));
                }
            }
            // A window that stays is shared by two steps: no body may have stored to it.
            for window in (0..self.arrays.inputs).filter(|&window| next.is_some() && !moves(window)) {
                self.stays[window] = true;
            }
            self.call_kernel(&step)?;
            self.expect_inputs_kept(&step)?;
            // Write-backs of the step before land at the latest time: after this body. Then those of this step are issued.
            self.land_write_backs();
            for window in (self.arrays.inputs..self.program.windows.len()).filter(|&window| moves(window)) {
                self.touch(window, &blocks[window], &step, self.machine.turn, true)?;
                self.write_back(window, &blocks[window])?;
                // An output cannot come back to a block, whose contents are no longer in VMEM.
                if let Some(block) = next.as_ref().map(|next| &next[window]).filter(|b| self.left[window].contains(*b))
                {
                    let problem = format!("comes back to block {block:?}, whose contents are gone from VMEM");
                    return Err(self.window_error(window, &next_step, problem));
                }
            }
            // The fetched blocks replace those that the body has read.
            for (window, elements) in fetched {
                *self.window_memory(window) = elements;
            }
            self.machine.turn = turn;
            step = next_step;
            blocks = next.unwrap_or_default();
        }
        self.land_write_backs();
        Ok(())
    }

    /// Combines the indices of `step` along parallel dimensions into one number ≥ 1.
    fn turn(&self, step: &[usize]) -> i32 {
        let dimensions = step.iter().zip(&self.program.grid).zip(&self.program.parallel);
        let parallel = dimensions.filter(|(_, parallel)| **parallel).map(|(dimension, _)| dimension);
        1 + parallel.fold(0, |turn, (&index, &extent)| turn * extent as i32 + index as i32)
    }

    /// Notes that a core reads or `writes` a block. If either writes, it is an error that a core of another turn
    /// touches it too.
    fn touch(
        &mut self,
        window: usize,
        block: &[usize],
        step: &[usize],
        turn: i32,
        writes: bool,
    ) -> Result<(), MosaicInterpretError> {
        // Only arrays that are overwritten in place can be read by one core and written by another.
        let array = self.arrays.of_window[window];
        let (inputs, outputs) = self.arrays.of_window.split_at(self.arrays.inputs);
        if !self.program.parallel.contains(&true) || !inputs.contains(&array) || !outputs.contains(&array) {
            return Ok(());
        }
        let region = self.region(window, block);
        // Steps of one turn run in their order, and two reads are harmless: a conflict needs another turn and a write.
        let meets = |other: &&TouchedBlocks| {
            other.array == array && other.turn != turn && (other.writes || writes) && overlap(&other.region, &region)
        };
        if self.touched.iter().any(|other| meets(&other)) {
            let problem = format!(
                "block {block:?} shares elements with one that a step of another index along a parallel dimension reads or writes"
            );
            return Err(self.window_error(window, step, problem));
        }
        self.touched.push(TouchedBlocks { array, region, turn, writes });
        Ok(())
    }

    fn window_error(&self, window: usize, step: &[usize], problem: String) -> MosaicInterpretError {
        let inputs = self.arrays.inputs;
        let window = if window < inputs { format!("input {window}") } else { format!("output {}", window - inputs) };
        MosaicInterpretError::Window { window, step: step.to_vec(), problem }
    }

    fn window_memory(&mut self, window: usize) -> &mut ElementBuffer {
        &mut self.machine.memory[self.program.prefetch.len() + window]
    }

    fn arguments(step: &[usize], memrefs: usize) -> Vec<MosaicValue> {
        let indices = step.iter().map(|&index| MosaicValue::int(index as i32));
        indices.chain((0..memrefs).map(MosaicValue::Memory)).collect()
    }

    /// Runs the kernel's body at `step`.
    fn call_kernel(&mut self, step: &[usize]) -> Result<(), MosaicInterpretError> {
        let arguments = Self::arguments(step, self.machine.memory.len());
        self.machine.call(&self.program.kernel, arguments).map_err(|error| error.at(step))?;
        Ok(())
    }

    /// Checks that no body so far stored to an input's window that several steps share.
    fn expect_inputs_kept(&self, step: &[usize]) -> Result<(), MosaicInterpretError> {
        let stored = &self.machine.stored[self.program.prefetch.len()..];
        for (window, line) in stored.iter().enumerate().take(self.arrays.inputs) {
            if let Some(line) = line.filter(|_| self.stays[window]) {
                let problem = format!("is stored to, line {line}, though it does not move every step");
                return Err(self.window_error(window, step, problem));
            }
        }
        Ok(())
    }

    /// Computes the block of each window at `step`.
    fn blocks(&mut self, step: &[usize]) -> Result<Vec<BlockIndex>, MosaicInterpretError> {
        let windows = self.program.windows.iter().enumerate();
        windows.map(|(i, window)| self.block(i, window, step)).collect()
    }

    fn block(&mut self, i: usize, window: &MosaicWindow, step: &[usize]) -> Result<BlockIndex, MosaicInterpretError> {
        // The transform gives block indices, which must lie within the array.
        let arguments = Self::arguments(step, self.program.prefetch.len());
        let indices = self.machine.call(&window.transform, arguments).map_err(|error| error.at(step))?;
        let indices: Vec<i32> = indices.iter().map(|index| index.elements().int()).collect();
        let shape = &self.arrays.in_hbm[self.arrays.of_window[i]].ty.shape;
        let within = indices.iter().zip(&window.ty.shape).zip(shape).map(|((&index, &extent), &size)| {
            let index = usize::try_from(index).ok()?;
            (index.checked_mul(extent)? < size).then_some(index)
        });
        within.collect::<Option<BlockIndex>>().ok_or_else(|| {
            let problem = format!("block {indices:?} of {:?} is not within its array of {shape:?}", window.ty.shape);
            self.window_error(i, step, problem)
        })
    }

    /// Returns the start of a block in its array, and the extents of the part that is within the array.
    fn region(&self, window: usize, block: &[usize]) -> BlockRegion {
        let extents = &self.program.windows[window].ty.shape;
        // A block at the end of the array is cut off there.
        let start: Vec<usize> = block.iter().zip(extents).map(|(index, extent)| index * extent).collect();
        let sizes = &self.arrays.in_hbm[self.arrays.of_window[window]].ty.shape;
        let extent = sizes.iter().zip(&start).zip(extents).map(|((size, start), &extent)| extent.min(size - start));
        (start.clone(), extent.collect())
    }

    /// Copies a block from HBM, with poison outside the array.
    fn fetch(&mut self, window: usize, block: &[usize]) -> Result<ElementBuffer, MosaicInterpretError> {
        let (start, extent) = self.region(window, block);
        let ty = &self.program.windows[window].ty;
        self.machine.charge(ty.len() as u64)?;
        let array = &self.arrays.in_hbm[self.arrays.of_window[window]];
        let mut fetched = ElementBuffer::poison(ty);
        let to = BlockOrigin { shape: &ty.shape, start: &vec![0; start.len()] };
        fetched.copy_block(&to, &array.elements, &BlockOrigin { shape: &array.ty.shape, start: &start }, &extent);
        Ok(fetched)
    }

    /// Sends a block on its way to HBM and gives the window another buffer, which holds poison.
    fn write_back(&mut self, window: usize, block: &[usize]) -> Result<(), MosaicInterpretError> {
        let ty = &self.program.windows[window].ty;
        self.machine.charge(ty.len() as u64)?;
        let elements = std::mem::replace(self.window_memory(window), ElementBuffer::poison(ty));
        self.pending.push(WriteBack { window, block: block.to_vec(), elements });
        self.left[window].insert(block.to_vec());
        Ok(())
    }

    fn land_write_backs(&mut self) {
        for WriteBack { window, block, elements } in std::mem::take(&mut self.pending) {
            let (start, extent) = self.region(window, &block);
            let from = &self.program.windows[window].ty.shape;
            let array = &mut self.arrays.in_hbm[self.arrays.of_window[window]];
            let at = BlockOrigin { shape: from, start: &vec![0; start.len()] };
            array.elements.copy_block(&BlockOrigin { shape: &array.ty.shape, start: &start }, &elements, &at, &extent);
        }
    }

    /// Checks that no write-back which may land during or after a fetch for `next_step` touches what is fetched:
    /// neither one that is under way, nor one that the current step at `blocks` will issue for the outputs that it
    /// `moves`.
    fn expect_settled(
        &self,
        window: usize,
        block: &[usize],
        next_step: &[usize],
        blocks: &[BlockIndex],
        moves: impl Fn(usize) -> bool,
    ) -> Result<(), MosaicInterpretError> {
        // The write-backs of the step before are under way; those of the current step are still to come.
        let under_way = self.pending.iter().map(|write| (write.window, &write.block, "is under way"));
        let outputs = (self.arrays.inputs..self.program.windows.len()).filter(|&output| moves(output));
        let to_come = outputs.map(|output| (output, &blocks[output], "is still to come"));
        let fetched = self.region(window, block);
        for (output, written, state) in under_way.chain(to_come) {
            // A window of another array cannot be overwritten: only an input and an output that share theirs are in
            // place.
            let shared = self.arrays.of_window[output] == self.arrays.of_window[window];
            if shared && overlap(&fetched, &self.region(output, written)) {
                let output = output - self.arrays.inputs;
                let problem = format!(
                    "block {block:?} is fetched while the write-back of block {written:?} of output {output}, which \
                     overwrites it in place, {state}"
                );
                return Err(self.window_error(window, next_step, problem));
            }
        }
        Ok(())
    }
}

/// Whether two regions, each given by start and extent, share an element.
fn overlap(a: &BlockRegion, b: &BlockRegion) -> bool {
    let a = a.0.iter().zip(&a.1);
    let b = b.0.iter().zip(&b.1);
    a.zip(b).all(|((&a, &a_extent), (&b, &b_extent))| a < b + b_extent && b < a + a_extent)
}
