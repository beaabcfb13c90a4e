//! Operations compute what they are named for.

use super::*;
use std::slice::from_ref;

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
fn branch_without_results_stores_or_does_not() {
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
