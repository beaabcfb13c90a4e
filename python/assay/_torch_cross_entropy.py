"""The cross-entropy for PyTorch: `assay.torch.cross_entropy`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._errors import ProblemError

#: The arguments of `torch.nn.functional.cross_entropy` that are refused, each with what it would take.
_REFUSED = {
    "weight": "classes that all weigh the same",
    "size_average": "`reduction`, which has its place",
    "reduce": "`reduction`, which has its place",
}
_REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    lm_head: Tensor | None = None,
    rounds_logits: bool = False,
    chunk: int = 0,
    inplace: bool = False,
    loss_scale: float | None = None,
) -> Tensor:
    """Computes the cross-entropy of logits and class indices, as `torch.nn.functional.cross_entropy` does, in one read and one write.

        >>> import assay.torch, torch
        >>> logits = torch.zeros(2, 4, requires_grad=True)
        >>> loss = assay.torch.cross_entropy(logits, torch.tensor([1, -100]))
        >>> loss.backward()
        >>> round(loss.item(), 4), logits.grad[0].tolist()
        (1.3863, [0.25, -0.75, 0.25, 0.25])

    With `z` the logits after scale and cap, `V` classes and the class `y` of a token, its loss is

        -(1 - label_smoothing) * log_softmax(z)[y] + label_smoothing * mean(-log_softmax(z)) + z_loss * logsumexp(z) ** 2

    No array of the logits' size is made but their gradient, which is rounded once. The result is f32, whatever the dtype of the logits.

    Args:
        input: `[N,V]`, `[V]` or `[N,V,d1,…]`, f32, bf16 or f16; with `lm_head` hidden states `[…,H]`. Classes that do not lie next to each
            other in memory are copied so that they do.
        target: The class of each token, i64 or i32, `[N]`, a scalar or `[N,d1,…]`; with `lm_head` `[…]`.
        weight, size_average, reduce: Must be None: classes have one weight, and `reduction` has replaced the other two.
        ignore_index: The target of tokens that do not count, any number.
        reduction: "mean" over the tokens that count, of which none is NaN as in PyTorch; "sum"; or "none", the loss of each token, 0 where it
            does not count.
        label_smoothing: The share of the target that is uniform over the classes, from 0 to 1. A logit of -inf then has a loss of inf.
        z_loss: The weight of the squared log-sum-exp of a token's logits.
        softcap: `c` of `c * tanh(logits / c)`; None: no cap.
        logit_scale: The factor of the logits, before the cap.
        lm_head: `[V,H]`, of the dtype of `input`, contiguous: logits are then `input · lm_headᵀ`, a chunk of tokens at a time, never all.
        rounds_logits, chunk, inplace, loss_scale: As of `grpo_loss`; with `reduction="none"` the last two are not there.

    Raises:
        ProblemError: An argument that is not computed, or an array whose shape, dtype or value does not fit, by its name.
        SpecError: A number is out of range.
    """
    from . import torch as operations

    for name, given in (("weight", weight), ("size_average", size_average), ("reduce", reduce)):
        if given is not None:
            raise ProblemError(f"`{name}`: got a {type(given).__name__}, expected None: {_REFUSED[name]}")
    if reduction not in _REDUCTIONS:
        raise ProblemError(f"`reduction`: got {reduction!r}, expected one of {', '.join(_REDUCTIONS)}")
    if not isinstance(input, Tensor) or not isinstance(target, Tensor):
        wrong, given = ("input", input) if not isinstance(input, Tensor) else ("target", target)
        raise ProblemError(f"`{wrong}`: got {type(given).__name__}, expected a tensor")
    if target.is_floating_point():
        raise ProblemError(f"`target`: got {target.dtype}, class probabilities, expected class indices, i64 or i32")
    rows = _rows(input, target, lm_head is not None)[None]
    ids = target.reshape(1, -1)
    mask = ids != ignore_index
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": label_smoothing, "z_loss": z_loss, "softcap": softcap, "logit_scale": logit_scale}
    made_by: dict[str, Any] = {"logits": rows} if lm_head is None else {"logits": None, "hidden": rows, "lm_head": lm_head}
    if reduction != "none":
        of_head: dict[str, Any] = {} if lm_head is None else {"rounds_logits": rounds_logits, "chunk": chunk}
        advantages = torch.zeros(1, device=ids.device)
        loss = operations.grpo_loss(
            **made_by, ids=ids, advantages=advantages, mask=mask, spec="cross_entropy", inplace=inplace, loss_scale=loss_scale, **of_head, **options
        ).loss
        return loss
    if inplace or loss_scale is not None:
        raise ProblemError('`inplace`, `loss_scale`: got one with reduction="none", expected "mean" or "sum": each token has a cotangent')
    json = operations._json_of_options("cross_entropy", (("token_weights", True),), tuple(options.items()))
    if lm_head is None:
        losses = _OfTokens.apply(rows, ids, mask, json)
    else:
        losses = _OfTokensOfHead.apply(rows, lm_head, rounds_logits, chunk, ids, mask, json)
    return losses.reshape(target.shape)


def _rows(input: Tensor, target: Tensor, has_head: bool) -> Tensor:
    """The logits or hidden states of all tokens, `[N,V]` or `[N,H]`, the elements of a token next to each other."""
    if has_head:
        expected, rows = input.shape[:-1], input
    elif input.ndim <= 2:
        expected, rows = input.shape[:-1], input
    else:
        expected, rows = input.shape[:1] + input.shape[2:], input.movedim(1, -1)
    if input.ndim == 0 or target.shape != expected:
        raise ProblemError(f"`target`: got shape {list(target.shape)}, expected {list(expected)}, that of the tokens of `input`")
    rows = rows.reshape(-1, rows.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _arguments(ids: Tensor, mask: Tensor, weights: Tensor, json: str) -> list[Any]:
    """The arguments of an operation after its logits or its head."""
    from . import torch as operations

    given = {"ids": ids, "mask": mask, "advantages": torch.zeros(1, device=ids.device), "token_weights": weights}
    return [*(given.get(name) for name in operations._ARRAYS), None, json]


class _OfTokens(torch.autograd.Function):
    """The loss of each token, `[1,N]`, whose cotangents are the weights of the losses in a sum."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, mask: Tensor, json: str) -> Tensor:
        from . import torch as operations

        *_others, losses, _metrics, kept = operations._loss(logits, *_arguments(ids, mask, torch.ones_like(ids, dtype=torch.float32), json))
        ctx.save_for_backward(logits, ids, mask, kept)
        ctx.json = json
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, sent: Tensor) -> tuple[Tensor | None, ...]:
        from . import torch as operations

        logits, ids, mask, kept = ctx.saved_tensors
        given = _arguments(ids, mask, sent.contiguous().float(), ctx.json)
        return operations._gradient(torch.ones(()), None, None, kept, logits, *given), None, None, None


class _OfTokensOfHead(torch.autograd.Function):
    """The same of hidden states and a head."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, lm_head: Tensor, rounds_logits: bool, chunk: int, ids: Tensor, mask: Tensor, json: str
    ) -> Tensor:
        from . import torch as operations

        given = _arguments(ids, mask, torch.ones_like(ids, dtype=torch.float32), json)
        *_others, losses, _metrics, kept = operations._head_loss(hidden, lm_head, rounds_logits, chunk, *given)
        ctx.save_for_backward(hidden, lm_head, ids, mask, kept)
        ctx.rest = rounds_logits, chunk, json
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, sent: Tensor) -> tuple[Tensor | None, ...]:
        from . import torch as operations

        hidden, lm_head, ids, mask, kept = ctx.saved_tensors
        rounds_logits, chunk, json = ctx.rest
        given = _arguments(ids, mask, sent.contiguous().float(), json)
        asked = ctx.needs_input_grad[:2]
        made = operations._head_gradient(torch.ones(()), None, None, kept, *asked, hidden, lm_head, rounds_logits, chunk, *given)
        return *operations._asked(made, asked), None, None, None, None, None
