"""Kernels that several processes share: cuts, planted bugs, and ranks that fail."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ranked

import assay

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"
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


def test_ranks_are_compared_with_one_rank() -> None:
    options = OPTIONS | {"ranks": 2, "cut": "vocabulary", "invariant": ["ranks"]}
    right = assay.check(ranked.logp, "logp", entropy=False, **options)
    assert right.passed and right.invariance[0]["problems"] > 3, right
    # The judge alone accepts what differs between two ranks and one by more than another order of sums explains.
    assert assay.check(ranked.coarser_on_ranks, "logp", entropy=False, **(options | {"invariant": False})).passed
    coarser = assay.check(ranked.coarser_on_ranks, "logp", entropy=False, **options)
    assert [cause.gate for cause in coarser.causes] == ["ranks-invariance"], coarser


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
    cases: list[tuple[dict[str, Any], str]] = [
        (dict(ranks=0), "ranks: got 0, expected an integer from 1 to 64"),
        (dict(ranks=2, cut="rows"), "cut: got 'rows', expected one of vocabulary, batch, tokens"),
        (dict(ranks=2, invariant=True, variants=[ranked.logp]), "variants: got functions, expected none with"),
    ]
    for options, words in cases:
        with pytest.raises(assay.AssayError, match=words):
            assay.check(ranked.logp, "logp", entropy=False, **OPTIONS, **options)
    with pytest.raises(assay.AssayError, match="ranks: got <lambda>|ranks: got .*<lambda>"):
        assay.check(lambda problem, shard: ranked.logp(problem, shard), "logp", entropy=False, ranks=2, **OPTIONS)


def test_ranks_of_jax_are_its_devices() -> None:
    pytest.importorskip("jax", reason="JAX is not installed")
    # One device is all that this process has; the example has four.
    with pytest.raises(assay.AssayError, match="ranks: got 64, expected at most .*--xla_force_host_platform_device_count=64"):
        assay.check_logp(ranked.logp, framework="jax", ranks=64, **OPTIONS)
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    code = f"""
import runpy, assay, jax.numpy as jnp
example = runpy.run_path({str(EXAMPLES / "jax_ranks.py")!r})
options = dict(framework="jax", ranks=4, shapes=["2x3x33"], cases=6, power=False, repro_dir=None, wide=0, progress=False, shrink=False)
print(assay.check_logp(example["logp"], **options).passed)
text = open({str(EXAMPLES / "jax_ranks.py")!r}).read()
for right, wrong in [
    ('jax.lax.pmax(jax.lax.stop_gradient(x.max(-1)), "ranks")', "jax.lax.stop_gradient(x.max(-1))"),
    ('chosen = jax.lax.psum(jnp.where(own, chosen, 0), "ranks")', "chosen = jnp.where(own, chosen, 0)"),
]:
    assert right in text
    scope = {{"__name__": "planted"}}
    exec(text.replace(right, wrong).replace("out_specs=P()", "out_specs=P(), check_vma=False"), scope)
    print(assay.check_logp(scope["logp"], **options).passed)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment)
    assert found.stdout.split() == ["True", "False", "False"], found.stdout + found.stderr


def test_ranks_example_passes(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    command = [sys.executable, str(EXAMPLES / "torch_ranks.py")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    # One vocabulary of two entries is too small for three ranks.
    assert "PASS  logp: 59 problems" in found.stdout, found.stdout + found.stderr


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("dist.all_reduce(max_, dist.ReduceOp.MAX)", "pass"),
        ("dist.all_reduce(sums)", "dist.all_reduce(sums[0])"),
        ("return grad.to(logits.dtype), None, None", "return (grad * shard_count).to(logits.dtype), None, None"),
        ("own = (ids >= shard.start)", "own = (ids >= 0)"),
    ],
)
def test_ranks_planted_bugs_in_pytorch(right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    text = (EXAMPLES / "torch_ranks.py").read_text()
    assert right in text
    # A new process imports it by its name.
    name = f"planted_{abs(hash(right)) % 10**8}"
    (tmp_path / f"{name}.py").write_text("shard_count = 2\n" + text.replace(right, wrong))
    monkeypatch.syspath_prepend(str(tmp_path))
    planted = importlib.import_module(name)
    report = assay.check_logp(planted.logp, ranks=2, cut="vocabulary", **OPTIONS)
    assert not report.passed and report.causes, report


def test_ranks_losses_are_normalised_over_all_of_them() -> None:
    report = assay.check(ranked.loss, "trl", ranks=2, cut="batch", **OPTIONS)
    assert report.passed, report
    report = assay.check(ranked.loss_normalised_by_rank, "trl", ranks=2, cut="batch", **OPTIONS)
    assert {cause.gate.split()[0] for cause in report.causes} == {"dlogits"}, report
    report = assay.check(ranked.loss_of_rank, "trl", ranks=2, cut="batch", **OPTIONS)
    assert "loss: got other bits on rank 1 than on rank 0" in report.causes[0].sentence.replace("`", ""), report
