//! Small kernels whose results are known, and texts and runs that must be refused.

mod operations;
mod refusals;
mod windows;

use half::{bf16, f16};

use assay_core::device_dtype::DeviceDtype;
use assay_mosaic_interpreter::{HostArray, MosaicInterpretError, run};

/// Spells out the prefix of operations and the memory of memrefs: `"arith.addf"`, `vmem<8x128xf32>`.
pub(super) fn spelt(text: &str) -> String {
    let mut text = text.to_string();
    for dialect in ["arith", "func", "math", "memref", "scf", "tpu", "vector"] {
        text = text.replace(&format!("\"{dialect}."), &format!("\"stable_mosaic.{dialect}."));
    }
    for space in ["vmem", "smem"] {
        let memory = format!(" {space}<");
        let mut parts = text.split(&memory);
        let mut spelt = parts.next().unwrap_or_default().to_string();
        for part in parts {
            let (shape, rest) = part.split_once('>').unwrap();
            spelt += &format!(" memref<{shape}, #tpu.memory_space<{space}>>{rest}");
        }
        text = spelt;
    }
    text
}

/// A kernel. Its parameters are named `%i0…` (grid indices), `%p0…` (prefetched), `%w0…` (windows), `%s0…` (scratch).
pub(super) struct Kernel<'a> {
    pub(super) grid: &'a [usize],
    pub(super) prefetch: &'a [&'a str],
    /// Of each window: type, and what its transform does and returns.
    pub(super) windows: &'a [(&'a str, &'a str, &'a str)],
    pub(super) scratch: &'a [&'a str],
    pub(super) body: &'a str,
}

pub(super) const ALWAYS_ZERO: (&str, &str) = ("%z = \"arith.constant\"() {value = 0 : i32} : () -> i32", "%z");

impl Kernel<'_> {
    pub(super) fn text(&self) -> String {
        let named = |name: &str, types: &[String]| -> Vec<(String, String)> {
            types.iter().enumerate().map(|(i, ty)| (format!("%{name}{i}"), ty.clone())).collect()
        };
        let memory = |space: &str, types: &[&str]| -> Vec<String> {
            types.iter().map(|ty| format!("memref<{ty}, #tpu.memory_space<{space}>>")).collect()
        };
        let mut leading = named("i", &vec!["i32".to_string(); self.grid.len()]);
        leading.extend(named("p", &memory("smem", self.prefetch)));
        let types: Vec<&str> = self.windows.iter().map(|window| window.0).collect();
        let mut all = leading.clone();
        all.extend(named("w", &memory("vmem", &types)));
        all.extend(named("s", &memory("vmem", self.scratch)));

        let parameters = |list: &[(String, String)]| {
            list.iter().map(|(name, ty)| format!("{name}: {ty}")).collect::<Vec<_>>().join(", ")
        };
        let only_types =
            |list: &[(String, String)]| list.iter().map(|(_, ty)| ty.clone()).collect::<Vec<_>>().join(", ");
        let mut windows = Vec::new();
        let mut transforms = String::new();
        for (i, (ty, operations, results)) in self.windows.iter().enumerate() {
            let bounds: Vec<&str> = ty.split('x').filter(|word| word.parse::<usize>().is_ok()).collect();
            windows.push(format!(
                "{{window_bounds = array<i64: {}>, transform_indices = @transform_{i}}}",
                bounds.join(", ")
            ));
            let integers = vec!["i32"; bounds.len()].join(", ");
            transforms += &format!(
                "\"func.func\"() ({{\n^bb0({}):\n{operations}\n\"func.return\"({results}) : ({integers}) -> ()\n}}) \
                 {{function_type = ({}) -> ({integers}), sym_name = \"transform_{i}\"}} : () -> ()\n",
                parameters(&leading),
                only_types(&leading)
            );
        }
        let grid: Vec<String> = self.grid.iter().map(usize::to_string).collect();
        spelt(&format!(
            "\"builtin.module\"() ({{\n\"func.func\"() ({{\n^bb0({}):\n{}\n\"func.return\"() : () -> ()\n}}) \
             {{function_type = ({}) -> (), iteration_bounds = array<i64: {}>, scalar_prefetch = {} : i64, \
             scratch_operands = {} : i64, sym_name = \"kernel\", window_params = [{}]}} : () -> ()\n\
             {transforms}}}) {{stable_mosaic.version = 11 : i64}} : () -> ()\n",
            parameters(&all),
            self.body,
            only_types(&all),
            grid.join(", "),
            self.prefetch.len(),
            self.scratch.len(),
            windows.join(", ")
        ))
    }
}

pub(super) fn array(element: DeviceDtype, shape: &[usize], values: &[f64]) -> HostArray {
    let bytes = values.iter().flat_map(|&x| match element {
        DeviceDtype::F32 => (x as f32).to_le_bytes().to_vec(),
        DeviceDtype::Bf16 => bf16::from_f64(x).to_le_bytes().to_vec(),
        DeviceDtype::F16 => f16::from_f64(x).to_le_bytes().to_vec(),
        _ => (x as i32).to_le_bytes().to_vec(),
    });
    HostArray { element, shape: shape.to_vec(), bytes: bytes.collect() }
}

pub(super) fn values(array: &HostArray) -> Vec<f64> {
    array
        .bytes
        .chunks(array.element.size())
        .map(|word| match *word {
            [a, b] if array.element == DeviceDtype::Bf16 => bf16::from_le_bytes([a, b]).to_f64(),
            [a, b] => f16::from_le_bytes([a, b]).to_f64(),
            [a, b, c, d] if array.element == DeviceDtype::F32 => f32::from_le_bytes([a, b, c, d]).into(),
            [a, b, c, d] => i32::from_le_bytes([a, b, c, d]).into(),
            _ => unreachable!("an element of 2 or 4 bytes"),
        })
        .collect()
}

/// Equal numbers, with NaN equal to NaN and 0 not to −0.
pub(super) fn assert_values(found: &[f64], expected: &[f64], what: &str) {
    let same = |(x, y): (&f64, &f64)| (x.is_nan() && y.is_nan()) || x.to_bits() == y.to_bits();
    let equal = found.len() == expected.len() && found.iter().zip(expected).all(same);
    assert!(equal, "{what}: found {found:?}, expected {expected:?}");
}

pub(super) fn type_of(array: &HostArray) -> String {
    let extents: Vec<String> = array.shape.iter().map(usize::to_string).collect();
    format!("{}x{}", extents.join("x"), array.element.mlir())
}

/// Runs `operations` once, on whole arrays loaded as `%x0…`; what they name `%r` is the result.
pub(super) fn evaluate(
    operations: &str,
    operands: &[HostArray],
    output: &HostArray,
) -> Result<Vec<f64>, MosaicInterpretError> {
    let mut body = "%zero = \"arith.constant\"() {value = 0 : index} : () -> index\n".to_string();
    let mut windows = Vec::new();
    let places = |rank: usize| (vec!["%zero"; rank].join(", "), vec!["index"; rank].join(", "));
    for (i, operand) in operands.iter().enumerate() {
        let (ty, (zeros, indices)) = (type_of(operand), places(operand.shape.len()));
        body += &format!("%x{i} = \"vector.load\"(%w{i}, {zeros}) : ( vmem<{ty}>, {indices}) -> vector<{ty}>\n");
        windows.push(ty);
    }
    let (ty, rank, i) = (type_of(output), output.shape.len(), operands.len());
    let (zeros, indices) = places(rank);
    body += operations;
    body += &format!(
        "\n\"tpu.vector_store\"(%r, %w{i}, {zeros}) {{operandSegmentSizes = array<i32: 1, 1, {rank}, 0>}} : \
         (vector<{ty}>, vmem<{ty}>, {indices}) -> ()"
    );
    windows.push(ty);
    let results: Vec<String> =
        operands.iter().chain([output]).map(|array| vec![ALWAYS_ZERO.1; array.shape.len()].join(", ")).collect();
    let windows: Vec<_> =
        windows.iter().zip(&results).map(|(ty, results)| (ty.as_str(), ALWAYS_ZERO.0, results.as_str())).collect();
    let text = Kernel { grid: &[1], prefetch: &[], windows: &windows, scratch: &[], body: &body }.text();
    let written = run(&text, operands.to_vec(), &[(output.element, output.shape.clone())], &[])?;
    Ok(values(&written[0]))
}

pub(super) const NAN: f64 = f64::NAN;
pub(super) const INFINITY: f64 = f64::INFINITY;
pub(super) const COUNTS: &str = "%c0 = \"arith.constant\"() {value = 0 : i32} : () -> i32
%c1 = \"arith.constant\"() {value = 1 : i32} : () -> i32
%c2 = \"arith.constant\"() {value = 2 : i32} : () -> i32
%c7 = \"arith.constant\"() {value = 7 : i32} : () -> i32";

/// Windows of 2 elements over arrays of f32; the blocks that the input and the output lie at are read from tables in
/// scalar memory. The body is `out = in + 1` unless another is given.
pub(super) struct Tables<'a> {
    pub(super) reads: &'a [i32],
    pub(super) writes: &'a [i32],
    pub(super) body: &'a str,
    pub(super) semantics: &'a str,
}

pub(super) const ARBITRARY: &str = "#tpu.dimension_semantics<arbitrary>";
pub(super) const PARALLEL: &str = "#tpu.dimension_semantics<parallel>";

/// The text of a kernel that says what its one dimension is.
pub(super) fn with_semantics(text: &str, semantics: &str) -> String {
    text.replace("iteration_bounds", &format!("dimension_semantics = [{semantics}], iteration_bounds"))
}

pub(super) const ADD_ONE: &str = "%x = \"vector.load\"(%w0, %zero) : ( vmem<2xf32>, index) -> vector<2xf32>
%one = \"arith.constant\"() {value = dense<1.0> : vector<2xf32>} : () -> vector<2xf32>
%y = \"arith.addf\"(%x, %one) : (vector<2xf32>, vector<2xf32>) -> vector<2xf32>
\"tpu.vector_store\"(%y, %w1, %zero) {operandSegmentSizes = array<i32: 1, 1, 1, 0>} : (vector<2xf32>, vmem<2xf32>, \
                       index) -> ()";

impl Tables<'_> {
    pub(super) fn run(&self, x: &[f64], outputs: usize, aliased: bool) -> Result<Vec<f64>, MosaicInterpretError> {
        let steps = self.reads.len();
        assert_eq!(steps, self.writes.len());
        let look_up = |table: &str| {
            format!(
                "%at = \"arith.index_cast\"(%i0) : (i32) -> index\n%block = \"memref.load\"({table}, %at) : ( \
                 smem<{steps}xi32>, index) -> i32"
            )
        };
        let (read, write) = (look_up("%p0"), look_up("%p1"));
        let table = format!("{steps}xi32");
        let body = format!("%zero = \"arith.constant\"() {{value = 0 : index}} : () -> index\n{}", self.body);
        let text = Kernel {
            grid: &[steps],
            prefetch: &[&table, &table],
            windows: &[("2xf32", &read, "%block"), ("2xf32", &write, "%block")],
            scratch: &[],
            body: &body,
        };
        let text = with_semantics(&text.text(), self.semantics);
        let integers =
            |table: &[i32]| array(DeviceDtype::I32, &[steps], &table.iter().map(|&x| x.into()).collect::<Vec<_>>());
        let operands = vec![integers(self.reads), integers(self.writes), array(DeviceDtype::F32, &[x.len()], x)];
        let aliases: &[_] = if aliased { &[(2, 0)] } else { &[] };
        run(&text, operands, &[(DeviceDtype::F32, vec![outputs])], aliases).map(|written| values(&written[0]))
    }
}

pub(super) fn problem(error: Result<Vec<f64>, MosaicInterpretError>) -> String {
    error.expect_err("a run that must be refused").to_string()
}
