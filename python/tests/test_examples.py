"""The examples pass, as they stand."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import assay
from assay import _native
from assay._check import compiles

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"


@pytest.mark.parametrize(
    ("name", "framework"),
    [("torch_autograd", "torch"), ("jax_jit", "jax"), ("pallas_kernel", "jax"), ("triton_kernel", "triton")],
)
def test_an_example_passes(name: str, framework: str) -> None:
    if framework == "triton":
        pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    loss = runpy.run_path(str(EXAMPLES / f"{name}.py"))["loss"]
    report = assay.check(loss, cases=24, wide=0, power=False, repro_dir=None)
    assert report, report
    assert compiles(loss) == (framework != "torch")


def test_the_example_of_logp_passes_and_what_is_not_upcast_fails() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    example = runpy.run_path(str(EXAMPLES / "torch_logp.py"))
    options: dict[str, Any] = {"temperature": 0.7, "dtypes": ["bf16"], "cases": 24, "wide": 0, "power": False, "repro_dir": None}
    right, wrong = (assay.check_logp(example[name], **options) for name in ("logp", "without_upcast"))
    assert right, right
    assert not wrong and {cause.gate.split()[0] for cause in wrong.causes} == {"logp", "dlogits"}, wrong


def test_the_example_of_a_cross_entropy_trains_alike() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    example = runpy.run_path(str(EXAMPLES / "torch_cross_entropy.py"))
    assert len(example["ours"]) == len(example["theirs"]) == example["STEPS"]
    assert example["difference"] < 1e-5


def test_the_example_of_logp_with_a_head_passes() -> None:
    pytest.importorskip("jax", reason="JAX is not installed")
    scores = runpy.run_path(str(EXAMPLES / "jax_logp.py"))["scores"]
    report = assay.check_logp(
        scores, framework="jax", entropy=True, lm_head=True, shapes=["2x3x16x257"], dtypes=["f32"], cases=6, wide=0,
        power=False, repro_dir=None,
    )  # fmt: skip
    assert report, report


def served(command: list[str], dtypes: list[str]) -> dict[str, object]:
    """What a worker's campaign comes to, as `assay check --exec` has it."""
    campaign = _native.Campaign(
        kernel="worker",
        spec=assay.spec("trl"),
        seconds=None,
        grade="standard",
        allow=[],
        shrink=False,
        power=False,
        repros=None,
        invariant=None,
        alone=False,
        deck={
            "dtypes": dtypes,
            "cases": 24,
            "seed": 0,
            "shapes": ["many"],
            "regimes": None,
            "wide": 0,
            "lm_head": False,
            "packed": False,
            "layout": "vh",
            "rounds_logits": False,
            "masked_garbage": None,
        },
    )
    found = campaign.run_isolated(command, 30.0, None, None)
    print(_native.report_text(found, True, None))
    read: dict[str, object] = json.loads(found)
    return read


def test_the_worker_in_python_passes() -> None:
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    assert served([sys.executable, str(EXAMPLES / "worker.py")], ["f32", "bf16", "f16"])["passed"]


def test_the_worker_in_cpp_passes(tmp_path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    worker = tmp_path / "worker"
    subprocess.run([compiler, "-O2", "-std=c++17", str(EXAMPLES / "worker.cpp"), "-o", str(worker)], check=True)
    report = served([str(worker)], ["f32"])
    assert report["passed"] and report["tried"] == 24
