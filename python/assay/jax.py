"""The GRPO loss as one operation of JAX's, whose gradient is made where the loss is.

`grpo_loss` takes logits; its kernels are those of this project: native on a CPU, Mosaic on a TPU, PTX on an NVIDIA GPU, or
plain XLA where that is asked for. docs/python.md says more.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from . import _jax_rows as rows
from ._errors import AssayError, ProblemError, SpecError
from ._jax_rows import Array, Axes, Plan
from ._native import Spec
from . import spec as spec_of

__all__ = ["GrpoLoss", "grpo_loss", "grpo_loss_of_hidden", "logp_and_entropy", "logp_and_entropy_of_hidden"]

#: What computes on a platform where nothing else is asked for.
_OF_PLATFORM = {"cpu": "native", "tpu": "mosaic", "gpu": "ptx"}


class GrpoLoss(NamedTuple):
    """A loss and what is logged of it. The loss alone is differentiable: the rest is `stop_gradient`.

    Attributes:
        loss: f32.
        metrics: f32 each, means over the unmasked tokens: `entropy_mean`, `ratio_mean`, `clip_low`, `clip_high`,
            `clip_region`, and with a KL penalty `kl_mean`.
        logp: `[B,T]` f32, nats; 0 where masked, as are the two that follow.
        entropy: `[B,T]` f32, nats.
        token_loss: `[B,T]` f32, before the reduction.
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
    spec: Spec | str | None = None,
    loss_scale: float | Array = 1.0,
    implementation: str | None = None,
    target: str | None = None,
    batch_axis: str | tuple[str, ...] | None = None,
    token_axis: str | tuple[str, ...] | None = None,
    vocab_axis: str | tuple[str, ...] | None = None,
    **given: Array,
) -> GrpoLoss:
    """The GRPO loss of `logits`, differentiable by them.

    Where it is differentiated the forward pass computes dlogits, which XLA lays over the logits where nothing else needs
    them; else it computes none. The backward pass multiplies them by the loss's cotangent over `loss_scale`, in f32, rounded to
    their dtype once more; XLA leaves that out where the quotient is a 1 that it knows.

    Args:
        logits: `[B,T,V]`, f32, bf16 or f16; `[b,t]` scores `ids[b,t]`.
        ids: `[B,T]`, integers.
        mask: `[B,T]`, truth values or integers: the tokens that count.
        advantages: `[B]` or `[B,T]`.
        old_logp: `[B,T]`, nats. What the spec does not read may be there all the same.
        ref_logp: `[B,T]`, nats.
        bias: `[V]`, what the spec's `logits.bias` adds to logits; of a cut vocabulary a device's columns. It has no gradient: one
            that is trained belongs into the logits.
        spec: of `assay.spec`, or a project's name; plain PPO-clip if none is given.
        loss_scale: what the loss will be multiplied by before it is differentiated (loss scaling, accumulation): it goes
            into the tokens' weights before dlogits are rounded. The loss itself is returned without it.
        implementation: `native`, `mosaic`, `ptx` or `xla`; that of the platform if none is given.
        target: the chip that `mosaic` and `ptx` are for, as `v6e` or `h100`; that of the first device if none is given.
        batch_axis: in a `shard_map`, the axes of its mesh over which sequences are cut. The loss and the metrics are then
            those of all, the same on every device.
        token_axis: likewise the tokens of a sequence.
        vocab_axis: likewise the columns, in order and as many on each device.
        given: `[B,T]` each, what else the spec reads: `policy_weight`, `kl_weight`, `selected`, `rollout_logp`,
            `log_weight`, `behaviour_logp`, as docs/jax.md has them; `dentropy`, the cotangent of each token's entropy.

    Raises:
        SpecError: the spec is none, or has what no kernel of these computes.
        ProblemError: an array does not fit.
        AssayError: the implementation is not there, or another argument is none.
    """
    _expect_logits(logits, ids)
    axes = _Axes.of(batch_axis, token_axis, vocab_axis)
    given = dict(given, old_logp=old_logp, ref_logp=ref_logp)
    plan = _plan(spec, ids, axes, implementation, target)
    batch = _Batch.of(plan, axes, ids, mask, advantages, given, bias, logits.shape[2])
    return batch.logged(*_loss(batch.plan, axes, logits, _scale(loss_scale), *batch.arrays))


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
    """The same of `hidden @ lm_head`, differentiable by both: logits are there a chunk at a time, and with them their dlogits.

    Products are summed in f32. A chunk's logits are rounded to `logits_dtype`, and so are their dlogits; both gradients once, to
    their own dtype.

    Args:
        hidden: `[B,T,H]`, f32, bf16 or f16.
        lm_head: `[H,V]`, of the same dtype.
        ids: as are the others, of `grpo_loss`.
        chunk: tokens of each sequence that have logits at a time; of a loss whose tokens share a ratio, whole sequences of as many
            tokens in all, one at least.
        logits_dtype: of the logits and their dlogits; that of `hidden` if none is given.

    Raises:
        SpecError, ProblemError, AssayError: as of `grpo_loss`.
    """
    part = _chunk(hidden, lm_head, ids, chunk, logits_dtype)
    axes = _Axes.of(batch_axis, token_axis, vocab_axis)
    given = dict(given, old_logp=old_logp, ref_logp=ref_logp)
    plan = _plan(spec, ids, axes, implementation, target)
    batch = _Batch.of(plan, axes, ids, mask, advantages, given, bias, lm_head.shape[1])
    return batch.logged(*_head_loss(batch.plan, axes, part, hidden, lm_head, _scale(loss_scale), *batch.arrays))


def logp_and_entropy(
    logits: Array,
    ids: Array,
    *,
    mask: Array | None = None,
    bias: Array | None = None,
    spec: Spec | str | None = None,
    implementation: str | None = None,
    target: str | None = None,
    vocab_axis: str | tuple[str, ...] | None = None,
) -> tuple[Array, Array]:
    """Logp of the ids and entropy, `[B,T]` f32 each, 0 where masked: `selective_log_softmax` and the entropy in one.

    Both are differentiable by the logits, with any cotangents: the forward pass keeps the logits, the backward pass reads them
    once more and writes dlogits, rounded once. Under `stop_gradient` nothing is kept.

    Arguments and errors are those of `grpo_loss`; of the spec only what becomes of logits is read.
    """
    axes = _Axes.of(None, None, vocab_axis)
    _expect_logits(logits, ids)
    plan, tokens = _scoring(axes, ids, mask, bias, logits.shape[2], spec, implementation, target)
    return _scores(plan, axes, logits, *tokens)  # type: ignore[no-any-return]


def logp_and_entropy_of_hidden(
    hidden: Array,
    lm_head: Array,
    ids: Array,
    *,
    mask: Array | None = None,
    bias: Array | None = None,
    spec: Spec | str | None = None,
    chunk: int = 256,
    logits_dtype: Any = None,
    implementation: str | None = None,
    target: str | None = None,
    vocab_axis: str | tuple[str, ...] | None = None,
) -> tuple[Array, Array]:
    """The same of `hidden @ lm_head`, differentiable by both: logits are there a chunk at a time, and so are their dlogits.

    Arguments and errors are those of `grpo_loss_of_hidden`; of the spec only what becomes of logits is read.
    """
    part = _chunk(hidden, lm_head, ids, chunk, logits_dtype)
    axes = _Axes.of(None, None, vocab_axis)
    plan, tokens = _scoring(axes, ids, mask, bias, lm_head.shape[1], spec, implementation, target)
    return _head_scores(plan, axes, part, hidden, lm_head, *tokens)  # type: ignore[no-any-return]


def _scoring(
    axes: _Axes,
    ids: Array,
    mask: Array | None,
    bias: Array | None,
    columns: int,
    spec: Spec | str | None,
    implementation: str | None,
    target: str | None,
) -> tuple[Plan, tuple[Array, ...]]:
    """What scores tokens, and ids, mask and where there is one the bias as it takes them."""
    read = _spec(spec).to_dict()
    asked = {name: read[name] for name in ("temperature", "temperature_divides", "logits", "support")}
    plan = _plan(spec_of("logp", **asked), ids, axes, implementation, target)
    counts = jnp.ones(ids.shape, bool) if mask is None else _mask(mask, ids.shape)
    return plan, (ids.astype(jnp.int32), counts, *(lax.stop_gradient(array) for array in _bias(plan, bias, columns)))


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
    """The logits that are there at a time."""

    tokens: int
    dtype: Any


def _chunk(hidden: Array, lm_head: Array, ids: Array, chunk: int, logits_dtype: Any) -> _Chunk:
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
    ids, mask, *bias = of_tokens
    return ids, mask, -dlogp, jnp.ones((ids.shape[0], 3), jnp.float32), dentropy, *bias


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
    """With the loss's weights times `scale`; the KL penalty's share is a quotient of weights."""
    ids, mask, advantages, weights, *inputs = arrays
    return ids, mask, advantages, weights * jnp.stack([scale, jnp.ones_like(scale), scale]), *inputs


def _times(gradient: Array, factor: Array) -> Array:
    return (gradient.astype(jnp.float32) * factor).astype(gradient.dtype)


def _sweep(
    plan: Plan, axes: _Axes, chunk: _Chunk, backward: bool, hidden: Array, lm_head: Array, arrays: tuple[Array, ...]
) -> tuple[Array, Array, Array]:
    """Results of all tokens, and `backward` the gradients of `hidden` and `lm_head`, else nothing in their place."""
    batch, tokens, _ = hidden.shape
    axis, extent = (0, batch) if plan.of["couples_rows"] else (1, tokens)
    size = min(extent, max(1, chunk.tokens // tokens) if axis == 0 else chunk.tokens)
    pieces = -(-extent // size)

    def cut(array: Array) -> Array:
        """With its pieces in front."""
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
        part, of_rows, ids, mask, advantages, *inputs = piece
        logits = product("bth,hv->btv", part, lm_head).astype(chunk.dtype)
        given = (ids, mask, advantages, of_rows, *inputs, *bias)
        results, *dlogits = rows.evaluate(plan, backward, axes.manual, logits, *given)
        if not backward:
            return dhead, (results,)
        dhidden = product("btv,hv->bth", dlogits[0], lm_head)
        return dhead + product("bth,btv->hv", part, dlogits[0]), (results, dhidden)

    nothing = jnp.zeros(lm_head.shape if backward else (), jnp.float32)
    if axes.inside:
        nothing = lax.pcast(nothing, _varying(hidden, lm_head, *arrays), to="varying")
    ids, mask, advantages, weights, *inputs = arrays
    inputs, bias = inputs[: len(plan.inputs)], inputs[len(plan.inputs) :]
    # All tokens of a sequence have its weights.
    of_rows = cut(weights) if axis == 0 else jnp.broadcast_to(weights, (pieces, *weights.shape))
    cut_up = (cut(hidden), of_rows, *(cut(array) for array in (ids, mask, advantages, *inputs)))
    dhead, (results, *dhidden) = lax.scan(step, nothing, cut_up)
    if not backward:
        return joined(results), dhead, dhead
    return joined(results), _of_all(joined(dhidden[0]), hidden), _of_all(dhead, lm_head)


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
        """The sum over all tokens."""
        over = self.batch + self.tokens
        return lax.psum(values.sum(), over) if over else values.sum()


def _size(axes: Axes) -> int:
    size: int = lax.axis_size(axes) if axes else 1
    return size


class _Weights(NamedTuple):
    """What each row's terms are multiplied by, `[B,1]`, 0 where it has no token."""

    policy: Array
    kl_share: Array
    entropy: Array

    @classmethod
    def of(cls, plan: Plan, mask: Array, axes: _Axes) -> _Weights:
        of_rows = mask.sum(1, keepdims=True, dtype=jnp.float32)
        if axes.tokens:
            of_rows = lax.psum(of_rows, axes.tokens)
        batch_alone = axes._replace(tokens=())
        filled = of_rows > 0.0

        def weight(divisor: dict[str, Any]) -> Array:
            total: Array = jnp.ones_like(of_rows)
            if divisor["tokens"] == "row":
                total = of_rows + divisor["epsilon"]
            elif divisor["tokens"] == "batch":
                total = jnp.maximum(batch_alone.total(of_rows), 1.0) + divisor["epsilon"]
            if divisor["filled_rows"]:
                total = total * jnp.maximum(batch_alone.total(filled.astype(jnp.float32)), 1.0)
            return jnp.where(filled, 1.0 / (total * divisor["number"]), 0.0)

        of = plan.of
        policy = weight(of["policy"])
        kl_share = jnp.ones_like(policy) if of["kl"] is None else jnp.where(filled, weight(of["kl"]) / policy, 0.0)
        entropy = jnp.zeros_like(policy) if of["entropy"] is None else -of["entropy_coef"] * weight(of["entropy"])
        return cls(policy, kl_share, entropy)

    def stacked(self) -> Array:
        return jnp.concatenate(self, 1)


def _reduced(plan: Plan, results: Array, arrays: tuple[Array, ...], axes: _Axes) -> Array:
    """The loss. Beside a weight of 0 stands anything, infinities too."""
    _, mask, _, weights, *inputs = arrays
    terms = [results[..., rows.RESULTS.index(name)] for name in ("reduced", "entropy")]
    factors = [weights[:, :1], rows.of_entropy(plan, weights, inputs)]
    weighed = [
        jnp.where(mask & (factor != 0.0), factor * term, 0.0) for factor, term in zip(factors, terms, strict=True)
    ]
    return axes.total(sum(weighed[1:], weighed[0]))


def _metrics(plan: Plan, of: dict[str, Array], mask: Array, axes: _Axes) -> dict[str, Array]:
    count = jnp.maximum(axes.total(mask.astype(jnp.float32)), 1.0)
    logged = {"entropy_mean": of["entropy"], "ratio_mean": of["ratio"]}
    if plan.of["has_kl"]:
        logged["kl_mean"] = of["kl"]
    low, high = of["clipped_low"], of["clipped_high"]
    logged.update(clip_low=low, clip_high=high, clip_region=jnp.maximum(low, high))
    return {name: axes.total(values) / count for name, values in logged.items()}


# ---- arguments


class _Batch(NamedTuple):
    """What is known of a batch but for its logits."""

    plan: Plan
    axes: _Axes
    #: ids, mask, advantages, weights and what else the spec reads, a bias last.
    arrays: tuple[Array, ...]

    @classmethod
    def of(
        cls,
        plan: Plan,
        axes: _Axes,
        ids: Array,
        mask: Array,
        advantages: Array,
        given: dict[str, Array | None],
        bias: Array | None,
        columns: int,
    ) -> _Batch:
        if strangers := [name for name in given if name not in _INPUTS]:
            raise ProblemError(f"`{strangers[0]}`: got an array of no such name, expected one of {', '.join(_INPUTS)}")
        counts = _mask(mask, ids.shape)
        inputs = (_per_token(name, given.get(name), ids.shape) for name in plan.inputs)
        weights = _Weights.of(plan, counts, axes).stacked()
        arrays = (ids.astype(jnp.int32), counts, _advantages(advantages, ids.shape), weights, *inputs)
        arrays += _bias(plan, bias, columns)
        return cls(plan, axes, tuple(lax.stop_gradient(array) for array in arrays))

    def logged(self, loss: Array, results: Array) -> GrpoLoss:
        results = lax.stop_gradient(results)
        of = {name: results[..., i] for i, name in enumerate(rows.RESULTS)}
        metrics = _metrics(self.plan, of, self.arrays[1], self.axes)
        return GrpoLoss(loss, metrics, of["logp"], of["entropy"], of["token_loss"])


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


def _scale(given: float | Array) -> Array:
    scale = jnp.asarray(given, jnp.float32)
    if scale.shape:
        raise ProblemError(f"`loss_scale`: got shape {list(scale.shape)}, expected one number")
    return lax.stop_gradient(scale)


def _spec(given: Any) -> Spec:
    if isinstance(given, (jax.Array, jax.core.Tracer)):
        raise SpecError(
            f"`spec`: got {type(given).__name__}, expected a spec that is known while tracing: close over it, or have it among "
            "`static_argnums`"
        )
    return spec_of(given) if given is not None else spec_of()


def _plan(given: Any, ids: Array, axes: _Axes, implementation: str | None, target: str | None) -> Plan:
    batch, tokens = ids.shape
    extents = (batch * _size(axes.batch), tokens * _size(axes.tokens))
    return Plan(_spec(given), *extents, *_implementation(implementation, target))


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


def _dtype(name: str, array: Array, kinds: tuple[Any, ...], expected: str) -> None:
    if not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
        raise ProblemError(f"`{name}`: got dtype {array.dtype}, expected {expected}")


def _shape(name: str, array: Array, shape: tuple[int, ...], meaning: str) -> None:
    if array.shape != shape:
        raise ProblemError(f"`{name}`: got shape {list(array.shape)}, expected {list(shape)} ({meaning})")


def _expect_logits(logits: Array, ids: Array) -> None:
    if logits.ndim != 3 or 0 in logits.shape:
        raise ProblemError(f"`logits`: got shape {list(logits.shape)}, expected [B,T,V] with B, T, V ≥ 1")
    if logits.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ProblemError(f"`logits`: got dtype {logits.dtype}, expected float32, bfloat16 or float16")
    _dtype("ids", ids, (jnp.integer,), "integers")
    _shape("ids", ids, logits.shape[:2], "[B,T] of the logits")


def _mask(mask: Array, shape: tuple[int, ...]) -> Array:
    mask = jnp.asarray(mask)
    _dtype("mask", mask, (jnp.bool_, jnp.integer), "truth values or integers")
    _shape("mask", mask, shape, "[B,T] of the logits")
    return mask != 0


def _advantages(advantages: Array, shape: tuple[int, ...]) -> Array:
    advantages = jnp.asarray(advantages)
    _dtype("advantages", advantages, (jnp.floating,), "floats")
    if advantages.shape == shape[:1]:
        advantages = advantages[:, None]
    elif advantages.shape != shape:
        raise ProblemError(
            f"`advantages`: got shape {list(advantages.shape)}, expected {list(shape[:1])} or {list(shape)} ([B] or [B,T] of "
            "the logits)"
        )
    return jnp.broadcast_to(advantages.astype(jnp.float32), shape)


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
