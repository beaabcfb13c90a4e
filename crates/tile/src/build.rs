//! Writes a [`TileKernel`], and checks it as it is written.

use super::ir::{
    Binary, ColumnIndex, Fold, TileComparison, TileKernel, TileLoop, TileMemory, TileOperation, TileStatement,
    TileType, TileValue, Unary, Window, WindowedArray,
};
use super::machine::TileMachine;
use assay_core::device_dtype::DeviceDtype;

/// A column of memory, to load from or store to.
pub type TileColumn = ColumnIndex<TileValue>;

/// Writes a kernel. A scalar, or a tile of one column, meets a wider tile in any elementwise operation and is repeated.
pub struct TileBuilder {
    kernel: TileKernel,
    /// The blocks that are open, the innermost last.
    open: Vec<Vec<TileStatement>>,
}

impl TileBuilder {
    /// A kernel called `name` for `machine`, whose steps are those of `grid`, the last axis fastest.
    pub fn new(name: impl Into<String>, grid: &[usize], machine: TileMachine) -> Self {
        let kernel = TileKernel {
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

    /// Returns the machine that the kernel is written for.
    pub fn machine(&self) -> TileMachine {
        self.kernel.machine
    }

    /// An array of `length` in SMEM.
    pub fn scalars(&mut self, element: DeviceDtype, length: usize) -> TileMemory {
        self.kernel.scalars.push((element, length));
        TileMemory::Scalars(self.kernel.scalars.len() - 1)
    }

    fn array(&self, element: DeviceDtype, shape: &[usize], window: Window) -> WindowedArray {
        // The last two dimensions are rows and columns; a kernel sees one index of each dimension before them.
        let rank = shape.len();
        assert!(
            rank >= 2 && window.block.len() == rank && window.along.len() == rank,
            "window {window:?} of {shape:?}"
        );
        assert!(window.block[..rank - 2].iter().all(|&extent| extent == 1), "window {window:?}: leading blocks of one");
        // Blocks along the grid must cover the array, or some elements would never be seen.
        for ((&extent, &block), along) in shape.iter().zip(&window.block).zip(&window.along) {
            let blocks = along.map_or(1, |axis| self.kernel.grid[axis]);
            assert!(block * blocks >= extent, "window {window:?} does not reach all of {shape:?}");
        }
        WindowedArray { element, shape: shape.to_vec(), window }
    }

    /// An input and its window.
    pub fn input(&mut self, element: DeviceDtype, shape: &[usize], window: Window) -> TileMemory {
        let array = self.array(element, shape, window);
        self.kernel.inputs.push(array);
        TileMemory::Input(self.kernel.inputs.len() - 1)
    }

    /// An output and its window.
    pub fn output(&mut self, element: DeviceDtype, shape: &[usize], window: Window) -> TileMemory {
        let array = self.array(element, shape, window);
        self.kernel.outputs.push(array);
        TileMemory::Output(self.kernel.outputs.len() - 1)
    }

    /// An output that takes the memory of an input. Block by block each is read before it is written: both have one window.
    pub fn output_over(&mut self, input: TileMemory) -> TileMemory {
        let TileMemory::Input(i) = input else { panic!("output over {input:?}, expected an input") };
        // The output has the input's window, so that a step writes the very block that it read, and no later step reads
        // it again.
        self.kernel.outputs.push(self.kernel.inputs[i].clone());
        let output = self.kernel.outputs.len() - 1;
        self.kernel.aliases.push((i, output));
        TileMemory::Output(output)
    }

    /// Declares `[rows, columns]` of scratch memory in VMEM.
    pub fn scratch(&mut self, element: DeviceDtype, rows: usize, columns: usize) -> TileMemory {
        self.kernel.scratch.push((element, [rows, columns]));
        TileMemory::Scratch(self.kernel.scratch.len() - 1)
    }

    /// Returns the finished kernel.
    pub fn finish(mut self) -> TileKernel {
        self.kernel.body = self.open.pop().expect("the kernel's own block");
        assert!(self.open.is_empty(), "a block is still open");
        self.kernel
    }

    /// Returns the type of `value`.
    pub fn type_of(&self, value: TileValue) -> TileType {
        self.kernel.types[value.0]
    }

    fn element(&self, value: TileValue) -> DeviceDtype {
        self.type_of(value).element
    }

    fn new_value(&mut self, ty: TileType) -> TileValue {
        self.kernel.types.push(ty);
        TileValue(self.kernel.types.len() - 1)
    }

    fn write(&mut self, statement: TileStatement) {
        self.open.last_mut().expect("a block is open").push(statement);
    }

    fn define(&mut self, ty: TileType, operation: TileOperation) -> TileValue {
        let value = self.new_value(ty);
        self.write(TileStatement::Let(value, operation));
        value
    }

    /// The number `x` in every place of `ty`.
    pub fn constant(&mut self, x: f64, ty: TileType) -> TileValue {
        // Only a float can hold a fraction; an integer constant with one would be a mistake of the caller.
        assert!(ty.element.is_float() || x.fract() == 0.0, "constant: {x} as {ty}");
        self.define(ty, TileOperation::Constant(x))
    }

    /// Returns the f32 scalar `x`.
    pub fn number(&mut self, x: f64) -> TileValue {
        self.constant(x, TileType::scalar(DeviceDtype::F32))
    }

    /// Returns the i32 scalar `x`.
    pub fn integer(&mut self, x: usize) -> TileValue {
        self.constant(x as f64, TileType::scalar(DeviceDtype::I32))
    }

    /// The index of this step along `axis` of the grid, a scalar i32.
    pub fn grid_index(&mut self, axis: usize) -> TileValue {
        assert!(axis < self.kernel.grid.len(), "grid axis {axis} of {:?}", self.kernel.grid);
        self.define(TileType::scalar(DeviceDtype::I32), TileOperation::GridIndex(axis))
    }

    /// The scalar at `index` of an array in SMEM.
    pub fn load_scalar(&mut self, memory: TileMemory, index: TileValue) -> TileValue {
        let TileMemory::Scalars(i) = memory else { panic!("scalar of {memory:?}, expected an array in SMEM") };
        assert_eq!(self.type_of(index), TileType::scalar(DeviceDtype::I32), "index of a scalar");
        self.define(TileType::scalar(self.kernel.scalars[i].0), TileOperation::LoadScalar(i, index))
    }

    /// The element type of memory other than scalars.
    pub fn memory_element(&self, memory: TileMemory) -> DeviceDtype {
        self.kernel.tile_of(memory).0
    }

    fn check_place(&self, memory: TileMemory, place: TileColumn, columns: usize) -> [usize; 2] {
        let (_, [rows, extent]) = self.kernel.tile_of(memory);
        match place {
            ColumnIndex::Static(start) => assert!(start + columns <= extent, "columns {start} + {columns} of {extent}"),
            ColumnIndex::Dynamic(start) => {
                assert_eq!(self.type_of(start), TileType::scalar(DeviceDtype::I32), "a dynamic column");
                // A load at a dynamic column takes whole registers, so that no row has to be shifted across two of them.
                assert_eq!(columns % self.kernel.machine.lanes, 0, "{columns} columns from a dynamic one");
                assert!(columns <= extent, "{columns} columns of {extent}");
            }
        }
        [rows, columns]
    }

    /// All rows of `columns` columns from `place`.
    pub fn load(&mut self, memory: TileMemory, place: TileColumn, columns: usize) -> TileValue {
        let tile = self.check_place(memory, place, columns);
        let (element, _) = self.kernel.tile_of(memory);
        self.define(TileType { element, tile: Some(tile) }, TileOperation::Load(memory, place))
    }

    /// Writes all rows of a tile from column `place`.
    pub fn store(&mut self, memory: TileMemory, place: TileColumn, value: TileValue) {
        let ty = self.type_of(value);
        let [_, columns] = ty.tile.expect("a tile is stored");
        let tile = self.check_place(memory, place, columns);
        let (element, _) = self.kernel.tile_of(memory);
        assert_eq!(ty, TileType { element, tile: Some(tile) }, "store to {memory:?}");
        self.write(TileStatement::Store { memory, place, value });
    }

    fn unary(&mut self, op: Unary, a: TileValue) -> TileValue {
        assert!(self.element(a).is_float(), "{op:?} of {}", self.type_of(a));
        self.define(self.type_of(a), TileOperation::Unary(op, a))
    }

    /// Returns `−a` of real numbers.
    pub fn neg(&mut self, a: TileValue) -> TileValue {
        self.unary(Unary::Neg, a)
    }

    /// Returns `e^a` of real numbers.
    pub fn exp(&mut self, a: TileValue) -> TileValue {
        self.unary(Unary::Exp, a)
    }

    /// Returns `2^a` of real numbers.
    pub fn exp2(&mut self, a: TileValue) -> TileValue {
        self.unary(Unary::Exp2, a)
    }

    /// Returns `ln a` of real numbers.
    pub fn log(&mut self, a: TileValue) -> TileValue {
        self.unary(Unary::Log, a)
    }

    /// `a` and `b`, the one with fewer places repeated.
    fn meet(&mut self, op: &str, a: TileValue, b: TileValue) -> (TileValue, TileValue) {
        let (left, right) = (self.type_of(a), self.type_of(b));
        if left.tile == right.tile {
            return (a, b);
        }
        // The operand with fewer elements is broadcast to the other's extents.
        let places = |ty: TileType| ty.tile.map_or(0, |[rows, columns]| rows * columns);
        let wide = if places(left) > places(right) { left.tile } else { right.tile };
        let [rows, columns] = wide.unwrap_or_else(|| panic!("{op}: {left} and {right}"));
        (self.broadcast(a, rows, columns), self.broadcast(b, rows, columns))
    }

    fn binary(&mut self, op: Binary, a: TileValue, b: TileValue) -> TileValue {
        let name = format!("{op:?}");
        let (a, b) = self.meet(&name, a, b);
        assert_eq!(self.type_of(a), self.type_of(b), "{name}: operands of different types");
        self.define(self.type_of(a), TileOperation::Binary(op, a, b))
    }

    /// Returns `a + b` of numbers.
    pub fn add(&mut self, a: TileValue, b: TileValue) -> TileValue {
        self.binary(Binary::Add, a, b)
    }

    /// Returns `a − b` of numbers.
    pub fn sub(&mut self, a: TileValue, b: TileValue) -> TileValue {
        self.binary(Binary::Sub, a, b)
    }

    /// Returns `a · b` of numbers.
    pub fn mul(&mut self, a: TileValue, b: TileValue) -> TileValue {
        self.binary(Binary::Mul, a, b)
    }

    /// Returns `a / b` of real numbers.
    pub fn div(&mut self, a: TileValue, b: TileValue) -> TileValue {
        assert!(self.element(a).is_float(), "division of {}", self.type_of(a));
        self.binary(Binary::Div, a, b)
    }

    /// The larger; NaN if either is.
    pub fn max(&mut self, a: TileValue, b: TileValue) -> TileValue {
        self.binary(Binary::Max, a, b)
    }

    /// The smaller; NaN if either is.
    pub fn min(&mut self, a: TileValue, b: TileValue) -> TileValue {
        self.binary(Binary::Min, a, b)
    }

    /// `a ∧ b`, of truth values or of the bits of integers.
    pub fn and(&mut self, a: TileValue, b: TileValue) -> TileValue {
        assert!(!self.element(a).is_float(), "and of {}", self.type_of(a));
        self.binary(Binary::And, a, b)
    }

    /// `a >> b` of integers, the sign kept.
    pub fn shift_right(&mut self, a: TileValue, b: TileValue) -> TileValue {
        assert!(!self.element(a).is_float(), "shift of {}", self.type_of(a));
        self.binary(Binary::ShiftRight, a, b)
    }

    /// The bits of `a` as f32 or i32.
    pub fn bitcast(&mut self, a: TileValue, element: DeviceDtype) -> TileValue {
        let from = self.type_of(a);
        assert!(from.element.size() == 4 && element.size() == 4, "bitcast: {from} to {element}");
        self.define(TileType { element, ..from }, TileOperation::Bitcast(a))
    }

    /// `a ∨ b`, of truth values.
    pub fn or(&mut self, a: TileValue, b: TileValue) -> TileValue {
        assert_eq!(self.element(a), DeviceDtype::Pred, "or of {}", self.type_of(a));
        self.binary(Binary::Or, a, b)
    }

    fn compare(&mut self, comparison: TileComparison, a: TileValue, b: TileValue) -> TileValue {
        let name = format!("{comparison:?}");
        let (a, b) = self.meet(&name, a, b);
        assert_eq!(self.type_of(a), self.type_of(b), "{name}: operands of different types");
        let ty = TileType { element: DeviceDtype::Pred, ..self.type_of(a) };
        self.define(ty, TileOperation::Compare(comparison, a, b))
    }

    /// `a = b`; false where either is NaN
    pub fn equal(&mut self, a: TileValue, b: TileValue) -> TileValue {
        self.compare(TileComparison::Equal, a, b)
    }

    /// `a < b`; false where either is NaN
    pub fn less(&mut self, a: TileValue, b: TileValue) -> TileValue {
        self.compare(TileComparison::Less, a, b)
    }

    /// `yes` where `condition` holds, else `no`.
    pub fn select(&mut self, condition: TileValue, yes: TileValue, no: TileValue) -> TileValue {
        assert_eq!(self.element(condition), DeviceDtype::Pred, "select: the condition");
        // Any two of the three may be scalars or columns: each pair is brought to the wider of its extents, so that all
        // three agree in the end.
        let (yes, no) = self.meet("select", yes, no);
        let (condition, yes) = self.meet("select", condition, yes);
        let (condition, no) = self.meet("select", condition, no);
        assert_eq!(self.type_of(yes), self.type_of(no), "select: operands of different types");
        self.define(self.type_of(yes), TileOperation::Select(condition, yes, no))
    }

    /// The row (`axis` 0) or column (`axis` 1) of each place, i32.
    pub fn iota(&mut self, axis: usize, rows: usize, columns: usize) -> TileValue {
        assert!(axis < 2, "iota along {axis}");
        self.define(TileType::tile(DeviceDtype::I32, rows, columns), TileOperation::Iota(axis))
    }

    /// `a` in another element type, rounded to nearest even.
    pub fn convert(&mut self, a: TileValue, element: DeviceDtype) -> TileValue {
        if self.element(a) == element {
            return a;
        }
        self.define(TileType { element, ..self.type_of(a) }, TileOperation::Convert(a))
    }

    /// A scalar, or a tile of one column, repeated.
    pub fn broadcast(&mut self, a: TileValue, rows: usize, columns: usize) -> TileValue {
        let from = self.type_of(a);
        if from.tile == Some([rows, columns]) {
            return a;
        }
        let fits = from.tile.is_none_or(|[r, c]| (r == rows || r == 1) && (c == columns || c == 1));
        assert!(fits, "broadcast: {from} to [{rows},{columns}]");
        self.define(TileType::tile(from.element, rows, columns), TileOperation::Broadcast(a))
    }

    /// `columns` columns of a tile, from `start`.
    pub fn columns(&mut self, a: TileValue, start: usize, columns: usize) -> TileValue {
        let from = self.type_of(a);
        let [rows, extent] = from.tile.expect("columns of a tile");
        assert!(start + columns <= extent, "columns {start} + {columns} of {from}");
        if columns == extent {
            return a;
        }
        self.define(TileType::tile(from.element, rows, columns), TileOperation::Columns(a, start))
    }

    /// A tile folded along its columns, `[rows, 1]`.
    pub fn fold_lanes(&mut self, fold: Fold, a: TileValue) -> TileValue {
        let from = self.type_of(a);
        let [rows, _] = from.tile.expect("a tile is folded");
        self.define(TileType::tile(from.element, rows, 1), TileOperation::FoldLanes(fold, a))
    }

    /// Runs `body` `trips` times. It is given the trip, a scalar i32, and what is carried, and returns what the next trip
    /// is given.
    pub fn for_loop(
        &mut self,
        trips: usize,
        initial: &[TileValue],
        body: impl FnOnce(&mut Self, TileValue, &[TileValue]) -> Vec<TileValue>,
    ) -> Vec<TileValue> {
        // A loop of no trips would define results that nothing computes.
        if trips == 0 {
            return initial.to_vec();
        }
        // Inside the body the carried values have names of their own, and so have the results after the last trip.
        let index = self.new_value(TileType::scalar(DeviceDtype::I32));
        let types: Vec<TileType> = initial.iter().map(|&value| self.type_of(value)).collect();
        let carried: Vec<TileValue> = types.iter().map(|&ty| self.new_value(ty)).collect();
        self.open.push(Vec::new());
        let next = body(self, index, &carried);
        let statements = self.open.pop().expect("opened above");
        // The types of what is carried are fixed: both lowerings name them once for all trips.
        let same = next.iter().map(|&value| self.type_of(value)).eq(types.iter().copied());
        assert!(same, "for: what is carried changes its type");
        let results: Vec<TileValue> = types.iter().map(|&ty| self.new_value(ty)).collect();
        let initial = initial.to_vec();
        self.write(TileStatement::For(TileLoop {
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
    pub fn when(&mut self, condition: TileValue, body: impl FnOnce(&mut Self)) {
        assert_eq!(self.type_of(condition), TileType::scalar(DeviceDtype::Pred), "when: the condition");
        self.open.push(Vec::new());
        body(self);
        let body = self.open.pop().expect("opened above");
        self.write(TileStatement::When { condition, body });
    }
}
