//! The one walk over a kernel's body that every lowering shares.

use super::ir::{ColumnIndex, TileKernel, TileMemory, TileOperation, TileStatement, TileType, TileValue};

/// Writes the body of a loop, given the trip and what is carried; returns what the next trip is given.
pub(super) type LoopBody<'b, L> = &'b mut dyn FnMut(
    &mut L,
    <L as KernelLowering>::Value,
    &[<L as KernelLowering>::Value],
) -> Vec<LoweredOperand<<L as KernelLowering>::Value>>;

/// A lowering: the text to write for each operation of a kernel.
pub(super) trait KernelLowering {
    /// A value in the text that is written.
    type Value: Copy;

    /// The value of `operation`, of type `ty`; its operands are written already.
    fn operation(
        &mut self,
        ty: TileType,
        operation: &TileOperation,
        operands: &[LoweredOperand<Self::Value>],
    ) -> Self::Value;

    fn store(&mut self, memory: TileMemory, place: ColumnIndex<Self::Value>, value: LoweredOperand<Self::Value>);

    /// A loop whose body is written by `body`, given the trip and what is carried. `stored` is the memory that it writes.
    fn for_loop(
        &mut self,
        trips: usize,
        initial: &[LoweredOperand<Self::Value>],
        stored: &[TileMemory],
        body: LoopBody<'_, Self>,
    ) -> Vec<Self::Value>;

    /// A block that runs where `condition` holds. `stored` is the memory that it writes.
    fn when(&mut self, condition: Self::Value, stored: &[TileMemory], body: &mut dyn FnMut(&mut Self));
}

/// A value that is written already.
#[derive(Clone, Copy)]
pub(super) struct LoweredOperand<V> {
    pub(super) value: V,
    pub(super) ty: TileType,
}

/// Writes the body of `kernel`.
pub(super) fn lower<L: KernelLowering>(kernel: &TileKernel, lowering: &mut L) {
    let mut walk = BodyLowering { kernel, written: vec![None; kernel.types.len()] };
    walk.block(&kernel.body, lowering);
}

struct BodyLowering<'k, V> {
    kernel: &'k TileKernel,
    /// The value in the text for each value of the kernel, once it is written.
    written: Vec<Option<V>>,
}

impl<V: Copy> BodyLowering<'_, V> {
    fn operand(&self, value: TileValue) -> LoweredOperand<V> {
        LoweredOperand {
            value: self.written[value.0].expect("defined before it is used"),
            ty: self.kernel.types[value.0],
        }
    }

    fn operands(&self, values: &[TileValue]) -> Vec<LoweredOperand<V>> {
        values.iter().map(|&value| self.operand(value)).collect()
    }

    fn place(&self, place: ColumnIndex<TileValue>) -> ColumnIndex<V> {
        match place {
            ColumnIndex::Static(column) => ColumnIndex::Static(column),
            ColumnIndex::Dynamic(column) => ColumnIndex::Dynamic(self.operand(column).value),
        }
    }

    fn set(&mut self, values: &[TileValue], written: &[V]) {
        for (value, &text) in values.iter().zip(written) {
            self.written[value.0] = Some(text);
        }
    }

    fn block<L: KernelLowering<Value = V>>(&mut self, statements: &[TileStatement], lowering: &mut L) {
        for statement in statements {
            match statement {
                TileStatement::Let(value, operation) => {
                    // Operands come before their operation, so that each has its text already.
                    let operands = self.operands(&used_by(operation));
                    let written = lowering.operation(self.kernel.types[value.0], operation, &operands);
                    self.written[value.0] = Some(written);
                }
                TileStatement::Store { memory, place, value } => {
                    lowering.store(*memory, self.place(*place), self.operand(*value));
                }
                TileStatement::For(looped) => {
                    let initial = self.operands(&looped.initial);
                    // Lowerings without mutable memory carry the memory that the body writes through the loop.
                    let stored = stored_in(&looped.body);
                    let results =
                        lowering.for_loop(looped.trips, &initial, &stored, &mut |lowering, index, carried| {
                            // The names of the loop's index and of what is carried are valid in its body only, and get
                            // their text from the lowering.
                            self.written[looped.index.0] = Some(index);
                            self.set(&looped.carried, carried);
                            self.block(&looped.body, lowering);
                            self.operands(&looped.next)
                        });
                    self.set(&looped.results, &results);
                }
                TileStatement::When { condition, body } => {
                    let condition = self.operand(*condition).value;
                    let stored = stored_in(body);
                    lowering.when(condition, &stored, &mut |lowering| self.block(body, lowering));
                }
            }
        }
    }
}

/// The values that an operation reads.
fn used_by(operation: &TileOperation) -> Vec<TileValue> {
    match *operation {
        TileOperation::Constant(_)
        | TileOperation::GridIndex(_)
        | TileOperation::Iota(_)
        | TileOperation::Load(_, ColumnIndex::Static(_)) => vec![],
        TileOperation::Load(_, ColumnIndex::Dynamic(a))
        | TileOperation::LoadScalar(_, a)
        | TileOperation::Unary(_, a)
        | TileOperation::Convert(a)
        | TileOperation::Bitcast(a)
        | TileOperation::Broadcast(a)
        | TileOperation::Columns(a, _)
        | TileOperation::FoldLanes(_, a) => vec![a],
        TileOperation::Binary(_, a, b) | TileOperation::Compare(_, a, b) => vec![a, b],
        TileOperation::Select(condition, yes, no) => vec![condition, yes, no],
    }
}

/// The memory that statements write, each once.
pub(super) fn stored_in(statements: &[TileStatement]) -> Vec<TileMemory> {
    let mut stored = Vec::new();
    let mut add = |memory| {
        if !stored.contains(&memory) {
            stored.push(memory);
        }
    };
    for statement in statements {
        match statement {
            TileStatement::Let(..) => {}
            TileStatement::Store { memory, .. } => add(*memory),
            TileStatement::For(looped) => stored_in(&looped.body).into_iter().for_each(&mut add),
            TileStatement::When { body, .. } => stored_in(body).into_iter().for_each(&mut add),
        }
    }
    stored
}
