"""Campaigns for a cross-entropy: a function of logits, or of hidden states and a head, and of target ids."""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from typing import Any

from . import _autograd, _specs
from ._errors import AssayError, OutputError
from ._frameworks import Arrays
from ._loss import check_loss
from ._report import Report

# pytest shows the test's own frames alone.
__tracebackhide__ = methodcaller("errisinstance", AssayError)

CrossEntropy = Callable[..., Any]
_REDUCTIONS = ("mean", "sum", "none")


def check_cross_entropy(
    fn: CrossEntropy,
    *,
    framework: str = "torch",
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    lm_head: bool = False,
    **options: Any,
) -> Report:
    """Judges a cross-entropy, such as `torch.nn.functional.cross_entropy`, `linear_cross_entropy` or a fused kernel: forward, and backward
    with upstream gradients other than 1, or with one of each token.

        >>> import assay, jax, jax.numpy as jnp
        >>> def cross_entropy(logits, ids):
        ...     logp = jax.nn.log_softmax(logits.astype(jnp.float32))
        ...     counts = ids != -100
        ...     of_ids = jnp.take_along_axis(logp, jnp.where(counts, ids, 0)[:, None], -1)[:, 0]
        ...     return -jnp.where(counts, of_ids, 0.0).sum() / counts.sum()
        >>> options = dict(framework="jax", dtypes=["f32"], shapes=["2x3x7"], cases=4, wide=0, power=False, repro_dir=None)
        >>> assay.check_cross_entropy(cross_entropy, progress=False, **options).passed
        True

    In PyTorch:

        import torch.nn.functional as F

        print(assay.check_cross_entropy(F.cross_entropy))
        print(assay.check_cross_entropy(lambda x, w, ids: F.linear_cross_entropy(x, w, ids), lm_head=True))

    The loss of a token with logits `z`, softcapped and scaled, and the target `y` of V classes is

        -(1 - label_smoothing) * log_softmax(z)[y] + label_smoothing * mean(-log_softmax(z)) + z_loss * logsumexp(z) ** 2

    Args:
        fn: Takes `logits` `[N,V]` and `ids` `[N]`, or with `lm_head` `hidden` `[N,H]`, a head `[V,H]` and `ids`, with `ignore_index` where
            a token does not count. It returns a scalar, or with `reduction="none"` the losses `[N]`, of which the ignored ones are 0.
        framework: "torch" or "jax", whose arrays `fn` takes and which differentiates it.
        reduction: "mean" over the tokens that count, "sum" or "none".
        ignore_index: The id of tokens that do not count, a number that is no class.
        label_smoothing: The share of the target that is uniform over all V classes, from 0 to 1.
        z_loss: The weight of the squared log-sum-exp of each row, Liger's `lse_square_scale`.
        softcap: The number `c` of `c * tanh(logits / c)`, which `fn` takes of its logits; None: no cap.
        logit_scale: The number that `fn` multiplies its logits by, before the cap.
        options: The other arguments of `assay.check`; `spec` is given by those above.

    Raises:
        SpecError, ProblemError: A number is out of range, or an option is invalid, as for `assay.check`.
        AssayError: The framework, the reduction or an option is unknown, or `ignore_index` is a class.
    """
    if not callable(fn):
        raise AssayError(f"fn: got {type(fn).__name__}, expected a function of logits and ids")
    if reduction not in _REDUCTIONS:
        raise AssayError(f"reduction: got {reduction!r}, expected one of {', '.join(_REDUCTIONS)}")
    if type(ignore_index) is not int or ignore_index >= 0:
        raise AssayError(f"ignore_index: got {ignore_index!r}, expected an integer below 0: any other is a class of some problem")
    spec = _specs.spec(
        "cross_entropy",
        None,
        {"token_weights": reduction == "none"},
        {
            "reduction": reduction,
            "label_smoothing": label_smoothing,
            "z_loss": z_loss,
            "softcap": softcap,
            "logit_scale": logit_scale,
        },
    )
    has_head = _autograd.has_head({**options, "lm_head": lm_head})
    turned = options.get("layout") == "hv"

    def loss(x: Arrays) -> Any:
        ids = _ids(framework, x, ignore_index)
        if not has_head:
            returned = fn(x.logits.reshape(-1, x.logits.shape[-1]), ids)
        else:
            returned = fn(x.hidden.reshape(-1, x.hidden.shape[-1]), x.lm_head.T if turned else x.lm_head, ids)
        if reduction != "none":
            return returned
        if tuple(getattr(returned, "shape", ())) != tuple(ids.shape):
            given = f"shape {list(returned.shape)}" if hasattr(returned, "shape") else type(returned).__name__
            raise OutputError("token_loss", given, f"{list(ids.shape)}, the loss of each token")
        weights = _per_token(framework, x).reshape(-1)
        # A loss of infinity counts for nothing at a weight of 0. The sum is in f32, so that it is not what is judged.
        of_tokens = _where(framework, weights != 0, returned * weights)
        return _sum(framework, of_tokens), {"token_loss": of_tokens.reshape(x.ids.shape)}

    loss.__name__ = getattr(fn, "__name__", type(fn).__name__)
    return check_loss(loss, spec, framework=framework, lm_head=lm_head, **options)


def _ids(framework: str, x: Arrays, ignore_index: int) -> Any:
    """The targets of all tokens, `[N]`, with `ignore_index` where a token does not count."""
    if framework == "torch":
        return x.ids.where(x.mask, ignore_index).reshape(-1)
    import jax.numpy as jnp

    return jnp.where(x.mask, x.ids, ignore_index).reshape(-1)


def _per_token(framework: str, x: Arrays) -> Any:
    """The cotangent of each token's loss, `[B,T]`, 0 where a token does not count."""
    weights = x.token_weights
    if framework == "torch":
        return weights.expand(x.ids.shape).where(x.mask, 0)
    import jax.numpy as jnp

    return jnp.where(x.mask, jnp.broadcast_to(weights, x.ids.shape), 0)


def _where(framework: str, counts: Any, values: Any) -> Any:
    if framework == "torch":
        return values.where(counts, 0)
    import jax.numpy as jnp

    return jnp.where(counts, values, 0)


def _sum(framework: str, values: Any) -> Any:
    return values.float().sum() if framework == "torch" else values.astype("float32").sum()
