"""`assay.torch.divergence`, under PyTorch: against the judge, against itself from hidden states, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

import assay

torch = pytest.importorskip("torch")
import assay.torch  # noqa: E402

OPTIONS: dict[str, Any] = {"shapes": "few", "cases": 42, "wide": 0, "power": False, "repro_dir": None, "progress": False}
KINDS = [("forward_kl", None), ("reverse_kl", None), ("jensen_shannon", 0.5), ("jensen_shannon", 0.1)]


def exact(kind: str, beta: float | None, student: Any, teacher: Any) -> Any:
    """The divergence of f64 logits, as the formula has it."""
    lp, lq = student.log_softmax(-1), teacher.log_softmax(-1)
    if kind == "forward_kl":
        return (lq.exp() * (lq - lp)).sum(-1)
    if kind == "reverse_kl":
        return (lp.exp() * (lp - lq)).sum(-1)
    assert beta is not None
    lm = (beta * lq.exp() + (1 - beta) * lp.exp()).log()
    return (beta * lq.exp() * (lq - lm) + (1 - beta) * lp.exp() * (lp - lm)).sum(-1)


@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_divergence_is_right_in_a_campaign(kind: str, beta: float | None, reduction: str) -> None:
    def fn(student: Any, teacher: Any) -> Any:
        return assay.torch.divergence(
            student, teacher, kind=kind, beta=beta, temperature=1.7, temperature_squared=True, reduction=reduction
        )

    options: dict[str, Any] = {"kind": kind, "beta": beta, "temperature": 1.7, "temperature_squared": True}
    # Exact: the sums do not cancel where student and teacher are near.
    report = assay.check_divergence(fn, reduction=reduction, grade="exact", **options, **OPTIONS)
    assert report.passed, report


@pytest.mark.parametrize("rest", ["tail", "renormalized", "ignored"])
@pytest.mark.parametrize(("kind", "beta"), KINDS[:3])
def test_divergence_from_likeliest_entries_is_right_in_a_campaign(kind: str, beta: float | None, rest: str) -> None:
    def fn(student: Any, logp: Any, ids: Any) -> Any:
        return assay.torch.divergence(student, teacher_logp=logp, teacher_ids=ids, kind=kind, beta=beta, rest=rest)

    report = assay.check_divergence(fn, kind=kind, beta=beta, teacher_top_k=5, rest=rest, **OPTIONS)
    assert report.passed, report


def test_divergence_holds_its_gradient_alone_and_in_place_nothing() -> None:
    def apart(student: Any, teacher: Any) -> Any:
        return assay.torch.divergence(student, teacher, kind="jensen_shannon")

    def in_place(student: Any, teacher: Any) -> Any:
        # Logits that a model has computed are no leaf.
        return assay.torch.divergence(student.view(student.shape), teacher, kind="jensen_shannon", inplace=True)

    options = {**OPTIONS, "kind": "jensen_shannon", "cases": 2, "wide": 1, "dtypes": ["f32"]}
    for fn, most in ((apart, 1.05), (in_place, 0.05)):
        report = assay.check_divergence(fn, memory=most, inplace=fn is in_place, **options)
        assert report.passed, report
    # The one array that there is would be too much.
    report = assay.check_divergence(apart, memory=0.9, **options)
    assert len(report.causes) == 1 and "0.9 is" in " ".join(str(report).split()), report


def test_divergence_of_masked_tokens_is_0_and_of_none_is_nan() -> None:
    student = torch.randn(2, 3, 9, requires_grad=True)
    teacher, mask = torch.full((2, 3, 9), torch.nan), torch.tensor([[1, 0, 0], [0, 0, 0]])
    teacher[0, 0] = 1.0
    values = assay.torch.divergence(student, teacher, mask=mask)
    assert torch.isfinite(values).all() and (values[mask == 0] == 0).all()
    (gradient,) = torch.autograd.grad(values.sum(), student)
    assert torch.isfinite(gradient).all() and (gradient[mask == 0] == 0).all()
    assert assay.torch.divergence(student, teacher, mask=torch.zeros(2, 3), reduction="mean").isnan()


@pytest.mark.parametrize(("kind", "beta"), KINDS[:3])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_divergence_of_hidden_states_is_that_of_their_logits(kind: str, beta: float | None, reduction: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head, theirs, their_head = (torch.randn(*shape, generator=generator) for shape in ((5, 4, 8), (33, 8), (5, 4, 6), (33, 6)))
    hidden.requires_grad_(), head.requires_grad_()
    mask = torch.rand(5, 4, generator=generator) > 0.3
    options: dict[str, Any] = {"kind": kind, "beta": beta, "mask": mask, "reduction": reduction, "hidden": hidden, "lm_head": head, "chunk": 3}
    expected = exact(kind, beta, hidden.double() @ head.double().T, (theirs @ their_head.T).double()) * mask
    expected = expected if reduction == "none" else expected.sum() / (mask.sum() if reduction == "mean" else 1)
    for teacher in ({"teacher_hidden": theirs, "teacher_lm_head": their_head}, {"teacher_logits": theirs @ their_head.T}):
        values = assay.torch.divergence(None, **teacher, **options)
        torch.testing.assert_close(values, expected.float(), rtol=1e-5, atol=1e-6)
        # Twice: the second backward pass has another cotangent, and the first must not have used up what both stand on.
        for sent in (torch.ones_like(values), torch.rand(values.shape, generator=generator)):
            found = torch.autograd.grad(values, (hidden, head), sent, retain_graph=True)
            wanted = torch.autograd.grad(expected, (hidden, head), sent.double(), retain_graph=True)
            for a, b in zip(found, wanted, strict=True):
                torch.testing.assert_close(a, b.float(), rtol=1e-4, atol=1e-5)


def test_divergence_compiles_and_is_refused_twice_in_place() -> None:
    student, teacher = torch.randn(4, 33, requires_grad=True), torch.randn(4, 33)
    compiled = torch.compile(lambda x, y: assay.torch.divergence(x * 2, y, kind="reverse_kl", reduction="sum"), fullgraph=True)
    (found,) = torch.autograd.grad(compiled(student, teacher), student)
    value = assay.torch.divergence(student * 2, teacher, kind="reverse_kl", reduction="sum", inplace=True)
    (wanted,) = torch.autograd.grad(value, student, retain_graph=True)
    assert torch.equal(found, wanted)
    with pytest.raises(RuntimeError, match="second backward pass"):
        torch.autograd.grad(value, student)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"kind": "kl"}, "`kind`: got 'kl', expected one of forward_kl, reverse_kl, jensen_shannon"),
    ({"kind": "jensen_shannon", "beta": 1.5}, r"beta`: got 1.5, expected a number from 0 to 1"),
    ({"beta": 0.5}, "beta`: got 0.5, expected none unless `kind` is jensen_shannon"),
    ({"temperature": 0.0}, "`temperature`: got 0, expected a finite number > 0"),
    ({"reduction": "batchmean"}, "`reduction`: got 'batchmean', expected one of none, mean, sum"),
    ({"rest": "tail"}, "rest`: got tail, expected none without `top_k`"),
    ({"teacher_logits": None}, "`teacher_logits`: got no teacher"),
    ({"teacher_logits": torch.zeros(2, 8)}, r"`teacher_logits`: got shape \[2, 8\], expected \[2, 9\], of the student's vocabulary"),
    ({"teacher_logits": torch.zeros(2, 9).double()}, "`teacher_logits`: got dtype f64, expected f32, that of the student's logits"),
    ({"teacher_logits": torch.zeros(2, 9, requires_grad=True)}, "`teacher_logits`: got a tensor that needs a gradient"),
    ({"teacher_logp": torch.zeros(2, 3)}, "`teacher_logits`: got `teacher_logits`, `teacher_logp`, expected"),
    ({"mask": torch.ones(3)}, r"`mask`: got shape \[3\], expected \[2\]"),
    ({"hidden": torch.zeros(2, 4)}, "`hidden`, `lm_head`: got one beside `student_logits`"),
    ({"chunk": -1}, "`chunk`: got -1"),
    (
        {"teacher_logits": None, "teacher_logp": torch.full((2, 2), -1.0), "teacher_ids": torch.tensor([[0, 1], [3, 3]]), "rest": "tail"},
        r"`teacher_ids\[0,1,1\]`: got 3, expected an id that is not at `teacher_ids\[0,1,0\]` too",
    ),
    (
        {"teacher_logits": None, "teacher_logp": torch.full((2, 2), -1.0), "teacher_ids": torch.tensor([[0, 1], [3, 9]]), "rest": "tail"},
        r"`teacher_ids\[0,1,1\]`: got 9, expected 0 ≤ id < V = 9",
    ),
]


@pytest.mark.parametrize(("options", "said"), BAD, ids=[said[:30] for _, said in BAD])
def test_divergence_refuses_what_does_not_fit(options: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"teacher_logits": torch.zeros(2, 9), **options}
    with pytest.raises(assay.AssayError, match=said):
        assay.torch.divergence(torch.zeros(2, 9), **given)
