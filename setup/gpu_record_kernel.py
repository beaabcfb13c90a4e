"""Judges and times an emitted kernel that JAX or PyTorch calls: the steps of `setup/gpu-record.sh` that run the examples.

    gpu_record_kernel.py jax|torch --assay FILE [--target h100] [--problem-shape BxTxV] [--shape BxTxV] [--scratch FOLDER] [--json FILE]

`assay emit` writes the kernel, `assay generate` a problem; the kernel is called as `examples/gpu/jax_ffi.py` and `examples/gpu/torch_kernel.py`
do, and `assay judge` judges what it returned. For JAX, `XLA_FLAGS` decides whether XLA puts the call into a command buffer. If other records of
this script are beside the JSON, their results must have the same bits. Ends with 1 if something is wrong. **No GPU has run this.**
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples/gpu"))
import jax_ffi  # noqa: E402
import torch_kernel  # noqa: E402

# Calls in one program: XLA makes no command buffer of fewer than five operations unless it is asked to.
CHAIN = (4, 24)


# The dtypes of a safetensors file. NumPy has no bfloat16: its bits are carried.
DTYPES = {"BF16": np.dtype("u2"), "F32": np.dtype("f4"), "I64": np.dtype("i8"), "U8": np.dtype("u1")}


def read(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file."""
    contents = path.read_bytes()
    begins = 8 + struct.unpack_from("<Q", contents)[0]
    header = json.loads(contents[8:begins])
    header.pop("__metadata__", None)
    tensors = {}
    for name, of in header.items():
        first, last = of["data_offsets"]
        tensors[name] = np.frombuffer(contents[begins + first : begins + last], DTYPES[of["dtype"]]).reshape(of["shape"])
    return tensors


def write(path: pathlib.Path, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file of these tensors."""
    names, header, at = {dtype: name for name, dtype in DTYPES.items()}, {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": names[tensor.dtype], "shape": tensor.shape, "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    # Tensors begin at multiples of eight bytes.
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensor.tobytes() for tensor in tensors.values()))


def operands(manifest: dict[str, Any], problem: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What `grpo_one_pass` is handed of a problem of plain PPO-clip, by the names of its arguments."""
    b, t = problem["ids"].shape
    mask = problem["mask"].astype("f4")
    counted = np.float32(max(mask.sum(), 1))
    advantages = np.broadcast_to(problem["advantages"].reshape(b, -1), (b, t)).astype("f4")
    # A token's advantage, old_logp and ref_logp, its weight in the loss, and whether it counts.
    columns = [advantages, problem["old_logps"], np.zeros_like(mask), mask / counted, mask]
    tokens = np.stack(columns + [np.zeros_like(mask)] * 3, axis=-1).reshape(1, b * t, 8)
    of_spec = manifest["numbers"]
    named = [of_spec[name] for name in ("low", "high", "delta", "dual_clip", "beta", "inverse_temperature")]
    # The last is the weight of the entropies' mean, which plain PPO-clip has not.
    numbers = np.array([*named, 0.0], "f4")
    ids = problem["ids"].reshape(b * t).astype("i4")
    return {"ids": ids, "numbers": numbers, "logits": problem["logits"], "tokens": tokens}


def emitted(asked: argparse.Namespace, shape: str, folder: pathlib.Path) -> dict[str, Any]:
    """The manifest of the kernel for a shape, which lies in the folder."""
    arguments = ["emit", "-q", "--impl", "gpu-one-pass", "--target", asked.target, "--shape", shape, "-o", folder]
    subprocess.run([asked.assay, *arguments], check=True)
    return json.loads((folder / "manifest.json").read_text())


class Jax:
    """Calls a kernel by `jax.ffi.ffi_call` within `jax.jit`."""

    def __init__(self, folder: pathlib.Path, manifest: dict[str, Any]) -> None:
        import jax

        self.jax = jax
        self.kernel = manifest["kernels"][0]
        self.run, self.inputs = jax_ffi.call(folder, self.kernel)
        self.device = jax.devices()[0].device_kind

    def once(self, arrays: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """dlogits, their bits, and the results."""
        donated = [one["over"] for one in self.kernel["arguments"] if "over" in one]
        given = [self.jax.numpy.asarray(array.view(one.dtype) if one.dtype.itemsize == 2 else array)
                 for array, one in zip(arrays, self.inputs, strict=True)]
        dlogits, results = self.jax.jit(self.run, donate_argnums=donated)(*given)
        return np.asarray(dlogits).view("u2"), np.asarray(results)

    def timed(self) -> dict[str, Any]:
        """Milliseconds of one call, from programs of few and of many calls, each of whose logits are the dlogits of the one before."""
        jnp = self.jax.numpy
        arrays = [jnp.ones(one.shape, one.dtype) for one in self.inputs]
        place = max(range(len(arrays)), key=lambda i: arrays[i].size)
        took, buffers = {}, {}
        for calls in CHAIN:

            def chained(*given: Any, calls: int = calls) -> Any:
                now, results = list(given), None
                for _ in range(calls):
                    now[place], results = self.run(*now)
                return now[place], results

            program = self.jax.jit(chained, donate_argnums=place).lower(*arrays).compile()
            buffers[calls] = (program.as_text() or "").count("command_buffer")
            each = []
            for _ in range(8):
                began = time.perf_counter()
                arrays[place], results = program(*arrays)
                results.block_until_ready()
                each.append(time.perf_counter() - began)
            # The first runs make the command buffer, or load the kernel.
            took[calls] = statistics.median(each[3:])
        few, many = CHAIN
        return {
            "program_ms": {str(calls): 1e3 * seconds for calls, seconds in took.items()},
            "call_ms": 1e3 * (took[many] - took[few]) / (many - few),
            "command_buffers_in_the_program": buffers,
        }


class Torch:
    """Launches a kernel on PyTorch's tensors and its stream."""

    def __init__(self, folder: pathlib.Path, manifest: dict[str, Any]) -> None:
        import torch

        self.torch = torch
        self.kernel = torch_kernel.Kernel(str(folder))
        self.inputs = [one for one in manifest["kernels"][0]["arguments"] if one["role"] == "input"]
        self.device = torch.cuda.get_device_name()

    def once(self, arrays: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """dlogits, their bits, and the results."""
        torch = self.torch
        # PyTorch copies signed integers from any NumPy, unsigned ones not.
        given = [(torch.from_numpy(array.view("i2").copy()).view(torch.bfloat16) if array.dtype.itemsize == 2
                  else torch.from_numpy(np.ascontiguousarray(array))).cuda() for array in arrays]
        place = [one["name"] for one in self.inputs].index("logits")
        (results,) = self.kernel(*given)
        return given[place].view(torch.int16).cpu().numpy().view("u2"), results.cpu().numpy()

    def timed(self) -> dict[str, Any]:
        """Milliseconds of a launch by the device's events, of many back to back."""
        torch, launches = self.torch, CHAIN[1]
        named = torch_kernel.DTYPES
        given = [torch.ones(one["shape"], dtype=getattr(torch, named[one["dtype"]]), device="cuda") for one in self.inputs]
        for _ in range(3):
            self.kernel(*given)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(launches):
            self.kernel(*given)
        last.record()
        torch.cuda.synchronize()
        return {"call_ms": first.elapsed_time(last) / launches}


def judged(asked: argparse.Namespace, called: type[Jax] | type[Torch], folder: pathlib.Path) -> tuple[bool, str, str]:
    """Whether the judge passes what the kernel makes of a problem, the SHA-256 of that, and the device."""
    problem_file, candidate_file = folder / "problem.safetensors", folder / "candidate.safetensors"
    subprocess.run([asked.assay, "generate", "-q", "--shape", asked.problem_shape, "-o", problem_file], check=True)
    problem = read(problem_file)
    manifest = emitted(asked, asked.problem_shape, folder / "kernel")
    given = operands(manifest, problem)
    names = [one["name"] for one in manifest["kernels"][0]["arguments"] if one["role"] == "input"]
    call = called(folder / "kernel", manifest)
    dlogits, results = call.once([given[name] for name in names])
    b, t = problem["ids"].shape
    counts = problem["mask"].astype(bool)
    logp, entropy, token_loss = (np.where(counts, results[..., i].reshape(b, t), 0).astype("f4") for i in range(3))
    weight = given["tokens"][..., 3].reshape(b, t).astype("f8")
    loss = np.array((weight * token_loss).sum(), "f4")
    outputs = {"loss": loss, "dlogits": dlogits, "logp": logp, "entropy": entropy, "token_loss": token_loss}
    write(candidate_file, outputs)
    verdict = subprocess.run([asked.assay, "judge", "--problem", problem_file, "--candidate", candidate_file, "--grade", "exact"], check=False)
    return verdict.returncode == 0, hashlib.sha256(candidate_file.read_bytes()).hexdigest(), call.device


def differing(asked: argparse.Namespace, digest: str) -> list[str]:
    """The other records of this problem whose results have other bits."""
    beside = sorted(asked.json.parent.glob("*.json")) if asked.json else []
    others = {path.name: json.loads(path.read_text()) for path in beside if path != asked.json}
    same_problem = {name: of for name, of in others.items() if of.get("problem_shape") == asked.problem_shape}
    return [name for name, of in same_problem.items() if of["sha256"] != digest]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("through", choices=("jax", "torch"))
    parser.add_argument("--assay", type=pathlib.Path, required=True)
    parser.add_argument("--target", default="h100")
    parser.add_argument("--problem-shape", default="1x64x151936")
    parser.add_argument("--shape", default="1x4096x151936")
    parser.add_argument("--scratch", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path)
    asked = parser.parse_args()
    called: type[Jax] | type[Torch] = Jax if asked.through == "jax" else Torch
    with tempfile.TemporaryDirectory(dir=asked.scratch) as scratch:
        folder = pathlib.Path(scratch)
        passed, digest, device = judged(asked, called, folder)
        found = {"through": asked.through, "version": sys.modules[asked.through].__version__, "device": device}
        if asked.through == "jax":
            found["xla_flags"] = os.environ.get("XLA_FLAGS", "")
        found |= {"problem_shape": asked.problem_shape, "judge_passes": passed, "sha256": digest}
        # What is wrong is not timed.
        if passed:
            found["shape"] = asked.shape
            found |= called(folder / "timed", emitted(asked, asked.shape, folder / "timed")).timed()
    found["other_bits_in"] = differing(asked, digest)
    found["passed"] = passed and not found["other_bits_in"]
    text = json.dumps(found, indent=2)
    print(text)
    if asked.json:
        asked.json.write_text(text + "\n")
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
