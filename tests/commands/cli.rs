//! The `assay` command as a user meets it: exit codes, and one line for every bad input.

use crate::common::command::{assay, assert_refused};

#[test]
fn cli_bad_usage_exits_with_2() {
    for args in [&["frobnicate"][..], &["replay", "--frob"], &["generate"], &["judge", "--problem", "p"]] {
        assert_eq!(assay(args).code, 2, "{args:?}");
    }
    assert_eq!(assay(&["--help"]).code, 0);
}

#[test]
fn cli_bad_shapes_dtypes_and_names_are_refused() {
    let out = ["-o", "/nonexistent/problem.safetensors"];
    for shape in ["0x3x5", "2x3x0", "2x3", "2x3x5x0", "2x3x5x7x9", "axbxc", "-1x2x3", "99999999999999999999x1x1"] {
        let output = assay(&[&["generate", "--shape", shape], &out[..]].concat());
        assert_eq!(output.code, 2);
        assert!(
            output.stderr.contains("expected BxT") || output.stderr.contains("unexpected argument"),
            "{}",
            output.stderr
        );
    }
    for shape in ["99999x99999x99999", "4294967295x4294967295x1", "1000000x1000000x8x4"] {
        assert_refused(&[&["generate", "--shape", shape], &out[..]].concat(), &["`shape`", "memory"]);
    }
    assert_refused(
        &[&["generate", "--shape", "2x3x5"], &out[..]].concat(),
        &["/nonexistent/problem.safetensors", "write"],
    );
    assert_refused(
        &[&["generate", "--shape", "2x3x5", "--old-logp-noise-scale", "NaN"], &out[..]].concat(),
        &["`old_logp_noise_scale`", "got NaN", "≥ 0"],
    );
    assert_refused(
        &["replay", "--impl", "cuda", "fixtures/qwen_tiny.safetensors"],
        &["got `cuda`", "expected one of: native", "with an LM head: native-lm-head"],
    );
    assert_refused(
        &[&["generate", "--shape", "2x3x5", "--layout", "vh"], &out[..]].concat(),
        &["--layout", "without an LM head", "expected --shape BxTxHxV"],
    );
    assert_refused(&[&["generate", "--shape", "2x3x4x5", "--regime", "holes"], &out[..]].concat(), &["`regime`", "−∞"]);
    assert_refused(&["replay", "no/such.safetensors"], &["no/such.safetensors", "cannot"]);
    assert_refused(&["replay", "Cargo.toml"], &["Cargo.toml", "expected"]);
    assert_refused(
        &["replay", "fixtures/qwen_tiny.safetensors", "--logits", "nothing"],
        &["`nothing`", "not in the file"],
    );
}
