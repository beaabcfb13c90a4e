"""Judges and times `assay.torch.grpo_loss` on CUDA tensors: the steps of `setup/gpu-record.sh` that need PyTorch.

    gpu_record_torch.py campaign [--cases N] [--device cuda] [--json FILE]
    gpu_record_torch.py step [--shape BxTxV] [--steps N] [--device cuda] [--json FILE]
    gpu_record_torch.py graph [--shape BxTxV] [--steps N] [--json FILE]

`campaign` has generated problems of several losses and dtypes judged at grade `exact`. `step` times a forward and a backward pass in bf16 and
counts the device's operations in one. `graph` captures the same step in a CUDA graph and compares loss and gradient with the step's, to the
bit. Each prints JSON, and ends with 1 if something is wrong. **No GPU has run this**; `--device cpu` tries the first two without one.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import statistics
import sys
import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import assay
import assay.torch

ARRAYS = ("ids", "advantages", "mask", "old_logp", "ref_logp", "temperature")
# Operations of PyTorch that are no launch: they make a view, or an array without contents.
FREE = ("view", "reshape", "expand", "slice", "select", "squeeze", "unsqueeze", "transpose", "alias", "detach", "as_strided", "empty", "permute",
        "_unsafe_view", "t", "split", "unbind")


def on(device: str, problem: assay.Problem) -> tuple[torch.Tensor, dict[str, Any]]:
    """The logits of a problem and the other arguments of `grpo_loss`, on a device."""
    arrays = vars(problem.torch())
    rest = {name: arrays[name].to(device) for name in ARRAYS if isinstance(arrays.get(name), torch.Tensor)}
    return arrays["logits"].to(device), rest


def outputs(problem: assay.Problem, device: str, inplace: bool) -> dict[str, torch.Tensor]:
    """What a verdict is given on, copied to the host."""
    logits, rest = on(device, problem)
    logits.requires_grad_()
    # In place the loss writes over what is no leaf.
    given = logits * 1.0 if inplace else logits
    result = assay.torch.grpo_loss(given, **rest, spec=problem.spec, inplace=inplace)
    result.loss.backward()
    assert logits.grad is not None
    named = {"loss": result.loss, "logp": result.logp, "entropy": result.entropy, "token_loss": result.token_loss}
    return {name: tensor.detach().cpu() for name, tensor in {**named, "dlogits": logits.grad}.items()}


def campaign(asked: argparse.Namespace) -> dict[str, Any]:
    """Problems of the losses that differ most in what surrounds the kernels."""
    specs = {
        "trl": assay.spec("trl", beta=0.04),
        "trl-sequence": assay.spec("trl", beta=0.04, loss_type="grpo", importance_sampling_level="sequence", entropy_coef=0.01),
        "verl": assay.spec("verl"),
        "temperature": assay.spec(temperature=0.7, entropy_coef=0.01),
    }
    failures, judged = [], 0
    for name, spec in specs.items():
        for shapes, cases in (("many", asked.cases), (["1x4x151936"], 1)):
            for problem in assay.problems(spec, cases, 7, dtypes=("bf16", "f32", "f16"), shapes=shapes):
                for inplace in (False, True):
                    verdicts = problem.check(outputs(problem, asked.device, inplace), grade="exact")
                    judged += 1
                    if not verdicts:
                        failures.append(f"{name}, in place {inplace}: {verdicts}")
    return {"judged": judged, "losses": list(specs), "failures": failures[:8], "passed": judged > 0 and not failures}


class Step:
    """A forward and a backward pass on one batch whose arrays stay where they are."""

    def __init__(self, device: str, shape: str) -> None:
        b, t, v = map(int, shape.split("x"))
        draw = torch.Generator(device).manual_seed(1)
        normal = lambda *extents: torch.randn(*extents, generator=draw, device=device)  # noqa: E731
        self.logits = torch.empty(b, t, v, dtype=torch.bfloat16, device=device)
        # Row by row: the draws in f32 would be twice the logits.
        for row in self.logits.view(-1, v).split(256):
            row.copy_(2 * normal(*row.shape))
        self.logits.requires_grad_()
        self.ids = torch.randint(v, (b, t), generator=draw, device=device)
        self.advantages = normal(b)
        self.mask = torch.ones(b, t, dtype=torch.bool, device=device)
        self.spec = assay.spec()
        self.old_logp = torch.zeros(b, t, device=device)
        with torch.no_grad():
            logp = self.loss().logp
        self.old_logp = (logp + 0.1 * normal(b, t)).contiguous()

    def loss(self) -> assay.torch.GrpoLoss:
        return assay.torch.grpo_loss(self.logits, self.ids, self.advantages, self.mask, self.old_logp, spec=self.spec)

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.logits.grad = None
        result = self.loss()
        result.loss.backward()
        assert self.logits.grad is not None
        return result.loss.detach(), self.logits.grad


class Counted(TorchDispatchMode):
    """Counts operations that reach the dispatcher and launch something."""

    def __init__(self) -> None:
        super().__init__()
        self.names: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name not in FREE:
            self.names[name] += 1
        return function(*arguments, **(named or {}))


def timed(run: Any, steps: int, device: str) -> dict[str, float]:
    """Milliseconds a step: each by the device's events, and all back to back by the host's clock."""
    for _ in range(3):
        run()
    if device == "cpu":
        began = time.perf_counter()
        for _ in range(steps):
            run()
        return {"back_to_back_ms": 1e3 * (time.perf_counter() - began) / steps}
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    began = time.perf_counter()
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    enqueued = time.perf_counter()
    torch.cuda.synchronize()
    ended = time.perf_counter()
    each = [before.elapsed_time(after) for before, after in zip(events, events[1:], strict=False)]
    return {
        "step_ms_p50": statistics.median(each),
        "step_ms_min": min(each),
        "step_ms_max": max(each),
        "host_enqueues_ms": 1e3 * (enqueued - began) / steps,
        "back_to_back_ms": 1e3 * (ended - began) / steps,
    }


def launched(run: Any) -> dict[str, Any]:
    """What the device did in one step, by PyTorch's profiler: kernels, copies and fills by name, and their time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        run()
        torch.cuda.synchronize()
    ran = [event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    of_time: collections.Counter[str] = collections.Counter()
    for event in ran:
        of_time[event.name[:80]] += event.time_range.elapsed_us()
    own = {name: us for name, us in of_time.items() if "grpo_" in name}
    return {
        "device_operations": len(ran),
        "kernels_ms": sum(own.values()) / 1e3,
        "all_ms": sum(of_time.values()) / 1e3,
        "longest_us": dict(of_time.most_common(12)),
    }


def step(asked: argparse.Namespace) -> dict[str, Any]:
    run = Step(asked.device, asked.shape)
    found: dict[str, Any] = timed(run, asked.steps, asked.device)
    with Counted() as counted:
        run()
    found["dispatched"] = sum(counted.names.values())
    found["dispatched_most"] = dict(counted.names.most_common(12))
    if asked.device == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
        found["logits_bytes"] = run.logits.numel() * run.logits.element_size()
        # Before the profiler, whose library may be missing: what was timed is not lost.
        try:
            found |= launched(run)
        except Exception as error:  # noqa: BLE001
            found["profiler"] = f"none: {error}"
    return {**found, "passed": True}


def graph(asked: argparse.Namespace) -> dict[str, Any]:
    run = Step("cuda", asked.shape)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    # The first step on a stream assembles kernels and allocates: it cannot be captured.
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    loss, gradient = (tensor.clone() for tensor in run())
    captured = torch.cuda.CUDAGraph()
    run.logits.grad = None
    with torch.cuda.graph(captured):
        of_graph = run()
    for tensor in of_graph:
        tensor.fill_(float("nan"))
    captured.replay()
    torch.cuda.synchronize()
    same = {"loss": torch.equal(of_graph[0], loss), "dlogits": torch.equal(of_graph[1], gradient)}
    return {**timed(captured.replay, asked.steps, "cuda"), "same_bits": same, "passed": all(same.values())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("campaign", "step", "graph"))
    parser.add_argument("--cases", type=int, default=24)
    parser.add_argument("--shape", default="1x4096x151936")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=pathlib.Path)
    asked = parser.parse_args()
    name = torch.cuda.get_device_name() if asked.device == "cuda" else "cpu"
    head = {"what": asked.what, "device": name, "torch": torch.__version__, "cuda": torch.version.cuda}
    if asked.what != "campaign":
        head |= {"shape": asked.shape, "dtype": "bf16", "steps": asked.steps}
    found = {**head, **{"campaign": campaign, "step": step, "graph": graph}[asked.what](asked)}
    text = json.dumps(found, indent=2)
    print(text)
    if asked.json:
        asked.json.write_text(text + "\n")
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
