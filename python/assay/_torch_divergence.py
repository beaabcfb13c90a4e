"""The divergence from a teacher for PyTorch: `assay.torch.divergence`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import _divergence, _native, _pool
from ._errors import ProblemError

_REDUCTIONS = ("none", "mean", "sum")
#: Bytes of the logits of a chunk of tokens, the teacher's among them.
_CHUNK = 128 << 20


def divergence(
    student_logits: Tensor | None,
    teacher_logits: Tensor | None = None,
    *,
    kind: str = "forward_kl",
    beta: float | None = None,
    temperature: float = 1.0,
    temperature_squared: bool = False,
    teacher_logp: Tensor | None = None,
    teacher_ids: Tensor | None = None,
    rest: str | None = None,
    mask: Tensor | None = None,
    reduction: str = "none",
    hidden: Tensor | None = None,
    lm_head: Tensor | None = None,
    teacher_hidden: Tensor | None = None,
    teacher_lm_head: Tensor | None = None,
    chunk: int = 0,
    inplace: bool = False,
) -> Tensor:
    """Computes the divergence of a student from a teacher, as distillation has it, on the CPU: one value for each token.

        >>> import assay.torch, torch
        >>> student = torch.zeros(2, 3, 4, requires_grad=True)
        >>> teacher = torch.tensor([0.0, 1.0, 2.0, 3.0]).expand(2, 3, 4)
        >>> value = assay.torch.divergence(student, teacher, kind="jensen_shannon", beta=0.1, reduction="mean")
        >>> value.backward()
        >>> round(value.item(), 4), student.grad.shape
        (0.0394, torch.Size([2, 3, 4]))

    With p the student's probabilities and q the teacher's, `forward_kl` is KL(q‖p), `reverse_kl` KL(p‖q), and `jensen_shannon`
    beta·KL(q‖m) + (1 − beta)·KL(p‖m) with m = beta·q + (1 − beta)·p, as TRL and Liger have it: at beta 0 and 1 it is the forward and
    the reverse KL. The gradient is that by the student's logits, or by its hidden states and head.

    Both rows are read once for the values and once for the gradient, which is rounded once; no array of the logits' size is made but
    that. The sums do not cancel where student ≈ teacher. Sums are in f64, the values in f32, whatever the dtype of the logits.

    Args:
        student_logits: `[…,V]`, f32, bf16 or f16, the entries of a token next to each other; None with `hidden` and `lm_head`.
        teacher_logits: The same shape and dtype, without a gradient; −inf for an entry without probability. None where the teacher is given
            by two of the arguments below.
        kind: "forward_kl", "reverse_kl" or "jensen_shannon".
        beta: The weight of the teacher in the mixture of "jensen_shannon", from 0 to 1; 0.5 by default.
        temperature: The number that both logits are divided by.
        temperature_squared: Whether the divergence is multiplied by the square of the temperature.
        teacher_logp: `[…,K]`: the log-probabilities of the teacher's likeliest entries, of this temperature already.
        teacher_ids: `[…,K]`, i64 or i32: their ids, each once in a token.
        rest: With these, what becomes of the probability outside: "tail" is one more bin, "renormalized" divides both by their sums over
            the entries, "ignored" leaves it out.
        mask: `[…]`, the tokens that count; None: all. The others are not read, and have 0.
        reduction: "none" for one value for each token, "mean" over the tokens that count, of which none is NaN, or "sum".
        hidden, lm_head: `[…,H]` and `[V,H]` of one dtype: the student's logits are then `hidden · lm_headᵀ`, rounded to that dtype, a chunk
            of tokens at a time, never all. For a mean or a sum the forward pass makes the gradients, so that each logit is made once.
        teacher_hidden, teacher_lm_head: The same of the teacher, of which H may be another, without a gradient.
        chunk: Tokens of a chunk; 0: as many as 128 MiB hold, at least 16.
        inplace: Whether the gradient is written over the student's logits in the backward pass, as of `grpo_loss`.

    Returns:
        f32, `[…]` or a scalar. A token whose rows hold a NaN, +inf, or no finite logit has NaN; a reverse KL of an entry that only the
        teacher lacks is inf, and its gradient NaN.

    Raises:
        ProblemError: An argument whose type, shape, dtype or value does not fit, by its name.
        SpecError: The divergence is invalid, by its field.
    """
    from . import torch as operations

    given = {
        "student_logits": student_logits,
        "teacher_logits": teacher_logits,
        "teacher_logp": teacher_logp,
        "teacher_ids": teacher_ids,
        "mask": mask,
        "hidden": hidden,
        "lm_head": lm_head,
        "teacher_hidden": teacher_hidden,
        "teacher_lm_head": teacher_lm_head,
    }
    operations._expect_tensors(given)
    for name, array in given.items():
        if array is not None and array.device.type != "cpu":
            raise ProblemError(f"`{name}`: got a tensor on {array.device}, expected one on the CPU: there are no kernels for it on a GPU")
    if reduction not in _REDUCTIONS:
        raise ProblemError(f"`reduction`: got {reduction!r}, expected one of {', '.join(_REDUCTIONS)}")
    if chunk < 0:
        raise ProblemError(f"`chunk`: got {chunk}, expected so many tokens, or 0: as many as 128 MiB hold")
    student = _student(student_logits, hidden, lm_head)
    shape = student.shape[:-1]
    vocab = student.shape[-1] if lm_head is None else lm_head.shape[0]
    _expect_teacher(shape, vocab, given)
    if mask is not None and mask.shape != shape:
        raise ProblemError(f"`mask`: got shape {list(mask.shape)}, expected {list(shape)}, that of the tokens")
    top_k = None if teacher_ids is None else int(teacher_ids.shape[-1])
    json = _json(kind, beta, temperature, temperature_squared, top_k, rest)
    counted = None if mask is None else operations._integers_or_truths(mask).reshape(1, -1)
    teacher = [None if array is None else _rows(array, shape) for array in (teacher_logits, teacher_logp, teacher_ids, teacher_hidden)]
    if lm_head is not None:
        if inplace:
            raise ProblemError("`inplace`: got True with an LM head, expected False: its logits are never all there")
        scale = {"none": None, "sum": 1.0, "mean": _over(_count(shape, counted))}[reduction]
        head = None if teacher_lm_head is None else teacher_lm_head.detach()
        result: Tensor = _OfHead.apply(_rows(student, shape)[0], lm_head, *teacher[:3], teacher[3], head, counted, json, scale, chunk)
        return result.reshape(shape) if scale is None else result
    if inplace:
        operations._expect_in_place(student)
        values = _InPlace.apply(_rows(student, shape), *teacher[:3], counted, json)
    else:
        values, _ = _values(_rows(student, shape), *teacher[:3], counted, json)
    if reduction == "none":
        return values.reshape(shape)
    return values.sum() if reduction == "sum" else values.sum() / _count(shape, counted)


@torch._dynamo.assume_constant_result
def _json(kind: str, beta: float | None, temperature: float, squared: bool, top_k: int | None, rest: str | None) -> str:
    return _divergence._spec(kind, beta, temperature, squared, top_k, rest, "none").to_json()


def _count(shape: torch.Size, mask: Tensor | None) -> Tensor | int:
    """The number of tokens that count."""
    return math.prod(shape) if mask is None else (mask != 0).sum()


def _over(count: Tensor | int) -> float:
    """What a mean multiplies a sum by: of no token it is NaN."""
    return 1.0 / int(count) if int(count) else math.nan


def _student(logits: Tensor | None, hidden: Tensor | None, lm_head: Tensor | None) -> Tensor:
    """The student's logits, or its hidden states."""
    if logits is not None:
        if hidden is not None or lm_head is not None:
            raise ProblemError("`hidden`, `lm_head`: got one beside `student_logits`, expected either logits or what makes them")
        if logits.ndim == 0:
            raise ProblemError("`student_logits`: got shape [], expected […,V]")
        return logits
    if hidden is None or lm_head is None:
        raise ProblemError("`student_logits`: got None, expected a tensor, or both `hidden` and `lm_head`")
    _expect_head("hidden", hidden, "lm_head", lm_head)
    return hidden


def _expect_head(name: str, hidden: Tensor, of_head: str, lm_head: Tensor) -> None:
    if hidden.ndim == 0 or lm_head.ndim != 2 or lm_head.shape[1] != hidden.shape[-1]:
        given = f"{list(lm_head.shape)} beside {list(hidden.shape)}"
        raise ProblemError(f"`{of_head}`: got shape {given}, expected [V,H] beside `{name}` of […,H]")
    if lm_head.dtype != hidden.dtype:
        raise ProblemError(f"`{of_head}`: got {lm_head.dtype}, expected {hidden.dtype}, that of `{name}`")


def _expect_teacher(shape: torch.Size, vocab: int, given: dict[str, Tensor | None]) -> None:
    """Checks that there is one teacher, of the student's tokens and vocabulary, without a gradient."""
    forms = (("teacher_logits",), ("teacher_logp", "teacher_ids"), ("teacher_hidden", "teacher_lm_head"))
    named = [name for form in forms for name in form if given[name] is not None]
    if tuple(named) not in forms:
        expected = " or ".join(" and ".join(f"`{name}`" for name in form) for form in forms)
        raise ProblemError(f"`teacher_logits`: got {', '.join(f'`{name}`' for name in named) or 'no teacher'}, expected {expected}")
    for name in named:
        array = given[name]
        assert array is not None
        if array.requires_grad and torch.is_grad_enabled():
            raise ProblemError(f"`{name}`: got a tensor that needs a gradient, expected one without: `.detach()`")
        if name != "teacher_lm_head" and array.shape[:-1] != shape:
            raise ProblemError(f"`{name}`: got shape {list(array.shape)}, expected {[*shape]} and one axis more, as the student")
    logits, hidden, head = given["teacher_logits"], given["teacher_hidden"], given["teacher_lm_head"]
    if logits is not None and logits.shape[-1] != vocab:
        raise ProblemError(f"`teacher_logits`: got shape {list(logits.shape)}, expected {[*shape, vocab]}, of the student's vocabulary")
    if hidden is not None and head is not None:
        _expect_head("teacher_hidden", hidden, "teacher_lm_head", head)
        if head.shape[0] != vocab:
            raise ProblemError(f"`teacher_lm_head`: got shape {list(head.shape)}, expected [{vocab},H], of the student's vocabulary")


def _rows(array: Tensor, shape: torch.Size) -> Tensor:
    """The rows of all tokens, `[1,N,…]`, the elements of each next to each other."""
    rows = array.reshape(1, math.prod(shape), array.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def _teacher(logits: Tensor | None, logp: Tensor | None, ids: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return (None if logits is None else logits.detach(), None if logp is None else logp.detach(), ids)


def _op(name: str, schema: str) -> Any:
    return torch.library.custom_op(f"assay::{name}", mutates_args=(), device_types="cpu", schema=schema)


_GIVEN = "Tensor student, Tensor? logits, Tensor? logp, Tensor? ids, Tensor? mask, str spec"


@_op("divergence", f"({_GIVEN}) -> (Tensor, Tensor)")
def _values(
    student: Tensor, logits: Tensor | None, logp: Tensor | None, ids: Tensor | None, mask: Tensor | None, spec: str
) -> tuple[Tensor, Tensor]:
    """The value of each token, `[1,N]`, and what its gradient needs."""
    from . import torch as operations

    made = _native.op_divergence(operations._read(spec), student.detach(), _teacher(logits, logp, ids), mask)
    values, kept = (torch.from_dlpack(array) for array in made)
    return values, kept


@_op("divergence_gradient", f"(Tensor sent, Tensor kept, {_GIVEN}) -> Tensor")
def _gradient(
    sent: Tensor,
    kept: Tensor,
    student: Tensor,
    logits: Tensor | None,
    logp: Tensor | None,
    ids: Tensor | None,
    mask: Tensor | None,
    spec: str,
) -> Tensor:
    dlogits = _pool.empty(student.shape, student.dtype)
    _write(dlogits, sent, kept, student, (logits, logp, ids), mask, spec)
    return dlogits


def _write(
    dlogits: Tensor | None,
    sent: Tensor,
    kept: Tensor,
    student: Tensor,
    teacher: tuple[Tensor | None, Tensor | None, Tensor | None],
    mask: Tensor | None,
    spec: str,
) -> None:
    """Writes the gradient to `dlogits`, or over the student's logits."""
    from . import torch as operations

    cotangents = sent.detach().contiguous()
    _native.op_divergence_gradient(operations._read(spec), student.detach(), dlogits, _teacher(*teacher), mask, kept, cotangents)


@_values.register_fake
def _(student: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    tokens = student.shape[:-1]
    return student.new_empty(tokens, dtype=torch.float32), student.new_empty((*tokens, 6), dtype=torch.float64)


@_gradient.register_fake
def _(sent: Tensor, kept: Tensor, student: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(student, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, spec = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.spec = spec
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, sent: Tensor, *_of_kept: Any) -> tuple[Tensor | None, ...]:
    *tensors, kept = ctx.saved_tensors
    return _gradient(sent, kept, *tensors, ctx.spec), None, None, None, None, None


_values.register_autograd(_backward, setup_context=_setup)


class _InPlace(torch.autograd.Function):
    """The values, with the gradient written over the student's logits in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, logits: Tensor | None, logp: Tensor | None, ids: Tensor | None, mask: Tensor | None, spec: str
    ) -> Tensor:
        values, kept = _values(student, logits, logp, ids, mask, spec)
        ctx.save_for_backward(student, logits, logp, ids, mask, kept)
        ctx.spec, ctx.done = spec, False
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, sent: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.done:
            raise RuntimeError("divergence: got a second backward pass with `inplace=True`, expected one: the logits are dlogits by now")
        student, *teacher, mask, kept = ctx.saved_tensors
        _write(None, sent, kept, student, tuple(teacher), mask, ctx.spec)
        ctx.done = True
        # Autograd then refuses a later backward pass of any other operation that saved the logits.
        torch.autograd.graph.increment_version(student)
        return student.detach(), None, None, None, None, None


class _OfHead(torch.autograd.Function):
    """The values of hidden states and a head, `[N]`; or their sum times `scale`, whose gradients the forward pass makes."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, lm_head: Tensor, *given: Any) -> Tensor:
        *arrays, json, scale, chunk = given
        ctx.save_for_backward(hidden, lm_head, *arrays)
        ctx.json, ctx.chunk, ctx.made = json, chunk, None
        if scale is None:
            return _walk(hidden, lm_head, arrays, json, chunk, None, (False, False))[0]
        asked = ctx.needs_input_grad[:2]
        sent = torch.full((hidden.shape[0],), scale, dtype=torch.float32) if any(asked) else None
        values, *ctx.made = _walk(hidden, lm_head, arrays, json, chunk, sent, asked)
        return (values.double().sum() * scale).float()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, sent: Tensor) -> tuple[Tensor | None, ...]:
        hidden, lm_head, *arrays = ctx.saved_tensors
        made = ctx.made
        if made is None:
            made = _walk(hidden, lm_head, arrays, ctx.json, ctx.chunk, sent, ctx.needs_input_grad[:2])[1:]
        elif sent != 1:
            # Not in place: another backward pass multiplies the same gradients.
            made = [None if gradient is None else gradient * sent for gradient in made]
        gradients = (None if gradient is None else gradient.to(hidden.dtype) for gradient in made)
        return *gradients, *[None] * (len(arrays) + 3)


def _walk(
    hidden: Tensor, lm_head: Tensor, arrays: list[Any], json: str, chunk: int, sent: Tensor | None, asked: tuple[bool, bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The values `[N]`, a chunk of tokens at a time, and with cotangents `[N]` the gradients by hidden states and head, in f32."""
    from . import torch as operations

    spec = operations._read(json)
    logits, logp, ids, teacher_hidden, teacher_head, mask = arrays
    count, vocab = hidden.shape[0], lm_head.shape[0]
    chunk = chunk or max(16, _CHUNK // (vocab * hidden.element_size() * (1 if teacher_hidden is None else 2)))
    values = torch.empty(count)
    dhidden = torch.empty(hidden.shape) if sent is not None and asked[0] else None
    dlm_head = torch.zeros(lm_head.shape) if sent is not None and asked[1] else None
    # One room for the logits of every chunk: fresh pages would take longer than what is computed in them.
    rooms = [torch.empty(min(chunk, count), vocab, dtype=hidden.dtype) for _ in range(1 if teacher_hidden is None else 2)]
    for first in range(0, count, chunk):
        part = slice(first, first + chunk)
        rows = hidden[part]
        student = torch.mm(rows, lm_head.T, out=rooms[0][: len(rows)])
        of_logits, of_logp, of_ids = (None if array is None else array[:, part] for array in (logits, logp, ids))
        if teacher_hidden is not None:
            of_logits = torch.mm(teacher_hidden[0, part], teacher_head.T, out=rooms[1][: len(rows)])[None]
        teacher = of_logits, of_logp, of_ids
        counted = None if mask is None else mask[:, part]
        made, kept = (torch.from_dlpack(array) for array in _native.op_divergence(spec, student[None], teacher, counted))
        values[part] = made[0]
        if sent is None:
            continue
        cotangents = sent[None, part].float().contiguous()
        _native.op_divergence_gradient(spec, student[None], None, teacher, counted, kept, cotangents)
        if dhidden is not None:
            dhidden[part] = student @ lm_head
        if dlm_head is not None:
            dlm_head.addmm_(student.float().T, rows.float())
    return values, dhidden, dlm_head
