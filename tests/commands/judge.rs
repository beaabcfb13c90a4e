//! `assay judge`: the outputs of a kernel in a file, on logits and with an LM head.

use std::fs;
use std::path::Path;

use super::workplace::{HeadWorkplace, SOME_HEADS, Workplace, read_json};
use crate::common::command::{assay, assert_refused};
use assay::fixture::{ProblemFile, write_problem};
use assay::problem::FloatArray;

#[test]
fn judge_passes_a_right_candidate() {
    let workplace = Workplace::new();
    let output = workplace.judge(&[]);
    assert_eq!(output.code, 0, "{}{}", output.stdout, output.stderr);
    assert!(output.stdout.ends_with("PASS  8 checks passed, 0 failed, 0 ignored\n"), "{}", output.stdout);
}

#[test]
fn judge_reads_loss_and_dlogits_alone_and_says_what_lacks() {
    let workplace = Workplace::new();
    workplace
        .write_candidate(|candidate| (candidate.logp, candidate.entropy, candidate.token_loss) = (None, None, None));
    let output = workplace.judge(&[]);
    assert_eq!(output.code, 0, "{}{}", output.stdout, output.stderr);
    assert!(output.stdout.contains("ignored  entropy: not in the candidate"), "{}", output.stdout);
}

#[test]
fn judge_rejects_a_wrong_candidate_and_shows_where() {
    let workplace = Workplace::new();
    workplace.write_candidate(|candidate| {
        let FloatArray::Bf16(dlogits) = &mut candidate.gradient else { panic!("generate writes bf16") };
        let (at, _) = dlogits.indexed_iter().find(|(_, x)| x.to_f32() != 0.0).expect("some token learns");
        dlogits[at] = -dlogits[at];
    });
    let output = workplace.judge(&["--quiet"]);
    assert_eq!(output.code, 1);
    for part in [
        "FAIL candidate: dlogits, bf16",
        "at  ",
        "expected  ",
        "actual  ",
        "inputs  ",
        "assay judge --problem",
        "error / limit of dlogits by vocabulary entry",
        "beyond the limit: ",
        "  limit ┼",
    ] {
        assert!(output.stdout.contains(part), "`{part}` not in: {}", output.stdout);
    }
    let [html, markdown] = ["page.html", "report.md"].map(|name| workplace.path(name));
    let long = workplace.judge(&["--quiet", "-v", "--html", &html, "--markdown", &markdown]);
    let [html, markdown] = [html, markdown].map(|path| std::fs::read_to_string(path).unwrap());
    assert!(
        html.starts_with("<!DOCTYPE html>") && markdown.contains("  limit ┼") && markdown.contains("FAIL candidate")
    );
    for detail in ["  0x", "ulp  ", "κ  "] {
        assert!(!output.stdout.contains(detail) && long.stdout.contains(detail), "{detail}: {}", long.stdout);
    }
}

#[test]
fn judge_under_another_spec_rejects() {
    let workplace = Workplace::new();
    let spec = workplace.write("spec.yaml", "reduction: {sequence_mean: {rows: all}}\ntemperature: 2.0\n");
    assert_eq!(workplace.judge(&["--spec", &spec, "-q"]).code, 1);
}

#[test]
fn lm_head_in_files_is_judged_replayed_and_checked() {
    for options in [&["--dtype", "f32", "--layout", "vh"][..], &["--dtype", "bf16", "--f32-logits"]] {
        let workplace = HeadWorkplace::new(options);
        let output = workplace.judge(&[]);
        assert_eq!(output.code, 0, "{}{}", output.stdout, output.stderr);
        assert!(output.stdout.contains("dlm_head row_l2") && output.stdout.contains("dhidden"), "{}", output.stdout);

        let problem = workplace.path("problem.safetensors");
        let replayed = assay(&[&["replay", &problem], SOME_HEADS].concat());
        assert_eq!(replayed.code, 0, "{}{}", replayed.stdout, replayed.stderr);
        assert!(replayed.stdout.contains("native-lm-head"), "{}", replayed.stdout);
        let metrics = assay(&["metrics", "--problem", &problem]);
        assert_eq!(metrics.code, 0, "{}", metrics.stderr);

        let (config, json) = (workplace.path("case.yaml"), workplace.path("case.json"));
        let text = "batch: {fixture: {path: problem.safetensors}}\nkernel: {enabled: true, impl: native-lm-head}\n";
        fs::write(&config, text).unwrap();
        let checked = assay(&["gradcheck", "--config", &config, "--json", &json]);
        assert_eq!(checked.code, 0, "{}{}", checked.stdout, checked.stderr);
        let result = read_json(Path::new(&json));
        assert!(result["max_abs_diff_dhidden"].as_f64().unwrap() < 1e-2, "{result}");
        assert!(result["max_rel_diff_dlm_head"].as_f64().unwrap() < 1e-2, "{result}");
        assert!(result.get("max_abs_diff_dlogits").is_none());
    }
}

#[test]
fn lm_head_that_is_wrong_is_explained() {
    let workplace = HeadWorkplace::new(&["--dtype", "f32", "--layout", "vh"]);
    let sign = |x: &mut f32| *x = -*x;
    workplace.write_candidate(|candidate| {
        let FloatArray::F32(dhidden) = &mut candidate.gradient.dhidden else { panic!("generated in f32") };
        sign(dhidden.iter_mut().find(|x| **x != 0.0).expect("some token learns"));
    });
    let output = workplace.judge(&["--quiet"]);
    assert_eq!(output.code, 1);
    for part in [
        "FAIL candidate: dhidden, f32",
        "at  ",
        "expected  ",
        "actual  ",
        "times the limit",
        "inputs    mask true, id ",
        ", hidden ",
        "in the reference logp",
        "replay    assay judge --problem",
    ] {
        assert!(output.stdout.contains(part), "`{part}` not in: {}", output.stdout);
    }
    workplace.write_candidate(|candidate| {
        let FloatArray::F32(dlm_head) = &mut candidate.gradient.dlm_head else { panic!("f32") };
        sign(&mut dlm_head[[128, 6]]);
    });
    let output = workplace.judge(&["--quiet"]);
    for part in
        ["FAIL candidate: dlm_head, f32", "at        [6,128]", "weight ", "column 128 of a head [V,H]", "tokens that"]
    {
        assert!(output.stdout.contains(part), "`{part}` not in: {}", output.stdout);
    }
}

#[test]
fn lm_head_in_files_that_does_not_fit_is_refused_by_field() {
    let workplace = HeadWorkplace::new(&["--dtype", "f32"]);
    let candidate = workplace.path("candidate.safetensors");
    let refused = |metadata: &[(&str, &str)], parts: &[&str]| {
        let file = ProblemFile::open(workplace.path("problem.safetensors")).unwrap();
        let problem = file.head_problem(Some("old_logps")).unwrap();
        let path = workplace.path("changed.safetensors");
        write_problem(&path, &problem, file.metadata()).unwrap();
        let mut bytes = fs::read(&path).unwrap();
        for (from, to) in metadata {
            let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).expect("in the header");
            bytes[at..at + from.len()].copy_from_slice(to.as_bytes());
        }
        fs::write(&path, bytes).unwrap();
        assert_refused(
            &["judge", "--problem", &path, "--candidate", &candidate],
            &[&["changed.safetensors"], parts].concat(),
        );
    };
    refused(&[("\"layout\":\"hv\"", "\"layout\":\"xx\"")], &["metadata `layout`", "got `xx`", "hv, which is [H,V]"]);
    refused(&[("\"layout\":\"hv\"", "\"layoux\":\"hv\"")], &["metadata `layout`", "got nothing"]);
    refused(&[("\"layout\":\"hv\"", "\"layout\":\"vh\"")], &["`lm_head`", "[7, 129]", "[V,H] with H = 7"]);
    let rounds = ("\"rounds_logits\":\"true\"", "\"rounds_logits\":\"trve\"");
    refused(&[rounds], &["metadata `rounds_logits`", "got `trve`", "true or false"]);

    workplace.write_candidate(|candidate| {
        candidate.gradient.dlm_head = FloatArray::zeros((129, 7), assay::problem::Dtype::F32);
    });
    let output = workplace.judge(&[]);
    assert_eq!(output.code, 2);
    assert!(output.stderr.contains("candidate `dlm_head`: got shape [129, 7], expected [7, 129]"), "{}", output.stderr);
    let without = HeadWorkplace::new(&[]);
    without.write_candidate(|candidate| (candidate.logp, candidate.entropy) = (None, None));
    let output = without.judge(&[]);
    assert_eq!(output.code, 0, "{}{}", output.stdout, output.stderr);
    assert!(output.stdout.contains("ignored  entropy: not in the candidate"), "{}", output.stdout);
}
