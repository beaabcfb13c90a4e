"""`assay.jax` compiled for chips that are not here: the kernels are in the program, and its memory is the logits'."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import assay
from assay import _native

PLUGINS = Path(__file__).resolve().parents[2] / ".plugins"

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
import assay
from assay.jax import grpo_loss

devices = topologies.get_topology_desc("v6e:2x4", "tpu").devices
mesh = Mesh(np.array(devices).reshape(2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
cut = P("data", None, "model")
place = NamedSharding(mesh, cut)
shape, rows = (4, 256, 151936), NamedSharding(mesh, P("data"))
array = lambda dtype, extents, sharding: jax.ShapeDtypeStruct(extents, dtype, sharding=sharding)
given = dict(mask=array(jnp.bool_, shape[:2], rows), advantages=array(jnp.float32, shape[:1], rows))
given["old_logp"] = array(jnp.float32, shape[:2], rows)
ids = array(jnp.int32, shape[:2], rows)
spec = assay.spec()

def loss(logits, ids, given):
    axes = dict(batch_axis="data", vocab_axis="model")
    return grpo_loss(logits, ids, spec=spec, implementation="mosaic", target="v6e", **axes, **given).loss

of_each = jax.shard_map(jax.value_and_grad(loss), mesh=mesh, in_specs=(cut, P("data"), P("data")), out_specs=(P(), cut))
pinned = Format(Layout((0, 1, 2)), place)
step = jax.jit(of_each, donate_argnums=0, out_shardings=(NamedSharding(mesh, P()), pinned))
compiled = step.lower(array(jnp.bfloat16, shape, pinned), ids, given).compile()
memory = compiled.memory_analysis()
print("calls", compiled.as_text().count('custom_call_target="tpu_custom_call"'))
print("logits", np.prod(shape) * 2 // 8, "alias", memory.alias_size_in_bytes, "temp", memory.temp_size_in_bytes)
"""


@pytest.mark.skipif(not (PLUGINS / "libtpu.so").exists(), reason="no libtpu (make setup-tpu)")
def test_a_v6e_runs_the_tile_kernels_over_its_logits() -> None:
    pytest.importorskip("jax")
    given = {"TPU_LIBRARY_PATH": str(PLUGINS / "libtpu.so"), "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    given |= {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v6e-8", "JAX_PLATFORMS": "cpu"}
    command, environment = [sys.executable, "-c", PROGRAM], {**os.environ, **given}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    calls, logits, alias, temp = (int(number) for number in re.findall(r"\d+", done.stdout))
    assert calls == 2, "statistics and dlogits"
    assert logits <= alias <= 1.01 * logits, "padded to whole registers"
    assert temp <= 0.01 * logits, f"{temp} bytes beside logits of {logits}"


def test_kernels_are_written_for_the_chips_that_there_are() -> None:
    spec, shape = assay.spec(), (1, 16, 4096)
    for target in ("v6e", "v5e", "TPU v6 lite"):
        assert '"grpo_statistics"' in _native.mosaic_kernels(spec, shape, "bf16", target)
    for target in ("h100", "NVIDIA H100 80GB HBM3"):
        assert ".visible .entry" in _native.ptx_kernels(spec, shape, "f32", target)
    for written, target in ((_native.mosaic_kernels, "h100"), (_native.ptx_kernels, "v6e")):
        with pytest.raises(assay.AssayError, match=f"`target`.*{target}"):
            written(spec, shape, "bf16", target)
