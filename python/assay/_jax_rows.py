"""Rows of logits in JAX: what is read of them and written over them, by each implementation, whole or cut over devices.

A kernel knows nothing of other devices: it is called with what one device holds. Here that device is found, under `jit` by
`custom_partitioning` and in `shard_map` by the axes that the caller names, and partial results of several devices are joined.
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from . import _native
from ._errors import AssayError, ProblemError
from ._tape import compute

#: Columns of what is handed over a token.
COLUMNS = 8
#: A kernel's statistics of a part of a row, in order; sums are of the columns other than the target.
STATISTICS = ("max", "target_logit", "others", "weighted", "logp_others", "logp_weighted")
#: The results of a token, in the order of their columns.
RESULTS = ("logp", "entropy", "token_loss", "reduced", "ratio", "kl", "clipped_low", "clipped_high")
#: Beyond which a gap counts as this far: finite, so that 0 times it is 0.
FARTHEST = 2.0**100

Array = Any
Axes = tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """One loss for batches of one width, and what computes it. Hashable: what is traced once for each."""

    spec: _native.Spec
    #: Tokens that rows are padded to.
    width: int
    #: The most sequences of a packed row, which has no padded width; None: each row is one sequence.
    packed: int | None
    implementation: str
    target: str | None

    def __hash__(self) -> int:
        return hash((self.spec.to_json(), self.width, self.packed, self.implementation, self.target))

    @functools.cached_property
    def of(self) -> dict[str, Any]:
        """The plan of the extension, `_native.plan`, as plain data."""
        width = self.width if self.packed is None else None
        plan: dict[str, Any] = json.loads(_native.plan(self.spec, width, self.implementation == "native"))
        return plan

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the per-token arrays in addition to ids, mask and advantages."""
        return tuple(self.of["inputs"])

    def rate(self, inputs: Sequence[Array]) -> Array | float:
        """Returns the factor of logits in the softmax of the entropy: a number, or one of each token, `[B,T]`."""
        of_tokens = dict(zip(self.inputs, inputs)).get("rate")
        return self.of["inverse_temperature"] if of_tokens is None else of_tokens

    @functools.cached_property
    def biased(self) -> bool:
        """Whether an array of columns comes after those: a bias."""
        return bool(self.spec.to_dict()["logits"]["bias"])

    @functools.cached_property
    def kept(self) -> bool:
        """Whether an array of kept sets, `[B,T,K]`, comes before that."""
        return "kept" in self.spec.to_dict()["support"]


class Sequences(NamedTuple):
    """The assignment of a row's tokens to sequences."""

    #: `[B,T]` i32: the sequence of each token, from 1 on; 0: none. None: each row is one sequence.
    segment_ids: Array | None
    #: The most sequences of a row, if there are segment ids.
    most: int | None

    def sum(self, values: Array, over: Axes) -> Array:
        """Sums values over the tokens of each sequence, on all devices of the axes `over`: `[B,1]`, or `[B,1+most]` by number."""
        if self.segment_ids is None or self.most is None:
            sums = values.sum(1, keepdims=True)
        else:
            row = lax.broadcasted_iota(jnp.int32, values.shape, 0)
            nothing = jnp.zeros((values.shape[0], 1 + self.most), values.dtype)
            sums = nothing.at[row, self.segment_ids].add(values)
        return lax.psum(sums, over) if over else sums

    def spread(self, of_each: Array) -> Array:
        """Spreads the values of sequences, as `sum` returns them, to their tokens; for rows that are sequences, as an array that
        broadcasts to them."""
        if self.segment_ids is None:
            return of_each
        return jnp.take_along_axis(of_each, self.segment_ids, 1, mode="promise_in_bounds")


# ---- kernels, by implementation


class Part(NamedTuple):
    """The part of the rows on one device."""

    logits: Array
    #: The number in the vocabulary of the first column on this device.
    first: Array | int
    #: The factor of logits, as `Plan.rate` returns it.
    rate: Array | float
    #: The bias of the columns on this device, if the spec has one.
    bias: Array | None
    #: The kept set of each token, `[B,T,K]`, if the spec has them.
    kept_ids: Array | None = None

    @property
    def rates(self) -> tuple[Array, ...]:
        """The rate, where tokens have their own."""
        return () if isinstance(self.rate, float) else (self.rate,)

    @property
    def rate_of_columns(self) -> Array | float:
        return self.rates[0][..., None] if self.rates else self.rate


class Xla:
    """Plain operations of XLA's."""

    @staticmethod
    def loss(*_: Any) -> None:
        return None

    @staticmethod
    def _gaps(logits: Array, max: Array) -> Array:
        return max[..., None] - logits.astype(jnp.float32)

    @staticmethod
    def _hits(logits: Array, ids: Array) -> Array:
        return lax.broadcasted_iota(jnp.int32, logits.shape, 2) == ids[..., None]

    @staticmethod
    def statistics(plan: Plan, part: Part, ids: Array, mask: Array) -> Array:
        of, logits = plan.of, part.logits
        hit = Xla._hits(logits, ids)
        x = logits.astype(jnp.float32)
        max = jnp.maximum(x.max(-1), jnp.finfo(jnp.float32).min)
        gap = Xla._gaps(logits, max)

        def sums(inverse: Array | float) -> list[Array]:
            e = jnp.where(hit, 0.0, jnp.exp(-gap * inverse))
            return [e.sum(-1), jnp.where(e == 0.0, 0.0, e * gap * inverse).sum(-1)]

        columns = [max, jnp.where(hit, x, 0.0).sum(-1), *sums(part.rate_of_columns)]
        if of["two_softmaxes"]:
            columns += sums(of["logp_inverse_temperature"])
        return _stacked(columns)

    @staticmethod
    def gradient(plan: Plan, part: Part, ids: Array, scales: Array) -> Array:
        of, logits, inverse = plan.of, part.logits, part.rate_of_columns
        max, share, others, mask, bonus, mean_gap = (scales[..., i] for i in range(6))
        hit = Xla._hits(logits, ids)
        gap = Xla._gaps(logits, max)
        policy = share[..., None] * jnp.exp(-gap * (of["logp_inverse_temperature"] if of["two_softmaxes"] else inverse))
        gradient = jnp.where(hit, (-share * others)[..., None], policy)
        if of["entropy"] is not None:
            gap = gap * inverse
            e = jnp.exp(-gap)
            # The small factor last: what is below the normal numbers on the way there would be flushed.
            gradient += jnp.where(e == 0.0, 0.0, e * (gap - mean_gap[..., None]) * bonus[..., None])
        return jnp.where(mask[..., None] > 0.0, gradient, 0.0).astype(logits.dtype)


def _like(shape: Sequence[int], dtype: Any, *operands: Array) -> jax.ShapeDtypeStruct:
    """A result of a call, which varies over the axes of a `shard_map` that an operand varies over."""
    varying = frozenset().union(*(jax.typeof(operand).manual_axis_type.varying for operand in operands))
    if not varying:
        return jax.ShapeDtypeStruct(tuple(shape), dtype)
    whole = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec(*[None] * len(shape)))
    of_axes = jax.sharding.ManualAxisType(varying=varying)
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=whole, manual_axis_type=of_axes)


@functools.cache
def _registered(name: str) -> str:
    """The name under which XLA finds a handler of the CPU kernel's."""
    target = f"grpo_assay_{name}"
    address = dict(_native.xla_handlers())[name]
    handler = jax.ffi.pycapsule(ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(address))
    jax.ffi.register_ffi_target(target, handler, platform="cpu")
    return target


class Native:
    """The CPU kernel, through XLA's foreign function interface."""

    @staticmethod
    def statistics(plan: Plan, part: Part, ids: Array, mask: Array) -> Array:
        operands = (part.logits, ids, mask, *Native._columns(part))
        result = _like((*ids.shape, COLUMNS), jnp.float32, *operands)
        return jax.ffi.ffi_call(_registered("statistics"), result)(*operands, spec=plan.spec.to_json())

    @staticmethod
    def gradient(plan: Plan, part: Part, ids: Array, scales: Array) -> Array:
        operands = (part.logits, ids, scales, *Native._columns(part))
        results = (_like(part.logits.shape, part.logits.dtype, *operands),)
        call = jax.ffi.ffi_call(_registered("gradient"), results, input_output_aliases={0: 0})
        (dlogits,) = Native._over_logits(functools.partial(call, spec=plan.spec.to_json()), results, *operands)
        return dlogits

    @staticmethod
    def _over_logits(call: Callable[..., Any], results: Sequence[Any], logits: Array, *others: Array) -> Any:
        """Makes a call whose first result is written over the logits.

        XLA copies what such a call writes over, and omits the copy later if it still stands alone. Before that it joins the copy to a
        reshape, which every product of `[B,T,H]` ends with: logits are then held twice. It joins nothing to what a branch is given. The
        other branch is never taken: no number has more than 32 bits that are set, which XLA does not know.
        """
        first = lax.bitcast_convert_type(logits[0, 0, 0], f"uint{8 * logits.dtype.itemsize}")
        skipped = lambda logits, *_: (logits, *(jnp.zeros_like(result) for result in results[1:]))  # noqa: E731
        return lax.cond(lax.population_count(first) <= 32, call, skipped, logits, *others)

    @staticmethod
    def _columns(part: Part) -> tuple[Array, ...]:
        return (jnp.int32(part.first), *part.rates, *([] if part.bias is None else [part.bias]))

    @staticmethod
    def loss(plan: Plan, part: Part, sequences: Sequences, *tokens: Array) -> tuple[Array, Array]:
        """Results and dlogits, from rows that are whole: each is read once where tokens share no ratio."""
        operands, attributes = Native._whole_rows(plan, part, sequences, *tokens)
        results = (
            _like(part.logits.shape, part.logits.dtype, *operands),
            _like((*tokens[0].shape, COLUMNS), jnp.float32, *operands),
        )
        call = jax.ffi.ffi_call(_registered("loss"), results, input_output_aliases={0: 0})
        dlogits, columns = Native._over_logits(functools.partial(call, **attributes), results, *operands)
        return columns, dlogits

    @staticmethod
    def loss_forward(plan: Plan, part: Part, sequences: Sequences, *tokens: Array) -> Array:
        """The results alone."""
        operands, attributes = Native._whole_rows(plan, part, sequences, *tokens)
        results = _like((*tokens[0].shape, COLUMNS), jnp.float32, *operands)
        return jax.ffi.ffi_call(_registered("loss_forward"), results)(*operands, **attributes)

    @staticmethod
    def _whole_rows(plan: Plan, part: Part, sequences: Sequences, *tokens: Array) -> tuple[tuple[Array, ...], dict[str, str]]:
        """The operands and attributes of a call with whole rows."""
        packed = [] if sequences.segment_ids is None else [sequences.segment_ids]
        bias = [] if part.bias is None else [part.bias]
        kept = [] if part.kept_ids is None else [part.kept_ids]
        ids, mask, advantages, weights, *inputs = tokens
        operands = (part.logits, ids, mask, advantages, weights, *packed, *inputs, *kept, *bias)
        return operands, {"spec": plan.spec.to_json(), "sequences": "packed" if packed else "rows"}


class _Emitted:
    """The kernels of a device, which take logits in rows, `[1,B·T,V]`, and the two of a part sums in base 2."""

    #: The function of `_native` that writes them.
    emitted: Callable[..., str]

    @classmethod
    def _kernels(cls, plan: Plan, logits: Array) -> dict[str, Any]:
        target = plan.target
        if target is None:
            raise AssayError(f"`target`: got none, expected the chip that {plan.implementation} kernels are for")
        return _written(cls.emitted, plan.spec.to_json(), logits.shape, _DTYPES[jnp.dtype(logits.dtype).name], target)

    @classmethod
    def _rows(cls, logits: Array) -> Array:
        return cls._stored(logits.reshape(1, -1, logits.shape[-1]))

    @classmethod
    def _operands(cls, part: Part, ids: Array) -> list[Array]:
        inverse = [] if part.rates else [jnp.full(1, part.rate, jnp.float32)]
        columns = jnp.full(1, part.logits.shape[-1], jnp.int32)
        of_tokens = (array.reshape(1, -1, 1) for array in (ids, *part.rates))
        return [*inverse, columns, cls._rows(part.logits), *of_tokens]

    @staticmethod
    def _stored(rows: Array) -> Array:
        return rows

    @staticmethod
    def _called(kernel: dict[str, Any], results: Sequence[Any], operands: Sequence[Array]) -> Sequence[Array]:
        raise NotImplementedError

    @classmethod
    def statistics(cls, plan: Plan, part: Part, ids: Array, mask: Array) -> Array:
        kernel = cls._kernels(plan, part.logits)["statistics"]
        operands = cls._operands(part, ids)
        result = _like((1, ids.size, COLUMNS), jnp.float32, *operands)
        statistics = cls._called(kernel, [result], operands)[0].reshape(*ids.shape, COLUMNS)
        in_nats = [statistics[..., i] * (-math.log(2) if "weighted" in name else 1.0) for i, name in enumerate(STATISTICS)]
        return _stacked(in_nats[: None if plan.of["two_softmaxes"] else 4])

    @classmethod
    def gradient(cls, plan: Plan, part: Part, ids: Array, scales: Array) -> Array:
        kernel = cls._kernels(plan, part.logits)["gradient"]
        rows, operands = cls._rows(part.logits), [*cls._operands(part, ids), scales.reshape(1, -1, COLUMNS)]
        result = _like(rows.shape, rows.dtype, *operands)
        return cls._like_logits(cls._called(kernel, [result], operands)[0], part.logits)

    @staticmethod
    def _like_logits(dlogits: Array, logits: Array) -> Array:
        return lax.bitcast_convert_type(dlogits, logits.dtype).reshape(logits.shape)

    @classmethod
    def loss(
        cls,
        plan: Plan,
        part: Part,
        sequences: Sequences,
        ids: Array,
        mask: Array,
        advantages: Array,
        weights: Array,
        *inputs: Array,
    ) -> tuple[Array, Array] | None:
        """Results and dlogits from one read of rows that are whole, where a kernel does that."""
        kernel, logits = cls._kernels(plan, part.logits)["one_pass"], part.logits
        if kernel is None:
            return None
        # The kernel takes the nearest id: what is of none is no number, neither its results nor its dlogits.
        found = (ids >= 0) & (ids < logits.shape[-1])
        of = dict(zip(plan.inputs, inputs), advantage=advantages, mask=mask.astype(jnp.float32))
        of["weight"] = jnp.where(mask, jnp.where(found, weights[..., 0], jnp.nan), 0.0)
        of.update(kl_share=weights[..., 1], entropy_factor=jnp.where(mask, of_entropy(plan, weights, inputs), 0.0))
        given = [jnp.broadcast_to(of.get(name, 0.0), ids.shape) for name in kernel["given"]]
        tokens = _stacked(given, -(-len(given) // COLUMNS) * COLUMNS)
        # No constant array: `custom_partitioning` takes none.
        numbers = [jnp.full(1, 0.0 if name == "entropy_factor" else float(text), jnp.float32) for name, text in kernel["numbers"]]
        rows = cls._rows(logits)
        operands = [ids.reshape(-1), jnp.concatenate(numbers), rows, tokens.reshape(1, ids.size, -1)]
        like = [_like(rows.shape, rows.dtype, *operands), _like((1, ids.size, COLUMNS), jnp.float32, *operands)]
        dlogits, columns = cls._called(kernel, like, operands)
        returned = dict(zip(kernel["results"], jnp.moveaxis(columns.reshape(*ids.shape, COLUMNS), -1, 0)))
        returned.setdefault("reduced", returned["token_loss"])
        if not plan.of["has_kl"]:
            returned["kl"] = jnp.zeros_like(advantages)
        numbered = [returned[name] if name == "entropy" else jnp.where(found, returned[name], jnp.nan) for name in RESULTS]
        return _stacked([jnp.where(mask, column, 0.0) for column in numbered]), cls._like_logits(dlogits, logits)


_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


@functools.lru_cache(maxsize=64)
def _written(emitted: Callable[..., str], spec: str, shape: Sequence[int], dtype: str, target: str) -> dict[str, Any]:
    kernels: dict[str, Any] = json.loads(emitted(_native.Spec._of_json(spec), tuple(shape), dtype, target))
    return kernels


class Mosaic(_Emitted):
    """The tile kernels, on a TPU."""

    emitted = staticmethod(_native.mosaic_kernels)

    @staticmethod
    def _stored(rows: Array) -> Array:
        # Mosaic has no f16: its bits go in.
        return lax.bitcast_convert_type(rows, jnp.int16) if rows.dtype == jnp.float16 else rows

    @staticmethod
    def _called(kernel: dict[str, Any], results: Sequence[Any], operands: Sequence[Array]) -> Sequence[Array]:
        call = jax.ffi.ffi_call(
            "tpu_custom_call",
            results,
            custom_call_api_version=1,
            legacy_backend_config=kernel["text"],
            input_output_aliases=dict(kernel["aliases"]),
        )
        return tuple(call(*operands))


class Ptx(_Emitted):
    """The kernels for GPUs, through XLA's own call of PTX."""

    emitted = staticmethod(_native.ptx_kernels)

    @staticmethod
    def _called(kernel: dict[str, Any], results: Sequence[Any], operands: Sequence[Array]) -> Sequence[Array]:
        call = jax.ffi.ffi_call("__gpu$xla.gpu.ptx", results, input_output_aliases=dict(kernel["aliases"]))
        launch = {
            f"{of}_{axis}": np.int32(extent)
            for of, extents in zip(("grid", "block"), kernel["launch"], strict=True)
            for axis, extent in zip("xyz", extents, strict=True)
        }
        # The entry is given the inputs, then the outputs.
        places = np.arange(len(operands), len(operands) + len(results), dtype=np.int64)
        text = {"name": kernel["name"], "kernel_type": "ptx", "kernel_data": kernel["text"]}
        shared = np.int32(kernel["shared_bytes"])
        return tuple(call(*operands, **launch, **text, output_indices=places, shared_mem_bytes=shared))


KERNELS: dict[str, Any] = {"native": Native, "mosaic": Mosaic, "ptx": Ptx, "xla": Xla}


# ---- what one device computes


def of_entropy(plan: Plan, weights: Array, inputs: Sequence[Array]) -> Array:
    """Returns the derivative of the loss by each token's entropy, `[B,T]`."""
    dentropy = dict(zip(plan.inputs, inputs)).get("dentropy")
    return weights[..., 2] if dentropy is None else weights[..., 2] * dentropy


def _stacked(columns: Sequence[Array], width: int = COLUMNS) -> Array:
    """`[B,T,width]`, 0 in the columns that are not given."""
    nothing = [jnp.zeros_like(columns[0])] * (width - len(columns))
    return jnp.stack([*columns, *nothing], -1)


def _joined(plan: Plan, rate: Array | float, statistics: Array, vocab_axes: Axes) -> dict[str, Array]:
    """Statistics of whole rows, from those of every device's part."""
    of = {name: statistics[..., i] for i, name in enumerate(STATISTICS)}
    if not vocab_axes:
        return of
    max = lax.pmax(of["max"], vocab_axes)
    rise = jnp.minimum(max - of["max"], FARTHEST)
    joined = {"max": max, "target_logit": lax.psum(of["target_logit"], vocab_axes)}
    softmaxes = [("", rate)]
    if plan.of["two_softmaxes"]:
        softmaxes.append(("logp_", plan.of["logp_inverse_temperature"]))
    for prefix, inverse in softmaxes:
        others, weighted, shift = of[f"{prefix}others"], of[f"{prefix}weighted"], rise * inverse
        shrink = jnp.exp(-shift)
        joined[f"{prefix}others"] = lax.psum(others * shrink, vocab_axes)
        joined[f"{prefix}weighted"] = lax.psum((weighted + shift * others) * shrink, vocab_axes)
    return joined


def apart(plan: Plan, others: Sequence[Array]) -> tuple[Sequences, tuple[Array, ...], tuple[Array | None, Array | None]]:
    """Splits the arrays of a loss after logits, ids, mask, advantages and weights: segment ids if sequences are packed, the spec's
    inputs in their order, and the bias and the kept sets if it has them, which come in the other order."""
    first, last = int(plan.packed is not None), len(others) - plan.biased
    segment_ids = others[0] if first else None
    bias, kept_ids = others[last] if plan.biased else None, others[last - 1] if plan.kept else None
    return Sequences(segment_ids, plan.packed), tuple(others[first : last - plan.kept]), (bias, kept_ids)


def token_losses(
    plan: Plan,
    token_axes: Axes,
    scores: tuple[Array, Array],
    mask: Array,
    advantages: Array,
    weights: Array,
    *others: Array,
) -> tuple[Array, Array]:
    """Results of each token and `∂loss/∂logp`, from logp and entropy."""
    sequences, inputs, _ = apart(plan, others)

    def row_sum(values: Array) -> Array:
        return sequences.spread(sequences.sum(jnp.where(mask, values, 0.0), token_axes))

    logp, entropy = scores
    given = dict(zip(plan.inputs, inputs), logp=logp, advantages=advantages)
    given.update(weight=weights[..., 0], kl_share=weights[..., 1], row_count=row_sum(jnp.ones_like(advantages)))
    token = compute(jnp, plan.of["loss"], given, jnp.float32, row_sum)
    every = dict(token, logp=logp, entropy=entropy)
    results = _stacked([jnp.where(mask, jnp.broadcast_to(every[name], mask.shape), 0.0) for name in RESULTS])
    return results, token["grad_logp"]


def _share(
    plan: Plan,
    backward: bool,
    token_axes: Axes,
    vocab_axes: Axes,
    logits: Array,
    ids: Array,
    mask: Array,
    advantages: Array,
    weights: Array,
    *others: Array,
) -> tuple[Array, ...]:
    """Computes the part on this device of the results `[B,T,8]` and, if `backward`, of dlogits."""
    kernels, of = KERNELS[plan.implementation], plan.of
    columns = logits.shape[-1]
    first = lax.axis_index(vocab_axes) * columns if vocab_axes else 0
    sequences, inputs, bias = apart(plan, others)
    rate = plan.rate(inputs)
    part = Part(logits, first, rate, *bias)
    if plan.kept or of["row_terms"]:
        # Sets and terms of whole rows are for the kernel that reads a row, its loss and its dlogits in one.
        if vocab_axes or (of["couples_rows"] and token_axes):
            given = "`kept_ids`: got them" if plan.kept else "`label_smoothing`, `z_loss`: got one"
            raise ProblemError(f"{given} for rows or sequences that are cut over devices, expected whole ones on each")
        tokens = ids, mask, advantages, weights, *inputs
        return kernels.loss(plan, part, sequences, *tokens) if backward else (kernels.loss_forward(plan, part, sequences, *tokens),)
    if backward and not vocab_axes and not (of["couples_rows"] and token_axes):
        evaluated = kernels.loss(plan, part, sequences, ids, mask, advantages, weights, *inputs)
        if evaluated is not None:
            return tuple(evaluated)

    local = ids - first
    local = jnp.where((local >= 0) & (local < columns), local, -1)
    statistics = _joined(plan, rate, kernels.statistics(plan, part, local, mask), vocab_axes)
    softmax = compute(jnp, of["softmax"], {**statistics, "rate": rate}, jnp.float32)

    # An id that no device has is no number, where it counts.
    found = local >= 0
    if vocab_axes:
        found = lax.psum(found.astype(jnp.int32), vocab_axes) > 0
    scores = jnp.where(found, softmax["logp"], jnp.nan), softmax["entropy"]
    results, grad_logp = token_losses(plan, token_axes, scores, mask, advantages, weights, *others)
    if not backward:
        return (results,)

    share = -grad_logp * rate / softmax["sum"]
    bonus = of_entropy(plan, weights, inputs) * rate / softmax["entropy_sum"]
    counts = mask.astype(jnp.float32)
    scales = [statistics["max"], share, softmax["others"], counts, bonus, softmax["mean_gap"]]
    return results, kernels.gradient(plan, part, local, _stacked([jnp.where(mask, scale, 0.0) for scale in scales]))


# ---- where devices are found


def _axes(entry: Any) -> Axes:
    """The axes of the mesh along which one axis of an array is cut."""
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, tuple) else (entry,)


def _expect_even(mesh: Any, logits: Any) -> None:
    """XLA fills the last device's part up with anything, which would count as columns and as tokens."""
    extents = zip(("sequences", "tokens", "columns"), logits.shape, (*logits.sharding.spec, None, None, None), strict=False)
    for what, extent, entry in extents:
        devices = math.prod(mesh.shape[axis] for axis in _axes(entry))
        if extent % devices:
            axes = ", ".join(f"`{axis}`" for axis in _axes(entry))
            raise ProblemError(
                f"`logits`: got {extent} {what} cut over the {devices} devices of {axes}, expected a multiple of {devices}: as many "
                "on each"
            )


def _beside(plan: Plan) -> int:
    """Counts the `[B,T]` arrays in addition to ids, mask and advantages."""
    return len(plan.inputs) + (plan.packed is not None)


@functools.lru_cache(maxsize=256)
def _partitioned(plan: Plan, backward: bool) -> Any:
    """`_share` of whole arrays, which under `jit` is computed on each device from what that holds, however logits are cut."""

    def whole(*arrays: Array) -> tuple[Array, ...]:
        return _share(plan, backward, (), (), *arrays)

    def shardings(mesh: Any, logits: Any) -> tuple[tuple[Axes, Axes], list[Any], Any]:
        batch, tokens, vocab = (*logits.spec, None, None, None)[:3]
        of = functools.partial(NamedSharding, mesh)
        per_token, columns = of(PartitionSpec(batch, tokens)), of(PartitionSpec(batch, tokens, None))
        of_logits = of(PartitionSpec(batch, tokens, vocab))
        bias = [of(PartitionSpec(vocab))] * plan.biased
        arguments = [of_logits, *[per_token] * 3, columns, *[per_token] * _beside(plan), *[columns] * plan.kept, *bias]
        return (_axes(tokens), _axes(vocab)), arguments, (columns, of_logits) if backward else (columns,)

    def partition(mesh: Any, arguments: Any, _: Any) -> tuple[Any, ...]:
        (token_axes, vocab_axes), of_arguments, of_results = shardings(mesh, arguments[0].sharding)
        _expect_even(mesh, arguments[0])
        # An array that is replicated is not cut.
        cut = [tuple(axis for axis in axes if mesh.shape[axis] > 1) for axes in (token_axes, vocab_axes)]
        return mesh, functools.partial(_share, plan, backward, *cut), of_results, tuple(of_arguments)

    def infer(mesh: Any, arguments: Any, _: Any) -> Any:
        return shardings(mesh, arguments[0].sharding)[2]

    operands = ["b t v", *["b t"] * 3, "b t w", *["b t"] * _beside(plan), *["b t k"] * plan.kept, *["v"] * plan.biased]
    rule = f"{', '.join(operands)} -> {', '.join(['b t c', *['b t v'] * backward])}"
    op = custom_partitioning(whole)
    op.def_partition(partition=partition, infer_sharding_from_operands=infer, sharding_rule=rule)
    return op


def _folded(plan: Plan, call: Callable[..., tuple[Array, ...]]) -> Callable[..., tuple[Array, ...]]:
    """`call`, whose axis of `vmap` becomes a part of the batch: rows of logits are independent, and weighed already."""

    @jax.custom_batching.custom_vmap
    def mapped(*arrays: Array) -> tuple[Array, ...]:
        return call(*arrays)

    @mapped.def_vmap
    def rule(size: int, batched: Sequence[bool], *arrays: Array) -> tuple[tuple[Array, ...], tuple[bool, ...]]:
        of_rows = len(arrays) - plan.biased
        if any(batched[of_rows:]):
            raise ProblemError(f"`bias`: got {size} of them under `vmap`, expected one for all")
        every = [
            array if of_axis else jnp.broadcast_to(array, (size, *array.shape))
            for array, of_axis in zip(arrays[:of_rows], batched, strict=False)
        ]
        results = mapped(*(array.reshape(-1, *array.shape[2:]) for array in every), *arrays[of_rows:])
        apart = tuple(result.reshape(size, -1, *result.shape[1:]) for result in results)
        return apart, (True,) * len(apart)

    return mapped  # type: ignore[no-any-return]


def _explicit(plan: Plan, backward: bool, mesh: Any, of_logits: PartitionSpec) -> Callable[..., tuple[Array, ...]]:
    """Wraps `function` in a `shard_map` if types say how arrays are cut (a mesh whose axes are `Explicit`)."""
    batch, tokens, vocab = (*of_logits, None, None, None)[:3]
    per_token = PartitionSpec(batch, tokens)
    bias = [PartitionSpec(vocab)] * plan.biased
    columns = PartitionSpec(batch, tokens, None)
    operands = (of_logits, *[per_token] * 3, columns, *[per_token] * _beside(plan), *[columns] * plan.kept, *bias)
    results = (columns, *[of_logits] * backward)
    share = functools.partial(_share, plan, backward, _axes(tokens), _axes(vocab))
    of_each = jax.shard_map(share, mesh=mesh, in_specs=operands, out_specs=results)

    def call(*arrays: Array) -> tuple[Array, ...]:
        cut = (jax.sharding.reshard(array, spec) for array, spec in zip(arrays, operands, strict=True))
        return of_each(*cut)  # type: ignore[no-any-return]

    return call


def automatic(call: Callable[..., Any], cut_like: Array, ranks: Sequence[int]) -> Callable[..., Any]:
    """`call`, within which XLA finds how arrays are cut also where types say it outside: gathers and scatters by sequence have no
    types. Its results are of `ranks`, their first axes cut as those of `cut_like`."""
    if not jax.sharding.get_abstract_mesh().explicit_axes:
        return call
    cut = tuple(jax.typeof(cut_like).sharding.spec)
    results = tuple(PartitionSpec(*cut, *[None] * (rank - cut_like.ndim)) for rank in ranks)
    return jax.sharding.auto_axes(call, out_sharding=results)  # type: ignore[no-any-return]


def _call(plan: Plan, backward: bool, manual: tuple[Axes, Axes] | None, logits: Array) -> Callable[..., tuple[Array, ...]]:
    if manual is not None:
        return functools.partial(_share, plan, backward, *manual)
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.explicit_axes:
        return _partitioned(plan, backward)  # type: ignore[no-any-return]
    if not mesh.are_all_axes_explicit:
        raise AssayError(
            f"mesh: got axes {', '.join(mesh.explicit_axes)} that are Explicit and {', '.join(mesh.auto_axes)} that are Auto, "
            "expected all of one type, or a shard_map"
        )
    return _explicit(plan, backward, mesh, jax.typeof(logits).sharding.spec)


def evaluate(plan: Plan, backward: bool, manual: tuple[Axes, Axes] | None, *arrays: Array) -> tuple[Array, ...]:
    """Results `[B,T,8]` and, `backward`, dlogits; `manual` are the axes of the `shard_map` around, over which tokens and
    columns are cut."""
    call = _call(plan, backward, manual, arrays[0])

    @jax.custom_jvp
    def once(*arrays: Array) -> tuple[Array, ...]:
        return _folded(plan, call)(*arrays)

    @once.defjvp
    def twice(*_: Any) -> Any:
        raise AssayError("grpo_loss: got a second derivative, expected one: dlogits have none")

    return once(*arrays)  # type: ignore[no-any-return]
