"""Memory for gradients on the CPU, used again when the tensor that lay in it is gone.

An array of the size of logits that PyTorch allocates is mapped again each time, because the C library returns so much at once, and
most of what a backward pass takes then goes to the first touch of its pages.
"""

import math
import mmap
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor

LARGE = 32 << 20
"""From here on memory comes from the pool: the C library keeps what is smaller (`M_MMAP_THRESHOLD` grows to 32 MiB)."""

_idle: deque[mmap.mmap] = deque(maxlen=1)
"""One block at most, the one that came back last. Its methods are atomic: tensors die on any thread."""


def _block(size: int) -> mmap.mmap:
    """The idle block where this fills at least half of it, or else a new one."""
    try:
        block = _idle.pop()
    except IndexError:
        pass
    else:
        if size <= len(block) <= 2 * size:
            return block
        del block  # Before another takes its place.
    try:
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as reason:  # As PyTorch's own allocator has it.
        raise RuntimeError(f"dlogits: no memory for {size} bytes: {reason}") from reason
    try:
        block.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # A kernel without huge pages.
        pass
    return block


def empty(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A dense tensor that holds anything."""
    size = math.prod(shape) * dtype.itemsize
    if size < LARGE:
        return torch.empty(shape, dtype=dtype, device="cpu")
    block = _block(size)
    # The tensor's storage keeps the view, and nothing else does.
    view: Any = memoryview(block)
    weakref.finalize(view, _idle.append, block).atexit = False
    return torch.frombuffer(view, dtype=dtype, count=math.prod(shape)).view(shape)


def release() -> None:
    """Gives the idle block back to the system."""
    _idle.clear()
