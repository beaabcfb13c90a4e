"""Log-probabilities of sampled tokens in PyTorch, forward and backward. `python torch_logp.py` judges two: one passes."""
import torch

import assay


def logp(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    x = logits.float() / 0.7
    return x.gather(-1, ids[..., None])[..., 0] - x.logsumexp(-1)


def without_upcast(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """What many a trainer's `selective_log_softmax` does with 16 bits."""
    return torch.log_softmax(logits / 0.7, -1).gather(-1, ids[..., None])[..., 0]


if __name__ == "__main__":
    for scores in (logp, without_upcast):
        print(assay.check_logp(scores, temperature=0.7, dtypes=["bf16"]))
