"""`assay.torch`: judged, differentiated by every cotangent, traced, in place, and told what does not fit."""

from __future__ import annotations

import concurrent.futures
import inspect
import re
from typing import Any

import pytest

import assay
from assay import _native

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-extensive")
import assay.torch  # noqa: E402
from assay import _pool  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

ARRAYS = (
    "ids",
    "advantages",
    "mask",
    "old_logp",
    "ref_logp",
    "rollout_logp",
    "rollout_weights",
    "token_weights",
    "selected",
    "bias",
    "cu_seqlens",
    "dentropy",
    "temperature",
)
G = [1.0, 1 / 7, -3.0]


def given(problem: assay.Problem) -> dict[str, Any]:
    """The arguments of `grpo_loss` but for the logits."""
    arrays = vars(problem.torch())
    return {name: arrays.get(name) for name in ARRAYS}


def problems(spec: assay.Spec, n: int = 24, **options: Any) -> Any:
    return assay.problems(spec, n, seed=31, shapes="few", **options)


def outputs(result: assay.torch.GrpoLoss, **gradients: Any) -> dict[str, Any]:
    names = ("loss", "logp", "entropy", "token_loss")
    return {**{name: getattr(result, name).detach() for name in names}, **gradients}


def on_logits(problem: assay.Problem, g: float = 1.0, inplace: bool = False) -> dict[str, Any]:
    logits = problem.torch().logits.clone().requires_grad_()
    # A view of them is no leaf, and needs nothing for its gradient.
    result = assay.torch.grpo_loss(logits.view(logits.shape), **given(problem), spec=problem.spec, inplace=inplace)
    (result.loss * g).backward()
    return outputs(result, dlogits=logits.grad)


def on_head(problem: assay.Problem, **options: Any) -> dict[str, Any]:
    arrays = problem.torch()
    hidden, lm_head = arrays.hidden.clone().requires_grad_(), arrays.lm_head.clone().requires_grad_()
    laid = lm_head.T.contiguous() if problem.layout == "hv" else lm_head
    result = assay.torch.grpo_loss(
        None, hidden=hidden, lm_head=laid, **given(problem), spec=problem.spec, **{"chunk": 5, **options}
    )
    result.loss.backward()
    return outputs(result, dhidden=hidden.grad, dlm_head=lm_head.grad)


@pytest.mark.parametrize(
    "spec",
    [
        assay.spec("trl", beta=0.04, batch={"num_items_in_batch": 13.0}),
        assay.spec("trl", beta=0.04, loss_type="grpo", importance_sampling_level="sequence", entropy_coef=0.01),
        assay.spec("verl"),
        assay.spec(temperature=0.7),
        assay.spec("verl", temperature="given"),
    ],
    ids=["trl", "sequence", "verl", "temperature", "temperatures"],
)
def test_a_campaign_passes(spec: assay.Spec) -> None:
    report = assay.check(on_logits, spec, dtypes=("f32", "bf16", "f16"), cases=60, shapes="few", grade="exact", power=False)
    assert report.passed, str(report)
    report = assay.check(lambda problem: on_logits(problem, inplace=True), spec, cases=30, shapes="few", power=False)
    assert report.passed, str(report)


def test_a_campaign_with_a_head_passes() -> None:
    spec = assay.spec("trl", beta=0.04, loss_type="grpo")
    report = assay.check(on_head, spec, dtypes=("f32", "bf16"), cases=40, shapes="few", lm_head=True, power=False)
    assert report.passed, str(report)


def of_head(dtype: str = "f32", **options: Any) -> assay.Problem:
    """A problem whose logits are the product of `hidden` `[3,5,8]` and `lm_head` `[257,8]`."""
    spec = assay.spec(kl=KL, entropy_coef=0.01, **options)
    return next(p for p in assay.problems(spec, 40, seed=5, dtypes=(dtype,), shapes=["3x5x257"], lm_head=True) if p.layout == "vh")


class HeadCalls:
    """Counts the calls of the kernels with a head, by name, from here on, and forgets which cotangents were sent before."""

    NAMES = ("op_head_loss", "op_head_loss_and_gradient", "op_head_gradient")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, tuple[bool, bool] | None]] = []
        monkeypatch.setattr(assay.torch, "_LIKELY", assay.torch._LikelyCotangents())
        for name in self.NAMES:
            monkeypatch.setattr(_native, name, self.counted(name, getattr(_native, name)))

    def counted(self, name: str, kernel: Any) -> Any:
        def call(spec: Any, head: Any, *rest: Any) -> Any:
            self.asked.append((name, None if name == "op_head_loss" else rest[0]))
            return kernel(spec, head, *rest)

        return call

    def taken(self) -> list[str]:
        """The names since the last time."""
        names, self.asked = [name for name, _ in self.asked], []
        return names


ONE_PASS, TWO_PASSES = ["op_head_loss_and_gradient"], ["op_head_loss", "op_head_gradient"]
MADE_TWICE = ["op_head_loss_and_gradient", "op_head_gradient"]


def leaves(problem: assay.Problem) -> tuple[Any, Any]:
    arrays = problem.torch()
    return arrays.hidden.clone().requires_grad_(), arrays.lm_head.clone().requires_grad_()


def loss_of_head(problem: assay.Problem, hidden: Any, lm_head: Any, **options: Any) -> assay.torch.GrpoLoss:
    arguments = {**given(problem), "spec": problem.spec, "chunk": 4, **options}
    return assay.torch.grpo_loss(None, hidden=hidden, lm_head=lm_head, **arguments)


def head_gradients(problem: assay.Problem, g: float, loss_scale: float | None) -> tuple[Any, Any]:
    hidden, lm_head = leaves(problem)
    (loss_of_head(problem, hidden, lm_head, loss_scale=loss_scale).loss * g).backward()
    return hidden.grad, lm_head.grad


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_head_gradients_made_in_the_forward_pass_have_the_same_bits(
    dtype: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = HeadCalls(monkeypatch)
    problem = of_head(dtype, ratio={"level": level})
    for g in (1.0, 1 / 7, -3.0):
        expected = head_gradients(problem, g, loss_scale=0.0)
        assert calls.taken() == TWO_PASSES
        made = head_gradients(problem, g, loss_scale=g)
        assert calls.taken() == ONE_PASS
        assert all(torch.equal(*pair) and pair[0].any() for pair in zip(made, expected, strict=True))
        assert [x.dtype for x in made] == [x.dtype for x in leaves(problem)]
        # A number that is declared and not sent decides nothing.
        other = head_gradients(problem, g, loss_scale=g * (1 + 2**-20))
        assert calls.taken() == MADE_TWICE
        assert all(torch.equal(*pair) for pair in zip(other, expected, strict=True))


def test_head_cotangent_that_was_sent_twice_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = HeadCalls(monkeypatch)
    problem = of_head()
    passes = []
    for g in (1.0, 1 / 7, 1 / 7, 1 / 7, 2.0, 1.0, 2.0, 2.0, 2.0):
        head_gradients(problem, g, None)
        passes.append(calls.taken())
    assert passes == [ONE_PASS, MADE_TWICE, TWO_PASSES, ONE_PASS, MADE_TWICE, TWO_PASSES, TWO_PASSES, TWO_PASSES, ONE_PASS]
    # Another loss has its own.
    head_gradients(of_head(scale=0.5), 1.0, None)
    assert calls.taken() == ONE_PASS


def test_head_gradients_of_logp_and_entropy_are_made_in_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = HeadCalls(monkeypatch)
    problem = of_head()

    def gradients(**options: Any) -> Any:
        hidden, lm_head = leaves(problem)
        result = loss_of_head(problem, hidden, lm_head, **options)
        (result.loss + result.logp.mean() - 0.5 * result.entropy.sum()).backward()
        return hidden.grad, lm_head.grad

    expected = gradients(loss_scale=0.0)
    assert calls.taken() == TWO_PASSES
    assert all(torch.equal(*pair) for pair in zip(gradients(loss_scale=1.0), expected, strict=True))
    assert calls.taken() == MADE_TWICE
    alone = head_gradients(problem, 1.0, 1.0)
    assert not any(torch.equal(*pair) for pair in zip(alone, expected, strict=True))
    gradients()
    gradients()
    calls.taken()
    gradients()
    assert calls.taken() == TWO_PASSES


def test_head_gradients_are_made_for_what_is_differentiated(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = HeadCalls(monkeypatch)
    problem = of_head()
    expected = head_gradients(problem, 1.0, 0.0)
    with torch.no_grad():
        loss_of_head(problem, *leaves(problem))
    loss_of_head(problem, *(x.detach() for x in leaves(problem)))
    assert calls.taken() == [*TWO_PASSES, "op_head_loss", "op_head_loss"]
    for loss_scale in (None, 0.0):
        for frozen in (0, 1):
            tensors = leaves(problem)
            tensors[frozen].requires_grad_(False)
            loss_of_head(problem, *tensors, loss_scale=loss_scale).loss.backward()
            assert calls.asked[-1][1] == (frozen == 1, frozen == 0)
            assert tensors[frozen].grad is None
            assert torch.equal(tensors[1 - frozen].grad, expected[1 - frozen])


def test_head_gradients_once_given_are_not_given_again() -> None:
    problem = of_head()
    hidden, lm_head = leaves(problem)
    loss = loss_of_head(problem, hidden, lm_head, loss_scale=1.0).loss
    first = torch.autograd.grad(loss, (hidden, lm_head), retain_graph=True)
    expected = [gradient.clone() for gradient in first]
    for gradient in first:
        gradient.zero_()
    second = torch.autograd.grad(loss, (hidden, lm_head), retain_graph=True)
    assert all(torch.equal(*pair) for pair in zip(second, expected, strict=True))
    (of_create,) = torch.autograd.grad(loss_of_head(problem, hidden, lm_head, loss_scale=1.0).loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="gradient of its gradient"):
        of_create.sum().backward()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    # Of what was written to since, also a gradient that is there already is none.
    loss = loss_of_head(problem, hidden * 1.0, scaled := lm_head * 1.0, loss_scale=1.0).loss
    with torch.no_grad():
        scaled.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_head_gradient_is_not_copied_into_a_leaf(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    kept = assay.torch._gradients_as_given

    def noted(*arguments: Any) -> Any:
        gradients: Any = kept(*arguments)
        made.extend(gradient.data_ptr() for gradient in gradients)
        return gradients

    monkeypatch.setattr(assay.torch, "_gradients_as_given", noted)
    assert [gradient.data_ptr() for gradient in head_gradients(of_head(), 1.0, 1.0)] == made


def test_head_that_is_observed_has_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = HeadCalls(monkeypatch)
    problem = of_head()
    hidden, lm_head = leaves(problem)
    expected = torch.autograd.grad(loss_of_head(problem, hidden, lm_head).loss, (hidden, lm_head))
    assert calls.taken() == ONE_PASS

    arguments = {**given(problem), "spec": problem.spec, "chunk": 4}

    def loss(hidden: Any, lm_head: Any) -> Any:
        return assay.torch.grpo_loss(None, hidden=hidden, lm_head=lm_head, **arguments).loss

    def same(gradients: Any, passes: list[str]) -> None:
        assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))
        assert calls.taken() == passes

    checkpointed = checkpoint(loss, hidden, lm_head, use_reentrant=False)
    same(torch.autograd.grad(checkpointed, (hidden, lm_head)), ["op_head_loss", *TWO_PASSES])
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    same(torch.autograd.grad(compiled(hidden, lm_head), (hidden, lm_head)), TWO_PASSES)
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(loss)(hidden.detach(), lm_head.detach())
    # Several cotangents at once.
    each = torch.autograd.grad(loss(hidden, lm_head), (hidden, lm_head), torch.tensor([1.0, 2.0]), is_grads_batched=True)
    assert torch.equal(each[0][0], expected[0]) and torch.equal(each[1][1], 2 * expected[1])


def test_head_operations_are_sound() -> None:
    problem = of_head()
    arguments = given(problem)
    arrays = [arguments.get(name) for name in assay.torch._ARRAYS]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for frozen in (None, 0, 1):
        tensors = leaves(problem)
        if frozen is not None:
            tensors[frozen].requires_grad_(False)
        rest = (*arrays, None, problem.spec.to_json())
        torch.library.opcheck(assay.torch._head_loss, (*tensors, False, 4, *rest), test_utils=tests)
        head = (*(x.requires_grad for x in tensors), *(x.detach() for x in tensors), False, 4)
        of_loss = (assay.torch._head_gradient, (torch.tensor(2.0), None, None, torch.empty(0), *head, *rest))
        json = assay.spec("logp", entropy=False, ids_per_token=1).to_json()
        of_ids = (arguments["ids"][..., None], arguments["mask"], json)
        of_logps = (assay.torch._head_gather_gradient, (torch.ones(3, 5, 1), *head, *of_ids))
        for operation, inputs in (of_loss, of_logps):
            torch.library.opcheck(operation, inputs, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("g", [1.0, 1 / 7, 65536.0])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_a_scaled_loss_has_a_gradient_of_one_rounding(g: float, dtype: str) -> None:
    """Judged at grade `exact` as the gradient of a spec whose scale is g."""
    for inplace in (False, True):
        spec = assay.spec(scale=g, kl={"beta": 0.04, "estimator": "k3"}) if g != 1 else assay.spec(kl=KL)
        plain = assay.spec(kl=KL)
        for problem in problems(spec, 12, dtypes=(dtype,)):
            logits = problem.torch().logits.clone().requires_grad_()
            result = assay.torch.grpo_loss(logits.view(logits.shape), **given(problem), spec=plain, inplace=inplace)
            (result.loss * g).backward()
            scaled = assay.torch.grpo_loss(problem.torch().logits, **given(problem), spec=spec)
            problem.check(outputs(scaled, dlogits=logits.grad), grade="exact").raise_for_failure()


KL = {"beta": 0.04, "estimator": "k3"}


def one(dtype: str = "f32", spec: assay.Spec | None = None) -> assay.Problem:
    return next(iter(assay.problems(spec or assay.spec(kl=KL), 1, seed=3, dtypes=(dtype,), shapes=["3x5x257"])))


@pytest.mark.parametrize("lm_head", [False, True], ids=["logits", "head"])
def test_a_checkpoint_has_the_same_gradient(lm_head: bool) -> None:
    """Which unpacks what was saved once."""
    problem = one()
    arrays, arguments = problem.torch(), given(problem)
    hidden = torch.linspace(-1, 1, 3 * 5 * 8).reshape(3, 5, 8)
    lm_head_of = torch.linspace(-1, 1, 257 * 8).reshape(257, 8)
    leaf = (hidden if lm_head else arrays.logits.clone()).requires_grad_()

    def loss(leaf: Any) -> Any:
        made_of = {"logits": None, "hidden": leaf, "lm_head": lm_head_of} if lm_head else {"logits": leaf}
        result = assay.torch.grpo_loss(**made_of, **arguments, spec=problem.spec)
        return result.loss + result.logp.sum()

    expected = torch.autograd.grad(loss(leaf), leaf)
    assert torch.equal(*torch.autograd.grad(checkpoint(loss, leaf, use_reentrant=False), leaf), *expected)


def test_logp_and_entropy_are_differentiable_and_the_rest_is_detached() -> None:
    problem = one()
    arrays = problem.torch()
    for name in ("logp", "entropy"):
        logits = arrays.logits.clone().requires_grad_()
        result = assay.torch.grpo_loss(logits, **given(problem), spec=problem.spec)
        weights = torch.linspace(-1, 2, result.logp.numel()).reshape(result.logp.shape)
        (getattr(result, name) * weights).sum().backward()
        exact = arrays.logits.double().requires_grad_()
        log_softmax = exact.log_softmax(-1)
        value = {
            "logp": log_softmax.gather(-1, arrays.ids.clamp(0).unsqueeze(-1)).squeeze(-1),
            "entropy": -(log_softmax.exp() * log_softmax).sum(-1),
        }[name]
        (value * weights * arrays.mask).sum().backward()
        assert logits.grad.abs().max() > 0
        torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=2e-6, atol=1e-9)
    result = assay.torch.grpo_loss(arrays.logits.clone().requires_grad_(), **given(problem), spec=problem.spec)
    assert not result.token_loss.requires_grad
    assert not any(metric.requires_grad for metric in result.metrics.values())


def test_without_a_gradient_no_dlogits_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = one()
    called = []
    monkeypatch.setattr(_native, "op_gradient", lambda *_: called.append(1))
    assert not assay.torch.grpo_loss(problem.torch().logits, **given(problem), spec=problem.spec).loss.requires_grad
    with torch.no_grad():
        logits = problem.torch().logits.clone().requires_grad_()
        assay.torch.grpo_loss(logits, **given(problem), spec=problem.spec)
    assert not called


def test_a_second_backward_is_an_error() -> None:
    problem = one()
    logits = problem.torch().logits.clone().requires_grad_()
    loss = assay.torch.grpo_loss(logits, **given(problem), spec=problem.spec).loss
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    loss = assay.torch.grpo_loss(logits, **given(problem), spec=problem.spec).loss
    (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula|does not require grad"):
        gradient.sum().backward()
    in_place = assay.torch.grpo_loss(logits.view(logits.shape), **given(problem), spec=problem.spec, inplace=True).loss
    in_place.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward pass"):
        in_place.backward()


def test_a_graph_that_is_kept_is_differentiated_again() -> None:
    """Of the functional operation: each backward pass computes dlogits anew, from logits that must still be those."""
    problem = one()
    leaf = problem.torch().logits.clone().requires_grad_()
    logits = leaf * 1.0
    result = assay.torch.grpo_loss(logits, **given(problem), spec=problem.spec)

    def gradient(g: float, **options: bool) -> Any:
        (of_leaf,) = torch.autograd.grad(result.loss, leaf, torch.tensor(g), **options)
        return of_leaf

    first, again = gradient(1.0, retain_graph=True), gradient(1.0, retain_graph=True)
    assert torch.equal(first, again) and first.data_ptr() != again.data_ptr()
    assert torch.equal(gradient(-2.0, retain_graph=True), -2 * first)
    with torch.no_grad():
        logits.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient(1.0)


def test_a_projects_loss_reads_the_arrays_that_it_is_given() -> None:
    problem = one()
    arguments = given(problem)

    def loss(project: str, **others: Any) -> float:
        return float(assay.torch.grpo_loss(problem.torch().logits, **{**arguments, **others}, spec=project).loss)

    weights = torch.linspace(1.0, 2.0, arguments["ids"].numel()).reshape(arguments["ids"].shape)
    # prime-rl divides by the sum of all weights, which its trainer gives.
    equal = loss("prime-rl", token_weights=torch.ones_like(weights), rl_scale=8.0)
    assert loss("prime-rl", token_weights=weights, rl_scale=8.0) != equal
    by_token = torch.outer(arguments["advantages"], torch.ones(weights.shape[1]))
    assert loss("trl", advantages=by_token) == loss("trl") != loss("trl", advantages=by_token * weights)
    of_sampler = loss("trl", use_vllm=True, rollout_weights=torch.ones_like(weights))
    assert of_sampler == loss("trl") != loss("trl", use_vllm=True, rollout_weights=weights)


def test_a_tensor_of_temperatures_divides_each_sequence_or_token_by_its_own() -> None:
    problem = one()
    arguments = {**given(problem), "temperature": None}
    logits, ids, mask = problem.torch().logits, arguments["ids"], arguments["mask"]
    rows = torch.linspace(0.6, 1.4, ids.shape[0])

    def logp(temperature: Any, spec: Any = "trl") -> Any:
        options = {**arguments, "temperature": temperature}
        return assay.torch.grpo_loss(logits, **options, spec=spec).logp

    for given_as in (rows, rows[:, None], rows[:, None].expand(ids.shape)):
        found = logp(given_as)
        assert torch.equal(found, assay.torch.logp_and_entropy(logits, ids, mask, temperature=given_as)[0])
        for b, temperature in enumerate(rows.tolist()):
            assert torch.equal(found[b], logp(temperature)[b])
    assert torch.equal(logp(rows), logp(rows, assay.spec(temperature="given")))
    with pytest.raises(assay.ProblemError, match="`temperature`: got a tensor beside a Spec with a number"):
        logp(rows, assay.spec("trl"))
    with pytest.raises(assay.ProblemError, match=r"`temperature\[0,0\]`: got -0.6.*, expected a finite number > 0"):
        logp(-rows)


def test_gradients_lie_where_those_lay_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pool, "LARGE", 1)
    assay.torch.empty_cache()
    problem = one()

    def gradient() -> Any:
        logits = problem.torch().logits.clone().requires_grad_()
        assay.torch.grpo_loss(logits, **given(problem), spec=problem.spec).loss.backward()
        return logits.grad

    first = gradient()
    expected, address = first.clone(), first.data_ptr()
    second = gradient()
    assert second.data_ptr() != address, "the first is still there"
    assert torch.equal(first, expected) and torch.equal(second, expected)
    part = first[1]
    del first
    assert gradient().data_ptr() != address, "a part of the first is still there"
    second = part = None
    (kept,) = _pool._idle
    lies = torch.frombuffer(memoryview(kept), dtype=torch.uint8).data_ptr()
    third = gradient()
    assert third.data_ptr() == lies and torch.equal(third, expected), "the one block is kept, and used again"
    del third, kept
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        for of_thread in threads.map(lambda _: gradient(), range(8)):
            assert torch.equal(of_thread, expected)
    # What would fill less than half of a block does not hold on to it.
    assert len(_pool._idle) == 1
    small = _pool.empty(torch.Size([1, 1, 100]), torch.float32)
    assert small.shape == (1, 1, 100) and len(_pool._idle) == 0
    del small
    assert [len(block) for block in _pool._idle] == [400]
    assay.torch.empty_cache()
    assert not _pool._idle


def test_in_place_writes_over_the_logits_and_is_refused_where_that_is_wrong() -> None:
    problem = one()
    lent = problem.torch().logits
    base = lent.clone().requires_grad_()
    logits = base * 1.0
    result = assay.torch.grpo_loss(logits, **given(problem), spec=problem.spec, inplace=True)
    assert torch.equal(logits, base)
    result.loss.backward()
    assert torch.equal(logits, base.grad) and not torch.equal(logits, lent)

    def refused(logits: Any) -> str:
        with pytest.raises(assay.ProblemError) as error:
            assay.torch.grpo_loss(logits, **given(problem), spec=problem.spec, inplace=True)
        return str(error.value)

    assert "TanhBackward" in refused(base.tanh())
    assert "TanhBackward" in refused(torch.cat([base, base]).tanh()[:3])
    assert "ExpBackward" in refused(base.exp().view(base.shape))
    assert "leaf" in refused(base)

    # Another consumer that saved them is differentiated later: autograd says so.
    logits = base * 1.0
    other = (logits * logits).sum()
    assay.torch.grpo_loss(logits, **given(problem), spec=problem.spec, inplace=True).loss.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_it_is_traced() -> None:
    problem = one()
    arguments = given(problem)
    options: dict[str, Any] = {"spec": problem.spec}
    logits = problem.torch().logits.clone().requires_grad_()

    def step(logits: Any, ids: Any, advantages: Any, **rest: Any) -> Any:
        result = assay.torch.grpo_loss(logits * 1.5, ids, advantages, **rest, **options)
        return result.loss / 7, result.metrics["entropy_mean"]

    eager, _ = step(logits, **arguments)
    eager.backward()
    expected, logits.grad = logits.grad, None
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    loss, _ = compiled(logits, **arguments)
    loss.backward()
    assert torch.equal(loss, eager) and torch.equal(logits.grad, expected)
    options = {"spec": "trl", "loss_type": "grpo"}
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(logits, **arguments)[0], step(logits, **arguments)[0])
    options = {"spec": problem.spec, "inplace": True}
    with pytest.raises(Exception, match="under torch.compile"):
        torch.compile(step, backend="aot_eager", fullgraph=True)(logits, **arguments)


def test_torch_finds_the_operation_sound() -> None:
    problem = one()
    arguments = given(problem)
    arrays = [arguments.get(name) for name in assay.torch._ARRAYS]
    logits = problem.torch().logits.clone().requires_grad_()
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(assay.torch._loss, (logits, *arrays, None, problem.spec.to_json()), test_utils=tests)


def test_logp_and_entropy_are_those_of_the_loss() -> None:
    problem = one("bf16")
    arrays = problem.torch()
    result = assay.torch.grpo_loss(arrays.logits, **given(problem), spec=problem.spec)
    logp, entropy = assay.torch.logp_and_entropy(arrays.logits.clone().requires_grad_(), arrays.ids, arrays.mask)
    assert torch.equal(logp, result.logp) and torch.equal(entropy, result.entropy) and logp.requires_grad
    with torch.no_grad():
        alone, _ = assay.torch.logp_and_entropy(arrays.logits.clone().requires_grad_(), arrays.ids, arrays.mask)
    assert torch.equal(alone, logp) and not alone.requires_grad
    hidden, lm_head = torch.randn(3, 5, 16), torch.randn(257, 16)
    of_head = assay.torch.logp_and_entropy(
        None, arrays.ids, arrays.mask, hidden=hidden, lm_head=lm_head, chunk=4, temperature=0.7
    )
    of_logits = assay.torch.logp_and_entropy(hidden @ lm_head.T, arrays.ids, arrays.mask, temperature=0.7)
    torch.testing.assert_close(of_head, of_logits, rtol=1e-5, atol=1e-5)


def expect_exact(kernel: Any, lm_head: bool, **asked: Any) -> None:
    """Logp at a temperature of 0.7, forward and backward, at the grade that is asked of kernels of ours."""
    report = assay.check_logp(
        kernel,
        temperature=0.7,
        lm_head=lm_head,
        dtypes=["f32"] if lm_head else ["f32", "bf16", "f16"],
        cases=24,
        wide=0,
        power=False,
        repro_dir=None,
        grade="exact",
        **asked,
    )
    assert report, report


@pytest.mark.parametrize("lm_head", [False, True], ids=["logits", "head"])
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_logp_and_entropy_pass_forward_and_backward(softcap: float | None, lm_head: bool) -> None:
    def on_logits(logits: Any, ids: Any) -> Any:
        return assay.torch.logp_and_entropy(logits, ids, temperature=0.7, softcap=softcap)

    def on_hidden(hidden: Any, lm_head: Any, ids: Any) -> Any:
        head = lm_head.contiguous()
        return assay.torch.logp_and_entropy(None, ids, hidden=hidden, lm_head=head, temperature=0.7, softcap=softcap, chunk=3)

    expect_exact(on_hidden if lm_head else on_logits, lm_head, entropy=True, logits={"softcap": softcap})


@pytest.mark.parametrize("lm_head", [False, True], ids=["logits", "head"])
def test_gather_logp_passes_forward_and_backward(lm_head: bool) -> None:
    def on_logits(logits: Any, ids: Any) -> Any:
        return assay.torch.gather_logp(logits, ids, temperature=0.7, softcap=20.0)

    def on_hidden(hidden: Any, lm_head: Any, ids: Any) -> Any:
        head = lm_head.contiguous()
        return assay.torch.gather_logp(None, ids, hidden=hidden, lm_head=head, temperature=0.7, softcap=20.0, chunk=3)

    expect_exact(on_hidden if lm_head else on_logits, lm_head, ids_per_token=3, logits={"softcap": 20.0})


def test_gather_logp_of_one_id_is_logp_and_an_operation_that_can_be_traced() -> None:
    arrays = one("f32").torch()
    logits = arrays.logits.clone().requires_grad_()
    logp, _ = assay.torch.logp_and_entropy(logits, arrays.ids, arrays.mask)
    gathered = assay.torch.gather_logp(logits, arrays.ids[..., None], arrays.mask)
    assert torch.equal(gathered[..., 0], logp)
    (expected,) = torch.autograd.grad(logp.sum(), logits)
    (gradient,) = torch.autograd.grad(gathered.sum(), logits)
    assert torch.equal(gradient, expected)
    ids = torch.stack([arrays.ids, arrays.ids, arrays.ids.flip(1)], -1)
    json = assay.spec("logp", entropy=False, ids_per_token=3).to_json()
    mask = torch.ones_like(arrays.mask)
    ids = torch.where(arrays.mask[..., None] & arrays.mask.flip(1)[..., None], ids, 0)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(assay.torch._gather, (torch.randn(3, 5, 257, requires_grad=True), ids, mask, json), test_utils=tests)
    with pytest.raises(assay.ProblemError, match=r"`ids`: got shape \[3, 5\], expected \[B,T,K\] with K ≥ 1"):
        assay.torch.gather_logp(logits, arrays.ids)
    outside = torch.full_like(ids, 257)
    with pytest.raises(assay.ProblemError, match=r"`ids\[0,0,0\]`: got 257, expected 0 ≤ id < V = 257"):
        assay.torch.gather_logp(torch.randn(3, 5, 257), outside)


def test_logp_and_entropy_of_masked_tokens_have_no_gradient() -> None:
    problem = one("f32")
    arrays = problem.torch()
    logits = arrays.logits.clone().requires_grad_()
    logp, entropy = assay.torch.logp_and_entropy(logits, arrays.ids, arrays.mask)
    (logp + entropy).sum().backward()
    assert not logits.grad[~arrays.mask].any() and logits.grad[arrays.mask].any()


def test_rows_may_lie_anywhere() -> None:
    problem = one()
    logits = problem.torch().logits
    room = torch.full((3, 9, 300), 7.0)
    room[:, 2:7, :257] = logits
    room.requires_grad_()
    result = assay.torch.grpo_loss(room[:, 2:7, :257], **given(problem), spec=problem.spec)
    result.loss.backward()
    problem.check(outputs(result, dlogits=room.grad[:, 2:7, :257].contiguous()), grade="exact").raise_for_failure()


def test_a_normalizer_joins_parts_of_a_batch() -> None:
    problem = one()
    arguments, logits = given(problem), problem.torch().logits
    count = float(arguments["mask"].sum())

    def of(rows: slice) -> Any:
        part: dict[str, Any] = {name: None if array is None else array[rows] for name, array in arguments.items()}
        leaf = logits[rows].clone().requires_grad_()
        assert leaf is not None
        loss = assay.torch.grpo_loss(leaf, **part, spec="trl", beta=0.04, normalizer=count).loss
        loss.backward()
        return loss.item(), leaf.grad

    (whole, gradient), (first, of_first), (second, of_second) = of(slice(0, 3)), of(slice(0, 1)), of(slice(1, 3))
    assert first + second == pytest.approx(whole, rel=1e-6)
    assert torch.equal(torch.cat([of_first, of_second]), gradient)
    with pytest.raises(assay.ProblemError, match="`normalizer`: got 5, expected none, or a spec whose `reduction`"):
        assay.torch.grpo_loss(logits, **arguments, spec="trl", loss_type="grpo", normalizer=5)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_packed_sequences_have_the_bits_of_the_padded_batch(level: str) -> None:
    spec = assay.spec("trl", beta=0.04, loss_type="grpo", importance_sampling_level=level, entropy_coef=0.01)
    for problem in problems(spec, 8, dtypes=("f32", "bf16")):
        packed = problem.pack()
        got, expected = on_logits(packed), on_logits(problem)
        verdicts = packed.check(got, grade="exact")
        assert verdicts, verdicts
        assert torch.equal(got["loss"], expected["loss"])
        of_packed, of_padded = packed.torch().mask, problem.torch().mask
        for name in ("logp", "entropy", "token_loss", "dlogits"):
            assert torch.equal(got[name][of_packed], expected[name][of_padded]), name
        by_ids = {**given(packed), "cu_seqlens": None, "segment_ids": segment_ids(packed)}
        assert torch.equal(assay.torch.grpo_loss(packed.torch().logits, **by_ids, spec=packed.spec).loss, got["loss"])


def flat(problem: assay.Problem) -> dict[str, Any]:
    """The arguments of a packed problem without the axis of rows."""
    per_token = ("ids", "mask", "old_logp", "ref_logp", "rollout_logp", "dentropy")
    return {name: array[0] if array is not None and name in per_token else array for name, array in given(problem).items()}


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_a_flat_row_has_the_bits_of_the_packed_one(level: str) -> None:
    spec = assay.spec("trl", beta=0.04, loss_type="grpo", importance_sampling_level=level, batch={"advantages": level})
    for problem in problems(spec, 3, dtypes=("f32",), packed=True):
        expected, arguments = on_logits(problem), flat(problem)
        if level == "token":
            arguments["advantages"] = arguments["advantages"][0]
        for inplace in (False, True):
            logits = problem.torch().logits[0].clone().requires_grad_()
            result = assay.torch.grpo_loss(logits.view(logits.shape), **arguments, spec=problem.spec, inplace=inplace)
            result.loss.backward()
            for name in ("loss", "logp", "entropy", "token_loss"):
                of_row = expected[name] if name == "loss" else expected[name][0]
                assert torch.equal(getattr(result, name).detach(), of_row), name
            assert torch.equal(logits.grad, expected["dlogits"][0])
        named: dict[str, Any] = {"spec": "trl", "loss_type": "grpo", "importance_sampling_level": level, "beta": 0.04}
        assert torch.equal(assay.torch.grpo_loss(problem.torch().logits[0], **arguments, **named).loss, expected["loss"])
        logp, entropy = assay.torch.logp_and_entropy(problem.torch().logits[0], arguments["ids"], arguments["mask"])
        assert logp.shape == entropy.shape == arguments["ids"].shape and torch.allclose(logp, expected["logp"][0])
    problem = next(iter(problems(spec, 1, dtypes=("f32",), packed=True, lm_head=True)))
    expected, arrays = on_head(problem), problem.torch()
    hidden, lm_head = arrays.hidden[0].clone().requires_grad_(), arrays.lm_head.clone().requires_grad_()
    result = assay.torch.grpo_loss(None, hidden=hidden, lm_head=lm_head, **flat(problem), spec=spec, chunk=5)
    result.loss.backward()
    assert torch.equal(hidden.grad, expected["dhidden"][0]) and torch.equal(lm_head.grad, expected["dlm_head"])


def segment_ids(packed: assay.Problem) -> Any:
    ends = packed.torch().cu_seqlens
    return torch.repeat_interleave(torch.arange(1, len(ends)), ends.diff())[None]


def test_packed_sequences_that_do_not_fit_are_refused_by_name() -> None:
    packed = next(iter(problems(assay.spec("trl"), 1, dtypes=("f32",)))).pack()
    tokens = packed.shape[1]

    def refused(ends: list[int], **more: Any) -> str:
        arguments = {**given(packed), "cu_seqlens": torch.tensor(ends), **more}
        with pytest.raises(assay.ProblemError) as error:
            assay.torch.grpo_loss(packed.torch().logits, **arguments, spec=packed.spec)
        return str(error.value)

    assert refused([1, tokens]).startswith("`cu_seqlens[0]`: got 1, expected 0")
    assert refused([0, 2, 1]).startswith("`cu_seqlens[2]`: got 1, expected at least 2")
    assert refused([0, tokens + 1]).startswith(f"`cu_seqlens[1]`: got {tokens + 1}, expected at most N = {tokens}")
    assert refused([0, tokens], segment_ids=segment_ids(packed)).startswith("`segment_ids`: got shape")

    rows = next(assay.problems("trl", 1, dtypes=("f32",), shapes=["2x4x33"]))

    def refused_rows(logits: Any = rows.torch().logits, **more: Any) -> str:
        with pytest.raises(assay.ProblemError) as error:
            assay.torch.grpo_loss(logits, **{**given(rows), **more}, spec=rows.spec)
        return str(error.value)

    concatenated = "concatenate several rows, and add their lengths to the ends"
    assert refused_rows(cu_seqlens=torch.tensor([0, 1, 4])).startswith("`mask`: got shape [2, 4], expected [1,N]")
    assert concatenated in refused_rows(cu_seqlens=torch.tensor([0, 1, 4]))
    assert refused_rows(segment_ids=torch.ones(2, 4, dtype=torch.int64)).startswith("`segment_ids`: got shape [2, 4]")
    assert refused_rows(logits=rows.torch().logits[0]) == "`logits`: got shape [4, 33], expected [B,T,V], as `ids` are [B,T]"
    one = {name: given(rows)[name][0] for name in ("ids", "mask", "old_logp")}
    assert refused_rows(logits=rows.torch().logits[0], **one).startswith("`ids`: got shape [4], expected beside them `cu_seqlens`")
    ambiguous = {**one, "advantages": torch.ones(4), "cu_seqlens": torch.tensor([0, 0, 2, 3, 4])}
    with pytest.raises(assay.ProblemError, match="of N sequences of N tokens some are empty"):
        assay.torch.grpo_loss(rows.torch().logits[0], **{**given(rows), **ambiguous}, spec="trl")


def test_spec_that_is_missing_is_refused_with_two_examples() -> None:
    problem = one()
    with pytest.raises(assay.SpecError) as error:
        assay.torch.grpo_loss(problem.torch().logits, **given(problem))
    assert str(error.value).startswith("`spec`: not given, expected the loss to compute")
    examples = re.findall(r'spec=("trl"|assay\.spec\(.*\))', str(error.value))
    assert len(examples) == 2
    for example in examples:
        spec = eval(example, {"assay": assay})
        assert assay.torch.grpo_loss(problem.torch().logits, **given(problem), spec=spec).loss.isfinite()


def test_arguments_of_jax_are_refused_with_what_to_use_here() -> None:
    problem = one()
    signature = inspect.signature(assay.torch.grpo_loss).parameters
    theirs = ("implementation", "target", "batch_axis", "token_axis", "vocab_axis", "logits_dtype", "policy_weight")
    for name in (*theirs, "kl_weight", "log_weight", "behaviour_logp"):
        assert name not in signature
        for spec in (problem.spec, "trl"):
            with pytest.raises(assay.ProblemError, match=f"^`{name}`: got an argument of assay.jax, expected none; ."):
                assay.torch.grpo_loss(problem.torch().logits, **{**given(problem), "spec": spec, name: 8.0})


def test_what_does_not_fit_is_refused_by_name() -> None:
    problem = one()
    arguments, logits = given(problem), problem.torch().logits

    def refused(logits: Any = logits, **changed: Any) -> str:
        with pytest.raises(assay.ProblemError) as error:
            assay.torch.grpo_loss(logits, **{**arguments, "spec": problem.spec, **changed})
        return str(error.value)

    assert refused(ids=arguments["ids"].float()) == "`ids`: got dtype f32, expected i64 or i32"
    assert refused(ids=arguments["ids"].T) == "`ids`: got shape [5, 3], expected [3, 5] ([B,T] of the logits)"
    assert refused(mask=torch.full((3, 5), 0.5)) == "`mask[0,0]`: got 0.5, expected 0 or 1"
    assert "`old_logp`: not given" in refused(old_logp=None)
    assert refused(logits.double()) == "`logits`: got dtype f64, expected f32, bf16 or f16"
    assert "`logits`: got rows with a stride of" in refused(logits.transpose(1, 2).contiguous().transpose(1, 2))
    assert refused(None) == "`logits`: got None, expected a tensor, or both `hidden` and `lm_head`"
    assert "either logits or what makes them" in refused(hidden=logits)
    assert "`logits`: got a tensor on meta, expected one on the CPU" in refused(logits.to("meta"))
    wrong = torch.zeros(3, 5, 4), torch.zeros(257, 8)
    assert refused(None, hidden=wrong[0], lm_head=wrong[1]).startswith("`lm_head`: got shape [257, 8], expected [V,H] with H")
    with pytest.raises(assay.SpecError, match="is `trl` meant"):
        assay.torch.grpo_loss(logits, **arguments, spec="trll")


def test_what_is_no_tensor_or_no_spec_is_named() -> None:
    problem = next(assay.problems("trl", 1, dtypes=["f32"], shapes=["2x3x7"]))
    logits, arguments = problem.torch().logits.clone().requires_grad_(), given(problem)
    hidden, linear = torch.zeros(2, 3, 4), torch.nn.Linear(4, 7)

    tensor: Any = torch.Tensor

    class DTensor(tensor):  # type: ignore[misc]
        def full_tensor(self) -> Any:
            return self

    counted = 'assay.spec("trl", batch={"num_items_in_batch": n})'
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"spec": {"beta": 0.04}}, assay.SpecError, "`spec`: got a dict, expected a project's name, or a Spec"),
        ({"advantages": [1.0, -1.0]}, assay.ProblemError, "`advantages`: got list, expected a tensor"),
        ({"old_logp": 0.0}, assay.ProblemError, "`old_logp`: got float, expected a tensor"),
        ({"logits": None, "hidden": hidden, "lm_head": linear}, assay.ProblemError, "`lm_head`: got the module Linear"),
        ({"logits": logits.detach().as_subclass(DTensor)}, assay.ProblemError, "`logits`: got DTensor, expected a tensor of this rank"),
        ({"spec": assay.spec("trl"), "normalizer": 5.0}, assay.ProblemError, counted),
        ({"normalizer": torch.tensor(0)}, assay.ProblemError, "`normalizer`: got 0, expected the number of tokens that count, above 0"),
        ({"normalizer": 0}, assay.ProblemError, "`normalizer`: got 0, expected the number of tokens that count, above 0"),
        ({"loss_scale": float("nan")}, assay.ProblemError, "`loss_scale`: got nan, expected a finite number"),
        ({"loss_scale": torch.tensor(2.0)}, assay.ProblemError, "`loss_scale`: got tensor(2.), expected a finite number"),
    ]
    for wrong, error, said in cases:
        with pytest.raises(error, match=re.escape(said)):
            assay.torch.grpo_loss(**({"logits": logits, "spec": "trl", **arguments} | wrong))
    for name in ("logp_and_entropy", "gather_logp"):
        with pytest.raises(assay.ProblemError, match="`ids`: got list, expected a tensor"):
            getattr(assay.torch, name)(logits, [1, 2])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64, torch.float32, torch.bfloat16])
def test_a_mask_may_be_of_any_numbers_that_are_0_or_1(dtype: Any) -> None:
    problem = next(assay.problems("trl", 1, dtypes=["f32"], shapes=["2x3x7"]))
    logits, arguments = problem.torch().logits, given(problem)
    loss = assay.torch.grpo_loss(logits, **arguments, spec="trl").loss
    assert assay.torch.grpo_loss(logits, **(arguments | {"mask": arguments["mask"].to(dtype)}), spec="trl").loss == loss


def test_advantages_may_be_one_a_token_whatever_a_spec_says() -> None:
    problem = next(assay.problems("trl", 1, dtypes=["f32"], shapes=["2x3x7"]))
    logits, arguments = problem.torch().logits, given(problem)
    loss = assay.torch.grpo_loss(logits, **arguments, spec=assay.spec("trl")).loss
    of_tokens = arguments["advantages"][:, None].expand(2, 3).contiguous()
    assert assay.torch.grpo_loss(logits, **(arguments | {"advantages": of_tokens}), spec=assay.spec("trl")).loss == loss
