"""verl without flash-attention."""

from peers import absent, bare

bare("verl", "verl.utils")
absent("ray")

import torch  # noqa: E402
from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits  # noqa: E402

from protocol import Outputs, Problem, versions  # noqa: E402
from torch_kernels import autograd  # noqa: E402

ABOUT = versions("verl", "torch")


def logprobs(problem: Problem) -> Outputs:
    """Of logits divided by the temperature in their own dtype, as its FSDP engine divides them."""

    def logps(x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return logprobs_from_logits(x, ids), entropy_from_logits(x)

    return autograd(problem, logps, real=None)
