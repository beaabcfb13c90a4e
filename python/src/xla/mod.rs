//! The CPU kernel as custom calls of XLA's: what `assay.jax` registers.
//!
//! Each handler does what a method of [`share`] does, on the arrays that this names, in its order. Calls of several devices
//! at once share one pool of threads.
#![allow(unsafe_code)]

mod frame;

use ndarray::{Array2, ArrayView1, ArrayViewMut3, Ix0, Ix1, Ix2, Ix3};
use pyo3::prelude::*;

use assay::implementation::RunError;
use assay::native::share::{self, ShareInputs, ShareLogits, ShareTokens, VocabShard};
use assay::native::{Native, NativeElement};
use assay::spec::{LossSpec, Temperature};
use assay_algebra::structure::Structure;
use frame::{Buffer, Call, Error, Frame, XlaOutput};

/// `logits, ids, mask, first_column`, `rate` where temperatures are given, and `bias` where the spec has one, to `statistics`.
extern "C" fn statistics(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls it.
    unsafe { frame::answer(frame, handle_statistics) }
}

/// `logits, ids, scales, first_column`, `rate` and `bias` likewise, to `dlogits`, which may be over the logits.
extern "C" fn gradient(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls it.
    unsafe { frame::answer(frame, handle_gradient) }
}

/// `logits, ids, mask, advantages, weights`, where the attribute `sequences` is `packed` `segment_ids`, and what else the spec reads,
/// then `kept_ids`, `bias` last, to `dlogits`, which may be over the logits, and `results`.
extern "C" fn loss(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls it.
    unsafe { frame::answer(frame, handle_loss) }
}

/// Takes the arguments of [`loss`], and writes `results` alone.
extern "C" fn loss_forward(frame: *mut Frame) -> *mut Error {
    // SAFETY: XLA calls it.
    unsafe { frame::answer(frame, handle_loss_forward) }
}

/// The addresses of the handlers, by name.
#[pyfunction]
pub(crate) fn xla_handlers() -> [(&'static str, usize); 4] {
    [
        ("statistics", statistics as *const () as usize),
        ("gradient", gradient as *const () as usize),
        ("loss", loss as *const () as usize),
        ("loss_forward", loss_forward as *const () as usize),
    ]
}

fn spec(call: &Call) -> Result<LossSpec, String> {
    serde_json::from_str(call.text("spec")?).map_err(|reason| format!("attribute `spec`: {reason}"))
}

fn expect_shape(name: &str, given: &[usize], expected: &[usize]) -> Result<(), String> {
    if given == expected { Ok(()) } else { Err(format!("`{name}`: got shape {given:?}, expected {expected:?}")) }
}

/// `name`, of `[B,T]` truth values.
fn truths(buffer: &Buffer, name: &str, per_token: [usize; 2]) -> Result<Array2<bool>, String> {
    let bytes = buffer.view::<u8, Ix2>(name)?;
    expect_shape(name, bytes.shape(), &per_token)?;
    Ok(bytes.mapv(|byte| byte != 0))
}

/// The bias that the spec reads, the last of the arguments.
fn bias<'f>(spec: &LossSpec, rest: &mut Vec<&'f Buffer>) -> Result<Option<ArrayView1<'f, f32>>, String> {
    let read = spec.logits.bias.then(|| rest.pop().ok_or("`bias`: not given, expected [V]")).transpose()?;
    read.map(|bias| bias.view::<f32, Ix1>("bias")).transpose()
}

/// Reads which columns a device holds, the rates of its rows if temperatures are given, and the bias if the spec has
/// one.
fn part<'f>(spec: &LossSpec, first: &Buffer, mut rest: Vec<&'f Buffer>) -> Result<VocabShard<'f>, String> {
    let first = first.view::<i32, Ix0>("first_column")?[()];
    let expected = || format!("`first_column`: got {first}, expected 0 or more");
    let first_column = usize::try_from(first).map_err(|_| expected())?;
    let bias = bias(spec, &mut rest)?;
    let given = spec.temperature == Temperature::Given;
    let rates = given.then(|| rest.pop().ok_or("`rate`: not given, expected [B,T]")).transpose()?;
    let rates = rates.map(|rates| rates.view::<f32, Ix2>("rate")).transpose()?;
    if rest.is_empty() {
        Ok(VocabShard { first_column, bias, rates })
    } else {
        Err(format!("arguments: got {} too many", rest.len()))
    }
}

/// Does `work` with the element type of `logits`.
macro_rules! by_dtype {
    ($logits:expr, $work:ident($($argument:expr),*)) => {
        if $logits.has::<f32>() {
            $work::<f32>($($argument),*)
        } else if $logits.has::<half::bf16>() {
            $work::<half::bf16>($($argument),*)
        } else if $logits.has::<half::f16>() {
            $work::<half::f16>($($argument),*)
        } else {
            Err("`logits`: got another element type, expected f32, bf16 or f16".to_string())
        }
    };
}

fn handle_statistics(call: &Call) -> Result<(), String> {
    fn typed<E: NativeElement + frame::XlaElement>(call: &Call) -> Result<(), String> {
        let ([logits, ids, mask, first], rest) = call.arguments()?;
        let [to] = call.outputs()?;
        let spec = spec(call)?;
        let part = part(&spec, first, rest)?;
        let logits = logits.view::<E, Ix3>("logits")?;
        let [b, t, _] = *logits.shape() else { unreachable!("three axes") };
        let (ids, mask) = (ids.view::<i32, Ix2>("ids")?, truths(mask, "mask", [b, t])?);
        expect_shape("ids", ids.shape(), &[b, t])?;
        let statistics = to.view::<f32, Ix3>("statistics")?;
        expect_shape("statistics", statistics.shape(), &[b, t, share::COLUMNS])?;
        let tokens = ShareTokens { ids, mask: mask.view() };
        let done = Native::default().share_statistics(&spec, part, logits, tokens, statistics);
        done.map_err(|error| error.to_string())
    }
    let ([logits], _) = call.arguments()?;
    by_dtype!(logits, typed(call))
}

/// Returns the logits and the place for dlogits, which may be the memory of the logits.
fn place<'f, E: NativeElement + frame::XlaElement>(
    logits: &'f Buffer,
    dlogits: XlaOutput<'f>,
) -> Result<ShareLogits<'f, E>, String> {
    // XLA may give both the same memory; then only the mutable view may exist.
    let beside = logits.address() != dlogits.address();
    let dlogits = dlogits.view::<E, Ix3>("dlogits")?;
    let logits = if beside { Some(logits.view::<E, Ix3>("logits")?) } else { None };
    if let Some(logits) = &logits {
        expect_shape("dlogits", dlogits.shape(), logits.shape())?;
    }
    Ok(ShareLogits { logits, dlogits })
}

fn handle_gradient(call: &Call) -> Result<(), String> {
    fn typed<E: NativeElement + frame::XlaElement>(call: &Call) -> Result<(), String> {
        let ([logits, ids, scales, first], rest) = call.arguments()?;
        let [dlogits] = call.outputs()?;
        let spec = spec(call)?;
        let part = part(&spec, first, rest)?;
        let place = place::<E>(logits, dlogits)?;
        let [b, t, _] = *place.dlogits.shape() else { unreachable!("three axes") };
        let (ids, scales) = (ids.view::<i32, Ix2>("ids")?, scales.view::<f32, Ix3>("scales")?);
        expect_shape("ids", ids.shape(), &[b, t])?;
        expect_shape("scales", scales.shape(), &[b, t, share::COLUMNS])?;
        Native::default().share_gradient(&spec, part, place, ids, scales).map_err(|error| error.to_string())
    }
    let ([logits], _) = call.arguments()?;
    by_dtype!(logits, typed(call))
}

fn handle_loss(call: &Call) -> Result<(), String> {
    fn typed<E: NativeElement + frame::XlaElement>(call: &Call) -> Result<(), String> {
        let ([logits], _) = call.arguments()?;
        let [dlogits, results] = call.outputs()?;
        let place = place::<E>(logits, dlogits)?;
        let dim = place.dlogits.dim();
        with_loss(call, dim, results, |spec, weighed, results| {
            Native::default().share_loss(spec, place, weighed, results)
        })
    }
    let ([logits], _) = call.arguments()?;
    by_dtype!(logits, typed(call))
}

fn handle_loss_forward(call: &Call) -> Result<(), String> {
    fn typed<E: NativeElement + frame::XlaElement>(call: &Call) -> Result<(), String> {
        let ([logits], _) = call.arguments()?;
        let [results] = call.outputs()?;
        let logits = logits.view::<E, Ix3>("logits")?;
        with_loss(call, logits.dim(), results, |spec, weighed, results| {
            Native::default().share_loss_forward(spec, logits, weighed, results)
        })
    }
    let ([logits], _) = call.arguments()?;
    by_dtype!(logits, typed(call))
}

/// Does `work` with the spec, the arguments after the logits, and the place for results, whose shapes are those of logits of extents
/// `[b, t, _]`.
fn with_loss(
    call: &Call,
    (b, t, _): (usize, usize, usize),
    results: XlaOutput,
    work: impl FnOnce(&LossSpec, &ShareInputs, ArrayViewMut3<f32>) -> Result<(), RunError>,
) -> Result<(), String> {
    let ([_, ids, mask, advantages, weights], mut rest) = call.arguments()?;
    let spec = spec(call)?;
    let bias = bias(&spec, &mut rest)?;
    // Optional arguments follow the fixed ones in this order: segment ids, the inputs of the spec, kept sets, the bias.
    let kept =
        spec.reads_kept_ids().then(|| rest.pop().ok_or("`kept_ids`: not given, expected [B,T,K]")).transpose()?;
    let kept_ids = kept.map(|kept| kept.view::<i32, Ix3>("kept_ids")).transpose()?;
    let segment_ids = match call.text("sequences")? {
        "packed" if rest.is_empty() => return Err("`segment_ids`: not given, expected [B,T]".into()),
        "packed" => Some(rest.remove(0).view::<i32, Ix2>("segment_ids")?),
        _ => None,
    };
    let (ids, mask) = (ids.view::<i32, Ix2>("ids")?, truths(mask, "mask", [b, t])?);
    let (advantages, weights) = (advantages.view::<f32, Ix2>("advantages")?, weights.view::<f32, Ix3>("weights")?);
    let expected = Structure::from_spec(&spec).inputs();
    if rest.len() != expected.len() {
        return Err(format!("arguments: got {} beside the five, expected {}", rest.len(), expected.len()));
    }
    let inputs: Result<Vec<_>, String> =
        expected.into_iter().zip(rest).map(|(input, buffer)| Ok((input, buffer.view(input.name())?))).collect();
    let inputs = inputs?;
    let results = results.view::<f32, Ix3>("results")?;
    // Check every shape against the logits: XLA passes whatever the caller declared.
    let per_token = [("ids", ids.shape()), ("advantages", advantages.shape())].into_iter();
    let per_token = per_token.chain(segment_ids.as_ref().map(|ids| ("segment_ids", ids.shape())));
    for (name, given) in per_token.chain(inputs.iter().map(|(input, values)| (input.name(), values.shape()))) {
        expect_shape(name, given, &[b, t])?;
    }
    expect_shape("weights", weights.shape(), &[b, t, 3])?;
    if let Some(kept) = &kept_ids {
        expect_shape("kept_ids", kept.shape(), &[b, t, kept.dim().2])?;
    }
    expect_shape("results", results.shape(), &[b, t, share::COLUMNS])?;
    let tokens = ShareTokens { ids, mask: mask.view() };
    let weighed = ShareInputs { tokens, advantages, weights, segment_ids, inputs, bias, kept_ids };
    work(&spec, &weighed, results).map_err(|error| error.to_string())
}
