"""The loss and its gradient, compiled for chips that are not here: a line of JSON for each way."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import assay
from assay.jax import grpo_loss

# Where such devices are found is the example's.
found = importlib.util.spec_from_file_location("ahead", Path(__file__).parents[2] / "examples/jax_train/ahead.py")
assert found is not None and found.loader is not None
ahead = importlib.util.module_from_spec(found)
found.loader.exec_module(ahead)

target, ways = sys.argv[1], [way.split(":") for way in sys.argv[2:]]
chip, spec = target.partition(":")[0], assay.spec(temperature="given")
#: In a row, where columns are whole.
PACKED = 4


def lowered(devices: list[Any], platform: str, axes: dict[str, str], implementation: str, shape: tuple[int, ...]) -> Any:
    """Of a `shard_map` of logits that are given and donated, in rows."""
    model = len(devices) // 2 if "vocab_axis" in axes else 1
    mesh = Mesh(np.array(devices).reshape(-1, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    cut = P(axes.get("batch_axis"), None, axes.get("vocab_axis"))
    of_rows = P(axes.get("batch_axis"))

    def array(dtype: Any, extents: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(extents, dtype, sharding=NamedSharding(mesh, of_rows))

    given = {name: array(jnp.float32, shape[:2]) for name in ("old_logp", "temperature")}
    given |= dict(mask=array(jnp.bool_, shape[:2]), advantages=array(jnp.float32, shape[:1]))
    if "vocab_axis" not in axes:
        given |= dict(segment_ids=array(jnp.int32, shape[:2]), advantages=array(jnp.float32, (PACKED * shape[0],)))

    def loss(logits: Any, ids: Any, given: Any) -> Any:
        options = {} if implementation == "xla" else {"target": chip}
        return grpo_loss(logits, ids, spec=spec, implementation=implementation, **options, **axes, **given).loss

    specs = {"in_specs": (cut, of_rows, of_rows), "out_specs": (P(), cut)}
    of_each = jax.shard_map(jax.value_and_grad(loss), mesh=mesh, **specs)
    place: Any = NamedSharding(mesh, cut)
    if platform == "tpu":
        place = Format(Layout((0, 1, 2)), place)
    step = jax.jit(of_each, donate_argnums=0, out_shardings=(NamedSharding(mesh, P()), place))
    traced = step.trace(jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place), array(jnp.int32, shape[:2]), given)
    return traced.lower(lowering_platforms=(platform,))


with ahead.devices(target) as (devices, platform):
    for implementation, cut, extents in ways:
        axes = {"rows": {"batch_axis": "data"}, "mesh": {"batch_axis": "data", "vocab_axis": "model"}}[cut]
        shape = tuple(int(extent) for extent in extents.split("x"))
        program = lowered(devices, platform, axes, implementation, shape)
        # What libtpu makes of a packed row has no text that jaxlib 0.10.2 reads.
        memory, text = program.compile().memory_analysis(), program.as_text()
        calls = sum(text.count(f"custom_call @{name}(") for name in ahead.CALLS)
        logits = int(np.prod(shape)) * 2 // len(devices)
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        peak = held + memory.temp_size_in_bytes
        print(json.dumps({"calls": calls, "logits": logits, "peak": peak, "temp": memory.temp_size_in_bytes}), flush=True)
