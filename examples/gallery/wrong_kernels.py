"""Twelve kernels, each wrong in one place: those of docs/gallery.md, which `make gallery` writes.

A comment is above the wrong line. `softmax`, `exp` and `total` compute in f64 and round to f32, so that pictures are the same on every machine.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any
F32 = np.float32


def exp(x: Array) -> Array:
    return np.exp(x, dtype=np.float64).astype(F32)


def total(e: Array) -> Array:
    return e.sum(-1, keepdims=True, dtype=np.float64).astype(F32)


def log(x: Array) -> Array:
    return np.log(x, dtype=np.float64).astype(F32)


def softmax(logits: Array) -> tuple[Array, Array]:
    """Returns the probabilities of each token, and their logarithms."""
    x = logits - logits.max(-1, keepdims=True)
    e = exp(x)
    return e / total(e), x - log(total(e))


def one_hot(x: Any) -> Array:
    """1 at the sampled id of each token."""
    return np.arange(x.logits.shape[-1]) == x.ids[..., None]


def outputs(x: Any, logp: Array, dlogits: Array) -> dict[str, Array]:
    """Returns logp of the sampled ids, and dlogits with 0 under the mask."""
    return {"logp": np.where(one_hot(x), logp, 0).sum(-1), "dlogits": np.where(x.mask[..., None], dlogits, 0)}


def bf16(x: Array) -> Array:
    """Rounds to bfloat16, to nearest."""
    bits = x.astype(F32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(F32)


def ppo(x: Any, weight: Array, advantage: Array, both_sides: bool = True) -> dict[str, Array]:
    """Returns PPO's clipped loss of given token weights; without `both_sides` it has the clip and not the minimum."""
    p, logp = softmax(x.logits)
    logp = np.where(one_hot(x), logp, 0).sum(-1)
    ratio = exp(np.where(x.mask, logp - x.old_logp, 0))
    clipped = np.clip(ratio, F32(0.8), F32(1.2))
    follows = np.where(advantage > 0, ratio <= F32(1.2), ratio >= F32(0.8)) if both_sides else clipped == ratio
    loss = np.where(follows, ratio, clipped) * advantage * weight
    slope = np.where(follows, ratio * advantage, 0) * weight
    dlogits = np.where(x.mask[..., None], -slope[..., None] * (one_hot(x) - p), 0)
    return {"loss": -loss.sum(), "logp": logp, "dlogits": dlogits}


def tail_tile_not_written(problem: Any) -> dict[str, Array]:
    x = problem.numpy()
    p, logp = softmax(x.logits)
    dlogits = np.zeros_like(p)
    # wrong: ends with the last whole tile
    for first in range(0, p.shape[-1] - 63, 64):
        tile = slice(first, first + 64)
        dlogits[..., tile] = x.dlogp[..., None] * (one_hot(x) - p)[..., tile]
    return outputs(x, logp, dlogits)


def column_of_each_tile_lost(problem: Any) -> dict[str, Array]:
    x = problem.numpy()
    p, logp = softmax(x.logits)
    dlogits = np.zeros_like(p)
    for first in range(0, p.shape[-1], 64):
        # wrong: the last column of a tile is 63
        tile = slice(first, first + 63)
        dlogits[..., tile] = x.dlogp[..., None] * (one_hot(x) - p)[..., tile]
    return outputs(x, logp, dlogits)


def buffer_overwritten(problem: Any) -> dict[str, Array]:
    x = problem.numpy()
    p, logp = softmax(x.logits)
    for first in range(64, p.shape[-1] - 64, 128):
        tile, following = slice(first, first + 64), slice(first + 64, first + 128)
        width = p[..., following].shape[-1]
        # wrong: the next tile arrives before this one is used
        p[..., tile][..., :width] = p[..., following]
    return outputs(x, logp, x.dlogp[..., None] * (one_hot(x) - p))


def shard_offset_forgotten(problem: Any) -> dict[str, Array]:
    x = problem.numpy()
    p, logp = softmax(x.logits)
    half = p.shape[-1] // 2
    # wrong: the second shard begins at `half`
    shards = np.arange(half), np.arange(p.shape[-1] - half)
    target = np.concatenate([columns == x.ids[..., None] for columns in shards], -1)
    return outputs(x, logp, x.dlogp[..., None] * (target - p))


def sum_in_bf16(problem: Any) -> dict[str, Array]:
    x = problem.numpy()
    shifted = x.logits - x.logits.max(-1, keepdims=True)
    e = exp(shifted)
    # wrong: eight bits are left of the sum
    s = bf16(total(e))
    return outputs(x, shifted - log(s), x.dlogp[..., None] * (one_hot(x) - e / s))


def probabilities_saved_in_bf16(problem: Any) -> dict[str, Array]:
    x = problem.numpy()
    p, logp = softmax(x.logits)
    # wrong: the forward pass keeps them for the backward pass in 16 bits
    saved = bf16(p)
    return outputs(x, logp, x.dlogp[..., None] * (one_hot(x) - saved))


def maximum_not_subtracted(problem: Any) -> dict[str, Array]:
    x = problem.numpy()
    # wrong: exp(x - max); it is ∞ from 88.8 on
    e = exp(x.logits)
    return outputs(x, x.logits - log(total(e)), x.dlogp[..., None] * (one_hot(x) - e / total(e)))


def sum_not_rescaled(problem: Any) -> dict[str, Array]:
    x = problem.numpy()
    top, s = x.logits[..., :1], 0
    for first in range(0, x.logits.shape[-1], 64):
        tile = x.logits[..., first : first + 64]
        top = np.maximum(top, tile.max(-1, keepdims=True))
        # wrong: s * exp(old top - top) + ...
        s = s + total(exp(tile - top))
    logp = x.logits - top - log(s)
    return outputs(x, logp, x.dlogp[..., None] * (one_hot(x) - exp(logp)))


def temperature_forgotten(problem: Any) -> dict[str, Array]:
    x = problem.numpy()
    p, logp = softmax(x.logits / F32(0.7))
    # wrong: the derivative of x / 0.7 is missing
    dlogits = x.dlogp[..., None] * (one_hot(x) - p)
    return outputs(x, logp, dlogits)


def clip_without_minimum(problem: Any) -> dict[str, Array]:
    x = problem.numpy()
    weight = x.mask / F32(max(x.mask.sum(), 1))
    # wrong: the loss is clip(ratio) * A, and not min(ratio * A, clip(ratio) * A)
    return ppo(x, weight, x.advantages[:, None], both_sides=False)


def advantages_of_other_sequences(problem: Any) -> dict[str, Array]:
    x = problem.numpy()
    weight = x.mask / F32(max(x.mask.sum(), 1))
    # wrong: np.repeat
    tokens = np.tile(x.advantages, x.mask.shape[1]).reshape(x.mask.shape)
    return ppo(x, weight, tokens)


def mean_of_means(problem: Any) -> dict[str, Array]:
    x = problem.numpy()
    # wrong: asked was the mean over all tokens, and this is the mean of the sequences' means
    weight = x.mask / np.maximum(x.mask.sum(-1, keepdims=True), 1) / F32(len(x.mask))
    return ppo(x, weight, x.advantages[:, None])
