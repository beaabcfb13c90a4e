"""Kernels on several ranks, for a process each: NumPy exchanges by files, as no group is at hand."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import kernels
import numpy as np

import assay

calls = 0


def exchanged(values: Any, shard: assay.Shard) -> Any:
    """Returns the values of all ranks, stacked."""
    global calls
    calls += 1
    base = Path(os.environ["ASSAY_RENDEZVOUS"])
    own = base.with_name(f"{base.name}-{calls}-{shard.rank}.npy")
    with own.with_suffix(".part").open("wb") as file:
        np.save(file, values)
    own.with_suffix(".part").rename(own)
    stacked = []
    for rank in range(shard.ranks):
        path = base.with_name(f"{base.name}-{calls}-{rank}.npy")
        while not path.exists():
            time.sleep(1e-3)
        stacked.append(np.load(path))
    return np.stack(stacked)


def logp(problem: assay.Problem, shard: assay.Shard, bug: str = "") -> dict[str, Any]:
    """Log-probabilities and the gradient by a share of logits."""
    arrays = problem.numpy()
    x, ids = shard.of_logits(arrays.logits).astype(np.float64), shard.of_tokens(arrays.ids)
    mask, dlogp = shard.of_tokens(arrays.mask), shard.of_tokens(arrays.dlogp)
    x, dlogp = np.where(mask[..., None], x, 0.0), np.where(mask, dlogp, 0.0)
    first = shard.start if shard.cut == "vocabulary" else 0
    local = np.where(mask, ids, first) - first
    own = (local >= 0) & (local < x.shape[-1])
    one_hot = own[..., None] & (np.arange(x.shape[-1]) == local[..., None])
    top = x.max(-1)
    if shard.cut == "vocabulary" and bug != "maximum":
        top = exchanged(top, shard).max(0)

    def whole(values: Any) -> Any:
        return exchanged(values, shard).sum(0) if shard.cut == "vocabulary" else values

    with np.errstate(over="ignore", invalid="ignore"):
        total = whole(np.exp(x - top[..., None]).sum(-1))
        chosen = np.where(one_hot, x, 0).sum(-1)
        chosen = chosen if bug == "targets" else whole(chosen)
        logp = chosen - top - np.log(total)
        p = np.exp(x - top[..., None]) / total[..., None]
    gradient = dlogp[..., None] * (one_hot - p)
    if bug == "ranks":
        gradient *= shard.ranks
    return {"logp": np.where(mask, logp, 0).astype(np.float32), "dlogits": gradient.astype(arrays.logits.dtype)}


def without_maximum(problem: assay.Problem, shard: assay.Shard) -> dict[str, Any]:
    return logp(problem, shard, "maximum")


def without_targets(problem: assay.Problem, shard: assay.Shard) -> dict[str, Any]:
    return logp(problem, shard, "targets")


def times_ranks(problem: assay.Problem, shard: assay.Shard) -> dict[str, Any]:
    return logp(problem, shard, "ranks")


def coarser_on_ranks(problem: assay.Problem, shard: assay.Shard) -> dict[str, Any]:
    """Log-probabilities that are off by 9 u(1 + 2|logp|) on several ranks, which is within the judge's limits."""
    answer = logp(problem, shard)
    if shard.ranks > 1:
        answer["logp"] = (answer["logp"] - 9 * 2.0**-24 * (1 + 2 * np.abs(answer["logp"])) * (answer["logp"] != 0)).astype(np.float32)
    return answer


def dying(problem: assay.Problem, shard: assay.Shard) -> dict[str, Any]:
    if shard.rank == 1:
        os._exit(7)
    return logp(problem, shard)


def raising(problem: assay.Problem, shard: assay.Shard) -> dict[str, Any]:
    if shard.rank == 1:
        raise ValueError("no exchange")
    return logp(problem, shard)


def hanging(problem: assay.Problem, shard: assay.Shard) -> dict[str, Any]:
    if shard.rank == 1:
        time.sleep(1000)
    return logp(problem, shard)


def of_another_shape(problem: assay.Problem, shard: assay.Shard) -> dict[str, Any]:
    answer = logp(problem, shard)
    return answer | {"dlogits": answer["dlogits"][..., :-1]} if shard.rank == 1 else answer


def loss(problem: assay.Problem, shard: assay.Shard, is_normalised_by_rank: bool = False) -> dict[str, Any]:
    """TRL's default loss of a rank's sequences, and the whole loss."""
    whole, mask = kernels.honest(problem), problem.numpy().mask
    share = {name: values if name == "loss" else shard.of_tokens(values) for name, values in whole.items()}
    if is_normalised_by_rank:
        of_rank = mask.sum() / max(shard.of_tokens(mask).sum(), 1)
        share["dlogits"] = (share["dlogits"] * of_rank).astype(share["dlogits"].dtype)
    return share


def loss_normalised_by_rank(problem: assay.Problem, shard: assay.Shard) -> dict[str, Any]:
    return loss(problem, shard, is_normalised_by_rank=True)


def loss_of_rank(problem: assay.Problem, shard: assay.Shard) -> dict[str, Any]:
    return {**loss(problem, shard), "loss": np.float32(shard.rank)}
