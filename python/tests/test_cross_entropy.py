"""Cross-entropy: campaigns before right and wrong functions, and the operations beside their frameworks' own."""

from __future__ import annotations

from typing import Any

import assay
import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

QUICK: dict[str, Any] = dict(framework="jax", dtypes=["f32"], shapes=["2x3x7", "2x3x33"], cases=12, wide=0, power=False, repro_dir=None, progress=False)


def terms(logits: Any, ids: Any, label_smoothing: float = 0.0, z_loss: float = 0.0) -> tuple[Any, Any]:
    """The loss of each token in f32, 0 where it does not count, and which count."""
    x = logits.astype(jnp.float32)
    counts = ids != -100
    lse = jax.nn.logsumexp(x, axis=-1)
    of_id = jnp.take_along_axis(x, jnp.where(counts, ids, 0)[:, None], -1)[:, 0]
    losses = (1 - label_smoothing) * (lse - of_id)
    if label_smoothing:
        losses = losses + label_smoothing * (lse[:, None] - x).mean(-1)
    if z_loss:
        losses = losses + z_loss * lse**2
    return jnp.where(counts, losses, 0.0), counts


def mean(logits: Any, ids: Any, **options: float) -> Any:
    losses, counts = terms(logits, ids, **options)
    return losses.sum() / counts.sum()


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-2}, {"label_smoothing": 0.3, "z_loss": 1e-3}])
def test_a_plain_mean_passes(options: dict[str, Any]) -> None:
    report = assay.check_cross_entropy(lambda x, ids: mean(x, ids, **options), **options, **QUICK)
    assert report.passed, report


def test_sums_and_losses_of_tokens_pass() -> None:
    assert assay.check_cross_entropy(lambda x, ids: terms(x, ids)[0].sum(), reduction="sum", **QUICK).passed
    smoothed = assay.check_cross_entropy(lambda x, ids: terms(x, ids, 0.2)[0], reduction="none", label_smoothing=0.2, **QUICK)
    assert smoothed.passed, smoothed


def test_a_head_passes() -> None:
    def of_head(hidden: Any, lm_head: Any, ids: Any) -> Any:
        return mean(hidden.astype(jnp.float32) @ lm_head.astype(jnp.float32).T, ids)

    options = QUICK | {"shapes": ["2x3x8x33"], "cases": 4}
    report = assay.check_cross_entropy(of_head, lm_head=True, **options)
    assert report.passed, report


def uncounted(logits: Any, ids: Any) -> Any:
    """The mean is over ignored tokens too."""
    return terms(logits, ids)[0].mean()


def over_others(logits: Any, ids: Any) -> Any:
    """The smoothing is over the other classes."""
    losses, counts = terms(logits, ids)
    all_losses, _ = terms(logits, ids, 1.0)
    vocab = logits.shape[-1]
    others = (vocab * all_losses - losses) / (vocab - 1)
    return (0.9 * losses + 0.1 * others).sum() / counts.sum()


def detached(logits: Any, ids: Any) -> Any:
    """The z-loss has no gradient."""
    losses, counts = terms(logits, ids)
    lse = jnp.where(counts, jax.lax.stop_gradient(jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)) ** 2, 0.0)
    return (losses + 1e-2 * lse).sum() / counts.sum()


@pytest.mark.parametrize(
    ("fn", "options", "says"),
    [
        (uncounted, {}, "normaliser-counts-padding"),
        (over_others, {"label_smoothing": 0.1}, "smoothing-over-others"),
        (detached, {"z_loss": 1e-2}, "z-loss-not-in-gradient"),
        (mean, {"label_smoothing": 0.1}, "no label_smoothing"),
        (mean, {"z_loss": 1e-2}, "no z_loss"),
    ],
)
def test_wrong_ones_are_named(fn: Any, options: dict[str, Any], says: str) -> None:
    report = assay.check_cross_entropy(fn, **options, **QUICK)
    assert not report.passed
    assert says in " ".join(repr(report).split()), report


def test_mistakes_are_named() -> None:
    with pytest.raises(assay.AssayError, match="reduction: got 'average', expected one of mean, sum, none"):
        assay.check_cross_entropy(mean, reduction="average", **QUICK)
    with pytest.raises(assay.AssayError, match="ignore_index: got 3, expected an integer below 0"):
        assay.check_cross_entropy(mean, ignore_index=3, **QUICK)
    with pytest.raises(assay.SpecError, match="label_smoothing`: got 1.5, expected a share: from 0 to 1"):
        assay.check_cross_entropy(mean, label_smoothing=1.5, **QUICK)
    with pytest.raises(assay.SpecError, match="z_loss`: got -1, expected a finite number ≥ 0"):
        assay.spec("cross_entropy", z_loss=-1.0)
    with pytest.raises(assay.SpecError, match="`weight`.*all classes weigh the same"):
        assay.spec("cross_entropy", weight=[1.0])
    report = assay.check_cross_entropy(lambda x, ids: terms(x, ids)[0].sum(), reduction="none", **QUICK)
    assert "token_loss" in repr(report) and "the loss of each token" in " ".join(repr(report).split())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    ("extents", "options"),
    [((2, 3, 5), {}), ((7, 33), {"label_smoothing": 0.1, "z_loss": 1e-2}), ((2, 3, 2053), {"label_smoothing": 1.0})],
)
def test_jax_operation_has_the_numbers_of_autodiff(reduction: str, extents: tuple[int, ...], options: dict[str, Any]) -> None:
    import assay.jax as operations

    rng = np.random.default_rng(3)
    logits = jnp.asarray(rng.normal(size=extents), jnp.float32)
    labels = jnp.asarray(rng.integers(0, extents[-1], extents[:-1]), jnp.int32).at[(1,) * (len(extents) - 1)].set(-100)
    cotangents = jnp.asarray(rng.normal(size=labels.shape if reduction == "none" else ()), jnp.float32)

    def own(logits: Any) -> Any:
        return (operations.cross_entropy(logits, labels, reduction=reduction, **options) * cotangents).sum()

    def plain(logits: Any) -> Any:
        losses, counts = terms(logits.reshape(-1, extents[-1]), labels.reshape(-1), **options)
        reduced = {"mean": losses.sum() / counts.sum(), "sum": losses.sum(), "none": losses.reshape(labels.shape)}[reduction]
        return (reduced * cotangents).sum()

    for ours, theirs in zip(jax.value_and_grad(own)(logits), jax.value_and_grad(plain)(logits)):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=2e-6)
    # Without a gradient the kernels are others.
    np.testing.assert_allclose(own(logits), plain(logits), rtol=2e-6, atol=2e-6)


def test_jax_operation_is_exact() -> None:
    import assay.jax as operations

    row: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-2}

    def of_logits(logits: Any, ids: Any) -> Any:
        return operations.cross_entropy(logits, ids, reduction="sum", softcap=20.0, **row)

    report = assay.check_cross_entropy(of_logits, grade="exact", reduction="sum", softcap=20.0, **row, **QUICK)
    assert report.passed, report

    def of_head(hidden: Any, lm_head: Any, ids: Any) -> Any:
        return operations.cross_entropy_of_hidden(hidden, lm_head.T, ids, reduction="none", chunk=4, **row)

    options = QUICK | {"shapes": ["2x3x8x33"], "cases": 4}
    report = assay.check_cross_entropy(of_head, lm_head=True, reduction="none", **row, **options)
    assert report.passed, report


def test_jax_operation_names_what_it_does_not_compute() -> None:
    import assay.jax as operations

    labels = jnp.full(3, -100)
    assert jnp.isnan(operations.cross_entropy(jnp.zeros((3, 5)), labels))
    assert operations.cross_entropy(jnp.zeros((3, 5)), labels, reduction="sum") == 0
    with pytest.raises(assay.ProblemError, match="`labels`: got shape \\[2\\], expected \\[3\\]"):
        operations.cross_entropy(jnp.zeros((3, 5)), labels[:2])
    with pytest.raises(assay.SpecError, match="z_loss`: got 0.01, expected 0; `native` takes it"):
        operations.cross_entropy(jnp.zeros((3, 5)), labels, z_loss=0.01, implementation="xla")
    with pytest.raises(assay.SpecError, match="label_smoothing`: got 1.5"):
        operations.cross_entropy(jnp.zeros((3, 5)), labels, label_smoothing=1.5)


def all_extents() -> list[tuple[int, ...]]:
    return [(7, 33), (33,), (3, 33, 5), (2, 33, 3, 4)]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("extents", all_extents())
def test_torch_operation_takes_the_place_of_the_functional(extents: tuple[int, ...], label_smoothing: float, reduction: str) -> None:
    torch = pytest.importorskip("torch")
    import assay.torch as operations

    torch.manual_seed(5)
    logits = torch.randn(extents)
    targets = torch.randint(0, 33, extents[:1] + extents[2:] if len(extents) > 1 else ())
    if targets.numel() > 1:
        targets.view(-1)[1] = -100
    made = []
    for fn, dtype in ((torch.nn.functional.cross_entropy, torch.float64), (operations.cross_entropy, torch.float32)):
        x = logits.to(dtype).requires_grad_()
        loss = fn(x, targets, reduction=reduction, label_smoothing=label_smoothing)
        (loss * torch.arange(1, loss.numel() + 1, dtype=dtype).reshape(loss.shape)).sum().backward()
        assert x.grad is not None
        made.append((loss.detach().double(), x.grad.double()))
    for theirs, ours in zip(*made):
        assert theirs.shape == ours.shape
        torch.testing.assert_close(ours, theirs, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"reduction": "none"}, {"z_loss": 1e-3, "softcap": 30.0}])
@pytest.mark.parametrize("lm_head", [False, True])
def test_torch_operation_is_exact(options: dict[str, Any], lm_head: bool) -> None:
    pytest.importorskip("torch")
    import assay.torch as operations

    def of_logits(x: Any, ids: Any) -> Any:
        return operations.cross_entropy(x, ids, **options)

    def of_head(hidden: Any, weight: Any, ids: Any) -> Any:
        return operations.cross_entropy(hidden, ids, lm_head=weight.contiguous(), **options)

    asked = QUICK | {"framework": "torch", "cases": 24, "dtypes": ["f32", "bf16"], "grade": "exact"}
    asked |= {"shapes": ["2x3x8x33"]} if lm_head else {"shapes": "few"}
    report = assay.check_cross_entropy(of_head if lm_head else of_logits, lm_head=lm_head, **options, **asked)
    assert report.passed, report


def test_torch_operation_names_what_it_does_not_compute() -> None:
    torch = pytest.importorskip("torch")
    import assay.torch as operations

    logits, targets = torch.zeros(3, 5), torch.tensor([1, 2, 3])

    def refused(*arguments: Any, **options: Any) -> str:
        with pytest.raises(assay.AssayError) as raised:
            operations.cross_entropy(*arguments, **options)
        return str(raised.value)

    assert refused(logits, targets, torch.ones(5)).startswith("`weight`: got a Tensor, expected None")
    assert refused(logits, targets, size_average=True).startswith("`size_average`: got a bool, expected None")
    assert refused(logits, targets, reduce=False).startswith("`reduce`: got a bool, expected None")
    assert refused(logits, torch.rand(3, 5)).startswith("`target`: got torch.float32, class probabilities")
    assert refused(logits, targets[:2]) == "`target`: got shape [2], expected [3], that of the tokens of `input`"
    assert "got 7, expected 0 ≤ id < V = 5" in refused(logits, torch.tensor([1, 2, 7]))
    assert refused(logits, targets, reduction="none", loss_scale=2.0).startswith("`inplace`, `loss_scale`")
    assert torch.isnan(operations.cross_entropy(logits, torch.full((3,), -100)))


def test_the_functional_of_torch_passes_and_a_hard_one_is_told_from_a_smooth_one() -> None:
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional.cross_entropy
    options = QUICK | {"framework": "torch", "shapes": "many", "cases": 60}
    assert assay.check_cross_entropy(functional, **options).passed
    smooth = assay.check_cross_entropy(lambda x, ids: functional(x, ids, label_smoothing=0.1), label_smoothing=0.1, **options)
    assert smooth.passed, smooth
    # One without a token, one whose logits of -inf a smooth target asks for, and one of a single token are among them.
    hard = assay.check_cross_entropy(functional, label_smoothing=0.1, **options)
    assert "no label_smoothing" in repr(hard)
