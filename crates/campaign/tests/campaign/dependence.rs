//! Dependence of a token's answer on other tokens and on masked content is told where a kernel has it, and nowhere else.

use std::sync::Arc;

use assay_campaign::Fault;
use assay_core::problem::{Candidate, FloatArray, Problem};
use assay_core::spec::LossSpec;
use assay_schema::campaign::CampaignReport;

use crate::finds::{Does, campaign, right, run, trl};

/// The report on a kernel that adds a number to logp, or to a row of dlogits, of each token.
fn report(is_of_logp: bool, added: impl Fn(&Problem, (usize, usize)) -> f64) -> CampaignReport {
    let kernel = |spec: &LossSpec, problem: &Arc<Problem>| -> Result<Candidate, Fault> {
        let mut candidate = right(spec, problem);
        let counts = problem.mask.indexed_iter().filter(|(_, counts)| **counts).map(|(at, _)| at);
        if is_of_logp {
            let mut logp = candidate.logp.take().unwrap().to_f64();
            counts.for_each(|at| logp[at] += added(problem, at));
            candidate.logp = Some(FloatArray::from(logp.mapv(|x| x as f32)));
        } else {
            let mut dlogits = candidate.gradient.to_f64();
            counts.for_each(|(b, t)| {
                dlogits.slice_mut(ndarray::s![b, t, ..]).mapv_inplace(|x| x * (1.0 + added(problem, (b, t))));
            });
            candidate.gradient = FloatArray::rounded_from(&dlogits, candidate.gradient.dtype());
        }
        Ok(candidate)
    };
    run(&campaign(trl(), 40), &mut Does(kernel))
}

fn dependences(found: &CampaignReport) -> Vec<&str> {
    let all = found.causes.iter().flat_map(|cause| &cause.diagnoses).map(String::as_str);
    all.filter(|text| text.contains("when only")).collect()
}

/// A finite number of a token's logits, and 0 of a token that is not there.
fn first_logit(problem: &Problem, (b, t): (usize, usize)) -> f64 {
    let (batch, tokens) = problem.mask.dim();
    let x = if b < batch && t < tokens { problem.logits.row(b, t)[0] } else { 0.0 };
    if x.is_finite() { x.clamp(-9.0, 9.0) / 10.0 } else { 0.0 }
}

fn assert_told(found: &CampaignReport, expected: &str, others: &[&str]) {
    let told = dependences(found);
    let text = assay_campaign::text(found, &assay_campaign::TextForm::default());
    assert!(told.iter().any(|sentence| sentence.contains(expected)), "{expected}: {text}");
    assert!(told.iter().all(|sentence| !others.iter().any(|other| sentence.contains(other))), "{text}");
}

const MASKED: &str = "when only what masked tokens hold changes";
const SEQUENCES: &str = "when only other sequences change";
const TOKENS: &str = "when only other tokens of its sequence change";

#[test]
fn dependence_on_the_next_sequence_is_told() {
    let found = report(true, |problem, (b, t)| 0.1 + first_logit(problem, (b + 1, t)));
    assert_told(&found, SEQUENCES, &[TOKENS]);
    assert!(dependences(&found).iter().any(|sentence| sentence.starts_with("logp of token [")), "{found:#?}");
}

#[test]
fn dependence_on_the_token_before_is_told() {
    let found = report(false, |problem, (b, t)| if t == 0 { 0.1 } else { 0.1 + first_logit(problem, (b, t - 1)) });
    assert_told(&found, TOKENS, &[SEQUENCES]);
}

#[test]
fn dependence_on_masked_content_is_told() {
    let masked = |problem: &Problem, b: usize| {
        let at = (0..problem.mask.ncols()).find(|&t| !problem.mask[[b, t]]);
        at.map_or(0.0, |t| first_logit(problem, (b, t)))
    };
    let found = report(true, |problem, (b, _)| 0.1 + masked(problem, b));
    assert_told(&found, MASKED, &[SEQUENCES, TOKENS]);
}

/// A kernel that is wrong in itself, or rounds, depends on nothing else; nor does one whose sums have no order.
#[test]
fn dependence_is_told_of_no_other_mistake() {
    for found in [
        report(true, |_, _| 0.1),
        report(false, |_, (b, t)| 0.1 + 0.1 * (b + t) as f64),
        report(true, |problem, at| {
            let logp = right(&trl(), problem).logp.unwrap().at(at.0, at.1);
            assay_core::problem::Dtype::Bf16.round(logp) - logp
        }),
    ] {
        assert!(
            !found.passed && dependences(&found).is_empty(),
            "{}",
            assay_campaign::text(&found, &assay_campaign::TextForm::default())
        );
    }
    // Numbers that are no f32 are handed over in f64, where a kernel rounds otherwise: what is altered has to stay f32.
    let found = report(false, |problem, _| {
        let old_logp = problem.old_logp.as_ref().unwrap();
        if old_logp.iter().all(|x| f64::from(*x as f32) == *x) { 0.5 } else { 0.1 }
    });
    assert!(
        !found.passed && dependences(&found).is_empty(),
        "{}",
        assay_campaign::text(&found, &assay_campaign::TextForm::default())
    );
    let turn = std::cell::Cell::new(0);
    let found = report(true, |_, _| {
        turn.set(turn.get() + 1);
        0.1 * f64::from(turn.get() % 7)
    });
    assert!(
        !found.passed && dependences(&found).is_empty(),
        "{}",
        assay_campaign::text(&found, &assay_campaign::TextForm::default())
    );
}
