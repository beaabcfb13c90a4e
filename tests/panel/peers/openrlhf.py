"""OpenRLHF without flash-attention, not compiled."""

import os

from peers import absent, bare

os.environ["TORCHDYNAMO_DISABLE"] = "1"
bare("openrlhf", "openrlhf.models")
absent("deepspeed")

import torch  # noqa: E402
from openrlhf.models.utils import compute_entropy, log_probs_from_logits  # noqa: E402

from protocol import Outputs, Problem, versions  # noqa: E402
from torch_kernels import autograd  # noqa: E402

ABOUT = versions("openrlhf", "torch")


def logprobs(problem: Problem) -> Outputs:
    """Of logits in f32, which its actor makes them before it divides by the temperature."""

    def logps(x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return log_probs_from_logits(x, ids), compute_entropy(x)

    return autograd(problem, logps)
