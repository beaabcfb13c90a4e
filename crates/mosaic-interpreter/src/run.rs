//! Runs a function's instructions one after another, on values that are held by slot.

use std::rc::Rc;

use super::check::{FunctionBody, MosaicAction, MosaicFunction, MosaicInstruction, ReductionFold, ValueSlot};
use super::elementwise::Elementwise;
use super::value::{ArrayType, BlockOrigin, ElementBuffer, ElementKind, MosaicType, advance};
use super::{MosaicInterpretError, MosaicOptions, MosaicUnits, OFF_ULP};

/// Cost of an instruction besides its elements, in elements.
const INSTRUCTION: u64 = 32;

const CHECKED: &str = "checked: every operand is defined before, with the type that is wanted";

/// The value of a slot.
#[derive(Clone)]
pub(super) enum MosaicValue {
    Data(Rc<ElementBuffer>),
    /// A memref: an index into [`InterpreterState::memory`].
    Memory(usize),
}

impl MosaicValue {
    pub(super) fn int(x: i32) -> Self {
        MosaicValue::Data(Rc::new(ElementBuffer::Int(vec![x])))
    }

    pub(super) fn elements(&self) -> &Rc<ElementBuffer> {
        match self {
            MosaicValue::Data(elements) => elements,
            MosaicValue::Memory(_) => unreachable!("{CHECKED}"),
        }
    }
}

/// The state of a run: on-chip memory, and the work that was done.
pub(super) struct InterpreterState {
    pub(super) memory: Vec<ElementBuffer>,
    /// Number of the [turn](Self::turn) that wrote each element, or 0, of memory that a core keeps from step to step.
    pub(super) written: Vec<Option<ElementBuffer>>,
    /// Line of the first store to each memory.
    pub(super) stored: Vec<Option<usize>>,
    /// Indices of the step along parallel dimensions as one number ≥ 1: another core may run a step with another
    /// number.
    pub(super) turn: i32,
    units: MosaicUnits,
    /// Number of elements computed so far.
    work: u64,
    most_work: u64,
}

struct FunctionFrame<'a> {
    types: &'a [MosaicType],
    values: Vec<Option<MosaicValue>>,
}

impl FunctionFrame<'_> {
    fn value(&self, slot: ValueSlot) -> &MosaicValue {
        self.values[slot].as_ref().expect(CHECKED)
    }

    fn elements(&self, slot: ValueSlot) -> &Rc<ElementBuffer> {
        self.value(slot).elements()
    }

    fn memory(&self, slot: ValueSlot) -> usize {
        match self.value(slot) {
            MosaicValue::Memory(place) => *place,
            MosaicValue::Data(_) => unreachable!("{CHECKED}"),
        }
    }

    fn copies(&self, slots: &[ValueSlot]) -> Vec<MosaicValue> {
        slots.iter().map(|&slot| self.value(slot).clone()).collect()
    }

    fn set(&mut self, slots: &[ValueSlot], values: impl IntoIterator<Item = MosaicValue>) {
        for (&slot, value) in slots.iter().zip(values) {
            self.values[slot] = Some(value);
        }
    }
}

impl MosaicInstruction {
    fn error(&self, problem: String) -> MosaicInterpretError {
        MosaicInterpretError::Operation { line: self.line, name: self.name.clone(), problem }
    }
}

impl InterpreterState {
    pub(super) fn new(memory: Vec<ElementBuffer>, MosaicOptions { units, most_work, .. }: MosaicOptions) -> Self {
        let written = memory.iter().map(|_| None).collect();
        let stored = vec![None; memory.len()];
        Self { memory, written, stored, turn: 1, units, work: 0, most_work }
    }

    /// Counts the handling of `elements`, and gives up beyond the budget.
    pub(super) fn charge(&mut self, elements: u64) -> Result<(), MosaicInterpretError> {
        self.work = self.work.saturating_add(elements);
        if self.work > self.most_work { Err(MosaicInterpretError::Endless { most: self.most_work }) } else { Ok(()) }
    }

    /// Calls `function` with `arguments`, which have its parameters' types, and returns its results.
    pub(super) fn call(
        &mut self,
        function: &MosaicFunction,
        arguments: Vec<MosaicValue>,
    ) -> Result<Vec<MosaicValue>, MosaicInterpretError> {
        // Every call has slots of its own; memory is shared by all.
        let mut frame = FunctionFrame { types: &function.types, values: vec![None; function.types.len()] };
        frame.set(&function.body.parameters, arguments);
        self.body(&function.body, &mut frame)
    }

    fn body(
        &mut self,
        body: &FunctionBody,
        frame: &mut FunctionFrame,
    ) -> Result<Vec<MosaicValue>, MosaicInterpretError> {
        for instruction in &body.instructions {
            // The cost of an instruction is that of its operands and results, vectors by their elements.
            let handled = instruction.operands.iter().chain(&instruction.results);
            let elements: usize = handled
                .map(|&slot| if let MosaicType::Data(shaped) = &frame.types[slot] { shaped.len() } else { 0 })
                .sum();
            self.charge(INSTRUCTION + elements as u64)?;
            self.instruction(instruction, frame)?;
        }
        Ok(frame.copies(&body.results))
    }

    fn instruction(
        &mut self,
        instruction: &MosaicInstruction,
        frame: &mut FunctionFrame,
    ) -> Result<(), MosaicInterpretError> {
        // Control flow and memory change the state; every other operation is a function of its operands.
        let results = match &instruction.action {
            MosaicAction::For(body) => self.for_loop(instruction, body, frame)?,
            MosaicAction::If { yes, no } => {
                let holds = frame.elements(instruction.operands[0]).int() != 0;
                self.body(if holds { yes } else { no }, frame)?
            }
            MosaicAction::Store => {
                self.store(instruction, frame)?;
                Vec::new()
            }
            MosaicAction::Load => vec![MosaicValue::Data(Rc::new(self.load(instruction, frame)?))],
            MosaicAction::LoadScalar => vec![MosaicValue::Data(Rc::new(self.load_scalar(instruction, frame)?))],
            _ => vec![MosaicValue::Data(off(self.units, instruction, pure(instruction, frame, self.units)?))],
        };
        frame.set(&instruction.results, results);
        Ok(())
    }

    fn for_loop(
        &mut self,
        instruction: &MosaicInstruction,
        body: &FunctionBody,
        frame: &mut FunctionFrame,
    ) -> Result<Vec<MosaicValue>, MosaicInterpretError> {
        let (bounds, carried) = instruction.operands.split_at(3);
        let [low, high, step] = [0, 1, 2].map(|i| i64::from(frame.elements(bounds[i]).int()));
        // A step that is not positive would never end.
        if step <= 0 {
            return Err(instruction.error(format!("a step of {step}, expected a positive one")));
        }
        let mut carried = frame.copies(carried);
        // Carried values are the parameters of a trip, and what it yields those of the next.
        let mut i = low;
        while i < high {
            self.charge(INSTRUCTION)?;
            frame.set(&body.parameters[..1], [MosaicValue::int(i as i32)]);
            frame.set(&body.parameters[1..], carried);
            carried = self.body(body, frame)?;
            i += step;
        }
        Ok(carried)
    }

    fn load(
        &self,
        instruction: &MosaicInstruction,
        frame: &FunctionFrame,
    ) -> Result<ElementBuffer, MosaicInterpretError> {
        let result = frame.types[instruction.results[0]].shaped();
        let (memory, start) = (instruction.operands[0], &instruction.operands[1..]);
        let start = place(instruction, frame, memory, start, &result.shape)?;
        // Copy the block out of memory.
        let mut loaded = ElementBuffer::poison(result);
        let at = BlockOrigin { shape: &frame.types[memory].shaped().shape, start: &start };
        let to = BlockOrigin { shape: &result.shape, start: &vec![0; start.len()] };
        let memory = frame.memory(memory);
        loaded.copy_block(&to, &self.memory[memory], &at, &result.shape);
        // Another core may run the step that wrote these elements: then they would not be here.
        if let Some(written) = &self.written[memory] {
            let mut turns = ElementBuffer::Int(vec![0; result.len()]);
            turns.copy_block(&to, written, &at, &result.shape);
            if turns.ints().iter().any(|&turn| turn != 0 && turn != self.turn) {
                let problem = "reads scratch that a step of another index along a parallel dimension wrote";
                return Err(instruction.error(problem.to_string()));
            }
        }
        Ok(loaded)
    }

    fn store(&mut self, instruction: &MosaicInstruction, frame: &FunctionFrame) -> Result<(), MosaicInterpretError> {
        let (value, memory, start) = (instruction.operands[0], instruction.operands[1], &instruction.operands[2..]);
        let extent = &frame.types[value].shaped().shape;
        let start = place(instruction, frame, memory, start, extent)?;
        let to = BlockOrigin { shape: &frame.types[memory].shaped().shape, start: &start };
        let at = BlockOrigin { shape: extent, start: &vec![0; start.len()] };
        let memory = frame.memory(memory);
        self.memory[memory].copy_block(&to, frame.elements(value), &at, extent);
        // Note the store: an input's window that stays must not be stored to.
        self.stored[memory].get_or_insert(instruction.line);
        if let Some(written) = &mut self.written[memory] {
            written.copy_block(&to, &ElementBuffer::Int(vec![self.turn; extent.iter().product()]), &at, extent);
        }
        Ok(())
    }

    fn load_scalar(
        &self,
        instruction: &MosaicInstruction,
        frame: &FunctionFrame,
    ) -> Result<ElementBuffer, MosaicInterpretError> {
        let (memory, start) = (instruction.operands[0], &instruction.operands[1..]);
        let start = place(instruction, frame, memory, start, &vec![1; start.len()])?;
        let at = BlockOrigin { shape: &frame.types[memory].shaped().shape, start: &start };
        let place = at.place(&vec![0; start.len()]);
        Ok(self.memory[frame.memory(memory)].gather([place].into_iter()))
    }
}

/// Returns the start of a block of `extent` in `memory`, from index operands, if the block is within it.
fn place(
    instruction: &MosaicInstruction,
    frame: &FunctionFrame,
    memory: ValueSlot,
    start: &[ValueSlot],
    extent: &[usize],
) -> Result<Vec<usize>, MosaicInterpretError> {
    let start: Vec<i32> = start.iter().map(|&slot| frame.elements(slot).int()).collect();
    let shape = &frame.types[memory].shaped().shape;
    // An index may be negative, and a sum may overflow: both are out of range.
    let within = start.iter().zip(extent).zip(shape).map(|((&start, &extent), &size)| {
        let start = usize::try_from(start).ok()?;
        (start.checked_add(extent)? <= size).then_some(start)
    });
    within.collect::<Option<Vec<_>>>().ok_or_else(|| {
        instruction.error(format!("a block of {extent:?} at {start:?} is not within {}", frame.types[memory]))
    })
}

/// Computes the result of an operation that touches no memory.
fn pure(
    instruction: &MosaicInstruction,
    frame: &FunctionFrame,
    units: MosaicUnits,
) -> Result<Rc<ElementBuffer>, MosaicInterpretError> {
    // Checked before: operands have the kinds that the operation takes.
    let operand = |i: usize| frame.elements(instruction.operands[i]);
    let operand_type = |i: usize| frame.types[instruction.operands[i]].shaped();
    let result = frame.types[instruction.results[0]].shaped();
    let kind = result.kind;
    Ok(Rc::new(match &instruction.action {
        MosaicAction::Constant(elements) => return Ok(Rc::clone(elements)),
        // Memory is row-major in both shapes, so that a reshape moves no element.
        MosaicAction::Reshape => return Ok(Rc::clone(operand(0))),
        MosaicAction::AssumeMultiple(multiple) => {
            let found = operand(0).int();
            if found % multiple != 0 {
                return Err(instruction.error(format!("{found} is not a multiple of {multiple}")));
            }
            return Ok(Rc::clone(operand(0)));
        }
        MosaicAction::Elementwise(Elementwise::FloatUnary(f)) => {
            ElementBuffer::Float(operand(0).floats().iter().map(|&x| kind.round(f(x))).collect())
        }
        MosaicAction::Elementwise(Elementwise::FloatBinary(f)) => {
            let pairs = operand(0).floats().iter().zip(operand(1).floats());
            ElementBuffer::Float(pairs.map(|(&x, &y)| kind.round(f(x, y))).collect())
        }
        MosaicAction::Elementwise(Elementwise::IntBinary(f)) => {
            let pairs = operand(0).ints().iter().zip(operand(1).ints());
            let results: Result<_, _> = pairs.map(|(&x, &y)| f(kind, x, y).map(|z| kind.wrap(z))).collect();
            ElementBuffer::Int(results.map_err(|problem| instruction.error(problem.to_string()))?)
        }
        MosaicAction::Elementwise(Elementwise::Bitwise(f)) => {
            let pairs = operand(0).ints().iter().zip(operand(1).ints());
            ElementBuffer::Int(pairs.map(|(&x, &y)| f(x, y)).collect())
        }
        MosaicAction::CompareInt(holds) => {
            let pairs = operand(0).ints().iter().zip(operand(1).ints());
            ElementBuffer::Int(pairs.map(|(&x, &y)| i32::from(holds(x, y))).collect())
        }
        MosaicAction::CompareFloat(holds) => {
            let pairs = operand(0).floats().iter().zip(operand(1).floats());
            ElementBuffer::Int(pairs.map(|(&x, &y)| i32::from(holds(x, y))).collect())
        }
        MosaicAction::Select => return Ok(select(operand(0), operand(1), operand(2))),
        MosaicAction::Convert(conversion) => (conversion.convert)(operand(0), operand_type(0).kind, kind),
        // A stride of 0 reads the same element again along an axis that is broadcast.
        MosaicAction::Broadcast => operand(0).gather(walk(&result.shape, repeating_strides(operand_type(0), result))),
        MosaicAction::Slice { start } => {
            let mut slice = ElementBuffer::poison(result);
            let to = BlockOrigin { shape: &result.shape, start: &vec![0; start.len()] };
            slice.copy_block(&to, operand(0), &BlockOrigin { shape: &operand_type(0).shape, start }, &result.shape);
            slice
        }
        MosaicAction::Reduce { fold, dimensions } => {
            // A stride of 0 along the folded axes sends all of their elements to one place of the result.
            let from = operand_type(0);
            let places = walk(&from.shape, strides_without(&from.shape, dimensions));
            reduce(*fold, kind, operand(0), operand(1), places, units != MosaicUnits::Host)
        }
        MosaicAction::Iota { dimension } => {
            // Only the chosen axis advances: the walk gives an element's index along it.
            let mut strides = vec![0; result.shape.len()];
            strides[*dimension] = 1;
            ElementBuffer::Int(walk(&result.shape, strides).map(|i| i as i32).collect())
        }
        MosaicAction::Load
        | MosaicAction::LoadScalar
        | MosaicAction::Store
        | MosaicAction::For(_)
        | MosaicAction::If { .. } => {
            unreachable!("run by the machine")
        }
    }))
}

/// Replaces the `exact` result of the host by that of less accurate units.
fn off(units: MosaicUnits, instruction: &MosaicInstruction, exact: Rc<ElementBuffer>) -> Rc<ElementBuffer> {
    let name = instruction.name.trim_start_matches("stable_mosaic.");
    let by = match units {
        MosaicUnits::Host => return exact,
        MosaicUnits::Above => OFF_ULP,
        MosaicUnits::Below => -OFF_ULP,
    };
    // Bits of a float are ordered like its magnitude, so that adding to them moves it away from 0.
    let ulps = |x: f32| if x.is_normal() { f32::from_bits(x.to_bits().wrapping_add_signed(by)) } else { x };
    let of_logarithm = |x: f32| if x.abs() < 1.0 { x + by as f32 * f32::EPSILON / 2.0 } else { ulps(x) };
    // Only functions that a TPU's units approximate are off; a logarithm between −1 and 1 has an absolute error.
    match (name, &*exact) {
        ("math.exp" | "math.exp2" | "arith.divf", ElementBuffer::Float(values)) => {
            Rc::new(ElementBuffer::Float(values.iter().map(|&x| ulps(x)).collect()))
        }
        ("math.log" | "math.log2", ElementBuffer::Float(values)) => {
            Rc::new(ElementBuffer::Float(values.iter().map(|&x| of_logarithm(x)).collect()))
        }
        _ => exact,
    }
}

fn select(condition: &ElementBuffer, yes: &Rc<ElementBuffer>, no: &Rc<ElementBuffer>) -> Rc<ElementBuffer> {
    fn chosen<T: Copy>(condition: &[i32], yes: &[T], no: &[T]) -> Vec<T> {
        let pairs = yes.iter().zip(no);
        condition.iter().zip(pairs).map(|(&holds, (&yes, &no))| if holds == 0 { no } else { yes }).collect()
    }
    let condition = condition.ints();
    // One condition selects a whole operand, which need not be copied.
    if let [holds] = condition {
        return Rc::clone(if *holds == 0 { no } else { yes });
    }
    Rc::new(match &**yes {
        ElementBuffer::Float(yes) => ElementBuffer::Float(chosen(condition, yes, no.floats())),
        ElementBuffer::Int(yes) => ElementBuffer::Int(chosen(condition, yes, no.ints())),
    })
}

/// Folds the elements of `from` that `places` assigns to one element of `onto` by halves, then onto that element: the
/// lanes of a register are combined in as many rounds, and an error grows with their number.
fn reduce(
    fold: ReductionFold,
    kind: ElementKind,
    from: &ElementBuffer,
    onto: &ElementBuffer,
    places: impl Iterator<Item = usize>,
    neighbours: bool,
) -> ElementBuffer {
    match fold {
        ReductionFold::Float(f) => {
            let combine = |x, y| kind.round(f(x, y));
            ElementBuffer::Float(by_halves(from.floats(), onto.floats(), places, neighbours, combine))
        }
        ReductionFold::Int(f) => {
            ElementBuffer::Int(by_halves(from.ints(), onto.ints(), places, false, |x, y| kind.wrap(f(x, y))))
        }
    }
}

fn by_halves<T: Copy>(
    from: &[T],
    onto: &[T],
    places: impl Iterator<Item = usize>,
    neighbours: bool,
    combine: impl Fn(T, T) -> T,
) -> Vec<T> {
    // The elements of each result, in order.
    let mut gathered = vec![Vec::new(); onto.len()];
    for (place, &x) in places.zip(from) {
        gathered[place].push(x);
    }
    let fold = |mut values: Vec<T>| {
        // Pairs of neighbours, for units that are less exact: another order of the sum.
        while neighbours && values.len() > 1 {
            values = values.chunks(2).map(|pair| pair[1..].iter().fold(pair[0], |x, &y| combine(x, y))).collect();
        }
        // Halves: the upper one onto the lower one, as lanes of a register are folded.
        while values.len() > 1 {
            let half = values.len().div_ceil(2);
            for i in half..values.len() {
                values[i - half] = combine(values[i - half], values[i]);
            }
            values.truncate(half);
        }
        values.pop()
    };
    let folded = gathered.into_iter().zip(onto);
    folded.map(|(values, &start)| fold(values).map_or(start, |folded| combine(start, folded))).collect()
}

/// Lists `Σ position·stride` for every position of `shape`, in row-major order.
fn walk(shape: &[usize], strides: Vec<usize>) -> impl Iterator<Item = usize> {
    let mut position = vec![0; shape.len()];
    (0..shape.iter().product()).map(move |_| {
        let place = position.iter().zip(&strides).map(|(position, stride)| position * stride).sum();
        advance(&mut position, shape);
        place
    })
}

/// Returns the row-major strides of `shape` without `dimensions`, whose strides are 0.
fn strides_without(shape: &[usize], dimensions: &[usize]) -> Vec<usize> {
    let mut strides = vec![0; shape.len()];
    let mut stride = 1;
    for (i, &extent) in shape.iter().enumerate().rev() {
        if !dimensions.contains(&i) {
            strides[i] = stride;
            stride *= extent;
        }
    }
    strides
}

/// Returns for each dimension of `to` the stride in `from`, whose last dimensions are those of `to` or have extent 1.
fn repeating_strides(from: &ArrayType, to: &ArrayType) -> Vec<usize> {
    let repeated: Vec<usize> = (0..from.shape.len()).filter(|&i| from.shape[i] == 1).collect();
    let mut strides = vec![0; to.shape.len() - from.shape.len()];
    strides.extend(strides_without(&from.shape, &repeated));
    strides
}
