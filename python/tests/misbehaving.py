"""Kernels that do something else than answer. Another process imports them too."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from typing import Any

import numpy as np
from kernels import honest

import assay


def raises(problem: assay.Problem) -> dict[str, Any]:
    raise ValueError("no such tile")


def needs_a_driver(problem: assay.Problem) -> dict[str, Any]:
    # The words of PyTorch 2.15 for `torch.zeros(1, device="cuda")` where there is no GPU.
    raise RuntimeError("Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver")


def needs_a_driver_for_bf16(problem: assay.Problem) -> dict[str, Any]:
    return needs_a_driver(problem) if problem.dtype == "bf16" else honest(problem)


def needs_a_package(problem: assay.Problem) -> dict[str, Any]:
    import no_such_package  # type: ignore[import-not-found]

    return no_such_package.loss(problem)  # type: ignore[no-any-return]


def takes_arrays_of_jax(problem: assay.Problem) -> dict[str, Any]:
    return {"loss": problem.jax().logits.sum()}


def takes_tensors(problem: assay.Problem) -> dict[str, Any]:
    return {"loss": problem.torch().logits.sum()}


def returns_nothing(problem: assay.Problem) -> None:
    return None


def returns_another_shape(problem: assay.Problem) -> dict[str, Any]:
    outputs = honest(problem)
    return outputs | {"logp": outputs["logp"].reshape(-1)}


def returns_a_wrong_logp(problem: assay.Problem) -> dict[str, Any]:
    outputs = honest(problem)
    return outputs | {"logp": outputs["logp"] * 2}


def returns_no_gradient(problem: assay.Problem) -> dict[str, Any]:
    return {"loss": honest(problem)["loss"]}


def returns_integers(problem: assay.Problem) -> dict[str, Any]:
    outputs = honest(problem)
    return outputs | {"dlogits": outputs["dlogits"].astype(np.int32)}


def writes_to_its_input(problem: assay.Problem) -> dict[str, Any]:
    outputs = honest(problem)
    # Read-only for NumPy, and not for who has a pointer: PyTorch writes through it.
    import ctypes

    logits = problem.numpy().logits
    byte = ctypes.c_uint8.from_address(logits.__array_interface__["data"][0])
    byte.value ^= 1
    return outputs


def returns_a_view(problem: assay.Problem) -> dict[str, Any]:
    outputs = honest(problem)
    outputs["dlogits"] = problem.numpy().logits
    return outputs


def in_place(problem: assay.Problem) -> dict[str, Any]:
    outputs = honest(problem)
    logits = problem.numpy().logits
    logits[...] = outputs["dlogits"]
    outputs["dlogits"] = logits
    return outputs


def returns_random_bits(problem: assay.Problem) -> dict[str, Any]:
    outputs = honest(problem)
    nudge = np.float32(1 + 1e-7 * np.random.default_rng().integers(-2, 3))
    outputs["token_loss"] = outputs["token_loss"] * nudge
    return outputs


def does_not_compute_f32(problem: assay.Problem) -> dict[str, Any]:
    if problem.dtype == "f32":
        raise NotImplementedError("logits in f32")
    return honest(problem)


def computes_nothing(problem: assay.Problem) -> dict[str, Any]:
    raise NotImplementedError("anything")


def crashes(problem: assay.Problem) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def exits(problem: assay.Problem) -> dict[str, Any]:
    os._exit(3)


def exits_slowly(problem: assay.Problem) -> dict[str, Any]:
    atexit.register(time.sleep, 1.5)
    sys.exit(7)


def hangs(problem: assay.Problem) -> dict[str, Any]:
    time.sleep(600)
    return {}


def prints(problem: assay.Problem) -> dict[str, Any]:
    print("a line that is none of the protocol's")
    return honest(problem)


def keeps_by_address(name: str, problem: assay.Problem) -> dict[str, Any]:
    """Scales the loss by a sum over an array, which it looks up by the array's address."""
    arrays = problem.numpy()
    array = getattr(arrays, name)
    total = float(np.abs(array).sum()) + 1.0
    kept = sums.setdefault((array.__array_interface__["data"][0], array.shape), total)
    outputs = honest(problem)
    return outputs | {"loss": np.float32(outputs["loss"] * total / kept)}


sums: dict[Any, float] = {}


def is_interrupted(problem: assay.Problem) -> dict[str, Any]:
    global calls
    calls += 1
    if calls == 10:
        raise KeyboardInterrupt
    return honest(problem)


calls = 0
