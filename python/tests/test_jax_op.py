"""`assay.jax`: the loss against the reference, its derivatives, and how it is cut over devices."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import pytest

import assay

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from assay.jax import (  # noqa: E402
    GrpoLoss,
    grpo_loss,
    grpo_loss_of_hidden,
    logp_and_entropy,
    logp_and_entropy_of_hidden,
)

TRL = assay.spec("trl", beta=0.04)
NAMES = ("mask", "advantages", "old_logp", "ref_logp")
CALLS = ("grpo_assay_loss", "grpo_assay_gradient", "grpo_assay_statistics")


#: Of each campaign. Where `ASSAY_CASES` asks for more, all specs and all cuts are tried.
CASES = int(os.environ.get("ASSAY_CASES", 2))


def some(all: Iterable[str], *few: str) -> list[str]:
    return list(all) if "ASSAY_CASES" in os.environ else list(few)


class Batch:
    """A ragged batch whose ratios are not 1."""

    def __init__(self, batch: int = 8, tokens: int = 6, vocab: int = 64, dtype: Any = jnp.float32) -> None:
        rng = np.random.default_rng(batch * tokens + vocab)
        self.logits = jnp.asarray(rng.normal(size=(batch, tokens, vocab)) * 3, dtype)
        self.ids = jnp.asarray(rng.integers(0, vocab, (batch, tokens)), jnp.int32)
        logp = jax.nn.log_softmax(self.logits.astype(jnp.float32))
        logp = jnp.take_along_axis(logp, self.ids[..., None], -1)[..., 0]
        noise = rng.normal(size=(2, batch, tokens)) * 0.3
        self.given = {
            "mask": jnp.arange(tokens) < jnp.asarray(rng.integers(1, tokens + 1, (batch, 1))),
            "advantages": jnp.asarray(rng.normal(size=batch), jnp.float32),
            "old_logp": logp + jnp.asarray(noise[0], jnp.float32),
            "ref_logp": logp + jnp.asarray(noise[1], jnp.float32),
        }

    def loss(self, logits: Any, **options: Any) -> GrpoLoss:
        return grpo_loss(logits, self.ids, **{"spec": TRL, **self.given, **options})

    def value(self, **options: Any) -> Callable[[Any], Any]:
        return lambda logits: self.loss(logits, **options).loss


def judged(spec: assay.Spec, implementation: str, cotangent: float = 1.0, **options: Any) -> Callable[[Any], Any]:
    """The op as a kernel to be judged, `cotangent` times its loss differentiated."""

    @jax.jit
    def run(logits: Any, ids: Any, given: dict[str, Any]) -> dict[str, Any]:
        def scaled(logits: Any) -> Any:
            of = grpo_loss(logits, ids, spec=spec, implementation=implementation, **options, **given)
            return of.loss * cotangent, of

        (loss, of), dlogits = jax.value_and_grad(scaled, has_aux=True)(logits)
        return dict(loss=loss, dlogits=dlogits, logp=of.logp, entropy=of.entropy, token_loss=of.token_loss)

    def kernel(problem: assay.Problem) -> dict[str, Any]:
        arrays = problem.jax()
        given = {name: getattr(arrays, name) for name in NAMES if name in vars(arrays)}
        return run(arrays.logits, arrays.ids, given)  # type: ignore[no-any-return]

    return kernel


def exact(kernel: Any, spec: assay.Spec, cases: int, *dtypes: str) -> assay.Report:
    options: dict[str, Any] = {"shapes": "few", "power": False, "shrink": False, "repro_dir": None, "progress": False}
    return assay.check(kernel, spec, cases=cases, dtypes=dtypes, grade="exact", **options)


SEQUENCE = assay.spec("trl", importance_sampling_level="sequence", beta=0.02)
SPECS = {
    "trl": TRL,
    "sequence level": SEQUENCE,
    "temperature on logp": assay.spec("mllm-jax", temperature=0.7),
    "kl of its own mean": assay.spec("skyrl"),
    "rows with tokens": assay.spec("tunix"),
    "entropy bonus": assay.spec(temperature=0.6, entropy_coef=0.01),
}


@pytest.mark.parametrize("name", some(SPECS, "trl", "sequence level", "entropy bonus"))
def test_native_passes_exact(name: str) -> None:
    exact(judged(SPECS[name], "native"), SPECS[name], CASES, "f32", "bf16", "f16").raise_for_failure()


@pytest.mark.parametrize("name", some(SPECS, "entropy bonus"))
def test_plain_xla_passes_exact(name: str) -> None:
    exact(judged(SPECS[name], "xla"), SPECS[name], CASES // 2, "f32", "bf16").raise_for_failure()


@pytest.mark.parametrize("name", some(SPECS, "trl"))
def test_an_lm_head_passes_exact_in_chunks(name: str) -> None:
    spec = SPECS[name]

    @jax.jit
    def run(hidden: Any, lm_head: Any, ids: Any, given: dict[str, Any]) -> dict[str, Any]:
        def loss(hidden: Any, lm_head: Any) -> Any:
            options: dict[str, Any] = {"spec": spec, "chunk": 5, "logits_dtype": jnp.float32, **given}
            of = grpo_loss_of_hidden(hidden, lm_head, ids, **options)
            return of.loss, of

        (loss, of), (dhidden, dhead) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, lm_head)
        return dict(loss=loss, dhidden=dhidden, dlm_head=dhead, logp=of.logp)

    def kernel(problem: assay.Problem) -> dict[str, Any]:
        arrays = problem.jax()
        given = {name: getattr(arrays, name) for name in NAMES if name in vars(arrays)}
        turned = problem.layout == "vh"
        outputs = run(arrays.hidden, arrays.lm_head.T if turned else arrays.lm_head, arrays.ids, given)
        turned_back = outputs["dlm_head"].T if turned else outputs["dlm_head"]
        return {**outputs, "dlm_head": turned_back, "dlogits_dtype": "f32"}

    options: dict[str, Any] = {"shapes": "few", "power": False, "shrink": False, "repro_dir": None, "progress": False}
    assay.check(kernel, spec, cases=CASES // 2, dtypes=("bf16",), grade="exact", lm_head=True, **options).raise_for_failure()


SEVENTH = assay.spec(**{**TRL.to_dict(), "scale": 1 / 7})


def test_a_cotangent_is_rounded_into_f32_alone_unless_it_is_given_beforehand() -> None:
    exact(judged(TRL, "native", 1 / 7), SEVENTH, 2, "f32").raise_for_failure()
    exact(judged(TRL, "native", 1 / 7, loss_scale=1 / 7), SEVENTH, 4, "bf16", "f16").raise_for_failure()
    assert not exact(judged(TRL, "native", 1 / 7), SEVENTH, 2, "bf16"), "a second rounding shows in bf16"


def test_a_loss_scale_keeps_f16_from_underflow() -> None:
    scale = 2.0**16
    batch = Batch(vocab=4096, dtype=jnp.float16)
    whole = jax.jit(jax.grad(batch.value()))(batch.logits.astype(jnp.float32))
    scaled = jax.jit(jax.grad(lambda x: scale * batch.loss(x, loss_scale=scale).loss))(batch.logits)
    late = jax.jit(jax.grad(lambda x: scale * batch.loss(x).loss))(batch.logits)
    relative = jnp.linalg.norm(scaled.astype(jnp.float32) / scale - whole) / jnp.linalg.norm(whole)
    lost = [float(((d == 0) & (jnp.abs(whole) > 1e-12)).mean()) for d in (scaled, late)]
    assert relative < 1e-3
    assert lost[0] < 0.01 < 0.2 < lost[1], lost


@pytest.mark.parametrize("implementation", ["native", "xla"])
def test_nothing_but_the_loss_is_differentiable(implementation: str) -> None:
    batch = Batch(2, 3, 16)

    @jax.jit
    def gradients(logits: Any) -> list[Any]:
        """With a cotangent of 1 into the loss, and into it and everything of another field."""

        def added(field: str | None) -> Callable[[Any], Any]:
            def value(logits: Any) -> Any:
                of = batch.loss(logits, implementation=implementation)
                more = [] if field is None else jax.tree.leaves(jax.tree.map(jnp.sum, getattr(of, field)))
                return of.loss + sum(more)

            return value

        fields = (None, *GrpoLoss._fields[1:])
        return [jax.grad(added(field))(logits) for field in fields]

    alone, *others = gradients(batch.logits)
    assert alone.any() and len(others) == 4
    assert all((other == alone).all() for other in others)


def test_without_a_gradient_none_is_computed() -> None:
    batch = Batch()
    forward, backward = (jax.jit(f).lower(batch.logits).as_text() for f in (batch.value(), jax.grad(batch.value())))
    assert [call in forward for call in CALLS] == [False, False, True]
    assert [call in backward for call in CALLS] == [True, False, False]


def test_dlogits_lie_over_donated_logits() -> None:
    batch = Batch(4, 16, 4096)
    size = batch.logits.nbytes
    memory = jax.jit(jax.grad(batch.value()), donate_argnums=0).lower(batch.logits).compile().memory_analysis()
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < 0.02 * size


def test_vmap_is_the_batches_one_by_one() -> None:
    batch, other = Batch(2, 3, 16), Batch(2, 3, 16).logits[::-1]
    each = jnp.stack([batch.logits, other])
    both = jax.jit(jax.vmap(jax.value_and_grad(batch.value())))(each)
    single = jax.jit(jax.value_and_grad(batch.value()))
    for i, logits in enumerate(each):
        loss, dlogits = single(logits)
        assert both[0][i] == loss and (both[1][i] == dlogits).all()
    of_mean = jax.jit(jax.grad(lambda x: jax.vmap(batch.value())(x).sum()))(each)
    assert (of_mean == both[1]).all()


def test_checkpoint_recomputes_the_same() -> None:
    batch = Batch(2, 3, 16)
    again = jax.jit(jax.grad(jax.checkpoint(lambda x: batch.value()(2.0 * x))))(batch.logits)
    assert (again == jax.jit(jax.grad(lambda x: batch.value()(2.0 * x)))(batch.logits)).all()


@pytest.mark.parametrize("implementation", ["native", "xla"])
def test_a_second_derivative_is_an_error(implementation: str) -> None:
    batch = Batch(2, 3, 16)
    with pytest.raises(assay.AssayError, match="got a second derivative"):
        jax.grad(lambda x: jax.grad(batch.value(implementation=implementation))(x).sum())(batch.logits)


def test_logp_and_entropy_are_those_of_the_loss() -> None:
    batch = Batch(2, 3, 16)
    for spec in (TRL, assay.spec("mllm-jax", temperature=0.7)):
        of = batch.loss(batch.logits, spec=spec)
        logp, entropy = logp_and_entropy(batch.logits, batch.ids, mask=batch.given["mask"], spec=spec)
        assert jnp.allclose(logp, of.logp, rtol=1e-6) and jnp.allclose(entropy, of.entropy, rtol=1e-6)


@pytest.mark.parametrize("implementation", ["native", "xla"])
def test_logp_and_entropy_pass_forward_and_backward(implementation: str) -> None:
    def scores(logits: Any, ids: Any) -> Any:
        return logp_and_entropy(logits, ids, spec=assay.spec(temperature=0.7), implementation=implementation)

    report = assay.check_logp(
        scores,
        framework="jax",
        entropy=True,
        temperature=0.7,
        shapes=["2x3x257"],
        dtypes=["f32", "bf16"],
        cases=2 * CASES,
        wide=0,
        power=False,
        repro_dir=None,
    )
    assert report, report


def test_logp_and_entropy_of_hidden_pass_forward_and_backward() -> None:
    def scores(hidden: Any, lm_head: Any, ids: Any) -> Any:
        return logp_and_entropy_of_hidden(hidden, lm_head.T, ids, chunk=2, logits_dtype=jnp.float32)

    report = assay.check_logp(
        scores,
        framework="jax",
        entropy=True,
        lm_head=True,
        shapes=["2x3x16x257"],
        dtypes=["f32"],
        cases=CASES,
        wide=0,
        power=False,
        repro_dir=None,
    )
    assert report, report


def test_logp_and_entropy_of_a_cut_vocabulary_have_the_same_gradient() -> None:
    batch = Batch()

    def total(logits: Any, axis: str | None = None) -> Any:
        logp, entropy = logp_and_entropy(logits, batch.ids, mask=batch.given["mask"], implementation="xla", vocab_axis=axis)
        return (logp * batch.given["old_logp"] + entropy * batch.given["ref_logp"]).sum()

    whole = jax.grad(total)(batch.logits)
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
    sharded = jax.device_put(batch.logits, NamedSharding(mesh, P(None, None, "model")))
    cut = jax.jit(jax.grad(total))(sharded)
    assert jnp.allclose(cut, whole, rtol=1e-5, atol=1e-7) and (whole[~batch.given["mask"]] == 0).all()


# ---- over devices

COLLECTIVE = re.compile(r"= (.*?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
CUTS = {
    "batch": P("data", None, None),
    "vocabulary": P(None, None, "model"),
    "both": P("data", None, "model"),
    "tokens too": P("data", "tokens", "model"),
    "vocabulary over two axes": P(None, None, ("tokens", "model")),
}


def elements(hlo: str) -> list[int]:
    """How many elements each array has that a collective moves."""
    moved = [shape for line in COLLECTIVE.findall(hlo) for shape in re.findall(r"\w+\[([\d,]*)\]", line[0])]
    return [int(np.prod([int(extent) for extent in shape.split(",") if extent])) for shape in moved]


def cut_over(kind: AxisType) -> Any:
    return jax.make_mesh((2, 2, 2), ("data", "tokens", "model"), axis_types=(kind,) * 3)


@pytest.mark.parametrize("name", some(CUTS, "both", "tokens too"))
def test_no_collective_is_of_the_logits_size(name: str) -> None:
    batch, cut = Batch(), CUTS[name]
    # Whose tokens share a ratio, where they are cut.
    spec = SEQUENCE if name == "tokens too" else TRL
    mesh = cut_over(AxisType.Auto)
    of_tokens, of_rows = P(*cut[:2]), P(cut[0])
    specs = {name: of_rows if name == "advantages" else of_tokens for name in NAMES}
    place = lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec))  # noqa: E731
    whole = jax.jit(jax.value_and_grad(lambda x: batch.loss(x, spec=spec, implementation="xla").loss))(batch.logits)
    ids, given = place(batch.ids, of_tokens), {name: place(batch.given[name], specs[name]) for name in NAMES}

    def loss(logits: Any, ids: Any, given: Any, **axes: Any) -> Any:
        return grpo_loss(logits, ids, spec=spec, **axes, **given).loss

    def of_each(logits: Any, ids: Any, given: Any) -> Any:
        axes = dict(zip(("batch_axis", "token_axis", "vocab_axis"), cut, strict=True))
        return jax.value_and_grad(lambda x: loss(x, ids, given, **axes))(logits)

    mapped = jax.shard_map(of_each, mesh=mesh, in_specs=(cut, of_tokens, specs), out_specs=(P(), cut))
    share = batch.logits.size // int(np.prod([mesh.shape[axis] for entry in cut for axis in np.atleast_1d(entry or [])]))
    # The loss alone is cut as it is with its gradient: looked at once.
    functions = (*[loss] * (name == "both"), jax.value_and_grad(loss), mapped)
    for function in functions[:1] if name == "batch" else functions:
        compiled = jax.jit(function).lower(place(batch.logits, cut), ids, given).compile()
        hlo = compiled.as_text()
        moved = elements(hlo)
        assert moved and max(moved) <= batch.ids.size < share, moved
        assert any(call in hlo for call in CALLS)
        value = compiled(place(batch.logits, cut), ids, given)
        if function is loss:
            assert jnp.allclose(value, whole[0], rtol=1e-5)
            continue
        assert jnp.allclose(value[0], whole[0], rtol=1e-5)
        assert jnp.allclose(value[1], whole[1], rtol=1e-4, atol=1e-8)
        assert value[1].sharding.is_equivalent_to(NamedSharding(mesh, cut), 3)


def test_the_cuts_that_types_say_are_taken() -> None:
    batch, cut = Batch(), CUTS["both"]
    whole = jax.jit(jax.grad(batch.value()))(batch.logits)
    with jax.set_mesh(cut_over(AxisType.Explicit)):
        compiled = jax.jit(jax.grad(batch.value())).lower(jax.device_put(batch.logits, cut)).compile()
        dlogits = compiled(jax.device_put(batch.logits, cut))
    assert max(elements(compiled.as_text())) <= batch.ids.size
    assert jnp.allclose(np.asarray(dlogits), np.asarray(whole), rtol=1e-4, atol=1e-8)


def test_a_row_of_which_no_device_has_the_target_is_no_number() -> None:
    batch = Batch()
    batch.ids = batch.ids.at[0, 0].set(64)
    mesh = cut_over(AxisType.Auto)
    of = jax.jit(lambda x: batch.loss(x))(jax.device_put(batch.logits, NamedSharding(mesh, CUTS["vocabulary"])))
    assert jnp.isnan(of.loss) and jnp.isnan(of.logp).sum() == 1 and not jnp.isnan(of.entropy).any()


def test_two_processes_have_one_loss() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    program = Path(__file__).with_name("jax_process.py")
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    both = [
        subprocess.Popen(
            [sys.executable, program, address, str(rank)], env=environment, text=True, stdout=PIPE, stderr=STDOUT
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=240)[0] for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], "\n".join(said)
    assert all(f"process {rank}: loss" in said[rank] for rank in range(2))


# ---- what is refused

BATCH = Batch(2, 3, 16)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"logits": BATCH.logits[0]}, r"`logits`: got shape \[3, 16\], expected \[B,T,V\]"),
    "empty": ({"logits": BATCH.logits[:0]}, r"`logits`: got shape \[0, 3, 16\]"),
    "f64": ({"logits": BATCH.logits.astype(jnp.int32)}, "`logits`: got dtype int32, expected float32, bfloat16 or float16"),
    "ids": ({"ids": BATCH.ids[:, :2]}, r"`ids`: got shape \[2, 2\], expected \[2, 3\]"),
    "floats for ids": ({"ids": BATCH.ids * 1.0}, "`ids`: got dtype float32, expected integers"),
    "mask": ({"mask": BATCH.given["mask"] * 0.5}, "`mask`: got dtype float32, expected truth values or integers"),
    "advantages": ({"advantages": jnp.ones(3)}, r"`advantages`: got shape \[3\], expected \[2\] or \[2, 3\]"),
    "missing": ({"old_logp": None}, r"`old_logp`: not given, expected shape \[2, 3\]: the spec reads it"),
    "stranger": ({"old_logps": jnp.ones((2, 3))}, "`old_logps`: got an array of no such name"),
    "scale": ({"loss_scale": jnp.ones(2)}, r"`loss_scale`: got shape \[2\]"),
    "implementation": ({"implementation": "triton"}, "`implementation`: got 'triton', expected one of native, mosaic, ptx, xla"),
    "no TPU": ({"implementation": "mosaic"}, "`implementation`: got `mosaic` on platform cpu, expected a TPU"),
    "no GPU": ({"implementation": "ptx"}, "`implementation`: got `ptx` on platform cpu, expected an NVIDIA GPU"),
    "chip": ({"implementation": "mosaic", "target": "v2"}, "`target`: .*v2"),
    "chip of none": ({"target": "v6e"}, "`target`: got 'v6e', expected none with `native`"),
    "axis": ({"vocab_axis": "model"}, "`vocab_axis`: got 'model', expected none outside of a shard_map"),
    "spec": ({"spec": jnp.ones(())}, "`spec`: got ArrayImpl, expected a spec that is known while tracing"),
    "unknown": ({"spec": "trll"}, "is `trl` meant"),
    "capped": ({"spec": assay.spec(logits={"softcap": 30.0})}, "`logits`: got .*softcap.*, expected logits as they come"),
}


@pytest.mark.parametrize(("options", "said"), REFUSED.values(), ids=list(REFUSED))
def test_what_does_not_fit_is_refused(options: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"logits": BATCH.logits, "ids": BATCH.ids, "spec": TRL, **BATCH.given, **options}
    with pytest.raises(assay.AssayError, match=said):
        grpo_loss(given.pop("logits"), given.pop("ids"), **given)


def test_a_traced_option_is_refused() -> None:
    with pytest.raises(assay.SpecError, match="expected numbers, text"):
        jax.jit(lambda beta: BATCH.loss(BATCH.logits, spec=assay.spec("trl", beta=beta)).loss)(0.04)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ids": BATCH.ids.at[1, 0].set(16)}, r"`ids\[1,0\]`: got 16, expected 0 ≤ id < V = 16"),
        ({"old_logp": BATCH.given["old_logp"].at[0, 0].set(jnp.nan)}, r"`old_logp\[0,0\]`: got NaN, expected a finite"),
    ],
)
def test_the_cpu_kernel_names_the_token_that_is_wrong(change: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"ids": BATCH.ids, **BATCH.given, **change}
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=said):
        jax.grad(lambda x: grpo_loss(x, spec=TRL, **given).loss)(BATCH.logits).block_until_ready()
