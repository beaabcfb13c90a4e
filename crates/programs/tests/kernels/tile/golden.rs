//! The text of one small kernel, both ways, as it stands in `fixtures/tpu/golden.*.mlir`. `ASSAY_BLESS=1` writes it anew.

use std::{env, fs};

use assay_core::device_dtype::DeviceDtype;
use assay_tile::{Fold, TileBuilder, TileColumn, TileKernel, TileMachine, TileType, Window, mosaic, stablehlo, xla};

const MACHINE: TileMachine = TileMachine::tpu(120 << 20, true);

/// Rows of logits, in place: `2^((x − m)·scale)` of bf16, the maximum `m` over windows kept in scratch, and for the last
/// window the sum of the lanes below a bound. It means nothing and has one of everything.
fn kernel() -> TileKernel {
    let mut on = TileBuilder::new("golden", &[2, 2], MACHINE);
    let scale = on.scalars(DeviceDtype::F32, 1);
    let window = Window { block: vec![1, 16, 384], along: vec![Some(0), None, Some(1)] };
    let logits = on.input(DeviceDtype::Bf16, &[2, 9, 700], window);
    let exps = on.output_over(logits);
    let window = Window { block: vec![1, 16, 1], along: vec![Some(0), None, None] };
    let sums = on.output(DeviceDtype::F32, &[2, 9, 1], window);
    let max = on.scratch(DeviceDtype::F32, 16, 1);

    let block = on.grid_index(1);
    let zero = on.integer(0);
    let first = on.equal(block, zero);
    on.when(first, |on| {
        let lowest = on.constant(f64::NEG_INFINITY, TileType::tile(DeviceDtype::F32, 16, 1));
        on.store(max, TileColumn::Static(0), lowest);
    });
    let factor = on.load_scalar(scale, zero);
    let none = on.constant(0.0, TileType::tile(DeviceDtype::F32, 16, 128));
    let total = on.for_loop(3, &[none], |on, trip, carried| {
        let lanes = on.integer(128);
        let column = on.mul(trip, lanes);
        let x = on.load(logits, TileColumn::Dynamic(column), 128);
        let x = on.convert(x, DeviceDtype::F32);
        let highest = on.fold_lanes(Fold::Max, x);
        let before = on.load(max, TileColumn::Static(0), 1);
        let highest = on.max(before, highest);
        on.store(max, TileColumn::Static(0), highest);
        let gap = on.sub(x, highest);
        let exponent = on.mul(gap, factor);
        let exp = on.exp2(exponent);
        let stored = on.convert(exp, DeviceDtype::Bf16);
        on.store(exps, TileColumn::Dynamic(column), stored);
        vec![on.add(carried[0], exp)]
    });
    let one = on.integer(1);
    let last = on.equal(block, one);
    on.when(last, |on| {
        let lane = on.iota(1, 16, 128);
        let bound = on.integer(100);
        let low = on.less(lane, bound);
        let zero = on.number(0.0);
        let kept = on.select(low, total[0], zero);
        let sum = on.fold_lanes(Fold::Add, kept);
        on.store(sums, TileColumn::Static(0), sum);
    });
    on.finish()
}

fn expect(name: &str, text: &str) {
    let path = format!("{}/../../fixtures/tpu/golden.{name}.mlir", env!("CARGO_MANIFEST_DIR"));
    if env::var_os("ASSAY_BLESS").is_some() {
        fs::write(&path, text).unwrap();
    }
    let golden = fs::read_to_string(&path).unwrap();
    for (number, (line, expected)) in text.lines().zip(golden.lines()).enumerate() {
        assert_eq!(line, expected, "{path}:{}", number + 1);
    }
    assert_eq!(text.lines().count(), golden.lines().count(), "{path}");
}

#[test]
fn mosaic_text_of_a_small_kernel_is_as_pinned() {
    expect("mosaic", &mosaic::text(&kernel()));
}

#[test]
fn stablehlo_text_of_a_small_kernel_is_as_pinned() {
    let kernel = kernel();
    let mut builder = stablehlo::HloBuilder::default();
    let types: Vec<_> = kernel.operands().map(|(element, shape)| stablehlo::HloType::new(element, &shape)).collect();
    let operands: Vec<_> = types.into_iter().map(|ty| builder.parameter(ty, None)).collect();
    let outputs = xla::inline(&kernel, &mut builder, &operands);
    expect("stablehlo", &builder.finish(&outputs));
}

#[test]
fn bytes_are_counted_in_whole_registers() {
    let kernel = kernel();
    // Two windows of 16 × 384 bf16 twice, a window of 16 × 1 f32 twice and the same once as scratch.
    assert_eq!(kernel.vmem_bytes(), 4 * 16 * 384 * 2 + 3 * 16 * 128 * 4);
    assert_eq!(kernel.hbm_bytes(), 2 * (2 * 9 * 700 * 2) + 2 * 9 * 4);
    assert_eq!(kernel.transcendentals(), 4 * 3 * 16 * 128);
}

#[test]
fn flops_of_a_fold_are_one_less_than_its_columns() {
    // A trip: the first column, a maximum of 128 columns in 16 rows, the larger of two, and a difference, a product and a sum.
    let trip = 1 + 16 * 127 + 16 + 3 * 16 * 128;
    // The last step: a comparison, a selection, and a sum of 128 columns in 16 rows. Two scalars say which step it is.
    let last = 2 * 16 * 128 + 16 * 127;
    assert_eq!(kernel().flops(), 4 * (3 * trip + last + 2));
}

#[test]
#[should_panic(expected = "Add: operands of different types")]
fn operands_of_different_elements_are_refused() {
    let mut on = TileBuilder::new("wrong", &[1], MACHINE);
    let (x, y) = (on.number(1.0), on.integer(1));
    on.add(x, y);
}

#[test]
#[should_panic(expected = "columns 300 + 128 of 384")]
fn load_beyond_the_window_is_refused() {
    let mut on = TileBuilder::new("wrong", &[1], MACHINE);
    let memory = on.scratch(DeviceDtype::F32, 8, 384);
    on.load(memory, TileColumn::Static(300), 128);
}

#[test]
#[should_panic(expected = "columns from a dynamic one")]
fn load_of_part_of_a_register_by_index_is_refused() {
    let mut on = TileBuilder::new("wrong", &[1], MACHINE);
    let memory = on.scratch(DeviceDtype::F32, 8, 384);
    let column = on.integer(0);
    on.load(memory, TileColumn::Dynamic(column), 64);
}

#[test]
#[should_panic(expected = "does not reach all of [9, 700]")]
fn window_that_leaves_part_of_its_array_unseen_is_refused() {
    let mut on = TileBuilder::new("wrong", &[1], MACHINE);
    on.input(DeviceDtype::F32, &[9, 700], Window { block: vec![16, 384], along: vec![None, Some(0)] });
}

#[test]
#[should_panic(expected = "for: what is carried changes its type")]
fn loop_that_changes_the_type_of_what_it_carries_is_refused() {
    let mut on = TileBuilder::new("wrong", &[1], MACHINE);
    let start = on.number(0.0);
    on.for_loop(2, &[start], |_, trip, _| vec![trip]);
}
