"""`assay.jax`: the loss against the reference, its derivatives, and how it is cut over devices."""

from __future__ import annotations

import functools
import inspect
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
    gather_logp,
    logp_and_entropy,
    logp_and_entropy_of_hidden,
)

TRL = assay.spec("trl", beta=0.04)
NAMES = ("mask", "advantages", "old_logp", "ref_logp", "bias", "temperature")
CALLS = ("grpo_assay_loss", "grpo_assay_gradient", "grpo_assay_statistics")


#: Of each campaign. Where `ASSAY_CASES` asks for more, all specs and all cuts are tried.
CASES = int(os.environ.get("ASSAY_CASES", 2))


def some(all: Iterable[str], *few: str) -> list[str]:
    return list(all) if "ASSAY_CASES" in os.environ else list(few)


class Batch:
    """A ragged batch whose ratios are not 1."""

    def __init__(self, batch: int = 8, tokens: int = 6, vocab: int = 64, dtype: Any = jnp.float32) -> None:
        # In NumPy: JAX compiles each operation by itself.
        rng = np.random.default_rng(batch * tokens + vocab)
        logits = (rng.normal(size=(batch, tokens, vocab)) * 3).astype(dtype)
        ids = rng.integers(0, vocab, (batch, tokens))
        wide = logits.astype(np.float64)
        logp = np.take_along_axis(wide - np.log(np.exp(wide).sum(-1, keepdims=True)), ids[..., None], -1)[..., 0]
        noise = rng.normal(size=(2, batch, tokens)) * 0.3
        given = {
            "mask": np.arange(tokens) < rng.integers(1, tokens + 1, (batch, 1)),
            "advantages": rng.normal(size=batch).astype(np.float32),
            "old_logp": (logp + noise[0]).astype(np.float32),
            "ref_logp": (logp + noise[1]).astype(np.float32),
        }
        self.logits, self.ids = jnp.asarray(logits), jnp.asarray(ids, jnp.int32)
        self.given = {name: jnp.asarray(array) for name, array in given.items()}

    def loss(self, logits: Any, **options: Any) -> GrpoLoss:
        return grpo_loss(logits, self.ids, **{"spec": TRL, **self.given, **options})

    def value(self, **options: Any) -> Callable[[Any], Any]:
        return lambda logits: self.loss(logits, **options).loss


def in_one_row(by: str, logits: Any, ids: Any, given: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """A batch whose sequences lie one after another in `[N,V]`, each with what it is padded by."""
    batch, tokens = ids.shape
    ends = jnp.arange(batch + 1) * tokens
    lengths = {"cu_seqlens": ends, "segment_ids": 1 + jnp.arange(batch * tokens) // tokens}
    flat = {name: array.reshape(-1) for name, array in given.items()}
    return logits.reshape(batch * tokens, -1), ids.reshape(-1), {**flat, by: lengths[by]}


@functools.cache
def gradient(spec: str, implementation: str, packed_by: str | None = None) -> Callable[..., dict[str, Any]]:
    """The op under a file of a spec, `cotangent` times its loss differentiated."""

    @jax.jit
    def run(logits: Any, ids: Any, given: dict[str, Any], cotangent: Any, loss_scale: Any) -> dict[str, Any]:
        def scaled(logits: Any) -> Any:
            options: dict[str, Any] = {"spec": assay.Spec._of_json(spec), "implementation": implementation, "loss_scale": loss_scale}
            arrays = (logits, ids, given) if packed_by is None else in_one_row(packed_by, logits, ids, given)
            of = grpo_loss(arrays[0], arrays[1], **options, **arrays[2])
            return of.loss * cotangent, of

        (loss, of), dlogits = jax.value_and_grad(scaled, has_aux=True)(logits)
        of_tokens = {name: getattr(of, name).reshape(ids.shape) for name in ("logp", "entropy", "token_loss")}
        return dict(loss=loss, dlogits=dlogits, **of_tokens)

    return run  # type: ignore[no-any-return]


def judged(
    spec: assay.Spec,
    implementation: str,
    cotangent: float = 1.0,
    loss_scale: float = 1.0,
    of: Any = None,
    packed_by: str | None = None,
) -> Any:
    """The op as a kernel to be judged; `of` another spec than it is judged by."""
    run = gradient((of or spec).to_json(), implementation, packed_by)

    def kernel(problem: assay.Problem) -> dict[str, Any]:
        arrays = problem.jax()
        given = {name: getattr(arrays, name) for name in NAMES if name in vars(arrays)}
        return run(arrays.logits, arrays.ids, given, cotangent, loss_scale)

    return kernel


def exact(kernel: Any, spec: assay.Spec, cases: int, *dtypes: str) -> assay.Report:
    options: dict[str, Any] = {"shapes": "few", "power": False, "shrink": False, "repro_dir": None, "progress": False}
    options["wide"] = int("ASSAY_CASES" in os.environ)
    return assay.check(kernel, spec, cases=cases, dtypes=dtypes, grade="exact", **options)


def given_temperatures(spec: assay.Spec) -> assay.Spec:
    return assay.spec(**spec.to_dict() | {"temperature": "given"})


SEQUENCE = assay.spec("trl", importance_sampling_level="sequence", beta=0.02)
SPECS = {
    "trl": TRL,
    "sequence level": SEQUENCE,
    "temperature on logp": assay.spec("mllm-jax", temperature=0.7),
    "kl of its own mean": assay.spec("skyrl"),
    "rows with tokens": given_temperatures(assay.spec("tunix")),
    "entropy bonus": assay.spec(temperature="given", entropy_coef=0.01),
    "capped": assay.spec(logits={"softcap": 20.0, "scale": 0.5, "bias": True}, temperature="given", entropy_coef=0.01),
    "a part of the columns": assay.spec(support={"vocab": 100, "excluded_ids": [3, 5], "keep_sampled": True}, entropy_coef=0.01),
}
#: Which implementations compute logits before their softmax.
PLAIN = [name for name in SPECS if name not in ("capped", "a part of the columns")]


@pytest.mark.parametrize("name", some(SPECS, "sequence level", "capped", "a part of the columns"))
def test_native_passes_exact(name: str) -> None:
    exact(judged(SPECS[name], "native"), SPECS[name], CASES, "f32", "bf16", "f16").raise_for_failure()


@pytest.mark.parametrize("name", some(PLAIN, "entropy bonus"))
def test_plain_xla_passes_exact(name: str) -> None:
    exact(judged(SPECS[name], "xla"), SPECS[name], CASES // 2, "f32", "bf16").raise_for_failure()


@pytest.mark.parametrize(
    ("name", "implementation", "packed_by"),
    [("sequence level", "native", "cu_seqlens"), ("rows with tokens", "xla", "segment_ids")],
)
def test_packed_sequences_pass_exact(name: str, implementation: str, packed_by: str) -> None:
    kernel = judged(SPECS[name], implementation, packed_by=packed_by)
    exact(kernel, SPECS[name], CASES if implementation == "native" else CASES // 2, "f32").raise_for_failure()


@pytest.mark.parametrize("name", some(PLAIN, "trl"))
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
    options |= {"lm_head": True, "wide": int("ASSAY_CASES" in os.environ)}
    assay.check(kernel, spec, cases=CASES // 2, dtypes=("bf16",), grade="exact", **options).raise_for_failure()


SEVENTH = assay.spec(**{**TRL.to_dict(), "scale": 1 / 7})


def test_a_cotangent_is_rounded_into_f32_alone_unless_it_is_given_beforehand() -> None:
    for cotangent, loss_scale, dtype, passes in (
        (1.0, 1.0, "bf16", True),
        (1 / 7, 1.0, "f32", True),
        (1 / 7, 1 / 7, "bf16", True),
        (1 / 7, 1.0, "bf16", False),
    ):
        spec = TRL if cotangent == 1.0 else SEVENTH
        report = exact(judged(spec, "native", cotangent, loss_scale, of=TRL), spec, CASES, dtype)
        assert bool(report) == passes, report


def test_a_loss_scale_keeps_f16_from_underflow() -> None:
    scale = 2.0**16
    batch = Batch(vocab=4096, dtype=jnp.float16)

    @jax.jit
    def gradients(logits: Any, wide: Any) -> tuple[Any, Any, Any]:
        scaled = jax.grad(lambda x: scale * batch.loss(x, loss_scale=scale).loss)(logits)
        late = jax.grad(lambda x: scale * batch.loss(x).loss)(logits)
        return jax.grad(batch.value())(wide), scaled, late

    whole, scaled, late = gradients(batch.logits, batch.logits.astype(jnp.float32))
    relative = jnp.linalg.norm(scaled.astype(jnp.float32) / scale - whole) / jnp.linalg.norm(whole)
    lost = [float(((d == 0) & (jnp.abs(whole) > 1e-12)).mean()) for d in (scaled, late)]
    assert relative < 1e-3
    assert lost[0] < 0.01 < 0.2 < lost[1], lost


@pytest.mark.parametrize("implementation", ["native", "xla"])
def test_nothing_but_the_loss_is_differentiable(implementation: str) -> None:
    batch = Batch(2, 3, 16)

    @jax.jit
    def gradients(logits: Any, temperature: Any) -> list[Any]:
        """With a cotangent of 1 into the loss, and into it and everything of another field."""

        def added(field: str | None) -> Callable[[Any, Any], Any]:
            def value(logits: Any, temperature: Any) -> Any:
                of = batch.loss(logits, spec=given_temperatures(TRL), temperature=temperature, implementation=implementation)
                more = [] if field is None else jax.tree.leaves(jax.tree.map(jnp.sum, getattr(of, field)))
                return of.loss + sum(more)

            return value

        fields = (None, *GrpoLoss._fields[1:])
        return [jax.grad(added(field), argnums=(0, 1))(logits, temperature) for field in fields]

    (alone, of_temperature), *others = gradients(batch.logits, jnp.array([0.6, 1.3]))
    assert alone.any() and len(others) == 4 and not of_temperature.any()
    assert all((other == alone).all() and not of_temperature.any() for other, of_temperature in others)


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


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("form", ["rows", "frozen head"])
def test_logits_that_a_product_makes_are_held_once(form: str, level: str) -> None:
    """Dlogits lie over them, and the products of dlogits read them there."""
    spec = assay.spec("trl", loss_type="grpo", importance_sampling_level=level)
    batch = Batch(4, 16, 4096)
    hidden, lm_head = jnp.linspace(-1, 1, 4 * 16 * 32).reshape(4, 16, 32), jnp.linspace(-2, 1, 32 * 4096).reshape(32, 4096)
    made_of = {"rows": lambda x, w: (x.reshape(64, 32) @ w).reshape(4, 16, 4096), "frozen head": lambda x, w: x @ w}[form]
    loss = batch.value(spec=spec)
    step = jax.value_and_grad(lambda *both: loss(made_of(*both)), argnums=(0, 1) if form == "rows" else 0)
    compiled = jax.jit(step).lower(hidden, lm_head).compile()
    held = compiled.memory_analysis().temp_size_in_bytes / batch.logits.nbytes
    assert 1 <= held < 1.05, held
    value, gradients = compiled(hidden, lm_head)
    expected, dlogits = jax.value_and_grad(loss)(made_of(hidden, lm_head))
    dhidden = gradients[0] if form == "rows" else gradients
    assert value == expected and jnp.allclose(dhidden, dlogits @ lm_head.T, rtol=1e-5, atol=1e-7) and dhidden.any()


def test_vmap_is_the_batches_one_by_one() -> None:
    batch, other = Batch(2, 3, 16), Batch(2, 3, 16).logits[::-1]
    single = jax.value_and_grad(batch.value())

    @jax.jit
    def all(each: Any) -> Any:
        of_sum = jax.grad(lambda x: jax.vmap(batch.value())(x).sum())(each)
        return jax.vmap(single)(each), of_sum, [single(logits) for logits in each]

    both, of_sum, singles = all(jnp.stack([batch.logits, other]))
    for i, (loss, dlogits) in enumerate(singles):
        assert both[0][i] == loss and (both[1][i] == dlogits).all()
    assert (of_sum == both[1]).all()


def test_checkpoint_recomputes_the_same() -> None:
    batch = Batch(2, 3, 16)
    of_twice = lambda x: batch.value()(2.0 * x)  # noqa: E731
    again, once = jax.jit(lambda x: (jax.grad(jax.checkpoint(of_twice))(x), jax.grad(of_twice)(x)))(batch.logits)
    assert (again == once).all()


@pytest.mark.parametrize("implementation", ["native", "xla"])
def test_a_second_derivative_is_an_error(implementation: str) -> None:
    batch = Batch(2, 3, 16)
    with pytest.raises(assay.AssayError, match="got a second derivative"):
        jax.eval_shape(jax.grad(lambda x: jax.grad(batch.value(implementation=implementation))(x).sum()), batch.logits)


def test_logp_and_entropy_are_those_of_the_loss() -> None:
    batch = Batch(2, 3, 16)
    capped = assay.spec(**assay.spec("mllm-jax", temperature=0.7).to_dict() | {"logits": {"softcap": 5.0, "bias": True}})
    options: dict[str, Any] = {"spec": capped, "bias": jnp.linspace(-1, 1, 16)}

    @jax.jit
    def both(logits: Any) -> Any:
        """By the statistics of parts, and by rows that are whole."""

        def loss(logits: Any) -> Any:
            of = batch.loss(logits, **options)
            return of.loss, (of.logp, of.entropy)

        parts = logp_and_entropy(logits, batch.ids, mask=batch.given["mask"], **options)
        return parts, jax.value_and_grad(loss, has_aux=True)(logits)[0][1]

    parts, whole = both(batch.logits)
    for part, of in zip(parts, whole, strict=True):
        assert of.any() and jnp.allclose(part, of, rtol=1e-6)


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


@pytest.mark.parametrize("implementation", ["native", "xla"])
def test_gather_logp_passes_forward_and_backward(implementation: str) -> None:
    # Only native changes logits.
    changed = {"softcap": 20.0 if implementation == "native" else None}
    spec = assay.spec(temperature=0.7, logits=changed)

    def scores(logits: Any, ids: Any) -> Any:
        return gather_logp(logits, ids, spec=spec, implementation=implementation)

    report = assay.check_logp(
        scores,
        framework="jax",
        ids_per_token=3,
        temperature=0.7,
        logits=changed,
        shapes=["2x3x257"],
        dtypes=["f32", "bf16"],
        cases=2 * CASES,
        wide=0,
        power=False,
        repro_dir=None,
        grade="exact",
    )
    assert report, report


def test_gather_logp_of_a_cut_vocabulary_has_the_same_gradient() -> None:
    batch = Batch()
    ids = jnp.stack([batch.ids, (batch.ids * 7 + 3) % batch.logits.shape[2], batch.ids], -1)
    sent = jnp.linspace(-1, 2, ids.size).reshape(ids.shape)

    mask, temperature = batch.given["mask"], jnp.linspace(0.6, 1.8, 8)

    def plain(logits: Any) -> Any:
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits / temperature[:, None, None]), ids, 2)
        return jnp.where(mask[..., None], logp * sent, 0.0).sum()

    def total(logits: Any, axis: str | None = None) -> Any:
        logp = gather_logp(logits, ids, mask=mask, temperature=temperature, implementation="xla", vocab_axis=axis)
        return (logp * sent).sum()

    whole = jax.jit(jax.grad(plain))(batch.logits)
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
    sharded = jax.device_put(batch.logits, NamedSharding(mesh, P(None, None, "model")))
    columns = P(None, None, "model")
    in_parts = jax.shard_map(jax.grad(lambda part: total(part, "model")), mesh=mesh, in_specs=columns, out_specs=columns)
    assert jnp.allclose(jax.jit(in_parts)(sharded), whole, rtol=1e-5, atol=1e-7)
    with pytest.raises(assay.SpecError, match="`support`"):
        gather_logp(batch.logits, ids, spec=assay.spec(support={"vocab": 5}))


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

    def total(logits: Any, axis: str | None = None, implementation: str = "xla") -> Any:
        options: dict[str, Any] = {"mask": batch.given["mask"], "implementation": implementation, "vocab_axis": axis}
        options["temperature"] = jnp.linspace(0.6, 1.8, 8)
        logp, entropy = logp_and_entropy(logits, batch.ids, **options)
        return (logp * batch.given["old_logp"] + entropy * batch.given["ref_logp"]).sum()

    whole = np.asarray(jax.jit(jax.grad(functools.partial(total, implementation="native")))(batch.logits))
    assert (whole[~np.asarray(batch.given["mask"])] == 0).all()
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
    columns = P(None, None, "model")
    in_parts = jax.shard_map(jax.grad(lambda part: total(part, "model")), mesh=mesh, in_specs=columns, out_specs=columns)
    sharded = jax.device_put(batch.logits, NamedSharding(mesh, columns))
    for cut in jax.jit(lambda logits: (jax.grad(total)(logits), in_parts(logits)))(sharded):
        np.testing.assert_allclose(cut, whole, rtol=1e-5, atol=1e-7)


# ---- packed sequences


class Packed:
    """The sequences of a ragged batch, the third of them empty, one after another in a row of N tokens, those behind the last padding."""

    def __init__(self, padded: Batch) -> None:
        mask = np.array(padded.given["mask"])
        mask[2] = False
        padded.given["mask"] = mask
        self.padded = padded
        #: Where each token is in the padded batch.
        self.places = np.nonzero(mask)
        self.ends = np.cumsum([0, *mask.sum(1)])
        self.behind = 1 + (-self.ends[-1] - 1) % 4
        self.segment_ids = np.array([*(self.places[0] + 1), *[0] * self.behind])
        self.logits, self.ids = self.row(padded.logits), self.row(padded.ids)
        self.given = {name: self.row(array) for name, array in padded.given.items() if array.ndim == 2}
        self.given["advantages"] = padded.given["advantages"]

    def row(self, array: Any) -> Any:
        """`[N]` of what is told of tokens, in NumPy."""
        return np.pad(np.asarray(array)[self.places], [(0, self.behind), *[(0, 0)] * (array.ndim - 2)])

    def value(self, **options: Any) -> Callable[[Any, dict[str, Any]], Any]:
        """Loss and logp, of what says where sequences are."""
        return lambda logits, lengths: loss_and_logp(grpo_loss(logits, self.ids, **self.given, **options, **lengths))


def loss_and_logp(of: GrpoLoss) -> tuple[Any, Any]:
    return of.loss, of.logp


LEVELS = {
    "token": assay.spec("trl", loss_type="grpo", beta=0.04),
    "sequence": assay.spec("trl", loss_type="grpo", importance_sampling_level="sequence", beta=0.02),
}


@pytest.mark.parametrize("implementation", ["native", "xla"])
def test_packed_sequences_are_those_of_the_padded_batch(implementation: str) -> None:
    packed = Packed(Batch())
    native, known = implementation == "native", {"cu_seqlens": packed.ends}

    @jax.jit
    def all(padded: Any, logits: Any, traced: list[dict[str, Any]]) -> Any:
        def both(level: str) -> Any:
            options: dict[str, Any] = {"spec": LEVELS[level], "implementation": implementation}
            of_padded = jax.value_and_grad(lambda x: loss_and_logp(packed.padded.loss(x, **options)), has_aux=True)
            of_row = jax.value_and_grad(packed.value(**options), has_aux=True)
            rows = [of_row(logits, lengths) for lengths in (*traced, *[known] * native)]
            if native and level == "sequence":
                twice = jax.vmap(of_row)(*jax.tree.map(lambda array: jnp.stack([array] * 2), (logits, traced[0])))
                rows += [jax.tree.map(lambda array, i=i: array[i], twice) for i in range(2)]
            return of_padded(padded), rows

        return [both(level) for level in some(LEVELS, "sequence", *["token"] * native)]

    traced = [{"cu_seqlens": packed.ends}, *[{"segment_ids": packed.segment_ids}] * native]
    for ((loss, logp), dlogits), rows in all(packed.padded.logits, packed.logits, traced):
        for (of_row, logp_of_row), dlogits_of_row in rows:
            np.testing.assert_allclose(of_row, loss, rtol=1e-6)
            for ours, padded in ((logp_of_row, logp), (dlogits_of_row, dlogits)):
                # The kernel sums in the tokens' order.
                limit = 0.0 if native else 1e-5
                np.testing.assert_allclose(ours, packed.row(padded), rtol=limit, atol=limit / 100)

    # A token that counts is of none.
    traced[0] = {"cu_seqlens": packed.ends - (np.arange(packed.ends.size) == packed.ends.size - 1)}
    if native:
        with pytest .raises(jax.errors.JaxRuntimeError, match=r"`segment_ids\[\d+\]`: got 0, expected a sequence's number"):
            jax.block_until_ready(all(packed.padded.logits, packed.logits, traced))
    else:
        assert np.isnan(all(packed.padded.logits, packed.logits, traced)[0][1][0][0][0])


def test_packed_hidden_states_have_the_gradient_of_their_logits() -> None:
    packed, rng = Packed(Batch()), np.random.default_rng(0)
    hidden, head = (rng.normal(size=size).astype(np.float32) for size in ((*packed.ids.shape, 16), (16, 64)))
    options: dict[str, Any] = {"spec": given_temperatures(LEVELS["sequence"]), "cu_seqlens": packed.ends, **packed.given}
    options["temperature"] = np.linspace(0.6, 1.8, 8, dtype=np.float32)

    @jax.jit
    def both(hidden: Any, head: Any) -> Any:
        def of_logits(hidden: Any, head: Any) -> Any:
            return loss_and_logp(grpo_loss(hidden @ head, packed.ids, **options))

        def of_hidden(hidden: Any, head: Any) -> Any:
            return loss_and_logp(grpo_loss_of_hidden(hidden, head, packed.ids, chunk=7, **options))

        return [jax.value_and_grad(of, argnums=(0, 1), has_aux=True)(hidden, head) for of in (of_logits, of_hidden)]

    for of_logits, of_hidden in zip(*map(jax.tree.leaves, both(hidden, head)), strict=True):
        assert np.any(of_logits)
        np.testing.assert_allclose(of_hidden, of_logits, rtol=1e-4, atol=1e-6)


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


#: The spec of a cut: tokens that share a ratio where they are cut, columns that differ where those are.
CUT_SPECS = {
    "tokens too": given_temperatures(SEQUENCE),
    "both": assay.spec(
        **TRL.to_dict()
        | {"logits": {"softcap": 5.0, "bias": True}, "entropy_coef": 0.01, "scale": 1.0, "temperature": "given"}
        | {"support": {"vocab": 50, "excluded_ids": [3, 40], "keep_sampled": True}}
    ),
}


@pytest.mark.parametrize("name", some(CUTS, "both", "tokens too"))
def test_no_collective_is_of_the_logits_size(name: str) -> None:
    batch, cut, spec = Batch(), CUTS[name], CUT_SPECS.get(name, TRL)
    mesh = cut_over(AxisType.Auto)
    of_tokens, of_rows = P(*cut[:2]), P(cut[0])
    if spec.to_dict()["logits"]["bias"]:
        batch.given["bias"] = jnp.linspace(-2, 2, 64)
    if spec.to_dict()["temperature"] == "given":
        of_sequences = jnp.linspace(0.6, 1.8, 8)
        batch.given["temperature"] = of_sequences if name == "both" else of_sequences[:, None] * jnp.linspace(1.0, 0.7, 6)
    specs = {name: of_tokens if array.ndim == 2 else of_rows for name, array in batch.given.items()}
    specs |= {"bias": P(cut[2])} if "bias" in specs else {}
    place = lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec))  # noqa: E731
    ids, given = place(batch.ids, of_tokens), {name: place(array, specs[name]) for name, array in batch.given.items()}

    def loss(logits: Any, ids: Any, given: Any, **axes: Any) -> Any:
        return grpo_loss(logits, ids, spec=spec, **axes, **given).loss

    def of_each(logits: Any, ids: Any, given: Any) -> Any:
        axes = dict(zip(("batch_axis", "token_axis", "vocab_axis"), cut, strict=True))
        return jax.value_and_grad(lambda x: loss(x, ids, given, **axes))(logits)

    whole = jax.jit(jax.value_and_grad(loss))(batch.logits, batch.ids, batch.given)
    mapped = jax.shard_map(of_each, mesh=mesh, in_specs=(cut, of_tokens, specs), out_specs=(P(), cut))
    share = batch.logits.size // int(np.prod([mesh.shape[axis] for entry in cut for axis in np.atleast_1d(entry or [])]))
    # By default each cut in one way; the loss alone is cut as it is with its gradient.
    ways = {"jit": lambda *arrays: (loss(*arrays), *jax.value_and_grad(loss)(*arrays)), "shard_map": mapped}
    for way in some(ways, "jit" if name == "both" else "shard_map"):
        # Of a cut batch nothing is moved but the loss's own sums.
        if name == "batch" and way == "shard_map":
            continue
        compiled = jax.jit(ways[way]).lower(place(batch.logits, cut), ids, given).compile()
        hlo = compiled.as_text()
        moved = elements(hlo)
        assert moved and max(moved) <= batch.ids.size < share, moved
        assert any(call in hlo for call in CALLS)
        *losses, dlogits = compiled(place(batch.logits, cut), ids, given)
        np.testing.assert_allclose(losses, [whole[0]] * len(losses), rtol=1e-5)
        np.testing.assert_allclose(dlogits, whole[1], rtol=1e-4, atol=1e-8)
        assert dlogits.sharding.is_equivalent_to(NamedSharding(mesh, cut), 3)


def test_packed_sequences_lie_across_devices() -> None:
    one, mesh, spec = Packed(Batch()), cut_over(AxisType.Auto), LEVELS["sequence"]
    # Two rows one after another. What is behind the first is a part of the second's first sequence; a device of four ends within one.
    length, sequences = one.ids.size, one.ends.size - 1
    ends = np.concatenate([one.ends, length + one.ends[1:]])
    assert not set(ends) & {length // 2, length, 3 * length // 2}
    given = {name: np.concatenate([array] * 2)[None] for name, array in one.given.items()}
    given["advantages"] = given["advantages"][0] * np.repeat(np.array([1.0, -0.5], np.float32), sequences)
    logits, ids = np.concatenate([one.logits, one.logits[::-1]])[None], np.concatenate([one.ids] * 2)[None]

    def loss(logits: Any, ids: Any, given: Any, cu_seqlens: Any, **axes: Any) -> Any:
        return grpo_loss(logits, ids, spec=spec, cu_seqlens=cu_seqlens, **axes, **given).loss

    def of_each(logits: Any, ids: Any, given: Any, ends: Any) -> Any:
        given = dict(given, advantages=given["advantages"][0])
        axes = {"batch_axis": "data", "token_axis": "tokens", "vocab_axis": "model"}
        return jax.value_and_grad(lambda x: loss(x, ids, given, ends[0], **axes))(logits)

    def cut(batch: str | None, tokens: Any) -> tuple[Any, ...]:
        of_tokens = P(batch, tokens)
        return P(batch, tokens, "model"), of_tokens, {**dict.fromkeys(given, of_tokens), "advantages": P(batch)}, P(batch)

    def placed(arrays: Any, specs: Any) -> Any:
        return jax.device_put(arrays, jax.tree.map(functools.partial(NamedSharding, mesh), specs, is_leaf=lambda x: isinstance(x, P)))

    # In a `shard_map` each half of the devices has a row of its own.
    halves = jax.tree.map(lambda array: array.reshape(2, -1, *array.shape[2:]), (logits, ids, given))
    of_halves = jax.shard_map(of_each, mesh=mesh, in_specs=cut("data", "tokens"), out_specs=(P(), cut("data", "tokens")[0]))
    both = jax.jit(lambda row, halves: (jax.value_and_grad(loss)(*row), of_halves(*halves)))
    row = placed((logits, ids, given, ends), cut(None, ("data", "tokens")))
    compiled = both.lower(row, placed((*halves, np.stack([one.ends] * 2)), cut("data", "tokens"))).compile()
    moved = elements(compiled.as_text())
    assert moved and max(moved) <= ids.size < logits.size // 8, moved
    expected, dlogits = jax.jit(jax.value_and_grad(loss))(logits, ids, given, ends)
    for value, of_way in compiled(row, placed((*halves, np.stack([one.ends] * 2)), cut("data", "tokens"))):
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        np.testing.assert_allclose(np.reshape(of_way, logits.shape), dlogits, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        (P(None, None, ("tokens", "model")), "`logits`: got 62 columns cut over the 4 devices of `tokens`, `model`"),
        (P(None, ("data", "model")), "`logits`: got 3 tokens cut over the 4 devices of `data`, `model`"),
    ],
)
def test_a_cut_into_unlike_parts_is_refused(cut: Any, said: str) -> None:
    batch = Batch(2, 3, 62)
    place = NamedSharding(cut_over(AxisType.Auto), cut)
    loss = jax.jit(lambda x: batch.loss(jax.lax.with_sharding_constraint(2.0 * x, place)).loss)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"{said}, expected a multiple of 4"):
        loss.lower(batch.logits).compile()


def test_the_cuts_that_types_say_are_taken() -> None:
    batch, packed = Batch(), Packed(Batch())
    packed.given["temperature"] = np.linspace(0.6, 1.8, 8, dtype=np.float32)

    def both(logits: Any, row: Any, ids: Any, given: dict[str, Any]) -> Any:
        options: dict[str, Any] = {"spec": given_temperatures(LEVELS["sequence"]), "cu_seqlens": packed.ends, **given}
        return jax.grad(batch.value())(logits), jax.grad(lambda x: grpo_loss(x, ids, **options).loss)(row)

    whole = jax.jit(both)(batch.logits, packed.logits, packed.ids, packed.given)
    with jax.set_mesh(cut_over(AxisType.Explicit)):
        placed = jax.device_put(batch.logits, CUTS["both"]), jax.device_put(packed.logits, P("tokens", "model"))
        of_tokens = {name: P("tokens") if array.shape == packed.ids.shape else P() for name, array in packed.given.items()}
        placed += jax.device_put((packed.ids, packed.given), (P("tokens"), of_tokens))
        compiled = jax.jit(both).lower(*placed).compile()
        cut = compiled(*placed)
    # The three weights of each token at most.
    assert max(elements(compiled.as_text())) <= 3 * batch.ids.size < batch.logits.size // 4
    for dlogits, of_whole in zip(cut, whole, strict=True):
        assert jnp.allclose(np.asarray(dlogits), np.asarray(of_whole), rtol=1e-4, atol=1e-8)


def test_a_row_of_which_no_device_has_the_target_is_no_number() -> None:
    batch = Batch(2, 6, 64)
    batch.given["mask"] = jnp.ones((2, 6), bool)
    # One that no device has, one that the support has not.
    batch.ids = jnp.asarray([[64, 63, 0, 0, 0, 0], [0] * 6])
    spec = assay.spec(**TRL.to_dict() | {"support": {"vocab": 63, "excluded_ids": [], "keep_sampled": False}})
    mesh = cut_over(AxisType.Auto)
    place = NamedSharding(mesh, CUTS["vocabulary"])
    of = jax.jit(lambda x: batch.loss(x, spec=spec))(jax.device_put(batch.logits, place))
    assert np.isnan(of.loss) and np.isnan(of.logp).tolist() == [[True] * 2 + [False] * 4, [False] * 6]


def test_two_processes_have_one_loss() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    program = Path(__file__).with_name("jax_process.py")
    environment = {**os.environ, "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("count=8", "count=2")}
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


def packed(**options: Any) -> dict[str, Any]:
    """Two sequences of three tokens in a row."""
    given = {name: array.reshape(-1) for name, array in BATCH.given.items()} | {"mask": jnp.ones(6, bool)}
    options = {name: np.array(value) if isinstance(value, list) else value for name, value in options.items()}
    return {"logits": BATCH.logits.reshape(6, 16), "ids": BATCH.ids.reshape(-1), **given, **options}


BIASED = assay.spec(logits={"bias": True})
PART = assay.spec(**TRL.to_dict() | {"support": {"vocab": 15, "excluded_ids": [], "keep_sampled": False}})
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"logits": BATCH.logits[0]}, r"`logits`: got shape \[3, 16\], expected \[B,T,V\]"),
    "empty": ({"logits": BATCH.logits[:0]}, r"`logits`: got shape \[0, 3, 16\]"),
    "f64": ({"logits": BATCH.logits.astype(jnp.int32)}, "`logits`: got dtype int32, expected float32, bfloat16 or float16"),
    "ids": ({"ids": BATCH.ids[:, :2]}, r"`ids`: got shape \[2, 2\], expected \[2, 3\]"),
    "floats for ids": ({"ids": BATCH.ids * 1.0}, "`ids`: got dtype float32, expected integers"),
    "mask": ({"mask": BATCH.given["mask"] * 0.5}, "`mask`: got 0.5, expected truth values, or numbers that are 0 or 1"),
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
    "selection": (
        {"spec": assay.spec(objective={"clip_cov": {"selection": {"fraction": 0.1, "lower": 1.0, "upper": 5.0}}})},
        "`objective.clip_cov.selection`: got .*, expected `selected` given with the batch",
    ),
    "capped": (
        {"spec": assay.spec(logits={"softcap": 30.0}), "implementation": "xla"},
        "`logits`: got .*softcap.*, expected logits as they come.*; `native` takes it",
    ),
    "support": (
        {"spec": assay.spec(support={"vocab": 12}), "implementation": "mosaic", "target": "v6e"},
        "`support`: got .*12.*, expected the whole vocabulary; `native` takes it",
    ),
    "bias of none": ({"bias": jnp.ones(16)}, "`bias`: got an array, expected none: the spec has no `logits.bias`"),
    "a number's spec": (
        {"temperature": jnp.ones(2)},
        "`temperature`: got an array beside a Spec with a number, expected a Spec with `temperature: given`",
    ),
    "no temperature": (
        {"spec": given_temperatures(TRL)},
        r"`temperature`: not given, expected shape \[2, 3\] because the spec has `temperature: given`",
    ),
    "temperatures": ({"spec": "trl", "temperature": jnp.ones(3)}, r"`temperature`: got shape \[3\], expected \[2, 3\] or \[2, 1\]"),
    "no temperature at all": (
        {"spec": "trl", "temperature": jnp.array([[1.0], [-0.5]])},
        r"`temperature\[1,0\]`: got -0.5, expected a finite number > 0",
    ),
    "no bias": ({"spec": BIASED}, r"`bias`: not given, expected shape \[16\]: the spec has `logits.bias`"),
    "bias": ({"spec": BIASED, "bias": jnp.ones(15)}, r"`bias`: got shape \[15\], expected \[16\]"),
    "two rows": ({"cu_seqlens": np.array([0, 3])}, "`cu_seqlens`: got it for 2 rows of logits, expected one, "),
    "flat": ({"logits": BATCH.logits.reshape(6, 16)}, r"`logits`: got shape \[6, 16\], expected \[B,T,V\]"),
    "both": (packed(cu_seqlens=[0, 3, 6], segment_ids=[1] * 6), r"`segment_ids`: got shape \[6\], expected none beside"),
    "no end": (packed(cu_seqlens=[0]), r"`cu_seqlens`: got shape \[1\], expected \[S\+1\]"),
    "late": (packed(cu_seqlens=[1, 6]), r"`cu_seqlens\[0\]`: got 1, expected 0"),
    "backwards": (packed(cu_seqlens=[0, 4, 3]), r"`cu_seqlens\[2\]`: got 3, expected at least 4"),
    "beyond": (packed(cu_seqlens=[0, 7]), r"`cu_seqlens\[1\]`: got 7, expected at most N = 6"),
    "of none": (packed(cu_seqlens=[0, 3, 5]), r"`mask\[0,5\]`: got 1, expected 0: the last sequence of `cu_seqlens` ends at 5"),
    "ends in floats": (packed(cu_seqlens=[0.0, 6.0]), "`cu_seqlens`: got dtype float64, expected integers"),
    "ids of none": (packed(segment_ids=[1, 1, 0, 2, 2, 2]), r"`segment_ids\[2\]`: got 0, expected a sequence's number"),
    "ids backwards": (packed(segment_ids=[2, 2, 2, 1, 1, 1]), r"`segment_ids\[3\]`: got 1, expected at least 2"),
    "too many ids": (packed(segment_ids=[1, 1, 2, 2, 3, 3]), "`segment_ids`: got 3 sequences, expected at most 2, as many as"),
    "few ids": (packed(segment_ids=[1, 1, 2]), r"`segment_ids`: got shape \[3\], expected \[1, 6\] or \[6\]"),
    "advantages of three": (
        packed(cu_seqlens=[0, 3, 6], advantages=jnp.ones(3)),
        r"`advantages`: got shape \[3\], expected \[2\] or \[1, 6\]",
    ),
    "padded width": (
        packed(cu_seqlens=[0, 3, 6], spec=assay.spec(reduction={"fixed_length": {"rows": "all"}})),
        "`reduction.fixed_length.length`: not given, .* packed sequences have no padded width",
    ),
    "bias of integers": ({"spec": BIASED, "bias": jnp.ones(16, int)}, "`bias`: got dtype int32, expected floats"),
}


@pytest.mark.parametrize(("options", "said"), REFUSED.values(), ids=list(REFUSED))
def test_what_does_not_fit_is_refused(options: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"logits": BATCH.logits, "ids": BATCH.ids, "spec": TRL, **BATCH.given, **options}
    with pytest.raises(assay.AssayError, match=said):
        grpo_loss(given.pop("logits"), given.pop("ids"), **given)


@pytest.mark.parametrize("of_hidden", [False, True])
def test_spec_that_is_missing_is_refused_with_two_examples(of_hidden: bool) -> None:
    arrays = (BATCH.logits, jnp.eye(16)) if of_hidden else (BATCH.logits,)
    function: Any = grpo_loss_of_hidden if of_hidden else grpo_loss
    call = functools.partial(function, *arrays, BATCH.ids, **BATCH.given)
    with pytest.raises(assay.SpecError) as error:
        call()
    assert str(error.value).startswith("`spec`: not given, expected the loss to compute")
    examples = re.findall(r'spec=("trl"|assay\.spec\(.*\))', str(error.value))
    assert len(examples) == 2
    for example in examples:
        assert jnp.isfinite(call(spec=eval(example, {"assay": assay})).loss)


@pytest.mark.parametrize(
    "name", ["normalizer", "inplace", "hidden", "lm_head", "chunk", "rounds_logits", "rollout_weights", "token_weights"]
)
def test_arguments_of_torch_are_refused_with_what_to_use_here(name: str) -> None:
    assert name not in inspect.signature(grpo_loss).parameters
    with pytest.raises(assay.ProblemError, match=f"^`{name}`: got an argument of assay.torch, expected none; ."):
        grpo_loss(BATCH.logits, BATCH.ids, **{**BATCH.given, "spec": TRL, name: 8.0})


def test_options_of_a_project_are_refused_beside_its_name() -> None:
    said = r'^`beta`: got 0.04, expected options in the spec, as spec=assay.spec\("trl", beta=0.04\)$'
    with pytest.raises(assay.ProblemError, match=said):
        grpo_loss(BATCH.logits, BATCH.ids, **BATCH.given, spec="trl", beta=0.04)


def test_a_traced_option_is_refused() -> None:
    with pytest.raises(assay.SpecError, match="expected numbers, text"):
        jax.jit(lambda beta: BATCH.loss(BATCH.logits, spec=assay.spec("trl", beta=beta)).loss)(0.04)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ids": BATCH.ids.at[1, 0].set(16)}, r"`ids\[1,0\]`: got 16, expected 0 ≤ id < V = 16"),
        ({"old_logp": BATCH.given["old_logp"].at[0, 0].set(jnp.nan)}, r"`old_logp\[0,0\]`: got NaN, expected a finite"),
        ({"ids": BATCH.ids.at[1, 0].set(15), "spec": PART}, r"`ids\[1,0\]`: got 15, expected an id within `support`"),
        ({"temperature": jnp.array([1.0, -0.5]), "spec": given_temperatures(TRL)}, r"`temperature\[1,0\]`: got -0.5, expected a finite"),
    ],
)
def test_the_cpu_kernel_names_the_token_that_is_wrong(change: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"ids": jnp.minimum(BATCH.ids, 14), "spec": TRL, **BATCH.given, **change}
    spec = given.pop("spec")
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=said):
        jax.jit(jax.grad(lambda x, given: grpo_loss(x, spec=spec, **given).loss))(BATCH.logits, given).block_until_ready()


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "float32", "bfloat16"])
def test_a_mask_may_be_of_any_numbers_that_are_0_or_1(dtype: str) -> None:
    problem = next(assay.problems("trl", 1, dtypes=["f32"], shapes=["2x3x7"]))
    x = problem.jax()
    batch = {"advantages": x.advantages, "old_logp": x.old_logp, "spec": "trl"}
    loss = assay.jax.grpo_loss(x.logits, x.ids, mask=x.mask.astype(dtype), **batch).loss
    assert float(loss) == float(assay.jax.grpo_loss(x.logits, x.ids, mask=x.mask, **batch).loss)
    with pytest.raises(assay.ProblemError, match="`advantages`: got list, expected an array"):
        assay.jax.grpo_loss(x.logits, x.ids, mask=x.mask, **(batch | {"advantages": [1.0, 2.0]}))
    with pytest.raises(assay.SpecError, match="`spec`: got a dict, expected a project's name, or a Spec"):
        assay.jax.grpo_loss(x.logits, x.ids, mask=x.mask, **(batch | {"spec": {"beta": 0.04}}))


def test_an_id_outside_the_vocabulary_is_nan_in_the_loss_alone_and_an_error_with_its_gradient() -> None:
    problem = next(assay.problems("trl", 1, dtypes=["f32"], shapes=["2x3x7"]))
    x = problem.jax()

    def loss(logits: Any) -> Any:
        outside = jax.numpy.full_like(x.ids, 7)
        return assay.jax.grpo_loss(logits, outside, mask=x.mask, advantages=x.advantages, old_logp=x.old_logp, spec="trl").loss

    assert bool(jax.numpy.isnan(loss(x.logits)))
    with pytest.raises(Exception, match="`ids.*got 7"):
        jax.grad(loss)(x.logits).block_until_ready()
