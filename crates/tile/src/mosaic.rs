//! A kernel as Mosaic text, which libtpu compiles.
//!
//! The text is MLIR in generic form. Every operation but the module is renamed `stable_mosaic.<dialect>.<op>` and the
//! module carries `stable_mosaic.version`: without both libtpu refuses it. The function takes the indices of the grid,
//! the arrays in SMEM, the windows of inputs and outputs, and the scratch, in this order; its attributes say how far the
//! grid goes and, through one function a window, which block each step sees.

use std::fmt::{self, Write as _};
use std::iter;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::json;

use super::ir::{
    Binary, ColumnIndex, Fold, TileComparison, TileKernel, TileMemory, TileOperation, TileType, Unary, WindowedArray,
};
use super::lower::{KernelLowering, LoopBody, LoweredOperand, lower};
use assay_core::device_dtype::DeviceDtype;

/// The version of the dialects that the text is written in.
pub const VERSION: usize = 11;

/// libtpu's number for HBM in the fields that say where an array must be.
const HBM: usize = 0;

/// The `backend_config` of a `tpu_custom_call` of `kernel`, JSON, with all VMEM of its machine to use.
pub fn payload(kernel: &TileKernel) -> String {
    // The body is the text in base64. The cost estimate is for XLA, which does not look into the kernel.
    let mut config = json!({
        "body": STANDARD.encode(text(kernel)),
        "serialization_format": 1,
        "needs_layout_passes": true,
        "cost_estimate": {
            "flops": kernel.flops(),
            "transcendentals": kernel.transcendentals(),
            "bytes_accessed": kernel.hbm_bytes(),
        },
    });
    // A small array may be in VMEM as a whole, and the window of an input is then a part of it, not a copy: what the
    // kernel stores in a block that reaches beyond the array's end would be stored in whatever is next to it. From HBM
    // every window is a copy.
    let operand = |input: usize| input + kernel.scalars.len();
    let written = kernel.written_inputs();
    if !written.is_empty() {
        let inputs = written.iter().map(|&input| json!({"operand_index": operand(input), "color": HBM}));
        let over = kernel.aliases.iter().filter(|(input, _)| written.contains(input));
        // XLA names a result by its index in a tuple, and a single result is no tuple.
        let outputs = over.map(|&(_, output)| match kernel.outputs.len() {
            1 => json!({"color": HBM}),
            _ => json!({"color": HBM, "shape_index": [output]}),
        });
        config["input_memory_space_colors"] = inputs.collect();
        config["output_memory_space_colors"] = outputs.collect();
    }
    json!({
        "custom_call_config": config,
        "scoped_memory_configs": [{"memory_space": 1, "offset": 0, "size": kernel.machine.vmem_bytes}],
    })
    .to_string()
}

/// Returns the MLIR text of the module.
pub fn text(kernel: &TileKernel) -> String {
    // The body comes first: its lines number the values as they are defined.
    let mut writer = MosaicWriter { kernel, body: String::new(), names: 0, depth: 2 };
    let arguments = writer.arguments();
    lower(kernel, &mut writer);
    writer.line(format_args!("\"stable_mosaic.func.return\"() : () -> ()"));
    let MosaicWriter { body, .. } = writer;

    let list = |items: &mut dyn Iterator<Item = String>| items.collect::<Vec<_>>().join(", ");
    let typed = list(&mut arguments.iter().map(|(name, ty)| format!("{name}: {ty}")));
    let types = list(&mut arguments.iter().map(|(_, ty)| ty.clone()));
    let windows = || kernel.inputs.iter().chain(&kernel.outputs).enumerate();
    // The attributes describe each window's block, and name the function that chooses the block of a step.
    let window = |(i, array): (usize, &WindowedArray)| {
        let bounds = list(&mut array.window.block.iter().map(usize::to_string));
        format!("{{transform_indices = @transform_{i}, window_bounds = array<i64: {bounds}>}}")
    };
    let window_params = list(&mut windows().map(window));
    // Parallel axes may be distributed over cores; the others run in order.
    let semantics = |axis| if kernel.parallel.contains(&axis) { "parallel" } else { "arbitrary" };
    let semantics = (0..kernel.grid.len()).map(|axis| format!("#tpu.dimension_semantics<{}>", semantics(axis)));
    let semantics = list(&mut semantics.into_iter());
    let bounds = list(&mut kernel.grid.iter().map(usize::to_string));
    let (scalars, scratch, name) = (kernel.scalars.len(), kernel.scratch.len(), &kernel.name);
    // What an index map is given: the grid and the scalars.
    let given = &arguments[..kernel.grid.len() + kernel.scalars.len()];
    let transforms = windows().map(|(i, array)| transform(i, array, given)).collect::<String>();
    format!(
        r#""builtin.module"() ({{
  "stable_mosaic.func.func"() ({{
  ^bb0({typed}):
{body}  }}) {{dimension_semantics = [{semantics}], function_type = ({types}) -> (), iteration_bounds = array<i64: {bounds}>, scalar_prefetch = {scalars} : i64, scratch_operands = {scratch} : i64, sym_name = "{name}", tpu.core_type = #tpu.core_type<tc>, window_params = [{window_params}]}} : () -> ()
{transforms}}}) {{stable_mosaic.version = {VERSION} : i64}} : () -> ()
"#
    )
}

/// The function that gives the block of window `i` at a step.
fn transform(i: usize, array: &WindowedArray, given: &[(String, String)]) -> String {
    let typed = given.iter().map(|(name, ty)| format!("{name}: {ty}")).collect::<Vec<_>>().join(", ");
    let types = given.iter().map(|(_, ty)| ty.as_str()).collect::<Vec<_>>().join(", ");
    // A dimension that no axis of the grid moves along stays at block 0.
    let along = &array.window.along;
    let names = along.iter().map(|axis| axis.map_or("%zero".to_string(), |axis| given[axis].0.clone()));
    let names = names.collect::<Vec<_>>().join(", ");
    let results = vec!["i32"; along.len()].join(", ");
    format!(
        r#"  "stable_mosaic.func.func"() ({{
  ^bb0({typed}):
    %zero = "stable_mosaic.arith.constant"() {{value = 0 : i32}} : () -> i32
    "stable_mosaic.func.return"({names}) : ({results}) -> ()
  }}) {{function_type = ({types}) -> ({results}), sym_name = "transform_{i}"}} : () -> ()
"#
    )
}

/// Returns Mosaic's name of an element type.
fn element_name(element: DeviceDtype) -> &'static str {
    if element == DeviceDtype::Pred { "i1" } else { element.mlir() }
}

struct MosaicTypeName(TileType);

impl fmt::Display for MosaicTypeName {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let element = element_name(self.0.element);
        match self.0.tile {
            Some([rows, columns]) => write!(f, "vector<{rows}x{columns}x{element}>"),
            None => f.write_str(element),
        }
    }
}

fn extents(shape: &[usize]) -> String {
    let list: Vec<String> = shape.iter().map(usize::to_string).collect();
    list.join("x") + "x"
}

/// A memory reference's type, and its extents.
fn memref(element: DeviceDtype, shape: &[usize], space: &str) -> String {
    format!("memref<{}{}, #tpu.memory_space<{space}>>", extents(shape), element_name(element))
}

/// `%n` of the function's body, or an argument of it.
#[derive(Clone, Copy)]
pub(super) enum MosaicName {
    Value(usize),
    /// A result of a definition with several.
    Result(usize, usize),
    Grid(usize),
}

impl fmt::Display for MosaicName {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            MosaicName::Value(n) => write!(f, "%{n}"),
            MosaicName::Result(n, result) => write!(f, "%{n}#{result}"),
            MosaicName::Grid(axis) => write!(f, "%grid{axis}"),
        }
    }
}

/// A list that goes on another.
fn after_comma(items: impl Iterator<Item = String>) -> String {
    iter::once(String::new()).chain(items).collect::<Vec<_>>().join(", ")
}

struct MosaicWriter<'k> {
    kernel: &'k TileKernel,
    body: String,
    names: usize,
    depth: usize,
}

/// Returns the spelling of a constant inside `dense<…>` or before a colon.
fn literal(x: f64, element: DeviceDtype) -> String {
    let special = |nan: &str, plus: &str, minus: &str| match x {
        f64::INFINITY => plus.to_string(),
        f64::NEG_INFINITY => minus.to_string(),
        _ => nan.to_string(),
    };
    match element {
        DeviceDtype::Pred => (if x == 0.0 { "false" } else { "true" }).to_string(),
        DeviceDtype::Bf16 if !x.is_finite() => special("0x7FC0", "0x7F80", "0xFF80"),
        DeviceDtype::F16 if !x.is_finite() => special("0x7E00", "0x7C00", "0xFC00"),
        element if element.is_float() && !x.is_finite() => special("0x7FC00000", "0x7F800000", "0xFF800000"),
        // Every digit, a point, and an exponent that MLIR reads.
        element if element.is_float() => format!("{x:.17e}"),
        _ => format!("{x:.0}"),
    }
}

const NO_FAST_MATH: &str = "fastmath = #arith.fastmath<none>";
const NO_OVERFLOW: &str = "overflowFlags = #arith.overflow<none>";

impl MosaicWriter<'_> {
    /// Name and type of each argument of the function.
    fn arguments(&self) -> Vec<(String, String)> {
        let kernel = self.kernel;
        let numbered = |name: &str, i: usize| format!("%{name}{i}");
        let grid = (0..kernel.grid.len()).map(|axis| (MosaicName::Grid(axis).to_string(), "i32".to_string()));
        let scalars = kernel.scalars.iter().enumerate();
        let scalars =
            scalars.map(|(i, &(element, length))| (numbered("scalars", i), memref(element, &[length], "smem")));
        let windows = |name: &'static str, arrays: &[WindowedArray]| {
            let one = |(i, array): (usize, &WindowedArray)| {
                (numbered(name, i), memref(array.element, &array.window.block, "vmem"))
            };
            arrays.iter().enumerate().map(one).collect::<Vec<_>>()
        };
        let scratch = kernel.scratch.iter().enumerate();
        let scratch = scratch.map(|(i, (element, tile))| (numbered("scratch", i), memref(*element, tile, "vmem")));
        let (inputs, outputs) = (windows("in", &kernel.inputs), windows("out", &kernel.outputs));
        grid.chain(scalars).chain(inputs).chain(outputs).chain(scratch).collect()
    }

    fn line(&mut self, text: fmt::Arguments) {
        let _ = writeln!(self.body, "{:indent$}{text}", "", indent = 2 * self.depth);
    }

    fn name(&mut self) -> MosaicName {
        self.names += 1;
        MosaicName::Value(self.names - 1)
    }

    /// Writes `%n = "stable_mosaic.<op>"(operands) {attributes} : (types) -> result`.
    fn define(&mut self, op: &str, operands: &[(MosaicName, &str)], attributes: &str, result: &str) -> MosaicName {
        let name = self.name();
        let names = operands.iter().map(|(name, _)| name.to_string()).collect::<Vec<_>>().join(", ");
        let types = operands.iter().map(|(_, ty)| *ty).collect::<Vec<_>>().join(", ");
        let braces = if attributes.is_empty() { String::new() } else { format!(" {{{attributes}}}") };
        self.line(format_args!("{name} = \"stable_mosaic.{op}\"({names}){braces} : ({types}) -> {result}"));
        name
    }

    fn constant(&mut self, x: f64, ty: TileType) -> MosaicName {
        let (text, spelled) = (literal(x, ty.element), MosaicTypeName(ty).to_string());
        let attribute = match (ty.tile, ty.element) {
            (Some(_), _) => format!("value = dense<{text}> : {spelled}"),
            (None, DeviceDtype::Pred) => format!("value = {text}"),
            (None, _) => format!("value = {text} : {spelled}"),
        };
        self.define("arith.constant", &[], &attribute, &spelled)
    }

    fn index(&mut self, x: usize) -> MosaicName {
        self.define("arith.constant", &[], &format!("value = {x} : index"), "index")
    }

    fn cast_to_index(&mut self, x: MosaicName) -> MosaicName {
        self.define("arith.index_cast", &[(x, "i32")], "", "index")
    }

    /// The name, type and extents of memory.
    fn memory(&self, memory: TileMemory) -> (String, String, Vec<usize>) {
        let kernel = self.kernel;
        let (name, element, shape) = match memory {
            TileMemory::Scalars(i) => unreachable!("scalars {i} are loaded one by one"),
            TileMemory::Input(i) => {
                (format!("%in{i}"), kernel.inputs[i].element, kernel.inputs[i].window.block.clone())
            }
            TileMemory::Output(i) => {
                (format!("%out{i}"), kernel.outputs[i].element, kernel.outputs[i].window.block.clone())
            }
            TileMemory::Scratch(i) => (format!("%scratch{i}"), kernel.scratch[i].0, kernel.scratch[i].1.to_vec()),
        };
        (name, memref(element, &shape, "vmem"), shape)
    }

    /// The indices of column `place` in memory of `rank`.
    fn indices(&mut self, rank: usize, place: ColumnIndex<MosaicName>) -> Vec<MosaicName> {
        // Memory has leading dimensions of one, of which a step sees index 0; all loads begin at row 0.
        let zero = self.index(0);
        let column = match place {
            ColumnIndex::Static(0) => zero,
            ColumnIndex::Static(column) => self.index(column),
            ColumnIndex::Dynamic(column) => {
                // The promise that the column is a multiple of the lanes spares a shuffle of registers.
                let attributes = format!("multiple = {} : i32", self.kernel.machine.lanes);
                let multiple = self.define("tpu.assume_multiple", &[(column, "i32")], &attributes, "i32");
                self.cast_to_index(multiple)
            }
        };
        let mut indices = vec![zero; rank - 1];
        indices.push(column);
        indices
    }

    /// A tile as memory of `rank` holds it: with leading extents of one.
    fn wide(ty: TileType, rank: usize) -> String {
        let [rows, columns] = ty.tile.expect("memory holds tiles");
        let mut shape = vec![1; rank - 2];
        shape.extend([rows, columns]);
        format!("vector<{}{}>", extents(&shape), element_name(ty.element))
    }

    fn load(&mut self, memory: TileMemory, place: ColumnIndex<MosaicName>, ty: TileType) -> MosaicName {
        let (memory, memref, shape) = self.memory(memory);
        let indices = self.indices(shape.len(), place);
        let names = indices.iter().map(MosaicName::to_string).collect::<Vec<_>>().join(", ");
        let types = vec!["index"; indices.len()].join(", ");
        let (loaded, wide) = (self.name(), Self::wide(ty, shape.len()));
        self.line(format_args!(
            "{loaded} = \"stable_mosaic.vector.load\"({memory}, {names}) : ({memref}, {types}) -> {wide}"
        ));
        // A window of more than two dimensions is loaded with its leading ones, which a cast then drops: the body
        // computes on matrices alone.
        if shape.len() == 2 {
            return loaded;
        }
        self.define("vector.shape_cast", &[(loaded, &wide)], "", &MosaicTypeName(ty).to_string())
    }

    fn binary(&mut self, op: Binary, ty: TileType, a: MosaicName, b: MosaicName) -> MosaicName {
        // Floats and integers have operations of different names. Fast math is off: it permits a compiler to
        // reassociate sums and to assume that no value is NaN.
        let float = ty.element.is_float();
        let (op, attributes) = match op {
            Binary::Add if float => ("arith.addf", NO_FAST_MATH),
            Binary::Sub if float => ("arith.subf", NO_FAST_MATH),
            Binary::Mul if float => ("arith.mulf", NO_FAST_MATH),
            Binary::Div => ("arith.divf", NO_FAST_MATH),
            Binary::Max if float => ("arith.maximumf", NO_FAST_MATH),
            Binary::Min if float => ("arith.minimumf", NO_FAST_MATH),
            Binary::Add => ("arith.addi", NO_OVERFLOW),
            Binary::Sub => ("arith.subi", NO_OVERFLOW),
            Binary::Mul => ("arith.muli", NO_OVERFLOW),
            Binary::Max => ("arith.maxsi", ""),
            Binary::Min => ("arith.minsi", ""),
            Binary::And => ("arith.andi", ""),
            Binary::Or => ("arith.ori", ""),
            Binary::ShiftRight => ("arith.shrsi", ""),
        };
        let spelled = MosaicTypeName(ty).to_string();
        self.define(op, &[(a, &spelled), (b, &spelled)], attributes, &spelled)
    }

    fn convert(&mut self, from: TileType, to: TileType, a: MosaicName) -> MosaicName {
        let (given, wanted) = (MosaicTypeName(from).to_string(), MosaicTypeName(to).to_string());
        let op = match (from.element, to.element) {
            // Mosaic converts truth values only to integers, so floats take two steps.
            (DeviceDtype::Pred, element) if element.is_float() => {
                let integer = TileType { element: DeviceDtype::I32, ..to };
                let wide = self.convert(from, integer, a);
                return self.convert(integer, to, wide);
            }
            (DeviceDtype::Pred, _) => "arith.extui",
            (from, to) if from.is_float() && to.is_float() => {
                if from.size() < to.size() {
                    "arith.extf"
                } else {
                    "arith.truncf"
                }
            }
            (from, _) if from.is_float() => "arith.fptosi",
            (from, to) if !to.is_float() => {
                if from.size() < to.size() {
                    "arith.extsi"
                } else {
                    "arith.trunci"
                }
            }
            _ => "arith.sitofp",
        };
        let attributes = if op == "arith.trunci" { NO_OVERFLOW } else { "" };
        self.define(op, &[(a, &given)], attributes, &wanted)
    }

    fn fold_lanes(&mut self, fold: Fold, from: TileType, to: TileType, a: MosaicName) -> MosaicName {
        let [rows, _] = from.tile.expect("a tile is folded");
        let (kind, start) = match fold {
            Fold::Add => ("add", 0.0),
            Fold::Max => ("maximumf", f64::NEG_INFINITY),
        };
        let element = element_name(from.element);
        // Mosaic's reduction drops the dimension; a shape cast puts a dimension of one back.
        let folded = format!("vector<{rows}x{element}>");
        let value = format!("value = dense<{}> : {folded}", literal(start, from.element));
        let start = self.define("arith.constant", &[], &value, &folded);
        let attributes = format!("kind = #vector.kind<{kind}>, reduction_dims = array<i64: 1>");
        let spelled = MosaicTypeName(from).to_string();
        let column = self.define("vector.multi_reduction", &[(a, &spelled), (start, &folded)], &attributes, &folded);
        self.define("vector.shape_cast", &[(column, &folded)], "", &MosaicTypeName(to).to_string())
    }
}

impl KernelLowering for MosaicWriter<'_> {
    type Value = MosaicName;

    fn operation(
        &mut self,
        ty: TileType,
        operation: &TileOperation,
        operands: &[LoweredOperand<MosaicName>],
    ) -> MosaicName {
        let spelled = MosaicTypeName(ty).to_string();
        let types: Vec<String> = operands.iter().map(|operand| MosaicTypeName(operand.ty).to_string()).collect();
        let named: Vec<(MosaicName, &str)> =
            operands.iter().zip(&types).map(|(operand, ty)| (operand.value, ty.as_str())).collect();
        match operation {
            TileOperation::Constant(x) => self.constant(*x, ty),
            TileOperation::GridIndex(axis) => MosaicName::Grid(*axis),
            TileOperation::LoadScalar(i, _) => {
                let index = self.cast_to_index(operands[0].value);
                let (element, length) = self.kernel.scalars[*i];
                // Scalars are read one at a time, at an index that Mosaic wants as `index` and not as i32.
                let memref = memref(element, &[length], "smem");
                let name = self.name();
                self.line(format_args!(
                    "{name} = \"stable_mosaic.memref.load\"(%scalars{i}, {index}) : ({memref}, index) -> {spelled}"
                ));
                name
            }
            TileOperation::Load(memory, place) => {
                let place = match place {
                    ColumnIndex::Static(column) => ColumnIndex::Static(*column),
                    ColumnIndex::Dynamic(_) => ColumnIndex::Dynamic(operands[0].value),
                };
                self.load(*memory, place, ty)
            }
            TileOperation::Unary(op, _) => {
                let op = match op {
                    Unary::Neg => "arith.negf",
                    Unary::Exp => "math.exp",
                    Unary::Exp2 => "math.exp2",
                    Unary::Log => "math.log",
                };
                self.define(op, &named, NO_FAST_MATH, &spelled)
            }
            TileOperation::Binary(op, ..) => self.binary(*op, ty, operands[0].value, operands[1].value),
            TileOperation::Compare(comparison, ..) => {
                let float = operands[0].ty.element.is_float();
                // The predicates are MLIR's numbers. Those of floats are ordered: a NaN equals nothing and is less than
                // nothing.
                let (op, attributes) = match (comparison, float) {
                    (TileComparison::Equal, true) => ("arith.cmpf", format!("{NO_FAST_MATH}, predicate = 1 : i64")),
                    (TileComparison::Less, true) => ("arith.cmpf", format!("{NO_FAST_MATH}, predicate = 4 : i64")),
                    (TileComparison::Equal, false) => ("arith.cmpi", "predicate = 0 : i64".to_string()),
                    (TileComparison::Less, false) => ("arith.cmpi", "predicate = 2 : i64".to_string()),
                };
                self.define(op, &named, &attributes, &spelled)
            }
            TileOperation::Select(..) => self.define("arith.select", &named, "", &spelled),
            TileOperation::Iota(axis) => {
                self.define("tpu.iota", &[], &format!("dimensions = array<i32: {axis}>"), &spelled)
            }
            TileOperation::Convert(_) => self.convert(operands[0].ty, ty, operands[0].value),
            TileOperation::Bitcast(_) => self.define("arith.bitcast", &named, "", &spelled),
            TileOperation::Broadcast(_) => self.define("vector.broadcast", &named, "", &spelled),
            TileOperation::Columns(_, start) => {
                let [rows, columns] = ty.tile.expect("columns of a tile");
                let attributes = format!("offsets = [0, {start}], sizes = [{rows}, {columns}], strides = [1, 1]");
                self.define("vector.extract_strided_slice", &named, &attributes, &spelled)
            }
            TileOperation::FoldLanes(fold, _) => self.fold_lanes(*fold, operands[0].ty, ty, operands[0].value),
        }
    }

    fn store(&mut self, memory: TileMemory, place: ColumnIndex<MosaicName>, value: LoweredOperand<MosaicName>) {
        let (memory, memref, shape) = self.memory(memory);
        let rank = shape.len();
        let (stored, wide) = (MosaicTypeName(value.ty).to_string(), Self::wide(value.ty, rank));
        let tile = if rank == 2 {
            value.value
        } else {
            self.define("vector.shape_cast", &[(value.value, &stored)], "", &wide)
        };
        let indices = self.indices(rank, place);
        let names = indices.iter().map(MosaicName::to_string).collect::<Vec<_>>().join(", ");
        let types = vec!["index"; rank].join(", ");
        self.line(format_args!(
            "\"stable_mosaic.tpu.vector_store\"({tile}, {memory}, {names}) {{add = false, operandSegmentSizes = array<i32: 1, 1, {rank}, 0>, strides = array<i32>}} : ({wide}, {memref}, {types}) -> ()"
        ));
    }

    fn for_loop(
        &mut self,
        trips: usize,
        initial: &[LoweredOperand<MosaicName>],
        _: &[TileMemory],
        body: LoopBody<'_, Self>,
    ) -> Vec<MosaicName> {
        let i32 = TileType::scalar(DeviceDtype::I32);
        let (from, to, step) = (self.constant(0.0, i32), self.constant(trips as f64, i32), self.constant(1.0, i32));
        let starts = after_comma(initial.iter().map(|operand| operand.value.to_string()));
        let types: Vec<String> = initial.iter().map(|operand| MosaicTypeName(operand.ty).to_string()).collect();
        // The loop's results, its index and the carried values inside it take the next names, in this order.
        let results = self.names;
        self.names += 1;
        let index = self.name();
        let carried: Vec<MosaicName> = initial.iter().map(|_| self.name()).collect();
        let inside = after_comma(carried.iter().zip(&types).map(|(name, ty)| format!("{name}: {ty}")));
        let defined = if initial.is_empty() { String::new() } else { format!("%{results}:{} = ", initial.len()) };
        self.line(format_args!("{defined}\"stable_mosaic.scf.for\"({from}, {to}, {step}{starts}) ({{"));
        self.line(format_args!("^bb0({index}: i32{inside}):"));
        self.depth += 1;
        let next = body(self, index, &carried);
        let names = next.iter().map(|operand| operand.value.to_string()).collect::<Vec<_>>().join(", ");
        let list = types.join(", ");
        self.line(format_args!("\"stable_mosaic.scf.yield\"({names}) : ({list}) -> ()"));
        self.depth -= 1;
        let taken = after_comma(types.iter().cloned());
        self.line(format_args!("}}) : (i32, i32, i32{taken}) -> ({list})"));
        (0..initial.len()).map(|result| MosaicName::Result(results, result)).collect()
    }

    fn when(&mut self, condition: MosaicName, _: &[TileMemory], body: &mut dyn FnMut(&mut Self)) {
        self.line(format_args!("\"stable_mosaic.scf.if\"({condition}) ({{"));
        self.depth += 1;
        body(self);
        self.line(format_args!("\"stable_mosaic.scf.yield\"() : () -> ()"));
        self.depth -= 1;
        self.line(format_args!("}}, {{"));
        self.line(format_args!("}}) : (i1) -> ()"));
    }
}
