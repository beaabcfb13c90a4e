//! Runs a function's instructions, one after another, on values held by slot.

use std::rc::Rc;

use super::check::{Action, Body, Fold, Function, Instruction, Slot};
use super::elementwise::Elementwise;
use super::value::{Block, Elements, Kind, Shaped, Type, advance};
use super::{InterpretError, OFF_ULP, Options, Units};

/// What an instruction costs besides its elements, in elements.
const INSTRUCTION: u64 = 32;

const CHECKED: &str = "checked: every operand is defined before, with the type that is wanted";

/// A value that a slot holds.
#[derive(Clone)]
pub(super) enum Value {
    Data(Rc<Elements>),
    /// A memref: its place in [`Machine::memory`].
    Memory(usize),
}

impl Value {
    pub(super) fn int(x: i32) -> Self {
        Value::Data(Rc::new(Elements::Int(vec![x])))
    }

    pub(super) fn elements(&self) -> &Rc<Elements> {
        match self {
            Value::Data(elements) => elements,
            Value::Memory(_) => unreachable!("{CHECKED}"),
        }
    }
}

/// On-chip memory, and how much more may be computed.
pub(super) struct Machine {
    pub(super) memory: Vec<Elements>,
    /// Of memory that a core keeps from step to step, for each element the [turn](Self::turn) that wrote it, or 0.
    pub(super) written: Vec<Option<Elements>>,
    /// Of each memory, the line of the first store to it.
    pub(super) stored: Vec<Option<usize>>,
    /// The step's indices along parallel dimensions as one number ≥ 1: another core may run what has another.
    pub(super) turn: i32,
    units: Units,
    /// Elements computed so far, and the most that may be.
    work: u64,
    most_work: u64,
}

struct Frame<'a> {
    types: &'a [Type],
    values: Vec<Option<Value>>,
}

impl Frame<'_> {
    fn value(&self, slot: Slot) -> &Value {
        self.values[slot].as_ref().expect(CHECKED)
    }

    fn elements(&self, slot: Slot) -> &Rc<Elements> {
        self.value(slot).elements()
    }

    fn memory(&self, slot: Slot) -> usize {
        match self.value(slot) {
            Value::Memory(place) => *place,
            Value::Data(_) => unreachable!("{CHECKED}"),
        }
    }

    fn copies(&self, slots: &[Slot]) -> Vec<Value> {
        slots.iter().map(|&slot| self.value(slot).clone()).collect()
    }

    fn set(&mut self, slots: &[Slot], values: impl IntoIterator<Item = Value>) {
        for (&slot, value) in slots.iter().zip(values) {
            self.values[slot] = Some(value);
        }
    }
}

impl Instruction {
    fn error(&self, problem: String) -> InterpretError {
        InterpretError::Operation { line: self.line, name: self.name.clone(), problem }
    }
}

impl Machine {
    pub(super) fn new(memory: Vec<Elements>, Options { units, most_work, .. }: Options) -> Self {
        let written = memory.iter().map(|_| None).collect();
        let stored = vec![None; memory.len()];
        Self { memory, written, stored, turn: 1, units, work: 0, most_work }
    }

    /// Counts the handling of `elements`.
    pub(super) fn charge(&mut self, elements: u64) -> Result<(), InterpretError> {
        self.work = self.work.saturating_add(elements);
        if self.work > self.most_work { Err(InterpretError::Endless { most: self.most_work }) } else { Ok(()) }
    }

    /// What `function` returns of `arguments`, which have its parameters' types.
    pub(super) fn call(&mut self, function: &Function, arguments: Vec<Value>) -> Result<Vec<Value>, InterpretError> {
        let mut frame = Frame { types: &function.types, values: vec![None; function.types.len()] };
        frame.set(&function.body.parameters, arguments);
        self.body(&function.body, &mut frame)
    }

    fn body(&mut self, body: &Body, frame: &mut Frame) -> Result<Vec<Value>, InterpretError> {
        for instruction in &body.instructions {
            let handled = instruction.operands.iter().chain(&instruction.results);
            let elements: usize =
                handled.map(|&slot| if let Type::Data(shaped) = &frame.types[slot] { shaped.len() } else { 0 }).sum();
            self.charge(INSTRUCTION + elements as u64)?;
            self.instruction(instruction, frame)?;
        }
        Ok(frame.copies(&body.results))
    }

    fn instruction(&mut self, instruction: &Instruction, frame: &mut Frame) -> Result<(), InterpretError> {
        let results = match &instruction.action {
            Action::For(body) => self.for_loop(instruction, body, frame)?,
            Action::If { yes, no } => {
                let holds = frame.elements(instruction.operands[0]).int() != 0;
                self.body(if holds { yes } else { no }, frame)?
            }
            Action::Store => {
                self.store(instruction, frame)?;
                Vec::new()
            }
            Action::Load => vec![Value::Data(Rc::new(self.load(instruction, frame)?))],
            Action::LoadScalar => vec![Value::Data(Rc::new(self.load_scalar(instruction, frame)?))],
            _ => vec![Value::Data(off(self.units, instruction, pure(instruction, frame, self.units)?))],
        };
        frame.set(&instruction.results, results);
        Ok(())
    }

    fn for_loop(
        &mut self,
        instruction: &Instruction,
        body: &Body,
        frame: &mut Frame,
    ) -> Result<Vec<Value>, InterpretError> {
        let (bounds, carried) = instruction.operands.split_at(3);
        let [low, high, step] = [0, 1, 2].map(|i| i64::from(frame.elements(bounds[i]).int()));
        if step <= 0 {
            return Err(instruction.error(format!("a step of {step}, expected a positive one")));
        }
        let mut carried = frame.copies(carried);
        let mut i = low;
        while i < high {
            self.charge(INSTRUCTION)?;
            frame.set(&body.parameters[..1], [Value::int(i as i32)]);
            frame.set(&body.parameters[1..], carried);
            carried = self.body(body, frame)?;
            i += step;
        }
        Ok(carried)
    }

    fn load(&self, instruction: &Instruction, frame: &Frame) -> Result<Elements, InterpretError> {
        let result = frame.types[instruction.results[0]].shaped();
        let (memory, start) = (instruction.operands[0], &instruction.operands[1..]);
        let start = place(instruction, frame, memory, start, &result.shape)?;
        let mut loaded = Elements::poison(result);
        let at = Block { shape: &frame.types[memory].shaped().shape, start: &start };
        let to = Block { shape: &result.shape, start: &vec![0; start.len()] };
        let memory = frame.memory(memory);
        loaded.copy_block(&to, &self.memory[memory], &at, &result.shape);
        if let Some(written) = &self.written[memory] {
            let mut turns = Elements::Int(vec![0; result.len()]);
            turns.copy_block(&to, written, &at, &result.shape);
            if turns.ints().iter().any(|&turn| turn != 0 && turn != self.turn) {
                let problem = "reads scratch that a step of another index along a parallel dimension wrote";
                return Err(instruction.error(problem.to_string()));
            }
        }
        Ok(loaded)
    }

    fn store(&mut self, instruction: &Instruction, frame: &Frame) -> Result<(), InterpretError> {
        let (value, memory, start) = (instruction.operands[0], instruction.operands[1], &instruction.operands[2..]);
        let extent = &frame.types[value].shaped().shape;
        let start = place(instruction, frame, memory, start, extent)?;
        let to = Block { shape: &frame.types[memory].shaped().shape, start: &start };
        let at = Block { shape: extent, start: &vec![0; start.len()] };
        let memory = frame.memory(memory);
        self.memory[memory].copy_block(&to, frame.elements(value), &at, extent);
        self.stored[memory].get_or_insert(instruction.line);
        if let Some(written) = &mut self.written[memory] {
            written.copy_block(&to, &Elements::Int(vec![self.turn; extent.iter().product()]), &at, extent);
        }
        Ok(())
    }

    fn load_scalar(&self, instruction: &Instruction, frame: &Frame) -> Result<Elements, InterpretError> {
        let (memory, start) = (instruction.operands[0], &instruction.operands[1..]);
        let start = place(instruction, frame, memory, start, &vec![1; start.len()])?;
        let at = Block { shape: &frame.types[memory].shaped().shape, start: &start };
        let place = at.place(&vec![0; start.len()]);
        Ok(self.memory[frame.memory(memory)].gather([place].into_iter()))
    }
}

/// Where a block of `extent` begins in `memory`, given by index operands, if it lies within.
fn place(
    instruction: &Instruction,
    frame: &Frame,
    memory: Slot,
    start: &[Slot],
    extent: &[usize],
) -> Result<Vec<usize>, InterpretError> {
    let start: Vec<i32> = start.iter().map(|&slot| frame.elements(slot).int()).collect();
    let shape = &frame.types[memory].shaped().shape;
    let within = start.iter().zip(extent).zip(shape).map(|((&start, &extent), &size)| {
        let start = usize::try_from(start).ok()?;
        (start.checked_add(extent)? <= size).then_some(start)
    });
    within.collect::<Option<Vec<_>>>().ok_or_else(|| {
        instruction.error(format!("a block of {extent:?} at {start:?} is not within {}", frame.types[memory]))
    })
}

/// The result of an operation that touches no memory.
fn pure(instruction: &Instruction, frame: &Frame, units: Units) -> Result<Rc<Elements>, InterpretError> {
    let operand = |i: usize| frame.elements(instruction.operands[i]);
    let operand_type = |i: usize| frame.types[instruction.operands[i]].shaped();
    let result = frame.types[instruction.results[0]].shaped();
    let kind = result.kind;
    Ok(Rc::new(match &instruction.action {
        Action::Constant(elements) => return Ok(Rc::clone(elements)),
        Action::Reshape => return Ok(Rc::clone(operand(0))),
        Action::AssumeMultiple(multiple) => {
            let found = operand(0).int();
            if found % multiple != 0 {
                return Err(instruction.error(format!("{found} is not a multiple of {multiple}")));
            }
            return Ok(Rc::clone(operand(0)));
        }
        Action::Elementwise(Elementwise::FloatUnary(f)) => {
            Elements::Float(operand(0).floats().iter().map(|&x| kind.round(f(x))).collect())
        }
        Action::Elementwise(Elementwise::FloatBinary(f)) => {
            let pairs = operand(0).floats().iter().zip(operand(1).floats());
            Elements::Float(pairs.map(|(&x, &y)| kind.round(f(x, y))).collect())
        }
        Action::Elementwise(Elementwise::IntBinary(f)) => {
            let pairs = operand(0).ints().iter().zip(operand(1).ints());
            let results: Result<_, _> = pairs.map(|(&x, &y)| f(kind, x, y).map(|z| kind.wrap(z))).collect();
            Elements::Int(results.map_err(|problem| instruction.error(problem.to_string()))?)
        }
        Action::Elementwise(Elementwise::Bitwise(f)) => {
            let pairs = operand(0).ints().iter().zip(operand(1).ints());
            Elements::Int(pairs.map(|(&x, &y)| f(x, y)).collect())
        }
        Action::CompareInt(holds) => {
            let pairs = operand(0).ints().iter().zip(operand(1).ints());
            Elements::Int(pairs.map(|(&x, &y)| i32::from(holds(x, y))).collect())
        }
        Action::CompareFloat(holds) => {
            let pairs = operand(0).floats().iter().zip(operand(1).floats());
            Elements::Int(pairs.map(|(&x, &y)| i32::from(holds(x, y))).collect())
        }
        Action::Select => return Ok(select(operand(0), operand(1), operand(2))),
        Action::Convert(conversion) => (conversion.convert)(operand(0), operand_type(0).kind, kind),
        Action::Broadcast => operand(0).gather(walk(&result.shape, repeating_strides(operand_type(0), result))),
        Action::Slice { start } => {
            let mut slice = Elements::poison(result);
            let to = Block { shape: &result.shape, start: &vec![0; start.len()] };
            slice.copy_block(&to, operand(0), &Block { shape: &operand_type(0).shape, start }, &result.shape);
            slice
        }
        Action::Reduce { fold, dimensions } => {
            let from = operand_type(0);
            let places = walk(&from.shape, strides_without(&from.shape, dimensions));
            reduce(*fold, kind, operand(0), operand(1), places, units != Units::Host)
        }
        Action::Iota { dimension } => {
            let mut strides = vec![0; result.shape.len()];
            strides[*dimension] = 1;
            Elements::Int(walk(&result.shape, strides).map(|i| i as i32).collect())
        }
        Action::Load | Action::LoadScalar | Action::Store | Action::For(_) | Action::If { .. } => {
            unreachable!("run by the machine")
        }
    }))
}

/// What other units than the host's give for `exact`.
fn off(units: Units, instruction: &Instruction, exact: Rc<Elements>) -> Rc<Elements> {
    let name = instruction.name.trim_start_matches("stable_mosaic.");
    let by = match units {
        Units::Host => return exact,
        Units::Above => OFF_ULP,
        Units::Below => -OFF_ULP,
    };
    let ulps = |x: f32| if x.is_normal() { f32::from_bits(x.to_bits().wrapping_add_signed(by)) } else { x };
    let of_logarithm = |x: f32| if x.abs() < 1.0 { x + by as f32 * f32::EPSILON / 2.0 } else { ulps(x) };
    match (name, &*exact) {
        ("math.exp" | "math.exp2" | "arith.divf", Elements::Float(values)) => {
            Rc::new(Elements::Float(values.iter().map(|&x| ulps(x)).collect()))
        }
        ("math.log" | "math.log2", Elements::Float(values)) => {
            Rc::new(Elements::Float(values.iter().map(|&x| of_logarithm(x)).collect()))
        }
        _ => exact,
    }
}

fn select(condition: &Elements, yes: &Rc<Elements>, no: &Rc<Elements>) -> Rc<Elements> {
    fn chosen<T: Copy>(condition: &[i32], yes: &[T], no: &[T]) -> Vec<T> {
        let pairs = yes.iter().zip(no);
        condition.iter().zip(pairs).map(|(&holds, (&yes, &no))| if holds == 0 { no } else { yes }).collect()
    }
    let condition = condition.ints();
    if let [holds] = condition {
        return Rc::clone(if *holds == 0 { no } else { yes });
    }
    Rc::new(match &**yes {
        Elements::Float(yes) => Elements::Float(chosen(condition, yes, no.floats())),
        Elements::Int(yes) => Elements::Int(chosen(condition, yes, no.ints())),
    })
}

/// Folds the elements of `from` that `places` gives to one place of `onto` by halves, then onto what is there: the lanes
/// of a register meet in so many rounds, and an error grows with their number.
fn reduce(
    fold: Fold,
    kind: Kind,
    from: &Elements,
    onto: &Elements,
    places: impl Iterator<Item = usize>,
    neighbours: bool,
) -> Elements {
    match fold {
        Fold::Float(f) => {
            let combine = |x, y| kind.round(f(x, y));
            Elements::Float(by_halves(from.floats(), onto.floats(), places, neighbours, combine))
        }
        Fold::Int(f) => Elements::Int(by_halves(from.ints(), onto.ints(), places, false, |x, y| kind.wrap(f(x, y)))),
    }
}

fn by_halves<T: Copy>(
    from: &[T],
    onto: &[T],
    places: impl Iterator<Item = usize>,
    neighbours: bool,
    combine: impl Fn(T, T) -> T,
) -> Vec<T> {
    let mut gathered = vec![Vec::new(); onto.len()];
    for (place, &x) in places.zip(from) {
        gathered[place].push(x);
    }
    let fold = |mut values: Vec<T>| {
        while neighbours && values.len() > 1 {
            values = values.chunks(2).map(|pair| pair[1..].iter().fold(pair[0], |x, &y| combine(x, y))).collect();
        }
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

/// `Σ position·stride` for every position of `shape`, row-major.
fn walk(shape: &[usize], strides: Vec<usize>) -> impl Iterator<Item = usize> {
    let mut position = vec![0; shape.len()];
    (0..shape.iter().product()).map(move |_| {
        let place = position.iter().zip(&strides).map(|(position, stride)| position * stride).sum();
        advance(&mut position, shape);
        place
    })
}

/// Row-major strides of `shape` with `dimensions` left out; theirs are 0.
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

/// For each dimension of `to`, the stride in `from`, whose last dimensions are those of `to` or have extent 1.
fn repeating_strides(from: &Shaped, to: &Shaped) -> Vec<usize> {
    let repeated: Vec<usize> = (0..from.shape.len()).filter(|&i| from.shape[i] == 1).collect();
    let mut strides = vec![0; to.shape.len() - from.shape.len()];
    strides.extend(strides_without(&from.shape, &repeated));
    strides
}
