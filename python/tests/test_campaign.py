from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kernels
import misbehaving
import numpy as np
import pytest
from kernels import honest, too_large

import assay


def check(fn: Callable[[assay.Problem], Any], **options: Any) -> assay.Report:
    few: dict[str, Any] = {"cases": 20, "wide": 0, "repro_dir": None, "power": False}
    return assay.check(fn, **(few | options))


def words(report: assay.Report) -> str:
    """The report without its line breaks, which may be in the middle of a phrase."""
    return " ".join(repr(report).split())


ISOLATED: dict[str, Any] = {"isolate": True, "cases": 4, "timeout": 2.0, "shrink": False}


def test_an_honest_kernel_passes_and_the_report_says_what_that_is_worth() -> None:
    report = check(honest, cases=60, power=True)
    assert report and report.passed, report
    assert (report.cases, report.causes, report.stopped, report.grade) == (60, [], None, "standard")
    assert report.power is not None and report.power["rejected"] > 40, report
    assert report.coverage["with_gradient"] > 1000
    assert "PASS  honest" in repr(report)
    report.raise_for_failure()


def test_a_wrong_kernel_is_one_cause_on_a_small_problem_that_is_kept(tmp_path: Path) -> None:
    report = check(too_large, regimes=["normal"], repro_dir=tmp_path)
    assert not report
    assert [(cause.gate, cause.status) for cause in report.causes] == [("dlogits", "fail")]
    cause = report.causes[0]
    small = cause.problem
    assert np.prod(small.shape) < 200 and cause.verdict is not None and cause.verdict["lines"]
    assert not small.check(too_large(small)) and small.check(honest(small))
    with pytest.raises(assay.KernelFailure, match="gate +dlogits, in"):
        report.raise_for_failure()
    # The next campaign begins with it.
    again = check(too_large, cases=1, regimes=["small"], repro_dir=tmp_path)
    assert again.cases > 1


def test_the_numbers_of_another_spec_are_told() -> None:
    def sequence_mean(problem: assay.Problem) -> dict[str, Any]:
        outputs = honest(problem)
        arrays = problem.numpy()
        of_row = arrays.mask.sum(-1, keepdims=True) * arrays.mask.shape[0] / arrays.mask.sum()
        weight = 1 / np.maximum(of_row, 1e-9)
        dlogits = outputs["dlogits"].astype(np.float64) * np.where(arrays.mask, weight, 0)[..., None]
        loss = (outputs["token_loss"] * np.where(arrays.mask, weight, 0)).sum() / arrays.mask.sum()
        return outputs | {"loss": np.float32(loss), "dlogits": dlogits.astype(np.float32)}

    report = check(sequence_mean, dtypes=["f32"])
    assert not report
    names = [name for cause in report.causes for names in cause.spec_that_would_pass for name in names]
    assert "loss_type=grpo" in names, report


def test_a_kernel_that_reads_one_advantage_a_row_is_found_on_packed_sequences(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = check(honest, packed=True)
    assert report and "PASS  honest: 20 packed problems" in repr(report), report
    monkeypatch.setattr(kernels, "advantages", lambda arrays: arrays.advantages[:1, None])
    report = check(honest, packed=True, repro_dir=tmp_path)
    assert not report and report.causes[0].gate == "token_loss", report
    small = report.causes[0].problem
    assert np.prod(small.shape) <= 4 and np.asarray(small.cu_seqlens).size == 3
    with pytest.raises(assay.AssayError, match="packed sequences have no padded width"):
        check(honest, spec=assay.spec(reduction={"fixed_length": {"rows": "all"}}), packed=True)


def test_an_lm_head_is_asked_for() -> None:
    def zeros(problem: assay.Problem) -> dict[str, Any]:
        arrays = problem.numpy()
        return {"loss": 0.0, "dhidden": np.zeros_like(arrays.hidden), "dlm_head": np.zeros_like(arrays.lm_head)}

    report = check(zeros, lm_head=True, cases=6)
    assert not report and report.causes
    assert not check(zeros, shapes=["2x3x16x33"], cases=4)


@pytest.mark.parametrize(
    ("fn", "gate", "said", "raised"),
    [
        (misbehaving.raises, "raised", "ValueError: no such tile", assay.KernelFailure),
        (misbehaving.returns_nothing, "output", "expected a dict of loss, dlogits", assay.KernelFailure),
        (misbehaving.writes_to_its_input, "input-mutated", "logits", assay.InputMutated),
        (misbehaving.returns_a_view, "output", "a view of the input `logits`", assay.KernelFailure),
        (misbehaving.returns_random_bits, "not-reproducible", "not-reproducible", assay.NotReproducible),
    ],
)
def test_what_a_kernel_does_instead_of_answering_is_a_cause(
    fn: Callable[[assay.Problem], Any], gate: str, said: str, raised: type[Exception]
) -> None:
    report = check(fn, cases=40, regimes=["normal"])
    assert [cause.gate for cause in report.causes] == [gate], report
    assert said in words(report)
    with pytest.raises(raised, match=gate):
        report.raise_for_failure()


def test_a_fault_that_every_problem_has_ends_the_campaign_after_ten() -> None:
    report = check(misbehaving.raises, cases=40)
    assert (report.cases, report.stopped) == (10, "the first 10 problems all failed by the same fault"), report
    assert check(misbehaving.returns_nothing, cases=40).cases == 10


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (misbehaving.needs_a_driver, "^device: got a kernel that raises RuntimeError: Found no NVIDIA driver on your system"),
        (misbehaving.needs_a_package, "^device: got a kernel that raises ModuleNotFoundError: No module named 'no_such_package'"),
        (misbehaving.takes_arrays_of_jax, "^device: got 'no-such-platform', expected a platform that JAX has here, such as 'cpu'$"),
    ],
)
def test_a_device_or_package_that_is_missing_is_one_error(fn: Callable[[assay.Problem], Any], said: str, isolate: bool) -> None:
    with pytest.raises(assay.AssayError, match=said):
        check(fn, cases=40, device="no-such-platform", isolate=isolate, timeout=120)


@pytest.mark.parametrize("isolate", [False, True])
def test_a_device_that_pytorch_lacks_is_one_error(isolate: bool) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(assay.AssayError, match="^device: got 'cuda', expected 'cpu': PyTorch .* has no GPU here$"):
        check(misbehaving.takes_tensors, cases=40, device="cuda", isolate=isolate, timeout=120)


def test_a_device_that_some_problems_alone_ask_for_is_a_cause() -> None:
    report = check(misbehaving.needs_a_driver_for_bf16, dtypes=["f32", "bf16"], cases=12)
    assert [cause.gate for cause in report.causes] == ["raised"] and "NVIDIA driver" in repr(report), report


@pytest.mark.parametrize("name", ["mask", "ids", "advantages", "old_logp"])
def test_what_is_kept_by_the_address_of_any_array_is_found(name: str) -> None:
    def kernel(problem: assay.Problem) -> Any:
        return misbehaving.keeps_by_address(name, problem)

    misbehaving.sums.clear()
    report = check(kernel, cases=1, dtypes=["f32"], shapes=["3x40x33"], regimes=["normal"], masked_garbage=False)
    assert [cause.gate for cause in report.causes] == ["stale-memory"], report


def test_dlogits_may_be_written_over_logits_where_that_is_asked_for() -> None:
    assert check(misbehaving.in_place, inplace=True, dtypes=["f32"], regimes=["normal"])
    report = check(misbehaving.in_place, dtypes=["f32"], regimes=["normal"])
    assert "read-only" in repr(report) and not report


def test_what_a_kernel_does_not_compute_is_skipped_and_nothing_at_all_fails() -> None:
    report = check(misbehaving.does_not_compute_f32)
    assert report and report.skipped[0]["cases"] == 10, report
    assert not check(misbehaving.computes_nothing)


def test_an_interrupt_ends_it_with_what_was_found_so_far() -> None:
    misbehaving.calls = 0
    report = check(misbehaving.is_interrupted)
    assert report.stopped and 0 < report.cases < 10 and "stopped" in repr(report)


@pytest.mark.parametrize("isolate", [False, True])
def test_only_the_outputs_that_are_named_are_judged(isolate: bool) -> None:
    def checked(outputs: list[str] | None) -> assay.Report:
        return check(misbehaving.returns_a_wrong_logp, outputs=outputs, **(ISOLATED | {"isolate": isolate}))

    assert not checked(None)
    assert checked(["loss", "dlogits"])
    assert "`entropy`: got nothing" in repr(checked(["loss", "dlogits", "entropy"]))


def test_a_cause_is_allowed_by_the_name_of_a_wrong_kernel_that_fails_alike() -> None:
    def of_targets_alone(problem: assay.Problem) -> dict[str, Any]:
        outputs, arrays = honest(problem), problem.numpy()
        target = np.arange(problem.shape[-1]) == arrays.ids[..., None]
        return outputs | {"dlogits": np.where(target, outputs["dlogits"], 0).astype(arrays.logits.dtype)}

    name = "non-target-dlogits-dropped"
    report = check(of_targets_alone, regimes=["normal"])
    assert not report and [name in cause.like for cause in report.causes] == [True], report
    allowed = check(of_targets_alone, regimes=["normal"], allow=[name])
    assert allowed and len(allowed.allowed) == 1 and repr(allowed).startswith("ALLOWED  only the target")


def test_a_report_is_written(tmp_path: Path) -> None:
    report = check(too_large)
    assert json.loads(report.to_json(tmp_path / "report.json"))["passed"] is False
    assert (tmp_path / "report.json").read_text() == report.to_json()
    report.to_html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert report.causes[0].sentence in page and "<svg" in page and "too_large: 20 problems" in page
    report.to_markdown(tmp_path / "report.md")
    written = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert written.startswith("### FAIL") and "| smallest | " in written
    assert "srcdoc" in report._repr_html_() and report.causes[0].sentence in report._repr_html_()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cases": 0}, "expected"),
        ({"allow": ["target-cancel"]}, "target-cancel"),
        ({"grade": "best"}, "exact"),
        ({"dtypes": []}, "dtypes"),
        ({"shapes": ["2x3"]}, "shapes: shape: got `2x3`, expected BxTxV"),
        ({"shapes": ["many", "few"]}, "or one of many, few"),
        ({"shapes": ["2x3x5", "2x3x4x5"]}, "expected one of the two"),
        ({"regimes": ["normale"]}, "normal"),
        ({"beta": "x"}, "expected a number"),
        ({"seconds": -1.0}, "seconds"),
        ({"isolate": True}, "expected a function that a new process can import"),
    ],
)
def test_an_option_that_is_none_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(assay.AssayError) as error:
        check(lambda problem: honest(problem), **options)
    assert said in str(error.value)
    with pytest.raises(assay.AssayError, match="expected a function"):
        assay.check("honest")  # type: ignore[arg-type]


def test_what_uses_jax_is_given_few_shapes() -> None:
    from assay._check import compiles

    def helped(problem: assay.Problem) -> Any:
        return helper(problem)

    def helper(problem: assay.Problem) -> Any:
        return problem.jax().logits

    assert compiles(helper) and compiles(helped)
    assert not compiles(honest) and not compiles(too_large)


def test_a_process_of_its_own_answers_the_same() -> None:
    assert check(honest, **ISOLATED)
    assert check(misbehaving.prints, **ISOLATED)
    assert [cause.gate for cause in check(too_large, **ISOLATED).causes] == ["dlogits"]


@pytest.mark.parametrize(
    "fn",
    [
        misbehaving.returns_nothing,
        misbehaving.returns_another_shape,
        misbehaving.returns_no_gradient,
        misbehaving.returns_integers,
        misbehaving.returns_a_view,
        misbehaving.writes_to_its_input,
    ],
)
def test_a_process_of_its_own_fails_the_same(fn: Callable[[assay.Problem], Any]) -> None:
    options = ISOLATED | {"regimes": ["normal"], "dtypes": ["f32"]}
    here, apart = (check(fn, **(options | {"isolate": isolate})) for isolate in (False, True))
    assert here.causes and [(cause.gate, cause.fault) for cause in here.causes] == [
        (cause.gate, cause.fault) for cause in apart.causes
    ]


@pytest.mark.parametrize(
    ("fn", "gate", "said", "raised", "number"),
    [
        (misbehaving.crashes, "crashed", "SIGSEGV", assay.KernelCrashed, signal.SIGSEGV),
        (misbehaving.exits, "crashed", "exit status: 3", assay.KernelCrashed, None),
        (misbehaving.exits_slowly, "crashed", "it exited by itself, exit status: 7", assay.KernelCrashed, None),
        (misbehaving.hangs, "timed-out", "killed", assay.KernelTimeout, None),
    ],
)
def test_a_process_that_ends_or_hangs_is_a_cause(
    fn: Callable[[assay.Problem], Any], gate: str, said: str, raised: type[Exception], number: int | None
) -> None:
    report = check(fn, **(ISOLATED | {"cases": 2}))
    assert [cause.gate for cause in report.causes] == [gate], report
    assert said in words(report) and report.causes[0].signal == number
    with pytest.raises(raised) as error:
        report.raise_for_failure()
    assert getattr(error.value, "signal", None) == number


def plain(level: str) -> Callable[[assay.Problem], dict[str, Any]]:
    """TRL's loss in f32 as automatic differentiation makes it: of two equal arguments of `minimum` each gets half of the gradient."""

    def plain_f32(problem: assay.Problem) -> dict[str, Any]:
        arrays, one = problem.numpy(), np.float32(1)
        mask, x = arrays.mask, arrays.logits.astype(np.float32)
        target = np.arange(x.shape[-1]) == arrays.ids[..., None]
        z = x - x.max(-1, keepdims=True)
        log_sum = np.log(np.exp(z).sum(-1))
        logp = np.where(target, z, 0).sum(-1) - log_sum
        lengths = np.maximum(mask.sum(-1, keepdims=True), 1).astype(np.float32)
        log_ratio = np.where(mask, logp - arrays.old_logp, 0).astype(np.float32)
        if level == "sequence":
            log_ratio = np.broadcast_to(log_ratio.sum(-1, keepdims=True) / lengths, mask.shape)
        ratio, a = np.exp(log_ratio), np.broadcast_to(arrays.advantages[:, None], mask.shape).astype(np.float32)
        bounds = np.float32(0.8), np.float32(1.2)
        free, held = ratio * a, np.clip(ratio, *bounds) * a
        inside = ((ratio >= bounds[0]) & (ratio <= bounds[1])).astype(np.float32)
        slope = np.where(free < held, one, np.where(free > held, inside, (one + inside) / 2))
        count = np.float32(max(mask.sum(), 1))
        by_ratio = np.where(mask, -slope * a * ratio, 0) / count
        if level == "sequence":
            by_ratio = np.where(mask, by_ratio.sum(-1, keepdims=True) / lengths, 0)
        p = np.exp(z - log_sum[..., None])
        dlogits = by_ratio[..., None] * (target - p)
        loss = np.where(mask, -np.minimum(free, held), 0).sum() / count
        return {"loss": np.float32(loss), "dlogits": dlogits.astype(arrays.logits.dtype), "logp": np.where(mask, logp, 0)}

    return plain_f32


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_plain_f32_passes_where_ratios_are_at_the_bounds_of_the_clip(level: str) -> None:
    options: dict[str, Any] = {"shapes": ["4x9x33", "2x3x2", "4x16x32"], "dtypes": ["f32"], "cases": 400, "masked_garbage": False}
    with np.errstate(all="ignore"):
        report = check(plain(level), importance_sampling_level=level, loss_type="dapo", **options)
    assert report, report


@pytest.mark.parametrize("option", [{"layout": "hv"}, {"rounds_logits": True}])
def test_options_of_a_head_are_refused_without_one(option: dict[str, Any]) -> None:
    with pytest.raises(assay.ProblemError, match=f"{next(iter(option))}: got it for problems of logits, expected lm_head=True"):
        check(honest, **option)
