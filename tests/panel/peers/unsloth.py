"""unsloth_zoo, not compiled. Its entropy is not public apart from its fused head."""

import os
from tempfile import TemporaryDirectory

from peers import bare

CACHE = TemporaryDirectory()  # else a folder where this is run
os.environ |= {"TORCHDYNAMO_DISABLE": "1", "UNSLOTH_COMPILE_LOCATION": CACHE.name}
bare("unsloth_zoo")

import torch  # noqa: E402
from unsloth_zoo.rl_replacements import chunked_selective_log_softmax  # noqa: E402

from protocol import Outputs, Problem, Unsupported, versions  # noqa: E402
from torch_kernels import autograd  # noqa: E402

ABOUT = versions("unsloth_zoo", "torch")
OUTPUTS = ["logp", "token_loss"]


def selective(problem: Problem) -> Outputs:
    if problem.numbers.entropy_coef != 0:
        raise Unsupported("an entropy bonus")

    def logps(x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logp = chunked_selective_log_softmax(x, ids, problem.numbers.temperature)
        return logp, torch.zeros(ids.shape)

    outputs = autograd(problem, logps, real=None, divide=False)
    outputs.pop("entropy")
    return outputs
