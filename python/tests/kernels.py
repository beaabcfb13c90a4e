"""TRL's default loss, and what is made wrong of it: kernels that the tests hand in."""

from __future__ import annotations

from typing import Any

import numpy as np

import assay


def honest(problem: assay.Problem) -> dict[str, Any]:
    """In f64, so that only the last rounding is seen: PPO-clip at 0.2/0.2, the mean over tokens."""
    arrays = problem.numpy()
    mask = arrays.mask
    x = np.where(mask[..., None], arrays.logits.astype(np.float64), 0.0)
    target = np.arange(x.shape[-1]) == np.where(mask, arrays.ids, 0)[..., None]
    a = np.broadcast_to(advantages(arrays), mask.shape)
    top = x.max(-1, keepdims=True)
    e = np.exp(x - top)
    p = e / e.sum(-1, keepdims=True)
    logp = (np.where(target, x - top, 0).sum(-1)) - np.log(e.sum(-1))
    ratio = np.exp(logp - np.where(mask, arrays.old_logp, logp))
    token_loss = np.where(mask, -np.minimum(ratio * a, np.clip(ratio, 0.8, 1.2) * a), 0.0)
    active = mask & np.where(a > 0, ratio <= 1.2, ratio >= 0.8)
    others = np.where(target, 0.0, p).sum(-1, keepdims=True)  # 1 − p of the target, without cancellation
    grad = np.where(active, -ratio * a, 0.0)[..., None] / max(mask.sum(), 1)
    dlogits = np.where(active[..., None], grad * np.where(target, others, -p), 0.0)
    return {
        "loss": np.float32(token_loss.sum() / max(mask.sum(), 1)),
        "dlogits": dlogits.astype(arrays.logits.dtype),
        "logp": np.where(mask, logp, 0.0).astype(np.float32),
        "token_loss": token_loss.astype(np.float32),
    }


def advantages(arrays: Any) -> Any:
    """A column of one a row; of packed sequences a row of those of their tokens, 0 behind the last."""
    of_sequences = arrays.advantages.astype(np.float64)
    if not hasattr(arrays, "cu_seqlens"):
        return of_sequences[:, None]
    ends = arrays.cu_seqlens
    return np.append(np.repeat(of_sequences, np.diff(ends)), np.zeros(arrays.mask.size - ends[-1]))


def too_large(problem: assay.Problem) -> dict[str, Any]:
    """A gradient that is 5 % too large."""
    outputs = honest(problem)
    outputs["dlogits"] = (outputs["dlogits"].astype(np.float32) * 1.05).astype(outputs["dlogits"].dtype)
    return outputs
