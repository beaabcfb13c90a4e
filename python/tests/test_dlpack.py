"""Capsules that say anything about a little memory: every one is read rightly or refused, and the process lives."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import assay

COUNT = 24
DTYPES = {(2, 64): "float64", (2, 32): "float32", (2, 16): "float16"}
EXTREMES = [0, 1, 2, 3, 4, 5, -1, 24, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, -(2**63)]


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Plain(ctypes.Structure):
    _fields_ = (("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


# Other packages change the types of `ctypes.pythonapi`, which all share.
new_capsule = ctypes.PyDLL(None).PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class Foreign:
    """An array of a framework, whose capsule says what a test wants."""

    def __init__(self, draw: dict[str, Any]) -> None:
        self.memory = np.arange(COUNT, dtype=np.float64)
        self.shape = (ctypes.c_int64 * 64)(*draw["shape"])
        self.strides = (ctypes.c_int64 * 64)(*draw["strides"]) if draw["strides"] is not None else None
        tensor = Tensor(
            None if draw["null"] else self.memory.ctypes.data,
            draw["device"],
            0,
            draw["ndim"],
            *draw["dtype"],
            None if draw["no_shape"] else self.shape,
            self.strides,
            draw["offset"],
        )
        self.versioned: bool = draw["versioned"]
        self.held: ctypes.Structure = Versioned(draw["major"], 0, None, None, 0, tensor) if self.versioned else Plain(tensor)

    def __dlpack__(self, **_: object) -> object:
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        return new_capsule(ctypes.addressof(self.held), name, None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


extents = st.one_of(st.integers(0, 5), st.sampled_from(EXTREMES))
axes = st.lists(extents, max_size=5)
draws = st.fixed_dictionaries(
    {
        "shape": st.one_of(st.just([1, 2, 3]), axes),
        "strides": st.none() | axes | st.just([6, 3, 1]) | st.just([0, 0, 0]) | st.just([2**62, 2**62, 2**62]),
        "ndim": st.sampled_from([0, 1, 2, 3, 3, 3, 4, 64, 65, -1, 2**31 - 1, -(2**31)]),
        "dtype": st.tuples(st.integers(0, 8), st.sampled_from([8, 16, 32, 64, 0, 1, 255]), st.sampled_from([1, 1, 0, 2, 65535]))
        | st.just((2, 32, 1)),
        "device": st.sampled_from([1, 1, 1, 2, 3, 0, -1, 2**31 - 1]),
        "offset": st.sampled_from([0, 0, 1, 4, 8, 2**63, 2**64 - 1]),
        "null": st.booleans(),
        "no_shape": st.sampled_from([False, False, False, True]),
        "versioned": st.booleans(),
        "major": st.sampled_from([1, 1, 0, 2, 2**32 - 1]),
    }
)


def within(draw: dict[str, Any]) -> bool:
    """Whether all that the capsule describes is in the memory that is there: no reader could see that it is not."""
    ndim, (_, bits, lanes) = draw["ndim"], draw["dtype"]
    if draw["null"] or not 0 <= ndim <= 64 or draw["offset"] > 64:
        return True
    shape = (list(draw["shape"]) + [0] * 64)[:ndim]
    if draw["no_shape"] or 0 in shape:
        return True
    if draw["strides"] is None:
        strides = [1] * ndim
        for axis in range(ndim - 1, 0, -1):
            strides[axis - 1] = strides[axis] * shape[axis]
    else:
        strides = (list(draw["strides"]) + [0] * 64)[:ndim]
    steps = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
    size = max(1, (bits + 7) // 8) * max(1, lanes)
    low, high = sum(min(0, step) for step in steps), sum(max(0, step) for step in steps)
    # What no address reaches must be refused; what an address reaches must be in the memory.
    is_beyond = max([0, *shape, *map(abs, strides)]) >= 2**62
    offset: int = draw["offset"]
    return bool(offset + low * size >= 0 and (is_beyond or offset + (high + 1) * size <= 8 * COUNT))


@contextmanager
def refused() -> Iterator[None]:
    """Python errors are what a bad capsule may have; a panic is none of these."""
    try:
        yield
    except (assay.OutputError, BufferError, TypeError, ValueError) as error:
        assert "panic" not in str(error).lower(), error


@pytest.fixture(scope="module")
def small() -> assay.Problem:
    return next(iter(assay.problems("trl", 1, shapes="1x2x3", dtypes=["f32"])))


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(draw=draws.filter(within))
def test_any_capsule_is_read_or_refused(small: assay.Problem, draw: dict[str, Any]) -> None:
    with refused():
        small.check({"loss": 0.0, "dlogits": Foreign(draw)})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"ndim": -1}, "ndim: got -1"),
        ({"ndim": 65}, "ndim: got 65"),
        ({"no_shape": True}, "shape: got"),
        ({"shape": [1, -2, 3]}, "shape: got"),
        ({"strides": [2**62, 2**62, 2**62]}, "expected an array that fits into memory"),
        ({"shape": [2**62, 2**62, 0]}, "expected an array that fits into memory"),
        ({"versioned": True, "major": 2}, "no capsule of DLPack 0 or 1"),
    ],
)
def test_a_capsule_that_cannot_be_is_refused_by_name(small: assay.Problem, changed: dict[str, Any], said: str) -> None:
    plain = {"shape": [1, 2, 3], "strides": None, "ndim": 3, "dtype": (2, 32, 1), "device": 1, "offset": 0}
    plain |= {"null": False, "no_shape": False, "versioned": False, "major": 1}
    with pytest.raises(assay.OutputError, match=said):
        small.check({"loss": 0.0, "dlogits": Foreign(plain | changed)})
