"""PyTorch's own fused head, the identity: its plain path, and its path by chunks."""

import torch
from torch.nn import LinearCrossEntropyOptions
from torch.nn.functional import linear_cross_entropy

from peers import fits_identity
from protocol import Outputs, Problem, Unsupported, versions
from torch_kernels import Logps, autograd

ABOUT = versions("torch")
OUTPUTS = ["logp", "token_loss"]


def logps(problem: Problem, options: LinearCrossEntropyOptions | None) -> Logps:
    """The logits as hidden states."""
    if not fits_identity(problem.logits):
        raise Unsupported("a head of this size, or −∞ through a product")
    if problem.numbers.entropy_coef != 0:
        raise Unsupported("an entropy bonus")
    if problem.numbers.temperature != 1 and problem.logits.dtype.itemsize < 4:
        raise Unsupported("a temperature, by which hidden states of 16 bits would be divided before")

    def by_head(x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        head = torch.eye(x.shape[-1], dtype=x.dtype)
        losses = linear_cross_entropy(x.flatten(0, 1), head, ids.flatten(), reduction="none", options=options)
        return -losses.view(ids.shape).float(), torch.zeros(ids.shape)

    return by_head


def without_entropy(answer: Outputs) -> Outputs:
    return {name: values for name, values in answer.items() if name != "entropy"}


def plain(problem: Problem) -> Outputs:
    return without_entropy(autograd(problem, logps(problem, None), real=None))


def chunked(problem: Problem) -> Outputs:
    return without_entropy(autograd(problem, logps(problem, LinearCrossEntropyOptions()), real=None))
