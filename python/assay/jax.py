"""The GRPO loss and the cross-entropy as operations of JAX, which compute the gradient together with the loss.

`grpo_loss` takes logits. Its kernels are those of this project: native on a CPU, Mosaic on a TPU, PTX on an NVIDIA GPU, or
plain XLA if that is asked for. docs/python.md has more.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _jax_rows as rows
from . import _native, _specs
from ._jax_cross_entropy import cross_entropy, cross_entropy_of_hidden
from ._errors import AssayError, ProblemError, SpecError
from ._jax_rows import Array, Axes, Plan
from ._native import Spec
from ._tape import logged, row_weights, weighed
from . import spec as spec_of

__all__ = [
    "GrpoLoss",
    "cross_entropy",
    "cross_entropy_of_hidden",
    "gather_logp",
    "grpo_loss",
    "grpo_loss_of_hidden",
    "logp_and_entropy",
    "logp_and_entropy_of_hidden",
]

#: The implementation of each platform, unless another one is asked for.
_OF_PLATFORM = {"cpu": "native", "tpu": "mosaic", "gpu": "ptx"}


class GrpoLoss(NamedTuple):
    """A loss and its metrics. Only the loss is differentiable: the rest is `stop_gradient`.

        >>> import assay, assay.jax, jax
        >>> problem = next(assay.problems("trl", n=1, dtypes=["f32"], shapes=["2x3x7"]))
        >>> x = problem.jax()
        >>> result = assay.jax.grpo_loss(x.logits, x.ids, mask=x.mask, advantages=x.advantages, old_logp=x.old_logp, spec="trl")
        >>> result.logp.shape, sorted(result.metrics)[:2]
        ((2, 3), ['clip_high', 'clip_low'])

    Attributes:
        loss: the loss of the batch, f32.
        metrics: f32 each, means over the unmasked tokens: `entropy_mean`, `ratio_mean`, `clip_low`, `clip_high`,
            `clip_region`, and with a KL penalty `kl_mean`.
        logp: `[B,T]` f32, or `[N]` of logits `[N,V]`, nats; 0 where masked, as are the two that follow.
        entropy: as logp, nats.
        token_loss: as logp, before the reduction.
    """

    loss: Array
    metrics: dict[str, Array]
    logp: Array
    entropy: Array
    token_loss: Array


def grpo_loss(
    logits: Array,
    ids: Array,
    *,
    mask: Array,
    advantages: Array,
    old_logp: Array | None = None,
    ref_logp: Array | None = None,
    bias: Array | None = None,
    cu_seqlens: Array | None = None,
    segment_ids: Array | None = None,
    temperature: Array | None = None,
    kept_ids: Array | None = None,
    spec: Spec | str | None = None,
    loss_scale: float | Array = 1.0,
    implementation: str | None = None,
    target: str | None = None,
    batch_axis: str | tuple[str, ...] | None = None,
    token_axis: str | tuple[str, ...] | None = None,
    vocab_axis: str | tuple[str, ...] | None = None,
    **given: Array,
) -> GrpoLoss:
    """Computes the GRPO loss of `logits`, differentiable by them.

        >>> import assay, assay.jax, jax
        >>> problem = next(assay.problems("trl", n=1, dtypes=["f32"], shapes=["2x3x7"]))
        >>> x = problem.jax()
        >>> def loss(logits):
        ...     return assay.jax.grpo_loss(logits, x.ids, mask=x.mask, advantages=x.advantages, old_logp=x.old_logp, spec="trl").loss
        >>> jax.grad(loss)(x.logits).shape
        (2, 3, 7)

    If it is differentiated, the forward pass computes dlogits, which XLA puts in the memory of the logits if nothing else needs
    them; else it computes none. The backward pass multiplies dlogits by the loss's cotangent over `loss_scale`, in f32, and rounds
    them to their dtype once more; XLA omits that if it knows the quotient to be 1.

    Args:
        logits: `[B,T,V]`, f32, bf16 or f16; `[b,t]` scores `ids[b,t]`.
        ids: `[B,T]`, integers.
        mask: `[B,T]`, truth values, or integers or floats that are 0 or 1: the tokens that count.
        advantages: `[B]` or `[B,T]`.
        old_logp: `[B,T]`, nats. What the spec does not read may be there all the same.
        ref_logp: `[B,T]`, nats.
        bias: `[V]`, what the spec's `logits.bias` adds to logits; of a cut vocabulary a device's columns. It has no gradient: one
            that is trained belongs into the logits.
        cu_seqlens: `[S+1]`, integers: S sequences are packed into one row, B = 1 and T = N tokens. 0, and where each ends; one may be
            empty, and tokens after the last belong to no sequence and are masked. Advantages are then `[S]` or `[1,N]`. Logits may be
            `[N,V]`, and the arrays and results of tokens are then `[N]`.
        segment_ids: `[1,N]` or `[N]`, integers, in place of it: 1, 2, … in order, 0 for padding. There are as many sequences as
            advantages `[S]`; if advantages are per token (N of them with logits `[N,V]`), as the highest id says.
        temperature: `[B]`, `[B,1]` or `[B,T]`: what logits are divided by, one a sequence or one a token, whatever a project's own
            option is; a `Spec` has `temperature: given`. Packed `[S]`, `[S,1]` or `[1,N]`, the last `[N]` with logits `[N,V]`. It has no
            gradient.
        kept_ids: `[B,T,K]`, integers, by `native` alone: the vocabulary entries that the sampler has kept for each token, in any order, -1
            for no entry; packed also `[N,K]`. The softmax is over these; a `Spec` has `support: {kept: {}}`, or says there that entropy
            and KL are over the vocabulary. What does not fit is an error of the kernel's.
        spec: of `assay.spec`, or a project's name. It has no default.
        loss_scale: what the loss will be multiplied by before it is differentiated (loss scaling, accumulation): it goes
            into the tokens' weights before dlogits are rounded. The loss itself is returned without it.
        implementation: `native`, `mosaic`, `ptx` or `xla`; that of the platform if none is given.
        target: the chip that `mosaic` and `ptx` are for, as `v6e` or `h100`; that of the first device if none is given.
        batch_axis: in a `shard_map`, the axes of its mesh over which sequences are cut. The loss and the metrics are then
            those of all, the same on every device.
        token_axis: likewise the tokens of a sequence, or of a packed row, whose `segment_ids` are then a device's and whose
            `cu_seqlens` and advantages are those of all.
        vocab_axis: likewise the columns, in order and as many on each device.
        given: `[B,T]` each, what else the spec reads: `policy_weight`, `kl_weight`, `selected`, `rollout_logp`,
            `log_weight`, `behaviour_logp`, as docs/jax.md has them; `dentropy`, the cotangent of each token's entropy.

    Raises:
        SpecError: the spec is missing or invalid, or has a feature that the implementation does not compute.
        ProblemError: an array does not fit; where they are known, as under `jit` they are not, also the values of `cu_seqlens`,
            `segment_ids` and `temperature`. An unmasked token of no sequence, or of a temperature that is no finite number > 0, is
            else a NaN in the loss, or an error of `native`'s.
        AssayError: the implementation is not available, or another argument is invalid.
    """
    spec = _asked(spec, given)
    axes = _Axes.of(batch_axis, token_axis, vocab_axis)
    given = dict(given, old_logp=old_logp, ref_logp=ref_logp)
    tokens = _Tokens(ids, mask, advantages, given, temperature, cu_seqlens, segment_ids, kept_ids)
    logits, tokens, flat = _in_a_row("logits", logits, tokens)
    _expect_logits(logits, tokens.ids)
    batch = _Batch.of(tokens, axes, spec, implementation, target, bias, logits.shape[2])
    loss, results = _loss(batch.plan, axes, logits, _scale(loss_scale), *batch.arrays)
    return batch.logged(loss, results, flat)


def grpo_loss_of_hidden(
    hidden: Array,
    lm_head: Array,
    ids: Array,
    *,
    mask: Array,
    advantages: Array,
    old_logp: Array | None = None,
    ref_logp: Array | None = None,
    bias: Array | None = None,
    cu_seqlens: Array | None = None,
    segment_ids: Array | None = None,
    temperature: Array | None = None,
    kept_ids: Array | None = None,
    spec: Spec | str | None = None,
    loss_scale: float | Array = 1.0,
    chunk: int = 256,
    logits_dtype: Any = None,
    implementation: str | None = None,
    target: str | None = None,
    batch_axis: str | tuple[str, ...] | None = None,
    token_axis: str | tuple[str, ...] | None = None,
    vocab_axis: str | tuple[str, ...] | None = None,
    **given: Array,
) -> GrpoLoss:
    """Computes the GRPO loss of the logits `hidden @ lm_head`, differentiable by both, a chunk of logits and dlogits at a time.

        >>> import assay, assay.jax, jax
        >>> problem = next(assay.problems("trl", n=1, dtypes=["f32"], shapes=["2x3x4x7"], lm_head=True))
        >>> x = problem.jax()
        >>> lm_head = x.lm_head if problem.layout == "hv" else x.lm_head.T
        >>> batch = dict(mask=x.mask, advantages=x.advantages, old_logp=x.old_logp)
        >>> def loss(hidden, lm_head):
        ...     return assay.jax.grpo_loss_of_hidden(hidden, lm_head, x.ids, spec="trl", **batch).loss
        >>> [gradient.shape for gradient in jax.grad(loss, argnums=(0, 1))(x.hidden, lm_head)]
        [(2, 3, 4), (4, 7)]

    Products are summed in f32. A chunk's logits are rounded to `logits_dtype`, and so are their dlogits; both gradients once, to
    their own dtype.

    Args:
        hidden: `[B,T,H]`, f32, bf16 or f16; `[N,H]` may be packed.
        lm_head: `[H,V]`, of the same dtype.
        ids: as are the others, of `grpo_loss`.
        chunk: tokens of each row that have logits at a time; of a loss whose tokens share a ratio, whole sequences of as many
            tokens in all, one at least. Where such are packed, logits are made twice, chunk by chunk.
        logits_dtype: of the logits and their dlogits; that of `hidden` if none is given.

    Raises:
        SpecError, ProblemError, AssayError: as of `grpo_loss`.
    """
    spec = _asked(spec, given)
    axes = _Axes.of(batch_axis, token_axis, vocab_axis)
    given = dict(given, old_logp=old_logp, ref_logp=ref_logp)
    tokens = _Tokens(ids, mask, advantages, given, temperature, cu_seqlens, segment_ids, kept_ids)
    hidden, tokens, flat = _in_a_row("hidden", hidden, tokens)
    part = _chunk(hidden, lm_head, tokens.ids, chunk, logits_dtype)
    batch = _Batch.of(tokens, axes, spec, implementation, target, bias, lm_head.shape[1])
    loss, results = _head_loss(batch.plan, axes, part, hidden, lm_head, _scale(loss_scale), *batch.arrays)
    return batch.logged(loss, results, flat)


def logp_and_entropy(
    logits: Array,
    ids: Array,
    *,
    mask: Array | None = None,
    bias: Array | None = None,
    temperature: Array | None = None,
    spec: Spec | str | None = None,
    implementation: str | None = None,
    target: str | None = None,
    vocab_axis: str | tuple[str, ...] | None = None,
) -> tuple[Array, Array]:
    """Computes the logp of the ids and the entropy, `[B,T]` f32 each, 0 where masked: `selective_log_softmax` and the entropy in one.

        >>> import assay, assay.jax, jax
        >>> problem = next(assay.problems("trl", n=1, dtypes=["f32"], shapes=["2x3x7"]))
        >>> x = problem.jax()
        >>> logp, entropy = assay.jax.logp_and_entropy(x.logits, x.ids, mask=x.mask)
        >>> logp.shape, entropy.shape
        ((2, 3), (2, 3))

    Both are differentiable by the logits, with any cotangents: the forward pass keeps the logits, the backward pass reads them
    once more and writes dlogits, rounded once. Under `stop_gradient` nothing is kept.

    Arguments and errors are those of `grpo_loss`; of the spec only what becomes of logits is read.
    """
    axes = _Axes.of(None, None, vocab_axis)
    _expect_logits(logits, ids)
    plan, tokens = _scoring(axes, ids, mask, temperature, bias, logits.shape[2], spec, implementation, target)
    return _scores(plan, axes, logits, *tokens)  # type: ignore[no-any-return]


def logp_and_entropy_of_hidden(
    hidden: Array,
    lm_head: Array,
    ids: Array,
    *,
    mask: Array | None = None,
    bias: Array | None = None,
    temperature: Array | None = None,
    spec: Spec | str | None = None,
    chunk: int = 256,
    logits_dtype: Any = None,
    implementation: str | None = None,
    target: str | None = None,
    vocab_axis: str | tuple[str, ...] | None = None,
) -> tuple[Array, Array]:
    """Computes logp and entropy of the logits `hidden @ lm_head`, differentiable by both, a chunk of logits and dlogits at a time.

        >>> import assay, assay.jax, jax
        >>> problem = next(assay.problems("trl", n=1, dtypes=["f32"], shapes=["2x3x4x7"], lm_head=True))
        >>> x = problem.jax()
        >>> lm_head = x.lm_head if problem.layout == "hv" else x.lm_head.T
        >>> logp, entropy = assay.jax.logp_and_entropy_of_hidden(x.hidden, lm_head, x.ids, mask=x.mask)
        >>> logp.shape, entropy.shape
        ((2, 3), (2, 3))

    Arguments and errors are those of `grpo_loss_of_hidden`; of the spec only what becomes of logits is read.
    """
    part = _chunk(hidden, lm_head, ids, chunk, logits_dtype)
    axes = _Axes.of(None, None, vocab_axis)
    plan, tokens = _scoring(axes, ids, mask, temperature, bias, lm_head.shape[1], spec, implementation, target)
    return _head_scores(plan, axes, part, hidden, lm_head, *tokens)  # type: ignore[no-any-return]


def gather_logp(
    logits: Array,
    ids: Array,
    *,
    mask: Array | None = None,
    temperature: Array | None = None,
    spec: Spec | str | None = None,
    implementation: str | None = None,
    target: str | None = None,
    vocab_axis: str | tuple[str, ...] | None = None,
) -> Array:
    """Computes the log-probabilities of K ids a token, `[B,T,K]` f32, 0 where masked: `take_along_axis(log_softmax(logits), ids, -1)`, as
    distillation on a teacher's top K has it.

        >>> import assay, assay.jax, jax
        >>> problem = next(assay.problems("trl", n=1, dtypes=["f32"], shapes=["2x3x7"]))
        >>> x = problem.jax()
        >>> _, ids = jax.lax.top_k(x.logits, 2)
        >>> assay.jax.gather_logp(x.logits, ids, mask=x.mask).shape
        (2, 3, 2)

    Differentiable by the logits: the kernel of `logp_and_entropy` does the likeliest of a token's ids, from which the others' logp
    follows, and writes dlogits; their columns are then set, each to the sum of what its id's places have sent, rounded once.

    Args:
        ids: `[B,T,K]`, integers; an id may occur several times in a token.
        logits: as the others, of `logp_and_entropy`; a spec with a bias or a support of its own is refused.

    Raises:
        SpecError, ProblemError, AssayError: as of `grpo_loss`.
    """
    if ids.ndim != 3 or ids.shape[2] == 0:
        raise ProblemError(f"`ids`: got shape {list(ids.shape)}, expected [B,T,K] with K ≥ 1")
    axes = _Axes.of(None, None, vocab_axis)
    _expect_logits(logits, ids[..., 0])
    tokens = ids[..., 0], mask, temperature, None
    plan, (_, *of_tokens) = _scoring(axes, *tokens, logits.shape[2], spec, implementation, target)
    read = plan.spec.to_dict()
    if read["support"]["vocab"] is not None or read["support"]["excluded_ids"]:
        raise SpecError(f"`support`: got {read['support']}, expected the whole vocabulary")
    divides = 1.0 if read["temperature_divides"] == "logits" else read["temperature"]
    change = _Change(read["logits"]["scale"], read["logits"]["softcap"], read["temperature"], divides)
    return _gathered(plan, axes, change, logits, ids.astype(jnp.int32), *of_tokens)


def _scoring(
    axes: _Axes,
    ids: Array,
    mask: Array | None,
    temperature: Array | None,
    bias: Array | None,
    columns: int,
    spec: Spec | str | None,
    implementation: str | None,
    target: str | None,
) -> tuple[Plan, tuple[Array, ...]]:
    """Returns the plan that scores tokens, and its arrays: ids, mask, and the rates and the bias if there are any."""
    plan = Plan(_of_logp(_spec(spec, temperature)), ids.shape[1], None, *_implementation(implementation, target))
    counts = jnp.ones(ids.shape, bool) if mask is None else _mask(mask, ids.shape)
    of_tokens = [_of_tokens(array, ids.shape) for array in _temperature(plan, temperature, counts, None)]
    arrays = (*(_rate(plan, array, counts) for array in of_tokens), *_bias(plan, bias, columns))
    return plan, (ids.astype(jnp.int32), counts, *(lax.stop_gradient(array) for array in arrays))


def _of_logp(spec: Spec) -> Spec:
    """The sum of logp and entropy times what is given, of the same softmax."""
    read = spec.to_dict()
    return spec_of("logp", **{name: read[name] for name in ("temperature", "temperature_divides", "logits", "support")})


# ---- losses of single tokens, for a cross-entropy that is not reduced


def _losses_of_logits(
    logits: Array, ids: Array, *, mask: Array, advantages: Array, spec: Spec, implementation: str | None
) -> Array:
    """Computes the loss of each token, `[B,T]`, which their cotangents weigh."""
    axes = _Axes.of(None, None, None)
    _expect_logits(logits, ids)
    tokens = _Tokens(ids, mask, advantages, {}, None, None, None)
    batch = _Batch.of(tokens, axes, spec, implementation, None, None, logits.shape[2])
    return _token_losses(batch.plan, axes, logits, *batch.arrays)


def _losses_of_hidden(
    hidden: Array,
    lm_head: Array,
    ids: Array,
    *,
    mask: Array,
    advantages: Array,
    spec: Spec,
    chunk: int,
    logits_dtype: Any,
    implementation: str | None,
) -> Array:
    """Computes the loss of each token, `[B,T]`, from the logits `hidden @ lm_head`, a chunk at a time."""
    axes = _Axes.of(None, None, None)
    part = _chunk(hidden, lm_head, ids, chunk, logits_dtype)
    tokens = _Tokens(ids, mask, advantages, {}, None, None, None)
    batch = _Batch.of(tokens, axes, spec, implementation, None, None, lm_head.shape[1])
    return _head_token_losses(batch.plan, axes, part, hidden, lm_head, *batch.arrays)


# ---- the derivative


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _loss(plan: Plan, axes: _Axes, logits: Array, scale: Array, *arrays: Array) -> tuple[Array, Array]:
    (results,) = rows.evaluate(plan, False, axes.manual, logits, *arrays)
    return _reduced(plan, results, arrays, axes), results


def _forward(plan: Plan, axes: _Axes, logits: Array, scale: Array, *arrays: Array) -> tuple[Any, Any]:
    results, dlogits = rows.evaluate(plan, True, axes.manual, logits, *_scaled(arrays, scale))
    return (_reduced(plan, results, arrays, axes), results), (dlogits, scale, len(arrays))


def _backward(plan: Plan, axes: _Axes, kept: tuple[Array, Array, int], cotangents: tuple[Array, Array]) -> tuple[Any, ...]:
    dlogits, scale, others = kept
    return _times(dlogits, cotangents[0] / scale), None, *[None] * others


_loss.defvjp(_forward, _backward)


class _Chunk(NamedTuple):
    """The size and dtype of a chunk of logits."""

    tokens: int
    dtype: Any


def _chunk(hidden: Array, lm_head: Array, ids: Array, chunk: int, logits_dtype: Any) -> _Chunk:
    _expect_arrays({"hidden": hidden, "lm_head": lm_head})
    if hidden.ndim != 3 or lm_head.ndim != 2 or hidden.shape[2] != lm_head.shape[0]:
        shapes = f"{list(hidden.shape)} and {list(lm_head.shape)}"
        raise ProblemError(f"`hidden` and `lm_head`: got shapes {shapes}, expected [B,T,H] and [H,V]")
    if hidden.dtype != lm_head.dtype:
        raise ProblemError(f"`lm_head`: got dtype {lm_head.dtype}, expected {hidden.dtype}, that of `hidden`")
    if chunk < 1:
        raise ProblemError(f"`chunk`: got {chunk}, expected 1 and more tokens")
    dtype = jnp.dtype(hidden.dtype if logits_dtype is None else logits_dtype)
    _expect_logits(jax.ShapeDtypeStruct((*hidden.shape[:2], lm_head.shape[1]), dtype), ids)
    return _Chunk(chunk, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _head_loss(
    plan: Plan, axes: _Axes, chunk: _Chunk, hidden: Array, lm_head: Array, scale: Array, *arrays: Array
) -> tuple[Array, Array]:
    results, _, _ = _sweep(plan, axes, chunk, False, hidden, lm_head, arrays)
    return _reduced(plan, results, arrays, axes), results


def _head_forward(
    plan: Plan, axes: _Axes, chunk: _Chunk, hidden: Array, lm_head: Array, scale: Array, *arrays: Array
) -> tuple[Any, Any]:
    results, *gradients = _sweep(plan, axes, chunk, True, hidden, lm_head, _scaled(arrays, scale))
    return (_reduced(plan, results, arrays, axes), results), (gradients, scale, len(arrays))


def _head_backward(
    plan: Plan, axes: _Axes, chunk: _Chunk, kept: tuple[list[Array], Array, int], cotangents: tuple[Array, Array]
) -> tuple[Any, ...]:
    gradients, scale, others = kept
    return *(_times(gradient, cotangents[0] / scale) for gradient in gradients), None, *[None] * others


_head_loss.defvjp(_head_forward, _head_backward)


def _sent(of_tokens: tuple[Array, ...], dlogp: Array, dentropy: Array) -> tuple[Array, ...]:
    """The arrays of a loss that is the sum of logp and entropy times these."""
    ids, mask, *others = of_tokens
    return ids, mask, -dlogp, jnp.ones((*ids.shape, 3), jnp.float32), dentropy, *others


def _unsent(of_tokens: tuple[Array, ...]) -> tuple[Array, ...]:
    nothing = jnp.zeros(of_tokens[0].shape, jnp.float32)
    return _sent(of_tokens, nothing, nothing)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scores(plan: Plan, axes: _Axes, logits: Array, *of_tokens: Array) -> tuple[Array, Array]:
    (results,) = rows.evaluate(plan, False, axes.manual, logits, *_unsent(of_tokens))
    return results[..., 0], results[..., 1]


def _scores_forward(plan: Plan, axes: _Axes, *arrays: Array) -> tuple[Any, Any]:
    return _scores(plan, axes, *arrays), arrays


def _scores_backward(plan: Plan, axes: _Axes, kept: tuple[Array, ...], cotangents: tuple[Array, Array]) -> tuple[Any, ...]:
    logits, *of_tokens = kept
    _, dlogits = rows.evaluate(plan, True, axes.manual, logits, *_sent(tuple(of_tokens), *cotangents))
    return dlogits, *[None] * len(of_tokens)


_scores.defvjp(_scores_forward, _scores_backward)


def _weighed_by(cotangents: Array, arrays: Sequence[Array]) -> tuple[Array, ...]:
    """The arrays of a loss that is the sum of token losses times their cotangents."""
    ids, mask, advantages, weights, *inputs = arrays
    return ids, mask, advantages, weights.at[..., 0].set(cotangents), *inputs


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _token_losses(plan: Plan, axes: _Axes, logits: Array, *arrays: Array) -> Array:
    (results,) = rows.evaluate(plan, False, axes.manual, logits, *arrays)
    return results[..., rows.RESULTS.index("token_loss")]


def _token_losses_forward(plan: Plan, axes: _Axes, *arrays: Array) -> tuple[Any, Any]:
    return _token_losses(plan, axes, *arrays), arrays


def _token_losses_backward(plan: Plan, axes: _Axes, kept: tuple[Array, ...], cotangents: Array) -> tuple[Any, ...]:
    logits, *arrays = kept
    _, dlogits = rows.evaluate(plan, True, axes.manual, logits, *_weighed_by(cotangents, arrays))
    return dlogits, *[None] * len(arrays)


_token_losses.defvjp(_token_losses_forward, _token_losses_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _head_token_losses(plan: Plan, axes: _Axes, chunk: _Chunk, hidden: Array, lm_head: Array, *arrays: Array) -> Array:
    results, _, _ = _sweep(plan, axes, chunk, False, hidden, lm_head, arrays)
    return results[..., rows.RESULTS.index("token_loss")]


def _head_token_losses_forward(plan: Plan, axes: _Axes, chunk: _Chunk, *arrays: Array) -> tuple[Any, Any]:
    return _head_token_losses(plan, axes, chunk, *arrays), arrays


def _head_token_losses_backward(
    plan: Plan, axes: _Axes, chunk: _Chunk, kept: tuple[Array, ...], cotangents: Array
) -> tuple[Any, ...]:
    hidden, lm_head, *arrays = kept
    _, *gradients = _sweep(plan, axes, chunk, True, hidden, lm_head, _weighed_by(cotangents, arrays))
    return *gradients, *[None] * len(arrays)


_head_token_losses.defvjp(_head_token_losses_forward, _head_token_losses_backward)


class _Change(NamedTuple):
    """The transform of logits before their softmax, and the factor from the temperature's logp to that of the softmax."""

    scale: float
    softcap: float | None
    #: Or `given`.
    temperature: float | str
    logp_times: float

    def divisor(self, plan: Plan, rates: tuple[Array, ...]) -> Array | float:
        """The temperature, of each token's ids where it is given."""
        return plan.of["rate"] / rates[0][..., None] if rates else self.temperature


class _Gathered(NamedTuple):
    """The logits and slopes of a token's ids, `[B,T,K]`, and the likeliest of them, `[B,T]`."""

    #: This device's columns; one past the last where another has it, or the mask is false.
    columns: Array
    #: The arguments of the softmax, before the temperature.
    logits: Array
    slopes: Array
    likeliest: Array
    #: By how much less likely an id's logp is than the likeliest one's.
    below: Array

    @classmethod
    def of(cls, axes: _Axes, change: _Change, temperature: Array | float, logits: Array, ids: Array, mask: Array) -> _Gathered:
        local = ids - lax.axis_index(axes.vocab) * logits.shape[2] if axes.vocab else ids
        here = mask[..., None] & (local >= 0) & (local < logits.shape[2])
        columns = jnp.where(here, local, logits.shape[2])
        taken = jnp.take_along_axis(logits, jnp.where(here, local, 0), axis=2).astype(jnp.float32)
        taken = jnp.where(here, taken, 0.0)
        taken = change.scale * (lax.psum(taken, axes.vocab) if axes.vocab else taken)
        slopes = jnp.full_like(taken, change.scale)
        if change.softcap is not None:
            slopes = change.scale / jnp.cosh(taken / change.softcap) ** 2
            taken = change.softcap * jnp.tanh(taken / change.softcap)
        most = taken.max(2, keepdims=True)
        likeliest = jnp.take_along_axis(ids, taken.argmax(2, keepdims=True), axis=2)[..., 0]
        below = jnp.where(taken == most, 0.0, (most - taken) / temperature)
        return cls(columns, taken, slopes, likeliest, below)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gathered(plan: Plan, axes: _Axes, change: _Change, logits: Array, ids: Array, mask: Array, *rates: Array) -> Array:
    of = _Gathered.of(axes, change, change.divisor(plan, rates), logits, ids, mask)
    (results,) = rows.evaluate(plan, False, axes.manual, logits, *_unsent((of.likeliest, mask, *rates)))
    return jnp.where(mask[..., None], results[..., :1] - of.below, 0.0)


def _gathered_forward(plan: Plan, axes: _Axes, change: _Change, *arrays: Array) -> tuple[Any, Any]:
    return _gathered(plan, axes, change, *arrays), arrays


def _gathered_backward(
    plan: Plan, axes: _Axes, change: _Change, kept: tuple[Array, ...], dlogp: Array
) -> tuple[Array | None, ...]:
    logits, ids, mask, *rates = kept
    temperature = change.divisor(plan, tuple(rates))
    of = _Gathered.of(axes, change, temperature, logits, ids, mask)
    dlogp = jnp.where(mask[..., None], dlogp, 0.0)
    sent = _sent((of.likeliest, mask, *rates), dlogp.sum(2), jnp.zeros(mask.shape, jnp.float32))
    results, dlogits = rows.evaluate(plan, True, axes.manual, logits, *sent)
    log_p = (results[..., :1] - of.below) * change.logp_times
    same = ids[..., :, None] == ids[..., None, :]
    own = jnp.where(same, dlogp[..., None, :], 0.0).sum(3)
    rest = jnp.where(same, 0.0, dlogp[..., None, :]).sum(3)
    columns = (-own * jnp.expm1(log_p) - rest * jnp.exp(log_p)) * of.slopes / temperature
    batch, tokens, _ = jnp.ogrid[: ids.shape[0], : ids.shape[1], : ids.shape[2]]
    dlogits = dlogits.at[batch, tokens, of.columns].set(columns.astype(dlogits.dtype), mode="drop")
    return dlogits, *[None] * (2 + len(rates))


_gathered.defvjp(_gathered_forward, _gathered_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _head_scores(
    plan: Plan, axes: _Axes, chunk: _Chunk, hidden: Array, lm_head: Array, *of_tokens: Array
) -> tuple[Array, Array]:
    results, _, _ = _sweep(plan, axes, chunk, False, hidden, lm_head, _unsent(of_tokens))
    return results[..., 0], results[..., 1]


def _head_scores_forward(plan: Plan, axes: _Axes, chunk: _Chunk, *arrays: Array) -> tuple[Any, Any]:
    return _head_scores(plan, axes, chunk, *arrays), arrays


def _head_scores_backward(
    plan: Plan, axes: _Axes, chunk: _Chunk, kept: tuple[Array, ...], cotangents: tuple[Array, Array]
) -> tuple[Any, ...]:
    hidden, lm_head, *of_tokens = kept
    _, *gradients = _sweep(plan, axes, chunk, True, hidden, lm_head, _sent(tuple(of_tokens), *cotangents))
    return *gradients, *[None] * len(of_tokens)


_head_scores.defvjp(_head_scores_forward, _head_scores_backward)


def _scaled(arrays: tuple[Array, ...], scale: Array) -> tuple[Array, ...]:
    """Multiplies the weights of the loss by `scale`, except the KL penalty's share, which is a quotient of weights."""
    ids, mask, advantages, weights, *inputs = arrays
    return ids, mask, advantages, weights * jnp.stack([scale, jnp.ones_like(scale), scale]), *inputs


def _times(gradient: Array, factor: Array) -> Array:
    return (gradient.astype(jnp.float32) * factor).astype(gradient.dtype)


def _sweep(
    plan: Plan, axes: _Axes, chunk: _Chunk, backward: bool, hidden: Array, lm_head: Array, arrays: tuple[Array, ...]
) -> tuple[Array, Array, Array]:
    """Results of all tokens, and `backward` the gradients of `hidden` and `lm_head`, else nothing in their place."""
    if plan.packed is not None and plan.of["couples_rows"]:
        return _sweep_twice(plan, axes, chunk, backward, hidden, lm_head, arrays)
    batch, tokens, _ = hidden.shape
    axis, extent = (0, batch) if plan.of["couples_rows"] else (1, tokens)
    size = min(extent, max(1, chunk.tokens // tokens) if axis == 0 else chunk.tokens)
    pieces = -(-extent // size)

    def cut(array: Array) -> Array:
        """Splits an axis into pieces, which become the first axis."""
        widths = [(0, pieces * size - extent if i == axis else 0) for i in range(array.ndim)]
        shape = (*array.shape[:axis], pieces, size, *array.shape[axis + 1 :])
        return jnp.moveaxis(jnp.pad(array, widths).reshape(shape), axis, 0)

    def joined(array: Array) -> Array:
        whole = jnp.moveaxis(array, 0, axis)
        whole = whole.reshape(*whole.shape[:axis], pieces * size, *whole.shape[axis + 2 :])
        return lax.slice_in_dim(whole, 0, extent, axis=axis)

    def product(equation: str, a: Array, b: Array) -> Array:
        return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)

    def step(dhead: Array, piece: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
        part, *of_tokens = piece
        logits = product("bth,hv->btv", part, lm_head).astype(chunk.dtype)
        results, *dlogits = rows.evaluate(plan, backward, axes.manual, logits, *of_tokens, *bias)
        if not backward:
            return dhead, (results,)
        dhidden = product("btv,hv->bth", dlogits[0], lm_head)
        return dhead + product("bth,btv->hv", part, dlogits[0]), (results, dhidden)

    nothing = jnp.zeros(lm_head.shape if backward else (), jnp.float32)
    if axes.inside:
        nothing = lax.pcast(nothing, _varying(hidden, lm_head, *arrays), to="varying")
    of_all_tokens, bias = arrays[: len(arrays) - plan.biased], arrays[len(arrays) - plan.biased :]
    cut_up = tuple(cut(array) for array in (hidden, *of_all_tokens))
    dhead, (results, *dhidden) = lax.scan(step, nothing, cut_up)
    if not backward:
        return joined(results), dhead, dhead
    return joined(results), _of_all(joined(dhidden[0]), hidden), _of_all(dhead, lm_head)


def _sweep_twice(
    plan: Plan, axes: _Axes, chunk: _Chunk, backward: bool, hidden: Array, lm_head: Array, arrays: tuple[Array, ...]
) -> tuple[Array, Array, Array]:
    """Does the work of `_sweep` if tokens of several chunks share a ratio: first logp and entropy of all tokens, then the gradient."""
    if plan.kept:
        expected = "`grpo_loss` of logits: these tokens share a ratio over several chunks"
        raise ProblemError(f"`kept_ids`: got them for packed hidden states, expected {expected}")
    ids, mask, advantages, weights, *others = arrays
    _, inputs, bias = rows.apart(plan, others)
    scored = dataclasses.replace(plan, spec=_of_logp(plan.spec), packed=None)
    rates = (array for name, array in zip(plan.inputs, inputs) if name == "rate")
    of_tokens = (ids, mask, *rates, *bias[: int(plan.biased)])
    scores, *nothing = _sweep(scored, axes, chunk, False, hidden, lm_head, _unsent(of_tokens))

    def between(*arrays: Array) -> tuple[Array, Array]:
        return rows.token_losses(plan, axes.tokens, arrays[:2], *arrays[2:])

    token_losses = rows.automatic(between, mask, (3, 2))
    results, grad_logp = token_losses(scores[..., 0], scores[..., 1], mask, advantages, weights, *others)
    if not backward:
        return results, nothing[0], nothing[1]
    sent = _sent(of_tokens, grad_logp, rows.of_entropy(plan, weights, inputs))
    _, dhidden, dhead = _sweep(scored, axes, chunk, True, hidden, lm_head, sent)
    return results, dhidden, dhead


def _varying(*arrays: Array) -> Axes:
    return tuple(sorted(frozenset().union(*(jax.typeof(array).manual_axis_type.varying for array in arrays))))


def _of_all(gradient: Array, of: Array) -> Array:
    """The sum over the devices that hold `of` alike, in its dtype."""
    over = tuple(axis for axis in _varying(gradient) if axis not in _varying(of))
    return (lax.psum(gradient, over) if over else gradient).astype(of.dtype)


# ---- from token losses to numbers


class _Axes(NamedTuple):
    """The axes of the `shard_map` around over which a batch is cut."""

    batch: Axes = ()
    tokens: Axes = ()
    vocab: Axes = ()
    inside: bool = False

    @classmethod
    def of(cls, *named: str | tuple[str, ...] | None) -> _Axes:
        manual = frozenset(jax.sharding.get_abstract_mesh().manual_axes)
        axes = [(name,) if isinstance(name, str) else tuple(name or ()) for name in named]
        for argument, names in zip(("batch_axis", "token_axis", "vocab_axis"), axes, strict=True):
            if strangers := [name for name in names if name not in manual]:
                there = f"one of {', '.join(sorted(manual))}" if manual else "none outside of a shard_map: jit cuts by itself"
                raise AssayError(f"`{argument}`: got {strangers[0]!r}, expected {there}")
        batch, tokens, vocab = axes
        return cls(batch, tokens, vocab, bool(manual))

    @property
    def manual(self) -> tuple[Axes, Axes] | None:
        return (self.tokens, self.vocab) if self.inside else None

    def total(self, values: Array) -> Array:
        """Sums values over all tokens, those of other devices included."""
        over = self.batch + self.tokens
        return lax.psum(values.sum(), over) if over else values.sum()


def _size(axes: Axes) -> int:
    size: int = lax.axis_size(axes) if axes else 1
    return size


def _weights(plan: Plan, mask: Array, sequences: rows.Sequences, count: float | Array, axes: _Axes) -> Array:
    """`[B,T,3]`, what a token's terms are multiplied by: the loss's, its KL penalty's share and its entropy's. 0 where it is masked, NaN
    where it is of none of the `count` sequences."""
    counts = sequences.sum(mask.astype(jnp.float32), axes.tokens)
    of_rows = row_weights(jnp, plan.of, counts, axes._replace(tokens=()).total, count)
    of_tokens = jnp.stack([sequences.spread(weight) for weight in of_rows], -1)
    if sequences.segment_ids is not None:
        of_tokens = jnp.where(sequences.segment_ids[..., None] > 0, of_tokens, jnp.nan)
    return jnp.where(mask[..., None], of_tokens, 0.0)


def _reduced(plan: Plan, results: Array, arrays: tuple[Array, ...], axes: _Axes) -> Array:
    """Reduces the results of tokens to the loss of the batch."""
    _, mask, _, weights, *others = arrays
    _, inputs, _ = rows.apart(plan, others)
    terms = {name: results[..., rows.RESULTS.index(name)] for name in ("reduced", "entropy")}
    return axes.total(weighed(jnp, mask, terms, weights[..., 0], rows.of_entropy(plan, weights, inputs)))


def _metrics(plan: Plan, of: dict[str, Array], mask: Array, axes: _Axes) -> dict[str, Array]:
    count = jnp.maximum(axes.total(mask.astype(jnp.float32)), 1.0)
    return {name: axes.total(values) / count for name, values in logged(jnp, plan.of, of).items()}


# ---- arguments


class _Tokens(NamedTuple):
    """The arrays of tokens and sequences, as the caller gives them."""

    ids: Array
    mask: Array
    advantages: Array
    given: dict[str, Array | None]
    temperature: Array | None
    cu_seqlens: Array | None
    segment_ids: Array | None
    kept_ids: Array | None = None

    @property
    def packed(self) -> bool:
        return self.cu_seqlens is not None or self.segment_ids is not None

    def in_a_row(self, length: int) -> _Tokens:
        """Returns the arrays with `[N]` of tokens as `[1,N]`."""

        def row(array: Array | None) -> Array | None:
            return array[None] if array is not None and array.shape == (length,) else array

        # As many sequences as tokens have theirs.
        of_sequences = self.cu_seqlens is not None and self.cu_seqlens.shape == (length + 1,)
        advantages = self.advantages if of_sequences else row(self.advantages)
        arrays = {name: row(getattr(self, name)) for name in ("ids", "mask", "temperature")}
        if self.kept_ids is not None and self.kept_ids.ndim == 2:
            arrays["kept_ids"] = self.kept_ids[None]
        return self._replace(**arrays, advantages=advantages, given={name: row(array) for name, array in self.given.items()})


def _in_a_row(name: str, array: Array, tokens: _Tokens) -> tuple[Array, _Tokens, bool]:
    """Logits or hidden states and their tokens as a row, and whether they were none."""
    _expect_arrays({name: array, "ids": tokens.ids, "mask": tokens.mask, "advantages": tokens.advantages})
    if array.ndim != 2 or not tokens.packed:
        return array, tokens, False
    return array[None], tokens.in_a_row(array.shape[0]), True


class _Packing(NamedTuple):
    """The packing of sequences into a row, as far as it is known while tracing."""

    #: Whether segment ids give the packing; else cumulative lengths do.
    by_ids: bool
    #: The most sequences that there may be.
    most: int
    #: The number of sequences; None: the highest segment id.
    sequence_count: int | None

    @classmethod
    def of(cls, tokens: _Tokens, mask: Array, axes: _Axes) -> _Packing:
        cu_seqlens, ids = tokens.cu_seqlens, tokens.segment_ids
        if cu_seqlens is not None and ids is not None:
            raise ProblemError(f"`segment_ids`: got shape {list(ids.shape)}, expected none beside `cu_seqlens`, which says the same")
        name = "segment_ids" if cu_seqlens is None else "cu_seqlens"
        given: Any = ids if cu_seqlens is None else cu_seqlens
        _dtype(name, given, (jnp.integer,), "integers")
        batch, length = mask.shape
        if batch != 1:
            raise ProblemError(
                f"`{name}`: got it for {batch} rows of logits, expected one, [1,N,V] or [N,V], into which all sequences are packed"
            )
        known, counts = _known(given), _known(mask)
        hidden = [False] * length * _size(axes.tokens) if counts is None else counts[0].tolist()
        if cu_seqlens is not None:
            if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
                expected = "[S+1] with S ≥ 1: 0, and where each sequence ends"
                raise ProblemError(f"`cu_seqlens`: got shape {list(cu_seqlens.shape)}, expected {expected}")
            if known is not None:
                _native.op_sequences(hidden, cu_seqlens=known.tolist())
            return cls(False, cu_seqlens.shape[0] - 1, cu_seqlens.shape[0] - 1)
        if given.shape not in ((length,), (1, length)):
            raise ProblemError(f"`segment_ids`: got shape {list(given.shape)}, expected {[1, length]} or {[length]} (of the logits)")
        sequence_count = tokens.advantages.shape[0] if tokens.advantages.ndim == 1 else None
        most = length * _size(axes.tokens) if sequence_count is None else sequence_count
        # A device's part of the tokens says nothing of the others'.
        if known is not None and not axes.tokens:
            highest = len(_native.op_sequences(hidden, segment_ids=known.reshape(-1).tolist())) - 1
            if highest > most:
                raise ProblemError(f"`segment_ids`: got {highest} sequences, expected at most {most}, as many as `advantages`")
        return cls(True, most, sequence_count)

    def sequences(self, given: Array, length: int, axes: _Axes) -> tuple[rows.Sequences, float | Array]:
        """Returns the sequences of a device's `length` tokens, from segment ids or cumulative lengths, and their number on all devices."""
        if self.by_ids:
            ids = jnp.where((given >= 1) & (given <= self.most), given, 0).reshape(1, length)
        else:
            first = lax.axis_index(axes.tokens) * length if axes.tokens else 0
            place = first + jnp.arange(length, dtype=jnp.int32)
            fits = (given[0] == 0) & (given[1:] >= given[:-1]).all() & (given[-1] <= length * _size(axes.tokens))
            number = 1 + jnp.searchsorted(given[1:], place, side="right").astype(jnp.int32)
            ids = jnp.where(fits & (place < given[-1]), number, 0)[None]
        sequences = rows.Sequences(ids, self.most)
        if self.sequence_count is not None:
            return sequences, self.sequence_count * _size(axes.batch)
        highest = ids.max().astype(jnp.float32)
        highest = lax.pmax(highest, axes.tokens) if axes.tokens else highest
        return sequences, lax.psum(highest, axes.batch) if axes.batch else highest


class _Batch(NamedTuple):
    """A batch without its logits."""

    plan: Plan
    axes: _Axes
    #: ids, mask, advantages, weights, segment ids of what is packed, and what else the spec reads, a bias last.
    arrays: tuple[Array, ...]

    @classmethod
    def of(
        cls,
        tokens: _Tokens,
        axes: _Axes,
        spec: Any,
        implementation: str | None,
        target: str | None,
        bias: Array | None,
        columns: int,
    ) -> _Batch:
        _expect_arrays({"mask": tokens.mask, "advantages": tokens.advantages, **tokens.given})
        shape = tokens.ids.shape
        mask = _mask(tokens.mask, shape)
        packing = _Packing.of(tokens, mask, axes) if tokens.packed else None
        most = None if packing is None else packing.most
        plan = Plan(
            _spec(spec, tokens.temperature, tokens.kept_ids), shape[1] * _size(axes.tokens), most, *_implementation(implementation, target))
        inputs = [_per_token(name, tokens.given.get(name), shape) for name in plan.inputs if name != "rate"]
        given = (_advantages(tokens.advantages, shape, most), *_temperature(plan, tokens.temperature, mask, most))

        def by_sequence(mask: Array, given: tuple[Array, ...], *packed: Array) -> tuple[Array, ...]:
            if packing is None:
                sequences, count = rows.Sequences(None, None), shape[0] * _size(axes.batch)
            else:
                sequences, count = packing.sequences(packed[0], shape[1], axes)
            advantages, *temperatures = (_of_tokens(array, shape, sequences) for array in given)
            weights = _weights(plan, mask, sequences, count, axes)
            of_packing = [] if sequences.segment_ids is None else [sequences.segment_ids]
            return advantages, weights, *(_rate(plan, array, mask) for array in temperatures), *of_packing

        packed = [] if packing is None else [jnp.asarray(tokens.segment_ids if packing.by_ids else tokens.cu_seqlens, jnp.int32)]
        settle = rows.automatic(by_sequence, mask, (2, 3, *[2] * (len(given) - 1 + len(packed))))
        advantages, weights, *settled = settle(mask, given, *packed)
        rates, segment_ids = settled[: len(given) - 1], settled[len(given) - 1 :]
        # The rate is the last of the inputs.
        of_tokens = (advantages, weights, *segment_ids, *inputs, *rates)
        kept_ids = _kept_ids(plan, tokens.kept_ids, shape)
        arrays = (tokens.ids.astype(jnp.int32), mask, *of_tokens, *kept_ids, *_bias(plan, bias, columns))
        return cls(plan, axes, tuple(lax.stop_gradient(array) for array in arrays))

    def logged(self, loss: Array, results: Array, flat: bool) -> GrpoLoss:
        results = lax.stop_gradient(results)
        of = {name: results[..., i] for i, name in enumerate(rows.RESULTS)}
        metrics = _metrics(self.plan, of, self.arrays[1], self.axes)
        of_tokens = (of[name][0] if flat else of[name] for name in ("logp", "entropy", "token_loss"))
        return GrpoLoss(loss, metrics, *of_tokens)


_INPUTS = (
    "old_logp",
    "ref_logp",
    "policy_weight",
    "kl_weight",
    "selected",
    "rollout_logp",
    "log_weight",
    "behaviour_logp",
    "dentropy",
)


# Arguments of `assay.torch.grpo_loss` that have no meaning here.
_OF_TORCH = {
    "normalizer": "a mean is over the tokens of all devices here, in jit or with batch_axis= in a shard_map; over accumulated steps multiply "
    'the loss and say so by loss_scale=; a count that is known is the spec\'s, assay.spec("trl", batch={"num_items_in_batch": 4096.0})',
    "inplace": "donate the logits: XLA puts dlogits in their memory where nothing else needs them",
    "hidden": "call grpo_loss_of_hidden(hidden, lm_head, ids, ...)",
    "lm_head": "call grpo_loss_of_hidden(hidden, lm_head, ids, ...)",
    "chunk": "call grpo_loss_of_hidden(hidden, lm_head, ids, ...), which has it",
    "rounds_logits": "call grpo_loss_of_hidden(..., logits_dtype=...), which rounds logits to that dtype",
    "rollout_weights": "give policy_weight= and kl_weight=, their products with token_weights, as docs/jax.md has them",
    "token_weights": "give policy_weight= and kl_weight=, and mask out tokens of weight 0, as docs/jax.md has them",
}


def _asked(spec: Any, given: dict[str, Array]) -> Any:
    """Returns the loss that is asked for, once all other arguments have names that are known here."""
    _specs.refuse_foreign(given, "assay.torch", _OF_TORCH)
    for name, value in given.items():
        if name not in _INPUTS:
            if isinstance(value, (bool, int, float, str)) or value is None:
                raise ProblemError(f'`{name}`: got {value!r}, expected options in the spec, as spec=assay.spec("trl", {name}={value!r})')
            raise ProblemError(f"`{name}`: got an array of no such name, expected one of {', '.join(_INPUTS)}")
    return _specs.required(spec)


def _scale(given: float | Array) -> Array:
    scale = jnp.asarray(given, jnp.float32)
    if scale.shape:
        raise ProblemError(f"`loss_scale`: got shape {list(scale.shape)}, expected one number")
    return lax.stop_gradient(scale)


def _spec(given: Any, temperature: Array | None, kept_ids: Array | None = None) -> Spec:
    """The loss, at the temperatures of the batch and over its kept sets where there are such; unless it is a project's it must have
    them so."""
    if isinstance(given, (jax.Array, jax.core.Tracer)):
        raise SpecError(
            f"`spec`: got {type(given).__name__}, expected a spec that is known while tracing: close over it, or have it among "
            "`static_argnums`"
        )
    is_project = isinstance(given, str) and not given.endswith((".yaml", ".yml", ".toml", ".json"))
    # A project's name says which loss, the sets which form of it.
    batch = {"kept_ids": True} if is_project and kept_ids is not None else None
    spec = spec_of(given, batch=batch) if given is not None else spec_of()
    fields = spec.to_dict()
    if kept_ids is not None and "kept" not in fields["support"]:
        if isinstance(given, Spec):
            raise ProblemError("`kept_ids`: got an array beside a Spec without kept sets, expected a Spec with `support: {kept: {}}`")
        fields["support"] = {**fields["support"], "kept": {}}
        spec = spec_of(**fields)
    if temperature is None:
        return spec
    if isinstance(given, Spec) and fields["temperature"] != "given":
        raise ProblemError("`temperature`: got an array beside a Spec with a number, expected a Spec with `temperature: given`")
    return spec_of(**{**fields, "temperature": "given"})


def _implementation(given: str | None, target: str | None) -> tuple[str, str | None]:
    platform = jax.default_backend()
    chosen = given or _OF_PLATFORM.get(platform)
    if chosen is None:
        raise AssayError(f"`implementation`: got none on platform {platform}, which has no kernels here, expected `xla`")
    if chosen not in rows.KERNELS:
        raise AssayError(f"`implementation`: got {chosen!r}, expected one of {', '.join(rows.KERNELS)}")
    if chosen in ("native", "xla"):
        if target is not None:
            raise AssayError(f"`target`: got {target!r}, expected none with `{chosen}`")
    elif target is None:
        if _OF_PLATFORM.get(platform) != chosen:
            there = {"mosaic": "a TPU, or `target=\"v6e\"` to compile ahead of time", "ptx": "an NVIDIA GPU, or `target=\"h100\"`"}
            raise AssayError(f"`implementation`: got `{chosen}` on platform {platform}, expected {there[chosen]}")
        target = jax.devices()[0].device_kind
    return chosen, target


def _known(array: Array) -> Any:
    """Returns the values of an array in NumPy; None if they are traced, or on devices of other processes."""
    if isinstance(array, jax.core.Tracer) or (isinstance(array, jax.Array) and not array.is_fully_addressable):
        return None
    return np.asarray(array)


def _dtype(name: str, array: Array, kinds: tuple[Any, ...], expected: str) -> None:
    if not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
        raise ProblemError(f"`{name}`: got dtype {array.dtype}, expected {expected}")


def _shape(name: str, array: Array, shape: tuple[int, ...], meaning: str) -> None:
    if array.shape != shape:
        raise ProblemError(f"`{name}`: got shape {list(array.shape)}, expected {list(shape)} ({meaning})")


def _expect_arrays(given: Mapping[str, Any]) -> None:
    """Checks that what is no array is not given for one."""
    for name, array in given.items():
        if array is not None and not (hasattr(array, "shape") and hasattr(array, "dtype")):
            raise ProblemError(f"`{name}`: got {type(array).__name__}, expected an array")


def _expect_logits(logits: Array, ids: Array) -> None:
    _expect_arrays({"logits": logits, "ids": ids})
    if logits.ndim != 3 or 0 in logits.shape:
        raise ProblemError(f"`logits`: got shape {list(logits.shape)}, expected [B,T,V] with B, T, V ≥ 1")
    if logits.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ProblemError(f"`logits`: got dtype {logits.dtype}, expected float32, bfloat16 or float16")
    _dtype("ids", ids, (jnp.integer,), "integers")
    _shape("ids", ids, logits.shape[:2], "[B,T] of the logits")


def _mask(mask: Array, shape: tuple[int, ...]) -> Array:
    mask = jnp.asarray(mask)
    _dtype("mask", mask, (jnp.bool_, jnp.integer, jnp.floating), "truth values, or numbers that are 0 or 1")
    _shape("mask", mask, shape, "[B,T] of the logits")
    known = _known(mask)
    if known is not None and (strangers := known[(known != 0) & (known != 1)]).size:
        raise ProblemError(f"`mask`: got {strangers[0]}, expected truth values, or numbers that are 0 or 1")
    return mask != 0


def _advantages(advantages: Array, shape: tuple[int, ...], most: int | None) -> Array:
    advantages = jnp.asarray(advantages)
    _dtype("advantages", advantages, (jnp.floating,), "floats")
    of_sequences, meaning = (shape[:1], "[B] or [B,T] of the logits") if most is None else ((most,), "[S] or [1,N], packed")
    if advantages.shape not in (of_sequences, shape):
        expected = f"{list(of_sequences)} or {list(shape)} ({meaning})"
        raise ProblemError(f"`advantages`: got shape {list(advantages.shape)}, expected {expected}")
    return advantages.astype(jnp.float32)


def _temperature(plan: Plan, temperature: Array | None, mask: Array, most: int | None) -> tuple[Array, ...]:
    """Checks the temperatures, if the spec has them given: `[B,T]`, or by sequence, `[B]`, or `[S]` if packed."""
    if "rate" not in plan.inputs:
        return ()
    sequences = mask.shape[0] if most is None else most
    if temperature is None:
        raise ProblemError(f"`temperature`: not given, expected shape {list(mask.shape)} because the spec has `temperature: given`")
    temperature = jnp.asarray(temperature)
    _dtype("temperature", temperature, (jnp.floating,), "floats")
    of_tokens = temperature.shape == mask.shape
    if not of_tokens and temperature.shape not in ((sequences,), (sequences, 1)):
        expected = f"{list(mask.shape)} or {[sequences, 1]}"
        raise ProblemError(f"`temperature`: got shape {list(temperature.shape)}, expected {expected}")
    known, counts = _known(temperature), _known(mask)
    if known is not None and counts is not None:
        # Which sequences of a packed row have no token is not known here.
        counts = counts if of_tokens else counts.any(1) if most is None else np.ones(sequences, bool)
        wrong = counts & ~((known > 0) & np.isfinite(known)).reshape(counts.shape)
        if wrong.any():
            at = tuple(int(place) for place in np.argwhere(wrong)[0])
            place = ",".join(map(str, at if of_tokens else (*at, 0)))
            got = float(known.reshape(counts.shape)[at])
            raise ProblemError(f"`temperature[{place}]`: got {got}, expected a finite number > 0")
    return (temperature.astype(jnp.float32) if of_tokens else temperature.astype(jnp.float32).reshape(-1),)


def _kept_ids(plan: Plan, kept_ids: Array | None, shape: tuple[int, ...]) -> tuple[Array, ...]:
    """Checks the kept sets, `[B,T,K]`, if the spec has them; their ids are checked by the kernel."""
    if not plan.kept:
        return ()
    expected = f"[{', '.join(map(str, shape))}, K] with K ≥ 1"
    if kept_ids is None:
        raise ProblemError(f"`kept_ids`: not given, expected {expected} because the spec has `support.kept`")
    kept_ids = jnp.asarray(kept_ids)
    _dtype("kept_ids", kept_ids, (jnp.integer,), "integers")
    if kept_ids.ndim != 3 or kept_ids.shape[:2] != shape or kept_ids.shape[2] == 0:
        raise ProblemError(f"`kept_ids`: got shape {list(kept_ids.shape)}, expected {expected}")
    return (kept_ids.astype(jnp.int32),)


def _of_tokens(array: Array, shape: tuple[int, ...], sequences: rows.Sequences = rows.Sequences(None, None)) -> Array:
    """Broadcasts an array of tokens, or of sequences, `[B]` or `[S]`, to `[B,T]`."""
    if array.ndim == 2:
        return array
    by_number = array[:, None] if sequences.segment_ids is None else jnp.pad(array, (1, 0))[None]
    return jnp.broadcast_to(sequences.spread(by_number), shape)


def _rate(plan: Plan, temperatures: Array, mask: Array) -> Array:
    """The input of that name; NaN of what is no temperature, but for `native`, which says which it is."""
    if plan.implementation != "native":
        fits = (temperatures > 0.0) & (temperatures < jnp.inf)
        temperatures = jnp.where(fits, temperatures, jnp.nan)
    return jnp.where(mask, plan.of["rate"] / temperatures, 1.0)


def _per_token(name: str, array: Array | None, shape: tuple[int, ...]) -> Array:
    if array is None:
        raise ProblemError(f"`{name}`: not given, expected shape {list(shape)}: the spec reads it")
    array = jnp.asarray(array)
    kinds = (jnp.floating, jnp.bool_, jnp.integer) if name == "selected" else (jnp.floating,)
    _dtype(name, array, kinds, "truth values" if name == "selected" else "floats")
    _shape(name, array, shape, "[B,T] of the logits")
    return array.astype(jnp.float32)


def _bias(plan: Plan, bias: Array | None, columns: int) -> tuple[Array, ...]:
    """The bias that the spec reads, if it does."""
    if not plan.biased:
        if bias is not None:
            raise ProblemError("`bias`: got an array, expected none: the spec has no `logits.bias`")
        return ()
    if bias is None:
        raise ProblemError(f"`bias`: not given, expected shape [{columns}]: the spec has `logits.bias`")
    bias = jnp.asarray(bias)
    _dtype("bias", bias, (jnp.floating,), "floats")
    _shape("bias", bias, (columns,), "[V] of the logits")
    return (bias.astype(jnp.float32),)
