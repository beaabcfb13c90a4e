"""Honest forms in JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from honest import HonestForm, each_wide


def chosen(x: Any, ids: Any) -> Any:
    return jnp.take_along_axis(x, ids[..., None], -1)[..., 0]


def log_softmax(x: Any, ids: Any) -> Any:
    return chosen(jax.nn.log_softmax(x), ids)


def logsumexp(x: Any, ids: Any) -> Any:
    return chosen(x, ids) - jax.nn.logsumexp(x, -1)


def one_hot(x: Any, ids: Any) -> Any:
    counted = jnp.where(jax.nn.one_hot(ids, x.shape[-1], dtype=bool), x, 0)
    return counted.sum(-1) - jax.nn.logsumexp(x, -1)


def scores(logp: Any) -> Any:
    def fn(*args: Any) -> Any:
        *inputs, ids = args
        x = inputs[0].astype("float32")
        return logp(x @ inputs[1].astype("float32").T if len(inputs) == 2 else x, ids)

    fn.__name__ = logp.__name__
    return fn


def both_of_one_array(x: Any, ids: Any) -> Any:
    """Log-probabilities and entropies of one `log_softmax`, whose gradient adds up the cotangents of both."""
    logps = jax.nn.log_softmax(x.astype("float32"))
    p = jnp.exp(logps)
    return chosen(logps, ids), -(p * jnp.where(p > 0, logps, 0)).sum(-1)


def loss_by(logp: Any) -> Any:
    def fn(x: Any) -> Any:
        counting = jnp.where(x.mask[..., None], x.logits.astype("float32"), 0)
        logps = logp(counting, jnp.where(x.mask, x.ids, 0))
        a = x.advantages[:, None]
        ratio = jnp.exp(jnp.where(x.mask, logps - x.old_logp, 0))
        of_tokens = jnp.where(x.mask, -jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.2) * a), 0)
        return of_tokens.sum() / jnp.maximum(x.mask.sum(), 1), {"logp": logps}

    fn.__name__ = logp.__name__
    return fn


JAX: dict[str, Any] = {"framework": "jax", "shapes": "few"}
LOGPS = (log_softmax, logsumexp, one_hot)
FORMS = [HonestForm(f"jax {fn.__name__}", scores(fn), "check_logp", JAX) for fn in LOGPS]
FORMS += [HonestForm(f"jax {fn.__name__}, wide", scores(fn), "check_logp", JAX | each_wide("f32", "bf16")) for fn in LOGPS]
FORMS += [HonestForm(f"jax {fn.__name__}, loss", loss_by(fn), "check_loss", JAX) for fn in LOGPS]
ENTROPY = JAX | {"entropy": True}
FORMS += [HonestForm("jax logp and entropy of one array", both_of_one_array, "check_logp", ENTROPY)]
FORMS += [HonestForm("jax entropy of one array, wide", both_of_one_array, "check_logp", ENTROPY | each_wide("f32", "bf16"))]
FORMS += [HonestForm("jax head", scores(logsumexp), "check_logp", JAX | {"lm_head": True})]
