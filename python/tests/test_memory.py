"""The memory of a call, measured, and as a gate of campaigns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernels
import numpy as np
import pytest

import assay
from assay import _memory

UNIT = 32 << 20
pytestmark = pytest.mark.skipif(
    isinstance(_memory.meter_of(None, None), str), reason="ignored: this system sets no high-water mark back"
)


def filled(count: float) -> Any:
    """An array of so many units, each page of it touched."""
    return np.ones(int(count * UNIT), np.uint8)


def measured(call: Callable[[], object]) -> dict[str, float | None]:
    meter = _memory.meter_of(None, None)
    assert isinstance(meter, _memory.Meter)
    found = _memory.measure(call, meter, UNIT)._asdict()
    return {name: None if size is None else size / UNIT for name, size in found.items()}


def both(arrays: float) -> None:
    _memory.enter_pass("both")
    filled(arrays)
    _memory.enter_pass(None)


def test_the_peak_of_a_call_is_of_that_call_alone() -> None:
    held = filled(2)
    # Pages of the C library that were used before are given back first.
    filled(3)
    found = measured(lambda: both(1.5))
    assert found["peak"] == pytest.approx(1.5, abs=0.05)
    assert (found["forward"], found["kept"], found["leaked"]) == (None, 0, 0)
    assert held[0] == 1


def test_a_backward_pass_holds_what_the_forward_pass_left() -> None:
    def call() -> None:
        _memory.enter_pass("forward")
        left = filled(1)
        filled(2)
        _memory.enter_pass("backward")
        right = filled(0.5)
        _memory.enter_pass(None)
        # What is made between the passes and their end is of neither.
        filled(4)
        assert left[0] == right[0]

    found = measured(call)
    assert found["forward"] == pytest.approx(3.0, abs=0.05)
    assert found["backward"] == pytest.approx(1.5, abs=0.05)
    assert found["peak"] == pytest.approx(3.0, abs=0.05)


def test_what_one_call_keeps_is_no_leak_and_what_each_leaves_is() -> None:
    kept: list[Any] = []

    def keeps() -> None:
        both(0.1)
        kept.extend([] if kept else [filled(1)])

    found = measured(keeps)
    assert found["kept"] == pytest.approx(1.0, abs=0.05)
    assert found["leaked"] == 0
    left: list[Any] = []

    def leaves() -> None:
        both(0.1)
        left.append(filled(0.5))

    found = measured(leaves)
    assert found["leaked"] == pytest.approx(0.5, abs=0.05)
    assert found["kept"] == 0


OPTIONS: dict[str, Any] = {"dtypes": ["f32"], "cases": 1, "wide": 0, "power": False, "repro_dir": None, "progress": False}
WIDE = "1x8x131072"
SIZE = 8 * 131072 * 4


@pytest.fixture(autouse=True)
def small_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of 4 MB are measured well enough to tell whole arrays of them."""
    monkeypatch.setattr(_memory, "SMALLEST", SIZE)


def hungry(problem: assay.Problem) -> dict[str, Any]:
    """Right, with three more arrays of the logits' size."""
    logits = problem.numpy().logits
    arrays = [logits + np.float32(i) for i in range(3)]
    outputs = kernels.honest(problem)
    assert len(arrays) == 3
    return outputs


def test_a_campaign_fails_a_kernel_that_holds_more_than_it_may() -> None:
    found = assay.check(hungry, memory=2.5, shapes=[WIDE], **OPTIONS)
    assert not found.passed
    (cause,) = found.causes
    assert cause.gate == "memory"
    assert "× the logits beside its inputs, and 2.5 is allowed" in cause.summary
    assert f"× the logits of {WIDE} f32; at most 2.5 is allowed" in " ".join(repr(found).split())
    allowed = assay.check(hungry, memory=2.5, shapes=[WIDE], allow=["memory"], **OPTIONS)
    assert allowed.passed and "1 allowed" in repr(allowed)
    assert assay.check(hungry, memory=40, shapes=[WIDE], **OPTIONS).passed


def test_a_workspace_that_is_kept_counts() -> None:
    kept: list[Any] = []

    def keeps(problem: assay.Problem) -> dict[str, Any]:
        if not kept:
            kept.append(np.ones(40 * SIZE, np.uint8))
        return kernels.honest(problem)

    found = assay.check(keeps, memory=40, shapes=[WIDE], **OPTIONS)
    (cause,) = found.causes
    assert cause.gate == "memory" and "40.0" in cause.summary and "is kept from the first call on" in cause.summary


def test_where_nothing_is_measured_a_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_memory, "_gives_back", lambda kind: False)
    with pytest.raises(
        assay.AssayError, match="memory: got a limit, expected none here: the allocator of this process keeps"
    ):
        assay.check(kernels.honest, memory=40, shapes=[WIDE], **OPTIONS)


def test_a_leak_is_a_cause() -> None:
    left: list[Any] = []

    def leaky(problem: assay.Problem) -> dict[str, Any]:
        left.append(np.ones(2 * SIZE, np.uint8))
        return kernels.honest(problem)

    found = assay.check(leaky, memory=40, shapes=[WIDE], **OPTIONS)
    (cause,) = found.causes
    assert cause.gate == "leak" and "each call leaves 2.0" in cause.summary


def test_the_passes_of_a_differentiated_function_are_told_apart() -> None:
    # From 32 MiB on the C library maps each array by itself: XLA frees in other threads than those that release.
    wide = "1x64x131072"
    jax = pytest.importorskip("jax")

    def logp(logits: Any, ids: Any) -> Any:
        return jax.numpy.take_along_axis(jax.nn.log_softmax(logits), ids[..., None], -1)[..., 0]

    found = assay.check_logp(logp, framework="jax", memory=0.5, shapes=[wide], **OPTIONS)
    (cause,) = found.causes
    assert "a call holds" in cause.summary
    pytest.importorskip("torch")

    def in_torch(logits: Any, ids: Any) -> Any:
        return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]

    found = assay.check_logp(in_torch, memory=0.5, shapes=[wide], **OPTIONS)
    (cause,) = found.causes
    assert "the backward pass holds" in cause.summary


def test_an_error_at_the_measured_problem_is_no_pass() -> None:
    calls: list[int] = []

    def refuses(problem: assay.Problem) -> dict[str, Any]:
        calls.append(1)
        # Memory is measured before the campaign.
        if len(calls) == 1:
            raise RuntimeError("no room")
        return kernels.honest(problem)

    found = assay.check(refuses, memory=40, shapes=[WIDE], **OPTIONS)
    (cause,) = found.causes
    assert "raises an error where its memory is measured: RuntimeError: no room" in cause.summary


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"memory": "1.1"}, "memory: got '1.1', expected a number"),
        ({"memory": -1.0}, r"memory: got -1\.0, expected a number"),
        (
            {"memory": 1.1, "shapes": ["2x3x7"]},
            r"memory: got shapes whose largest logits are 0\.0 MB, expected at least 4 MB",
        ),
        ({"memory": True}, "memory: got True, expected a number"),
        ({"memory": 1.1, "dtypes": ["f64"]}, "memory: got dtypes|f64"),
        ({"memory": 1.1, "isolate": True}, "memory: got a limit, expected none with `isolate`"),
    ],
)
def test_a_limit_that_cannot_be_asked_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(assay.AssayError, match=said):
        assay.check(kernels.honest, **{**OPTIONS, **options})
