"""A step of cross-entropy on the CPU, forward and backward, in turns with PyTorch's own, eager and compiled.

    python benches/cross_entropy.py 512 151936          # rows, classes; medians of 9 turns, f32

Each is judged first, on a few problems: a wrong one is not timed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import assay
import assay.torch
import torch
import torch.nn.functional as F

TURNS = 9


def programs(label_smoothing: float) -> dict[str, Callable[[Any, Any], Any]]:
    def eager(x: Any, y: Any) -> Any:
        return F.cross_entropy(x, y, label_smoothing=label_smoothing)

    return {
        "assay.torch": lambda x, y: assay.torch.cross_entropy(x, y, label_smoothing=label_smoothing),
        "F.cross_entropy": eager,
        "torch.compile": torch.compile(eager),
    }


def step(fn: Callable[[Any, Any], Any], x: Any, y: Any) -> float:
    x.grad = None
    began = time.perf_counter()
    fn(x, y).backward()
    return time.perf_counter() - began


def main() -> None:
    rows, classes = (int(word) for word in sys.argv[1:3])
    torch.manual_seed(0)
    x = torch.randn(rows, classes, requires_grad=True)
    y = torch.randint(0, classes, (rows,))
    source, target = torch.empty_like(x), x.detach()
    for label_smoothing in (0.0, 0.1):
        # A compiled function beyond the limit of recompilations runs eagerly: each smoothing begins anew.
        torch.compiler.reset()
        timed = programs(label_smoothing)
        quick = {"cases": 8, "wide": 0, "power": False, "repro_dir": None, "progress": False, "dtypes": ["f32"], "shapes": ["2x3x33", "1x4x1031"]}
        for name, fn in timed.items():
            if not assay.check_cross_entropy(fn, label_smoothing=label_smoothing, **quick):
                raise SystemExit(f"{name} is wrong: not timed")
        torch.compiler.reset()
        taken: dict[str, list[float]] = {name: [] for name in [*timed, "a copy of the logits"]}
        for turn in range(TURNS + 2):
            for name, fn in timed.items():
                seconds = step(fn, x, y)
                if turn >= 2:
                    taken[name].append(seconds)
            began = time.perf_counter()
            source.copy_(target)
            if turn >= 2:
                taken["a copy of the logits"].append(time.perf_counter() - began)
        print(f"label_smoothing={label_smoothing}, [{rows},{classes}] f32, {torch.get_num_threads()} threads, PyTorch {torch.__version__}")
        for name, all_seconds in taken.items():
            print(f"  {name:24} {1e3 * statistics.median(all_seconds):8.1f} ms   {1e3 * min(all_seconds):8.1f} to {1e3 * max(all_seconds):.1f}")


if __name__ == "__main__":
    main()
