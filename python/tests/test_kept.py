"""Kept sets: what kernels under test are given, and the losses of `assay.torch` and `assay.jax` over them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import assay

RANGES = [(entropy, kl) for entropy in ("set", "vocabulary") for kl in ("set", "vocabulary")]
ARRAYS = ("ids", "advantages", "mask", "old_logp", "ref_logp", "cu_seqlens", "kept_ids")


def spec_of(entropy: str = "set", kl: str = "set", **options: Any) -> assay.Spec:
    kept = {"kept": {"entropy": entropy, "kl": kl}}
    return assay.spec(support=kept, **{"kl": {"beta": 0.1}, "entropy_coef": 0.02, "temperature": 0.8, **options})


def logp_of_sets(problem: assay.Problem, empty: str = "left out") -> dict[str, Any]:
    """Logp and entropy over the sets, in f64; wrong where an empty place is no empty place."""
    x = problem.numpy()
    logits = np.where(x.mask[..., None], x.logits.astype(np.float64), 0.0)
    batch, tokens, vocab = logits.shape
    # One column more than there are entries takes what is empty, or numpy's last one, which -1 is.
    inside = np.zeros((batch, tokens, vocab + (empty == "left out")), bool)
    kept = np.where(x.mask[..., None], x.kept_ids, -1)
    np.put_along_axis(inside, kept if empty == "left out" else kept % vocab, True, -1)
    z = np.where(inside[..., :vocab] | ~x.mask[..., None], logits, -np.inf)
    z = z - z.max(-1, keepdims=True)
    e = np.exp(z)
    log_sum = np.log(e.sum(-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    ids = np.where(x.mask, x.ids, 0)[..., None]
    logp = (np.take_along_axis(z, ids, -1) - log_sum)[..., 0]
    log_p = z - log_sum
    entropy = -np.where(p > 0, p * np.where(p > 0, log_p, 0.0), 0.0).sum(-1)
    hit = np.arange(vocab) == ids
    dlogp, dentropy = x.dlogp[..., None], x.dentropy[..., None]
    own = np.where(hit, -np.expm1(logp)[..., None], -p)
    dlogits = dlogp * own - dentropy * np.where(p > 0, p * (np.where(p > 0, log_p, 0.0) + entropy[..., None]), 0.0)
    dlogits = np.where(x.mask[..., None], dlogits, 0.0)
    keep = {"logp": logp, "entropy": entropy}
    outputs = {name: np.where(x.mask, values, 0.0).astype(np.float32) for name, values in keep.items()}
    return {**outputs, "dlogits": dlogits.astype(x.logits.dtype)}


def logp_spec() -> assay.Spec:
    return assay.spec("logp", entropy=True, support={"kept": {}})


def test_kept_ids_are_given_to_kernels_under_test() -> None:
    report = assay.check(logp_of_sets, logp_spec(), dtypes=("f32",), cases=40, shapes="few", power=False)
    assert report.passed, str(report)


def test_kept_ids_of_minus_one_as_the_last_entry_are_found() -> None:
    report = assay.check(
        lambda problem: logp_of_sets(problem, "the last"), logp_spec(), dtypes=("f32",), cases=40, shapes="few", power=False
    )
    assert not report.passed


def given(problem: assay.Problem, arrays: Any) -> dict[str, Any]:
    return {name: getattr(arrays, name, None) for name in ARRAYS}


def on_torch(problem: assay.Problem) -> dict[str, Any]:
    import assay.torch

    arrays = problem.torch()
    if hasattr(arrays, "hidden"):
        hidden, lm_head = (getattr(arrays, name).clone().requires_grad_() for name in ("hidden", "lm_head"))
        laid = lm_head.T.contiguous() if problem.layout == "hv" else lm_head
        result = assay.torch.grpo_loss(None, hidden=hidden, lm_head=laid, chunk=5, **given(problem, arrays), spec=problem.spec)
        gradients = {"dhidden": hidden, "dlm_head": lm_head}
    else:
        logits = arrays.logits.clone().requires_grad_()
        result = assay.torch.grpo_loss(logits, **given(problem, arrays), spec=problem.spec)
        gradients = {"dlogits": logits}
    result.loss.backward()
    names = ("loss", "logp", "entropy", "token_loss")
    return {name: getattr(result, name).detach() for name in names} | {name: leaf.grad for name, leaf in gradients.items()}


@pytest.mark.parametrize("ranges", RANGES, ids="-".join)
@pytest.mark.parametrize("lm_head", [False, True], ids=["logits", "head"])
def test_kept_campaign_of_torch_passes(ranges: tuple[str, str], lm_head: bool) -> None:
    pytest.importorskip("torch")
    options: dict[str, Any] = {"dtypes": ("f32", "bf16"), "shapes": "few", "grade": "exact", "power": False}
    report = assay.check(on_torch, spec_of(*ranges), cases=24, lm_head=lm_head, **options)
    assert report.passed, str(report)


def test_kept_campaign_of_masked_logits_passes() -> None:
    """What docs/support.md says of kernels that know no sets, by PyTorch's own operations."""
    torch = pytest.importorskip("torch")
    import assay.torch

    def kernel(problem: assay.Problem) -> dict[str, Any]:
        x = problem.torch()
        logits = x.logits.clone().requires_grad_()
        kept = torch.where(x.mask[..., None], x.kept_ids, -1)
        inside = torch.zeros((*x.ids.shape, logits.shape[-1] + 1), dtype=torch.bool)
        inside = inside.scatter_(-1, kept % (logits.shape[-1] + 1), True)[..., :-1]
        masked = logits.masked_fill(~inside & x.mask[..., None], -torch.inf)
        arrays = {name: array for name, array in given(problem, x).items() if name != "kept_ids"}
        plain = assay.spec(**{**problem.spec.to_dict(), "support": {}})
        result = assay.torch.grpo_loss(masked, **arrays, spec=plain)
        result.loss.backward()
        return {"loss": result.loss.detach(), "logp": result.logp.detach(), "dlogits": logits.grad}

    report = assay.check(kernel, spec_of(), dtypes=("f32",), cases=24, shapes="few", power=False)
    assert report.passed, str(report)


def test_kept_ids_of_torch_that_do_not_fit_are_refused() -> None:
    torch = pytest.importorskip("torch")
    import assay.torch

    problem = next(assay.problems(spec_of(), n=1, seed=4, dtypes=["f32"], shapes=["2x3x7"]))
    x = problem.torch()
    arguments = given(problem, x)

    def refused(spec: Any = problem.spec, **changed: Any) -> str:
        with pytest.raises(assay.AssayError) as error:
            assay.torch.grpo_loss(x.logits, **{**arguments, **changed}, spec=spec)
        return str(error.value)

    assert "`kept_ids`: not given, expected [2, 3, K]" in refused(kept_ids=None)
    assert "`kept_ids`: got shape [2, 3], expected [B,T,K]" in refused(kept_ids=x.ids)
    assert "without kept sets" in refused(assay.spec(kl={"beta": 0.1}))
    assert "`kept_ids`: got dtype f32, expected i64 or i32" in refused(kept_ids=x.kept_ids.float())
    at = tuple(int(place) for place in torch.nonzero(x.mask)[0])
    far = torch.full_like(x.kept_ids, -1)
    far[at] = 7
    assert f"`kept_ids[{at[0]},{at[1]},0]`: got 7, expected 0 ≤ id < V = 7" in refused(kept_ids=far)
    assert f"`ids[{at[0]},{at[1]}]`" in refused(kept_ids=torch.full_like(x.kept_ids, -1))
    # A project's name has the loss over the sets.
    arguments = {**arguments, "ref_logp": None}
    named = assay.torch.grpo_loss(x.logits, **arguments, spec="trl")
    whole = assay.torch.grpo_loss(x.logits, **{**arguments, "kept_ids": None}, spec="trl")
    assert (named.logp[x.mask] > whole.logp[x.mask]).all()
    logp, entropy = assay.torch.logp_and_entropy(x.logits, x.ids, x.mask, kept_ids=x.kept_ids)
    assert torch.equal(logp, named.logp) and torch.equal(entropy, named.entropy)


def on_jax(problem: assay.Problem) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    import assay.jax

    x = problem.jax()
    arguments = {**given(problem, x), "spec": problem.spec, "implementation": "native"}
    ids = arguments.pop("ids")
    if hasattr(x, "hidden"):

        def of_head(hidden: Any, lm_head: Any) -> Any:
            head = lm_head if problem.layout == "hv" else lm_head.T
            result = assay.jax.grpo_loss_of_hidden(hidden, head, ids, chunk=3, logits_dtype=jnp.float32, **arguments)
            return result.loss, result

        gradients, result = jax.grad(of_head, argnums=(0, 1), has_aux=True)(x.hidden, x.lm_head)
        named = dict(zip(("dhidden", "dlm_head"), gradients, strict=True), dlogits_dtype="f32")
    else:

        def of_logits(logits: Any) -> Any:
            result = assay.jax.grpo_loss(logits, ids, **arguments)
            return result.loss, result

        dlogits, result = jax.jit(jax.grad(of_logits, has_aux=True))(x.logits)
        named = {"dlogits": dlogits}
    return {"loss": result.loss, "logp": result.logp, "entropy": result.entropy, "token_loss": result.token_loss, **named}


@pytest.mark.parametrize("ranges", RANGES, ids="-".join)
@pytest.mark.parametrize("lm_head", [False, True], ids=["logits", "head"])
def test_kept_campaign_of_jax_passes(ranges: tuple[str, str], lm_head: bool) -> None:
    pytest.importorskip("jax")
    options: dict[str, Any] = {"dtypes": ("f32",), "shapes": ["2x3x33x40"] if lm_head else ["2x3x33", "3x4x257"]}
    report = assay.check(on_jax, spec_of(*ranges), cases=4, lm_head=lm_head, power=False, **options)
    assert report.passed, str(report)


def test_kept_ids_of_jax_that_do_not_fit_are_refused() -> None:
    pytest.importorskip("jax")
    import assay.jax

    problem = next(assay.problems(spec_of(), n=1, seed=4, dtypes=["f32"], shapes=["2x3x7"]))
    x = problem.jax()
    arguments = given(problem, x)

    def refused(**changed: Any) -> str:
        with pytest.raises(Exception) as error:
            assay.jax.grpo_loss(x.logits, **{**arguments, "spec": problem.spec, **changed}).loss.block_until_ready()
        return str(error.value)

    assert "`kept_ids`: not given, expected [2, 3, K]" in refused(kept_ids=None)
    assert "`kept_ids`: got shape [2, 3], expected [2, 3, K]" in refused(kept_ids=x.ids)
    assert "without kept sets" in refused(spec=assay.spec(kl={"beta": 0.1}))
    assert "support.kept" in refused(implementation="xla")
    assert "expected an id within the token's `kept_ids`" in refused(kept_ids=x.kept_ids * 0 - 1)
