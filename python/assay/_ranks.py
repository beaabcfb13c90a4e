"""Ranks: the share of a problem that one process of several computes, and the exchange between them."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

from ._errors import AssayError

CUTS = ("vocabulary", "batch", "tokens")
_MOST = 64


@dataclass(frozen=True)
class Shard:
    """The share of one rank: the indices `start` to `end`, without the last, of the axis that is cut.

        >>> import assay
        >>> shard = assay.Shard(rank=1, ranks=2, cut="vocabulary", start=50, end=100)
        >>> list(range(100))[shard.slice][0], shard.ranks
        (50, 2)

    Attributes:
        rank: The rank, from 0.
        ranks: The number of ranks.
        cut: The axis that the ranks share: "vocabulary", "batch" or "tokens".
        start: The first index of the share.
        end: The index after the last of the share.
    """

    rank: int
    ranks: int
    cut: str
    start: int
    end: int

    @property
    def slice(self) -> slice:
        """The share as a slice of the axis that is cut."""
        return slice(self.start, self.end)

    def of_tokens(self, array: Any) -> Any:
        """Returns the share of an array `[B,T,…]`, which is the whole array where the vocabulary is cut."""
        return {"vocabulary": lambda: array, "batch": lambda: array[self.slice], "tokens": lambda: array[:, self.slice]}[self.cut]()

    def of_logits(self, array: Any) -> Any:
        """Returns the share of logits `[B,T,V]`."""
        return array[..., self.slice] if self.cut == "vocabulary" else self.of_tokens(array)


def expect(ranks: object, cut: object) -> tuple[int, str]:
    """Checks the number of ranks and the axis that they share.

    Raises:
        AssayError: One of them is invalid.
    """
    if type(ranks) is not int or not 1 <= ranks <= _MOST:
        raise AssayError(f"ranks: got {ranks!r}, expected an integer from 1 to {_MOST}")
    if cut not in CUTS:
        raise AssayError(f"cut: got {cut!r}, expected one of {', '.join(CUTS)}")
    return ranks, str(cut)


def join() -> None:
    """Makes PyTorch's default process group of the ranks, if this process is one of several and its kernel uses PyTorch."""
    ranks = os.environ.get("ASSAY_RANKS")
    if ranks is None or "torch" not in sys.modules:
        return
    import torch.distributed as distributed

    if not distributed.is_initialized():
        distributed.init_process_group(
            "gloo", init_method=f"file://{os.environ['ASSAY_RENDEZVOUS']}", rank=int(os.environ["ASSAY_RANK"]), world_size=int(ranks)
        )
