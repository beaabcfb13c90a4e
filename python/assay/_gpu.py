"""The loss on a GPU: a handful of kernels, enqueued on the framework's stream one after another (`crates/programs/src/gpu/operation.rs`). The
framework gives them arrays and memory and computes nothing itself, but for the products of an LM head (`Head`).

Nothing waits for the device but what is settled before there are logits, for specs that settle something (`_Batch.of`). So nothing can
be refused for what a tensor on the device holds: a token with an invalid mask, id or sequence has a loss that is NaN.

Which framework it is, `Arrays` knows: `assay.torch` has PyTorch's, the tests have NumPy's, whose memory a driver without a device takes.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

from . import _native
from ._errors import ProblemError
from ._native import Spec
from ._tape import Array

#: Floats of a token's statistics, and of its record.
COLUMNS = 8
_METRICS = 6
_FLOATS = ("f32", "bf16", "f16", "f64")
_INTEGERS = ("i64", "i32")


#: Numbers, or what makes them.
Numbers: TypeAlias = tuple[float, ...] | Callable[[], tuple[float, ...]]


class Arrays(Protocol):
    """A framework's arrays on one device, by what is done with them. Dtypes are named as the package does: `f32`, `i64`, `bool`, …"""

    @property
    def on(self) -> Any:
        """The framework's module, such as `torch`."""
    @property
    def place(self) -> tuple[int, int]:
        """The device's number, and the stream that is current there."""
    @property
    def is_capturing(self) -> bool:
        """Whether what is enqueued on that stream becomes a graph, to run later."""
    def full(self, shape: Sequence[int], value: float, dtype: str) -> Array: ...
    def empty(self, shape: Sequence[int], dtype: str) -> Array: ...
    def ends(self, count: int, length: int) -> Array:
        """`0, length, 2·length, … count·length`, i32."""
    def constant(self, numbers: Numbers, dtype: str, name: str = "") -> Array:
        """An array that holds these numbers at its first use and is kept as long as the process runs: the same one for the same name, or
        for the same numbers without a name."""
    def cast(self, array: Array, dtype: str) -> Array: ...
    def dense(self, array: Array) -> Array:
        """The array, or a copy, whose elements follow each other."""
    def dtype(self, array: Array) -> str:
        """Returns the name of the dtype: the package's, or the framework's for a dtype that the package does not have."""
    def strides(self, array: Array) -> Sequence[int]:
        """Returns the strides in elements."""
    def address(self, array: Array) -> int: ...
    def upload(self, array: Any) -> Array:
        """A list of integers, or an array in the host's memory, on the device; nothing is waited for."""
    def download(self, array: Array) -> Any:
        """On the host, once the device is done with it."""


class Evaluated(NamedTuple):
    """The results of `loss`, f32."""

    loss: Array
    logp: Array
    entropy: Array
    token_loss: Array
    #: Clip low, clip high, either, KL, entropy and ratio: means over the tokens that count.
    metrics: Array
    #: The record of each token that `gradient` and `head_gradient` need: see `_kept`.
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
        """The shape of the logits, `(B, T, V)`."""
        batch, tokens, _ = self.hidden.shape
        return int(batch), int(tokens), int(self.lm_head.shape[0])

    def chunks(self, arrays: Arrays, counted: Array) -> Iterator[tuple[slice, Array, Array]]:
        """Iterates over chunks of tokens: the slice of tokens, their hidden states `[n,H]`, 0 where the tokens do not count, and logits
        `[1,n,V]`, whose memory the next chunk reuses."""
        batch, tokens, vocab = self.shape
        rows, own = batch * tokens, arrays.dtype(self.hidden)
        dtype = own if self.rounds_logits else "f32"
        # Products of dlogits are taken of dlogits in the dtype of hidden: a copy, where that is another.
        size = _SIZES[dtype] + (_SIZES[own] if dtype != own else 0)
        chunk = min(rows, self.chunk or max(1, _CHUNK_BYTES // (size * vocab)))
        room = arrays.empty((chunk, vocab), dtype)
        for start in range(0, rows, chunk):
            at = slice(start, min(start + chunk, rows))
            hidden = arrays.on.where(counted[at, None] != 0.0, self.hidden.reshape(rows, -1)[at], 0)
            logits = room[: at.stop - start]
            self.multiply(hidden, self.lm_head.T, logits, False)
            yield at, hidden, logits[None]


# ---- what is checked before anything is launched


@functools.lru_cache(maxsize=256)
def _plan(spec: str, width: int | None) -> dict[str, Any]:
    """Returns the plan for a batch padded to `width`, or for a packed one if that is None."""
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
    """Returns the spec with a constant normaliser that differs from the one of its KL penalty, and that constant. The loss is then
    divided by the number that the caller gives."""
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




# ---- memory of the kernels

#: An array of the device: its address, and its bytes.
_Space: TypeAlias = tuple[int, int]


def _padded(floats: int) -> int:
    """So many floats, or a few more, that what follows them begins at a multiple of 16 bytes."""
    return floats + -floats % 4


class _Room:
    """Arrays of 4-byte elements in one allocation, each at a multiple of 16 bytes."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes, self._starts, self.size = dict(sizes), {}, 0
        for name, size in sizes.items():
            self._starts[name] = self.size
            self.size += _padded(size)

    def spaces(self, address: int) -> dict[str, _Space]:
        return {name: (address + 4 * start, 4 * self._sizes[name]) for name, start in self._starts.items()}

    def of(self, array: Array, name: str) -> Array:
        """One of them, as a view of the allocation."""
        return array[self._starts[name] : self._starts[name] + self._sizes[name]]


def _kept(spec: str, tokens: int, vocab: int) -> _Room:
    """The memory that a forward pass leaves for its backward pass: the record of each token, whether it counts, what the kernels that read logits
    are given of it, and the cotangent of the loss that dlogits were made for, if they were."""
    sizes = {"record": COLUMNS * tokens, "counted": tokens, "targets": tokens, "rate": tokens, "target_bias": tokens, "used": 1}
    return _Room({**sizes, "column_bias": vocab} if _plan(spec, 1)["by_column"] else sizes)


def kept_size(spec: str, tokens: int, vocab: int) -> int:
    """Floats of what is kept of `[tokens, vocab]` logits."""
    return _kept(spec, tokens, vocab).size


# ---- the batch except its logits


def _truths(arrays: Arrays, field: str, array: Array) -> Array:
    """Truth values in f32; the kernels find those that are neither 0 nor 1."""
    _expect_dtype(arrays, field, array, ("bool", *_INTEGERS, *_FLOATS))
    if arrays.dtype(array) == "f64":
        # What f32 would round to 0 or 1 is neither.
        array = arrays.on.where((array == 0) | (array == 1), array, math.nan)
    return arrays.dense(arrays.cast(array, "f32"))


def _column_biases(arrays: Arrays, plan: Mapping[str, Any], bias: Array | None, vocab: int) -> dict[str, Array]:
    """Returns by name, `[V]` f32: the `bias` of each vocabulary entry, if it has one, and the same with −∞ outside the support."""
    if plan["bias"] and bias is None:
        raise ProblemError(f"`bias`: not given, expected shape [{vocab}]: the spec has `logits.bias`")
    if not plan["by_column"]:
        return {}
    support = plan["support"]
    outside = _outside(arrays, support["vocab"], tuple(support["excluded_ids"]), vocab)
    if not plan["bias"]:
        return {"column_bias": outside}
    assert bias is not None
    _expect_dtype(arrays, "bias", bias, _FLOATS)
    _expect_shape("bias", bias, (vocab,), "[V] of the logits")
    # As `Columns` of crates/algebra/src/transform.rs: a bias of −∞ is no mark.
    own = arrays.on.clip(arrays.cast(bias, "f32"), _LEAST, None)
    return {"bias": own, "column_bias": own + outside}


#: The least f32.
_LEAST = -(2.0**128 - 2.0**104)


def _outside(arrays: Arrays, end: int | None, excluded: tuple[int, ...], vocab: int) -> Array:
    """`[V]`, f32: −∞ for the vocabulary entries outside the support, 0 for the others."""

    def numbers() -> tuple[float, ...]:
        marks = [0.0] * vocab
        for column in (*range(vocab if end is None else end, vocab), *(column for column in excluded if column < vocab)):
            marks[column] = -math.inf
        return tuple(marks)

    return arrays.constant(numbers, "f32", f"support {end} {excluded} {vocab}")


@dataclass(frozen=True)
class _Batch:
    """The arrays of a batch, as its kernels are given them."""

    spec: Spec
    plan: dict[str, Any]
    sequences: int
    #: Whether advantages, and temperatures, are each token's own.
    of_tokens: tuple[bool, bool]
    given: dict[str, Array]

    @classmethod
    def of(
        cls,
        arrays: Arrays,
        spec: str,
        shape: tuple[int, int, int],
        given: Mapping[str, Array | None],
        normalizer: Array | float | None,
    ) -> _Batch:
        """Creates the batch from the given arrays. If the spec rejects or weights tokens, or if sequences are given by `segment_ids`, the
        arrays are copied to the host, which waits for the device, and the kernel inputs are computed there."""
        plan, per_token = _of(spec, given, shape[1]), shape[:2]
        settled, ends = _settled(arrays, spec, plan, shape, given)
        mask, ids, advantages = given["mask"], given["ids"], given["advantages"]
        assert mask is not None and ids is not None and advantages is not None
        _expect_dtype(arrays, "ids", ids, _INTEGERS)
        _expect_shape("ids", ids, per_token, "[B,T] of the logits")
        _expect_shape("mask", mask, per_token, "[B,T] of the logits")
        if _packed(given):
            assert ends is not None
            _expect_ends(arrays, ends, per_token)
            sequences = int(ends.shape[0]) - 1
            if arrays.dtype(ends) == "i64":
                # What is too large for i32 stays so, as no end is.
                ends = arrays.on.clip(ends, -1, 2**31 - 1)
            ends = arrays.dense(arrays.cast(ends, "i32"))
        else:
            sequences, ends = shape[0], arrays.ends(*per_token)
        width = None if _packed(given) else shape[1]
        of_tokens = (_of_tokens(arrays, advantages, sequences, per_token, plan["token_advantages"], _packed(given)), False)
        inputs = {
            "sampled_ids": arrays.dense(arrays.cast(ids, "i64")),
            "mask": arrays.cast(arrays.upload(settled["mask"]), "f32") if "mask" in settled else _truths(arrays, "mask", mask),
            "advantages": arrays.dense(arrays.cast(advantages, "f32")),
            "cu_seqlens": ends,
            "extents": arrays.constant((per_token[0] * per_token[1], sequences, shape[2]), "i32"),
            "numbers": arrays.constant(tuple(_native.gpu_numbers(_read(spec), sequences, width)), "f32"),
            "normalizer": _number(arrays, 1.0 if normalizer is None else normalizer),
            **_column_biases(arrays, plan, given.get("bias"), shape[2]),
        }
        for name, source in plan["inputs"]:
            if name == "rate":
                temperature, each = _temperatures(arrays, given.get(source), sequences, per_token)
                inputs["temperature"], of_tokens = temperature, (of_tokens[0], each)
            elif name in settled:
                inputs[name] = arrays.cast(arrays.upload(settled[name]), "f32")
            else:
                inputs[name] = _input(arrays, source, given.get(source), per_token)
        return cls(spec=_read(spec), plan=plan, sequences=sequences, of_tokens=of_tokens, given=inputs)


def _settled(
    arrays: Arrays, spec: str, plan: Mapping[str, Any], shape: tuple[int, int, int], given: Mapping[str, Array | None]
) -> tuple[dict[str, Any], Array | None]:
    """Works out on the host what is known before there are logits, by name, and the ends of packed sequences."""
    ends, by_ids = given.get("cu_seqlens"), given.get("segment_ids") is not None
    if not plan["settles"] and not by_ids:
        return {}, ends
    if arrays.is_capturing:
        field, instead = ("segment_ids", "`cu_seqlens`") if by_ids else ("spec", "a spec without rejections and weights of the sampler")
        raise ProblemError(
            f"`{field}`: got what the host works out from the batch, in the capture of a CUDA graph; expected {instead}, or a call "
            "outside the capture"
        )
    on_host = {name: None if array is None else arrays.download(array) for name, array in given.items()}
    settled, of_ends = _native.gpu_settled(_read(spec), shape, on_host)
    return settled, None if of_ends is None else arrays.upload(of_ends)


def _number(arrays: Arrays, number: Array | float) -> Array:
    """A number in f32 on the device."""
    if isinstance(number, (int, float)):
        return arrays.constant((1.0,), "f32") if number == 1.0 else arrays.full((1,), number, "f32")
    return arrays.cast(number, "f32")


def _input(arrays: Arrays, field: str, array: Array | None, shape: tuple[int, int]) -> Array:
    if array is None:
        raise ProblemError(f"`{field}`: not given, expected shape {list(shape)}: the spec reads it")
    _expect_shape(field, array, shape, "[B,T] of the logits")
    if field == "selected":
        return _truths(arrays, field, array)
    _expect_dtype(arrays, field, array, _FLOATS)
    return arrays.dense(arrays.cast(array, "f32"))


def _temperatures(
    arrays: Arrays, array: Array | None, sequences: int, per_token: tuple[int, int]
) -> tuple[Array, bool]:
    """Temperatures, and whether each token has its own."""
    shape = list(per_token)
    if array is None:
        raise ProblemError(f"`temperature`: not given, expected shape {shape} because the spec has `temperature: given`")
    _expect_dtype(arrays, "temperature", array, _FLOATS)
    given = [int(extent) for extent in array.shape]
    if given not in (shape, [sequences], [sequences, 1]):
        raise ProblemError(f"`temperature`: got shape {given}, expected {shape} or {[sequences, 1]}")
    # One token a sequence is both; then a sequence's is the token's.
    return arrays.dense(arrays.cast(array, "f32")), given == shape


def _of_tokens(
    arrays: Arrays, advantages: Array, sequences: int, per_token: tuple[int, int], each: bool, is_packed: bool
) -> bool:
    """Whether each token has an advantage of its own, in `[B,T]` or, packed into one row, in `[N]`."""
    _expect_dtype(arrays, "advantages", advantages, _FLOATS)
    if tuple(advantages.shape) == (sequences,):
        return False
    if each and is_packed and tuple(advantages.shape) == per_token[1:]:
        return True
    if each:
        _expect_shape("advantages", advantages, per_token, "[B,T] of the logits, as the spec has `advantages: token`")
        return True
    meaning = "[S] of `cu_seqlens`" if per_token[0] == 1 and sequences != 1 else "[B] of the logits"
    _expect_shape("advantages", advantages, (sequences,), f"{meaning}, as the spec has `advantages: sequence`")
    raise AssertionError("it has another shape")


# ---- the kernels

#: Bytes of a row, of the arrays that have one a token and are read by the kernels that read logits.
_BYTES_OF_A_ROW = {
    "ids": 4,
    "rate": 4,
    "target_bias": 4,
    "logp_cotangent": 4,
    "entropy_cotangent": 4,
    "statistics": 4 * COLUMNS,
    "record": 4 * COLUMNS,
}


@dataclass
class _Kernels:
    """Enqueues the kernels of a loss on its arrays."""

    arrays: Arrays
    spec: Spec
    plan: Mapping[str, Any]
    dtype: str
    #: `(tokens, sequences, vocabulary)`
    extents: tuple[int, int, int]
    of_tokens: tuple[bool, bool]
    spaces: dict[str, _Space]
    #: Arrays without another owner: their memory must not be reused before the kernels are enqueued.
    held: list[Array] = field(default_factory=list)

    def give(self, **arrays: Array) -> None:
        """Gives arrays to the kernels that come, by the names of their parameters."""
        self.held.extend(arrays.values())
        for name, array in arrays.items():
            size = math.prod(int(extent) for extent in array.shape) * _BYTES[self.arrays.dtype(array)]
            self.spaces[name] = (self.arrays.address(array), size)

    def launch(self, kernel: str) -> None:
        """Enqueues a kernel around those that read logits."""
        self._enqueue(kernel, self.extents, self.spaces, (False, False, False))

    def launch_rows(
        self,
        kernel: str,
        arrays: Mapping[str, Array],
        at: slice = slice(None),
        sent: tuple[bool, bool, bool] = (False, False, False),
    ) -> None:
        """Enqueues a kernel on `[B,T,V]` arrays, logits and dlogits, at once where the rows of all sequences follow each other, else
        sequence by sequence. `at` are the tokens that they are of, where they are not of all."""
        first = next(iter(arrays.values()))
        batch, tokens, vocab = (int(extent) for extent in first.shape)
        strides = {name: _strides(self.arrays, name, array) for name, array in arrays.items()}
        pieces = 1 if batch == 1 or all(stride == tokens * vocab for stride in strides.values()) else batch
        rows, size = batch * tokens // pieces, _SIZES[self.dtype]
        by_row = {**_BYTES_OF_A_ROW, "tokens": 4 * self.plan["token_columns"]}
        for piece in range(pieces):
            start, spaces = (at.start or 0) + piece * rows, dict(self.spaces)
            for name, width in by_row.items():
                if name in spaces:
                    spaces[name] = (spaces[name][0] + start * width, rows * width)
            for name, array in arrays.items():
                address = self.arrays.address(array) + piece * strides[name] * size
                spaces[name] = (address, rows * vocab * size)
            self._enqueue(kernel, (rows, self.extents[1], vocab), spaces, sent)

    def _enqueue(
        self, kernel: str, extents: tuple[int, int, int], spaces: dict[str, _Space], sent: tuple[bool, bool, bool]
    ) -> None:
        _native.gpu_enqueue(self.spec, kernel, self.arrays.place, extents, self.dtype, self.of_tokens, sent, spaces)


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


#: Bytes of an element.
_BYTES = {"bool": 1, "i32": 4, "i64": 8, "f16": 2, "bf16": 2, "f32": 4, "f64": 8}


def _give_softmax(kernels: _Kernels) -> None:
    """Gives what the kernels that read logits need of the spec."""
    arrays = kernels.arrays
    name, numbers = kernels.plan["softmax_numbers"]
    kernels.give(columns=arrays.constant((kernels.extents[2],), "i32"))
    if numbers:
        kernels.give(**{name: arrays.constant(tuple(numbers), "f32")})


# ---- the two halves


def takes_one_pass(arrays: Arrays, spec: str, vocab: int, dtype: str) -> bool:
    """Whether the device makes dlogits in the forward pass, so that logits are read once: where one token decides its loss, and a row
    fits a cluster's shared memory."""
    return vocab > 0 and dtype in _SIZES and _takes_one_pass(spec, arrays.place[0], vocab, dtype)


@functools.lru_cache(maxsize=256)
def _takes_one_pass(spec: str, place: int, vocab: int, dtype: str) -> bool:
    return _native.gpu_takes_one_pass(_read(spec), place, vocab, dtype)


def _upstream(arrays: Arrays, spec: str) -> Array:
    """The cotangent of the loss that is likely: the last one that was sent, 1 at first."""
    return arrays.constant((1.0,), "f32", f"upstream {spec}")


def loss(
    arrays: Arrays,
    spec: str,
    logits: Array | Head,
    given: Mapping[str, Array | None],
    normalizer: Array | float | None,
    dlogits: Array | None = None,
) -> Evaluated:
    """The loss of a spec, as JSON, and what its gradient needs: the logits are read once, and nothing of their size is written but
    `dlogits`, if there are some, which may be the logits. With an LM head they are read a chunk at a time."""
    shape = _expect_head(arrays, logits) if isinstance(logits, Head) else _expect_logits(arrays, logits)
    batch, tokens, vocab = shape
    likely = _upstream(arrays, spec)
    if normalizer is not None:
        spec, of_spec = _normalized(spec)
        normalizer = normalizer / of_spec
    of = _Batch.of(arrays, spec, shape, given, normalizer)
    count, sequences = batch * tokens, of.sequences
    room = _kept(spec, count, vocab)
    kept = arrays.empty((room.size,), "f32")
    scratch = _Room({
        "counts": sequences + 1,
        "spans": 2 * (sequences + 1),
        "sums": COLUMNS * (sequences + 1),
        "statistics": COLUMNS * count,
        "tokens": of.plan["token_columns"] * count if dlogits is not None else 0,
        "numbers_of_kernel": of.plan["kernel_numbers"],
    })
    between = arrays.empty((scratch.size,), "f32")
    spaces = {**room.spaces(arrays.address(kept)), **scratch.spaces(arrays.address(between))}
    spaces["ids"] = spaces["targets"]
    dtype = _dtype_of(arrays, logits)
    kernels = _Kernels(arrays, of.spec, of.plan, dtype, (count, sequences, vocab), of.of_tokens, spaces)
    empty, per_token = functools.partial(arrays.empty, dtype="f32"), shape[:2]
    results = Evaluated(empty(()), empty(per_token), empty(per_token), empty(per_token), empty((_METRICS,)), kept)
    kernels.give(**of.given, upstream=likely)
    kernels.give(**{name: array for name, array in results._asdict().items() if name != "kept"})
    if "column_bias" in of.given:
        room.of(kept, "column_bias")[...] = of.given["column_bias"]
    kernels.launch("count")
    _read_logits(kernels, logits, dlogits, room.of(kept, "counted"))
    kernels.launch("losses")
    kernels.launch("sums")
    return results


def _dtype_of(arrays: Arrays, logits: Array | Head) -> str:
    """The dtype of the logits, also of those that a head makes."""
    if not isinstance(logits, Head):
        return arrays.dtype(logits)
    return arrays.dtype(logits.hidden) if logits.rounds_logits else "f32"


def _read_logits(kernels: _Kernels, logits: Array | Head, dlogits: Array | None, counted: Array) -> None:
    """Enqueues what reads the logits: statistics of their rows, and where dlogits are wanted these."""
    if dlogits is not None:
        kernels.launch("tokens")
        # Its numbers are those of the batch with one more, which the batch decides; the cotangent is this pass's copy.
        of_batch = {name: kernels.spaces[name] for name in ("numbers", "upstream")}
        kernels.spaces.update(numbers=kernels.spaces["numbers_of_kernel"], upstream=kernels.spaces["used"])
        kernels.launch_rows("one_pass", {"logits": logits, "dlogits": dlogits})
        kernels.spaces.update(of_batch)
        return
    _give_softmax(kernels)
    if isinstance(logits, Head):
        for at, _, chunk in logits.chunks(kernels.arrays, counted):
            kernels.launch_rows("statistics", {"logits": chunk}, at=at)
    else:
        kernels.launch_rows("statistics", {"logits": logits})


#: The cotangents of loss, logp and entropy, of which None is 0.
_Sent: TypeAlias = tuple[Array | None, Array | None, Array | None]


def gradient(
    arrays: Arrays,
    spec: str,
    logits: Array,
    dlogits: Array,
    given: Mapping[str, Array | None],
    kept: Array,
    sent: _Sent,
    made: bool = False,
) -> None:
    """Writes dlogits, elsewhere or over the logits, for what is sent: the logits are read once more, and each dlogit is rounded once.
    Where dlogits were `made` in the forward pass, for the cotangent that was likely, and it is the one that is sent, nothing is read or
    written."""
    kernels = _gradient_kernels(arrays, spec, _expect_logits(arrays, logits), arrays.dtype(logits), given, kept)
    flags = _give_cotangents(kernels, sent)
    unless_used = made and sent[0] is not None and flags == (False, False)
    kernels.give(upstream=_upstream(arrays, spec))
    kernels.launch_rows("dlogits", {"logits": logits, "dlogits": dlogits}, sent=(*flags, unless_used))


def multiply(
    arrays: Arrays, spec: str, dlogits: Array, given: Mapping[str, Array | None], kept: Array, loss: Array | None
) -> None:
    """Multiplies dlogits that the forward pass made by the cotangent of the loss over the one that was likely, where they differ: each
    is rounded once more."""
    kernels = _gradient_kernels(arrays, spec, _expect_logits(arrays, dlogits), arrays.dtype(dlogits), given, kept)
    _give_cotangents(kernels, (loss, None, None))
    kernels.give(upstream=_upstream(arrays, spec))
    kernels.launch_rows("multiply", {"dlogits_before": dlogits, "dlogits": dlogits})


def head_gradient(
    arrays: Arrays,
    spec: str,
    head: Head,
    given: Mapping[str, Array | None],
    kept: Array,
    sent: _Sent,
    asked: tuple[bool, bool] = (True, True),
) -> tuple[Array | None, Array | None]:
    """Computes dhidden `[B,T,H]`, f32 sums over V rounded once to the dtype of `hidden`, and dlm_head `[V,H]`, f32 sums over tokens, each
    where it is `asked` for. Each chunk's logits are made once more, and dlogits go over them. Products are taken of dlogits in the dtype
    of `hidden`: 16-bit ones are rounded to it."""
    shape = _expect_head(arrays, head)
    kernels = _gradient_kernels(arrays, spec, shape, _dtype_of(arrays, head), given, kept)
    flags = _give_cotangents(kernels, sent)
    dtype, counted = arrays.dtype(head.hidden), _kept(spec, shape[0] * shape[1], shape[2]).of(kept, "counted")
    dhidden = arrays.empty(head.hidden.shape, dtype) if asked[0] else None
    dlm_head = arrays.empty(head.lm_head.shape, "f32") if asked[1] else None
    rows = None if dhidden is None else dhidden.reshape(counted.shape[0], -1)

    def of_chunk(at: slice, hidden: Array, logits: Array) -> None:
        # What is made here is gone before the next chunk's.
        kernels.launch_rows("dlogits", {"logits": logits, "dlogits": logits}, at=at, sent=(*flags, False))
        dlogits = arrays.cast(logits[0], dtype)
        if dlm_head is not None:
            head.multiply(dlogits.T, hidden, dlm_head, at.start > 0)
        if rows is not None:
            sums = arrays.empty(hidden.shape, "f32")
            head.multiply(dlogits, head.lm_head, sums, False)
            rows[at] = arrays.cast(sums, dtype)

    for chunk in head.chunks(arrays, counted):
        of_chunk(*chunk)
    return dhidden, dlm_head


def _gradient_kernels(
    arrays: Arrays,
    spec: str,
    shape: tuple[int, int, int],
    dtype: str,
    given: Mapping[str, Array | None],
    kept: Array,
) -> _Kernels:
    """The kernels of a backward pass, with what its forward pass kept."""
    batch, tokens, vocab = shape
    plan = _of(spec, given, tokens)
    spaces = _kept(spec, batch * tokens, vocab).spaces(arrays.address(kept))
    spaces["ids"] = spaces["targets"]
    kernels = _Kernels(arrays, _read(spec), plan, dtype, (batch * tokens, batch, vocab), (False, False), spaces)
    _give_softmax(kernels)
    return kernels


def _give_cotangents(kernels: _Kernels, sent: _Sent) -> tuple[bool, bool]:
    """Gives the cotangents to the kernels, and says whether there are some of logp and of the entropy."""
    arrays = kernels.arrays
    loss = arrays.constant((0.0,), "f32") if sent[0] is None else arrays.cast(sent[0], "f32")
    kernels.give(loss_cotangent=loss)
    flags = []
    for name, cotangent in zip(("logp_cotangent", "entropy_cotangent"), sent[1:], strict=True):
        flags.append(cotangent is not None)
        if cotangent is not None:
            kernels.give(**{name: arrays.dense(arrays.cast(cotangent, "f32"))})
    return flags[0], flags[1]
