"""PyTorch on the CPU."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F

from grpo import closed_form, reduce, token_loss
from protocol import Outputs, Problem, Tokens, versions

ABOUT = versions("torch")
torch.set_num_threads(1)

Logps = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def array(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def moved(problem: Problem, real: torch.dtype) -> Tokens:
    tensors = (tensor(array) for array in problem.tokens)
    return Tokens(*(each.to(real) if each.is_floating_point() else each.long() for each in tensors))


def outputs(logits: torch.Tensor, values: dict[str, torch.Tensor]) -> Outputs:
    dlogits = values.pop("dlogits").to(logits.dtype)
    return {name: array(value.float()) for name, value in values.items()} | {"dlogits": array(dlogits)}


def autograd(
    problem: Problem, logps: Logps, real: torch.dtype | None = torch.float32, *, divide: bool = True
) -> Outputs:
    """By autograd through `logps`, of logits in `real`, or as they are, divided by the temperature, or not yet."""
    leaf = tensor(problem.logits).requires_grad_()
    tokens = moved(problem, real or torch.float32)
    x = leaf.to(real) if real else leaf
    logp, entropy = logps(x / problem.numbers.temperature if divide else x, tokens.ids)
    losses = token_loss(torch, logp, tokens, problem.form, problem.numbers, torch.detach)
    loss = reduce(losses, entropy, tokens, problem.form, problem.numbers)
    (dlogits,) = torch.autograd.grad(loss, leaf)
    return outputs(leaf, {"loss": loss, "logp": logp, "entropy": entropy, "token_loss": losses, "dlogits": dlogits})


def chosen(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return x.gather(-1, ids[..., None])[..., 0]


def entropy_of(logps: torch.Tensor) -> torch.Tensor:
    p = logps.exp()
    return -(p * torch.where(p > 0, logps, 0.0)).sum(-1)


def by_logsumexp(x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    lse = x.logsumexp(-1, keepdim=True)
    return chosen(x, ids) - lse[..., 0], entropy_of(x - lse)


def by_cross_entropy(x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logp = -F.cross_entropy(x.flatten(0, 1), ids.flatten(), reduction="none").view(ids.shape)
    return logp, entropy_of(x - x.logsumexp(-1, keepdim=True))


def by_log_softmax(x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logps = x.log_softmax(-1)
    return chosen(logps, ids), entropy_of(logps)


def by_sum_in_bf16(x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    top = x.amax(-1, keepdim=True).detach()
    total = torch.zeros_like(top)
    for block in (x - top).exp().split(256, -1):
        total = (total + block.sum(-1, keepdim=True)).bfloat16().float()
    lse = top + total.log()
    return chosen(x, ids) - lse[..., 0], entropy_of(x - lse)


def closed(problem: Problem, *, gaps: bool) -> Outputs:
    logits, tokens = tensor(problem.logits), moved(problem, torch.float32)
    take = torch.take_along_dim
    return outputs(logits, closed_form(torch, take, logits.float(), tokens, problem.form, problem.numbers, gaps=gaps))


def logsumexp(problem: Problem) -> Outputs:
    return autograd(problem, by_logsumexp)


def logsumexp_float64(problem: Problem) -> Outputs:
    return autograd(problem, by_logsumexp, torch.float64)


def cross_entropy(problem: Problem) -> Outputs:
    return autograd(problem, by_cross_entropy)


def log_softmax(problem: Problem) -> Outputs:
    return autograd(problem, by_log_softmax)


def textbook(problem: Problem) -> Outputs:
    return closed(problem, gaps=False)


def gaps(problem: Problem) -> Outputs:
    return closed(problem, gaps=True)


def not_upcast(problem: Problem) -> Outputs:
    return autograd(problem, by_log_softmax, real=None)


def sum_in_bf16(problem: Problem) -> Outputs:
    return autograd(problem, by_sum_in_bf16)
