"""TRL: log-probabilities and entropies of given logits, and of a fused LM head."""

import torch
from trl.kernels.chunked_logprob import ChunkedLogProbFunction
from trl.trainer.utils import selective_log_softmax_and_entropy

from peers import fits_identity
from protocol import Outputs, Problem, Unsupported, versions
from torch_kernels import autograd

ABOUT = versions("trl", "torch")


def selective(problem: Problem) -> Outputs:
    def logps(x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return selective_log_softmax_and_entropy(x, ids, temperature=problem.numbers.temperature)

    return autograd(problem, logps, real=None, divide=False)


def fused(problem: Problem) -> Outputs:
    """The logits as hidden states, the head the identity."""
    if not fits_identity(problem.logits):
        raise Unsupported("a head of this size, or −∞ through a product")

    def logps(x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, head, temperature = x.flatten(0, 1), torch.eye(x.shape[-1], dtype=x.dtype), problem.numbers.temperature
        logp, entropy, *_ = ChunkedLogProbFunction.apply(hidden, head, None, ids.flatten(), temperature, 8192)
        return logp.view(ids.shape), entropy.view(ids.shape)

    return autograd(problem, logps, real=None, divide=False)
