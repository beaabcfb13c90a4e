//! Small kernels whose results are known, and texts and runs that must be refused.

use std::ops::Range;
use std::slice::from_ref;

use half::{bf16, f16};

use assay_core::device_dtype::DeviceDtype;
use assay_mosaic_interpreter::{HostArray, MosaicInterpretError, MosaicOptions, TpuCore, run, run_with};

/// Spells out the prefix of operations and the memory of memrefs: `"arith.addf"`, `vmem<8x128xf32>`.
fn spelt(text: &str) -> String {
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
struct Kernel<'a> {
    grid: &'a [usize],
    prefetch: &'a [&'a str],
    /// Of each window: type, and what its transform does and returns.
    windows: &'a [(&'a str, &'a str, &'a str)],
    scratch: &'a [&'a str],
    body: &'a str,
}

const ALWAYS_ZERO: (&str, &str) = ("%z = \"arith.constant\"() {value = 0 : i32} : () -> i32", "%z");

impl Kernel<'_> {
    fn text(&self) -> String {
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

fn array(element: DeviceDtype, shape: &[usize], values: &[f64]) -> HostArray {
    let bytes = values.iter().flat_map(|&x| match element {
        DeviceDtype::F32 => (x as f32).to_le_bytes().to_vec(),
        DeviceDtype::Bf16 => bf16::from_f64(x).to_le_bytes().to_vec(),
        DeviceDtype::F16 => f16::from_f64(x).to_le_bytes().to_vec(),
        _ => (x as i32).to_le_bytes().to_vec(),
    });
    HostArray { element, shape: shape.to_vec(), bytes: bytes.collect() }
}

fn values(array: &HostArray) -> Vec<f64> {
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
fn assert_values(found: &[f64], expected: &[f64], what: &str) {
    let same = |(x, y): (&f64, &f64)| (x.is_nan() && y.is_nan()) || x.to_bits() == y.to_bits();
    let equal = found.len() == expected.len() && found.iter().zip(expected).all(same);
    assert!(equal, "{what}: found {found:?}, expected {expected:?}");
}

fn type_of(array: &HostArray) -> String {
    let extents: Vec<String> = array.shape.iter().map(usize::to_string).collect();
    format!("{}x{}", extents.join("x"), array.element.mlir())
}

/// Runs `operations` once, on whole arrays loaded as `%x0…`; what they name `%r` is the result.
fn evaluate(operations: &str, operands: &[HostArray], output: &HostArray) -> Result<Vec<f64>, MosaicInterpretError> {
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

const NAN: f64 = f64::NAN;
const INFINITY: f64 = f64::INFINITY;

#[test]
fn float_operations_compute_what_they_are_named_for() {
    for (name, x, y, expected) in [
        ("arith.addf", [1.0, -0.0], [2.0, 0.0], [3.0, 0.0]),
        ("arith.subf", [1.0, 2.0], [2.0, -INFINITY], [-1.0, INFINITY]),
        ("arith.mulf", [3.0, -1.0], [-2.0, 0.0], [-6.0, -0.0]),
        ("arith.divf", [3.0, 1.0], [-2.0, 0.0], [-1.5, INFINITY]),
        ("arith.maximumf", [1.0, -0.0], [2.0, 0.0], [2.0, 0.0]),
        ("arith.maximumf", [NAN, 1.0], [2.0, NAN], [NAN, NAN]),
        ("arith.minimumf", [1.0, -0.0], [2.0, 0.0], [1.0, -0.0]),
        ("arith.minimumf", [NAN, 1.0], [2.0, NAN], [NAN, NAN]),
    ] {
        for element in [DeviceDtype::F32, DeviceDtype::Bf16, DeviceDtype::F16] {
            let ty = format!("vector<2x{element}>");
            let operation =
                format!("%r = \"{name}\"(%x0, %x1) {{fastmath = #arith.fastmath<none>}} : ({ty}, {ty}) -> {ty}");
            let [x, y] = [x, y].map(|x| array(element, &[2], &x));
            let found = evaluate(&operation, &[x.clone(), y], &x).unwrap();
            assert_values(&found, &expected, &format!("{name} of {element}"));
        }
    }
    for (name, x, expected) in [
        ("arith.negf", [1.0, 0.0], [-1.0, -0.0]),
        ("math.absf", [-1.5, -0.0], [1.5, 0.0]),
        ("math.exp", [0.0, -INFINITY], [1.0, 0.0]),
        ("math.exp2", [3.0, -1.0], [8.0, 0.5]),
        ("math.log", [1.0, 0.0], [0.0, -INFINITY]),
        ("math.log2", [8.0, -1.0], [3.0, NAN]),
    ] {
        let x = array(DeviceDtype::F32, &[2], &x);
        let operation = format!("%r = \"{name}\"(%x0) : (vector<2xf32>) -> vector<2xf32>");
        assert_values(&evaluate(&operation, from_ref(&x), &x).unwrap(), &expected, name);
    }
}

#[test]
fn integer_operations_compute_what_they_are_named_for() {
    let (least, most) = (f64::from(i32::MIN), f64::from(i32::MAX));
    for (name, x, y, expected) in [
        ("arith.addi", [most, 2.0], [1.0, 3.0], [least, 5.0]),
        ("arith.subi", [least, 2.0], [1.0, 3.0], [most, -1.0]),
        ("arith.muli", [65536.0, 2.0], [65536.0, -3.0], [0.0, -6.0]),
        ("arith.divsi", [-7.0, 7.0], [2.0, 2.0], [-3.0, 3.0]),
        ("arith.remsi", [-7.0, least], [2.0, -1.0], [-1.0, 0.0]),
        ("arith.andi", [12.0, -1.0], [10.0, 5.0], [8.0, 5.0]),
        ("arith.ori", [12.0, 0.0], [10.0, -8.0], [14.0, -8.0]),
        ("arith.xori", [12.0, -1.0], [10.0, 0.0], [6.0, -1.0]),
        ("arith.shli", [1.0, 3.0], [31.0, 1.0], [least, 6.0]),
        ("arith.shrsi", [-8.0, 8.0], [1.0, 1.0], [-4.0, 4.0]),
        ("arith.shrui", [-8.0, 8.0], [1.0, 1.0], [f64::from(0x7FFF_FFFC), 4.0]),
        ("arith.minsi", [-8.0, 8.0], [1.0, 1.0], [-8.0, 1.0]),
        ("arith.maxsi", [-8.0, 8.0], [1.0, 1.0], [1.0, 8.0]),
    ] {
        let operation = format!("%r = \"{name}\"(%x0, %x1) : (vector<2xi32>, vector<2xi32>) -> vector<2xi32>");
        let [x, y] = [x, y].map(|x| array(DeviceDtype::I32, &[2], &x));
        assert_values(&evaluate(&operation, &[x.clone(), y], &x).unwrap(), &expected, name);
    }
}

#[test]
fn comparisons_follow_their_predicates_and_nan() {
    // x < y, x = y, x > y, and a NaN; as bits from the lowest.
    let truths = [0b0000, 0b0010, 0b0100, 0b0110, 0b0001, 0b0011, 0b0101, 0b0111];
    let floats = (0..16).map(|predicate| (predicate, if predicate < 8 { truths[predicate] } else { 0 }));
    for (predicate, ordered) in floats {
        // From 8 on a predicate is one of the others, or true of a NaN.
        let expected = if predicate < 8 {
            ordered
        } else {
            [0b1010, 0b1100, 0b1110, 0b1001, 0b1011, 0b1101, 0b1000, 0b1111][predicate - 8]
        };
        let operations = format!(
            "%c = \"arith.cmpf\"(%x0, %x1) {{predicate = {predicate} : i64}} : (vector<4xf32>, vector<4xf32>) -> \
             vector<4xi1>\n%r = \"arith.extui\"(%c) : (vector<4xi1>) -> vector<4xi32>"
        );
        let x = array(DeviceDtype::F32, &[4], &[1.0, 2.0, 3.0, NAN]);
        let y = array(DeviceDtype::F32, &[4], &[2.0, 2.0, 2.0, 2.0]);
        let found = evaluate(&operations, &[x, y], &array(DeviceDtype::I32, &[4], &[0.0; 4])).unwrap();
        let expected: Vec<f64> = (0..4).map(|bit| f64::from(expected >> bit & 1)).collect();
        assert_values(&found, &expected, &format!("predicate {predicate}"));
    }
    // Of −1 and 1: signed less, unsigned greater.
    for (predicate, expected) in [0, 1, 1, 1, 0, 0, 0, 0, 1, 1].into_iter().enumerate() {
        let operations = format!(
            "%c = \"arith.cmpi\"(%x0, %x1) {{predicate = {predicate} : i64}} : (vector<1xi32>, vector<1xi32>) -> \
             vector<1xi1>\n%r = \"arith.extsi\"(%c) : (vector<1xi1>) -> vector<1xi32>"
        );
        let [x, y] = [-1.0, 1.0].map(|x| array(DeviceDtype::I32, &[1], &[x]));
        let found = evaluate(&operations, &[x.clone(), y], &x).unwrap();
        assert_eq!(found, [-f64::from(expected)], "predicate {predicate}");
    }
}

#[test]
fn conversions_round_wrap_and_reinterpret() {
    let poison = f64::from(0x5A5A_5A5A_u32);
    for (operations, from, x, to, expected) in [
        ("arith.truncf", DeviceDtype::F32, [257.0, 259.0, NAN], DeviceDtype::Bf16, [256.0, 260.0, NAN]),
        ("arith.truncf", DeviceDtype::F32, [2049.0, 2051.0, 1e6], DeviceDtype::F16, [2048.0, 2052.0, INFINITY]),
        ("arith.extf", DeviceDtype::Bf16, [256.0, -0.0, NAN], DeviceDtype::F32, [256.0, -0.0, NAN]),
        ("arith.sitofp", DeviceDtype::I32, [3.0, -16_777_217.0, 0.0], DeviceDtype::F32, [3.0, -16_777_216.0, 0.0]),
        // Rounded twice, 2²⁴ + 2¹⁶ + 1 loses its last bit first, and with it the way up.
        ("arith.sitofp", DeviceDtype::I32, [16_842_753.0, 1.0, 2.0], DeviceDtype::Bf16, [16_908_288.0, 1.0, 2.0]),
        ("arith.fptosi", DeviceDtype::F32, [-2.9, 3e9, NAN], DeviceDtype::I32, [-2.0, poison, poison]),
        (
            "arith.bitcast",
            DeviceDtype::F32,
            [1.0, -0.0, 0.0],
            DeviceDtype::I32,
            [1_065_353_216.0, f64::from(i32::MIN), 0.0],
        ),
    ] {
        let (from, to) = (array(from, &[3], &x), array(to, &[3], &[0.0; 3]));
        let types = format!("(vector<{}>) -> vector<{}>", type_of(&from), type_of(&to));
        let found = evaluate(&format!("%r = \"{operations}\"(%x0) : {types}"), &[from], &to).unwrap();
        assert_values(&found, &expected, operations);
    }
    // Through the narrow integers, which no array of the caller's holds.
    for (there, narrow, back, expected) in [
        ("arith.trunci", "i8", "arith.extsi", [-128.0, -1.0]),
        ("arith.trunci", "i8", "arith.extui", [128.0, 255.0]),
        ("arith.trunci", "i16", "arith.extui", [128.0, 65535.0]),
        ("arith.index_cast", "index", "arith.index_cast", [128.0, -1.0]),
    ] {
        let operations = format!(
            "%n = \"{there}\"(%x0) : (vector<2xi32>) -> vector<2x{narrow}>\n\
             %r = \"{back}\"(%n) : (vector<2x{narrow}>) -> vector<2xi32>"
        );
        let x = array(DeviceDtype::I32, &[2], &[128.0, -1.0]);
        assert_values(&evaluate(&operations, from_ref(&x), &x).unwrap(), &expected, &operations);
    }
}

#[test]
fn bf16_rounds_to_nearest_even_after_every_operation() {
    let x = array(DeviceDtype::Bf16, &[2], &[256.0, 258.0]);
    let y = array(DeviceDtype::Bf16, &[2], &[1.0, 1.0]);
    let add = "\"arith.addf\"(%x0, %x1) : (vector<2xbf16>, vector<2xbf16>) -> vector<2xbf16>";
    let found = evaluate(&format!("%r = {add}"), &[x.clone(), y.clone()], &x).unwrap();
    assert_values(&found, &[256.0, 260.0], "ties go to even");
    let twice =
        format!("%a = {add}\n%r = \"arith.addf\"(%a, %x1) : (vector<2xbf16>, vector<2xbf16>) -> vector<2xbf16>");
    assert_values(&evaluate(&twice, &[x.clone(), y], &x).unwrap(), &[256.0, 260.0], "1 + 1 is lost one by one");
}

#[test]
fn multi_reduction_folds_the_named_dimension() {
    let x = array(DeviceDtype::F32, &[2, 3], &[1.0, -2.0, 3.0, 4.0, 5.0, -6.0]);
    for (kind, dimension, initial, expected) in [
        ("add", 0, "1.0", vec![6.0, 4.0, -2.0]),
        ("add", 1, "1.0", vec![3.0, 4.0]),
        ("maximumf", 0, "0xFF800000", vec![4.0, 5.0, 3.0]),
        ("maximumf", 1, "4.5", vec![4.5, 5.0]),
        ("minimumf", 0, "0x7F800000", vec![1.0, -2.0, -6.0]),
        ("minimumf", 1, "0x7F800000", vec![-2.0, -6.0]),
        ("maximumf", 1, "0x7FC00000", vec![NAN, NAN]),
    ] {
        let output = array(DeviceDtype::F32, &[expected.len()], &expected);
        let ty = format!("vector<{}>", type_of(&output));
        let operations = format!(
            "%a = \"arith.constant\"() {{value = dense<{initial}> : {ty}}} : () -> {ty}\n%r = \
             \"vector.multi_reduction\"(%x0, %a) {{kind = #vector.kind<{kind}>, reduction_dims = array<i64: \
             {dimension}>}} : (vector<2x3xf32>, {ty}) -> {ty}"
        );
        let found = evaluate(&operations, from_ref(&x), &output).unwrap();
        assert_values(&found, &expected, &format!("{kind} over {dimension} from {initial}"));
    }
}

#[test]
fn broadcast_slice_iota_select_and_shape_cast_place_elements() {
    let x = array(DeviceDtype::I32, &[2, 3], &[0.0, 1.0, 2.0, 10.0, 11.0, 12.0]);
    let slice = "\"vector.extract_strided_slice\"(%x0) {offsets = [0, 1], sizes = [2, 1], strides = [1, 1]} : \
                 (vector<2x3xi32>) -> vector<2x1xi32>";
    for (operations, expected) in [
        (format!("%r = {slice}"), vec![1.0, 11.0]),
        (
            format!("%s = {slice}\n%r = \"vector.broadcast\"(%s) : (vector<2x1xi32>) -> vector<2x3xi32>"),
            vec![1.0, 1.0, 1.0, 11.0, 11.0, 11.0],
        ),
        (
            "%s = \"vector.extract_strided_slice\"(%x0) {sizes = [1, 2], strides = [1, 1], offsets = [1, 1]} : \
             (vector<2x3xi32>) -> vector<1x2xi32>\n%r = \"vector.broadcast\"(%s) : (vector<1x2xi32>) -> \
             vector<2x1x2xi32>"
                .to_string(),
            vec![11.0, 12.0, 11.0, 12.0],
        ),
        (
            "%r = \"vector.shape_cast\"(%x0) : (vector<2x3xi32>) -> vector<3x2xi32>".to_string(),
            vec![0.0, 1.0, 2.0, 10.0, 11.0, 12.0],
        ),
        (
            "%r = \"tpu.iota\"() {dimensions = array<i32: 0>} : () -> vector<2x3xi32>".to_string(),
            vec![0.0, 0.0, 0.0, 1.0, 1.0, 1.0],
        ),
        (
            "%i = \"tpu.iota\"() {dimensions = array<i32: 1>} : () -> vector<2x3xi32>\n%c = \"arith.cmpi\"(%i, %x0) \
             <{predicate = 0 : i64}> : (vector<2x3xi32>, vector<2x3xi32>) -> vector<2x3xi1>\n%m = \
             \"arith.constant\"() {value = dense<-1> : vector<2x3xi32>} : () -> vector<2x3xi32>\n%r = \
             \"arith.select\"(%c, %m, %x0) : (vector<2x3xi1>, vector<2x3xi32>, vector<2x3xi32>) -> vector<2x3xi32>"
                .to_string(),
            vec![-1.0, -1.0, -1.0, 10.0, 11.0, 12.0],
        ),
    ] {
        let ty = operations.rsplit("vector<").next().unwrap().trim_end_matches("xi32>").to_string();
        let shape: Vec<usize> = ty.split('x').map(|extent| extent.parse().unwrap()).collect();
        let output = array(DeviceDtype::I32, &shape, &expected);
        assert_values(&evaluate(&operations, from_ref(&x), &output).unwrap(), &expected, &operations);
    }
}

const COUNTS: &str = "%c0 = \"arith.constant\"() {value = 0 : i32} : () -> i32
%c1 = \"arith.constant\"() {value = 1 : i32} : () -> i32
%c2 = \"arith.constant\"() {value = 2 : i32} : () -> i32
%c7 = \"arith.constant\"() {value = 7 : i32} : () -> i32";

#[test]
fn carried_values_pass_from_turn_to_turn() {
    // Fibonacci numbers: 4 turns, at 0, 2, 4, 6.
    let operations = format!(
        "{COUNTS}
%f:2 = \"scf.for\"(%c0, %c7, %c2, %x0, %x1) ({{
^bb0(%n: i32, %a: vector<1xi32>, %b: vector<1xi32>):
  %sum = \"arith.addi\"(%a, %b) : (vector<1xi32>, vector<1xi32>) -> vector<1xi32>
  \"scf.yield\"(%b, %sum) : (vector<1xi32>, vector<1xi32>) -> ()
}}) : (i32, i32, i32, vector<1xi32>, vector<1xi32>) -> (vector<1xi32>, vector<1xi32>)
%ten = \"arith.constant\"() {{value = dense<10> : vector<1xi32>}} : () -> vector<1xi32>
%tens = \"arith.muli\"(%f#0, %ten) : (vector<1xi32>, vector<1xi32>) -> vector<1xi32>
%r = \"arith.addi\"(%tens, %f#1) : (vector<1xi32>, vector<1xi32>) -> vector<1xi32>"
    );
    let [x, y] = [0.0, 1.0].map(|x| array(DeviceDtype::I32, &[1], &[x]));
    assert_eq!(evaluate(&operations, &[x.clone(), y], &x).unwrap(), [35.0]);
}

#[test]
fn nested_loops_and_branches_run_what_they_should() {
    // Σ over a in 0..7, b in a..7 of (b even ? 1 : 10·a), with no turn of the last loop.
    let operations = format!(
        "{COUNTS}
%ten = \"arith.constant\"() {{value = 10 : i32}} : () -> i32
%outer = \"scf.for\"(%c0, %c7, %c1, %c0) ({{
^bb0(%a: i32, %so_far: i32):
  %inner = \"scf.for\"(%a, %c7, %c1, %so_far) ({{
  ^bb0(%b: i32, %sum: i32):
    %bit = \"arith.andi\"(%b, %c1) : (i32, i32) -> i32
    %even = \"arith.cmpi\"(%bit, %c0) {{predicate = 0 : i64}} : (i32, i32) -> i1
    %term = \"scf.if\"(%even) ({{
      \"scf.yield\"(%c1) : (i32) -> ()
    }}, {{
      %tens = \"arith.muli\"(%a, %ten) : (i32, i32) -> i32
      \"scf.yield\"(%tens) : (i32) -> ()
    }}) : (i1) -> i32
    %next = \"arith.addi\"(%sum, %term) : (i32, i32) -> i32
    \"scf.yield\"(%next) : (i32) -> ()
  }}) : (i32, i32, i32, i32) -> i32
  \"scf.yield\"(%inner) : (i32) -> ()
}}) : (i32, i32, i32, i32) -> i32
%same = \"scf.for\"(%c7, %c0, %c1, %outer) ({{
^bb0(%n: i32, %kept: i32):
  \"scf.yield\"(%c0) : (i32) -> ()
}}) : (i32, i32, i32, i32) -> i32
%r = \"vector.broadcast\"(%same) : (i32) -> vector<1xi32>"
    );
    let pairs = (0..7).flat_map(|a| (a..7).map(move |b| if b % 2 == 0 { 1 } else { 10 * a }));
    let output = array(DeviceDtype::I32, &[1], &[0.0]);
    assert_eq!(evaluate(&operations, &[], &output).unwrap(), [f64::from(pairs.sum::<i32>())]);
}

#[test]
fn a_branch_without_results_stores_or_does_not() {
    let store = "\"tpu.vector_store\"(%x0, %w1, %zero) {operandSegmentSizes = array<i32: 1, 1, 1, 0>} : \
                 (vector<1xi32>, vmem<1xi32>, index) -> ()";
    let operations = |holds: bool| {
        format!(
            "%r = \"arith.constant\"() {{value = dense<-5> : vector<1xi32>}} : () -> vector<1xi32>
%holds = \"arith.constant\"() {{value = {holds}}} : () -> i1
%twice = \"arith.addi\"(%x0, %x0) : (vector<1xi32>, vector<1xi32>) -> vector<1xi32>
\"scf.if\"(%holds) ({{
  {}
  \"scf.yield\"() : () -> ()
}}, {{
}}) : (i1) -> ()
%again = \"vector.load\"(%w0, %zero) : ( vmem<1xi32>, index) -> vector<1xi32>",
            store.replace("%x0, %w1", "%twice, %w0")
        )
        .replace("%r = ", "%unused = ")
            + "\n%r = \"arith.addi\"(%again, %unused) : (vector<1xi32>, vector<1xi32>) -> vector<1xi32>"
    };
    let x = array(DeviceDtype::I32, &[1], &[3.0]);
    assert_eq!(evaluate(&operations(true), from_ref(&x), &x).unwrap(), [1.0]);
    assert_eq!(evaluate(&operations(false), from_ref(&x), &x).unwrap(), [-2.0]);
}

/// Windows of 2 elements over arrays of f32; the blocks that the input and the output lie at are read from tables in
/// scalar memory. The body is `out = in + 1` unless another is given.
struct Tables<'a> {
    reads: &'a [i32],
    writes: &'a [i32],
    body: &'a str,
    semantics: &'a str,
}

const ARBITRARY: &str = "#tpu.dimension_semantics<arbitrary>";
const PARALLEL: &str = "#tpu.dimension_semantics<parallel>";

/// The text of a kernel that says what its one dimension is.
fn with_semantics(text: &str, semantics: &str) -> String {
    text.replace("iteration_bounds", &format!("dimension_semantics = [{semantics}], iteration_bounds"))
}

const ADD_ONE: &str = "%x = \"vector.load\"(%w0, %zero) : ( vmem<2xf32>, index) -> vector<2xf32>
%one = \"arith.constant\"() {value = dense<1.0> : vector<2xf32>} : () -> vector<2xf32>
%y = \"arith.addf\"(%x, %one) : (vector<2xf32>, vector<2xf32>) -> vector<2xf32>
\"tpu.vector_store\"(%y, %w1, %zero) {operandSegmentSizes = array<i32: 1, 1, 1, 0>} : (vector<2xf32>, vmem<2xf32>, \
                       index) -> ()";

impl Tables<'_> {
    fn run(&self, x: &[f64], outputs: usize, aliased: bool) -> Result<Vec<f64>, MosaicInterpretError> {
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

fn problem(error: Result<Vec<f64>, MosaicInterpretError>) -> String {
    error.expect_err("a run that must be refused").to_string()
}

#[test]
fn in_place_each_block_read_before_it_is_written_passes() {
    let tables = Tables { reads: &[0, 1, 2, 3], writes: &[0, 1, 2, 3], body: ADD_ONE, semantics: ARBITRARY };
    let x = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
    let expected = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];
    assert_values(&tables.run(&x, 7, true).unwrap(), &expected, "in place");
    assert_values(&tables.run(&x, 7, false).unwrap(), &expected, "apart");
}

#[test]
fn in_place_a_fetch_that_meets_a_write_back_is_refused() {
    let x = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];
    for (reads, writes, expected) in [
        // Block 0 is written after step 0 and fetched for step 1.
        (vec![1, 0], vec![0, 1], "still to come"),
        // … and for step 2, when it may not have landed.
        (vec![3, 2, 0], vec![0, 1, 2], "is under way"),
        // Block 0 stays for two steps and is written after the second.
        (vec![3, 2, 0], vec![0, 0, 1], "still to come"),
    ] {
        let tables = Tables { reads: &reads, writes: &writes, body: ADD_ONE, semantics: ARBITRARY };
        let problem = problem(tables.run(&x, 8, true));
        assert!(problem.contains(expected) && problem.contains("input 0, at grid step"), "{reads:?}: {problem}");
        tables.run(&x, 8, false).expect("arrays of their own cannot meet");
    }
}

#[test]
fn in_place_a_block_that_has_landed_is_read_as_written() {
    let tables = Tables { reads: &[3, 3, 3, 0], writes: &[0, 1, 2, 3], body: ADD_ONE, semantics: ARBITRARY };
    let found = tables.run(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 8, true).unwrap();
    assert_values(&found, &[7.0, 8.0, 7.0, 8.0, 7.0, 8.0, 8.0, 9.0], "block 3 is block 0 as step 0 left it, plus 1");
}

#[test]
fn in_place_a_block_that_stays_in_vmem_is_not_fetched_again() {
    let tables = Tables { reads: &[0, 0, 0], writes: &[0, 1, 2], body: ADD_ONE, semantics: ARBITRARY };
    let found = tables.run(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], 6, true).unwrap();
    assert_values(&found, &[1.0, 2.0, 1.0, 2.0, 1.0, 2.0], "all from the block as it was fetched");
}

#[test]
fn a_parallel_dimension_that_shares_a_block_is_refused() {
    let x = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];
    let run = |reads: &[i32], writes: &[i32], semantics: &str, aliased| {
        Tables { reads, writes, body: ADD_ONE, semantics }.run(&x, 8, aliased)
    };
    let own: (&[i32], &[i32]) = (&[0, 1, 2, 3], &[0, 1, 2, 3]);
    assert_eq!(run(own.0, own.1, PARALLEL, true).unwrap(), run(own.0, own.1, ARBITRARY, true).unwrap());
    // What is one block of an output, and one that is read after another core has written it.
    let shared: [(&[i32], &[i32], bool, &str); 2] = [
        (&[0, 1, 2, 3], &[0, 0, 1, 2], false, "output 0, at grid step [1]: stays at block [0] for another index"),
        (&[3, 3, 3, 0], &[0, 1, 2, 3], true, "input 0, at grid step [3]: block [0] shares elements with one"),
    ];
    for (reads, writes, aliased, expected) in shared {
        run(reads, writes, ARBITRARY, aliased).expect("one core runs the steps in order");
        let problem = problem(run(reads, writes, PARALLEL, aliased));
        assert!(problem.contains(expected), "{problem}");
    }
    let problem = problem(run(own.0, own.1, "#tpu.dimension_semantics<core_parallel>", false));
    assert!(problem.contains("expected parallel or arbitrary"), "{problem}");
}

#[test]
fn a_parallel_dimension_that_carries_scratch_is_refused() {
    // Each step adds its input to what scratch holds, which the first of them sets, or all of them.
    let body = |sets: &str| {
        format!(
            "%zero = \"arith.constant\"() {{value = 0 : index}} : () -> index
%x = \"vector.load\"(%w0, %zero) : ( vmem<2xf32>, index) -> vector<2xf32>
%c0 = \"arith.constant\"() {{value = 0 : i32}} : () -> i32
%first = \"arith.cmpi\"(%i0, %c0) {{predicate = 0 : i64}} : (i32, i32) -> i1
%always = \"arith.cmpi\"(%c0, %c0) {{predicate = 0 : i64}} : (i32, i32) -> i1
\"scf.if\"({sets}) ({{
  \"tpu.vector_store\"(%x, %s0, %zero) {{operandSegmentSizes = array<i32: 1, 1, 1, 0>}} : (vector<2xf32>, vmem<2xf32>, \
             index) -> ()
  \"scf.yield\"() : () -> ()
}}, {{
}}) : (i1) -> ()
%kept = \"vector.load\"(%s0, %zero) : ( vmem<2xf32>, index) -> vector<2xf32>
%y = \"arith.addf\"(%x, %kept) : (vector<2xf32>, vector<2xf32>) -> vector<2xf32>
\"tpu.vector_store\"(%y, %w1, %zero) {{operandSegmentSizes = array<i32: 1, 1, 1, 0>}} : (vector<2xf32>, vmem<2xf32>, \
             index) -> ()"
        )
    };
    let run = |sets: &str, semantics: &str| {
        let windows = &[("2xf32", "", "%i0"), ("2xf32", "", "%i0")];
        let text = Kernel { grid: &[2], prefetch: &[], windows, scratch: &["2xf32"], body: &body(sets) }.text();
        let x = array(DeviceDtype::F32, &[4], &[1.0, 2.0, 3.0, 4.0]);
        let written = run(&with_semantics(&text, semantics), vec![x], &[(DeviceDtype::F32, vec![4])], &[]);
        written.map(|written| values(&written[0]))
    };
    assert_values(&run("%first", ARBITRARY).unwrap(), &[2.0, 4.0, 4.0, 6.0], "carried from the first step");
    assert_values(&run("%always", PARALLEL).unwrap(), &[2.0, 4.0, 6.0, 8.0], "set by each step");
    let problem = problem(run("%first", PARALLEL));
    assert!(
        problem.contains("reads scratch that a step of another index along a parallel dimension wrote"),
        "{problem}"
    );
}

#[test]
fn an_output_that_comes_back_to_a_block_is_refused() {
    let tables = Tables { reads: &[0, 1, 2], writes: &[0, 1, 0], body: ADD_ONE, semantics: ARBITRARY };
    let problem = problem(tables.run(&[0.0; 6], 6, false));
    assert!(problem.starts_with("output 0, at grid step [2]: comes back to block [0]"), "{problem}");
}

#[test]
fn a_block_outside_its_array_is_refused() {
    for reads in [[0, 3], [0, -1], [0, i32::MAX]] {
        let tables = Tables { reads: &reads, writes: &[0, 1], body: ADD_ONE, semantics: ARBITRARY };
        let problem = problem(tables.run(&[0.0; 5], 4, false));
        assert!(problem.contains("input 0, at grid step [1]: block ["), "{problem}");
    }
}

#[test]
fn transforms_choose_the_blocks() {
    let tables = Tables { reads: &[2, 0, 1], writes: &[1, 2, 0], body: ADD_ONE, semantics: ARBITRARY };
    let found = tables.run(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], 6, false).unwrap();
    assert_values(&found, &[3.0, 4.0, 5.0, 6.0, 1.0, 2.0], "as the tables say");
}

#[test]
fn an_output_keeps_its_contents_while_it_stays_and_is_poison_when_it_comes() {
    // out = out + in, and out = in at step 0.
    let body = "%x = \"vector.load\"(%w0, %zero) : ( vmem<2xf32>, index) -> vector<2xf32>
%before = \"vector.load\"(%w1, %zero) : ( vmem<2xf32>, index) -> vector<2xf32>
%sum = \"arith.addf\"(%x, %before) : (vector<2xf32>, vector<2xf32>) -> vector<2xf32>
%c0 = \"arith.constant\"() {value = 0 : i32} : () -> i32
%first = \"arith.cmpi\"(%i0, %c0) {predicate = 0 : i64} : (i32, i32) -> i1
%y = \"arith.select\"(%first, %x, %sum) : (i1, vector<2xf32>, vector<2xf32>) -> vector<2xf32>
\"tpu.vector_store\"(%y, %w1, %zero) {operandSegmentSizes = array<i32: 1, 1, 1, 0>} : (vector<2xf32>, vmem<2xf32>, \
                index) -> ()";
    let tables = Tables { reads: &[0, 1, 2], writes: &[0, 0, 1], body, semantics: ARBITRARY };
    let found = tables.run(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 6, false).unwrap();
    assert_values(&found, &[4.0, 6.0, NAN, NAN, NAN, NAN], "a sum, its stale start, and what no step wrote");
}

#[test]
fn a_store_to_an_input_is_refused_where_its_window_stays() {
    let body = format!("{ADD_ONE}\n{}", ADD_ONE.lines().last().unwrap().replace("%w1", "%w0"));
    let run = |reads: &[i32]| {
        let tables = Tables { reads, writes: &[0, 1, 2, 3], body: &body, semantics: ARBITRARY };
        tables.run(&[0.0, 0.0, 5.0, 5.0], 8, false)
    };
    let found = run(&[0, 1, 0, 1]).unwrap();
    assert_values(&found, &[1.0, 1.0, 6.0, 6.0, 1.0, 1.0, 6.0, 6.0], "in HBM it is as it was");
    // Wherever the two steps are: before the store is seen, or after it.
    for (reads, step) in [([0, 0, 1, 0], 0), ([0, 1, 0, 0], 2)] {
        let problem = problem(run(&reads));
        let expected =
            format!("input 0, at grid step [{step}]: is stored to, line 9, though it does not move every step");
        assert_eq!(problem, expected);
    }
}

/// A copy of `x`, of which `window` at a time is in VMEM, under the rules of a core with `vmem_bytes`.
fn copy_on_a_core(window: [usize; 2], x: &HostArray, vmem_bytes: usize) -> Result<Vec<f64>, MosaicInterpretError> {
    let element = x.element.mlir();
    let ty = format!("{}x{}x{element}", window[0], window[1]);
    let body = format!(
        "%zero = \"arith.constant\"() {{value = 0 : index}} : () -> index
%x = \"vector.load\"(%w0, %zero, %zero) : ( vmem<{ty}>, index, index) -> vector<{ty}>
\"tpu.vector_store\"(%x, %w1, %zero, %zero) {{operandSegmentSizes = array<i32: 1, 1, 2, 0>}} : (vector<{ty}>, vmem<{ty}>, \
             index, index) -> ()"
    );
    let grid = [x.shape[0].div_ceil(window[0]), x.shape[1].div_ceil(window[1])];
    let windows = &[(ty.as_str(), "", "%i0, %i1"), (ty.as_str(), "", "%i0, %i1")];
    let text = Kernel { grid: &grid, prefetch: &[], windows, scratch: &[], body: &body }.text();
    let options = MosaicOptions { core: Some(TpuCore { vmem_bytes }), ..MosaicOptions::default() };
    let written = run_with(options, &text, vec![x.clone()], &[(x.element, x.shape.clone())], &[])?;
    Ok(values(&written[0]))
}

#[test]
fn a_core_refuses_blocks_that_are_no_whole_tiles_and_more_vmem_than_it_has() {
    let zeros = |element: DeviceDtype, shape: [usize; 2]| array(element, &shape, &vec![0.0; shape[0] * shape[1]]);
    let (wide, narrow) = (zeros(DeviceDtype::F32, [20, 200]), zeros(DeviceDtype::Bf16, [20, 200]));
    // Tiles of 8 × 128 take 4,096 bytes: two buffers of each of two windows.
    for (window, x, vmem_bytes) in [
        ([8, 128], &wide, 4 * 4096),
        ([16, 128], &narrow, 4 * 4096),
        ([20, 128], &wide, 4 * 3 * 4096),
        ([8, 200], &wide, 4 * 2 * 4096),
    ] {
        copy_on_a_core(window, x, vmem_bytes).unwrap();
        let problem = copy_on_a_core(window, x, vmem_bytes - 1).unwrap_err().to_string();
        let expected = format!("core: two buffers of each window take {vmem_bytes} bytes of VMEM");
        assert!(problem.starts_with(&expected), "{problem}");
    }
    for (window, x, expected) in [
        ([4, 128], &wide, "core: input 0: blocks of vector<4x128xf32> over [20, 200], expected whole tiles of 8 × 128"),
        ([8, 64], &wide, "core: input 0: blocks of vector<8x64xf32> over"),
        (
            [8, 128],
            &narrow,
            "core: input 0: blocks of vector<8x128xbf16> over [20, 200], expected whole tiles of 16 × 128",
        ),
    ] {
        let problem = copy_on_a_core(window, x, 1 << 20).unwrap_err().to_string();
        assert!(problem.starts_with(expected), "{problem}");
    }
}

/// Races are looked for by element. That finds those within a tile too, as long as this holds of the blocks that a core takes.
#[test]
fn whole_blocks_that_share_no_element_share_no_tile() {
    const ROWS_OF_A_TILE: usize = 8;
    for size in 1..=40 {
        let x = array(DeviceDtype::F32, &[size, 128], &vec![0.0; size * 128]);
        let taken = |extent: &usize| copy_on_a_core([*extent, 128], &x, 1 << 20).is_ok();
        let extents: Vec<usize> = (1..=48).filter(taken).collect();
        assert!(extents.contains(&size) && extents.len() >= size / ROWS_OF_A_TILE, "{size}: {extents:?}");
        let blocks = |extent: usize| {
            (0..size).step_by(extent).map(move |start| start..size.min(start + extent)).collect::<Vec<_>>()
        };
        for (a, b) in extents.iter().flat_map(|&a| extents.iter().map(move |&b| (a, b))) {
            for (a, b) in blocks(a).iter().flat_map(|a| blocks(b).into_iter().map(move |b| (a.clone(), b))) {
                let share = a.start < b.end && b.start < a.end;
                let last = |block: &Range<usize>| (block.end - 1) / ROWS_OF_A_TILE;
                let share_a_tile = a.start / ROWS_OF_A_TILE <= last(&b) && b.start / ROWS_OF_A_TILE <= last(&a);
                assert_eq!(share, share_a_tile, "{a:?} and {b:?} of {size}");
            }
        }
    }
}

#[test]
fn scratch_is_counted_in_whole_tiles() {
    let x = array(DeviceDtype::F32, &[8, 128], &[0.0; 8 * 128]);
    for (scratch, bytes) in [("2x9x130xf32", 2 * 16 * 256 * 4), ("9x130xbf16", 16 * 256 * 2), ("129xf32", 8 * 256 * 4)]
    {
        let windows = &[("8x128xf32", "", "%i0, %i0"), ("8x128xf32", "", "%i0, %i0")];
        let text = Kernel { grid: &[1], prefetch: &[], windows, scratch: &[scratch], body: "" }.text();
        let options = MosaicOptions { core: Some(TpuCore { vmem_bytes: 1 }), ..MosaicOptions::default() };
        let outputs = [(x.element, x.shape.clone())];
        let problem = run_with(options, &text, vec![x.clone()], &outputs, &[]).unwrap_err().to_string();
        assert!(problem.contains(&format!("and scratch {bytes}, expected at most 1 in all")), "{scratch}: {problem}");
    }
}

/// `out = Σ over lanes of in`, broadcast over the window, for each step of a grid over `columns`.
fn lane_sums(rows: usize, columns: usize) -> Vec<f64> {
    let body = "%zero = \"arith.constant\"() {value = 0 : index} : () -> index
%x = \"vector.load\"(%w0, %zero, %zero) : ( vmem<1x4xf32>, index, index) -> vector<1x4xf32>
%none = \"arith.constant\"() {value = dense<0.0> : vector<1xf32>} : () -> vector<1xf32>
%sums = \"vector.multi_reduction\"(%x, %none) {kind = #vector.kind<add>, reduction_dims = array<i64: 1>} : \
                (vector<1x4xf32>, vector<1xf32>) -> vector<1xf32>
%column = \"vector.shape_cast\"(%sums) : (vector<1xf32>) -> vector<1x1xf32>
%y = \"vector.broadcast\"(%column) : (vector<1x1xf32>) -> vector<1x4xf32>
\"tpu.vector_store\"(%y, %w1, %zero, %zero) {operandSegmentSizes = array<i32: 1, 1, 2, 0>, strides = array<i32>, add \
                = false} : (vector<1x4xf32>, vmem<1x4xf32>, index, index) -> ()";
    let windows = &[("1x4xf32", "", "%i0, %i1"), ("1x4xf32", "", "%i0, %i1")];
    let text = Kernel { grid: &[rows, columns.div_ceil(4)], prefetch: &[], windows, scratch: &[], body }.text();
    let x: Vec<f64> = (0..rows * columns).map(|i| i as f64).collect();
    let written = run(
        &text,
        vec![array(DeviceDtype::F32, &[rows, columns], &x)],
        &[(DeviceDtype::F32, vec![rows, columns])],
        &[],
    );
    values(&written.unwrap()[0])
}

#[test]
fn beyond_an_edge_reads_are_nan_and_writes_are_dropped() {
    // The tail's sum is NaN in its two columns, and does not spill into the next row.
    let expected = [6.0, 6.0, 6.0, 6.0, NAN, NAN, 30.0, 30.0, 30.0, 30.0, NAN, NAN];
    assert_values(&lane_sums(2, 6), &expected, "a tail of 2 of 4");
    assert_values(&lane_sums(1, 4), &[6.0; 4], "no tail");
}

#[test]
fn scratch_begins_as_poison_and_integers_have_theirs() {
    let body = "%zero = \"arith.constant\"() {value = 0 : index} : () -> index
%x = \"vector.load\"(%s0, %zero) : ( vmem<2xi32>, index) -> vector<2xi32>
\"tpu.vector_store\"(%x, %w0, %zero) {operandSegmentSizes = array<i32: 1, 1, 1, 0>} : (vector<2xi32>, vmem<2xi32>, \
                index) -> ()";
    let windows = &[("2xi32", "", "%i0")];
    let text = Kernel { grid: &[1], prefetch: &[], windows, scratch: &["2xi32"], body }.text();
    let written = run(&text, vec![], &[(DeviceDtype::I32, vec![3])], &[]).unwrap();
    assert_eq!(written[0].bytes, [0x5A; 12]);
}

#[test]
fn a_run_that_breaks_a_rule_is_refused_with_its_line() {
    let x = array(DeviceDtype::I32, &[2], &[4.0, 0.0]);
    let index = |at: i32| format!("%at = \"arith.constant\"() {{value = {at} : index}} : () -> index\n");
    for (operations, expected) in [
        (
            "%r = \"arith.divsi\"(%x0, %x0) : (vector<2xi32>, vector<2xi32>) -> vector<2xi32>".to_string(),
            "line 6: arith.divsi: a division by zero",
        ),
        (
            "%r = \"arith.shli\"(%x0, %big) : (vector<2xi32>, vector<2xi32>) -> vector<2xi32>".replace(
                "%r",
                "%big = \"arith.constant\"() {value = dense<32> : vector<2xi32>} : () -> vector<2xi32>\n%r",
            ),
            "line 7: arith.shli: a shift by more bits",
        ),
        (
            index(1) + "%r = \"vector.load\"(%w0, %at) : ( vmem<2xi32>, index) -> vector<2xi32>",
            "line 7: vector.load: a block of [2] at [1] is not within memref<2xi32, #tpu.memory_space<vmem>>, at grid \
             step [0]",
        ),
        (
            index(-1) + "%r = \"vector.load\"(%w0, %at) : ( vmem<2xi32>, index) -> vector<2xi32>",
            "line 7: vector.load: a block of [2] at [-1]",
        ),
        (
            index(2)
                + "%r = \"arith.addi\"(%x0, %x0) : (vector<2xi32>, vector<2xi32>) -> vector<2xi32>\n\
                   \"tpu.vector_store\"(%x0, %w0, %at) {operandSegmentSizes = array<i32: 1, 1, 1, 0>} : \
                   (vector<2xi32>, vmem<2xi32>, index) -> ()",
            "line 8: tpu.vector_store: a block of [2] at [2]",
        ),
        (
            "%c = \"arith.constant\"() {value = 129 : i32} : () -> i32\n%m = \"tpu.assume_multiple\"(%c) {multiple = \
             128 : i32} : (i32) -> i32\n%r = \"vector.broadcast\"(%m) : (i32) -> vector<2xi32>"
                .to_string(),
            "line 7: tpu.assume_multiple: 129 is not a multiple of 128",
        ),
        (
            "%c = \"arith.constant\"() {value = 0 : i32} : () -> i32\n\"scf.for\"(%c, %c, %c) ({\n^bb0(%i: \
             i32):\n\"scf.yield\"() : () -> ()\n}) : (i32, i32, i32) -> ()\n%r = \"vector.broadcast\"(%c) : (i32) -> \
             vector<2xi32>"
                .to_string(),
            "line 7: scf.for: a step of 0",
        ),
    ] {
        let problem = problem(evaluate(&operations, from_ref(&x), &x));
        assert!(problem.starts_with(expected), "found {problem:?}, expected {expected:?}");
    }
    let beyond = ADD_ONE.replace(
        "%x = ",
        "%at = \"arith.constant\"() {value = 2 : index} : () -> index\n%scalar = \
                                          \"memref.load\"(%p0, %at) : ( smem<2xi32>, index) -> i32\n%x = ",
    );
    let tables = Tables { reads: &[0, 1], writes: &[0, 1], body: &beyond, semantics: ARBITRARY };
    let problem = problem(tables.run(&[0.0; 4], 4, false));
    assert!(problem.starts_with("line 6: memref.load: a block of [1] at [2]"), "{problem}");
}

#[test]
fn a_run_without_end_is_given_up() {
    let loops = format!(
        "{COUNTS}\n%most = \"arith.constant\"() {{value = 2147483647 : i32}} : () -> i32\n\"scf.for\"(%c0, %most, %c1) \
         ({{\n^bb0(%n: i32):\n\"scf.yield\"() : () -> ()\n}}) : (i32, i32, i32) -> ()"
    );
    let text = Kernel { grid: &[1], prefetch: &[], windows: &[], scratch: &[], body: &loops }.text();
    let options = MosaicOptions { most_work: 1 << 16, ..MosaicOptions::default() };
    assert_eq!(run_with(options, &text, vec![], &[], &[]), Err(MosaicInterpretError::Endless { most: 1 << 16 }));
}

#[test]
fn malformed_texts_are_refused_with_their_line() {
    let x = array(DeviceDtype::I32, &[2], &[4.0, 0.0]);
    let ty = "vector<2xi32>";
    let add = format!("%r = \"arith.addi\"(%x0, %x0) : ({ty}, {ty}) -> {ty}");
    evaluate(&add, from_ref(&x), &x).expect("what is spoilt below is whole");
    for (operations, expected) in [
        (add.replace("addi", "mystery"), "line 6: arith.mystery: the operation is unknown or not supported"),
        (add.replace("addi", "addf"), "line 6: arith.addf: elements of i32, expected floats"),
        (add.replace("(%x0, %x0)", "(%x0)"), "line 6: arith.addi: 1 operands, expected 2 as in its type"),
        (add.replace("(vector<2xi32>, ", "("), "line 6: arith.addi: 2 operands, expected 1"),
        (add.replace("(%x0, %x0) : (vector<2xi32>, ", "(%x0) : ("), "line 6: arith.addi: 1 operands, expected 2"),
        (add.replace("2xi32>)", "2xf32>)"), "line 6: arith.addi: %x0 is defined as vector<2xi32> and used as"),
        (
            add.replace("-> vector<2xi32>", "-> vector<3xi32>"),
            "line 6: arith.addi: operand 0 is vector<2xi32>, expected",
        ),
        (add.replace("%x0)", "%gone)"), "line 6: arith.addi: %gone#0 is not defined here"),
        (add.replace("%r", "%x0"), "line 6: arith.addi: %x0 is defined twice"),
        (add.replace("%r", "%r:2"), "line 6: arith.addi: its type has 1 results, and not as many are named"),
        (add.replace("%r", "%r:18446744073709551615, %s:2"), "line 6: arith.addi: its type has 1 results"),
        (add.replace(" :", " {mystery = 1 : i64} :"), "line 6: arith.addi: attribute mystery is not supported"),
        (
            add.replace(" :", " {overflowFlags = #arith.overflow<nsw>} :"),
            "line 6: arith.addi: attribute overflowFlags is",
        ),
        (add.replace(" :", " {a = 1, a = 2} :"), "line 6: attribute a is given twice"),
        (add.replace("\"arith", "\"tpu.sin arith"), "line 6: tpu.sin arith.addi: the operation is unknown"),
        (add.replace("2xi32>)", "2xi32)"), "line 6: expected >, found )"),
        (add.replace(") ->", ")"), "line 6: expected -> and result types, found vector"),
        (add.replace("vector<2xi32>)", "vector<99999999999999999999xi32>)"), "line 6: expected positive extents"),
        (add.replace("vector<2xi32>)", "vector<0xi32>)"), "line 6: expected positive extents"),
        (
            add.replace("vector<2xi32>)", "vector<4294967296x4294967296xi32>)"),
            "line 6: 4294967296x4294967296xi32 is larger",
        ),
        (add.replace("vector<2xi32>)", "tensor<2xi32>)"), "line 6: type tensor is not supported"),
        (format!("// fine\n{add} ?"), "line 7: expected the quoted name of an operation, found ?"),
        (format!("{add}\n\"arith.constant"), "line 7: expected a string without escapes that ends on its line"),
        (format!("{add}\n^bb1:"), "line 7: expected the region's end"),
        (
            format!("{add}\n%c = \"arith.constant\"() {{value = 1 : f32}} : () -> f32"),
            "line 7: arith.constant: 1 is not a f32",
        ),
        (
            format!("{add}\n%c = \"arith.constant\"() {{value = dense<0xFF80> : vector<2xf32>}} : () -> vector<2xf32>"),
            "line 7: arith.constant: 0xFF80 is not a f32",
        ),
        (
            format!("{add}\n%c = \"arith.constant\"() {{value = 2147483648 : i32}} : () -> i32"),
            "line 7: arith.constant: 2147483648 is not a i32",
        ),
        (
            format!(
                "{add}\n%c = \"arith.constant\"() {{value = dense<0> : vector<268435456xi32>}} : () -> vector<268435456xi32>"
            ),
            "line 7: arith.constant: the module's values have more than",
        ),
    ] {
        let problem = evaluate(&operations, from_ref(&x), &x).expect_err(&operations).to_string();
        assert!(problem.starts_with(expected), "found {problem:?}, expected {expected:?}");
    }
}

#[test]
fn a_name_of_a_region_is_unknown_after_it() {
    let operations = format!(
        "{COUNTS}\n\"scf.for\"(%c0, %c7, %c1) ({{\n^bb0(%n: i32):\n%inside = \"arith.addi\"(%n, %c1) : (i32, i32) -> \
         i32\n\"scf.yield\"() : () -> ()\n}}) : (i32, i32, i32) -> ()\n%r = \"vector.broadcast\"(%inside) : (i32) -> \
         vector<2xi32>"
    );
    let problem = problem(evaluate(&operations, &[], &array(DeviceDtype::I32, &[2], &[0.0; 2])));
    assert_eq!(problem, "line 14: vector.broadcast: %inside#0 is not defined here");
}

#[test]
fn deep_nesting_is_refused() {
    for (open, expected) in [("[", "nesting"), ("{a = ", "nesting")] {
        let operations = format!("\"arith.constant\"() {{value = {}", open.repeat(100_000));
        let problem = problem(evaluate(&operations, &[], &array(DeviceDtype::I32, &[2], &[0.0; 2])));
        assert!(problem.contains(expected), "{problem}");
    }
    let regions = "\"scf.if\"(%c) ({\n".repeat(100_000);
    assert!(problem(evaluate(&regions, &[], &array(DeviceDtype::I32, &[2], &[0.0; 2]))).contains("nesting"));
}

#[test]
fn arrays_that_the_module_does_not_take_are_refused() {
    let windows = &[("2xf32", "", "%i0"), ("2xf32", "", "%i0")];
    let body = ADD_ONE.replace("%x =", "%zero = \"arith.constant\"() {value = 0 : index} : () -> index\n%x =");
    let text = Kernel { grid: &[1], prefetch: &[], windows, scratch: &[], body: &body }.text();
    let good = array(DeviceDtype::F32, &[2], &[1.0, 2.0]);
    let output = || vec![(DeviceDtype::F32, vec![2])];
    run(&text, vec![good.clone()], &output(), &[(0, 0)]).unwrap();
    let short = HostArray { bytes: vec![0; 7], ..good.clone() };
    let huge = HostArray { shape: vec![usize::MAX, 2], ..good.clone() };
    let square = array(DeviceDtype::F32, &[1, 2], &[1.0, 2.0]);
    for (operands, outputs, aliases, expected) in [
        (vec![], output(), vec![], "0 operands and 1 outputs, expected 0 arrays for scalar memory and 2 inputs"),
        (vec![short], output(), vec![], "operand 0 has 7 bytes, expected 8"),
        (vec![huge], output(), vec![], "operand 0 of [18446744073709551615, 2] is larger"),
        (vec![square], output(), vec![], "an array of vector<1x2xf32> under a window of vector<2xf32>"),
        (vec![array(DeviceDtype::Bf16, &[2], &[0.0; 2])], output(), vec![], "operand 0 holds bf16, expected f32"),
        (vec![good.clone()], output(), vec![(1, 0)], "operand 1 cannot be overwritten by output 0"),
        (vec![good.clone()], output(), vec![(0, 0), (0, 0)], "operand 0 cannot be overwritten by output 0"),
        (
            vec![good.clone()],
            vec![(DeviceDtype::F32, vec![3])],
            vec![(0, 0)],
            "output 0 is vector<3xf32> and overwrites",
        ),
    ] {
        let problem = run(&text, operands, &outputs, &aliases).unwrap_err().to_string();
        assert!(problem.starts_with(expected), "found {problem:?}, expected {expected:?}");
    }
}
