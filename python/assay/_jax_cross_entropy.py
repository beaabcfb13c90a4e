"""The cross-entropy for JAX: `assay.jax.cross_entropy`, of logits and of hidden states."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from . import spec as _spec
from ._errors import ProblemError

Array = Any
_REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(
    logits: Array,
    labels: Array,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    loss_scale: float | Array = 1.0,
    implementation: str | None = None,
) -> Array:
    """Computes the cross-entropy of logits and class indices, in f32, differentiable by the logits.

        >>> import assay.jax, jax, jax.numpy as jnp
        >>> labels = jnp.array([1, -100])
        >>> loss, dlogits = jax.value_and_grad(assay.jax.cross_entropy)(jnp.zeros((2, 4)), labels)
        >>> round(float(loss), 4), [float(x) for x in dlogits[0]]
        (1.3863, [0.25, -0.75, 0.25, 0.25])

    With `z` the logits after scale and cap, `V` classes and the class `y` of a token, its loss is

        -(1 - label_smoothing) * log_softmax(z)[y] + label_smoothing * mean(-log_softmax(z)) + z_loss * logsumexp(z) ** 2

    No array of the logits' size is made but their gradient, which is rounded once.

    Args:
        logits: `[…,V]`, f32, bf16 or f16.
        labels: `[…]`, integers: the class of each token.
        ignore_index: The label of tokens that do not count.
        reduction: "mean" over the tokens that count, of which none is NaN; "sum"; or "none", the loss of each token, 0 where it does not
            count.
        label_smoothing: The share of the target that is uniform over the classes, from 0 to 1. A logit of -inf then has a loss of inf.
        z_loss: The weight of the squared log-sum-exp of a token's logits. Both are computed by `native` alone, of whole rows.
        softcap: `c` of `c * tanh(logits / c)`; None: no cap.
        logit_scale: The factor of the logits, before the cap.
        loss_scale, implementation: As of `grpo_loss`.

    Raises:
        ProblemError: An array has a shape or dtype that does not fit, by its name.
        SpecError: A number is out of range.
    """
    from . import jax as operations

    if logits.ndim < 1 or labels.shape != logits.shape[:-1]:
        raise ProblemError(f"`labels`: got shape {list(labels.shape)}, expected {list(logits.shape[:-1])}, that of the tokens of `logits`")
    rows = logits.reshape(1, -1, logits.shape[-1])
    asked: dict[str, Any] = {"loss_scale": loss_scale, "implementation": implementation}

    def loss(ids: Array, **batch: Any) -> Array:
        return operations.grpo_loss(rows, ids, **batch, **asked).loss

    def losses(ids: Array, **batch: Any) -> Array:
        return operations._losses_of_logits(rows, ids, implementation=implementation, **batch)

    options: dict[str, Any] = {"label_smoothing": label_smoothing, "z_loss": z_loss, "softcap": softcap, "logit_scale": logit_scale}
    return _reduced(losses if reduction == "none" else loss, labels, ignore_index, reduction, options)


def cross_entropy_of_hidden(
    hidden: Array,
    lm_head: Array,
    labels: Array,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    loss_scale: float | Array = 1.0,
    chunk: int = 256,
    logits_dtype: Any = None,
    implementation: str | None = None,
) -> Array:
    """Computes the cross-entropy of the logits `hidden @ lm_head`, differentiable by both, a chunk of logits at a time.

        >>> import assay.jax, jax.numpy as jnp
        >>> hidden, lm_head = jnp.zeros((2, 3)), jnp.ones((3, 4))
        >>> round(float(assay.jax.cross_entropy_of_hidden(hidden, lm_head, jnp.array([1, -100]))), 4)
        1.3863

    Args:
        hidden: `[…,H]`, and `lm_head` `[H,V]`, of one dtype.
        chunk, logits_dtype: As of `grpo_loss_of_hidden`; the others are those of `cross_entropy`.

    Raises:
        ProblemError, SpecError: As `cross_entropy`.
    """
    from . import jax as operations

    if hidden.ndim < 1 or labels.shape != hidden.shape[:-1]:
        raise ProblemError(f"`labels`: got shape {list(labels.shape)}, expected {list(hidden.shape[:-1])}, that of the tokens of `hidden`")
    rows = hidden.reshape(1, -1, hidden.shape[-1])
    asked: dict[str, Any] = {"chunk": chunk, "logits_dtype": logits_dtype, "implementation": implementation}

    def loss(ids: Array, **batch: Any) -> Array:
        return operations.grpo_loss_of_hidden(rows, lm_head, ids, loss_scale=loss_scale, **batch, **asked).loss

    def losses(ids: Array, **batch: Any) -> Array:
        return operations._losses_of_hidden(rows, lm_head, ids, **batch, **asked)

    options: dict[str, Any] = {"label_smoothing": label_smoothing, "z_loss": z_loss, "softcap": softcap, "logit_scale": logit_scale}
    return _reduced(losses if reduction == "none" else loss, labels, ignore_index, reduction, options)


def _reduced(asked: Any, labels: Array, ignore_index: int, reduction: str, options: dict[str, Any]) -> Array:
    """Asks for the loss of the tokens that count, or for that of each, and gives it the shape and the NaN that `reduction` says."""
    if reduction not in _REDUCTIONS:
        raise ProblemError(f"`reduction`: got {reduction!r}, expected one of {', '.join(_REDUCTIONS)}")
    ids, mask = labels.reshape(1, -1), labels.reshape(1, -1) != ignore_index
    # The loss of each token has the weight of its cotangent, as in a sum.
    spec = _spec("cross_entropy", reduction="sum" if reduction == "none" else reduction, **options)
    loss = asked(ids, mask=mask, advantages=jnp.zeros(1), spec=spec)
    if reduction == "none":
        return loss.reshape(labels.shape)
    # A mean of no loss is 0/0, which a kernel for losses of policies has as 0.
    return jnp.where(mask.any(), loss, jnp.nan) if reduction == "mean" else loss
