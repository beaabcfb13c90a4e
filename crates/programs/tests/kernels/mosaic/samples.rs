//! Kernels as JAX lowers them for a TPU, run by the interpreter of Mosaic text.

use std::fs;

use assay_core::device_dtype::DeviceDtype;
use assay_mosaic_interpreter::{HostArray, MosaicInterpretError, run};
use half::bf16;

/// Rows of a window.
const ROWS: usize = 16;
/// Extents of the sample's arrays: none is a multiple of its window's.
const SHAPE: [usize; 3] = [2, 33, 1000];

fn fixture(name: &str) -> String {
    fs::read_to_string(format!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/tpu/{}"), name)).unwrap()
}

fn array(element: DeviceDtype, shape: &[usize], bytes: impl IntoIterator<Item = impl AsRef<[u8]>>) -> HostArray {
    let bytes = bytes.into_iter().flat_map(|bytes| bytes.as_ref().to_vec()).collect();
    HostArray { element, shape: shape.to_vec(), bytes }
}

fn f32s(array: &HostArray) -> Vec<f32> {
    array.bytes.chunks(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect()
}

/// What the sample takes: prefetched ids and numbers, then logits and one row of eight numbers a token.
struct Sample {
    ids: Vec<i32>,
    numbers: [f32; 4],
    x: Vec<f32>,
    token: Vec<f32>,
}

impl Sample {
    fn new() -> Self {
        let [blocks, rows, columns] = SHAPE;
        let tokens = blocks * rows;
        Self {
            ids: (0..tokens).map(|i| (i * 331 % columns) as i32).collect(),
            numbers: [9.0, 0.75, 9.0, 9.0],
            x: (0..tokens * columns).map(|i| bf16::from_f32((i * 7919 % 1009) as f32 / 128.0 - 3.5).to_f32()).collect(),
            token: (0..tokens * 8).map(|i| (i % 13) as f32 - 6.0).collect(),
        }
    }

    fn operands(&self) -> Vec<HostArray> {
        let [blocks, rows, _] = SHAPE;
        vec![
            array(DeviceDtype::I32, &[66], self.ids.iter().map(|x| x.to_le_bytes())),
            array(DeviceDtype::F32, &[4], self.numbers.map(f32::to_le_bytes)),
            array(DeviceDtype::Bf16, &SHAPE, self.x.iter().map(|&x| bf16::from_f32(x).to_le_bytes())),
            array(DeviceDtype::F32, &[blocks, rows, 8], self.token.iter().map(|x| x.to_le_bytes())),
        ]
    }

    /// `Σ 2^(x·numbers[1])` over columns `lane + 128·c` of the first 768, for each lane.
    fn lane_sums(&self, row: usize) -> Vec<f32> {
        let power = |column: usize| (self.x[row * SHAPE[2] + column] * self.numbers[1]).exp2();
        (0..128).map(|lane| (0..6).map(|c| power(lane + 128 * c)).fold(0.0, |sum, x| sum + x)).collect()
    }
}

fn run_sample(text: &str, operands: Vec<HostArray>) -> Result<Vec<HostArray>, MosaicInterpretError> {
    let [blocks, rows, _] = SHAPE;
    run(text, operands, &[(DeviceDtype::Bf16, SHAPE.to_vec()), (DeviceDtype::F32, vec![blocks, rows, 8])], &[(2, 0)])
}

#[test]
fn sample_computes_what_its_source_says() {
    let sample = Sample::new();
    let written = run_sample(&fixture("pallas_sample.mlir"), sample.operands()).unwrap();
    let stats = f32s(&written[1]);
    let [blocks, rows, columns] = SHAPE;
    for block in 0..blocks {
        for row in 0..rows {
            let token = block * rows + row;
            let sums = sample.lane_sums(token);

            // Zeros, but for the lanes' sums at the grid's last step, which has the rows beyond the second window.
            let out = &written[0].bytes[token * columns * 2..][..columns * 2];
            let out: Vec<f32> =
                out.chunks(2).map(|word| bf16::from_le_bytes(word.try_into().unwrap()).to_f32()).collect();
            let tail = row >= 2 * ROWS;
            let expected = |lane: usize| if tail && lane < 128 { bf16::from_f32(sums[lane]).to_f32() } else { 0.0 };
            assert!(out.iter().enumerate().all(|(lane, &x)| x == expected(lane)), "row {row} of {block}: {out:?}");

            // The maximum is taken before a chosen column is zeroed.
            let total: f32 = sums.iter().sum();
            let largest = sample.x[token * columns..][..128].iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let scaled = total * sample.token[token * 8 + 1] + largest.ln();
            for (lane, &found) in stats[token * 8..][..8].iter().enumerate() {
                let expected = if lane == 2 { scaled } else { 0.0 };
                assert!((found - expected).abs() <= 1e-5 * expected.abs(), "row {row} of {block}: {found}, {expected}");
            }
        }
    }
}

#[test]
fn transform_that_is_wrong_gives_wrong_numbers() {
    let text = fixture("pallas_sample.mlir");
    let right = run_sample(&text, Sample::new().operands()).unwrap();
    // The tokens' window, at block [0, i, 0] at every step.
    let returned = r#""stable_mosaic.func.return"(%arg8, %arg9, %4)"#;
    assert_eq!(text.matches(returned).count(), 1, "only one transform has these names");
    let other = text.replace(returned, r#""stable_mosaic.func.return"(%4, %arg9, %4)"#);
    let wrong = run_sample(&other, Sample::new().operands()).unwrap();
    let row = |outputs: &[HostArray], block: usize| outputs[1].bytes[block * 33 * 32..][..32].to_vec();
    assert_eq!(row(&wrong, 0), row(&right, 0));
    assert_ne!(row(&wrong, 1), row(&right, 1));
}

#[test]
fn sample_edges_and_scratch_agree_with_jaxs_interpreter() {
    let x = (0..12).flat_map(|row| (0..200).map(move |column| f32::from((row * 7 + column * 3) % 11i16 - 5)));
    let y = (0..12).flat_map(|row| (0..128).map(move |column| f32::from((row * 5 + column) % 9i16 - 4) * 0.5));
    let operands = vec![
        array(DeviceDtype::Bf16, &[12, 200], x.map(|x| bf16::from_f32(x).to_le_bytes())),
        array(DeviceDtype::F32, &[12, 128], y.map(f32::to_le_bytes)),
    ];
    let written = run(&fixture("pallas_carried.mlir"), operands, &[(DeviceDtype::F32, vec![12, 200])], &[]).unwrap();
    let expected = array(
        DeviceDtype::F32,
        &[12, 200],
        [fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/tpu/pallas_carried.f32")).unwrap()],
    );
    let (found, expected) = (f32s(&written[0]), f32s(&expected));
    assert_eq!(found.len(), expected.len());
    // Every number is a small multiple of 1/8, so that all sums are exact; maxima over rows beyond the edge are NaN.
    for (i, (x, y)) in found.iter().zip(&expected).enumerate() {
        assert!(x == y || (x.is_nan() && y.is_nan()), "row {}, column {}: {x}, expected {y}", i / 200, i % 200);
    }
    assert!(expected.iter().any(|x| x.is_nan()));
}

#[test]
fn text_that_is_spoilt_never_panics() {
    let whole = fixture("pallas_carried.mlir");
    let zeros = |element: DeviceDtype, shape: [usize; 2]| HostArray {
        element,
        shape: shape.to_vec(),
        bytes: vec![0; shape[0] * shape[1] * element.size()],
    };
    let run = |text: &str| {
        let operands = vec![zeros(DeviceDtype::Bf16, [12, 200]), zeros(DeviceDtype::F32, [12, 128])];
        run(text, operands, &[(DeviceDtype::F32, vec![12, 200])], &[])
    };
    run(&whole).unwrap();
    for end in (0..whole.trim_end().len()).step_by(7) {
        assert!(run(&whole[..end]).is_err(), "the first {end} bytes");
    }
    // One character replaced by another of the text, at places that a multiplicative walk scatters.
    for i in 0..1500 {
        let (at, from) = (i * 7919 % whole.len(), i * 104_729 % whole.len());
        let text = format!("{}{}{}", &whole[..at], &whole[from..=from], &whole[at + 1..]);
        let _ = run(&text);
    }
}
