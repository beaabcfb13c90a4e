//! StableHLO text.

use assay_core::device_dtype::DeviceDtype;
use assay_tile::stablehlo::{Fold, HloBuilder, HloType};

fn f32s(shape: &[usize]) -> HloType {
    HloType::new(DeviceDtype::F32, shape)
}

#[test]
fn stablehlo_of_a_small_program_reads_as_written() {
    let mut builder = HloBuilder::default();
    let x = builder.parameter(f32s(&[2, 3]), Some(0));
    let max = builder.reduce(Fold::Max, x, &[1]);
    let max = builder.broadcast(max, &[0], &[2, 3]);
    let gap = builder.subtract(x, max);
    let text = builder.finish(&[gap]);
    assert_eq!(
        text,
        "module @grpo {
  func.func public @main(%0: tensor<2x3xf32> {tf.aliasing_output = 0 : i32}) -> (tensor<2x3xf32>) {
    %1 = stablehlo.constant dense<0xFF800000> : tensor<f32>
    %2 = stablehlo.reduce(%0 init: %1) applies stablehlo.maximum across dimensions = [1] : (tensor<2x3xf32>, tensor<f32>) -> tensor<2xf32>
    %3 = stablehlo.broadcast_in_dim %2, dims = [0] : (tensor<2xf32>) -> tensor<2x3xf32>
    %4 = stablehlo.subtract %0, %3 : tensor<2x3xf32>
    return %4 : tensor<2x3xf32>
  }
}
"
    );
}

#[test]
fn constants_are_written_as_mlir_reads_them() {
    let mut builder = HloBuilder::default();
    for (x, text) in [(0.0, "0.0"), (-1.5, "-1.5"), (1e-30, "1.0e-30"), (f64::INFINITY, "0x7F800000")] {
        let constant = builder.constant(x, f32s(&[]));
        let program = std::mem::take(&mut builder).finish(&[constant]);
        assert!(program.contains(&format!("dense<{text}> : tensor<f32>\n")), "{program}");
    }
}

#[test]
fn collective_of_a_group_of_one_is_left_out() {
    let mut builder = HloBuilder::default();
    let x = builder.parameter(f32s(&[4]), None);
    assert_eq!(builder.all_reduce(Fold::Add, x, &[vec![0], vec![1]]), x);
    assert_ne!(builder.all_reduce(Fold::Add, x, &[vec![0, 1]]), x);
}

#[test]
fn collective_gathers_multiply_and_scatters_divide_an_extent() {
    let mut builder = HloBuilder::default();
    let x = builder.parameter(f32s(&[6, 4]), None);
    let pairs = [vec![0, 2], vec![1, 3]];
    let whole = builder.all_gather(x, 0, &pairs);
    assert_eq!(*builder.type_of(whole), f32s(&[12, 4]));
    let part = builder.reduce_scatter(x, 1, &pairs);
    assert_eq!(*builder.type_of(part), f32s(&[6, 2]));
    let alone = [vec![0], vec![1]];
    assert_eq!([builder.all_gather(x, 0, &alone), builder.reduce_scatter(x, 0, &alone)], [x, x]);
    let program = builder.finish(&[whole, part]);
    for op in [
        r#""stablehlo.all_gather"(%0) <{all_gather_dim = 0 : i64, replica_groups = dense<[[0, 2], [1, 3]]> : tensor<2x2xi64>}>"#,
        r#""stablehlo.reduce_scatter"(%0) <{scatter_dimension = 1 : i64, replica_groups = dense<[[0, 2], [1, 3]]> : tensor<2x2xi64>}>"#,
    ] {
        assert!(program.contains(op), "{program}");
    }
}

#[test]
#[should_panic(expected = "reduce_scatter: 4 parts of dimension 0 of tensor<6x4xf32>")]
fn collective_scatter_of_an_uneven_extent_is_refused() {
    let mut builder = HloBuilder::default();
    let x = builder.parameter(f32s(&[6, 4]), None);
    builder.reduce_scatter(x, 0, &[vec![0, 1, 2, 3]]);
}

#[test]
fn product_sums_in_f32_and_keeps_the_other_axes() {
    let mut builder = HloBuilder::default();
    let bf16s = |shape: &[usize]| HloType::new(DeviceDtype::Bf16, shape);
    let (x, w) = (builder.parameter(bf16s(&[5, 2]), None), builder.parameter(bf16s(&[3, 2]), None));
    let y = builder.dot(x, w, [1, 1], DeviceDtype::F32);
    assert_eq!(*builder.type_of(y), f32s(&[5, 3]));
    let program = builder.finish(&[y]);
    assert!(program.contains("contracting_dims = [1] x [1], precision = [DEFAULT, DEFAULT]"), "{program}");
}

#[test]
#[should_panic(expected = "dot: axes 1 of tensor<5x2xf32> and 0 of tensor<3x2xf32>")]
fn product_over_axes_of_different_extents_is_refused() {
    let mut builder = HloBuilder::default();
    let (x, w) = (builder.parameter(f32s(&[5, 2]), None), builder.parameter(f32s(&[3, 2]), None));
    builder.dot(x, w, [1, 0], DeviceDtype::F32);
}

#[test]
#[should_panic(expected = "add: operands of different types")]
fn operands_of_different_shapes_are_refused() {
    let mut builder = HloBuilder::default();
    let (x, y) = (builder.parameter(f32s(&[2, 3]), None), builder.parameter(f32s(&[3, 2]), None));
    builder.add(x, y);
}

#[test]
#[should_panic(expected = "exponential: got tensor<2xi32>, expected a float type")]
fn operations_of_real_numbers_refuse_integers() {
    let mut builder = HloBuilder::default();
    let x = builder.parameter(HloType::new(DeviceDtype::I32, &[2]), None);
    builder.exponential(x);
}

#[test]
#[should_panic(expected = "broadcast: tensor<3xf32> to [3, 2] along [1]")]
fn broadcast_along_the_wrong_dimension_is_refused() {
    let mut builder = HloBuilder::default();
    let x = builder.parameter(f32s(&[3]), None);
    builder.broadcast(x, &[1], &[3, 2]);
}

#[test]
#[should_panic(expected = "output 0 over a parameter of another type")]
fn output_over_a_parameter_of_another_type_is_refused() {
    let mut builder = HloBuilder::default();
    let x = builder.parameter(HloType::new(DeviceDtype::Bf16, &[2]), Some(0));
    let wide = builder.convert(x, DeviceDtype::F32);
    builder.finish(&[wide]);
}
