//! Translates the tree of operations into a program that can be run: every name is resolved, every type, count and
//! attribute checked. The errors that remain in a run depend on values: places out of range, divisions by zero, broken
//! assumptions.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use super::elementwise::{
    Conversion, Elementwise, compare_float, compare_int, conversion, elementwise, maximum, minimum,
};
use super::operation::{Checked, PREFIX};
use super::parse::{MosaicAttribute, MosaicOperation, MosaicRegion, ValueUse};
use super::value::{ArrayType, ElementBuffer, ElementKind, MOST_ELEMENTS, MemorySpace, MosaicType};

/// Versions of the module's form that libtpu 0.0.51 reads.
const VERSIONS: std::ops::RangeInclusive<i64> = 1..=15;
/// Largest number of steps of a grid that is run.
const MOST_STEPS: usize = 1 << 20;

/// A module's kernel, with the transforms that move its windows.
#[derive(Debug)]
pub(super) struct MosaicProgram {
    /// Extents of the grid; the last dimension is the fastest.
    pub(super) grid: Vec<usize>,
    /// Whether the cores of a device may share the steps of each dimension of the grid.
    pub(super) parallel: Vec<bool>,
    /// Types of the arrays that are whole in SMEM.
    pub(super) prefetch: Vec<ArrayType>,
    /// Windows of the inputs, then of the outputs.
    pub(super) windows: Vec<MosaicWindow>,
    pub(super) scratch: Vec<ArrayType>,
    pub(super) kernel: MosaicFunction,
}

#[derive(Debug)]
pub(super) struct MosaicWindow {
    pub(super) ty: ArrayType,
    /// Function from a step's grid indices and the arrays in SMEM to a block's indices.
    pub(super) transform: MosaicFunction,
}

/// Number of an SSA value within its function.
pub(super) type ValueSlot = usize;

#[derive(Debug)]
pub(super) struct MosaicFunction {
    /// Type of each slot of the function.
    pub(super) types: Vec<MosaicType>,
    pub(super) body: FunctionBody,
}

#[derive(Debug)]
pub(super) struct FunctionBody {
    pub(super) parameters: Vec<ValueSlot>,
    pub(super) instructions: Vec<MosaicInstruction>,
    /// Slots of the values that the body returns or yields.
    pub(super) results: Vec<ValueSlot>,
}

#[derive(Debug)]
pub(super) struct MosaicInstruction {
    pub(super) line: usize,
    /// Name of the operation, without the dialects' prefix.
    pub(super) name: String,
    pub(super) operands: Vec<ValueSlot>,
    pub(super) results: Vec<ValueSlot>,
    pub(super) action: MosaicAction,
}

pub(super) enum MosaicAction {
    Constant(Rc<ElementBuffer>),
    Elementwise(Elementwise),
    CompareInt(fn(i32, i32) -> bool),
    CompareFloat(fn(f32, f32) -> bool),
    Select,
    Convert(Conversion),
    Broadcast,
    /// Gives the same elements other extents.
    Reshape,
    Slice {
        start: Vec<usize>,
    },
    Reduce {
        fold: ReductionFold,
        dimensions: Vec<usize>,
    },
    Iota {
        dimension: usize,
    },
    Load,
    LoadScalar,
    Store,
    AssumeMultiple(i32),
    For(FunctionBody),
    If {
        yes: FunctionBody,
        no: FunctionBody,
    },
}

impl std::fmt::Debug for MosaicAction {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str("Action")
    }
}

/// The function by which a reduction combines two elements.
#[derive(Clone, Copy)]
pub(super) enum ReductionFold {
    Float(fn(f32, f32) -> f32),
    Int(fn(i32, i32) -> i32),
}

/// Checks `module` and translates it.
pub(super) fn check(module: &MosaicOperation) -> Checked<MosaicProgram> {
    // The module itself: its form and version, and nothing that would change its meaning.
    module.expect_name("builtin.module")?;
    module.expect_counts(0, 0, 1)?;
    module.expect_attributes(&["stable_mosaic.version", "sym_name"])?;
    let version = module.whole("stable_mosaic.version")?;
    if !VERSIONS.contains(&version) {
        return Err(module.error(format!("stable_mosaic.version is {version}, expected one of {VERSIONS:?}")));
    }
    // Its functions by name. They are translated when the kernel or a window refers to them.
    let mut functions = BTreeMap::new();
    for operation in &module.regions[0].operations {
        operation.expect_name("stable_mosaic.func.func")?;
        operation.expect_counts(0, 0, 1)?;
        let MosaicAttribute::Text(name) = operation.attribute("sym_name")? else {
            return Err(operation.error("sym_name must be a string".to_string()));
        };
        if functions.insert(name.as_str(), operation).is_some() {
            return Err(operation.error(format!("a second function with the name {name}")));
        }
    }
    // The kernel is the only function with a grid.
    let kernels: Vec<_> = functions.values().filter(|f| f.attributes.contains_key("iteration_bounds")).collect();
    match kernels[..] {
        [kernel] => program(kernel, &functions),
        _ => Err(module.error(format!("{} functions with iteration_bounds, expected one", kernels.len()))),
    }
}

fn program(kernel: &MosaicOperation, functions: &BTreeMap<&str, &MosaicOperation>) -> Checked<MosaicProgram> {
    kernel.expect_attributes(&[
        "dimension_semantics",
        "function_type",
        "iteration_bounds",
        "scalar_prefetch",
        "scratch_operands",
        "sym_name",
        "tpu.core_type",
        "window_params",
    ])?;
    // The grid. It is bounded, because every step costs time.
    let grid = kernel.extents(kernel.attribute("iteration_bounds")?, "iteration_bounds")?;
    let steps = grid.iter().try_fold(1usize, |steps, &extent| steps.checked_mul(extent));
    if steps.is_none_or(|steps| steps > MOST_STEPS) {
        return Err(kernel.error(format!("a grid of {grid:?}; the longest that is run has {MOST_STEPS} steps")));
    }
    let MosaicAttribute::List(window_params) = kernel.attribute("window_params")? else {
        return Err(kernel.error("window_params must be a list of dictionaries".to_string()));
    };
    // The parameters are, in this order: grid indices, prefetched arrays, windows, scratch buffers.
    let prefetch = kernel.count("scalar_prefetch")?;
    let scratch = kernel.count("scratch_operands")?;
    let types: Vec<MosaicType> = kernel.regions[0].parameters.iter().map(|(_, ty)| ty.clone()).collect();
    let lengths = [grid.len(), prefetch, window_params.len(), scratch];
    let expected = lengths.iter().try_fold(0usize, |sum, &length| sum.checked_add(length));
    if expected != Some(types.len()) {
        let [indices, prefetch, windows, scratch] = lengths;
        return Err(kernel.error(format!(
            "{} parameters, expected {indices} grid indices, {prefetch} prefetched arrays, {windows} windows and \
             {scratch} scratch buffers",
            types.len()
        )));
    }
    let (indices, memory) = types.split_at(grid.len());
    if let Some(index) = indices.iter().find(|&ty| *ty != MosaicType::scalar(ElementKind::I32)) {
        return Err(kernel.error(format!("a grid index has type {index}, expected i32")));
    }
    let (prefetched, memory) = memory.split_at(prefetch);
    let (windows, scratch) = memory.split_at(window_params.len());
    // Transforms of windows take the grid indices and the prefetched arrays.
    let leading = &types[..grid.len() + prefetch];
    let mut elements = 0;
    let windows = windows.iter().zip(window_params);
    let windows = windows.map(|(ty, params)| window(kernel, ty, params, leading, functions, &mut elements));
    Ok(MosaicProgram {
        prefetch: prefetched.iter().map(|ty| kernel.memory(ty, Some(MemorySpace::Smem))).collect::<Result<_, _>>()?,
        windows: windows.collect::<Result<_, _>>()?,
        scratch: scratch.iter().map(|ty| kernel.memory(ty, None)).collect::<Result<_, _>>()?,
        kernel: function(kernel, &[], &mut elements)?,
        parallel: parallel(kernel, grid.len())?,
        grid,
    })
}

/// Reads which dimensions of the grid are parallel; none if the attribute is missing.
fn parallel(kernel: &MosaicOperation, dimensions: usize) -> Checked<Vec<bool>> {
    let semantics = match kernel.attributes.get("dimension_semantics") {
        None => return Ok(vec![false; dimensions]),
        Some(MosaicAttribute::List(semantics)) => semantics,
        Some(_) => return Err(kernel.error("dimension_semantics must be a list".to_string())),
    };
    if semantics.len() != dimensions {
        let given = semantics.len();
        return Err(
            kernel.error(format!("{given} dimension_semantics, expected one for each of {dimensions} dimensions"))
        );
    }
    let is_parallel = |semantics: &MosaicAttribute| match semantics {
        MosaicAttribute::Opaque(text) if text == "#tpu.dimension_semantics<parallel>" => Ok(true),
        MosaicAttribute::Opaque(text) if text == "#tpu.dimension_semantics<arbitrary>" => Ok(false),
        other => Err(kernel.error(format!("dimension_semantics {other:?}, expected parallel or arbitrary"))),
    };
    semantics.iter().map(is_parallel).collect()
}

fn window(
    kernel: &MosaicOperation,
    ty: &MosaicType,
    params: &MosaicAttribute,
    leading: &[MosaicType],
    functions: &BTreeMap<&str, &MosaicOperation>,
    elements: &mut usize,
) -> Checked<MosaicWindow> {
    let MosaicAttribute::Dictionary(params) = params else {
        return Err(kernel.error("window_params must be a list of dictionaries".to_string()));
    };
    if let Some(key) = params.keys().find(|key| !["transform_indices", "window_bounds"].contains(&key.as_str())) {
        return Err(kernel.error(format!("{key} in window_params is not supported")));
    }
    let given = |key: &str| params.get(key).ok_or_else(|| kernel.error(format!("a window without {key}")));
    // The window is a memref of the block's extents.
    let bounds = kernel.extents(given("window_bounds")?, "window_bounds")?;
    let ty = kernel.memory(ty, None)?;
    if ty.shape != bounds || ty.kind.element().is_none() {
        let problem =
            format!("a parameter of {ty} for a window of {bounds:?}, expected these extents of f32, bf16, f16 or i32");
        return Err(kernel.error(problem));
    }
    // The transform is a function of the module.
    let transform = match given("transform_indices")? {
        MosaicAttribute::Symbol(name) => functions.get(name.as_str()),
        _ => None,
    };
    let transform = transform.ok_or_else(|| kernel.error("transform_indices must name a function".to_string()))?;
    transform.expect_attributes(&["function_type", "sym_name"])?;
    if !transform.regions[0].parameters.iter().map(|(_, ty)| ty).eq(leading) {
        return Err(
            transform.error("its parameters must be the kernel's grid indices and prefetched arrays".to_string())
        );
    }
    Ok(MosaicWindow {
        transform: function(transform, &vec![MosaicType::scalar(ElementKind::I32); bounds.len()], elements)?,
        ty,
    })
}

/// Checks a function, and that its values, added to the `elements` of the functions before it, are not too many.
fn function(operation: &MosaicOperation, results: &[MosaicType], elements: &mut usize) -> Checked<MosaicFunction> {
    let region = &operation.regions[0];
    let MosaicAttribute::FunctionType(parameters, declared) = operation.attribute("function_type")? else {
        return Err(operation.error("function_type must be a function's type".to_string()));
    };
    if !region.parameters.iter().map(|(_, ty)| ty).eq(parameters) || declared != results {
        let problem = format!(
            "function_type must be that of its block's parameters, and give {}",
            if results.is_empty() { "nothing".to_string() } else { format!("{} i32", results.len()) }
        );
        return Err(operation.error(problem));
    }
    // Every function has slots of its own, but the elements of all count together.
    let mut scope = MosaicScope { slots: BTreeMap::new(), defined: Vec::new(), types: Vec::new(), elements };
    let body = scope.body(operation, region, "func.return", results)?;
    Ok(MosaicFunction { types: scope.types, body })
}

/// The names that are visible, and the types of all slots of a function.
struct MosaicScope<'a> {
    slots: BTreeMap<ValueUse, ValueSlot>,
    /// Names in `slots`, in the order of their definitions.
    defined: Vec<ValueUse>,
    types: Vec<MosaicType>,
    /// Number of elements in all slots of the module so far.
    elements: &'a mut usize,
}

impl MosaicScope<'_> {
    fn define(&mut self, operation: &MosaicOperation, name: ValueUse, ty: &MosaicType) -> Checked<ValueSlot> {
        *self.elements += ty.shaped().len();
        if *self.elements > MOST_ELEMENTS {
            let problem = format!("the module's values have more than {MOST_ELEMENTS} elements together");
            return Err(operation.error(problem));
        }
        if self.slots.contains_key(&name) {
            return Err(operation.error(format!("%{} is defined twice", name.name)));
        }
        let slot = self.types.len();
        self.types.push(ty.clone());
        self.slots.insert(name.clone(), slot);
        self.defined.push(name);
        Ok(slot)
    }

    /// Returns the slots of the operands, which must be defined with the types of their use.
    fn operands(&self, operation: &MosaicOperation) -> Checked<Vec<ValueSlot>> {
        let (found, types) = (operation.operands.len(), operation.operand_types.len());
        if found != types {
            return Err(operation.error(format!("{found} operands, expected {types} as in its type")));
        }
        let used = operation.operands.iter().zip(&operation.operand_types);
        used.map(|(name, ty)| {
            let slot = *self
                .slots
                .get(name)
                .ok_or_else(|| operation.error(format!("%{}#{} is not defined here", name.name, name.index)))?;
            let defined = &self.types[slot];
            if defined != ty {
                return Err(operation.error(format!("%{} is defined as {defined} and used as {ty}", name.name)));
            }
            Ok(slot)
        })
        .collect()
    }

    fn results(&mut self, operation: &MosaicOperation) -> Checked<Vec<ValueSlot>> {
        let types = &operation.result_types;
        let named = operation.results.iter().try_fold(0usize, |sum, result| sum.checked_add(result.count));
        if named != Some(types.len()) {
            return Err(operation.error(format!("its type has {} results, and not as many are named", types.len())));
        }
        let names = operation
            .results
            .iter()
            .flat_map(|result| (0..result.count).map(|index| ValueUse { name: result.name.clone(), index }));
        names.zip(types).map(|(name, ty)| self.define(operation, name, ty)).collect()
    }

    /// Translates a region that ends with `terminator` over values of types `results`. Its names are forgotten after
    /// it.
    fn body(
        &mut self,
        owner: &MosaicOperation,
        region: &MosaicRegion,
        terminator: &str,
        results: &[MosaicType],
    ) -> Checked<FunctionBody> {
        // Names that the region defines are visible until its end.
        let outside = self.defined.len();
        let parameters = region.parameters.iter();
        let parameters =
            parameters.map(|(name, ty)| self.define(owner, name.clone(), ty)).collect::<Result<Vec<_>, _>>()?;
        let Some((last, operations)) = region.operations.split_last() else {
            return Err(owner.error(format!("an empty region, expected one that ends with {terminator}")));
        };
        let instructions = operations.iter().map(|operation| self.instruction(operation)).collect::<Result<_, _>>()?;
        // The last operation ends the region and names its results.
        last.expect_name(&format!("{PREFIX}{terminator}"))?;
        last.expect_attributes(&[])?;
        last.expect_counts(results.len(), 0, 0)?;
        let yielded = self.operands(last)?;
        self.results(last)?;
        if let Some((found, expected)) = last.operand_types.iter().zip(results).find(|(found, wanted)| found != wanted)
        {
            return Err(last.error(format!("gives {found}, expected {expected}")));
        }
        // Forget the names, not the slots: values of outer regions stay.
        for name in self.defined.drain(outside..) {
            self.slots.remove(&name);
        }
        Ok(FunctionBody { parameters, instructions, results: yielded })
    }

    fn instruction(&mut self, operation: &MosaicOperation) -> Checked<MosaicInstruction> {
        let name = operation.short_name();
        operation.expect_name(&format!("{PREFIX}{name}"))?;
        // Operands first: an operation does not see its own results.
        let operands = self.operands(operation)?;
        let action = match name {
            "scf.for" => self.for_loop(operation)?,
            "scf.if" => self.branches(operation)?,
            _ => action(operation, name)?,
        };
        let results = self.results(operation)?;
        Ok(MosaicInstruction { line: operation.line, name: name.to_string(), operands, results, action })
    }

    fn for_loop(&mut self, operation: &MosaicOperation) -> Checked<MosaicAction> {
        operation.expect_attributes(&[])?;
        let carried = &operation.result_types;
        operation.expect_counts(3 + carried.len(), carried.len(), 1)?;
        // The first three operands are the bounds and the step, of the counter's type; the rest is carried from trip to trip.
        let counter = operation.operand(0)?;
        let counts =
            *counter == ArrayType::scalar(ElementKind::I32) || *counter == ArrayType::scalar(ElementKind::Index);
        operation.expect_kind(counter.kind, counts, "a scalar i32 or index to count with")?;
        operation.expect_operand(1, counter)?;
        operation.expect_operand(2, counter)?;
        // The body takes the counter and the carried values, and yields the latter.
        let mut parameters = vec![MosaicType::Data(counter.clone())];
        parameters.extend_from_slice(carried);
        let region = &operation.regions[0];
        if operation.operand_types[3..] != carried[..] || !region.parameters.iter().map(|(_, ty)| ty).eq(&parameters) {
            let problem = "its block's parameters must be the counter and the carried values, of the results' types";
            return Err(operation.error(problem.to_string()));
        }
        Ok(MosaicAction::For(self.body(operation, region, "scf.yield", carried)?))
    }

    fn branches(&mut self, operation: &MosaicOperation) -> Checked<MosaicAction> {
        operation.expect_attributes(&[])?;
        let results = &operation.result_types;
        operation.expect_counts(1, results.len(), 2)?;
        operation.expect_operand(0, &ArrayType::scalar(ElementKind::I1))?;
        if operation.regions.iter().any(|region| !region.parameters.is_empty()) {
            return Err(operation.error("its blocks take no parameters".to_string()));
        }
        let yes = self.body(operation, &operation.regions[0], "scf.yield", results)?;
        let otherwise = &operation.regions[1];
        // An empty second region stands for no operations, if nothing is to be yielded.
        let no = if otherwise.operations.is_empty() && results.is_empty() {
            FunctionBody { parameters: Vec::new(), instructions: Vec::new(), results: Vec::new() }
        } else {
            self.body(operation, otherwise, "scf.yield", results)?
        };
        Ok(MosaicAction::If { yes, no })
    }
}

/// Translates `operation`, which has no region.
fn action(operation: &MosaicOperation, name: &str) -> Checked<MosaicAction> {
    if let Some(function) = elementwise(name) {
        return elementwise_action(operation, function);
    }
    if let Some(conversion) = conversion(name) {
        operation.expect_attributes(&["fastmath", "overflowFlags"])?;
        expect_plain_arithmetic(operation)?;
        operation.expect_counts(1, 1, 0)?;
        let (from, to) = (operation.operand(0)?, operation.result()?);
        operation.expect_result(&from.with_kind(to.kind))?;
        if !(conversion.takes)(from.kind, to.kind) {
            return Err(operation.error(format!("from {} to {} it converts nothing", from.kind, to.kind)));
        }
        return Ok(MosaicAction::Convert(conversion));
    }
    match name {
        "arith.constant" => constant(operation),
        "arith.cmpi" | "arith.cmpf" => compare(operation, name),
        "arith.select" => select(operation),
        "vector.broadcast" => broadcast(operation),
        "vector.shape_cast" => {
            operation.expect_attributes(&[])?;
            operation.expect_counts(1, 1, 0)?;
            let (from, to) = (operation.operand(0)?, operation.result()?);
            if from.kind != to.kind || from.len() != to.len() || from.shape.is_empty() || to.shape.is_empty() {
                return Err(operation.error(format!("{from} to {to}, expected vectors of as many equal elements")));
            }
            Ok(MosaicAction::Reshape)
        }
        "vector.extract_strided_slice" => slice(operation),
        "vector.multi_reduction" => reduction(operation),
        "vector.load" => load(operation, MemorySpace::Vmem),
        "memref.load" => load(operation, MemorySpace::Smem),
        "tpu.vector_store" => store(operation),
        "tpu.iota" => iota(operation),
        "tpu.assume_multiple" => assume_multiple(operation),
        _ => Err(operation.error("the operation is unknown or not supported".to_string())),
    }
}

/// Checks that no attribute allows another result than that of the written arithmetic.
fn expect_plain_arithmetic(operation: &MosaicOperation) -> Checked<()> {
    operation.expect_default("fastmath", &MosaicAttribute::Opaque("#arith.fastmath<none>".to_string()))?;
    operation.expect_default("overflowFlags", &MosaicAttribute::Opaque("#arith.overflow<none>".to_string()))
}

fn elementwise_action(operation: &MosaicOperation, function: Elementwise) -> Checked<MosaicAction> {
    operation.expect_attributes(&["fastmath", "overflowFlags"])?;
    expect_plain_arithmetic(operation)?;
    let ty = operation.uniform(if let Elementwise::FloatUnary(_) = function { 1 } else { 2 })?;
    let (right, what) = match function {
        Elementwise::FloatUnary(_) | Elementwise::FloatBinary(_) => (ty.kind.is_float(), "floats"),
        Elementwise::IntBinary(_) => (!ty.kind.is_float() && ty.kind != ElementKind::I1, "integers of more than a bit"),
        Elementwise::Bitwise(_) => (!ty.kind.is_float(), "integers"),
    };
    operation.expect_kind(ty.kind, right, what)?;
    Ok(MosaicAction::Elementwise(function))
}

fn constant(operation: &MosaicOperation) -> Checked<MosaicAction> {
    operation.expect_attributes(&["value"])?;
    operation.expect_counts(0, 1, 0)?;
    let (text, ty) = match operation.attribute("value")? {
        MosaicAttribute::Scalar(text, MosaicType::Data(ty)) if ty.shape.is_empty() => (text, ty),
        MosaicAttribute::Splat(text, MosaicType::Data(ty)) if !ty.shape.is_empty() => (text, ty),
        _ => return Err(operation.error("value must be a scalar, or dense with one, and its type".to_string())),
    };
    operation.expect_result(ty)?;
    let elements = if ty.kind.is_float() {
        float(ty.kind, text).map(|x| ElementBuffer::Float(vec![x; ty.len()]))
    } else {
        integer(ty.kind, text).map(|x| ElementBuffer::Int(vec![x; ty.len()]))
    };
    let elements = elements.ok_or_else(|| operation.error(format!("{text} is not a {}", ty.kind)))?;
    Ok(MosaicAction::Constant(Rc::new(elements)))
}

/// Parses a float: `1.0e+00`, which needs its point, or the bits in as many digits as they take, `0x7F80`.
fn float(kind: ElementKind, text: &str) -> Option<f32> {
    if let Some(digits) = text.strip_prefix("0x") {
        let bits = u32::from_str_radix(digits, 16).ok().filter(|_| digits.len() as u32 * 4 == kind.bits())?;
        return Some(kind.float(bits));
    }
    let x: f64 = text.parse().ok().filter(|_| text.contains('.'))?;
    Some(kind.round_f64(x))
}

fn integer(kind: ElementKind, text: &str) -> Option<i32> {
    match text {
        "true" | "false" => (kind == ElementKind::I1).then_some(i32::from(text == "true")),
        _ => text.parse().ok().filter(|&x| kind != ElementKind::I1 && kind.wrap(x) == x),
    }
}

fn compare(operation: &MosaicOperation, name: &str) -> Checked<MosaicAction> {
    operation.expect_attributes(&["fastmath", "predicate"])?;
    expect_plain_arithmetic(operation)?;
    operation.expect_counts(2, 1, 0)?;
    let ty = operation.operand(0)?;
    operation.expect_operand(1, ty)?;
    operation.expect_result(&ty.with_kind(ElementKind::I1))?;
    // The predicate is a number of MLIR's table.
    let predicate = operation.whole("predicate")?;
    let unknown = || operation.error(format!("predicate {predicate} is unknown"));
    if name == "arith.cmpf" {
        operation.expect_kind(ty.kind, ty.kind.is_float(), "floats")?;
        return compare_float(predicate).map(MosaicAction::CompareFloat).ok_or_else(unknown);
    }
    let ordered = ty.kind != ElementKind::I1 || predicate < 2;
    operation.expect_kind(ty.kind, !ty.kind.is_float() && ordered, "integers, which have an order")?;
    compare_int(predicate).map(MosaicAction::CompareInt).ok_or_else(unknown)
}

fn select(operation: &MosaicOperation) -> Checked<MosaicAction> {
    operation.expect_attributes(&[])?;
    operation.expect_counts(3, 1, 0)?;
    let ty = operation.result()?;
    operation.expect_operand(1, ty)?;
    operation.expect_operand(2, ty)?;
    // The condition is one truth value for all elements, or one for each.
    if *operation.operand(0)? != ArrayType::scalar(ElementKind::I1) {
        operation.expect_operand(0, &ty.with_kind(ElementKind::I1))?;
    }
    Ok(MosaicAction::Select)
}

fn broadcast(operation: &MosaicOperation) -> Checked<MosaicAction> {
    operation.expect_attributes(&[])?;
    operation.expect_counts(1, 1, 0)?;
    // Extents are aligned at the last dimension, as in NumPy.
    let (from, to) = (operation.operand(0)?, operation.result()?);
    let aligned = from.shape.iter().rev().zip(to.shape.iter().rev());
    let fits = from.shape.len() <= to.shape.len() && aligned.into_iter().all(|(&from, &to)| from == 1 || from == to);
    if from.kind != to.kind || to.shape.is_empty() || !fits {
        return Err(operation.error(format!("{from} does not repeat to {to}")));
    }
    Ok(MosaicAction::Broadcast)
}

fn slice(operation: &MosaicOperation) -> Checked<MosaicAction> {
    operation.expect_attributes(&["offsets", "sizes", "strides"])?;
    operation.expect_counts(1, 1, 0)?;
    let (from, to) = (operation.operand(0)?, operation.result()?);
    let listed = |key: &str| operation.places(operation.attribute(key)?, key);
    let (start, sizes, strides) = (listed("offsets")?, listed("sizes")?, listed("strides")?);
    let rank = from.shape.len();
    if start.len() != rank || sizes.len() != rank || strides != vec![1; rank] {
        return Err(operation.error(format!("expected {rank} offsets and sizes, and as many strides of 1")));
    }
    // The slice must be within the vector, and the result must have its sizes.
    let ends = start.iter().zip(&sizes).map(|(start, size)| start.checked_add(*size));
    if ends.zip(&from.shape).any(|(end, extent)| end.is_none_or(|end| end > *extent)) {
        return Err(operation.error(format!("offsets {start:?} and sizes {sizes:?} reach beyond {from}")));
    }
    if from.kind != to.kind || to.shape != sizes {
        return Err(operation.error(format!("the result is {to}, expected sizes {sizes:?} of {}", from.kind)));
    }
    Ok(MosaicAction::Slice { start })
}

fn reduction(operation: &MosaicOperation) -> Checked<MosaicAction> {
    operation.expect_attributes(&["kind", "reduction_dims"])?;
    operation.expect_counts(2, 1, 0)?;
    let from = operation.operand(0)?;
    let dimensions = operation.places(operation.attribute("reduction_dims")?, "reduction_dims")?;
    // The dimensions must exist and be distinct.
    let distinct: BTreeSet<_> = dimensions.iter().filter(|&&dimension| dimension < from.shape.len()).collect();
    if dimensions.is_empty() || distinct.len() != dimensions.len() {
        return Err(operation.error(format!("reduction_dims {dimensions:?} are not dimensions of {from}")));
    }
    // The accumulator and the result have the remaining dimensions.
    let shape = from.shape.iter().enumerate().filter(|(i, _)| !dimensions.contains(i)).map(|(_, &extent)| extent);
    let kept = ArrayType { kind: from.kind, shape: shape.collect() };
    operation.expect_operand(1, &kept)?;
    operation.expect_result(&kept)?;
    let MosaicAttribute::Opaque(kind) = operation.attribute("kind")? else {
        return Err(operation.error("kind must be a #vector.kind".to_string()));
    };
    // Floats and integers have functions of their own; other kinds are not emitted.
    let fold = match (kind.as_str(), from.kind.is_float()) {
        ("#vector.kind<add>", true) => ReductionFold::Float(|x, y| x + y),
        ("#vector.kind<maximumf>", true) => ReductionFold::Float(maximum),
        ("#vector.kind<minimumf>", true) => ReductionFold::Float(minimum),
        ("#vector.kind<add>", false) if from.kind != ElementKind::I1 => ReductionFold::Int(i32::wrapping_add),
        _ => return Err(operation.error(format!("{kind} of {} is not supported", from.kind))),
    };
    Ok(MosaicAction::Reduce { fold, dimensions })
}

/// Checks that operand `i` is a memref in `space` with an index for each of its dimensions after it, and returns its
/// type.
fn indexed(operation: &MosaicOperation, i: usize, space: MemorySpace) -> Checked<&ArrayType> {
    let memory = match operation.operand_types.get(i) {
        Some(MosaicType::MemRef(shaped, found)) if *found == space => shaped,
        _ => return Err(operation.error(format!("operand {i} must be a memref in {space}"))),
    };
    // Nothing may follow the indices.
    operation.expect_counts(i + 1 + memory.shape.len(), operation.result_types.len(), 0)?;
    for index in i + 1..operation.operand_types.len() {
        operation.expect_operand(index, &ArrayType::scalar(ElementKind::Index))?;
    }
    Ok(memory)
}

fn load(operation: &MosaicOperation, space: MemorySpace) -> Checked<MosaicAction> {
    operation.expect_attributes(&["nontemporal"])?;
    operation.expect_default(
        "nontemporal",
        &MosaicAttribute::Scalar("false".to_string(), MosaicType::scalar(ElementKind::I1)),
    )?;
    let memory = indexed(operation, 0, space)?;
    if space == MemorySpace::Smem {
        operation.expect_result(&ArrayType::scalar(memory.kind))?;
        return Ok(MosaicAction::LoadScalar);
    }
    let to = operation.result()?;
    if to.kind != memory.kind || to.shape.len() != memory.shape.len() {
        return Err(operation.error(format!("{to} from a memref of {memory}, expected as many dimensions of its kind")));
    }
    Ok(MosaicAction::Load)
}

fn store(operation: &MosaicOperation) -> Checked<MosaicAction> {
    operation.expect_attributes(&["add", "operandSegmentSizes", "strides"])?;
    operation
        .expect_default("add", &MosaicAttribute::Scalar("false".to_string(), MosaicType::scalar(ElementKind::I1)))?;
    operation.expect_default("strides", &MosaicAttribute::Array(Vec::new()))?;
    let memory = indexed(operation, 1, MemorySpace::Vmem)?;
    operation.expect_counts(operation.operand_types.len(), 0, 0)?;
    // The value, the memref, its indices, and no mask.
    let segments = MosaicAttribute::Array(vec![1, 1, memory.shape.len() as i64, 0]);
    if *operation.attribute("operandSegmentSizes")? != segments {
        return Err(operation.error(format!("operandSegmentSizes must be {segments:?}; a mask is not supported")));
    }
    let value = operation.operand(0)?;
    if value.kind != memory.kind || value.shape.len() != memory.shape.len() {
        return Err(
            operation.error(format!("{value} to a memref of {memory}, expected as many dimensions of its kind"))
        );
    }
    Ok(MosaicAction::Store)
}

fn iota(operation: &MosaicOperation) -> Checked<MosaicAction> {
    operation.expect_attributes(&["dimensions"])?;
    operation.expect_counts(0, 1, 0)?;
    let to = operation.result()?;
    operation.expect_kind(to.kind, to.kind == ElementKind::I32, "i32")?;
    match operation.places(operation.attribute("dimensions")?, "dimensions")?[..] {
        [dimension] if dimension < to.shape.len() => Ok(MosaicAction::Iota { dimension }),
        _ => Err(operation.error(format!("dimensions must be one of those of {to}"))),
    }
}

fn assume_multiple(operation: &MosaicOperation) -> Checked<MosaicAction> {
    operation.expect_attributes(&["multiple"])?;
    let ty = operation.uniform(1)?;
    let counts = *ty == ArrayType::scalar(ElementKind::I32) || *ty == ArrayType::scalar(ElementKind::Index);
    operation.expect_kind(ty.kind, counts, "a scalar i32 or index")?;
    let multiple = i32::try_from(operation.whole("multiple")?).ok().filter(|&multiple| multiple > 0);
    let multiple = multiple.ok_or_else(|| operation.error("multiple must be positive".to_string()))?;
    Ok(MosaicAction::AssumeMultiple(multiple))
}
