//! Texts and runs that must be refused, with the line that is wrong.

use super::*;
use assay_mosaic_interpreter::{MosaicOptions, run_with};
use std::slice::from_ref;

#[test]
fn run_that_breaks_a_rule_is_refused_with_its_line() {
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
fn run_without_end_is_given_up() {
    let loops = format!(
        "{COUNTS}\n%most = \"arith.constant\"() {{value = 2147483647 : i32}} : () -> i32\n\"scf.for\"(%c0, %most, %c1) \
         ({{\n^bb0(%n: i32):\n\"scf.yield\"() : () -> ()\n}}) : (i32, i32, i32) -> ()"
    );
    let text = Kernel { grid: &[1], prefetch: &[], windows: &[], scratch: &[], body: &loops }.text();
    let options = MosaicOptions { most_work: 1 << 16, ..MosaicOptions::default() };
    assert_eq!(run_with(options, &text, vec![], &[], &[]), Err(MosaicInterpretError::Endless { most: 1 << 16 }));
}

#[test]
fn text_that_is_malformed_is_refused_with_its_line() {
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
fn region_names_are_unknown_after_it() {
    let operations = format!(
        "{COUNTS}\n\"scf.for\"(%c0, %c7, %c1) ({{\n^bb0(%n: i32):\n%inside = \"arith.addi\"(%n, %c1) : (i32, i32) -> \
         i32\n\"scf.yield\"() : () -> ()\n}}) : (i32, i32, i32) -> ()\n%r = \"vector.broadcast\"(%inside) : (i32) -> \
         vector<2xi32>"
    );
    let problem = problem(evaluate(&operations, &[], &array(DeviceDtype::I32, &[2], &[0.0; 2])));
    assert_eq!(problem, "line 14: vector.broadcast: %inside#0 is not defined here");
}

#[test]
fn nesting_that_is_deep_is_refused() {
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
