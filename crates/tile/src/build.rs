//! Writes a [`Kernel`], and checks it as it is written.

use super::ir::{
    Array, Binary, Comparison, Fold, For, Kernel, Memory, Operation, Place, Statement, Type, Unary, Value, Window,
};
use super::machine::Machine;
use assay_core::device_dtype::DeviceDtype;

/// A column of memory, to load from or store to.
pub type Column = Place<Value>;

/// Writes a kernel. A scalar, or a tile of one column, meets a wider tile in any elementwise operation and is repeated.
pub struct Builder {
    kernel: Kernel,
    /// The blocks that are open, the innermost last.
    open: Vec<Vec<Statement>>,
}

impl Builder {
    /// A kernel called `name` for `machine`, whose steps are those of `grid`, the last axis fastest.
    pub fn new(name: impl Into<String>, grid: &[usize], machine: Machine) -> Self {
        let kernel = Kernel {
            name: name.into(),
            machine,
            grid: grid.to_vec(),
            parallel: Vec::new(),
            scalars: Vec::new(),
            inputs: Vec::new(),
            outputs: Vec::new(),
            aliases: Vec::new(),
            scratch: Vec::new(),
            types: Vec::new(),
            body: Vec::new(),
        };
        Self { kernel, open: vec![Vec::new()] }
    }

    /// Says that steps along `axis` need nothing of one another: no scratch is kept from one to another, and no output's block is
    /// that of two.
    pub fn parallel(&mut self, axis: usize) {
        assert!(axis < self.kernel.grid.len(), "grid axis {axis} of {:?}", self.kernel.grid);
        self.kernel.parallel.push(axis);
    }

    /// What the kernel is written for.
    pub fn machine(&self) -> Machine {
        self.kernel.machine
    }

    /// An array of `length` in SMEM.
    pub fn scalars(&mut self, element: DeviceDtype, length: usize) -> Memory {
        self.kernel.scalars.push((element, length));
        Memory::Scalars(self.kernel.scalars.len() - 1)
    }

    fn array(&self, element: DeviceDtype, shape: &[usize], window: Window) -> Array {
        let rank = shape.len();
        assert!(
            rank >= 2 && window.block.len() == rank && window.along.len() == rank,
            "window {window:?} of {shape:?}"
        );
        assert!(window.block[..rank - 2].iter().all(|&extent| extent == 1), "window {window:?}: leading blocks of one");
        for ((&extent, &block), along) in shape.iter().zip(&window.block).zip(&window.along) {
            let blocks = along.map_or(1, |axis| self.kernel.grid[axis]);
            assert!(block * blocks >= extent, "window {window:?} does not reach all of {shape:?}");
        }
        Array { element, shape: shape.to_vec(), window }
    }

    /// An input and its window.
    pub fn input(&mut self, element: DeviceDtype, shape: &[usize], window: Window) -> Memory {
        let array = self.array(element, shape, window);
        self.kernel.inputs.push(array);
        Memory::Input(self.kernel.inputs.len() - 1)
    }

    /// An output and its window.
    pub fn output(&mut self, element: DeviceDtype, shape: &[usize], window: Window) -> Memory {
        let array = self.array(element, shape, window);
        self.kernel.outputs.push(array);
        Memory::Output(self.kernel.outputs.len() - 1)
    }

    /// An output that takes the memory of an input. Block by block each is read before it is written: both have one window.
    pub fn output_over(&mut self, input: Memory) -> Memory {
        let Memory::Input(i) = input else { panic!("output over {input:?}, expected an input") };
        self.kernel.outputs.push(self.kernel.inputs[i].clone());
        let output = self.kernel.outputs.len() - 1;
        self.kernel.aliases.push((i, output));
        Memory::Output(output)
    }

    /// `[rows, columns]` of scratch.
    pub fn scratch(&mut self, element: DeviceDtype, rows: usize, columns: usize) -> Memory {
        self.kernel.scratch.push((element, [rows, columns]));
        Memory::Scratch(self.kernel.scratch.len() - 1)
    }

    /// The kernel.
    pub fn finish(mut self) -> Kernel {
        self.kernel.body = self.open.pop().expect("the kernel's own block");
        assert!(self.open.is_empty(), "a block is still open");
        self.kernel
    }

    /// That of `value`.
    pub fn type_of(&self, value: Value) -> Type {
        self.kernel.types[value.0]
    }

    fn element(&self, value: Value) -> DeviceDtype {
        self.type_of(value).element
    }

    fn new_value(&mut self, ty: Type) -> Value {
        self.kernel.types.push(ty);
        Value(self.kernel.types.len() - 1)
    }

    fn write(&mut self, statement: Statement) {
        self.open.last_mut().expect("a block is open").push(statement);
    }

    fn define(&mut self, ty: Type, operation: Operation) -> Value {
        let value = self.new_value(ty);
        self.write(Statement::Let(value, operation));
        value
    }

    /// The number `x` in every place of `ty`.
    pub fn constant(&mut self, x: f64, ty: Type) -> Value {
        assert!(ty.element.is_float() || x.fract() == 0.0, "constant: {x} as {ty}");
        self.define(ty, Operation::Constant(x))
    }

    /// The scalar f32 `x`.
    pub fn number(&mut self, x: f64) -> Value {
        self.constant(x, Type::scalar(DeviceDtype::F32))
    }

    /// The scalar i32 `x`.
    pub fn integer(&mut self, x: usize) -> Value {
        self.constant(x as f64, Type::scalar(DeviceDtype::I32))
    }

    /// The index of this step along `axis` of the grid, a scalar i32.
    pub fn grid_index(&mut self, axis: usize) -> Value {
        assert!(axis < self.kernel.grid.len(), "grid axis {axis} of {:?}", self.kernel.grid);
        self.define(Type::scalar(DeviceDtype::I32), Operation::GridIndex(axis))
    }

    /// The scalar at `index` of an array in SMEM.
    pub fn load_scalar(&mut self, memory: Memory, index: Value) -> Value {
        let Memory::Scalars(i) = memory else { panic!("scalar of {memory:?}, expected an array in SMEM") };
        assert_eq!(self.type_of(index), Type::scalar(DeviceDtype::I32), "index of a scalar");
        self.define(Type::scalar(self.kernel.scalars[i].0), Operation::LoadScalar(i, index))
    }

    /// The element type of memory other than scalars.
    pub fn memory_element(&self, memory: Memory) -> DeviceDtype {
        self.kernel.tile_of(memory).0
    }

    fn check_place(&self, memory: Memory, place: Column, columns: usize) -> [usize; 2] {
        let (_, [rows, extent]) = self.kernel.tile_of(memory);
        match place {
            Place::Static(start) => assert!(start + columns <= extent, "columns {start} + {columns} of {extent}"),
            Place::Dynamic(start) => {
                assert_eq!(self.type_of(start), Type::scalar(DeviceDtype::I32), "a dynamic column");
                assert_eq!(columns % self.kernel.machine.lanes, 0, "{columns} columns from a dynamic one");
                assert!(columns <= extent, "{columns} columns of {extent}");
            }
        }
        [rows, columns]
    }

    /// All rows of `columns` columns from `place`.
    pub fn load(&mut self, memory: Memory, place: Column, columns: usize) -> Value {
        let tile = self.check_place(memory, place, columns);
        let (element, _) = self.kernel.tile_of(memory);
        self.define(Type { element, tile: Some(tile) }, Operation::Load(memory, place))
    }

    /// Writes all rows of a tile from column `place`.
    pub fn store(&mut self, memory: Memory, place: Column, value: Value) {
        let ty = self.type_of(value);
        let [_, columns] = ty.tile.expect("a tile is stored");
        let tile = self.check_place(memory, place, columns);
        let (element, _) = self.kernel.tile_of(memory);
        assert_eq!(ty, Type { element, tile: Some(tile) }, "store to {memory:?}");
        self.write(Statement::Store { memory, place, value });
    }

    fn unary(&mut self, op: Unary, a: Value) -> Value {
        assert!(self.element(a).is_float(), "{op:?} of {}", self.type_of(a));
        self.define(self.type_of(a), Operation::Unary(op, a))
    }

    /// `−a`
    pub fn neg(&mut self, a: Value) -> Value {
        self.unary(Unary::Neg, a)
    }

    /// `e^a`
    pub fn exp(&mut self, a: Value) -> Value {
        self.unary(Unary::Exp, a)
    }

    /// `2^a`
    pub fn exp2(&mut self, a: Value) -> Value {
        self.unary(Unary::Exp2, a)
    }

    /// `ln a`
    pub fn log(&mut self, a: Value) -> Value {
        self.unary(Unary::Log, a)
    }

    /// `a` and `b`, the one with fewer places repeated.
    fn meet(&mut self, op: &str, a: Value, b: Value) -> (Value, Value) {
        let (left, right) = (self.type_of(a), self.type_of(b));
        if left.tile == right.tile {
            return (a, b);
        }
        let places = |ty: Type| ty.tile.map_or(0, |[rows, columns]| rows * columns);
        let wide = if places(left) > places(right) { left.tile } else { right.tile };
        let [rows, columns] = wide.unwrap_or_else(|| panic!("{op}: {left} and {right}"));
        (self.broadcast(a, rows, columns), self.broadcast(b, rows, columns))
    }

    fn binary(&mut self, op: Binary, a: Value, b: Value) -> Value {
        let name = format!("{op:?}");
        let (a, b) = self.meet(&name, a, b);
        assert_eq!(self.type_of(a), self.type_of(b), "{name}: operands of different types");
        self.define(self.type_of(a), Operation::Binary(op, a, b))
    }

    /// `a + b`
    pub fn add(&mut self, a: Value, b: Value) -> Value {
        self.binary(Binary::Add, a, b)
    }

    /// `a − b`
    pub fn sub(&mut self, a: Value, b: Value) -> Value {
        self.binary(Binary::Sub, a, b)
    }

    /// `a · b`
    pub fn mul(&mut self, a: Value, b: Value) -> Value {
        self.binary(Binary::Mul, a, b)
    }

    /// `a / b`
    pub fn div(&mut self, a: Value, b: Value) -> Value {
        assert!(self.element(a).is_float(), "division of {}", self.type_of(a));
        self.binary(Binary::Div, a, b)
    }

    /// The larger; NaN if either is.
    pub fn max(&mut self, a: Value, b: Value) -> Value {
        self.binary(Binary::Max, a, b)
    }

    /// The smaller; NaN if either is.
    pub fn min(&mut self, a: Value, b: Value) -> Value {
        self.binary(Binary::Min, a, b)
    }

    /// `a ∧ b`, of truth values or of the bits of integers.
    pub fn and(&mut self, a: Value, b: Value) -> Value {
        assert!(!self.element(a).is_float(), "and of {}", self.type_of(a));
        self.binary(Binary::And, a, b)
    }

    /// `a >> b` of integers, the sign kept.
    pub fn shift_right(&mut self, a: Value, b: Value) -> Value {
        assert!(!self.element(a).is_float(), "shift of {}", self.type_of(a));
        self.binary(Binary::ShiftRight, a, b)
    }

    /// The bits of `a` as f32 or i32.
    pub fn bitcast(&mut self, a: Value, element: DeviceDtype) -> Value {
        let from = self.type_of(a);
        assert!(from.element.size() == 4 && element.size() == 4, "bitcast: {from} to {element}");
        self.define(Type { element, ..from }, Operation::Bitcast(a))
    }

    /// `a ∨ b`, of truth values.
    pub fn or(&mut self, a: Value, b: Value) -> Value {
        assert_eq!(self.element(a), DeviceDtype::Pred, "or of {}", self.type_of(a));
        self.binary(Binary::Or, a, b)
    }

    fn compare(&mut self, comparison: Comparison, a: Value, b: Value) -> Value {
        let name = format!("{comparison:?}");
        let (a, b) = self.meet(&name, a, b);
        assert_eq!(self.type_of(a), self.type_of(b), "{name}: operands of different types");
        let ty = Type { element: DeviceDtype::Pred, ..self.type_of(a) };
        self.define(ty, Operation::Compare(comparison, a, b))
    }

    /// `a = b`; false where either is NaN
    pub fn equal(&mut self, a: Value, b: Value) -> Value {
        self.compare(Comparison::Equal, a, b)
    }

    /// `a < b`; false where either is NaN
    pub fn less(&mut self, a: Value, b: Value) -> Value {
        self.compare(Comparison::Less, a, b)
    }

    /// `yes` where `condition` holds, else `no`.
    pub fn select(&mut self, condition: Value, yes: Value, no: Value) -> Value {
        assert_eq!(self.element(condition), DeviceDtype::Pred, "select: the condition");
        let (yes, no) = self.meet("select", yes, no);
        let (condition, yes) = self.meet("select", condition, yes);
        let (condition, no) = self.meet("select", condition, no);
        assert_eq!(self.type_of(yes), self.type_of(no), "select: operands of different types");
        self.define(self.type_of(yes), Operation::Select(condition, yes, no))
    }

    /// The row (`axis` 0) or column (`axis` 1) of each place, i32.
    pub fn iota(&mut self, axis: usize, rows: usize, columns: usize) -> Value {
        assert!(axis < 2, "iota along {axis}");
        self.define(Type::tile(DeviceDtype::I32, rows, columns), Operation::Iota(axis))
    }

    /// `a` in another element type, rounded to nearest even.
    pub fn convert(&mut self, a: Value, element: DeviceDtype) -> Value {
        if self.element(a) == element {
            return a;
        }
        self.define(Type { element, ..self.type_of(a) }, Operation::Convert(a))
    }

    /// A scalar, or a tile of one column, repeated.
    pub fn broadcast(&mut self, a: Value, rows: usize, columns: usize) -> Value {
        let from = self.type_of(a);
        if from.tile == Some([rows, columns]) {
            return a;
        }
        let fits = from.tile.is_none_or(|[r, c]| (r == rows || r == 1) && (c == columns || c == 1));
        assert!(fits, "broadcast: {from} to [{rows},{columns}]");
        self.define(Type::tile(from.element, rows, columns), Operation::Broadcast(a))
    }

    /// `columns` columns of a tile, from `start`.
    pub fn columns(&mut self, a: Value, start: usize, columns: usize) -> Value {
        let from = self.type_of(a);
        let [rows, extent] = from.tile.expect("columns of a tile");
        assert!(start + columns <= extent, "columns {start} + {columns} of {from}");
        if columns == extent {
            return a;
        }
        self.define(Type::tile(from.element, rows, columns), Operation::Columns(a, start))
    }

    /// A tile folded along its columns, `[rows, 1]`.
    pub fn fold_lanes(&mut self, fold: Fold, a: Value) -> Value {
        let from = self.type_of(a);
        let [rows, _] = from.tile.expect("a tile is folded");
        self.define(Type::tile(from.element, rows, 1), Operation::FoldLanes(fold, a))
    }

    /// Runs `body` `trips` times. It is given the trip, a scalar i32, and what is carried, and returns what the next trip
    /// is given.
    pub fn for_loop(
        &mut self,
        trips: usize,
        initial: &[Value],
        body: impl FnOnce(&mut Self, Value, &[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        if trips == 0 {
            return initial.to_vec();
        }
        let index = self.new_value(Type::scalar(DeviceDtype::I32));
        let types: Vec<Type> = initial.iter().map(|&value| self.type_of(value)).collect();
        let carried: Vec<Value> = types.iter().map(|&ty| self.new_value(ty)).collect();
        self.open.push(Vec::new());
        let next = body(self, index, &carried);
        let statements = self.open.pop().expect("opened above");
        let same = next.iter().map(|&value| self.type_of(value)).eq(types.iter().copied());
        assert!(same, "for: what is carried changes its type");
        let results: Vec<Value> = types.iter().map(|&ty| self.new_value(ty)).collect();
        let initial = initial.to_vec();
        self.write(Statement::For(For {
            trips,
            index,
            initial,
            carried,
            body: statements,
            next,
            results: results.clone(),
        }));
        results
    }

    /// Runs `body` where `condition`, a scalar truth value, holds.
    pub fn when(&mut self, condition: Value, body: impl FnOnce(&mut Self)) {
        assert_eq!(self.type_of(condition), Type::scalar(DeviceDtype::Pred), "when: the condition");
        self.open.push(Vec::new());
        body(self);
        let body = self.open.pop().expect("opened above");
        self.write(Statement::When { condition, body });
    }
}
