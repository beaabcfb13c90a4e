//! Kernels with a mistake are refused by the interpreter or by the judge, and masked rows are not read.

use super::harness::*;
use crate::common::{bytes_of, f32_bytes, logits_bytes, per_token};
use assay_core::problem::{Dtype, Shape};
use assay_core::spec::LossSpec;
use assay_judge::generate::{Recipe, Regime};
use assay_judge::tolerance::Limits;
use assay_judge::trial::JudgedProblem;
use assay_programs::PtxTarget;
use assay_ptx::PtxKernel;
use assay_ptx_interpreter::ApproximateUnits;
use std::ops::Range;

/// Why a kernel that was changed is refused, if it is: what the interpreter or the judge says.
fn refusal(target: PtxTarget, spec: &LossSpec, recipe: &Recipe, change: impl Fn(String) -> String) -> Option<String> {
    let [batch, tokens, vocab] = recipe.shape;
    let kernel = kernels(target, "gpu-one-pass", spec, Shape { batch, tokens, vocab }, recipe.dtype).remove(0);
    refusal_of(kernel, spec, recipe, change)
}

/// Returns why the kernel that is given is refused after a change, if it is.
fn refusal_of(
    mut kernel: PtxKernel,
    spec: &LossSpec,
    recipe: &Recipe,
    change: impl Fn(String) -> String,
) -> Option<String> {
    let problem = recipe.problem(spec).unwrap();
    let around = Around::new(spec, &problem);
    let changed = change(kernel.text.clone());
    assert!(changed != kernel.text, "nothing was changed");
    kernel.text = changed;
    let candidate = match around.one_pass_by(&kernel) {
        Ok(candidate) => candidate,
        Err(error) => return Some(error),
    };
    let known = JudgedProblem::new(spec, &problem).unwrap();
    let judged = match known.judge(candidate, &Limits::for_class("gpu").unwrap()) {
        Ok(judged) => judged,
        Err(error) => return Some(error.to_string()),
    };
    known.failures(&judged, "gpu-one-pass", "").first().cloned()
}
/// A row over one CTA, and one over two: each wait of the kernel is needed, and its absence is seen by what it leaves to chance.
#[test]
fn one_pass_waits_left_out_are_refused() {
    let spec = LossSpec::default();
    let is_wait = |line: &&str| ["cp.async.wait", "barrier."].iter().any(|wait| line.trim_start().starts_with(wait));
    for (target, shape, waits) in [
        (PtxTarget::Sm90, [1, 1, 2049], 4),
        (PtxTarget::Sm90, [1, 1, 33_001], 8),
        (PtxTarget::Sm100, [1, 1, 33_001], 8),
    ] {
        let recipe = recipe(shape, Dtype::Bf16, Regime::Normal);
        let shape = Shape { batch: 1, tokens: 1, vocab: shape[2] };
        let text = kernels(target, "gpu-one-pass", &spec, shape, Dtype::Bf16).remove(0).text;
        let lines: Vec<&str> = text.lines().collect();
        let places: Vec<usize> = (0..lines.len()).filter(|&at| is_wait(&lines[at])).collect();
        assert_eq!(places.len(), waits, "{shape:?}");
        let without = |left_out: &[usize]| {
            let kept = lines.iter().enumerate().filter(|(at, _)| !left_out.contains(at));
            kept.flat_map(|(_, line)| [*line, "\n"]).collect::<String>()
        };
        let mut removed: Vec<Vec<usize>> = places.iter().map(|&at| vec![at]).collect();
        // A meeting of the cluster is an arrival and a wait.
        let arrivals = places.iter().filter(|&&at| lines[at].contains("arrive"));
        removed.extend(arrivals.map(|&at| {
            let wait = places.iter().find(|&&other| other > at && lines[other].contains("cluster.wait"));
            vec![at, *wait.expect("who arrives waits")]
        }));
        for left_out in removed {
            let what: Vec<&str> = left_out.iter().map(|&at| lines[at].trim()).collect();
            let why = refusal(target, &spec, &recipe, |_| without(&left_out));
            let why = why.unwrap_or_else(|| panic!("{shape:?} without {what:?} at {left_out:?} is accepted"));
            println!("{} columns, without {what:?}: {why}", shape.vocab);
        }
        if text.contains("arrive.release") {
            for (place, _) in text.match_indices("arrive.release") {
                let weak = format!("{}arrive.relaxed{}", &text[..place], &text[place + "arrive.release".len()..]);
                let why = refusal(target, &spec, &recipe, |_| weak.clone())
                    .expect("an arrival that orders nothing is refused");
                println!("{} columns, relaxed: {why}", shape.vocab);
            }
        }
    }
}

/// Each wait, fence, count and parity of the meeting by stores is needed.
#[test]
fn meeting_by_stores_with_a_mistake_is_refused() {
    let spec = LossSpec::default();
    let recipe = recipe([1, 1, 33_001], Dtype::Bf16, Regime::Normal);
    let shape = Shape { batch: 1, tokens: 1, vocab: 33_001 };
    let expect = "\tmbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, ";
    for target in TARGETS {
        check(target, BY_STORES, &spec, &recipe).expect("the kernel without a mistake is right");
        let kernel = meeting_by_stores(target, &spec, shape, Dtype::Bf16);
        let lines: Vec<&str> = kernel.text.lines().collect();
        let places = |what: &str| (0..lines.len()).filter(|&at| lines[at].contains(what)).collect::<Vec<_>>();
        let mut changes: Vec<(usize, String)> = Vec::new();
        // A line that is left out: each wait, each barrier, each fence, each arrival and each store.
        for what in ["cp.async.wait", "barrier.", "fence.mbarrier_init", "try_wait", "st.async", "bra $L"] {
            let found = places(what).into_iter();
            // Only the branches that follow a wait and repeat it.
            changes.extend(
                found
                    .filter(|&at| what != "bra $L" || lines[at - 1].contains("try_wait"))
                    .map(|at| (at, String::new())),
            );
        }
        for at in places(expect) {
            let (before, bytes) = lines[at].trim_end_matches(';').rsplit_once(", ").unwrap();
            let bytes: i64 = bytes.parse().unwrap();
            changes.extend([-4, 4].map(|more| (at, format!("{before}, {};", bytes + more))));
            changes.push((at, format!("{};", before.replace(".expect_tx", ""))));
        }
        for at in places("try_wait") {
            changes.push((at, lines[at].replace(", 0;", ", 1;")));
            changes.push((at, lines[at].replace("acquire.cluster", "acquire.cta")));
        }
        for at in places("mbarrier.init.") {
            changes.push((at, lines[at].replace(", 1;", ", 2;")));
            changes.push((at, lines[at].repeat(2)));
        }
        // Stores of both meetings that count on one barrier.
        changes.extend(places("st.async").into_iter().map(|at| {
            let swapped =
                if lines[at].contains("+8]") { lines[at].replace("+8]", "]") } else { lines[at].replace("];", "+8];") };
            (at, swapped)
        }));
        assert!(changes.len() > 30, "{} changes", changes.len());
        for (at, line) in changes {
            let changed: String =
                lines.iter().enumerate().flat_map(|(i, old)| [if i == at { &line } else { *old }, "\n"]).collect();
            let why = refusal_of(kernel.clone(), &spec, &recipe, |_| changed.clone());
            let why = why.unwrap_or_else(|| panic!("{target:?}: {} as {line:?} is accepted", lines[at]));
            println!("{} as {line:?}: {why}", lines[at].trim());
        }
    }
}

/// Four folds over a CTA, and a barrier in each.
#[test]
fn statistics_waits_left_out_are_refused() {
    let shape = Shape { batch: 1, tokens: 1, vocab: 2049 };
    let kernel = kernels(PtxTarget::Sm80, "gpu-two-pass", &LossSpec::default(), shape, Dtype::Bf16).remove(0);
    let zeros = vec![0; 2 * shape.vocab];
    let inputs = [
        ("inverse_temperature", f32_bytes([1.0])),
        ("columns", bytes_of([(shape.vocab as i32).to_le_bytes()])),
        ("logits", zeros),
        ("ids", vec![0; 4]),
    ];
    run(&kernel, ApproximateUnits::Rounded, &inputs).unwrap();
    let barrier = "\tbarrier.sync 0;\n";
    let places: Vec<usize> = kernel.text.match_indices(barrier).map(|(place, _)| place).collect();
    assert_eq!(places.len(), 4);
    for place in places {
        let text = format!("{}{}", &kernel.text[..place], &kernel.text[place + barrier.len()..]);
        let why = run(&PtxKernel { text, ..kernel.clone() }, ApproximateUnits::Rounded, &inputs).unwrap_err();
        println!("statistics without the barrier at byte {place}: {why}");
    }
}

/// Rows that begin anywhere, every other of them masked, the last of the batch too.
#[test]
fn masked_rows_are_not_read() {
    let spec = LossSpec::default();
    for (vocab, dtype) in [(1031, Dtype::Bf16), (1031, Dtype::F32), (2048, Dtype::F16), (33_001, Dtype::Bf16)] {
        let recipe = recipe([1, 4, vocab], dtype, Regime::Normal);
        let mut problem = recipe.problem(&spec).unwrap();
        problem.mask.iter_mut().enumerate().for_each(|(token, counts)| *counts = token % 2 == 0);
        let around = Around::new(&spec, &problem);
        let of_a_row = vocab * dtype.size();
        let masked: Vec<Range<usize>> = [1, 3].map(|row| row * of_a_row..(row + 1) * of_a_row).into();
        let logits = ("logits", logits_bytes(&problem.logits));
        let expect_zeros = |outputs: &[Vec<u8>]| {
            assert!(masked.iter().all(|row| outputs[0][row.clone()].iter().all(|&byte| byte == 0)), "{vocab} {dtype}");
            assert!(outputs[0][..of_a_row].iter().any(|&byte| byte != 0), "{vocab} {dtype}");
        };
        let [numbers, tokens] = around.given_to_one_pass();
        let inputs = [("ids", around.ids()), ("numbers", numbers), logits.clone(), ("tokens", tokens)];
        for target in TARGETS {
            let kernel = &kernels(target, "gpu-one-pass", &spec, around.shape, dtype)[0];
            expect_zeros(&run_without(kernel, ApproximateUnits::Rounded, &inputs, &masked).unwrap());
            // Logits of tokens that count are read.
            let first: Range<usize> = 0..of_a_row;
            assert!(
                run_without(kernel, ApproximateUnits::Rounded, &inputs, &[first])
                    .unwrap_err()
                    .contains("never written")
            );
        }
        let kernel = &kernels(PtxTarget::Sm80, "gpu-two-pass", &spec, around.shape, dtype)[1];
        let scales = per_token(&columns("gpu-two-pass", &spec, "scales"), 4, |name, token| match name {
            "mask" => f64::from(u8::from(around.mask[token])),
            _ => 0.125,
        });
        let inputs = [
            ("inverse_temperature", f32_bytes([1.0])),
            ("columns", bytes_of([(vocab as i32).to_le_bytes()])),
            logits,
            ("ids", around.ids()),
            ("scales", scales),
        ];
        expect_zeros(&run_without(kernel, ApproximateUnits::Rounded, &inputs, &masked).unwrap());
    }
}

#[test]
fn numbers_and_folds_changed_are_refused() {
    // Where the temperature is low, an exponential above that of the maximum is ∞. With a bonus rows are walked by their gaps, without one
    // by exponents.
    for (what, regime, temperature, bonus, from, to) in [
        ("log₂e off by 2⁻¹⁴", Regime::Normal, 1.0, 0.02, "0fBFB8AA3B", "0fBFB8B23B"),
        ("lanes 16 apart never meet", Regime::Normal, 1.0, 0.02, ", 16, 31, 0xffffffff", ", 8, 31, 0xffffffff"),
        ("no −∞ where the target was", Regime::Normal, 1.0, 0.02, "0fFF800000", "0f00000000"),
        ("gaps of −∞ are infinite", Regime::Holes, 1.0, 0.02, "0f71800000", "0f7F800000"),
        ("1/3 of the logarithm's series", Regime::Normal, 1.0, 0.02, "0f3EAAAAAB", "0f3E8AAAAB"),
        ("the smaller of a pair", Regime::Peaked, 0.1, 0.02, "max.NaN.bf16x2", "min.NaN.bf16x2"),
        ("log₂e of exponents off by 2⁻¹⁴", Regime::Normal, 1.0, 0.0, "0fBFB8AA3B", "0fBFB8B23B"),
        ("the least logit is −∞", Regime::Holes, 1.0, 0.0, "4051759488", "4286644096"),
    ] {
        let spec = LossSpec { entropy_coef: bonus, temperature: temperature.into(), ..LossSpec::default() };
        // A B200 has no exponents that are computed so.
        let targets = if what == "the least logit is −∞" { &TARGETS[..1] } else { &TARGETS };
        for &target in targets {
            let recipe = recipe([1, 3, 517], Dtype::Bf16, regime);
            let refused = refusal(target, &spec, &recipe, |text| text.replace(from, to));
            println!("{what}, {target:?}: {}", refused.unwrap_or_else(|| panic!("{what}, {target:?}: accepted")));
        }
    }
}
