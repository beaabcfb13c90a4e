"""A step of distillation on the CPU, forward and backward, in turns with TRL's and Liger's own functions and a compiled one.

    python benches/divergence.py 512 151936             # tokens, vocabulary; medians of 9 turns, f32

From logits the step is the divergence of two arrays of logits and its gradient by the student's; from hidden states of 64 numbers it has
the products of both heads too, and those of the gradients. assay.torch is judged first, on a few problems, and the others are compared with
it: what differs by more than 1e-4 is not timed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import assay
import assay.torch
import torch
import torch.nn.functional as F
from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss
from trl.experimental.gkd import GKDTrainer

TURNS = 9
HIDDEN = 64
KINDS: tuple[tuple[str, float | None, float], ...] = (("forward_kl", None, 0.0), ("reverse_kl", None, 1.0), ("jensen_shannon", 0.5, 0.5))
Program = Callable[[Any, Any], Any]


def plain(beta: float) -> Program:
    """The divergence as a user writes it down."""

    def fn(student: Any, teacher: Any) -> Any:
        lp, lq = student.log_softmax(-1), teacher.log_softmax(-1)
        if beta == 0.0:
            return F.kl_div(lp, lq, reduction="batchmean", log_target=True)
        if beta == 1.0:
            return F.kl_div(lq, lp, reduction="batchmean", log_target=True)
        lm = torch.logaddexp(lp + torch.tensor(1 - beta).log(), lq + torch.tensor(beta).log())
        of_teacher = F.kl_div(lm, lq, reduction="batchmean", log_target=True)
        return beta * of_teacher + (1 - beta) * F.kl_div(lm, lp, reduction="batchmean", log_target=True)

    return fn


def of_logits(kind: str, beta: float | None, weight: float) -> dict[str, Program]:
    def ours(student: Any, teacher: Any) -> Any:
        return assay.torch.divergence(student, teacher, kind=kind, beta=beta, reduction="mean")

    def trl(student: Any, teacher: Any) -> Any:
        return GKDTrainer.generalized_jsd_loss(student, teacher, beta=weight, temperature=1.0)

    return {"assay.torch": ours, "TRL generalized_jsd_loss": trl, "torch.compile": torch.compile(plain(weight))}


def of_hidden(kind: str, beta: float | None, weight: float) -> dict[str, Callable[..., Any]]:
    def ours(h: Any, head: Any, th: Any, teacher_head: Any) -> Any:
        made_by = {"hidden": h, "lm_head": head, "teacher_hidden": th, "teacher_lm_head": teacher_head}
        return assay.torch.divergence(None, kind=kind, beta=beta, reduction="mean", **made_by)

    liger = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=weight, compiled=True, chunk_size=64)

    def theirs(h: Any, head: Any, th: Any, teacher_head: Any) -> Any:
        return liger(h, head, th, teacher_head, torch.zeros(h.shape[0], dtype=torch.long))

    return {"assay.torch": ours, "Liger LigerFusedLinearJSDLoss": theirs}


def run(title: str, programs: dict[str, Callable[..., Any]], leaves: list[Any], inputs: tuple[Any, ...], copied: Any) -> None:
    """Compares the programs, times them in turns and prints the medians."""
    results = {name: [value := fn(*inputs), *torch.autograd.grad(value, leaves)] for name, fn in programs.items()}
    for name, (ours, theirs) in {name: (results["assay.torch"], theirs) for name, theirs in results.items()}.items():
        apart = max(float((a - b).detach().norm() / a.detach().norm()) for a, b in zip(ours, theirs, strict=True))
        if not apart <= 1e-4:
            print(f"{name}: {apart:.1e} from assay.torch, not timed")
            del programs[name]
    del results
    taken: dict[str, list[float]] = {name: [] for name in [*programs, "a copy of the logits"]}
    for turn in range(TURNS + 2):
        for name, fn in programs.items():
            for leaf in leaves:
                leaf.grad = None
            began = time.perf_counter()
            fn(*inputs).backward()
            if turn >= 2:
                taken[name].append(time.perf_counter() - began)
        began = time.perf_counter()
        copied[0].copy_(copied[1])
        if turn >= 2:
            taken["a copy of the logits"].append(time.perf_counter() - began)
    print(title)
    for name, seconds in taken.items():
        print(f"  {name:30} {1e3 * statistics.median(seconds):8.1f} ms   {1e3 * min(seconds):8.1f} to {1e3 * max(seconds):.1f}")


def main() -> None:
    tokens, vocab = (int(word) for word in sys.argv[1:3])
    torch.manual_seed(0)
    student = torch.randn(tokens, vocab, requires_grad=True)
    teacher = student.detach() + 0.5 * torch.randn(tokens, vocab)
    copied = torch.empty_like(teacher), teacher
    where = f"{torch.get_num_threads()} threads, PyTorch {torch.__version__}"
    quick: dict[str, Any] = {"cases": 8, "wide": 0, "power": False, "repro_dir": None, "progress": False, "dtypes": ["f32"], "shapes": ["2x3x33", "1x4x1031"]}
    for kind, beta, weight in KINDS:
        programs = of_logits(kind, beta, weight)
        if not (report := assay.check_divergence(programs["assay.torch"], kind=kind, beta=beta, reduction="mean", **quick)):
            raise SystemExit(f"assay.torch is wrong, not timed: {report}")
        torch.compiler.reset()
        run(f"{kind}, [{tokens},{vocab}] f32, {where}", programs, [student], (student, teacher), copied)
    h, th = (torch.randn(tokens, HIDDEN) for _ in range(2))
    head, teacher_head = (torch.randn(vocab, HIDDEN) / HIDDEN**0.5 for _ in range(2))
    h.requires_grad_(), head.requires_grad_()
    for kind, beta, weight in KINDS:
        title = f"{kind}, [{tokens},{HIDDEN}] x [{vocab},{HIDDEN}] f32, {where}"
        run(title, of_hidden(kind, beta, weight), [h, head], (h, head, th, teacher_head), copied)


if __name__ == "__main__":
    main()
