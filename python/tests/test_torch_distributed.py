"""`assay.torch` under DDP and FSDP2: two processes with gloo, whose losses and gradients add up to those of the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-extensive")
import assay.torch  # noqa: E402

WORLD, ROWS, TOKENS, HIDDEN, VOCAB = 2, 4, 6, 8, 301


def model() -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, VOCAB, bias=False))


def batch() -> dict[str, Any]:
    torch.manual_seed(2)
    mask = torch.arange(TOKENS) < torch.tensor([[6], [1], [3], [5]])
    return {
        "hidden": torch.randn(ROWS, TOKENS, HIDDEN),
        "ids": torch.randint(VOCAB, (ROWS, TOKENS)),
        "advantages": torch.randn(ROWS),
        "mask": mask,
        "old_logp": -5.7 + torch.randn(ROWS, TOKENS) / 8,
        "ref_logp": -5.7 + torch.randn(ROWS, TOKENS) / 8,
    }


def loss_of(policy: Any, part: dict[str, Any], count: Any) -> Any:
    arrays = {name: array for name, array in part.items() if name != "hidden"}
    return assay.torch.grpo_loss(policy(part["hidden"]), **arrays, spec="trl", beta=0.04, normalizer=count).loss


def work(rank: int, folder: str, engine: str) -> None:
    import torch.distributed as dist

    store = Path(folder) / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    policy: Any = model()
    if engine == "ddp":
        policy = torch.nn.parallel.DistributedDataParallel(policy)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        policy = fully_shard(policy, mesh=init_device_mesh("cpu", (WORLD,)))
    part = {name: array.chunk(WORLD)[rank] for name, array in batch().items()}
    count = part["mask"].sum()
    dist.all_reduce(count)
    loss = loss_of(policy, part, count)
    # Both engines take the mean over ranks.
    (loss * WORLD).backward()
    whole = loss.detach().clone()
    dist.all_reduce(whole)
    gradients = [x.grad.full_tensor() if hasattr(x.grad, "full_tensor") else x.grad for x in policy.parameters()]
    torch.save([whole, *gradients], Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_ranks_add_up_to_the_whole_batch(engine: str, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(work, (str(tmp_path), engine), WORLD)
    policy, whole = model(), batch()
    loss = loss_of(policy, whole, whole["mask"].sum())
    loss.backward()
    expected = [loss.detach(), *(x.grad for x in policy.parameters())]
    for rank in range(WORLD):
        for ours, theirs in zip(torch.load(tmp_path / f"{rank}.pt"), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-7)
