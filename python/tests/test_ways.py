"""The ways in which callers differ: what `assay.check_logp` and `assay.check_loss` ask besides a plain call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import assay

OPTIONS: dict[str, Any] = {
    "cases": 40, "wide": 0, "power": False, "repro_dir": None, "masked_garbage": False, "shapes": ["2x3x33", "3x5x130", "1x7x20"]
}  # fmt: skip
OF_HEADS = {**OPTIONS, "shapes": ["2x3x16x33", "3x5x8x130", "1x7x24x20"]}


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="PyTorch is not installed: make test-extensive")


def wrong_logp(torch: Any, kind: str, head: bool = False) -> Callable[..., Any]:
    """Log-probabilities that are right in a plain call."""

    class Logp(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            *inputs, ids = args
            if kind == "dense rows":
                b, t, v = inputs[0].shape
                inputs = [inputs[0].as_strided((b, t, v), (t * v, v, 1))]
            x = (inputs[0].float() @ inputs[1].float().T) if head else inputs[0].float()
            lse = x.logsumexp(-1, keepdim=True)
            ctx.save_for_backward(*args, lse)
            if kind == "scaled in place":
                ctx.d = -(x - lse).exp()
                ctx.d.scatter_add_(-1, ids[..., None], torch.ones_like(lse))
            return (x.gather(-1, ids[..., None]) - lse)[..., 0]

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            *inputs, ids, lse = ctx.saved_tensors
            if kind == "scaled in place":
                return ctx.d.mul_(g.float()[..., None]).to(inputs[0].dtype), None
            if kind == "refuses a second pass":
                assert not hasattr(ctx, "done"), "a second backward pass"
                ctx.done = True
            if kind == "dense cotangent" or (kind == "dense but for one number" and any(g.stride())):
                room = g.untyped_storage().nbytes() // g.element_size() - g.storage_offset()
                n = min(g.numel(), room)
                g = torch.cat([g.as_strided((n,), (1,)), g.new_zeros(g.numel() - n)]).reshape(g.shape)
            if kind == "frozen head" and not ctx.needs_input_grad[1]:
                return torch.zeros_like(inputs[0]), None, None
            if kind == "frozen hidden states" and not ctx.needs_input_grad[0]:
                return None, torch.zeros_like(inputs[1]), None
            x = (inputs[0].float() @ inputs[1].float().T) if head else inputs[0].float()
            d = -(x - lse).exp()
            d.scatter_add_(-1, ids[..., None], torch.ones_like(lse))
            d = d * g.float()[..., None]
            if kind == "over the logits":
                inputs[0].data.copy_(d)
                return inputs[0].data, None
            if kind == "over .grad" and inputs[0].grad is not None:
                inputs[0].grad.data.copy_(d)
            if head:
                of_hidden = (d @ inputs[1].float()).to(inputs[0].dtype)
                return of_hidden, torch.einsum("btv,bth->vh", d, inputs[0].float()).to(inputs[1].dtype), None
            return d.to(inputs[0].dtype), None

    def logp(*args: Any) -> Any:
        return Logp.apply(*args)

    return logp


@pytest.mark.parametrize(
    ("kind", "gate", "called"),
    [
        ("dense rows", "logp", "logits[:, :-1], a view of a longer tensor"),
        ("dense cotangent", "dlogits", "one cotangent expanded to all tokens"),
        ("dense but for one number", "dlogits", "cotangents that are a transposed part"),
        ("scaled in place", "dlogits", "a second backward pass"),
        ("over .grad", "input-mutated", "logits.grad set before"),
        ("frozen head", "dhidden", "a frozen head"),
        ("frozen hidden states", "dlm_head", "frozen hidden states"),
    ],
)
def test_logp_that_is_wrong_in_one_way_of_calling_fails_by_it(torch: Any, kind: str, gate: str, called: str) -> None:
    head = kind.startswith("frozen")
    report = assay.check_logp(wrong_logp(torch, kind, head), **(OF_HEADS if head else OPTIONS))
    causes = {cause._data["first"].split("called with ")[-1]: cause for cause in report.causes}
    found = [cause for words, cause in causes.items() if called in words]
    assert not report and found and found[0].gate.startswith(gate), report
    # Each is shrunk in its way, which its text names, and a plain call passes.
    assert all(f"called with {words}" in cause._data["problem"] for words, cause in causes.items()), report
    assert all(not cause.spec_that_would_pass and not cause.like for cause in report.causes), report


def test_logp_written_over_the_logits_fails_unless_that_is_allowed(torch: Any) -> None:
    report = assay.check_logp(wrong_logp(torch, "over the logits"), **OPTIONS)
    assert [cause.gate for cause in report.causes] == ["input-mutated"] and "`logits`" in repr(report), report
    in_place = assay.check_logp(wrong_logp(torch, "over the logits"), inplace=True, **{**OPTIONS, "dtypes": ["f32"]})
    # A second backward pass has dlogits for logits.
    assert {cause._data["first"].split("called with ")[-1].split(",")[0] for cause in in_place.causes} <= {
        "a second backward pass of a kept graph"
    }, in_place


def test_logp_that_refuses_a_way_of_calling_passes_and_it_is_said(torch: Any) -> None:
    def dense_only(logits: Any, ids: Any) -> Any:
        x = logits.view(-1, logits.shape[-1]).float()
        return (x.gather(-1, ids.view(-1, 1))[:, 0] - x.logsumexp(-1)).view(ids.shape)

    report = assay.check_logp(dense_only, **OPTIONS)
    assert report and any("a view of a longer tensor: RuntimeError: view size" in skipped["why"] for skipped in report.skipped), report
    report = assay.check_logp(wrong_logp(torch, "refuses a second pass"), **OPTIONS)
    assert report and any("AssertionError: a second backward pass" in skipped["why"] for skipped in report.skipped), report
    assert report.cases == 40


def test_gradients_with_other_strides_pass(torch: Any) -> None:
    def of_classes(logits: Any, ids: Any) -> Any:
        return -torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), ids, reduction="none")

    def by_einsum(hidden: Any, lm_head: Any, ids: Any) -> Any:
        x = torch.einsum("bth,vh->btv", hidden.float(), lm_head.float())
        return x.gather(-1, ids[..., None])[..., 0] - x.logsumexp(-1)

    report = assay.check_logp(of_classes, **OPTIONS)
    assert report, report
    report = assay.check_logp(by_einsum, **OF_HEADS)
    assert report, report


def test_logp_in_jax_with_a_frozen_head_is_asked_for() -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")

    def logp(hidden: Any, lm_head: Any, ids: Any) -> Any:
        x = jax.numpy.einsum("bth,vh->btv", hidden.astype("float32"), lm_head.astype("float32"))
        return jax.numpy.take_along_axis(jax.nn.log_softmax(x), ids[..., None], -1)[..., 0]

    def no_gradient_alone(hidden: Any, lm_head: Any, ids: Any) -> Any:
        # The hidden states are differentiated only if the head is: what is not is another kind of tracer.
        return logp(hidden if type(hidden) is type(lm_head) else jax.lax.stop_gradient(hidden), lm_head, ids)

    few = {**OF_HEADS, "cases": 16, "dtypes": ["f32"], "shapes": ["2x3x16x33"], "framework": "jax"}
    assert assay.check_logp(logp, **few)
    report = assay.check_logp(no_gradient_alone, **few)
    assert not report and all("called with a frozen head" in cause._data["first"] for cause in report.causes), report


#: The mean over tokens of −A·logp.
SPEC = assay.spec(objective="policy_gradient")


def mean(x: Any, framework: Any, scores: Any) -> Any:
    losses = framework.where(x.mask, -scores * x.advantages[:, None], 0.0)
    return losses.sum() / framework.maximum(x.mask.sum(), framework.ones_like(x.mask.sum()))


def test_a_loss_that_ignores_its_upstream_gradient_fails(torch: Any) -> None:
    def loss(x: Any) -> Any:
        scores = x.logits.float().log_softmax(-1).gather(-1, x.ids.where(x.mask, 0)[..., None])[..., 0]
        return mean(x, torch, scores), {"logp": scores}

    class Fused(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, value: Any) -> Any:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, sent: Any) -> Any:
            return torch.ones_like(sent)

    report = assay.check_loss(loss, SPEC, **OPTIONS)
    assert report and "logp" in json_of(report)["outputs"], report
    report = assay.check_loss(lambda x: Fused.apply(loss(x)[0]), SPEC, **OPTIONS)
    assert not report and {cause._data["first"].split("called with ")[1].split(" of ")[0] for cause in report.causes} == {
        "an upstream gradient"
    }, report
    assert not assay.check_loss(lambda x: 2 * loss(x)[0], SPEC, **{**OPTIONS, "cases": 4})


def json_of(report: assay.Report) -> Any:
    import json

    return json.loads(report.to_json())


def test_a_loss_of_hidden_states_is_judged_by_its_autograd(torch: Any) -> None:
    def loss(x: Any) -> Any:
        logits = torch.einsum("bth,vh->btv", x.hidden.float(), x.lm_head.float())
        return mean(x, torch, logits.log_softmax(-1).gather(-1, x.ids.where(x.mask, 0)[..., None])[..., 0])

    report = assay.check_loss(loss, SPEC, **OF_HEADS)
    assert report, report


def test_a_loss_in_jax_that_ignores_its_upstream_gradient_fails() -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")

    def loss(x: Any) -> Any:
        log_p = jax.nn.log_softmax(x.logits.astype("float32"))
        scores = jax.numpy.take_along_axis(log_p, jax.numpy.where(x.mask, x.ids, 0)[..., None], -1)[..., 0]
        return mean(x, jax.numpy, scores)

    fused = jax.custom_vjp(lambda value: value)
    fused.defvjp(lambda value: (value, ()), lambda kept, sent: (jax.numpy.ones_like(sent),))
    few = {**OPTIONS, "cases": 12, "shapes": ["2x3x33"], "framework": "jax"}
    report = assay.check_loss(loss, SPEC, **few)
    assert report, report
    report = assay.check_loss(lambda x: fused(loss(x)), SPEC, **few)
    assert not report and "called with an upstream gradient of" in report.causes[0]._data["first"], report


def test_what_is_no_loss_is_said() -> None:
    with pytest.raises(assay.AssayError, match="fn: got int, expected a function of a problem's arrays"):
        assay.check_loss(3)  # type: ignore[arg-type]
    with pytest.raises(assay.AssayError, match="framework: got 'tinygrad', expected one of torch, jax"):
        assay.check_loss(abs, framework="tinygrad")
    with pytest.raises(assay.AssayError, match="isolate: got True"):
        assay.check_loss(abs, isolate=True)


def test_a_failure_of_one_way_is_tried_again_in_it(torch: Any, tmp_path: Any) -> None:
    options = {**OPTIONS, "dtypes": ["f32"], "repro_dir": tmp_path}
    first = assay.check_logp(wrong_logp(torch, "scaled in place"), **options)
    assert not first
    # A single problem of the deck is called plainly; the one that is kept in the way in which it failed.
    again = assay.check_logp(wrong_logp(torch, "scaled in place"), **{**options, "cases": 1})
    assert not again and "called with a second backward pass" in again.causes[0]._data["first"], again
