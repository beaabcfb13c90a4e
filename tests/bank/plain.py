"""The plain kernel: TRL's losses by token or sequence as one writes them in NumPy, in f32. A wrong kernel replaces one of its steps."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

Array = Any
Outputs = dict[str, Any]
#: Takes the value of a step and all steps before it, and returns what the kernel goes on with.
Edit = Callable[[Array, SimpleNamespace], Array]

F32 = np.float32


def plain(problem: Any, **edits: Edit) -> Outputs:
    """Returns the outputs of an `assay.Problem`, of logits or of hidden states and LM head.

    Each step has a name: `plain(problem, total=lambda total, c: total / 2)` halves the softmax's denominator.
    """
    with np.errstate(all="ignore"):
        return _outputs(problem, edits)


def _outputs(problem: Any, edits: dict[str, Edit]) -> Outputs:
    a, spec = problem.numpy(), problem.spec.to_dict()
    c = SimpleNamespace(problem=problem, a=a, spec=spec, dtype=problem.dtype)

    def step(name: str, value: Array) -> Array:
        value = edits[name](value, c) if name in edits else value
        setattr(c, name, value)
        return value

    low, high = 1 - F32(spec["objective"]["ppo_clip"]["epsilon_low"]), 1 + F32(spec["objective"]["ppo_clip"]["epsilon_high"])
    step("bounds", (low, high))
    mask = step("mask", a.mask)
    ids = step("ids", np.where(mask, a.ids, 0))[..., None]

    # The softmax of the logits over the temperature, of gaps to the largest.
    x = step("x", logits_of(c) / F32(spec["temperature"]))
    top = step("top", x.max(-1, keepdims=True))
    e = step("e", np.exp(x - top))
    total = step("total", e.sum(-1, keepdims=True))
    logp = step("logp", (np.take_along_axis(x - top, ids, -1) - np.log(total))[..., 0])

    # The loss of each token, and their mean.
    log_ratio = step("log_ratio", np.where(mask, logp - a.old_logp, F32(0)))
    if spec["ratio"]["level"] == "sequence":
        c.length = np.maximum(mask.sum(-1, keepdims=True), 1).astype(F32)
        log_ratio = step("mean_log_ratio", log_ratio.sum(-1, keepdims=True) / c.length) + np.zeros_like(logp)
    ratio = step("ratio", np.exp(log_ratio))
    advantages = step("advantages", np.broadcast_to(a.advantages[:, None].astype(F32), mask.shape))
    token_loss = -np.minimum(ratio * advantages, np.clip(ratio, *c.bounds) * advantages)
    step("policy_loss", token_loss)
    if spec["kl"] is not None:
        c.beta = F32(spec["kl"]["beta"])
        d = step("kl_difference", np.where(mask, a.ref_logp - logp, F32(0)))
        step("kl", np.exp(d) - d - 1)
        token_loss = step("with_kl", c.policy_loss + c.beta * c.kl)
    token_loss = step("token_loss", np.where(mask, c.with_kl if spec["kl"] is not None else c.policy_loss, F32(0)))
    weight = step("weight", mask.astype(F32) / F32(max(mask.sum(), 1)))
    loss = step("loss", (token_loss * weight).sum())

    # The derivative of the loss by each log-probability, and by each logit.
    follows = step("follows", np.where(advantages > 0, ratio <= c.bounds[1], ratio >= c.bounds[0]))
    slope = step("slope", np.where(mask & follows, -ratio * advantages, F32(0)) * weight)
    if spec["ratio"]["level"] == "sequence":
        slope = step("sequence_slope", slope.sum(-1, keepdims=True) * mask / c.length)
    if spec["kl"] is not None:
        slope = slope + step("kl_slope", np.where(mask, c.beta * (1 - np.exp(c.kl_difference)), F32(0)) * weight)
    slope = step("upstream", slope)[..., None]
    p = step("p", e / total)
    dlogits = -slope * p
    np.put_along_axis(dlogits, ids, slope * (1 - np.take_along_axis(p, ids, -1)), -1)
    dlogits = step("dlogits", np.where(slope == 0, F32(0), dlogits) / F32(spec["temperature"]))

    tokens = {"loss": F32(loss), "logp": F32(np.where(mask, logp, 0)), "token_loss": F32(token_loss)}
    if not hasattr(a, "lm_head"):
        return tokens | {"dlogits": step("written", dlogits.astype(a.logits.dtype))}
    dhidden = step("dhidden", dlogits @ c.head)
    dlm_head = step("dlm_head", np.einsum("btv,bth->vh", dlogits, c.hidden, optimize=True))
    if problem.layout == "hv":
        dlm_head = dlm_head.T
    return tokens | {"dhidden": dhidden.astype(a.hidden.dtype), "dlm_head": np.ascontiguousarray(dlm_head).astype(a.lm_head.dtype)}


def logits_of(c: SimpleNamespace) -> Array:
    """Returns the logits in f32, 0 under the mask."""
    a, counts = c.a, c.mask[..., None]
    if not hasattr(a, "lm_head"):
        return np.where(counts, a.logits.astype(F32), F32(0))
    # `[V,H]`, and no product of garbage under the mask.
    c.head = (a.lm_head.T if c.problem.layout == "hv" else a.lm_head).astype(F32)
    c.hidden = np.where(counts, a.hidden.astype(F32), F32(0))
    return c.hidden @ c.head.T
