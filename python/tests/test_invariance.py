"""Relations between calls, asked of kernels in NumPy and JAX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernels import honest

import assay

OPTIONS: dict[str, Any] = dict(dtypes=["f32"], cases=40, wide=0, power=False, repro_dir=None, progress=False, shapes="many")


def finding(report: assay.Report, relation: str) -> Any:
    return next(found for found in report.invariance if found["relation"] == relation)


def nudged(problem: assay.Problem, is_moved: bool) -> dict[str, Any]:
    """A right answer, whose log-probabilities are moved by one bit."""
    answer = honest(problem)
    if is_moved:
        answer["logp"] = np.nextafter(answer["logp"], np.float32(-np.inf)) * (answer["logp"] != 0)
    return answer


def test_invariance_of_an_honest_kernel_holds() -> None:
    report = assay.check(honest, "trl", invariant=True, **OPTIONS)
    assert report.passed, report
    assert {found["relation"] for found in report.invariance if not found["problems"]} == {"chunk", "ranks"}
    assert "invariance   same bits in" in str(report)


def test_invariance_finds_a_split_by_the_number_of_rows() -> None:
    def split(problem: assay.Problem) -> dict[str, Any]:
        return nudged(problem, problem.numpy().ids.size > 8)

    assert assay.check(split, "trl", **OPTIONS).passed
    report = assay.check(split, "trl", invariant=["batch"], **OPTIONS)
    assert report.causes[0].gate == "batch-invariance" and "other bits" in report.causes[0].sentence
    assert "the tokens of the batch go from" in str(report)
    assert assay.check(split, "trl", invariant=["batch"], allow=["batch-invariance"], **OPTIONS).passed
    # One bit is within what another order of a sum may move.
    assert assay.check(split, "trl", invariant="limits", **OPTIONS).passed


def test_invariance_of_variants_is_asked_by_chunk() -> None:
    def variant(problem: assay.Problem) -> dict[str, Any]:
        return nudged(problem, True)

    report = assay.check(honest, "trl", invariant=["chunk"], variants=[variant], **OPTIONS)
    found = finding(report, "chunk")
    assert report.passed and found["other_bits"] > 20 and found["difference_over_limit"] < 1
    bits = assay.check(honest, "trl", invariant="bits", variants=[variant], **OPTIONS)
    assert [cause.gate for cause in bits.causes] == ["chunk-invariance"]


def test_invariance_alone_needs_no_right_answer() -> None:
    jax = pytest.importorskip("jax")

    def logp(logits: Any, ids: Any) -> Any:
        x = jax.nn.log_softmax(logits.astype("float32"))
        return jax.numpy.take_along_axis(x, ids[..., None], -1)[..., 0] / 2

    def of_batch(logits: Any, ids: Any) -> Any:
        return logp(logits, ids) - 1e-6 * logits.shape[0]

    options: dict[str, Any] = dict(framework="jax", **(OPTIONS | {"shapes": ["2x3x7", "3x3x7"], "cases": 12}))
    assert assay.check_invariance(logp, relations=["order", "repeat", "neighbours"], **options).passed
    report = assay.check_invariance(of_batch, relations=["batch"], **(options | {"shapes": "few"}))
    assert [cause.gate for cause in report.causes] == ["batch-invariance"] and finding(report, "batch")["grade"] == "bits"
    report = assay.check_invariance(of_batch, relations=["batch"], **options)
    assert [cause.gate for cause in report.causes] == ["batch-invariance"]


def test_invariance_bad_options_name_what_is_expected() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        (dict(invariant=["bathc"]), "invariant: got `bathc`, expected usual, bits, limits, or some of repeat"),
        (dict(invariant=[]), "invariant: got no relation"),
        (dict(invariant=None), "invariant: got None, expected True, False,"),
        (dict(variants=[honest]), "variants: got functions, expected none without `invariant`"),
        (dict(invariant=True, variants=[3]), r"variants\[0\]: got int, expected a function"),
        (dict(judged=False, invariant="limits"), "invariant: got \"limits\", expected bits or relations"),
        (dict(judged=False), "judged: got False, expected True, or `invariant`"),
    ]
    for options, words in cases:
        with pytest.raises(assay.AssayError, match=words):
            assay.check(honest, "trl", **OPTIONS, **options)


def test_invariance_refused_by_a_kernel_is_not_asked() -> None:
    def rows_alone(problem: assay.Problem) -> dict[str, Any]:
        if problem.numpy().ids.shape[1] > 3:
            raise NotImplementedError("more than 3 tokens")
        return honest(problem)

    report = assay.check(rows_alone, "trl", invariant=["length"], **(OPTIONS | {"shapes": ["2x3x7"], "cases": 4}))
    assert report.passed and finding(report, "length")["not_asked"] == "the kernel refuses it: more than 3 tokens"
