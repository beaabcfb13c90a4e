"""Programs compiled for chips that need not be here, and their memory."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

PLUGINS = pathlib.Path(__file__).resolve().parents[2] / ".plugins"


@contextlib.contextmanager
def devices(target: str) -> Iterator[tuple[list[Any], str]]:
    """Those of `v6e:2x4`, `h100` or the like, and the platform that is lowered for."""
    chip = target.partition(":")[0]
    if chip.startswith("v"):
        yield tpus(target, chip), "tpu"
        return
    if ":" in target:
        raise SystemExit(f"target: got {target!r}, expected {chip!r}: one GPU")
    # The folder where the plugin looks for a toolkit first.
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.symlink(plugin("cuda", "gpu"), "cuda_sdk_lib")
        yield gpus(chip, folder), "cuda"


def plugin(name: str, of: str) -> pathlib.Path:
    path = PLUGINS / name
    if not path.exists():
        raise SystemExit(f"target: nothing here compiles for it, {path} is missing (make setup-{of})")
    return path


def tpus(target: str, chip: str) -> list[Any]:
    from jax.experimental import topologies

    if "TPU_LIBRARY_PATH" not in os.environ:
        os.environ["TPU_LIBRARY_PATH"] = str(plugin("libtpu.so", "tpu"))
    os.environ.update(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    os.environ.update(TPU_WORKER_HOSTNAMES="localhost", TPU_ACCELERATOR_TYPE=f"{chip}-8")
    # libtpu's name for it.
    return list(topologies.get_topology_desc(target.replace("v7x", "tpu7x"), "tpu").devices)


def gpus(chip: str, folder: str) -> list[Any]:
    """Private to jaxlib, and may change with it."""
    from jax._src.lib import xla_client

    # What XLA is told of the chip is among what `assay emit` writes.
    command = [sys.executable, "-m", "assay", "emit", "--target", chip, "--shape", "1x1x256", "-o", f"{folder}/kernel"]
    if subprocess.run([*command, "--quiet"]).returncode != 0:
        raise SystemExit(f"target: got {chip!r}, expected a chip of `assay emit`")
    config = json.loads(pathlib.Path(folder, "kernel/manifest.json").read_text())["target_config"]
    xla_client.load_pjrt_plugin_dynamically("cuda", str(plugin("xla_cuda_plugin.so", "gpu")))
    xla_client.initialize_pjrt_plugin("cuda")
    options = {"topology": "1x1x1", "target_config": config}
    topology = xla_client._xla.get_default_c_api_topology("cuda", "cuda", options)
    return list(topology._make_compile_only_devices())


def memory(
    config: dict[str, Any],
    target: str,
    policy_of: Callable[..., Any],
    stepper: Callable[..., Any],
    optimizer: Callable[..., Any],
) -> Iterator[str]:
    """What a step of the settings' `ahead` takes on each device, in words, by autodiff and by the kernel."""
    shape = dict(config["ahead"])
    batch, tokens = shape.pop("batch"), shape.pop("tokens")
    logits = batch * tokens * shape["vocab"] * 2

    def like(tree: Any, sharding: Any) -> Any:
        return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding), tree)

    def initial() -> Any:
        policy = policy_of(**shape, key=jax.random.key(0))
        return jax.tree.map(lambda array: array.astype(jnp.bfloat16), policy)

    policy = jax.eval_shape(initial)
    state = jax.eval_shape(optimizer(config).init, policy)
    with devices(target) as (of, platform):
        mesh = Mesh(np.array(of), ("data",), axis_types=(AxisType.Auto,))
        everywhere, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
        sequences = batch * len(of)
        per_token = {"ids": jnp.int32, "mask": jnp.bool_, "old_logp": jnp.float32, "ref_logp": jnp.float32}
        given = {name: jax.ShapeDtypeStruct((sequences, tokens), dtype) for name, dtype in per_token.items()}
        given["advantages"] = jax.ShapeDtypeStruct((sequences,), jnp.float32)
        whole = jax.ShapeDtypeStruct((sequences, tokens + 1), jnp.int32)
        arguments = (like(policy, everywhere), like(state, everywhere), like(whole, rows), like(given, rows))
        for enabled in (False, True):
            _, update = stepper(config, mesh, enabled, target.partition(":")[0] if enabled else None)
            traced = jax.jit(update, donate_argnums=(0, 1)).trace(*arguments)
            lowered = traced.lower(lowering_platforms=(platform,))
            used, text = lowered.compile().memory_analysis(), lowered.as_text()
            # As jaxlib prints it before a compiler has it: what libtpu makes of the step by autodiff it cannot print.
            calls = sum(text.count(f"custom_call @{name}(") for name in CALLS)
            yield (
                f"{target}, grpo_kernel {'on' if enabled else 'off'}: {used.temp_size_in_bytes:,} bytes of temp on each device, "
                f"{used.temp_size_in_bytes / logits:.2f} times its logits of {logits:,}; arguments {used.argument_size_in_bytes:,}; "
                f"kernels called {calls}"
            )


#: What a kernel is called by on a TPU and on a GPU.
CALLS = ("tpu_custom_call", "__gpu$xla.gpu.ptx")
