"""`assay.jax` for chips that are not here: how its kernels are called, and what a compiler makes of that."""

from __future__ import annotations

import base64
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import assay
from assay import _native

PLUGINS = Path(__file__).resolve().parents[2] / ".plugins"
SHAPE = (1, 16, 4096)


def compiled(target: str, *ways: str) -> list[dict[str, int]]:
    """Calls of kernels and bytes on each device of `IMPLEMENTATION:CUT:SHAPE`."""
    command = [sys.executable, str(Path(__file__).with_name("jax_ahead.py")), target, *ways]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.skipif(not (PLUGINS / "libtpu.so").exists(), reason="no libtpu (make setup-tpu)")
def test_a_v6e_runs_the_tile_kernels_over_its_logits() -> None:
    pytest.importorskip("jax")
    rows, mesh = compiled("v6e:2x4", "mosaic:rows:8x256x151936", "mosaic:mesh:4x256x151936")
    assert rows["calls"] == 1, "of whole rows, here packed ones, each logit is read once"
    assert mesh["calls"] == 2, "statistics and dlogits"
    for way in (rows, mesh):
        assert way["logits"] <= way["peak"] <= 1.01 * way["logits"], way


@pytest.mark.skipif(not (PLUGINS / "xla_cuda_plugin.so").exists(), reason="no CUDA plugin (make setup-gpu)")
def test_an_h100_runs_the_kernel_of_one_pass_over_its_logits() -> None:
    pytest.importorskip("jax")
    kernel, plain = compiled("h100", "ptx:rows:1x256x151936", "xla:rows:1x256x151936")
    assert (kernel["calls"], plain["calls"]) == (1, 0)
    assert kernel["logits"] <= kernel["peak"] <= 1.01 * kernel["logits"], kernel
    assert plain["peak"] >= kernel["peak"], "what the kernel is there for"


def test_kernels_are_written_for_the_chips_that_there_are() -> None:
    spec = assay.spec()
    for target in ("v6e", "v5e", "TPU v6 lite"):
        kernels = json.loads(_native.mosaic_kernels(spec, SHAPE, "bf16", target))
        names = [kernels[name]["name"] for name in ("statistics", "gradient", "one_pass")]
        assert names == ["grpo_statistics", "grpo_dlogits", "grpo_one_pass"]
    for target in ("h100", "NVIDIA H100 80GB HBM3"):
        kernels = json.loads(_native.ptx_kernels(spec, SHAPE, "f32", target))
        assert all(".visible .entry" in kernels[name]["text"] for name in ("statistics", "gradient", "one_pass"))
    for written, target in ((_native.mosaic_kernels, "h100"), (_native.ptx_kernels, "v6e")):
        with pytest.raises(assay.AssayError, match=f"`target`.*{target}"):
            written(spec, SHAPE, "bf16", target)


def test_one_pass_is_for_tokens_alone_and_rows_that_fit() -> None:
    sequence = assay.spec("trl", importance_sampling_level="sequence")
    for written, target, spec, columns in (
        (_native.mosaic_kernels, "v6e", sequence, 4096),
        (_native.mosaic_kernels, "v6e", assay.spec(), 2_000_000),
        (_native.ptx_kernels, "h100", sequence, 4096),
        (_native.ptx_kernels, "h100", assay.spec(), 2_000_000),
        (_native.ptx_kernels, "a100", assay.spec(), 4096),
    ):
        kernels = json.loads(written(spec, (1, 16, columns), "bf16", target))
        assert kernels["one_pass"] is None and kernels["statistics"] and kernels["gradient"]


def assembled(text: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    (tmp_path / "kernel.ptx").write_text(text)
    command = [str(PLUGINS / "cuda/bin/ptxas"), "-arch=sm_90", "-o", str(tmp_path / "kernel.cubin"), str(tmp_path / "kernel.ptx")]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.skipif(not (PLUGINS / "cuda/bin/ptxas").exists(), reason="no ptxas (make setup-gpu)")
def test_what_an_h100_is_given_is_assembled(tmp_path: Path) -> None:
    kernels = json.loads(_native.ptx_kernels(assay.spec("trl", beta=0.04), SHAPE, "bf16", "h100"))
    for name in ("statistics", "gradient", "one_pass"):
        done = assembled(kernels[name]["text"], tmp_path)
        assert done.returncode == 0, done.stderr
    # The plugin compiles such a text ahead of time too, and says nothing.
    assert assembled(kernels["one_pass"]["text"].replace("barrier.sync", "barrier.sink"), tmp_path).returncode != 0


def one_pass(kernel: dict[str, Any], operands: Sequence[Any]) -> list[Any]:
    """What docs/jax.md says of such a kernel, under PPO-clip with a k3 penalty or the policy gradient, by autodiff."""
    import jax
    import jax.numpy as jnp

    ids, numbers, logits, tokens = operands
    number = dict(zip((name for name, _ in kernel["numbers"]), numbers, strict=True))
    token = {name: tokens[0, :, i] for i, name in enumerate(kernel["given"])}
    mask = token["mask"] > 0.0
    ids = jnp.clip(ids, 0, logits.shape[-1] - 1)
    rate = token["rate"][:, None] if "rate" in token else number["inverse_temperature"]

    def evaluated(logits: Any) -> Any:
        logps = jax.nn.log_softmax(logits[0] * rate)
        logp = jnp.take_along_axis(logps, ids[:, None], 1)[:, 0]
        entropy = -(jnp.exp(logps) * logps).sum(1)
        if "low" not in number:
            policy = -token["advantage"] * logp
            weighed = token["weight"] * policy + token["entropy_factor"] * entropy
            return jnp.where(mask, weighed, 0.0).sum(), {"logp": logp, "entropy": entropy, "token_loss": policy}
        ratio, advantage = jnp.exp(logp - token["old_logp"]), token["advantage"]
        low, high = ratio < number["low"], ratio > number["high"]
        policy = -jnp.minimum(ratio * advantage, jnp.clip(ratio, number["low"], number["high"]) * advantage)
        gap = token["ref_logp"] - logp
        kl = jnp.exp(gap) - gap - 1.0
        of = {"logp": logp, "entropy": entropy, "token_loss": policy + number["beta"] * kl, "ratio": ratio, "kl": kl}
        of |= {"clipped_low": low & (advantage < 0), "clipped_high": high & (advantage > 0)}
        weighed = token["weight"] * of["token_loss"] + token.get("entropy_factor", 0.0) * entropy
        return jnp.where(mask, weighed, 0.0).sum(), of

    dlogits, of = jax.grad(evaluated, has_aux=True)(logits)
    # Under the mask stands anything.
    named = [jnp.where(mask, of.get(name, 0.0) * 1.0, jnp.nan) for name in kernel["results"]]
    columns = jnp.stack([*named, *[jnp.full_like(token["mask"], jnp.nan)] * (8 - len(named))], -1)
    return [jnp.where(mask[None, :, None], dlogits, 0.0), columns[None]]


def two_pass(kernel: dict[str, Any], operands: Sequence[Any]) -> list[Any]:
    """What docs/jax.md says of the two, whose parameters have these names; of logits that nothing changes."""
    import jax.numpy as jnp

    names = re.findall(r"\.param .* (\w+)", kernel["text"].partition(")")[0])
    assert len(names) == len(operands) + 1, "the result is the last"
    of = dict(zip(names, operands, strict=False))
    logits, rate = of["logits"][0], of["rate"][0] if "rate" in of else of["inverse_temperature"]
    hit = jnp.arange(logits.shape[1]) == of["ids"][0]
    if kernel["name"] == "grpo_statistics":
        max = logits.max(1, keepdims=True)
        gap = (max - logits) * rate
        e = jnp.where(hit, 0.0, jnp.exp(-gap))
        columns = [max[:, 0], jnp.where(hit, logits, 0.0).sum(1), e.sum(1), -(e * gap).sum(1) / math.log(2)]
        return [jnp.stack([*columns, *[jnp.full_like(max[:, 0], jnp.nan)] * 4], -1)[None]]
    max, share, others, mask, bonus, mean_gap = (of["scales"][0, :, i, None] for i in range(6))
    gap = (max - logits) * rate
    e = jnp.exp(-gap)
    dlogits = jnp.where(hit, -share * others, share * e) + bonus * e * (gap - mean_gap)
    return [jnp.where(mask > 0.0, dlogits, 0.0)[None]]


def stood_in(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are called, from now on without their chip."""
    called: list[str] = []

    def call(kernel: dict[str, Any], results: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        called.append(kernel["name"])
        returned = (one_pass if kernel["name"] == "grpo_one_pass" else two_pass)(kernel, operands)
        assert [array.shape for array in returned] == [result.shape for result in results]
        return returned

    monkeypatch.setattr(kernels, "_called", staticmethod(call))
    return called


# The kernels of both are called alike.
@pytest.mark.parametrize("implementation", ["mosaic", *["ptx"] * ("ASSAY_CASES" in os.environ)])
def test_a_kernel_of_one_pass_is_given_what_the_documents_say(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jax, jnp = pytest.importorskip("jax"), pytest.importorskip("jax.numpy")
    import numpy as np
    from test_jax_op import Batch

    from assay import _jax_rows as rows

    batch, target = Batch(3, 5, 40), {"mosaic": "v6e", "ptx": "h100"}[implementation]
    spec = assay.spec(kl={"beta": 0.04, "estimator": "k3"}, entropy_coef=0.1, temperature="given")
    batch.given["temperature"] = jnp.linspace(0.6, 1.8, 15).reshape(3, 5)
    called = stood_in(rows.KERNELS[implementation], monkeypatch)

    @jax.jit
    def both(logits: Any, others: Any) -> Any:
        def evaluated(implementation: str, target: str | None) -> Any:
            def loss(logits: Any) -> Any:
                of = batch.loss(logits, spec=spec, loss_scale=3.0, implementation=implementation, target=target)
                return 3.0 * of.loss, of

            return jax.vmap(jax.value_and_grad(loss, has_aux=True))(jnp.stack([logits, others]))

        return evaluated(implementation, target), evaluated("native", None)

    ours, native = both(batch.logits, batch.logits[::-1])
    assert set(called) == {"grpo_one_pass"}
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(native), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)

    # The kernel takes the nearest id: no number comes of another, nor of what is no temperature, and it is in no one else's gradient.
    ids = np.array(batch.ids)
    ids[1, 0] = 40
    batch.ids = jnp.asarray(ids)

    def value(logits: Any, temperature: Any) -> Any:
        return batch.loss(logits, spec=spec, temperature=temperature, implementation=implementation, target=target).loss

    temperature = batch.given.pop("temperature").at[2, 0].set(-0.5)
    loss, dlogits = jax.jit(jax.value_and_grad(value))(batch.logits, temperature)
    loss, dlogits = np.asarray(loss), np.asarray(dlogits)
    assert np.isnan(loss) and np.isnan(dlogits[[1, 2], 0]).all() and np.isnan(dlogits).sum() == 2 * 40


def test_kernels_are_given_packed_rows_and_several_ids_as_padded_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    jax, jnp = pytest.importorskip("jax"), pytest.importorskip("jax.numpy")
    import numpy as np
    from test_jax_op import LEVELS, Batch, Packed

    from assay import _jax_rows as rows
    from assay.jax import gather_logp, grpo_loss

    packed = Packed(Batch(4, 5, 40))
    batch, temperature = packed.padded, np.linspace(0.6, 1.8, 4, dtype=np.float32)
    ids = jnp.stack([batch.ids, (batch.ids * 7 + 3) % 40, batch.ids], -1)
    sent = jnp.linspace(-1.0, 2.0, ids.size).reshape(ids.shape)
    # The loss of a token reads logits once, that of a sequence twice.
    token = assay.spec(kl={"beta": 0.04, "estimator": "k3"}, reduction={"sequence_mean": {"rows": "non_empty"}}, temperature=0.7)
    sequence = assay.spec(**LEVELS["sequence"].to_dict() | {"temperature": "given", "entropy_coef": 0.1})
    called = stood_in(rows.KERNELS["ptx"], monkeypatch)

    @jax.jit
    def both(row: Any, logits: Any) -> Any:
        def evaluated(**implementation: Any) -> Any:
            def logp(logits: Any) -> Any:
                given = {"mask": batch.given["mask"], "temperature": temperature, **implementation}
                return (gather_logp(logits, ids, **given) * sent).sum()

            def loss(row: Any, **options: Any) -> Any:
                of = grpo_loss(row, packed.ids, cu_seqlens=packed.ends, **packed.given, **options, **implementation)
                return of.loss, (of.logp, of.entropy)

            of_row = jax.value_and_grad(loss, has_aux=True)
            rows = of_row(row, spec=token), of_row(row, spec=sequence, temperature=temperature)
            return rows, jax.value_and_grad(logp)(logits)

        return evaluated(implementation="ptx", target="h100"), evaluated(implementation="native")

    ours, native = both(packed.logits, batch.logits)
    assert set(called) == {"grpo_one_pass", "grpo_statistics", "grpo_dlogits"}
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(native), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("target", ["v6e", "v5e"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_mosaic_text_is_what_jax_writes_of_it(target: str, dtype: str) -> None:
    """JAX's own reader takes each kernel's text, its verifier passes it, and its writer gives it back."""
    pytest.importorskip("jax")
    from jax._src.interpreters import mlir
    from jax._src.lib import tpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.passmanager import PassManager

    context = mlir.make_ir_context()
    tpu.register_dialect(context)
    context.allow_unregistered_dialects = True
    kernels = json.loads(_native.mosaic_kernels(assay.spec("trl", beta=0.04), SHAPE, dtype, target))
    for name in ("statistics", "gradient", "one_pass"):
        config = json.loads(kernels[name]["text"])["custom_call_config"]
        assert (config["serialization_format"], config["needs_layout_passes"]) == (1, True)
        text = base64.b64decode(config["body"]).decode()
        version = re.search(r"stable_mosaic\.version = (\d+)", text)
        assert version is not None
        with context, ir.Location.unknown():
            given, read = ir.Module.parse(text), ir.Module.parse(text)
            PassManager.parse("builtin.module(mosaic-serde{serialize=false})").run(read.operation)
            assert read.operation.verify()
            back = f"builtin.module(mosaic-serde{{serialize=true target-version={version[1]}}})"
            PassManager.parse(back).run(read.operation)
            of_jax, ours = (module.operation.get_asm(print_generic_op_form=True) for module in (read, given))
        assert ours == of_jax, name
