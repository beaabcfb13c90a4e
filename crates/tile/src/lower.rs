//! The one walk over a kernel's body that every lowering shares.

use super::ir::{Kernel, Memory, Operation, Place, Statement, Type, Value};

/// Writes the body of a loop, given the trip and what is carried; returns what the next trip is given.
pub(super) type LoopBody<'b, L> = &'b mut dyn FnMut(
    &mut L,
    <L as Lowering>::Value,
    &[<L as Lowering>::Value],
) -> Vec<Operand<<L as Lowering>::Value>>;

/// What a lowering writes for each thing that a kernel may do.
pub(super) trait Lowering {
    /// A value in the text that is written.
    type Value: Copy;

    /// The value of `operation`, of type `ty`; its operands are written already.
    fn operation(&mut self, ty: Type, operation: &Operation, operands: &[Operand<Self::Value>]) -> Self::Value;

    fn store(&mut self, memory: Memory, place: Place<Self::Value>, value: Operand<Self::Value>);

    /// A loop whose body is written by `body`, given the trip and what is carried. `stored` is the memory that it writes.
    fn for_loop(
        &mut self,
        trips: usize,
        initial: &[Operand<Self::Value>],
        stored: &[Memory],
        body: LoopBody<'_, Self>,
    ) -> Vec<Self::Value>;

    /// A block that runs where `condition` holds. `stored` is the memory that it writes.
    fn when(&mut self, condition: Self::Value, stored: &[Memory], body: &mut dyn FnMut(&mut Self));
}

/// A value that is written already.
#[derive(Clone, Copy)]
pub(super) struct Operand<V> {
    pub(super) value: V,
    pub(super) ty: Type,
}

/// Writes the body of `kernel`.
pub(super) fn lower<L: Lowering>(kernel: &Kernel, lowering: &mut L) {
    let mut walk = Walk { kernel, written: vec![None; kernel.types.len()] };
    walk.block(&kernel.body, lowering);
}

struct Walk<'k, V> {
    kernel: &'k Kernel,
    /// What each value of the kernel is in the text.
    written: Vec<Option<V>>,
}

impl<V: Copy> Walk<'_, V> {
    fn operand(&self, value: Value) -> Operand<V> {
        Operand { value: self.written[value.0].expect("defined before it is used"), ty: self.kernel.types[value.0] }
    }

    fn operands(&self, values: &[Value]) -> Vec<Operand<V>> {
        values.iter().map(|&value| self.operand(value)).collect()
    }

    fn place(&self, place: Place<Value>) -> Place<V> {
        match place {
            Place::Static(column) => Place::Static(column),
            Place::Dynamic(column) => Place::Dynamic(self.operand(column).value),
        }
    }

    fn set(&mut self, values: &[Value], written: &[V]) {
        for (value, &text) in values.iter().zip(written) {
            self.written[value.0] = Some(text);
        }
    }

    fn block<L: Lowering<Value = V>>(&mut self, statements: &[Statement], lowering: &mut L) {
        for statement in statements {
            match statement {
                Statement::Let(value, operation) => {
                    let operands = self.operands(&used_by(operation));
                    let written = lowering.operation(self.kernel.types[value.0], operation, &operands);
                    self.written[value.0] = Some(written);
                }
                Statement::Store { memory, place, value } => {
                    lowering.store(*memory, self.place(*place), self.operand(*value));
                }
                Statement::For(looped) => {
                    let initial = self.operands(&looped.initial);
                    let stored = stored_in(&looped.body);
                    let results =
                        lowering.for_loop(looped.trips, &initial, &stored, &mut |lowering, index, carried| {
                            self.written[looped.index.0] = Some(index);
                            self.set(&looped.carried, carried);
                            self.block(&looped.body, lowering);
                            self.operands(&looped.next)
                        });
                    self.set(&looped.results, &results);
                }
                Statement::When { condition, body } => {
                    let condition = self.operand(*condition).value;
                    let stored = stored_in(body);
                    lowering.when(condition, &stored, &mut |lowering| self.block(body, lowering));
                }
            }
        }
    }
}

/// The values that an operation reads.
fn used_by(operation: &Operation) -> Vec<Value> {
    match *operation {
        Operation::Constant(_)
        | Operation::GridIndex(_)
        | Operation::Iota(_)
        | Operation::Load(_, Place::Static(_)) => vec![],
        Operation::Load(_, Place::Dynamic(a))
        | Operation::LoadScalar(_, a)
        | Operation::Unary(_, a)
        | Operation::Convert(a)
        | Operation::Bitcast(a)
        | Operation::Broadcast(a)
        | Operation::Columns(a, _)
        | Operation::FoldLanes(_, a) => vec![a],
        Operation::Binary(_, a, b) | Operation::Compare(_, a, b) => vec![a, b],
        Operation::Select(condition, yes, no) => vec![condition, yes, no],
    }
}

/// The memory that statements write, each once.
pub(super) fn stored_in(statements: &[Statement]) -> Vec<Memory> {
    let mut stored = Vec::new();
    let mut add = |memory| {
        if !stored.contains(&memory) {
            stored.push(memory);
        }
    };
    for statement in statements {
        match statement {
            Statement::Let(..) => {}
            Statement::Store { memory, .. } => add(*memory),
            Statement::For(looped) => stored_in(&looped.body).into_iter().for_each(&mut add),
            Statement::When { body, .. } => stored_in(body).into_iter().for_each(&mut add),
        }
    }
    stored
}
