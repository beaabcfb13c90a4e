//! What a test hands to a kernel and reads back: bytes of arrays, their columns by name, and the numbers of a spec.

pub(crate) mod batch;
pub(crate) mod claims;
pub(crate) mod device;

use assay_core::problem::{Dtype, FloatArray, Problem, Shape};
use assay_core::spec::{ClipCov, KlGradient, LossSpec, Objective};
use assay_judge::trial::JudgedProblem;
use half::{bf16, f16};
use ndarray::Array3;

/// Tokens that count and whose logp is −∞.
pub(crate) fn impossible_targets(problem: &Problem, spec: &LossSpec) -> usize {
    let known = JudgedProblem::new(spec, problem).unwrap();
    let tokens = problem.mask.indexed_iter().filter(|(_, counts)| **counts);
    tokens.filter(|((b, t), _)| known.reference.token(*b, *t).unwrap().inputs.logp == f64::NEG_INFINITY).count()
}

pub(crate) fn bytes_of<const N: usize>(values: impl IntoIterator<Item = [u8; N]>) -> Vec<u8> {
    values.into_iter().flatten().collect()
}

pub(crate) fn f32_bytes(values: impl IntoIterator<Item = f64>) -> Vec<u8> {
    bytes_of(values.into_iter().map(|x| (x as f32).to_le_bytes()))
}

fn f32s(bytes: &[u8]) -> Vec<f64> {
    bytes.chunks(4).map(|four| f64::from(f32::from_le_bytes(four.try_into().unwrap()))).collect()
}

pub(crate) fn logits_bytes(logits: &FloatArray<ndarray::Ix3>) -> Vec<u8> {
    match logits {
        FloatArray::F64(_) => unreachable!("no kernel takes f64"),
        FloatArray::F32(array) => bytes_of(array.iter().map(|x| x.to_le_bytes())),
        FloatArray::Bf16(array) => bytes_of(array.iter().map(|x| x.to_le_bytes())),
        FloatArray::F16(array) => bytes_of(array.iter().map(|x| x.to_le_bytes())),
    }
}

pub(crate) fn logits_of(bytes: &[u8], shape: Shape, dtype: Dtype) -> FloatArray<ndarray::Ix3> {
    let extents = (shape.batch, shape.tokens, shape.vocab);
    let two = |pair: &[u8]| [pair[0], pair[1]];
    match dtype {
        Dtype::F64 => unreachable!("no kernel returns f64"),
        Dtype::F32 => {
            let values = bytes.chunks(4).map(|four| f32::from_le_bytes(four.try_into().unwrap()));
            Array3::from_shape_vec(extents, values.collect()).unwrap().into()
        }
        Dtype::Bf16 => {
            let values = bytes.chunks(2).map(|pair| bf16::from_le_bytes(two(pair)));
            Array3::from_shape_vec(extents, values.collect()).unwrap().into()
        }
        Dtype::F16 => {
            let values = bytes.chunks(2).map(|pair| f16::from_le_bytes(two(pair)));
            Array3::from_shape_vec(extents, values.collect()).unwrap().into()
        }
    }
}

/// Columns of a `[B,T,8]` array, token by token.
pub(crate) struct PerToken {
    values: Vec<f64>,
    names: Vec<&'static str>,
}

impl PerToken {
    pub(crate) fn new(bytes: &[u8], names: &[&'static str]) -> Self {
        Self { values: f32s(bytes), names: names.to_vec() }
    }

    pub(crate) fn at(&self, name: &str, token: usize) -> f64 {
        let column = self.names.iter().position(|other| *other == name).expect("a column");
        self.values[token * 8 + column]
    }
}

/// A `[B,T,8]` array, or one of 16 columns, NaN in columns that have no name.
pub(crate) fn per_token(names: &[&str], tokens: usize, value: impl Fn(&str, usize) -> f64) -> Vec<u8> {
    let width = names.len().next_multiple_of(8);
    let place = |token: usize, column: usize| names.get(column).map_or(f64::NAN, |name| value(name, token));
    f32_bytes((0..tokens).flat_map(|token| (0..width).map(move |column| (token, column))).map(|(t, c)| place(t, c)))
}

/// `[V]`: the bias of each column, −∞ outside the support.
pub(crate) fn column_bias(spec: &LossSpec, problem: &Problem) -> Vec<u8> {
    let outside =
        |j: usize| spec.support.vocab.is_some_and(|vocab| j >= vocab) || spec.support.excluded_ids.contains(&j);
    let of = |j: usize| if outside(j) { f64::NEG_INFINITY } else { bias(spec, problem, j) };
    f32_bytes((0..problem.shape().vocab).map(of))
}

/// `[B,T]`: that of each target, in the support or not.
pub(crate) fn target_bias(spec: &LossSpec, problem: &Problem) -> Vec<f64> {
    let of = |&id: &i64| usize::try_from(id).ok().filter(|&id| id < problem.shape().vocab);
    problem.ids.iter().map(|id| of(id).map_or(0.0, |id| bias(spec, problem, id))).collect()
}

fn bias(spec: &LossSpec, problem: &Problem, column: usize) -> f64 {
    if spec.logits.bias { problem.extra.bias.as_ref().unwrap()[column] } else { 0.0 }
}

/// A number of the spec by the name that a kernel has for it, read off the spec once more.
pub(crate) fn number(spec: &LossSpec, name: &str) -> f64 {
    let kl = spec.kl.as_ref();
    match (&spec.objective, name) {
        // h = cap · tanh(scale · (x + bias) / cap), or scale · (x + bias): a number, and what it is multiplied by to be h/T.
        (_, "logit_factor") => spec.logits.scale / spec.logits.softcap.unwrap_or(spec.logits.scale.abs()),
        (_, "rate") => number(spec, "logp_rate") / spec.temperature.number().expect("one for all"),
        (_, "logp_rate") => spec.logits.softcap.unwrap_or(spec.logits.scale.abs()),
        (_, "beta") => kl.map_or(0.0, |kl| kl.beta),
        (_, "kl_difference_clamp") => kl.unwrap().difference_clamp.unwrap(),
        (_, "kl_value_clamp") => kl.unwrap().value_clamp.unwrap(),
        (_, "kl_weight_bound") => match kl.unwrap().gradient {
            KlGradient::K2Weighted(bound) => bound,
            other => panic!("{other:?} has no bound"),
        },
        (_, "log_ratio_clamp") => spec.ratio.clamp.unwrap(),
        (_, "log_ratio_low") => -spec.ratio.clip.unwrap().low,
        (_, "log_ratio_high") => spec.ratio.clip.unwrap().high,
        (_, "log_ratio_cap") => spec.ratio.cap.unwrap(),
        (Objective::PpoClip(clip) | Objective::ClipCov(ClipCov { clip, .. }), name) => match name {
            "low" => 1.0 - clip.epsilon_low,
            "high" => 1.0 + clip.epsilon_high,
            "delta" => clip.delta.unwrap_or(f64::INFINITY),
            "dual_clip" => clip.dual_clip.unwrap_or(f64::INFINITY),
            other => panic!("{other}: not known here"),
        },
        (Objective::Cispo(cispo), "low") => cispo.lower.unwrap_or(f64::NEG_INFINITY),
        (Objective::Cispo(cispo), "high") => cispo.upper,
        (Objective::MaskedRatio(masked), "low") => masked.lower,
        (Objective::MaskedRatio(masked), "high") => masked.upper,
        (Objective::Sapo(sapo), "tau_positive") => sapo.tau_positive,
        (Objective::Sapo(sapo), "tau_negative") => sapo.tau_negative,
        (Objective::TrustRegion(region), "low") => region.low,
        (Objective::TrustRegion(region), "high") => region.high,
        (Objective::TrustRegion(region), "penalty") => region.penalty,
        (Objective::TrustRegion(region), "truncate") => region.truncate.unwrap(),
        (Objective::Dro(dro), "penalty") => dro.beta / 2.0,
        (Objective::KlCov(cov), "penalty") => cov.coefficient,
        (Objective::Topr(topr), "positive_weight") => topr.positive_weight,
        (Objective::Topr(topr), "negative_weight") => topr.negative_weight,
        (Objective::Topr(topr), "high") => topr.upper,
        (Objective::CrossEntropy(cross_entropy), "target_weight") => 1.0 - cross_entropy.label_smoothing,
        (Objective::CrossEntropy(cross_entropy), "label_smoothing") => cross_entropy.label_smoothing,
        (Objective::CrossEntropy(cross_entropy), "z_loss") => cross_entropy.z_loss,
        (Objective::Aspo(aspo), "low") => 1.0 - aspo.epsilon_low,
        (Objective::Aspo(aspo), "high") => 1.0 + aspo.epsilon_high,
        (Objective::Aspo(aspo), "low_of_selected") => 1.0 - aspo.selected.unwrap().epsilon_low,
        (Objective::Aspo(aspo), "high_of_selected") => 1.0 + aspo.selected.unwrap().epsilon_high,
        (Objective::Aspo(aspo), "dual_clip_positive") => aspo.dual_clip_positive,
        (Objective::Aspo(aspo), "dual_clip") => aspo.dual_clip_negative,
        (_, other) => panic!("{other}: not known here"),
    }
}
