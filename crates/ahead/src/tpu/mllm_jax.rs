//! What a v6e measured: the record that bounds are put beside.
//!
//! Recorded by the seed project (MLLM-JAX) on `v6e:2x4` with JAX 0.9.0 and libtpu 0.0.34, bf16 logits, eight
//! data-parallel devices; the shape is what one device holds. Its baseline is `log_softmax` and autodiff, with an LM head
//! the head's product before it; not the program that `xla` or `xla-lm-head` compiles here, so a ratio says how far a
//! bound lies from a careful user's time, no more.

use super::target::TpuTarget;
use assay_core::problem::{Dtype, HeadShape, ProblemShape, Shape};
use assay_schema::compile as schema;

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MllmJaxMeasurement {
    /// What ran.
    pub program: &'static str,
    /// What each device held.
    pub shape: ProblemShape,
    /// Least and most milliseconds a step.
    pub step_ms: (f64, f64),
    /// `peak_bytes_in_use` of the process, which holds the step before's gradient too.
    pub peak_bytes_in_use: Option<u64>,
    /// `peak_bytes_reserved`: scratch.
    pub peak_bytes_reserved: Option<u64>,
}

/// The seed project's baseline.
pub const BASELINE: &str = "log_softmax and autodiff";
/// The seed project's Pallas kernels.
pub const PALLAS_KERNEL: &str = "the seed's Pallas kernels";

const fn shape(batch: usize, tokens: usize, vocab: usize) -> ProblemShape {
    ProblemShape::Logits(Shape { batch, tokens, vocab })
}

const HEAD: ProblemShape = ProblemShape::Head(HeadShape { batch: 1, tokens: 8192, hidden: 4096, vocab: 151_936 });

/// Every measurement there is.
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
    // Half the tokens in twice the time: so it stands in the record.
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

/// The record of `program` at this shape and dtype on this target, if there is one.
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
    /// `predicted / recorded`, the least of it; a lower bound that holds is at most 1.
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
    fn a_record_is_of_its_target_shape_and_dtype_only() {
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
