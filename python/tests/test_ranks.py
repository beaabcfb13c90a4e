"""Kernels that several processes share: cuts, planted bugs, and ranks that fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ranked

import assay

OPTIONS: dict[str, Any] = dict(dtypes=["f32"], cases=12, wide=0, power=False, repro_dir=None, progress=False, shapes=["4x5x17", "3x9x33"], shrink=False)


@pytest.mark.parametrize("cut", ["vocabulary", "batch", "tokens"])
def test_ranks_shares_are_put_together(cut: str) -> None:
    report = assay.check(ranked.logp, "logp", entropy=False, ranks=3, cut=cut, **OPTIONS)
    assert report.passed, report
    assert report.cases > 2


@pytest.mark.parametrize("kernel", [ranked.without_maximum, ranked.without_targets, ranked.times_ranks])
def test_ranks_planted_bugs_are_found(kernel: Any) -> None:
    report = assay.check(kernel, "logp", entropy=False, ranks=2, cut="vocabulary", **OPTIONS)
    assert not report.passed and report.causes


@pytest.mark.parametrize(
    ("kernel", "gate", "words"),
    [
        (ranked.dying, "crashed", "rank 1: "),
        (ranked.raising, "raised", "no exchange"),
        (ranked.hanging, "timed-out", "no answer in 2s"),
        (ranked.of_another_shape, "output", "dlogits"),
    ],
)
def test_ranks_that_fail_end_the_others(kernel: Any, gate: str, words: str) -> None:
    options = OPTIONS | {"cases": 1}
    report = assay.check(kernel, "logp", entropy=False, ranks=2, cut="vocabulary", timeout=2.0, **options)
    assert [cause.gate for cause in report.causes] == [gate], report
    assert words in str(report.causes[0].fault), report
    # A kernel's processes are gone once the report is there.
    left = subprocess.run(["pgrep", "-f", f"assay._worker.*{kernel.__name__}"], capture_output=True, text=True)
    assert left.stdout == ""


def test_ranks_more_than_the_axis_has_are_skipped() -> None:
    report = assay.check(ranked.logp, "logp", entropy=False, ranks=3, cut="batch", **(OPTIONS | {"shapes": ["2x3x7"], "cases": 2}))
    assert not report.passed and "3 ranks, more than there are indices of the batch" in report.skipped[0]["why"]


def test_ranks_bad_options_name_what_is_expected() -> None:
    for options, words in [
        (dict(ranks=0), "ranks: got 0, expected an integer from 1 to 64"),
        (dict(ranks=2, cut="rows"), "cut: got 'rows', expected one of vocabulary, batch, tokens"),
        (dict(ranks=2, invariant=True, variants=[ranked.logp]), "variants: got functions, expected none with"),
    ]:
        with pytest.raises(assay.AssayError, match=words):
            assay.check(ranked.logp, "logp", entropy=False, **OPTIONS, **options)
    with pytest.raises(assay.AssayError, match="ranks: got <lambda>|ranks: got .*<lambda>"):
        assay.check(lambda problem, shard: None, "logp", entropy=False, ranks=2, **OPTIONS)  # type: ignore[arg-type, return-value]
    with pytest.raises(assay.AssayError, match="ranks: got 2, expected None with framework='jax'"):
        assay.check_logp(ranked.logp, framework="jax", ranks=2, **OPTIONS)


def test_ranks_example_passes() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    example = Path(__file__).parents[2] / "examples/python/torch_ranks.py"
    found = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=300)
    assert "PASS  logp: 60 problems" in found.stdout, found.stdout + found.stderr
