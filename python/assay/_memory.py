"""The memory that a call takes beyond its inputs, and what it leaves behind: the process's own high-water mark, or that of PyTorch's allocator."""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from . import _native
from ._errors import AssayError
from ._native import Spec

#: Growth below this, by call, is told from nothing neither by the system nor by an allocator that rounds.
RESOLUTION = 1 << 20
#: What the first call leaves counts as kept from so many logits on: compilers and libraries hold some megabytes of their own.
KEPT = 0.5
#: The calls of one measurement: one that compiles and fills caches, and those that are measured.
CALLS = 4


class CallMemory(NamedTuple):
    """The memory of one call, in bytes, as `ProgramBench` and `MemoryFinding` have it."""

    forward: int | None
    backward: int | None
    peak: int
    kept: int
    leaked: int


class Meter:
    """What is held, and the most that was held since the last mark, in bytes."""

    def release(self) -> None:
        """Gives back what is held for later: a call that used it again would seem to need nothing."""
        raise NotImplementedError

    def mark(self) -> None:
        """Sets the peak back to what is held."""
        raise NotImplementedError

    def held(self) -> int:
        raise NotImplementedError

    def peak(self) -> int:
        raise NotImplementedError


class _ProcessMeter(Meter):
    """The memory of this process: `VmRSS` and `VmHWM` of Linux, of which the second can be set back to the first."""

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self.mark()

    def release(self) -> None:
        gc.collect()
        if "assay._pool" in sys.modules:
            sys.modules["assay._pool"].release()
        if self._trim is not None:
            self._trim(0)

    def mark(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")

    def held(self) -> int:
        return self._status("VmRSS")

    def peak(self) -> int:
        return self._status("VmHWM")

    def _status(self, name: str) -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
        return int(line.split()[1]) * 1024


class _CudaMeter(Meter):
    """The memory of tensors on one GPU, by PyTorch's allocator."""

    def __init__(self, device: Any) -> None:
        import torch

        self._cuda, self._device = torch.cuda, device

    def release(self) -> None:
        gc.collect()

    def mark(self) -> None:
        self._cuda.synchronize(self._device)
        self._cuda.reset_peak_memory_stats(self._device)

    def held(self) -> int:
        self._cuda.synchronize(self._device)
        return int(self._cuda.memory_allocated(self._device))

    def peak(self) -> int:
        self._cuda.synchronize(self._device)
        return int(self._cuda.max_memory_allocated(self._device))


def meter_of(device: str | None, framework: str | None) -> Meter | str:
    """Returns what measures the memory of a framework on a device, or the reason why nothing does."""
    if device is None or str(device).split(":")[0] == "cpu":
        try:
            meter = _ProcessMeter()
        except OSError:
            return "this system cannot set back a process's high-water mark, as Linux does by /proc/self/clear_refs"
        if not _gives_back(_ProcessMeter):
            return "the allocator of this process keeps what is freed, so that a call seems to need nothing"
        return meter
    if framework == "torch" and str(device).split(":")[0] == "cuda":
        return _CudaMeter(device)
    return f"nothing sets back the high-water mark of {framework or 'a function'} on {device}"


@functools.cache
def _gives_back(kind: type[Meter]) -> bool:
    """Whether what is freed is no longer held: not with allocators that keep all pages."""
    meter, size = kind(), 16 << 20
    block = bytearray(b"1") * size
    meter.release()
    before = meter.held()
    del block
    meter.release()
    return before - meter.held() > size // 2


@contextmanager
def quick_collections() -> Iterator[None]:
    """Leaves all objects that are there out of Python's collections: those of a few calls are collected in no time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


_warm: set[str] = set()


def warm(framework: str | None) -> None:
    """Has a framework load what it loads at its first use: that is no memory of a kernel's."""
    if framework is None or framework in _warm:
        return
    _warm.add(framework)
    if framework == "torch":
        import torch

        torch.ones(8, 1024).requires_grad_().log_softmax(-1).sum().backward()
    else:
        import jax

        jax.block_until_ready(jax.jit(jax.grad(lambda x: jax.nn.log_softmax(x).sum()))(jax.numpy.ones((8, 1024))))


class _Passes:
    """The peaks of the passes of one call, beyond what was held before it."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._before = 0
        self._name: str | None = None
        self.peaks: dict[str, int] = {}

    def enter(self, name: str | None) -> None:
        if self._name is None:
            self._meter.release()
            self._before = self._meter.held()
        else:
            self.peaks[self._name] = max(self._meter.peak() - self._before, 0)
        # Nothing is given back between two passes: what the first one left is the second one's too.
        self._meter.mark()
        self._name = name


_measured: _Passes | None = None


def enter_pass(name: str | None) -> None:
    """Says that a pass of a call begins, "forward" or "backward", or with None that the call has ended."""
    if _measured is not None:
        _measured.enter(name)


@contextmanager
def _measuring(passes: _Passes) -> Iterator[None]:
    global _measured
    _measured = passes
    try:
        yield
    finally:
        _measured = None


def measure(call: Callable[[], object], meter: Meter, unit: int, calls: int = CALLS) -> CallMemory:
    """Measures a call that says by `enter_pass` where its passes begin and where it ends; it may drop what it returns.

    Args:
        unit: The size of the logits in bytes.
    """
    measured: list[dict[str, int]] = []
    with quick_collections():
        meter.release()
        before = [meter.held()]
        for _ in range(calls):
            passes = _Passes(meter)
            with _measuring(passes):
                call()
            measured.append(passes.peaks)
            meter.release()
            before.append(meter.held())
    # Other threads only ever add to a peak: the least of the calls is nearest to what the call itself takes.
    least = {name: min(peaks[name] for peaks in measured[1:]) for name in measured[1]}
    leaked = max(min(after - held for held, after in zip(before[1:], before[2:])), 0)
    kept = before[1] - before[0] - leaked
    if not least:
        raise AssertionError("a call says where its passes begin")
    two = len(least) > 1
    return CallMemory(
        forward=least["forward"] if two else None,
        backward=least["backward"] if two else None,
        peak=max(least.values()),
        kept=kept if kept >= KEPT * unit else 0,
        leaked=leaked if leaked >= RESOLUTION else 0,
    )


#: The size of logits from which on their memory is told from what a process holds besides.
SMALLEST = 32 << 20
#: The tokens and the vocabulary of the problem that memory is measured on: 156 MB of f32 logits, as many of 16 bits.
_TOKENS, _VOCABULARY = {"f32": 256, "bf16": 512, "f16": 512}, 151_936
#: The hidden width where there is a head.
_HIDDEN = 64


def question(shapes: str | Sequence[str], dtypes: Sequence[str], has_head: bool) -> dict[str, list[int]]:
    """Returns the extents of the problem that memory is measured on, by dtype: of the largest shape, where shapes are listed.

    Raises:
        AssayError: Its logits are too small for that.
    """
    unknown = [dtype for dtype in dtypes if dtype not in _BYTES]
    if isinstance(dtypes, str) or unknown:
        raise AssayError(f"memory: got dtypes {dtypes!r}, expected a list of f32, bf16 and f16")
    listed = [shape for shape in ([shapes] if isinstance(shapes, str) else shapes) if "x" in shape]
    if not listed:
        hidden = [_HIDDEN] if has_head else []
        return {dtype: [1, _TOKENS[dtype], *hidden, _VOCABULARY] for dtype in dtypes}
    largest = max(([int(extent) for extent in shape.split("x")] for shape in listed), key=logits_count)
    size = logits_count(largest) * min(_BYTES[dtype] for dtype in dtypes)
    if size < SMALLEST:
        raise AssayError(
            f"memory: got shapes whose largest logits are {size / 1e6:.1f} MB, expected at least {SMALLEST / 1e6:.0f} MB, to tell their "
            "memory from what the process holds besides, or shapes that are not listed"
        )
    return {dtype: largest for dtype in dtypes}


_BYTES = {"f32": 4, "bf16": 2, "f16": 2}


def logits_count(extents: Sequence[int]) -> int:
    """The number of logits, `B·T·V`, of `[B, T, V]` or `[B, T, H, V]`."""
    return extents[0] * extents[1] * extents[-1]


def finding(
    kernel: Callable[..., object],
    spec: Spec,
    extents: list[int],
    dtype: str,
    limit: float,
    packed: bool,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Measures a kernel on a problem of its own, and returns what the report of its campaign has of that, `MemoryFinding`. The kernel has
    not been called with as large a problem before, so that what it keeps is seen.

    Args:
        options: The other arguments of `unmasked_problem`.

    Raises:
        AssayError: Nothing measures memory here.
    """
    size = logits_count(extents) * _BYTES[dtype]
    found: dict[str, Any] = {"problem": f"{'x'.join(map(str, extents))} {dtype}", "logits_bytes": size, "limit": limit}
    # A function that a framework differentiates says itself which one that is, and where its passes begin.
    framework = getattr(kernel, "_assay_framework", None)
    marks_passes = framework is not None
    meter = meter_of(options["device"], framework or ("torch" if "torch" in sys.modules else None))
    if isinstance(meter, str):
        raise AssayError(f"memory: got a limit, expected none here: {meter}")
    warm(framework)
    problem = _native.unmasked_problem(spec, extents, dtype, **options)
    problem = problem.pack() if packed else problem

    def call() -> None:
        if marks_passes:
            kernel(problem)
            return
        enter_pass("both")
        wait_for(kernel(problem))
        enter_pass(None)

    try:
        return found | {"call": measure(call, meter, size)._asdict()}
    except (Exception, SystemExit) as reason:
        return found | {"raised": f"{type(reason).__name__}: {' '.join(str(reason).split())[:300]}"}


def wait_for(outputs: object) -> None:
    """Waits for arrays that a framework still computes."""
    for array in outputs.values() if isinstance(outputs, Mapping) else ():
        wait = getattr(array, "block_until_ready", None)
        if wait is not None:
            wait()
