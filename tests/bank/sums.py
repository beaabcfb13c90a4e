"""Prints what the errors of PyTorch's log-probabilities at V = 151,936 are made of: the sum of a row's exponentials in f32.

    python tests/bank/sums.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

VOCAB = 151_936
LANES = 16


def logits(seed: int) -> Any:
    """Rows like a language model's: a few dozen large logits, and a long tail."""
    random = torch.Generator().manual_seed(seed)
    rare = torch.rand(1, 4, VOCAB, generator=random) < 2e-4
    return 2 * torch.randn(1, 4, VOCAB, generator=random) + 10 * rare


def log_sum_errors(x: Any) -> dict[str, Any]:
    """The error of −ln S where the terms are added one by one, and in lanes: `np.cumsum` rounds each partial sum."""
    terms = (x - x.amax(-1, keepdim=True)).exp()[0]
    exact = terms.double().sum(-1).log()
    one_by_one = torch.tensor([float(np.cumsum(row)[-1]) for row in terms.numpy()]).double()
    in_lanes = torch.tensor([float(np.cumsum(row.reshape(-1, LANES), 0)[-1].sum()) for row in terms.numpy()]).double()
    return {"one by one": exact - one_by_one.log(), f"in {LANES} lanes": exact - in_lanes.log()}


def main() -> None:
    torch.set_num_threads(1)
    for seed in range(3):
        x = logits(seed)
        ids = x.argmax(-1)
        exact = x.double().log_softmax(-1).gather(-1, ids[..., None])[0, :, 0]
        errors = {
            "F.cross_entropy(x.transpose(1, 2), ids)": -F.cross_entropy(x.transpose(1, 2), ids, reduction="none")[0] - exact,
            "x.log_softmax(-1)": x.log_softmax(-1).gather(-1, ids[..., None])[0, :, 0] - exact,
        }
        of_sums = {f"−ln S, terms added {how}": error for how, error in log_sum_errors(x).items()}
        for name, error in (errors | of_sums).items():
            print(f"{name:42}", " ".join(f"{value:+.2e}" for value in error.tolist()))


if __name__ == "__main__":
    main()
