"""The training step compiled for chips that need not be here, and its memory."""

from __future__ import annotations

import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from policy import Policy

PLUGINS = pathlib.Path(__file__).resolve().parents[2] / ".plugins"


def devices(target: str) -> tuple[list[Any], str]:
    """Of a topology, and the platform that is lowered for. A GPU's is private to jaxlib, and may change with it."""
    chip = target.partition(":")[0]
    if chip.startswith("v"):
        from jax.experimental import topologies

        os.environ.setdefault("TPU_LIBRARY_PATH", str(PLUGINS / "libtpu.so"))
        os.environ.update(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
        os.environ.update(TPU_WORKER_HOSTNAMES="localhost", TPU_ACCELERATOR_TYPE=f"{chip}-8")
        return list(topologies.get_topology_desc(target.replace("v7x", "tpu7x"), "tpu").devices), "tpu"
    import json
    import subprocess
    import sys

    from jax._src.lib import xla_client

    # What XLA is told of the chip is among what `assay emit` writes.
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "assay", "emit", "--target", chip, "--shape", "1x1x256", "-o", f"{folder}/kernel"]
        subprocess.run([*command, "--quiet"], check=True)
        config = json.loads(pathlib.Path(folder, "kernel/manifest.json").read_text())["target_config"]
    # Where the plugin looks for a toolkit first.
    scratch = tempfile.mkdtemp()
    os.symlink(PLUGINS / "cuda", f"{scratch}/cuda_sdk_lib")
    os.chdir(scratch)
    xla_client.load_pjrt_plugin_dynamically("cuda", str(PLUGINS / "xla_cuda_plugin.so"))
    xla_client.initialize_pjrt_plugin("cuda")
    options = {"topology": "1x1x1", "target_config": config}
    topology = xla_client._xla.get_default_c_api_topology("cuda", "cuda", options)
    return topology._make_compile_only_devices(), "cuda"


def memory(config: dict[str, Any], target: str, enabled: bool, stepper: Callable[..., Any], optimizer: Callable[..., Any]) -> str:
    """What a step of the settings' `ahead` takes on each device, in words."""
    shape = dict(config["ahead"])
    batch, tokens = shape.pop("batch"), shape.pop("tokens")
    of, platform = devices(target)
    mesh = Mesh(np.array(of), ("data",), axis_types=(AxisType.Auto,))
    everywhere, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    def like(tree: Any, sharding: Any) -> Any:
        return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding), tree)

    def initial() -> Policy:
        policy = Policy(**shape, key=jax.random.key(0))
        return jax.tree.map(lambda array: array.astype(jnp.bfloat16), policy)

    policy = eqx.filter_eval_shape(initial)
    state = jax.eval_shape(optimizer(config).init, policy)
    sequences = batch * len(of)
    arrays = {
        "ids": (jnp.int32, (sequences, tokens)),
        "mask": (jnp.bool_, (sequences, tokens)),
        "advantages": (jnp.float32, (sequences,)),
        "old_logp": (jnp.float32, (sequences, tokens)),
        "ref_logp": (jnp.float32, (sequences, tokens)),
    }
    given = {name: jax.ShapeDtypeStruct(extents, dtype) for name, (dtype, extents) in arrays.items()}
    whole = jax.ShapeDtypeStruct((sequences, tokens + 1), jnp.int32)
    _, update = stepper(config, mesh, enabled, target.partition(":")[0] if enabled else None)
    traced = jax.jit(update, donate_argnums=(0, 1)).trace(
        like(policy, everywhere), like(state, everywhere), like(whole, rows), like(given, rows)
    )
    used = traced.lower(lowering_platforms=(platform,)).compile().memory_analysis()
    logits = batch * tokens * shape["vocab"] * 2
    return (
        f"{target}, grpo_kernel {'on' if enabled else 'off'}: {used.temp_size_in_bytes:,} bytes of temp on each device, "
        f"{used.temp_size_in_bytes / logits:.2f} times its logits of {logits:,}; arguments {used.argument_size_in_bytes:,}"
    )
