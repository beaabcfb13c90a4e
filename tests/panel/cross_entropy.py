"""Published cross-entropies before `assay.check_cross_entropy`, as a table for docs/cross-entropy.md:

    TRITON_INTERPRET=1 python tests/panel/cross_entropy.py

PyTorch's functions on the CPU, Transformers' and optax's, and Liger's by Triton's interpreter on small problems.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import assay
import jax.numpy as jnp
import optax
import torch
from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
from torch.nn import functional as F
from transformers.loss.loss_utils import fixed_cross_entropy

QUIET: dict[str, Any] = {"power": False, "repro_dir": None, "progress": False}
#: Triton's interpreter runs a program at a time.
SMALL: dict[str, Any] = {"shapes": ["2x3x33", "1x2x257"], "cases": 12, "wide": 0}
SMALL_HEAD: dict[str, Any] = {"shapes": ["2x3x64x33", "1x2x16x257"], "cases": 12, "wide": 0}
HEAD: dict[str, Any] = {"lm_head": True, "cases": 60}


def of_optax(logits: Any, ids: Any) -> Any:
    counts = ids != -100
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, jnp.where(counts, ids, 0))
    return jnp.where(counts, losses, 0).sum() / counts.sum()


def of_liger(logits: Any, ids: Any) -> Any:
    # It writes dlogits over its logits.
    return LigerCrossEntropyFunction.apply(logits.clone(), ids, None)[0]


def of_liger_head(hidden: Any, weight: Any, ids: Any) -> Any:
    return LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, ids)[0]


KERNELS: list[tuple[str, Callable[..., Any], dict[str, Any]]] = [
    ("`F.cross_entropy`", F.cross_entropy, {}),
    ("`F.cross_entropy` of `logits.float()`", lambda x, ids: F.cross_entropy(x.float(), ids), {}),
    ("the same, `label_smoothing=0.1`", lambda x, ids: F.cross_entropy(x.float(), ids, label_smoothing=0.1), {"label_smoothing": 0.1}),
    ("`F.linear_cross_entropy`", lambda h, w, ids: F.linear_cross_entropy(h, w, ids), HEAD),
    ("Transformers' `fixed_cross_entropy` of `logits.float()`", lambda x, ids: fixed_cross_entropy(x.float(), ids), {}),
    ("optax's `softmax_cross_entropy_with_integer_labels`", of_optax, {"framework": "jax"}),
    ("Liger's `LigerCrossEntropyFunction`, 12 problems", of_liger, SMALL),
    ("Liger's `LigerFusedLinearCrossEntropyFunction`, 12 problems", of_liger_head, {**SMALL_HEAD, "lm_head": True}),
    ("`assay.torch.cross_entropy`", lambda x, ids: __import__("assay.torch").torch.cross_entropy(x, ids), {}),
]

if __name__ == "__main__":
    torch.manual_seed(0)
    print("| function | f32 | bf16 |\n|---|---|---|")
    for name, fn, options in KERNELS:
        cells = []
        for dtype in ("f32", "bf16"):
            report = assay.check_cross_entropy(fn, dtypes=[dtype], **{**QUIET, **options})
            gates = sorted({cause.gate for cause in report.causes})
            cells.append("passes" if report.passed else f"fails: {', '.join(gates)}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
