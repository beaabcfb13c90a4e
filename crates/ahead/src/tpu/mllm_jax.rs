//! Measurements of MLLM-JAX on a v6e, to compare bounds with.
//!
//! MLLM-JAX recorded them on `v6e:2x4` with JAX 0.9.0 and libtpu 0.0.34, bf16 logits, eight data-parallel devices; the shape is that
//! of one device. Its baseline is `log_softmax` and autodiff, after the product with the LM head if there is one. That is not the
//! program that `xla` or `xla-lm-head` compiles here, so a ratio only tells how far a bound is from a careful user's time.

use super::target::TpuTarget;
use assay_core::problem::{Dtype, HeadShape, ProblemShape, Shape};
use assay_schema::compile as schema;

/// A time that MLLM-JAX measured for one program at one shape.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MllmJaxMeasurement {
    /// The program that ran, [`BASELINE`] or [`PALLAS_KERNEL`].
    pub program: &'static str,
    /// The extents of the arrays on each device.
    pub shape: ProblemShape,
    /// The least and the most milliseconds of a step.
    pub step_ms: (f64, f64),
    /// `peak_bytes_in_use` of the process, which includes the previous step's gradient.
    pub peak_bytes_in_use: Option<u64>,
    /// `peak_bytes_reserved` of the process: scratch memory.
    pub peak_bytes_reserved: Option<u64>,
}

/// MLLM-JAX's baseline: `log_softmax` and autodiff.
pub const BASELINE: &str = "log_softmax and autodiff";
/// MLLM-JAX's Pallas kernels, which compute the loss in one call.
pub const PALLAS_KERNEL: &str = "MLLM-JAX's Pallas kernels";

const fn shape(batch: usize, tokens: usize, vocab: usize) -> ProblemShape {
    ProblemShape::Logits(Shape { batch, tokens, vocab })
}

const HEAD: ProblemShape = ProblemShape::Head(HeadShape { batch: 1, tokens: 8192, hidden: 4096, vocab: 151_936 });

/// All measurements of the record, in its order.
pub const MEASUREMENTS: [MllmJaxMeasurement; 6] = [
    MllmJaxMeasurement {
        program: BASELINE,
        shape: shape(1, 4096, 151_936),
        step_ms: (9.01, 9.01),
        peak_bytes_in_use: Some(6_226_795_008),
        peak_bytes_reserved: None,
    },
    MllmJaxMeasurement {
        program: PALLAS_KERNEL,
        shape: shape(1, 4096, 151_936),
        step_ms: (52.9, 55.2),
        peak_bytes_in_use: Some(6_226_977_280),
        peak_bytes_reserved: None,
    },
    // Half the tokens take twice the time in the record: it is quoted unchanged.
    MllmJaxMeasurement {
        program: BASELINE,
        shape: shape(1, 2048, 151_643),
        step_ms: (20.40, 20.40),
        peak_bytes_in_use: None,
        peak_bytes_reserved: Some(2_485_075_968),
    },
    MllmJaxMeasurement {
        program: BASELINE,
        shape: shape(4, 1024, 151_643),
        step_ms: (8.73, 8.73),
        peak_bytes_in_use: None,
        peak_bytes_reserved: Some(2_484_649_984),
    },
    MllmJaxMeasurement {
        program: BASELINE,
        shape: HEAD,
        step_ms: (63.7, 63.7),
        peak_bytes_in_use: None,
        peak_bytes_reserved: None,
    },
    MllmJaxMeasurement {
        program: PALLAS_KERNEL,
        shape: HEAD,
        step_ms: (128.8, 155.8),
        peak_bytes_in_use: None,
        peak_bytes_reserved: None,
    },
];

/// Returns the measurement of `program` at this shape and dtype on this target; `None` without one.
pub fn find(
    program: &str,
    target: &TpuTarget,
    shape: ProblemShape,
    dtype: Dtype,
) -> Option<&'static MllmJaxMeasurement> {
    let there = target.to_string() == "v6e:2x4" && dtype == Dtype::Bf16;
    MEASUREMENTS.iter().find(|recorded| there && recorded.program == program && recorded.shape == shape)
}

impl MllmJaxMeasurement {
    /// Returns `predicted / recorded` for the shortest step; a valid lower bound gives at most 1.
    pub fn ratio(&self, predicted_ms: f64) -> f64 {
        predicted_ms / self.step_ms.0
    }
}

impl From<&MllmJaxMeasurement> for schema::SeedMeasurement {
    fn from(recorded: &MllmJaxMeasurement) -> Self {
        let &MllmJaxMeasurement { program, shape, step_ms: (least, most), peak_bytes_in_use, peak_bytes_reserved } =
            recorded;
        let (program, shape) = (program.into(), shape.to_string());
        Self { program, shape, step_ms: [least, most], peak_bytes_in_use, peak_bytes_reserved }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mllm_jax_record_is_found_by_target_shape_and_dtype() {
        let v6e = TpuTarget::parse("v6e:2x4").unwrap();
        let baseline = |target, shape, dtype| find(BASELINE, target, shape, dtype);
        let recorded = baseline(&v6e, shape(1, 4096, 151_936), Dtype::Bf16).unwrap();
        assert_eq!(recorded.ratio(4.505), 0.5);
        assert!(baseline(&v6e, shape(1, 4096, 151_936), Dtype::F32).is_none());
        assert!(baseline(&v6e, shape(2, 4096, 151_936), Dtype::Bf16).is_none());
        assert!(baseline(&v6e, shape(1, 8192, 151_936), Dtype::Bf16).is_none());
        assert!(baseline(&TpuTarget::parse("v5p").unwrap(), shape(1, 4096, 151_936), Dtype::Bf16).is_none());
        assert_eq!(find(PALLAS_KERNEL, &v6e, HEAD, Dtype::Bf16).unwrap().step_ms, (128.8, 155.8));
    }
}
