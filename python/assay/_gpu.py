"""The loss on a GPU: two kernels, enqueued on the framework's stream, and what lies between them by its own operations, in f64. With an
LM head the framework's products stand around each kernel, a chunk of the tokens at a time (`Head`).

Nothing waits for the device but what is settled before there are logits, for specs that settle something (`Batch.of`). So nothing can
be refused for what a tensor on the device holds: a token whose mask, id or sequence is none has a loss that is NaN.

Which framework it is, `Arrays` knows: `assay.torch` has PyTorch's, the tests have NumPy's, whose memory a driver without a device takes.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from . import _native
from ._errors import ProblemError
from ._native import Spec
from ._tape import Array, compute, logged, row_weights, weighed

#: Columns of what is handed over a token.
COLUMNS = 8
#: A kernel's statistics of a row, in order; those that are weighted are sums of exponents of 2.
_STATISTICS = ("max", "target_logit", "others", "weighted", "logp_others", "logp_weighted")
_METRICS = ("clip_low", "clip_high", "clip_region", "kl_mean", "entropy_mean", "ratio_mean")
_FLOATS = ("f32", "bf16", "f16", "f64")
_INTEGERS = ("i64", "i32")


class Arrays(Protocol):
    """A framework's arrays on one device, by what is done with them. Dtypes are named as the package does: `f32`, `i64`, `bool`, …"""

    @property
    def on(self) -> Any:
        """The framework's module."""
    @property
    def place(self) -> tuple[int, int]:
        """The device's number, and the stream that is current there."""
    def full(self, shape: Sequence[int], value: float, dtype: str) -> Array: ...
    def empty(self, shape: Sequence[int], dtype: str) -> Array: ...
    def arange(self, end: int) -> Array: ...
    def cast(self, array: Array, dtype: str) -> Array: ...
    def dtype(self, array: Array) -> str:
        """The dtype's name, in the framework's words where it is none of the package's."""
    def strides(self, array: Array) -> Sequence[int]:
        """In elements."""
    def address(self, array: Array) -> int: ...
    def group_sums(self, values: Array, groups: Array, count: int) -> Array:
        """`[count]`: the sum of the `values` of each group."""
    def groups(self, ends: Array, places: Array) -> Array:
        """Of each place how many of the ascending `ends` are not behind it."""
    def upload(self, array: Any) -> Array:
        """A list of integers, or an array in the host's memory, on the device; nothing is waited for."""
    def download(self, array: Array) -> Any:
        """On the host, once the device is done with it."""


class Evaluated(NamedTuple):
    """What `loss` computes, f32 but for the last."""

    loss: Array
    logp: Array
    entropy: Array
    token_loss: Array
    #: In the order of `_METRICS`.
    metrics: Array
    #: `[B·T,8]`, f64: what `gradient` and `head_gradient` need of each token.
    kept: Array


# ---- logits that are never all there

#: Bytes of what a chunk holds for each logit, at most, unless the caller says how many tokens it has: as on the CPU.
_CHUNK_BYTES = 320 << 20


@dataclass(frozen=True)
class Head:
    """Hidden states `[B,T,H]` and a head `[V,H]`, both dense: logits are `hidden · lm_headᵀ`, f32 sums in f32, or rounded to the dtype of
    `hidden`. They are made a chunk at a time, each where the last one was."""

    hidden: Array
    lm_head: Array
    rounds_logits: bool
    #: Tokens of a chunk; 0: as many as 320 MiB hold.
    chunk: int
    #: `multiply(a, b, out, adds)`: over `out`, or added to it, the product of two matrices of one dtype, summed in f32; `out` has that
    #: dtype too, or is f32.
    multiply: Callable[[Array, Array, Array, bool], None]

    @property
    def shape(self) -> tuple[int, int, int]:
        """`(B, T, V)`."""
        batch, tokens, _ = self.hidden.shape
        return int(batch), int(tokens), int(self.lm_head.shape[0])

    def chunks(self, arrays: Arrays, mask: Array) -> Iterator[tuple[slice, Array, Array]]:
        """Of each chunk which tokens it has, their hidden states `[n,H]`, 0 where the `mask` hides them, and logits `[1,n,V]`, which stand
        until the next are asked for."""
        batch, tokens, vocab = self.shape
        rows, own = batch * tokens, arrays.dtype(self.hidden)
        dtype = own if self.rounds_logits else "f32"
        # Products of dlogits are taken of dlogits in the dtype of hidden: a copy, where that is another.
        size = _SIZES[dtype] + (_SIZES[own] if dtype != own else 0)
        chunk = min(rows, self.chunk or max(1, _CHUNK_BYTES // (size * vocab)))
        room = arrays.empty((chunk, vocab), dtype)
        for start in range(0, rows, chunk):
            at = slice(start, min(start + chunk, rows))
            hidden = arrays.on.where(mask.reshape(rows, 1)[at], self.hidden.reshape(rows, -1)[at], 0)
            logits = room[: at.stop - start]
            self.multiply(hidden, self.lm_head.T, logits, False)
            yield at, hidden, logits[None]


# ---- the batch beside its logits


class _Rows:
    """A sequence a row."""

    def __init__(self, count: int) -> None:
        self.count = count

    def sums(self, values: Array) -> Array:
        """Of each sequence."""
        return values.sum(1, keepdims=True)

    def spread(self, of_sequences: Array) -> Array:
        """A number of each sequence in the places of its tokens."""
        return of_sequences.reshape(-1, 1)


class _Packed:
    """Sequences in one row, each up to one of `ends`."""

    def __init__(self, arrays: Arrays, ends: Array, tokens: int) -> None:
        places = arrays.arange(tokens)
        self.count, self._arrays = int(ends.shape[0]) - 1, arrays
        self._of_token = arrays.groups(ends[1:], places)
        owned = self._of_token < self.count
        #: Tokens behind the last sequence.
        self.nobodys = ~owned[None]
        #: Whether they are no ascending ends within the row.
        self.wrong = (ends[0] != 0) | (ends[-1] > tokens) | (ends[1:] < ends[:-1]).any()
        self._owner = arrays.on.where(owned, self._of_token, 0)

    def sums(self, values: Array) -> Array:
        return self._arrays.group_sums(values[0], self._of_token, self.count + 1)[:-1]

    def spread(self, of_sequences: Array) -> Array:
        return self._arrays.on.where(self.nobodys, 0.0, of_sequences[self._owner][None])


@functools.lru_cache(maxsize=256)
def _plan(spec: str, width: int | None) -> dict[str, Any]:
    """Of a batch that is padded to `width`, or packed where there is none."""
    plan: dict[str, Any] = json.loads(_native.gpu_plan(_read(spec), width))
    return plan


def _packed(given: Mapping[str, Array | None]) -> bool:
    return given.get("cu_seqlens") is not None or given.get("segment_ids") is not None


def _of(spec: str, given: Mapping[str, Array | None], tokens: int) -> dict[str, Any]:
    return _plan(spec, None if _packed(given) else tokens)


@functools.lru_cache(maxsize=64)
def _read(spec: str) -> Spec:
    return Spec._of_json(spec)


@functools.lru_cache(maxsize=64)
def _normalized(spec: str) -> tuple[str, float]:
    """A spec whose normaliser is none that its KL penalty has by itself, and that number: the loss is divided by another."""
    of = json.loads(spec)
    if "normalizer" not in of["reduction"]:
        raise ProblemError("`normalizer`: got one, expected none, or a spec whose `reduction` is `normalizer`")
    own = 2.0 if '"normalizer": 1.0' in json.dumps(of["kl"]) else 1.0
    of["reduction"] = {"normalizer": own}
    return json.dumps(of), own


def _expect_dtype(arrays: Arrays, field: str, array: Array, dtypes: Sequence[str]) -> None:
    given = arrays.dtype(array)
    if given not in dtypes:
        raise ProblemError(f"`{field}`: got dtype {given}, expected {', '.join(dtypes[:-1])} or {dtypes[-1]}")


def _expect_shape(field: str, array: Array, shape: Sequence[int], meaning: str) -> None:
    if tuple(array.shape) != tuple(shape):
        raise ProblemError(f"`{field}`: got shape {list(array.shape)}, expected {list(shape)} ({meaning})")


def _expect_logits(arrays: Arrays, logits: Array) -> tuple[int, int, int]:
    shape = _expect_extents(logits.shape)
    _expect_dtype(arrays, "logits", logits, _FLOATS[:3])
    return shape


def _expect_extents(logits: Sequence[int]) -> tuple[int, int, int]:
    if len(logits) != 3 or 0 in logits:
        raise ProblemError(f"`logits`: got shape {list(logits)}, expected [B,T,V] with B, T, V ≥ 1")
    batch, tokens, vocab = (int(extent) for extent in logits)
    return batch, tokens, vocab


def _expect_head(arrays: Arrays, head: Head) -> tuple[int, int, int]:
    given = {"hidden": (head.hidden, "[B,T,H]"), "lm_head": (head.lm_head, "[V,H]")}
    for field, (array, expected) in given.items():
        dtype, extents = arrays.dtype(array), list(array.shape)
        if dtype not in _FLOATS or len(extents) != expected.count(",") + 1:
            raise ProblemError(f"`{field}`: got dtype {dtype} and shape {extents}, expected floats {expected}")
        dense = [math.prod(extents[axis + 1 :]) for axis in range(len(extents))]
        runs = zip(extents, arrays.strides(array), dense, strict=True)
        if 0 not in extents and any(extent > 1 and stride != own for extent, stride, own in runs):
            raise ProblemError(f"`{field}`: got a strided array, expected dense row-major (take `{field}.contiguous()`)")
    width = int(head.hidden.shape[2])
    if width == 0:
        raise ProblemError(f"`hidden`: got shape {list(head.hidden.shape)}, expected [B,T,H] with H ≥ 1")
    if head.lm_head.shape[1] != width:
        raise ProblemError(
            f"`lm_head`: got shape {list(head.lm_head.shape)}, expected [V,H] with H = {width}, that of `hidden`"
        )
    own = arrays.dtype(head.hidden)
    if arrays.dtype(head.lm_head) != own:
        raise ProblemError(f"`lm_head`: got dtype {arrays.dtype(head.lm_head)}, expected {own}, that of `hidden`")
    _expect_dtype(arrays, "hidden", head.hidden, _FLOATS[:3])
    return _expect_extents(head.shape)


def _truths(arrays: Arrays, field: str, array: Array) -> tuple[Array, Array]:
    """Which are true, and which are neither 0 nor 1."""
    _expect_dtype(arrays, field, array, ("bool", *_INTEGERS, *_FLOATS))
    if arrays.dtype(array) == "bool":
        return array, array & ~array
    numbers = arrays.cast(array, "f64")
    return numbers != 0.0, (numbers != 0.0) & (numbers != 1.0)


class _Targets:
    """The sampled tokens of `[B,T]`, as kernels are given them."""

    def __init__(self, arrays: Arrays, plan: Mapping[str, Any], ids: Array, bias: Array | None, shape: tuple[int, int, int]) -> None:
        on, vocab = arrays.on, shape[2]
        _expect_dtype(arrays, "ids", ids, _INTEGERS)
        _expect_shape("ids", ids, shape[:2], "[B,T] of the logits")
        found = (ids >= 0) & (ids < vocab)
        #: i32, −1 where an id is none.
        self.ids = arrays.cast(on.where(found, ids, -1), "i32")
        #: Which are an id's of no column that may be sampled.
        self.wrong = ~found
        #: `[V]`, f32, −∞ outside the support, and `[B,T]`, the bias of each token's own column; where columns differ.
        self.biases: tuple[Array, Array] | None = None
        if plan["bias"] and bias is None:
            raise ProblemError(f"`bias`: not given, expected shape [{vocab}]: the spec has `logits.bias`")
        if not plan["by_column"]:
            return
        # As `Columns` of crates/algebra/src/transform.rs: a bias of −∞ is no mark.
        own = arrays.cast(on.where(found, ids, 0), "i64")
        by_column = arrays.full((vocab,), 0.0, "f32")
        if plan["bias"]:
            assert bias is not None
            _expect_dtype(arrays, "bias", bias, _FLOATS)
            _expect_shape("bias", bias, (vocab,), "[V] of the logits")
            given = arrays.cast(bias, "f32")
            by_column = on.where(given < _LEAST, _LEAST, given)
        of_target = by_column[own]
        support = plan["support"]
        outside = arrays.arange(vocab) >= (vocab if support["vocab"] is None else support["vocab"])
        excluded = [column for column in support["excluded_ids"] if column < vocab]
        if excluded:
            outside[arrays.upload(excluded)] = True
        by_column = arrays.cast(on.where(outside, -math.inf, by_column), "f32")
        if not support["keep_sampled"]:
            self.wrong = self.wrong | outside[own]
        self.biases = (by_column, of_target)


#: The least f32.
_LEAST = -(2.0**128 - 2.0**104)


@dataclass(frozen=True)
class _Batch:
    """What is known of the tokens before their logits are, `[B,T]` or of a shape that spreads to it; f64."""

    plan: dict[str, Any]
    sequences: Any
    mask: Array
    #: Tokens whose loss is no number.
    wrong: Array
    advantages: Array
    weights: Array
    kl_share: Array
    entropy: Array
    inputs: dict[str, Array]

    @classmethod
    def of(
        cls,
        arrays: Arrays,
        spec: str,
        shape: tuple[int, int, int],
        given: Mapping[str, Array | None],
        targets: _Targets,
        normalizer: Array | None,
    ) -> _Batch:
        """Of the arrays that are given. Where the spec rejects tokens or weighs them by themselves or against the sampler, and where
        sequences are told by `segment_ids`, all of them are copied to the host, which waits for the device, and settled there."""
        on, per_token = arrays.on, shape[:2]
        advantages, ends = given["advantages"], given.get("cu_seqlens")
        packed = _packed(given)
        settled: dict[str, Any] = {}
        plan = _of(spec, given, shape[1])
        if plan["settles"] or given.get("segment_ids") is not None:
            on_host = {name: None if array is None else arrays.download(array) for name, array in given.items()}
            settled, of_ends = _native.gpu_settled(_read(spec), shape, on_host)
            ends = None if of_ends is None else arrays.upload(of_ends)
        sequences: Any = _Rows(shape[0])
        mask = given["mask"]
        assert mask is not None and advantages is not None
        _expect_shape("mask", mask, per_token, "[B,T] of the logits")
        mask, wrong = _truths(arrays, "mask", mask)
        if "mask" in settled:
            mask = arrays.upload(settled["mask"])
        wrong = wrong | targets.wrong
        if packed:
            assert ends is not None
            _expect_ends(arrays, ends, per_token)
            sequences = _Packed(arrays, arrays.cast(ends, "i64"), shape[1])
            wrong = wrong | sequences.nobodys | sequences.wrong
        one = arrays.full((), 1.0, "f64")
        counts = sequences.sums(on.where(mask, one, 0.0))
        of_rows = row_weights(on, plan, counts, lambda values: values.sum(), sequences.count, normalizer=1.0 if normalizer is None else normalizer)
        policy, kl_share, entropy = (sequences.spread(weight) for weight in of_rows)
        inputs = {}
        for name, source in zip(plan["inputs"], plan["sources"], strict=True):
            if name in settled:
                inputs[name] = arrays.upload(settled[name])
            elif name == "rate":
                inputs[name], unlike = _rates(arrays, plan, given.get(source), sequences, mask)
                wrong = wrong | unlike
            else:
                inputs[name], unlike = _input(arrays, source, given.get(source), per_token)
                wrong = wrong if unlike is None else wrong | unlike
        if "rate" in inputs:
            # As the kernels have it.
            inputs["rate"] = arrays.cast(arrays.cast(inputs["rate"], "f32"), "f64")
        if "dentropy" in inputs:
            entropy = entropy * on.where(mask, inputs["dentropy"], 0.0)
        return cls(
            plan=plan,
            sequences=sequences,
            mask=mask,
            wrong=wrong,
            advantages=_advantages(arrays, advantages, sequences, per_token, plan["token_advantages"]),
            weights=on.where(wrong, math.nan, policy),
            kl_share=kl_share,
            entropy=entropy,
            inputs=inputs,
        )


def _expect_ends(arrays: Arrays, ends: Array, per_token: tuple[int, int]) -> None:
    _expect_dtype(arrays, "cu_seqlens", ends, _INTEGERS)
    if len(ends.shape) != 1 or ends.shape[0] < 2:
        raise ProblemError(
            f"`cu_seqlens`: got shape {list(ends.shape)}, expected [S+1] with S ≥ 1: 0, and where each sequence ends"
        )
    if per_token[0] != 1:
        raise ProblemError(
            f"`mask`: got shape {list(per_token)}, expected [1,N], as `cu_seqlens` packs sequences into one row"
        )


def _input(arrays: Arrays, field: str, array: Array | None, shape: tuple[int, int]) -> tuple[Array, Array | None]:
    """In f64, and which of them are none, where they are truth values."""
    if array is None:
        raise ProblemError(f"`{field}`: not given, expected shape {list(shape)}: the spec reads it")
    _expect_shape(field, array, shape, "[B,T] of the logits")
    if field == "selected":
        truths, wrong = _truths(arrays, field, array)
        return arrays.cast(truths, "f64"), wrong
    _expect_dtype(arrays, field, array, _FLOATS)
    return arrays.cast(array, "f64"), None


def _rates(
    arrays: Arrays, plan: Mapping[str, Any], array: Array | None, sequences: Any, mask: Array
) -> tuple[Array, Array]:
    """What gaps of each token are multiplied by, and whose temperatures are none."""
    on, shape = arrays.on, [int(extent) for extent in mask.shape]
    if array is None:
        raise ProblemError(f"`temperature`: not given, expected shape {shape} because the spec has `temperature: given`")
    _expect_dtype(arrays, "temperature", array, _FLOATS)
    given, count = [int(extent) for extent in array.shape], sequences.count
    if given not in (shape, [count], [count, 1]):
        raise ProblemError(f"`temperature`: got shape {given}, expected {shape} or {[count, 1]}")
    of_tokens = arrays.cast(array, "f64")
    if given != shape:
        of_tokens = sequences.spread(of_tokens.reshape(-1))
    fits = (of_tokens > 0.0) & (of_tokens < math.inf)
    return on.where(mask, plan["rate"] / on.where(fits, of_tokens, math.nan), 1.0), ~fits


def _advantages(arrays: Arrays, array: Array, sequences: Any, per_token: tuple[int, int], of_tokens: bool) -> Array:
    _expect_dtype(arrays, "advantages", array, _FLOATS)
    if tuple(array.shape) == (sequences.count,):
        return sequences.spread(arrays.cast(array, "f64"))
    if of_tokens:
        _expect_shape("advantages", array, per_token, "[B,T] of the logits, as the spec has `advantages: token`")
        return arrays.cast(array, "f64")
    meaning = "[B] of the logits" if isinstance(sequences, _Rows) else "[S] of `cu_seqlens`"
    _expect_shape("advantages", array, (sequences.count,), f"{meaning}, as the spec has `advantages: sequence`")
    raise AssertionError("it has another shape")


# ---- the kernels


def _enqueue(
    arrays: Arrays,
    spec: str,
    kernel: str,
    entropy: bool,
    logits: Array,
    targets: _Targets,
    plan: Mapping[str, Any],
    rates: Array | None,
    others: Mapping[str, Array],
    dlogits: Array | None = None,
    at: slice = slice(None),
) -> None:
    """Enqueues a kernel on `[B,T,V]` of logits, at once where the rows of all sequences follow each other, else sequence by
    sequence. `rates` are what gaps of tokens are multiplied by, where they have their own; `others` are arrays of a row a token. `at` are
    the tokens that the logits are of, where they are not of all."""
    batch, tokens, vocab = (int(extent) for extent in logits.shape)
    on, size = arrays.on, _SIZES[arrays.dtype(logits)]
    strides = [_strides(arrays, "logits", logits)]
    if dlogits is not None:
        strides.append(_strides(arrays, "dlogits", dlogits))
    pieces = 1 if batch == 1 or all(stride == tokens * vocab for stride in strides) else batch
    rows = batch * tokens // pieces
    # Each piece of these begins at a multiple of 16 bytes too.
    of_rows = {"ids": targets.ids}
    name, numbers = plan["numbers"]
    whole = {"columns": arrays.full((1,), vocab, "i32")}
    if numbers:
        whole[name] = on.stack([arrays.full((), number, "f32") for number in numbers])
    if rates is not None:
        of_rows["rate"] = arrays.cast(rates, "f32")
    if targets.biases is not None:
        whole["column_bias"], of_rows["target_bias"] = targets.biases
    by_row = {name: _padded(arrays, array.reshape(-1)[at].reshape(pieces, rows)) for name, array in of_rows.items()}
    others = {name: array[at] for name, array in others.items()}
    launched = {}
    for piece in range(pieces):
        launched = {name: (arrays.address(array), array.shape[0] * 4) for name, array in whole.items()}
        for name, array in by_row.items():
            launched[name] = (arrays.address(array) + piece * int(array.shape[1]) * 4, rows * 4)
        for name, array in others.items():
            launched[name] = (arrays.address(array) + piece * rows * COLUMNS * 4, rows * COLUMNS * 4)
        for name, array, stride in zip(("logits", "dlogits"), (logits, dlogits), strides, strict=False):
            launched[name] = (arrays.address(array) + piece * stride * size, rows * vocab * size)
        extents = (rows, vocab)
        _native.gpu_enqueue(_read(spec), kernel, entropy, arrays.place, extents, arrays.dtype(logits), launched)


_SIZES = {"f32": 4, "bf16": 2, "f16": 2}


def _strides(arrays: Arrays, field: str, logits: Array) -> int:
    """From sequence to sequence, in elements."""
    _, tokens, vocab = logits.shape
    of_sequence, of_row, of_column = arrays.strides(logits)
    if vocab > 1 and of_column != 1:
        raise ProblemError(f"`{field}`: got rows with a stride of {of_column}, expected 1: each row dense")
    if tokens > 1 and of_row != vocab:
        raise ProblemError(
            f"`{field}`: got rows of {vocab} that begin {of_row} elements apart, expected {vocab}: on a GPU those of a sequence "
            "follow each other; take `logits.contiguous()`"
        )
    return of_sequence


def _padded(arrays: Arrays, array: Array) -> Array:
    """Where, and with as many columns, that each row begins at a multiple of 16 bytes, of elements of 4."""
    rows, columns = array.shape
    if (rows == 1 or columns % 4 == 0) and arrays.address(array) % 16 == 0:
        return array
    padded = arrays.full((rows, columns + -columns % 4), 0, arrays.dtype(array))
    padded[:, :columns] = array
    return padded


# ---- the two halves


def loss(
    arrays: Arrays, spec: str, logits: Array | Head, given: Mapping[str, Array | None], normalizer: Array | None
) -> Evaluated:
    """The loss of a spec, as JSON, and what its gradient needs: the logits are read once, and nothing of their size is written; a chunk
    of them, where they are a head's."""
    on = arrays.on
    shape = _expect_head(arrays, logits) if isinstance(logits, Head) else _expect_logits(arrays, logits)
    batch, tokens, _ = shape
    if normalizer is not None:
        spec, of_spec = _normalized(spec)
        normalizer = normalizer / of_spec
    targets = _Targets(arrays, _of(spec, given, tokens), given["ids"], given.get("bias"), shape)
    of = _Batch.of(arrays, spec, shape, given, targets, normalizer)
    plan, mask, rates = of.plan, of.mask, of.inputs.get("rate")
    statistics = arrays.empty((batch * tokens, COLUMNS), "f32")
    to = {"statistics": statistics}
    if isinstance(logits, Head):
        for at, _, chunk in logits.chunks(arrays, mask):
            _enqueue(arrays, spec, "statistics", False, chunk, targets, plan, rates, to, at=at)
    else:
        _enqueue(arrays, spec, "statistics", False, logits, targets, plan, rates, to)
    wide = arrays.cast(statistics, "f64").reshape(batch, tokens, COLUMNS)
    columns = {
        name: wide[..., i] * -math.log(2.0) if "weighted" in name else wide[..., i] for i, name in enumerate(_STATISTICS)
    }

    def constant(number: float) -> Array:
        return arrays.full((), number, "f64")

    def row_sum(values: Array) -> Array:
        return of.sequences.spread(of.sequences.sums(on.where(mask, values, 0.0)))

    softmax = compute(on, plan["softmax"], {**columns, "rate": rates}, constant)
    logp = on.where(of.wrong, math.nan, softmax["logp"])
    row_count = row_sum(on.ones_like(logp))
    inputs = {
        **of.inputs,
        "logp": logp,
        "advantages": of.advantages,
        "weight": of.weights,
        "kl_share": of.kl_share,
        "row_count": row_count,
    }
    token = compute(on, plan["loss"], inputs, constant, row_sum)

    def counted(values: Array) -> Array:
        # A truth value becomes 1 or 0.
        return on.where(mask, values * on.ones_like(logp), 0.0)

    every = {name: counted(values) for name, values in {**token, "logp": logp, "entropy": softmax["entropy"]}.items()}
    count = on.where(mask, on.ones_like(logp), 0.0).sum()
    count = on.where(count > 1.0, count, 1.0)
    means = {name: values.sum() / count for name, values in logged(on, plan, every).items()}
    means.setdefault("kl_mean", constant(0.0))
    inverse = plan["inverse_temperature"] if rates is None else rates
    kept = (
        columns["max"],
        token["grad_logp"],
        inverse / softmax["sum"],
        softmax["others"],
        on.ones_like(logp) if rates is None else rates,
        of.entropy,
        inverse / softmax["entropy_sum"],
        softmax["mean_gap"],
    )
    return Evaluated(
        loss=arrays.cast(weighed(on, mask, every, of.weights, of.entropy).sum(), "f32"),
        logp=arrays.cast(every["logp"], "f32"),
        entropy=arrays.cast(every["entropy"], "f32"),
        token_loss=arrays.cast(every["token_loss"], "f32"),
        metrics=arrays.cast(on.stack([means[name] for name in _METRICS]), "f32"),
        kept=on.stack([counted(column).reshape(-1) for column in kept], -1),
    )


#: The derivatives by loss, logp and entropy, of which None is 0.
_Sent: TypeAlias = tuple[Array | None, Array | None, Array | None]


def gradient(
    arrays: Arrays, spec: str, logits: Array, dlogits: Array, given: Mapping[str, Array | None], kept: Array, sent: _Sent
) -> None:
    """Writes dlogits, elsewhere or over the logits, for what is sent: the logits are read once more. What is sent goes into the token
    weights in f64, and each dlogit is rounded once."""
    _writes_dlogits(arrays, spec, _expect_logits(arrays, logits), given, kept, sent)(logits, dlogits, slice(None))


def head_gradient(
    arrays: Arrays, spec: str, head: Head, given: Mapping[str, Array | None], kept: Array, sent: _Sent
) -> tuple[Array, Array]:
    """dhidden `[B,T,H]`, f32 sums over V rounded once to the dtype of `hidden`, and dlm_head `[V,H]`, f32 sums over tokens: each chunk's
    logits are made once more, and dlogits go over them. Products are taken of dlogits in the dtype of `hidden`: 16-bit ones are rounded
    to it."""
    write = _writes_dlogits(arrays, spec, _expect_head(arrays, head), given, kept, sent)
    dtype, counts = arrays.dtype(head.hidden), _counts(kept)
    dhidden = arrays.empty(head.hidden.shape, dtype)
    dlm_head = arrays.empty(head.lm_head.shape, "f32")
    rows = dhidden.reshape(counts.shape[0], -1)

    def of_chunk(at: slice, hidden: Array, logits: Array) -> None:
        # What is made here is gone before the next chunk's.
        write(logits, logits, at)
        dlogits = arrays.cast(logits[0], dtype)
        head.multiply(dlogits.T, hidden, dlm_head, at.start > 0)
        sums = arrays.empty(hidden.shape, "f32")
        head.multiply(dlogits, head.lm_head, sums, False)
        rows[at] = arrays.cast(sums, dtype)

    for chunk in head.chunks(arrays, counts):
        of_chunk(*chunk)
    return dhidden, dlm_head


def _counts(kept: Array) -> Array:
    """Which tokens count. A temperature that is none has left a NaN."""
    return kept[:, _RATE] != 0.0


#: The column of what is kept that holds what gaps are multiplied by, 0 where a token is masked.
_RATE = 4


def _writes_dlogits(
    arrays: Arrays,
    spec: str,
    shape: tuple[int, int, int],
    given: Mapping[str, Array | None],
    kept: Array,
    sent: _Sent,
) -> Callable[[Array, Array, slice], None]:
    """What enqueues the dlogits of such tokens' logits."""
    on = arrays.on
    plan = _of(spec, given, shape[1])
    targets = _Targets(arrays, plan, given["ids"], given.get("bias"), shape)
    max, grad_logp, by_sum, others, rates, entropy, by_entropy_sum, mean_gap = (kept[:, i] for i in range(COLUMNS))
    mask = _counts(kept)

    def beside(weight: Array, cotangent: Array | None) -> Array:
        of_loss = weight * (0.0 if sent[0] is None else arrays.cast(sent[0], "f64"))
        return of_loss if cotangent is None else of_loss + arrays.cast(cotangent, "f64").reshape(-1)

    one = on.ones_like(max)
    scales = [max, -beside(grad_logp, sent[1]) * by_sum, others, one, beside(entropy, sent[2]) * by_entropy_sum, mean_gap]
    columns = [on.where(mask, scale, 0.0) for scale in scales]
    nothing = on.zeros_like(max)
    to = {"scales": arrays.cast(on.stack([*columns, nothing, nothing], -1), "f32")}
    own = rates if "rate" in plan["inputs"] else None

    def write(logits: Array, dlogits: Array, at: slice) -> None:
        _enqueue(arrays, spec, "dlogits", sent[2] is not None, logits, targets, plan, own, to, dlogits, at)

    return write
