"""A GPU without a device: CUDA's driver is `crates/cuda/examples/fake_cuda.rs`, whose launches the interpreter of PTX runs, and memory of
this process's stands for the device's."""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import assay
from assay import _gpu, _native

_LIBRARY = pathlib.Path(__file__).parents[2] / "target/debug/examples/libfake_cuda.so"
STREAM = 4096


class Fake:
    """The driver, and what was called of it."""

    def __init__(self) -> None:
        assert _LIBRARY.is_file(), f"{_LIBRARY} is missing: cargo build --example fake_cuda"
        self._record = pathlib.Path(tempfile.mkstemp(prefix="calls")[1])
        os.environ["ASSAY_FAKE_CUDA_RECORD"] = str(self._record)
        self._library = ctypes.CDLL(str(_LIBRARY))
        self._library.fake_cuda_lend.argtypes = (ctypes.c_uint64, ctypes.c_size_t)
        self._enqueue = _native.gpu_enqueue

    def set(self, settings: str) -> None:
        """Settings, and nothing has been called yet."""
        self._library.fake_cuda_set(settings.encode())
        self._record.write_text("")

    @property
    def calls(self) -> list[str]:
        return self._record.read_text().splitlines()

    @property
    def launches(self) -> list[str]:
        return [call for call in self.calls if call.startswith("cuLaunchKernelEx")]

    def enqueue(self, *launch: Any) -> None:
        """As `_native.gpu_enqueue`, with the arrays, its last argument, lent to the driver."""
        for address, size in launch[-1].values():
            self._library.fake_cuda_lend(address, size)
        try:
            self._enqueue(*launch)
        finally:
            self._library.fake_cuda_take_back()


@functools.cache
def _fake() -> Fake:
    return Fake()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.setenv("ASSAY_CUDA_DRIVER", str(_LIBRARY))
    driver = _fake()
    driver.set("devices=3,capability=9.0/8.0/7.5")
    monkeypatch.setattr(_native, "gpu_enqueue", driver.enqueue)
    return driver


class Host:
    """NumPy's arrays as those of a framework on a device: see `_gpu.Arrays`."""

    on = np
    _DTYPES = {"bool": "bool", "i32": "int32", "i64": "int64", "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64"}
    _NAMES = {numpys: name for name, numpys in _DTYPES.items()}

    _CONSTANTS: dict[Any, Any] = {}
    is_capturing = False

    def __init__(self, device: int = 0) -> None:
        self.place = (device, STREAM)

    def full(self, shape: Sequence[int], value: float, dtype: str) -> Any:
        return np.full(tuple(shape), value, self._DTYPES[dtype])

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        return self.full(shape, 77, dtype)

    def ends(self, count: int, length: int) -> Any:
        return np.arange(count + 1, dtype=np.int32) * np.int32(length)

    def constant(self, numbers: _gpu.Numbers, dtype: str, name: str = "") -> Any:
        key = (dtype, name or numbers)
        if key not in self._CONSTANTS:
            self._CONSTANTS[key] = aligned(np.array(numbers() if callable(numbers) else numbers, self._DTYPES[dtype]))
        return self._CONSTANTS[key]

    def dense(self, array: Any) -> Any:
        return np.ascontiguousarray(array)

    def cast(self, array: Any, dtype: str) -> Any:
        return np.asarray(array).astype(self._DTYPES[dtype])

    def dtype(self, array: Any) -> str:
        return self._NAMES.get(array.dtype.name, str(array.dtype.name))

    def strides(self, array: Any) -> Sequence[int]:
        return [stride // array.itemsize for stride in array.strides]

    def address(self, array: Any) -> int:
        return int(array.ctypes.data)

    def upload(self, array: Any) -> Any:
        return np.array(array)

    def download(self, array: Any) -> Any:
        return np.array(array)


def aligned(array: Any, late: int = 0) -> Any:
    """A copy that begins at a multiple of 64 bytes, or so many bytes late."""
    room = np.empty(array.nbytes + 128, np.uint8)
    start = -room.ctypes.data % 64 + late
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


_ARRAYS = (
    "ids",
    "mask",
    "advantages",
    "old_logp",
    "ref_logp",
    "rollout_logp",
    "rollout_weights",
    "token_weights",
    "selected",
    "bias",
    "cu_seqlens",
    "dentropy",
    "temperature",
)


def given(problem: assay.Problem) -> dict[str, Any]:
    arrays = vars(problem.numpy())
    every = {name: arrays.get(name) for name in _ARRAYS}
    # What has no loss has cotangents in place of advantages.
    return {**every, "advantages": -arrays["dlogp"]} if every["advantages"] is None else every


def computed(
    problem: assay.Problem,
    g: float = 1.0,
    inplace: bool = False,
    arrays: Host | None = None,
    logp: Any = None,
    entropy: Any = None,
    one_pass: bool = False,
    **changed: Any,
) -> dict[str, Any]:
    """The outputs of a problem, with dlogits of `g` times its loss, and of these cotangents of logp and entropy. With `one_pass` the
    forward pass makes dlogits; `g` is then the only cotangent in place."""
    on, tokens, spec = arrays or Host(), {**given(problem), **changed}, problem.spec.to_json()
    logits = aligned(problem.numpy().logits)
    dlogits = logits if inplace else aligned(np.full_like(logits, 77))
    loss = np.float32(g)
    of = _gpu.loss(on, spec, logits, tokens, None, dlogits if one_pass else None)
    if one_pass and inplace:
        _gpu.multiply(on, spec, dlogits, tokens, of.kept, loss)
    else:
        _gpu.gradient(on, spec, logits, dlogits, tokens, of.kept, (loss, logp, entropy), made=one_pass)
    return {"loss": of.loss, "logp": of.logp, "entropy": of.entropy, "token_loss": of.token_loss, "dlogits": dlogits}
