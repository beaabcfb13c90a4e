//! The report of a campaign as a person reads it: the sentence, the values, the picture, and nothing that does not apply.

use std::sync::Arc;

use assay_campaign::{Campaign, Fault, TextForm, markdown, text};
use assay_core::problem::{Candidate, FloatArray, Problem};
use assay_core::spec::LossSpec;
use assay_schema::campaign::CampaignReport;
use assay_schema::picture::PictureAxis;

use crate::finds::{Does, campaign, right, run, trl};

/// The report on a kernel whose dlogits of the vocabulary entries from a multiple of 64 on are 0.
fn tail_is_dropped(campaign: &Campaign) -> CampaignReport {
    let kernel = |spec: &LossSpec, problem: &Arc<Problem>| -> Result<Candidate, Fault> {
        let mut candidate = right(spec, problem);
        let mut values = candidate.gradient.to_f64();
        let vocab = values.dim().2;
        if vocab > 64 {
            values.slice_mut(ndarray::s![.., .., vocab / 64 * 64..]).fill(0.0);
        }
        candidate.gradient = FloatArray::rounded_from(&values, candidate.gradient.dtype());
        Ok(candidate)
    };
    run(campaign, &mut Does(kernel))
}

#[test]
fn report_shows_the_place_of_a_dropped_tail() {
    let found = tail_is_dropped(&campaign(trl(), 40));
    let cause = &found.causes[0];
    let picture = cause.picture.as_ref().expect("dlogits have an axis");
    assert_eq!((picture.axis, picture.output.as_str()), (PictureAxis::VocabularyEntry, "dlogits"));
    // The picture is of a problem with a tail, and only the tail is beyond the limit.
    let tail = picture.extent / 64 * 64;
    assert!(tail < picture.extent, "{picture:?}");
    let first_cell = tail / picture.places * picture.places;
    assert_eq!(picture.beyond(), [[first_cell, picture.extent - 1]], "{picture:?}");
    assert!(picture.error_over_limit.iter().flatten().any(|error| *error > 100.0), "{picture:?}");
    let written = text(&found, &TextForm::default());
    assert!(written.starts_with("FAIL  the dlogit") || written.starts_with("FAIL  dlogits"), "{written}");
    assert!(written.contains("the last tile, or its mask") && written.contains("limit ┼"), "{written}");
    // A table is as wide as its longest problem.
    let in_table = |line: &&str| ["  problem", "smallest", "worst"].iter().any(|word| line.contains(word));
    for line in written.lines().filter(|line| !in_table(line)) {
        assert!(line.chars().count() <= 80, "{line}");
    }
}

#[test]
fn report_has_details_where_they_are_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let kept = Campaign { repros: Some(folder.path().into()), ..campaign(trl(), 24) };
    let found = tail_is_dropped(&kept);
    let brief = text(&found, &TextForm { details: false, python_call: Some("kernel(problem)".into()) });
    let long = text(&found, &TextForm { details: true, python_call: None });
    // The time by size is that of every problem, once.
    assert_eq!(found.costs.iter().map(|cost| cost.problems).sum::<u64>(), found.cases);
    assert!(found.costs.is_sorted_by_key(|cost| cost.vocabulary), "{:?}", found.costs);
    for detail in ["time         V ≤ ", "κ ", "1 ulp", "  0x", "inputs", "clipped low"] {
        assert!(!brief.contains(detail) && long.contains(detail), "{detail}:\n{brief}\n{long}");
    }
    assert!(brief.contains("problem.check(kernel(problem)).raise_for_failure()"), "{brief}");
    assert!(!long.contains("raise_for_failure") && long.contains("which the next campaign tries first"), "{long}");
}

#[test]
fn report_of_a_tiny_problem_has_its_values() {
    let kernel = |spec: &LossSpec, problem: &Arc<Problem>| -> Result<Candidate, Fault> {
        let mut candidate = right(spec, problem);
        candidate.gradient = FloatArray::rounded_from(&(candidate.gradient.to_f64() * 2.0), candidate.gradient.dtype());
        Ok(candidate)
    };
    let found = run(&campaign(trl(), 24), &mut Does(kernel));
    let values = found.causes[0].values.as_ref().expect("two logits");
    assert!(values.starts_with("logits = [[[") && values.contains("ids = [["), "{values}");
    assert!(values.contains("mask = [[1]]") && values.contains("old_logp = [["), "{values}");
}

#[test]
fn report_on_logp_speaks_of_no_clip() {
    let spec = LossSpec::from_cotangents(true);
    let found = tail_is_dropped(&campaign(spec, 24));
    let long = text(&found, &TextForm { details: true, python_call: None });
    assert!(found.from_cotangents && !found.passed, "{long}");
    for word in ["clipped", "A > 0", "advantage", ", ratio "] {
        assert!(!long.contains(word), "{word}:\n{long}");
    }
}

/// A stranger's text is text in Markdown too, and a cell of a table stays one.
#[test]
fn report_in_markdown_escapes_the_names_of_strangers() {
    let mut named = campaign(trl(), 24);
    named.kernel = "<img src=x> `k` | **b**\n# title".into();
    let found = tail_is_dropped(&named);
    let written = markdown(&found);
    assert!(written.starts_with("### FAIL") && written.contains("```text\n"), "{written}");
    for raw in ["<img", "\n# title", "**b**", " `k`"] {
        assert!(!written.contains(raw), "{raw}:\n{written}");
    }
    for row in written.lines().filter(|line| line.starts_with("| smallest") || line.starts_with("| worst")) {
        assert_eq!(row.matches(" | ").count(), 5, "{row}");
    }
}
