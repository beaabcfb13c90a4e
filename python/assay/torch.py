"""The GRPO loss for PyTorch: `grpo_loss`, `logp_and_entropy` and `gather_logp` without a loss, `cross_entropy`, and `divergence`.

    import assay, assay.torch

    spec = assay.spec("trl", beta=0.04)
    loss = assay.torch.grpo_loss(logits, ids, advantages, mask, old_logp, ref_logp, spec=spec).loss
    loss.backward()

No copy of the logits is made. On the CPU the kernel is the one that `assay` judges under the name `native`, on an NVIDIA GPU those of
`gpu-one-pass` and `gpu-two-pass`. The forward pass reads the logits once. The backward pass reads them once more and writes dlogits for
the cotangent that arrives, each rounded once. On a GPU of sm_90 and newer, the forward pass of a loss whose tokens do not depend on each
other writes dlogits too, for the cotangent of the step before; if the loss has that one again, the backward pass reads and writes nothing.

With hidden states and an LM head on the CPU, the forward pass computes their gradients, for the cotangent that the loss is likely to have.
If another one arrives, the backward pass computes them again, so that the result does not depend on it.

Notation as in the package: B sequences of T tokens over a vocabulary of V; H is the width of the hidden states. With `cu_seqlens` or
`segment_ids` S sequences are packed into one row of N tokens, `[1,N]`, or flat, `[N]`.
"""

import functools
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from . import _gpu, _native, _pool, _specs
from . import spec as _spec
from ._errors import ProblemError
from ._native import Spec
from ._torch_cross_entropy import cross_entropy
from ._torch_divergence import divergence

__all__ = ["GrpoLoss", "METRICS", "cross_entropy", "divergence", "empty_cache", "gather_logp", "grpo_loss", "logp_and_entropy", "trl_arguments"]

METRICS = ("clip_low", "clip_high", "clip_region", "kl_mean", "entropy_mean", "ratio_mean")
"""The names of `GrpoLoss.metrics`: means over the unmasked tokens, as trainers log them. Without a KL term `kl_mean` is 0."""


class GrpoLoss(NamedTuple):
    """The results of `grpo_loss`, in f32; masked tokens have 0.

        >>> import assay, assay.torch, torch
        >>> problem = next(assay.problems("trl", n=1, dtypes=["f32"], shapes=["2x3x7"]))
        >>> x = problem.torch()
        >>> logits = x.logits.clone().requires_grad_()
        >>> result = assay.torch.grpo_loss(logits, x.ids, x.advantages, x.mask, x.old_logp, spec="trl")
        >>> result.logp.shape, sorted(result.metrics)[:2]
        (torch.Size([2, 3]), ['clip_high', 'clip_low'])

    Loss, logp and entropy are differentiable; token_loss and metrics are detached.
    """

    loss: Tensor
    """The loss of the batch, a scalar."""
    logp: Tensor
    """Log-probability of each sampled token in nats, `[B,T]`; like the next two, `[N]` if ids are flat."""
    entropy: Tensor
    """Entropy of each token in nats, `[B,T]`."""
    token_loss: Tensor
    """Policy term plus `beta · kl` of each token, `[B,T]`, before mask and normaliser."""
    metrics: dict[str, Tensor]
    """The metrics as scalars, by the names of `METRICS`."""


# The arrays in addition to the logits, in the order of every operation.
_ARRAYS = (
    "ids",
    "mask",
    "advantages",
    "old_logp",
    "ref_logp",
    "rollout_logp",
    "rollout_weights",
    "token_weights",
    "selected",
    "bias",
    "cu_seqlens",
    "segment_ids",
    "dentropy",
    "temperature",
    "kept_ids",
)
#: The first of these must be given.
_REQUIRED = 3
#: The arrays that are not of tokens, or may be of sequences, `[S]`.
_NOT_OF_TOKENS = ("advantages", "bias", "cu_seqlens", "segment_ids")
_GIVEN = ", ".join(
    [*(f"Tensor {name}" for name in _ARRAYS[:_REQUIRED]), *(f"Tensor? {name}" for name in _ARRAYS[_REQUIRED:])]
    + ["Tensor? normalizer", "str spec"]
)
_HEAD = "Tensor hidden, Tensor lm_head, bool rounds_logits, int chunk"
# Which of their gradients are computed; an operation returns an empty tensor for the other.
_ASKED = "bool asks_hidden, bool asks_lm_head"
# What is differentiated for; None is 0.
_SENT = "Tensor? loss, Tensor? logp, Tensor? entropy"
_EVALUATED = "Tensor, Tensor, Tensor, Tensor, Tensor"


@functools.lru_cache(maxsize=64)
def _read(json: str) -> Spec:
    return Spec._of_json(json)


def _detached(given: tuple[Any, ...]) -> dict[str, Tensor | None]:
    """The arrays of an operation's last arguments. What is flat is one row."""
    flat = given[0].ndim == 1
    rows: dict[str, Tensor | None] = {}
    for name, array in zip(_ARRAYS, given[:-2], strict=True):
        if array is not None:
            of_tokens = array.ndim == (2 if name == "kept_ids" else 1) and name not in _NOT_OF_TOKENS
            array = array.detach()[None] if flat and of_tokens else array.detach()
        rows[name] = array
    return rows


def _given(given: tuple[Any, ...]) -> tuple[Spec, dict[str, Tensor | None], float | None]:
    """Spec, arrays and normaliser, of those arguments."""
    *_, normalizer, spec = given
    return _read(spec), _detached(given), None if normalizer is None else float(normalizer)


def _row(array: Tensor, given: tuple[Any, ...]) -> Tensor:
    """An array of all tokens, detached, with the axis of rows that flat ones lack."""
    return array.detach()[None] if given[0].ndim == 1 else array.detach()


def _tensors(arrays: Iterable[Any]) -> tuple[Tensor, ...]:
    return tuple(torch.from_dlpack(array) for array in arrays)


def _as_given(of_tokens: list[Tensor], given: tuple[Any, ...]) -> list[Tensor]:
    """`[1,N]` where flat tokens were given, as these."""
    return [array[0] for array in of_tokens] if given[0].ndim == 1 else of_tokens


def _evaluated(evaluated: tuple[Any, ...], given: tuple[Any, ...]) -> tuple[Tensor, ...]:
    loss, *arrays = evaluated
    *of_tokens, metrics = _tensors(arrays)
    return (torch.tensor(loss, dtype=torch.float32, device="cpu"), *_as_given(of_tokens, given), metrics)


def _fake_evaluated(logits: Tensor, vocab: int, given: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The outputs of logits, or of hidden states, as far as they are known without numbers."""
    ids = given[0]
    per_token = (ids.new_empty(ids.shape, dtype=torch.float32) for _ in range(3))
    metrics = ids.new_empty((len(METRICS),), dtype=torch.float32)
    kept = ids.new_empty((_gpu.kept_size(given[-1], ids.numel(), vocab) if _on_gpu(logits) else 0,), dtype=torch.float32)
    return (ids.new_empty((), dtype=torch.float32), *per_token, metrics, kept)


class _Constants:
    """Small arrays of numbers that kernels read, by what they hold. They are copied to a device once and kept, the last 4,096 of them, and
    for as long as the process runs those that a captured graph has the addresses of."""

    _MOST = 4096

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], Tensor] = {}
        self._captured: dict[tuple[Any, ...], Tensor] = {}

    def get(self, key: tuple[Any, ...], capturing: bool) -> Tensor | None:
        found = self._captured.get(key)
        if found is None and (found := self._kept.pop(key, None)) is not None:
            # The one that was used longest ago goes first: no kernel that is still to run has it.
            self._kept[key] = found
            if capturing:
                self._captured[key] = found
        return found

    def add(self, key: tuple[Any, ...], numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
        if len(self._kept) >= self._MOST:
            del self._kept[next(iter(self._kept))]
        host = torch.tensor(numbers, dtype=dtype, device="cpu")
        if device.type == "cuda":
            # On a separate stream the copy does not wait for work that the caller has enqueued; all streams may use it afterwards.
            stream = torch.cuda.Stream(device)
            with torch.cuda.stream(stream):
                self._kept[key] = host.to(device)
            stream.synchronize()
        else:
            self._kept[key] = host.to(device)
        return self._kept[key]


_CONSTANTS = _Constants()


class _LikelyCotangents:
    """The cotangent that the loss of hidden states is likely to have, by its spec: the one that its last two backward passes had, both
    of them the loss's alone; 1 at first. It decides when gradients are computed, and never which."""

    _MOST = 256

    def __init__(self) -> None:
        #: The last cotangent, None where logp or entropy had one too, and whether the one before was equal.
        self._last: dict[str, tuple[float | None, bool]] = {}

    def get(self, json: str) -> float | None:
        """Returns the cotangent, or None where none is likely."""
        last, again = self._last.get(json, (1.0, True))
        return last if again else None

    def note(self, json: str, sent: float | None) -> None:
        """Notes what a backward pass was given: the cotangent of the loss, or None where it was not the only one."""
        last, _ = self._last.pop(json, (1.0, True))
        while len(self._last) >= self._MOST:
            self._last.pop(next(iter(self._last)), None)
        self._last[json] = sent, sent is not None and sent == last


_LIKELY = _LikelyCotangents()


class _Tensors:
    """PyTorch's, on a GPU: see `_gpu.Arrays`."""

    on = torch
    _DTYPES = {
        "bool": torch.bool,
        "i32": torch.int32,
        "i64": torch.int64,
        "f16": torch.float16,
        "bf16": torch.bfloat16,
        "f32": torch.float32,
        "f64": torch.float64,
    }
    _NAMES = {dtype: name for name, dtype in _DTYPES.items()}

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def place(self) -> tuple[int, int]:
        return self._device.index, torch.cuda.current_stream(self._device).cuda_stream

    @property
    def is_capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def full(self, shape: Sequence[int], value: float, dtype: str) -> Tensor:
        return torch.full(tuple(shape), value, dtype=self._DTYPES[dtype], device=self._device)

    def empty(self, shape: Sequence[int], dtype: str) -> Tensor:
        return torch.empty(tuple(shape), dtype=self._DTYPES[dtype], device=self._device)

    def ends(self, count: int, length: int) -> Tensor:
        return torch.arange(0, count * length + 1, length, dtype=torch.int32, device=self._device)

    def constant(self, numbers: _gpu.Numbers, dtype: str, name: str = "") -> Tensor:
        # By their bytes: a NaN is no other number than itself.
        key = (self._device, dtype, name or struct.pack(f"{len(numbers)}d", *numbers))  # type: ignore[arg-type, misc]
        capturing = self.is_capturing
        found = _CONSTANTS.get(key, capturing)
        if found is not None:
            return found
        if capturing:
            raise ProblemError(
                "`logits`: got a loss or a shape for the first time in the capture of a CUDA graph, expected one of which a step was "
                "made before: what its kernels read is copied to the device there"
            )
        return _CONSTANTS.add(key, numbers() if callable(numbers) else numbers, self._DTYPES[dtype], self._device)

    def cast(self, array: Tensor, dtype: str) -> Tensor:
        return array.to(self._DTYPES[dtype])

    def dense(self, array: Tensor) -> Tensor:
        return array.contiguous()

    def dtype(self, array: Tensor) -> str:
        return self._NAMES.get(array.dtype, str(array.dtype))

    def strides(self, array: Tensor) -> Sequence[int]:
        return tuple(array.stride())

    def address(self, array: Tensor) -> int:
        return int(array.data_ptr())

    def upload(self, array: Any) -> Tensor:
        on_host = torch.tensor(array) if isinstance(array, list) else torch.from_dlpack(array)
        return on_host.to(self._device, non_blocking=True)

    def download(self, array: Tensor) -> Tensor:
        return array.cpu()


def _multiply(a: Tensor, b: Tensor, out: Tensor, adds: bool) -> None:
    """Multiplies matrices as `_gpu.Head.multiply` requires."""
    wider = {} if out.dtype == a.dtype else {"out_dtype": out.dtype}
    torch.addmm(out, a, b, beta=int(adds), out=out, **wider)


def _on_gpu(tensor: Tensor) -> bool:
    return bool(tensor.is_cuda)


def _op(name: str, schema: str, devices: Sequence[str]) -> Any:
    return torch.library.custom_op(f"assay::{name}", mutates_args=(), device_types=devices, schema=schema)


_LOGITS = ("cpu", "cuda")


def _loss_of(logits: Tensor, given: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The outputs of `_loss`: the last is what the backward pass needs of each token on a GPU, nothing on the CPU."""
    if _on_gpu(logits):
        return _loss_on_gpu(logits.device, _row(logits, given), given)
    spec, arrays, normalizer = _given(given)
    return *_evaluated(_native.op_loss(spec, _row(logits, given), arrays, normalizer), given), _nothing_kept()


def _loss_on_gpu(
    device: torch.device, logits: Tensor | _gpu.Head, given: tuple[Any, ...], dlogits: Tensor | None = None
) -> tuple[Tensor, ...]:
    *_, of_batch, json = given
    # A number of the host's goes with the launch.
    arrays = _Tensors(device)
    if of_batch is not None and not _on_gpu(of_batch):
        of_batch = _number_of_host(float(of_batch), arrays.is_capturing)
    loss, *of_tokens, metrics, kept = _gpu.loss(arrays, json, logits, _detached(given), of_batch, dlogits)
    return loss, *_as_given(of_tokens, given), metrics, kept


def _number_of_host(normalizer: float, capturing: bool) -> float:
    if not 0 < normalizer < math.inf:
        raise ProblemError(f"`normalizer`: got {normalizer:g}, expected a finite number > 0")
    if capturing:
        raise ProblemError(
            "`normalizer`: got a number of the host's in the capture of a CUDA graph, which would have it at every replay; expected a "
            "tensor on the device"
        )
    return normalizer


def _nothing_kept() -> Tensor:
    return torch.empty((0,), dtype=torch.float32, device="cpu")


def _place_for_dlogits(logits: Tensor, late: int | None = None) -> Tensor:
    """Memory for dlogits on a GPU: dense, but where rows begin within the blocks of 16 bytes that kernels read. There dlogits lie in
    their blocks as the logits do in theirs, which begin `late` elements into one; None: as their address says."""
    size, strides = logits.element_size(), _strides_of_dlogits(logits)
    if logits.shape[-1] * size % 16 == 0:
        return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if late is None:
        late = logits.data_ptr() % 16 // size
    last = sum((extent - 1) * stride for extent, stride in zip(logits.shape, strides, strict=True))
    room = torch.empty((late + last + 1,), dtype=logits.dtype, device=logits.device)
    return room.as_strided(logits.shape, strides, late)


def _strides_of_dlogits(logits: Tensor) -> tuple[int, ...]:
    dense = [math.prod(logits.shape[axis + 1 :]) for axis in range(logits.ndim)]
    if logits.shape[-1] * logits.element_size() % 16 == 0:
        return tuple(dense)
    # Rows that lie over one another, as those of an expanded tensor, have a gradient each, which begins as far into a block.
    of_block = 16 // logits.element_size()
    return tuple(
        own + (stride - own) % of_block if extent > 1 and stride < own else stride
        for extent, stride, own in zip(logits.shape, logits.stride(), dense, strict=True)
    )


def _gradient_of(
    logits: Tensor, dlogits: Tensor | None, kept: Tensor, sent: tuple[Tensor | None, ...], given: tuple[Any, ...]
) -> None:
    """Writes dlogits, over the logits where these are None."""
    loss = sent[0]
    logp, entropy = (None if cotangent is None else _row(cotangent, given) for cotangent in sent[1:])
    rows, over = _row(logits, given), None if dlogits is None else _row(dlogits, given)
    if _on_gpu(logits):
        cotangents = (None if loss is None else loss.detach(), logp, entropy)
        _gpu.gradient(
            _Tensors(logits.device), given[-1], rows, rows if over is None else over, _detached(given), kept, cotangents
        )
        return
    spec, arrays, normalizer = _given(given)
    number = 0.0 if loss is None else float(loss)
    _native.op_gradient(spec, rows, over, arrays, normalizer, number, logp, entropy)


@_op("grpo_loss", f"(Tensor logits, {_GIVEN}) -> ({_EVALUATED}, Tensor)", _LOGITS)
def _loss(logits: Tensor, *given: Any) -> tuple[Tensor, ...]:
    return _loss_of(logits, given)


@_op("grpo_loss_gradient", f"({_SENT}, Tensor kept, Tensor logits, {_GIVEN}) -> Tensor", _LOGITS)
def _gradient(
    loss: Tensor | None, logp: Tensor | None, entropy: Tensor | None, kept: Tensor, logits: Tensor, *given: Any
) -> Tensor:
    dlogits = _place_for_dlogits(logits) if _on_gpu(logits) else _pool.empty(logits.shape, logits.dtype)
    _gradient_of(logits, dlogits, kept, (loss, logp, entropy), given)
    return dlogits


def _head(hidden: Tensor, lm_head: Tensor, rounds_logits: bool, chunk: int, given: tuple[Any, ...]) -> tuple[Tensor, Tensor, bool, int]:
    """The first arguments of an operation with a head, as kernels read them."""
    return _row(hidden, given).contiguous(), lm_head.detach(), rounds_logits, chunk


def _gradients_as_given(gradients: tuple[Any, Any], hidden: Tensor, lm_head: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients that were asked for, in the shapes and dtypes of hidden states and head."""
    dhidden, dlm_head = (None if array is None else torch.from_dlpack(array) for array in gradients)
    return (
        None if dhidden is None else dhidden.view(hidden.shape),
        None if dlm_head is None else dlm_head.to(lm_head.dtype),
    )


@_op("grpo_loss_of_head", f"({_HEAD}, {_GIVEN}) -> ({_EVALUATED}, Tensor)", _LOGITS)
def _head_loss(hidden: Tensor, lm_head: Tensor, rounds_logits: bool, chunk: int, *given: Any) -> tuple[Tensor, ...]:
    head = _head(hidden, lm_head, rounds_logits, chunk, given)
    if _on_gpu(hidden):
        return _loss_on_gpu(hidden.device, _gpu.Head(*head, _multiply), given)
    spec, arrays, normalizer = _given(given)
    return *_evaluated(_native.op_head_loss(spec, head, arrays, normalizer), given), _nothing_kept()


@_op("grpo_loss_of_head_gradient", f"({_SENT}, Tensor kept, {_ASKED}, {_HEAD}, {_GIVEN}) -> (Tensor, Tensor)", _LOGITS)
def _head_gradient(
    loss: Tensor | None,
    logp: Tensor | None,
    entropy: Tensor | None,
    kept: Tensor,
    asks_hidden: bool,
    asks_lm_head: bool,
    hidden: Tensor,
    lm_head: Tensor,
    rounds_logits: bool,
    chunk: int,
    *given: Any,
) -> tuple[Tensor, Tensor]:
    head, asked = _head(hidden, lm_head, rounds_logits, chunk, given), (asks_hidden, asks_lm_head)
    of_logp, of_entropy = (None if cotangent is None else _row(cotangent, given) for cotangent in (logp, entropy))
    gradients: tuple[Any, Any]
    if _on_gpu(hidden):
        sent = (None if loss is None else loss.detach(), of_logp, of_entropy)
        of_head = _gpu.Head(*head, _multiply)
        gradients = _gpu.head_gradient(_Tensors(hidden.device), given[-1], of_head, _detached(given), kept, sent, asked)
    else:
        spec, arrays, normalizer = _given(given)
        number = 0.0 if loss is None else float(loss)
        _LIKELY.note(given[-1], number if logp is None and entropy is None else None)
        gradients = _native.op_head_gradient(spec, head, asked, arrays, normalizer, number, of_logp, of_entropy)
    return _or_empty(_gradients_as_given(gradients, hidden, lm_head), hidden, lm_head)


def _or_empty(gradients: tuple[Tensor | None, Tensor | None], hidden: Tensor, lm_head: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients as an operation returns them: an empty tensor for None."""
    dhidden, dlm_head = gradients
    return hidden.new_empty(0) if dhidden is None else dhidden, lm_head.new_empty(0) if dlm_head is None else dlm_head


@_loss.register_fake
def _(logits: Tensor, *given: Any) -> tuple[Tensor, ...]:
    return _fake_evaluated(logits, logits.shape[-1], given)


@_gradient.register_fake
def _(
    loss: Tensor | None, logp: Tensor | None, entropy: Tensor | None, kept: Tensor, logits: Tensor, *given: Any
) -> Tensor:
    # Memory of PyTorch's begins with a block of 16 bytes: where in one the logits begin is said by their offset.
    late = logits.storage_offset() % (16 // logits.element_size())
    return _place_for_dlogits(logits, late) if _on_gpu(logits) else logits.new_empty(logits.shape)


@_head_loss.register_fake
def _(hidden: Tensor, lm_head: Tensor, rounds_logits: bool, chunk: int, *given: Any) -> tuple[Tensor, ...]:
    return _fake_evaluated(hidden, lm_head.shape[0], given)


@_head_gradient.register_fake
def _(
    loss: Tensor | None,
    logp: Tensor | None,
    entropy: Tensor | None,
    kept: Tensor,
    asks_hidden: bool,
    asks_lm_head: bool,
    hidden: Tensor,
    lm_head: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    return _empty_gradients(asks_hidden, asks_lm_head, hidden, lm_head)


def _empty_gradients(asks_hidden: bool, asks_lm_head: bool, hidden: Tensor, lm_head: Tensor) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape if asks_hidden else 0), lm_head.new_empty(lm_head.shape if asks_lm_head else 0)


# How many arguments the gradient is of: the logits, or hidden states and head. The rest have none.
def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs), output[-1])
    ctx.rest = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.mark_non_differentiable(*output[3:])
    ctx.set_materialize_grads(False)


def _arguments(tensors: Sequence[Tensor | None], ctx: Any) -> list[Any]:
    """An operation's arguments: those that are tensors were saved, once unpacked; a checkpoint unpacks them no second time."""
    return [x if x is not None else rest for x, rest in zip(tensors, ctx.rest, strict=True)]


#: A cotangent: None where an output is not used.
_Sent: TypeAlias = Tensor | None


def _backward(ctx: Any, loss: _Sent, logp: _Sent, entropy: _Sent, *detached: _Sent) -> tuple[Tensor | None, ...]:
    *tensors, kept = ctx.saved_tensors
    return (_gradient(loss, logp, entropy, kept, *_arguments(tensors, ctx)), *[None] * (len(tensors) - 1))


def _head_backward(ctx: Any, loss: _Sent, logp: _Sent, entropy: _Sent, *detached: _Sent) -> tuple[Tensor | None, ...]:
    *tensors, kept = ctx.saved_tensors
    asked = ctx.needs_input_grad[:2]
    gradients = _head_gradient(loss, logp, entropy, kept, *asked, *_arguments(tensors, ctx))
    return (*_asked(gradients, asked), *[None] * (len(tensors) - 2))


def _asked(gradients: Sequence[Tensor | None], asked: Sequence[bool]) -> list[Tensor | None]:
    return [gradient if is_asked else None for gradient, is_asked in zip(gradients, asked, strict=True)]


_loss.register_autograd(_backward, setup_context=_setup)
_head_loss.register_autograd(_head_backward, setup_context=_setup)


@_op("gather_logp", "(Tensor logits, Tensor ids, Tensor mask, str spec) -> Tensor", ("cpu",))
def _gather(logits: Tensor, ids: Tensor, mask: Tensor, spec: str) -> Tensor:
    return torch.from_dlpack(_native.op_gather_logp(_read(spec), logits.detach(), ids, mask))


@_op("gather_logp_gradient", "(Tensor dlogp, Tensor logits, Tensor ids, Tensor mask, str spec) -> Tensor", ("cpu",))
def _gather_gradient(dlogp: Tensor, logits: Tensor, ids: Tensor, mask: Tensor, spec: str) -> Tensor:
    dlogits = _pool.empty(logits.shape, logits.dtype)
    _native.op_gather_logp_gradient(_read(spec), logits.detach(), dlogits, ids, mask, dlogp.detach().contiguous())
    return dlogits


@_op("gather_logp_of_head", f"({_HEAD}, Tensor ids, Tensor mask, str spec) -> Tensor", ("cpu",))
def _head_gather(
    hidden: Tensor, lm_head: Tensor, rounds_logits: bool, chunk: int, ids: Tensor, mask: Tensor, spec: str
) -> Tensor:
    head = (hidden.detach().contiguous(), lm_head.detach(), rounds_logits, chunk)
    return torch.from_dlpack(_native.op_head_gather_logp(_read(spec), head, ids, mask))


@_op(
    "gather_logp_of_head_gradient",
    f"(Tensor dlogp, {_ASKED}, {_HEAD}, Tensor ids, Tensor mask, str spec) -> (Tensor, Tensor)",
    ("cpu",),
)
def _head_gather_gradient(
    dlogp: Tensor,
    asks_hidden: bool,
    asks_lm_head: bool,
    hidden: Tensor,
    lm_head: Tensor,
    rounds_logits: bool,
    chunk: int,
    ids: Tensor,
    mask: Tensor,
    spec: str,
) -> tuple[Tensor, Tensor]:
    head = (hidden.detach().contiguous(), lm_head.detach(), rounds_logits, chunk)
    sent, asked = dlogp.detach().contiguous(), (asks_hidden, asks_lm_head)
    gradients = _native.op_head_gather_logp_gradient(_read(spec), head, asked, ids, mask, sent)
    return _or_empty(_gradients_as_given(gradients, hidden, lm_head), hidden, lm_head)


@_gather.register_fake
def _(logits: Tensor, ids: Tensor, mask: Tensor, spec: str) -> Tensor:
    return ids.new_empty(ids.shape, dtype=torch.float32)


@_gather_gradient.register_fake
def _(dlogp: Tensor, logits: Tensor, ids: Tensor, mask: Tensor, spec: str) -> Tensor:
    return logits.new_empty(logits.shape)


@_head_gather.register_fake
def _(
    hidden: Tensor, lm_head: Tensor, rounds_logits: bool, chunk: int, ids: Tensor, mask: Tensor, spec: str
) -> Tensor:
    return ids.new_empty(ids.shape, dtype=torch.float32)


@_head_gather_gradient.register_fake
def _(
    dlogp: Tensor, asks_hidden: bool, asks_lm_head: bool, hidden: Tensor, lm_head: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    return _empty_gradients(asks_hidden, asks_lm_head, hidden, lm_head)


def _setup_gather(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs))
    ctx.rest = [None if isinstance(x, Tensor) else x for x in inputs]


def _gather_backward(ctx: Any, dlogp: Tensor) -> tuple[Tensor | None, ...]:
    inputs = _arguments(ctx.saved_tensors, ctx)
    return (_gather_gradient(dlogp, *inputs), *[None] * (len(inputs) - 1))


def _head_gather_backward(ctx: Any, dlogp: Tensor) -> tuple[Tensor | None, ...]:
    inputs, asked = _arguments(ctx.saved_tensors, ctx), ctx.needs_input_grad[:2]
    return (*_asked(_head_gather_gradient(dlogp, *asked, *inputs), asked), *[None] * (len(inputs) - 2))


_gather.register_autograd(_gather_backward, setup_context=_setup_gather)
_head_gather.register_autograd(_head_gather_backward, setup_context=_setup_gather)


_TWICE = "grpo_loss: got a second backward pass with `inplace=True`, expected one: the logits are dlogits by now"


class _NoFurther(torch.autograd.Function):
    """Dlogits that have no gradient of their own. They hang on the logits: whoever asks for that of the logits comes by here, also where
    the cotangents had none, as `once_differentiable` would not notice."""

    @staticmethod
    def forward(ctx: Any, dlogits: Tensor, logits: Tensor) -> Tensor:
        return dlogits

    @staticmethod
    def backward(ctx: Any, sent: Tensor) -> tuple[None, None]:
        raise RuntimeError("grpo_loss: got a gradient of its gradient to make, expected none: dlogits have no derivative")


def _once(dlogits: Tensor, logits: Tensor) -> Tensor:
    """Dlogits, as a backward pass returns them."""
    return _NoFurther.apply(dlogits, logits) if torch.is_grad_enabled() else dlogits


class _InPlace(torch.autograd.Function):
    """The loss with dlogits written over the logits, in the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, *given: Any) -> tuple[Tensor, ...]:
        outputs = _loss_of(logits, given)
        ctx.save_for_backward(logits, outputs[-1])
        ctx.given, ctx.done = given, False
        ctx.mark_non_differentiable(*outputs[3:])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, loss: _Sent, logp: _Sent, entropy: _Sent, *detached: _Sent) -> tuple[Tensor | None, ...]:
        if ctx.done:
            raise RuntimeError(_TWICE)
        logits, kept = ctx.saved_tensors
        _gradient_of(logits, None, kept, (loss, logp, entropy), ctx.given)
        ctx.done = True
        # Autograd then refuses a later backward pass of any other operation that saved the logits.
        torch.autograd.graph.increment_version(logits)
        return (_once(logits.detach(), logits), *[None] * len(ctx.given))


class _OnePass(torch.autograd.Function):
    """The loss with dlogits made in the forward pass, apart from the logits or over them: for the cotangent that the loss had at the last
    step. If it has another one, the backward pass makes dlogits again, or multiplies them where the logits are gone."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, inplace: bool, *given: Any) -> tuple[Tensor, ...]:
        dlogits = logits.detach() if inplace else _place_for_dlogits(logits)
        outputs = _loss_on_gpu(logits.device, _row(logits, given), given, _row(dlogits, given))
        if inplace:
            # Autograd then refuses a later backward pass of any other operation that saved the logits.
            torch.autograd.graph.increment_version(logits)
        # Dlogits beside what says for which cotangent: a checkpoint runs this again and has both of its second run. What the caller
        # writes to dlogits later is no change to what was saved, as `.data` of both counts its own.
        ctx.save_for_backward(logits, outputs[-1], None if inplace else dlogits.data)
        ctx.given, ctx.inplace, ctx.is_made = given, inplace, True
        ctx.mark_non_differentiable(*outputs[3:])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, loss: _Sent, logp: _Sent, entropy: _Sent, *detached: _Sent) -> tuple[Tensor | None, ...]:
        logits, kept, dlogits = ctx.saved_tensors
        # The caller may write to them: another backward pass makes its own.
        is_made, ctx.is_made = ctx.is_made, False
        given = ctx.given
        arrays, named = _Tensors(logits.device), _detached(given)
        of_logp, of_entropy = (None if cotangent is None else _row(cotangent, given) for cotangent in (logp, entropy))
        sent = (None if loss is None else loss.detach(), of_logp, of_entropy)
        if ctx.inplace:
            _expect_loss_alone(is_made, sent[1:])
            _gpu.multiply(arrays, given[-1], _row(logits, given), named, kept, sent[0])
            torch.autograd.graph.increment_version(logits)
            return (_once(logits.detach(), logits), *[None] * (1 + len(given)))
        dlogits = dlogits.data if is_made else _place_for_dlogits(logits)
        _gpu.gradient(arrays, given[-1], _row(logits, given), _row(dlogits, given), named, kept, sent, made=is_made)
        return (_once(dlogits, logits), *[None] * (1 + len(given)))


class _HeadFirst(torch.autograd.Function):
    """The loss of hidden states and head on the CPU with their gradients made in the forward pass, for the cotangent `scale` of the loss:
    each chunk's logits are made once. If other cotangents arrive, the backward pass makes the gradients again, as `_head_gradient`."""

    @staticmethod
    def forward(ctx: Any, scale: float, hidden: Tensor, lm_head: Tensor, rounds_logits: bool, chunk: int, *given: Any) -> tuple[Tensor, ...]:
        head, asked = _head(hidden, lm_head, rounds_logits, chunk, given), ctx.needs_input_grad[1:3]
        spec, arrays, normalizer = _given(given)
        evaluated, gradients = _native.op_head_loss_and_gradient(spec, head, asked, arrays, normalizer, scale)
        outputs = (*_evaluated(evaluated, given), _nothing_kept())
        _setup(ctx, (hidden, lm_head, rounds_logits, chunk, *given), outputs)
        # Not among the saved tensors: they are gone after the first backward pass, whose caller may write to what it was given.
        ctx.scale, ctx.made = scale, [_gradients_as_given(gradients, hidden, lm_head)]
        return outputs

    @staticmethod
    def backward(ctx: Any, loss: _Sent, logp: _Sent, entropy: _Sent, *detached: _Sent) -> tuple[Tensor | None, ...]:
        # Of what was written to since, autograd says so here, also if the gradients that were made do not depend on it any more.
        *tensors, kept = ctx.saved_tensors
        arguments, asked = _arguments(tensors, ctx), ctx.needs_input_grad[1:3]
        made = ctx.made.pop() if ctx.made else None
        if made is not None and logp is None and entropy is None and _is_number(loss, ctx.scale):
            _LIKELY.note(arguments[-1], ctx.scale)
            gradients = [None if gradient is None else _once(gradient, of) for gradient, of in zip(made, arguments, strict=False)]
        else:
            made = None  # Its memory is free before others are made.
            gradients = _asked(_head_gradient(loss, logp, entropy, kept, *asked, *arguments), asked)
        return (None, *gradients, *[None] * (len(arguments) - 2))


def _scale_of_gradients(hidden: Tensor, lm_head: Tensor, json: str, loss_scale: float | None) -> float | None:
    """The cotangent of the loss for which the forward pass makes the gradients of hidden states and head; None: it makes none."""
    if torch.compiler.is_compiling() or _on_gpu(hidden):
        return None
    if not (torch.is_grad_enabled() and (hidden.requires_grad or lm_head.requires_grad)):
        return None
    # What traces sees one operation, with a backward pass that does not depend on a number.
    if any(type(x) not in (Tensor, torch.nn.Parameter) for x in (hidden, lm_head)) or _is_observed():
        return None
    scale = _LIKELY.get(json) if loss_scale is None else loss_scale
    # f32, as the loss and its cotangent.
    return None if scale is None else _rounded_to_f32(scale) or None


def _rounded_to_f32(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float32, device="cpu"))


def _is_number(cotangent: Tensor | None, number: float) -> bool:
    """Whether a cotangent of the loss is this number. Several at once, as of `is_grads_batched`, are not."""
    if cotangent is None or torch._C._functorch.is_batchedtensor(cotangent) or torch._C._functorch.is_legacy_batchedtensor(cotangent):
        return False
    return float(cotangent.detach()) == number


def _is_observed() -> bool:
    """Whether something other than autograd sees operations or what they save. A checkpoint does: it runs the forward pass twice, and
    gradients of the first run would be for nothing."""
    saves_elsewhere = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return saves_elsewhere or torch._C._len_torch_dispatch_stack() > 0


def _expect_loss_alone(is_made: bool, beside: tuple[Tensor | None, ...]) -> None:
    """Checks that dlogits in the place of logits can follow the cotangents."""
    if not is_made:
        raise RuntimeError(_TWICE)
    for name, cotangent in zip(("logp", "entropy"), beside, strict=True):
        if cotangent is not None:
            raise ProblemError(
                f"`inplace`: got True for a gradient through `{name}`, expected one through `loss` alone, or `inplace=False`: on this "
                "GPU the forward pass has written dlogits over the logits"
            )


def _makes_dlogits_first(logits: Tensor, json: str, inplace: bool) -> bool:
    """Whether the forward pass makes dlogits."""
    if inplace and logits.dtype == torch.float16:
        # What is less than 6e-8 for the last loss's cotangent would be 0 for this one's too: a scaler's, or another normalizer's.
        return False
    if torch.compiler.is_compiling() or isinstance(logits, FakeTensor):
        return False
    if not (_on_gpu(logits) and logits.requires_grad and torch.is_grad_enabled()):
        return False
    arrays = _Tensors(logits.device)
    return _gpu.takes_one_pass(arrays, json, int(logits.shape[-1]), arrays.dtype(logits))


# Nodes whose result is a view of their argument.
_VIEWS = (
    "Alias", "AsStrided", "Diagonal", "Expand", "Narrow", "Permute", "Reshape", "Select", "Slice", "Split", "Squeeze", "T",
    "Transpose", "Unfold", "UnsafeView", "Unsqueeze", "View",
)  # fmt: skip


def _expect_unsaved(logits: Tensor) -> None:
    """Checks that the producer of the logits does not need them for its own gradient, which comes after this one."""
    memory = logits.untyped_storage().data_ptr()
    node = logits.grad_fn
    while node is not None:
        held = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        held += getattr(node, "saved_tensors", ())
        if any(isinstance(x, Tensor) and x.untyped_storage().data_ptr() == memory for x in held):
            raise ProblemError(
                f"`inplace`: got True for logits that {node.name()} saved for its own gradient, expected logits that their "
                "producer does not need: those of a Linear, or `inplace=False`"
            )
        is_view = node.name().rstrip("0123456789").removesuffix("Backward") in _VIEWS
        node = node.next_functions[0][0] if is_view and node.next_functions else None


def _expect_in_place(logits: Tensor) -> None:
    if torch.compiler.is_compiling():
        raise ProblemError("`inplace`: got True under torch.compile, expected False: an operation there is functional")
    if logits.requires_grad and logits.is_leaf:
        raise ProblemError("`inplace`: got True for logits that are a leaf, expected logits that a model computed")
    if logits.requires_grad:
        _expect_unsaved(logits)


def _expect_tensors(given: Mapping[str, Any]) -> None:
    """Checks that all arguments that are arrays are tensors, and not those of several devices at once."""
    for name, array in given.items():
        if array is None or type(array) is Tensor:
            continue
        if isinstance(array, torch.nn.Module):
            raise ProblemError(f"`{name}`: got the module {type(array).__name__}, expected its tensor, {name}=module.weight")
        if not isinstance(array, Tensor):
            raise ProblemError(f"`{name}`: got {type(array).__name__}, expected a tensor")
        if hasattr(array, "full_tensor"):
            expected = "a tensor of this rank's own: `.full_tensor()`, or `.to_local()` where it is cut by sequences"
            raise ProblemError(f"`{name}`: got {type(array).__name__}, expected {expected}")


def _expect_as_flat(field: str, tensor: Tensor, ids: Tensor) -> None:
    """Checks that an array of all tokens has an axis of rows if the ids have one."""
    if tensor.ndim != ids.ndim + 1:
        last = "V" if field == "logits" else "H"
        expected = f"[N,{last}], as `ids` are [N]" if ids.ndim == 1 else f"[B,T,{last}], as `ids` are [B,T]"
        raise ProblemError(f"`{field}`: got shape {list(tensor.shape)}, expected {expected}")


def _expect_host(field: str, tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        raise ProblemError(
            f"`{field}`: got a tensor on {tensor.device}, expected one on the CPU: `gather_logp` has nothing for GPUs here"
        )


def _expect_together(field: str, first: Tensor, given: Mapping[str, Tensor | None]) -> None:
    """Checks that all tensors are on the CPU, or on one GPU."""
    if first.device.type not in _LOGITS:
        raise ProblemError(f"`{field}`: got a tensor on {first.device}, expected one on the CPU or an NVIDIA GPU")
    theirs = "the logits are" if field == "logits" else f"`{field}` is"
    for other, array in given.items():
        if array is not None and array.device != first.device:
            raise ProblemError(f"`{other}`: got a tensor on {array.device}, expected one on {first.device}, as {theirs}")


@torch._dynamo.assume_constant_result
def _json_of_options(spec: str, batch: tuple[tuple[str, Any], ...], options: tuple[tuple[str, Any], ...]) -> str:
    project = not spec.endswith((".yaml", ".yml", ".toml", ".json"))
    return _spec(spec, batch=dict(batch) if project else None, **dict(options)).to_json()


def _integers_or_truths(mask: Tensor) -> Tensor:
    """Returns a mask of a dtype that kernels take: integers of 8 and 16 bits become those of 32."""
    return mask.to(torch.int32) if mask.dtype in (torch.uint8, torch.int8, torch.int16) else mask


def _json(spec: str | Spec, batch: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    if isinstance(spec, str):
        json: str = _json_of_options(spec, tuple(batch.items()), tuple(options.items()))
        return json
    if options:
        raise ProblemError(f"got {', '.join(options)} beside a Spec, expected options only with a project's name")
    return spec._json


@torch._dynamo.assume_constant_result
def _expect_normalizer(json: str) -> None:
    """Checks that the sum over tokens is divided by a number that is given."""
    reduction = _read(json).to_dict()["reduction"]
    if not (isinstance(reduction, dict) and "normalizer" in reduction):
        raise ProblemError(
            f"`normalizer`: got a number beside a Spec whose reduction is {reduction}, expected a Spec that divides by one: "
            'assay.spec("trl", batch={"num_items_in_batch": n}) for a project, or reduction={"normalizer": n}'
        )


def _expect_count(normalizer: float) -> None:
    if not normalizer > 0:
        raise ProblemError(
            f"`normalizer`: got {normalizer:g}, expected the number of tokens that count, above 0: a step without one has no loss"
        )


@torch._dynamo.assume_constant_result
def _json_of_one_advantage_a_token(json: str) -> str:
    """The loss with one advantage a token, whatever a Spec says of them."""
    return _spec(**{**_read(json).to_dict(), "advantages": "token"}).to_json()


@torch._dynamo.assume_constant_result
def _json_at_given_temperatures(json: str, of_project: bool) -> str:
    """The loss with the temperatures of the batch; unless it is a project's it must have them so."""
    fields = _read(json).to_dict()
    if not of_project and fields["temperature"] != "given":
        raise ProblemError("`temperature`: got a tensor beside a Spec with a number, expected a Spec with `temperature: given`")
    return _spec(**{**fields, "temperature": "given"}).to_json()


@torch._dynamo.assume_constant_result
def _json_of_kept_sets(json: str, of_project: bool) -> str:
    """The loss over the kept sets of the batch; unless it is a project's it must say so."""
    fields = _read(json).to_dict()
    if "kept" in fields["support"]:
        return json
    if not of_project:
        raise ProblemError("`kept_ids`: got a tensor beside a Spec without kept sets, expected a Spec with `support: {kept: {}}`")
    return _spec(**{**fields, "support": {**fields["support"], "kept": {}}}).to_json()


# Arguments of `assay.jax.grpo_loss` that have no meaning here.
_OF_JAX = {
    "implementation": "the device of the logits decides: the CPU kernel, or the kernels for NVIDIA GPUs",
    "target": "the device of the logits decides: kernels are assembled for the GPU that they run on",
    "batch_axis": "each rank calls it on its own sequences, with normalizer= the tokens of all ranks",
    "token_axis": "each rank calls it on whole sequences, with normalizer= the tokens of all ranks",
    "vocab_axis": "each rank calls it on whole rows of logits: gather them first",
    "logits_dtype": "with hidden and lm_head, rounds_logits=True rounds logits to the dtype of hidden",
    "policy_weight": "give rollout_weights= or token_weights=, from which it is computed",
    "kl_weight": "give rollout_weights= or token_weights=, from which it is computed",
    "log_weight": "give rollout_logp=, from which it is computed",
    "behaviour_logp": "give rollout_logp=, from which it is computed",
}


def _required(spec: str | Spec | None) -> str | Spec:
    """Returns the loss that is asked for, or raises an error if there is none."""
    if not isinstance(spec, (str, Spec)):
        spec = _spec(_specs.required(spec))
    return spec


def grpo_loss(
    logits: Tensor | None,
    ids: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    old_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    *,
    spec: str | Spec | None = None,
    rollout_logp: Tensor | None = None,
    rollout_weights: Tensor | None = None,
    token_weights: Tensor | None = None,
    selected: Tensor | None = None,
    bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    segment_ids: Tensor | None = None,
    dentropy: Tensor | None = None,
    temperature: float | Tensor | None = None,
    kept_ids: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    hidden: Tensor | None = None,
    lm_head: Tensor | None = None,
    rounds_logits: bool = False,
    chunk: int = 0,
    inplace: bool = False,
    loss_scale: float | None = None,
    **options: Any,
) -> GrpoLoss:
    """Computes a GRPO loss whose gradient is exact to one rounding, whatever the loss is multiplied by afterwards.

        >>> import assay, assay.torch, torch
        >>> problem = next(assay.problems("trl", n=1, dtypes=["f32"], shapes=["2x3x7"]))
        >>> x = problem.torch()
        >>> logits = x.logits.clone().requires_grad_()
        >>> arrays = (x.ids, x.advantages, x.mask, x.old_logp, x.ref_logp)
        >>> loss = assay.torch.grpo_loss(logits, *arrays[:4], spec="trl").loss
        >>> (loss / 4).backward()
        >>> logits.grad.shape
        torch.Size([2, 3, 7])

    Args:
        logits: `[B,T,V]`, f32, bf16 or f16, in nats before the temperature, each row dense; None with `hidden` and `lm_head`.
        ids: `[B,T]`, i64 or i32: the sampled tokens; any value is allowed where the mask is false.
        advantages: `[B]`, or `[B,T]`, one a token.
        mask: `[B,T]`, truth values or 0 and 1: the tokens that count; None: all.
        old_logp: `[B,T]`, nats: under the policy that sampled. With a project's name None means the policy itself.
        ref_logp: `[B,T]`, nats: under the reference policy, where there is a KL term.
        spec: The loss: a `Spec` from `assay.spec`, or a project's name, whose `options` follow as in `assay.spec`. It has no default.
        rollout_logp: `[B,T]`, nats: under the policy that the sampler ran; NaN: not scored.
        rollout_weights: `[B,T]` or `[B,1]`: importance weights against that.
        token_weights: `[B,T]` or `[B,1]`: weights of tokens that the trainer gives.
        selected: `[B,T]`: the tokens that KL-Cov penalizes, or that Clip-Cov leaves out.
        bias: `[V]`: of the LM head, where the spec has one.
        cu_seqlens: `[S+1]`, i64 or i32: S sequences are packed into one row, B = 1 and T = N tokens. 0, and where each ends; tokens
            after the last belong to no sequence and are masked. Arrays `[B]` above are then `[S]`, and `rollout_weights`, `token_weights`
            and `temperature` are `[1,N]` or `[S,1]`. The row may be flat: logits `[N,V]`, hidden `[N,H]`, and `[N]` instead of `[1,N]`,
            also for the results. Several packed rows must be concatenated first, their ends counted on.
        segment_ids: `[1,N]` or `[N]`, in place of it: 1, 2, … in order, 0 for padding.
        dentropy: `[B,T]`: the cotangent of each token's entropy, where the spec reads it.
        temperature: `[B]`, `[B,1]` or `[B,T]`: what logits are divided by, one a sequence or one a token, whatever a project's own
            option is; a Spec has `temperature: given`. A number is the option of a project. It has no gradient.
        kept_ids: `[B,T,K]`, i64 or i32, on the CPU alone: the vocabulary entries that the sampler has kept for each token, in any order,
            -1 for no entry. The softmax is over these; a Spec has `support: {kept: {}}`, or says there that entropy and KL are over
            the vocabulary. A token that counts has its id among them, or the spec `keep_sampled`. Flat `[N,K]`.
        normalizer: The divisor of the sum over tokens, instead of the number in a spec whose reduction is a
            normalizer: the tokens of all ranks, so that losses and gradients of ranks add up to those of the whole batch.
        hidden: `[B,T,H]`, f32, bf16 or f16. Logits are then `hidden · lm_headᵀ`, a chunk of tokens at a time, never all.
        lm_head: `[V,H]`, of the dtype of `hidden`, contiguous.
        rounds_logits: Whether those logits are rounded to the dtype of `hidden` before anything reads them.
        chunk: Tokens of a chunk; 0: as many as 320 MiB hold.
        inplace: Whether dlogits are written over the logits in the backward pass. On a GPU of sm_90 and newer, for f32 and bf16 logits
            and a loss whose tokens do not depend on each other, they are written in the forward pass: the gradient is then that
            of the loss alone, and dlogits are rounded once more at a step whose loss is multiplied by another number than at the
            step before. It is refused under torch.compile, and for logits that their producer needs for its own gradient.
        loss_scale: What the loss will be multiplied by before it is differentiated, a number; it changes no result. With `hidden` on
            the CPU the forward pass makes the gradients for it, so that each logit is made once. None: what the last two backward
            passes of this loss multiplied it by, if that was the same; 1 at first. 0: the backward pass makes them, from logits
            that are made again, as it does where it is sent anything else than was expected.

    Returns:
        `GrpoLoss`. A gradient of a gradient is an error, and with `inplace=True` so is a second backward pass.

    Raises:
        ProblemError: An array has a shape, dtype, device or value that does not fit, by its name.
        SpecError: No loss is given, or it is unknown.
    """
    _specs.refuse_foreign(options, "assay.jax", _OF_JAX)
    spec = _required(spec)
    _expect_scale(loss_scale)
    _expect_tensors({"logits": logits, "hidden": hidden, "lm_head": lm_head, "ids": ids, "mask": mask, "advantages": advantages})
    given: dict[str, Tensor | None] = {
        "ids": ids,
        "mask": torch.ones_like(ids, dtype=torch.bool) if mask is None else _integers_or_truths(mask),
        "advantages": advantages,
        "old_logp": old_logp,
        "ref_logp": ref_logp,
        "rollout_logp": rollout_logp,
        "rollout_weights": rollout_weights,
        "token_weights": token_weights,
        "selected": selected,
        "bias": bias,
        "cu_seqlens": cu_seqlens,
        "segment_ids": segment_ids,
        "dentropy": dentropy,
        "temperature": temperature if isinstance(temperature, Tensor) else None,
        "kept_ids": kept_ids,
    }
    batch: dict[str, Any] = {
        "old_logps": old_logp is not None,
        "ref_logps": ref_logp is not None,
        "sampling_logps": rollout_logp is not None,
        "token_weights": token_weights is not None,
        "kept_ids": kept_ids is not None,
    }
    _expect_tensors(given)
    # A project's name says which loss, the arrays which form of it.
    flat = ids.ndim == 1
    if rollout_weights is not None:
        batch["rollout_weights"] = "sequence" if rollout_weights.ndim == 2 and rollout_weights.shape[1] == 1 else "token"
    if advantages.ndim == 2 or (flat and advantages.shape == ids.shape):
        batch["advantages"] = "token"
    if normalizer is not None:
        batch["num_items_in_batch"] = 1.0
        if isinstance(spec, Spec):
            _expect_normalizer(spec._json)
        if not isinstance(normalizer, Tensor):
            _expect_count(normalizer)
            normalizer = torch.tensor(normalizer, dtype=torch.float64, device="cpu")
        elif normalizer.ndim != 0:
            raise ProblemError(f"`normalizer`: got shape {list(normalizer.shape)}, expected one number")
        elif normalizer.device.type != "cpu":
            given["normalizer"] = normalizer
        elif not (torch.compiler.is_compiling() or isinstance(normalizer, FakeTensor)):
            _expect_count(normalizer.item())
    if isinstance(temperature, Tensor):
        json = _json_at_given_temperatures(_json(spec, batch, options), isinstance(spec, str))
    else:
        json = _json(spec, batch, options if temperature is None else {**options, "temperature": temperature})
    if kept_ids is not None:
        json = _json_of_kept_sets(json, isinstance(spec, str))
    if "advantages" in batch and isinstance(spec, Spec):
        json = _json_of_one_advantage_a_token(json)
    arguments = (*(given[name] for name in _ARRAYS), normalizer, json)
    if flat and cu_seqlens is None and segment_ids is None:
        expected = "`cu_seqlens` or `segment_ids`, which say where each sequence lies, or [B,T]"
        raise ProblemError(f"`ids`: got shape {list(ids.shape)}, expected beside them {expected}")
    if logits is not None:
        _expect_as_flat("logits", logits, ids)
        if hidden is not None or lm_head is not None:
            raise ProblemError("`hidden`, `lm_head`: got one beside `logits`, expected either logits or what makes them")
        _expect_together("logits", logits, given)
        if inplace:
            _expect_in_place(logits)
        if _makes_dlogits_first(logits, json, inplace):
            outputs = _OnePass.apply(logits, inplace, *arguments)
        elif inplace:
            outputs = _InPlace.apply(logits, *arguments)
        else:
            outputs = _loss(logits, *arguments)
    else:
        head = _head_of(hidden, lm_head, rounds_logits, chunk, ids, given)
        if inplace:
            raise ProblemError("`inplace`: got True with an LM head, expected False: its logits are never all there")
        scale = _scale_of_gradients(*head[:2], json, loss_scale)
        outputs = _head_loss(*head, *arguments) if scale is None else _HeadFirst.apply(scale, *head, *arguments)
    loss, logp, entropy, token_loss, metrics, _ = outputs
    return GrpoLoss(loss, logp, entropy, token_loss, dict(zip(METRICS, metrics.unbind(), strict=True)))


def _expect_scale(loss_scale: float | None) -> None:
    if loss_scale is not None and not (isinstance(loss_scale, (int, float)) and math.isfinite(loss_scale)):
        raise ProblemError(
            f"`loss_scale`: got {loss_scale!r}, expected a finite number, by which the loss is multiplied before its backward pass, or None"
        )


def _head_of(
    hidden: Tensor | None,
    lm_head: Tensor | None,
    rounds_logits: bool,
    chunk: int,
    ids: Tensor,
    given: Mapping[str, Tensor | None],
) -> tuple[Tensor, Tensor, bool, int]:
    """The first arguments of the operations with a head."""
    if hidden is None or lm_head is None:
        raise ProblemError("`logits`: got None, expected a tensor, or both `hidden` and `lm_head`")
    if chunk < 0:
        raise ProblemError(f"`chunk`: got {chunk}, expected so many tokens, or 0: as many as 320 MiB hold")
    _expect_as_flat("hidden", hidden, ids)
    _expect_together("hidden", hidden, {"lm_head": lm_head, **given})
    return hidden, lm_head, rounds_logits, chunk


def logp_and_entropy(
    logits: Tensor | None,
    ids: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    kept_ids: Tensor | None = None,
    hidden: Tensor | None = None,
    lm_head: Tensor | None = None,
    rounds_logits: bool = False,
    chunk: int = 0,
) -> tuple[Tensor, Tensor]:
    """Computes the log-probability of each sampled token and the entropy, `[B,T]` f32 each, nats: `selective_log_softmax` and the
    entropy in one.

        >>> import assay, assay.torch, torch
        >>> problem = next(assay.problems("trl", n=1, dtypes=["f32"], shapes=["2x3x7"]))
        >>> x = problem.torch()
        >>> logits = x.logits.clone().requires_grad_()
        >>> logp, entropy = assay.torch.logp_and_entropy(logits, x.ids, x.mask, temperature=0.7)
        >>> logp.shape, entropy.shape
        (torch.Size([2, 3]), torch.Size([2, 3]))

    The logits are read once and nothing of their size is made; with `hidden` and `lm_head` they are made a chunk at a time.
    Masked tokens hold 0. Both are differentiable, with any cotangents: the backward pass reads the logits once more and writes
    dlogits, rounded once; the cotangents of masked tokens are not looked at. Where no gradient is asked for, as under
    `torch.no_grad` in old and reference passes, nothing is kept for one.

    Args:
        logits: The logits, as for `grpo_loss`, like the other arrays; they may be flat, `[N,V]` with ids `[N]`.
        temperature: What logits are divided by; a tensor is one a sequence or one a token, as of `grpo_loss`.
        softcap: `c` of `c·tanh(logits / c)`, before the temperature.
        kept_ids: The kept set of each token, as of `grpo_loss`; both results are then of the softmax over it.

    Raises:
        ProblemError, SpecError: As `grpo_loss`.
    """
    _expect_tensors({"logits": logits, "hidden": hidden, "lm_head": lm_head, "ids": ids, "mask": mask, "kept_ids": kept_ids})
    mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else _integers_or_truths(mask)
    given: dict[str, Tensor | None] = {"ids": ids, "mask": mask}
    asked: float | str = "given" if isinstance(temperature, Tensor) else temperature
    if isinstance(temperature, Tensor):
        given["temperature"] = temperature
    given["kept_ids"] = kept_ids
    support: dict[str, Any] = {} if kept_ids is None else {"kept": {}}
    changes = ("logits", {"softcap": softcap}), ("support", support)
    json = _json_of_options("logp", (), (("entropy", False), ("temperature", asked), *changes))
    given["advantages"] = torch.zeros((1 if ids.ndim == 1 else ids.shape[0],), dtype=torch.float32, device=ids.device)
    arguments = (*(given.get(name) for name in _ARRAYS), None, json)
    if logits is not None:
        _expect_as_flat("logits", logits, ids)
        if hidden is not None or lm_head is not None:
            raise ProblemError("`hidden`, `lm_head`: got one beside `logits`, expected either logits or what makes them")
        _expect_together("logits", logits, given)
        return _loss(logits, *arguments)[1:3]  # type: ignore[no-any-return]
    return _head_loss(*_head_of(hidden, lm_head, rounds_logits, chunk, ids, given), *arguments)[1:3]  # type: ignore[no-any-return]


def gather_logp(
    logits: Tensor | None,
    ids: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    hidden: Tensor | None = None,
    lm_head: Tensor | None = None,
    rounds_logits: bool = False,
    chunk: int = 0,
) -> Tensor:
    """Computes the log-probabilities of K ids a token, `[B,T,K]`, f32, nats: `logits.log_softmax(-1).gather(-1, ids)`, as distillation
    on a teacher's top K has it, without an array of the logits' size.

        >>> import assay, assay.torch, torch
        >>> problem = next(assay.problems("trl", n=1, dtypes=["f32"], shapes=["2x3x7"]))
        >>> x = problem.torch()
        >>> logits = x.logits.clone().requires_grad_()
        >>> ids = logits.detach().topk(2).indices
        >>> assay.torch.gather_logp(logits, ids).shape
        torch.Size([2, 3, 2])

    The logits are read once, and once more in the backward pass, which writes dlogits, rounded once. An id may occur several
    times in a token: its cotangents add up. Masked tokens hold 0, and their cotangents are not looked at.

    Args:
        logits: As the others, of `logp_and_entropy`.
        ids: `[B,T,K]`, i64 or i32; any value is allowed where the mask is false.
        mask: `[B,T]`.

    Raises:
        ProblemError, SpecError: As `grpo_loss`.
    """
    _expect_tensors({"logits": logits, "hidden": hidden, "lm_head": lm_head, "ids": ids, "mask": mask})
    if ids.ndim != 3 or ids.shape[2] == 0:
        raise ProblemError(f"`ids`: got shape {list(ids.shape)}, expected [B,T,K] with K ≥ 1")
    mask = torch.ones(ids.shape[:2], dtype=torch.bool, device=ids.device) if mask is None else _integers_or_truths(mask)
    asked = (
        ("entropy", False),
        ("temperature", temperature),
        ("logits", {"softcap": softcap}),
        ("ids_per_token", int(ids.shape[2])),
    )
    json = _json_of_options("logp", (), asked)
    given = {"ids": ids, "mask": mask, "logits": logits, "hidden": hidden, "lm_head": lm_head}
    for field, array in given.items():
        if array is not None:
            _expect_host(field, array)
    if logits is not None:
        if hidden is not None or lm_head is not None:
            raise ProblemError("`hidden`, `lm_head`: got one beside `logits`, expected either logits or what makes them")
        return _gather(logits, ids, mask, json)
    return _head_gather(*_head_of(hidden, lm_head, rounds_logits, chunk, ids[..., 0], {}), ids, mask, json)


def empty_cache() -> None:
    """Frees the memory that is kept for the next gradient.

        >>> import assay.torch
        >>> assay.torch.empty_cache()

    dlogits of 32 MiB and more reuse the memory of the last ones, once those are gone: one block is kept, at most twice as large as
    the last.
    """
    _pool.release()


def trl_arguments(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `grpo_loss` from the inputs of TRL's `GRPOTrainer._compute_loss`, by their names here.

        >>> import assay.torch, torch
        >>> ids, mask = torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3)
        >>> inputs = {"completion_ids": ids, "completion_mask": mask, "advantages": torch.ones(2)}
        >>> sorted(assay.torch.trl_arguments(inputs))[:3]
        ['advantages', 'ids', 'mask']
    """
    mask = inputs["completion_mask"]
    names = {
        "old_logp": "old_per_token_logps",
        "ref_logp": "ref_per_token_logps",
        "rollout_logp": "sampling_per_token_logps",
        "rollout_weights": "importance_sampling_ratio",
    }
    return {
        "ids": inputs["completion_ids"],
        "mask": mask * inputs["tool_mask"] if "tool_mask" in inputs else mask,
        "advantages": inputs["advantages"],
        **{ours: inputs.get(theirs) for ours, theirs in names.items()},
    }
