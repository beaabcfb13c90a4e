"""Campaigns for the divergence of a student from a teacher: a function of their logits, and the backward pass of its framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from typing import Any

from . import _autograd, _memory, _specs
from ._check import check
from ._errors import AssayError, OutputError, SpecError
from ._native import Problem, Spec
from ._report import Report

# pytest shows the test's own frames alone.
__tracebackhide__ = methodcaller("errisinstance", AssayError)

Divergence = Callable[..., Any]
_KINDS = ("forward_kl", "reverse_kl", "jensen_shannon")
_REDUCTIONS = ("none", "mean", "sum")
_FRAMEWORKS = ("torch", "jax", "numpy")


def check_divergence(
    fn: Divergence,
    *,
    kind: str = "forward_kl",
    beta: float | None = None,
    temperature: float = 1.0,
    temperature_squared: bool = False,
    teacher_top_k: int | None = None,
    rest: str | None = None,
    reduction: str = "none",
    framework: str = "torch",
    **options: Any,
) -> Report:
    """Judges a divergence of a student from a teacher, as distillation has it: forward, and backward with upstream gradients other than 1.

        >>> import assay, jax
        >>> def reverse_kl(student_logits, teacher_logits):
        ...     lp, lq = (jax.nn.log_softmax(x.astype("float32")) for x in (student_logits, teacher_logits))
        ...     return jax.numpy.where(lp > -jax.numpy.inf, jax.numpy.exp(lp) * (lp - lq), 0.0).sum(-1)
        >>> options = dict(dtypes=["f32"], shapes=["2x3x7"], regimes=["normal"], cases=4, wide=0, power=False, repro_dir=None)
        >>> assay.check_divergence(reverse_kl, kind="reverse_kl", framework="jax", progress=False, **options).passed
        True

    In PyTorch:

        def forward_kl(student_logits, teacher_logits):          # [B,T,V], [B,T,V] -> [B,T]
            lp, q = (student_logits / 2).log_softmax(-1), (teacher_logits / 2).softmax(-1)
            return 4 * F.kl_div(lp, q, reduction="none").sum(-1)

        print(assay.check_divergence(forward_kl, temperature=2.0, temperature_squared=True))

    With p the student's probabilities and q the teacher's, `forward_kl` is KL(q‖p), `reverse_kl` KL(p‖q), and `jensen_shannon`
    beta·KL(q‖m) + (1 − beta)·KL(p‖m) with m = beta·q + (1 − beta)·p, as TRL and Liger have it: at beta 0 and 1 it is the forward and
    the reverse KL.

    With `teacher_top_k=K` the function is given a teacher's likeliest entries of each token:

        def fn(student_logits, teacher_logp, teacher_ids):       # [B,T,V], [B,T,K], [B,T,K] -> [B,T]

    Teachers are independent of the student, near to it (by differences of 1e-3 and of one unit in the last place), sharper, flatter,
    without probability in a quarter of the entries, and far apart, by turns. For a mean or a sum the function is given the tokens that
    count alone, `[N,V]`, and returns a scalar.

    Args:
        fn: Takes the student's logits and the teacher's; returns one divergence for each token, or a scalar with a `reduction`. In NumPy it
            is given the upstream gradient too, `[B,T]` or a scalar, and returns a pair of the values and the gradient by the student's logits.
        kind: "forward_kl", "reverse_kl" or "jensen_shannon".
        beta: The weight of the teacher in the mixture of "jensen_shannon", from 0 to 1; 0.5 by default.
        temperature: The number that both logits are divided by. A teacher's log-probabilities are of this temperature already.
        temperature_squared: Whether the divergence is multiplied by the square of the temperature.
        teacher_top_k: K, the number of the teacher's entries, fewer where the vocabulary is smaller; None gives the teacher's logits.
        rest: The probability outside these entries: "tail" is one more bin, "renormalized" divides both by their sums over the entries,
            "ignored" leaves it out.
        reduction: "none" for one divergence for each token, "mean" over tokens (TRL's "batchmean"), or "sum".
        framework: "torch", "jax" or "numpy", whose arrays `fn` takes.
        options: The other arguments of `assay.check`.

    Raises:
        SpecError, ProblemError: The divergence or an option is invalid, as for `assay.check`.
        AssayError: The framework, the reduction or an option is unknown.
    """
    if not callable(fn):
        raise AssayError(f"fn: got {type(fn).__name__}, expected a function of a student's and a teacher's logits")
    if reduction not in _REDUCTIONS:
        raise AssayError(f"reduction: got {reduction!r}, expected one of {', '.join(_REDUCTIONS)}")
    for name in ("packed", "ranks", "lm_head"):
        if options.get(name):
            raise AssayError(f"{name}: got {options[name]!r}, expected none: a divergence is of the logits of one token")
    _autograd.expect_options(framework, _FRAMEWORKS, options)
    spec = _spec(kind, beta, temperature, temperature_squared, teacher_top_k, rest, reduction)
    made = {"torch": _torch, "jax": _jax, "numpy": _numpy}[framework]
    return check(made(fn, reduction != "none", bool(options.get("inplace"))), spec, **options)


def _spec(
    kind: str,
    beta: float | None,
    temperature: float,
    temperature_squared: bool,
    teacher_top_k: int | None,
    rest: str | None,
    reduction: str,
) -> Spec:
    """The loss that is the reduced divergence. Without a reduction it is the sum of the tokens', each times a drawn upstream gradient."""
    if kind not in _KINDS:
        raise SpecError(f"`kind`: got {kind!r}, expected one of {', '.join(_KINDS)}")
    distillation = {"kind": kind, "beta": beta, "top_k": teacher_top_k, "rest": rest, "temperature_squared": temperature_squared}
    fields: dict[str, object] = {
        "objective": {"distillation": distillation},
        "old_logp": "current",
        "temperature": temperature,
        "reduction": "token_mean" if reduction == "mean" else {"normalizer": 1.0},
    }
    if reduction == "none":
        fields["token_weights"] = {}
    return _specs.spec(None, None, None, fields)


def _teacher(arrays: Any) -> list[Any]:
    """What a function is given of the teacher."""
    return [arrays.teacher_logits] if hasattr(arrays, "teacher_logits") else [arrays.teacher_logp, arrays.teacher_ids]


def _expect_tokens(values: Any, mask: Any) -> Any:
    """Checks that there is one value for each token."""
    if not hasattr(values, "shape") or tuple(values.shape) != tuple(mask.shape):
        given = f"shape {list(values.shape)}" if hasattr(values, "shape") else type(values).__name__
        raise OutputError("token_loss", given, f"{list(mask.shape)}, one divergence for each token, or a `reduction`")
    return values


def _expect_scalar(loss: Any) -> Any:
    """Checks that there is one value."""
    if not hasattr(loss, "shape") or loss.shape not in ((), (1,)):
        given = f"shape {list(loss.shape)}" if hasattr(loss, "shape") else type(loss).__name__
        raise OutputError("loss", given, "a scalar, [] or [1], or reduction='none' for one divergence for each token")
    return loss


def _expect_any(count: int) -> None:
    if count == 0:
        raise NotImplementedError("a batch without a token that counts, of which a mean is not a number")


def _upstream(way: str | None, problem: Problem) -> float:
    return _autograd.UPSTREAM[way][problem.dtype] if way in _autograd.UPSTREAM else 1.0


def _torch(fn: Divergence, reduced: bool, inplace: bool) -> _autograd.Kernel:
    def per_token(problem: Problem, way: str | None = None) -> Mapping[str, Any]:
        import torch

        arrays = problem.torch()
        inputs = _autograd.TorchInputs(arrays, way, inplace)
        _memory.enter_pass("forward")
        with _autograd.refusal(way):
            values = _expect_tokens(fn(inputs.tensors["logits"], *_teacher(arrays)), arrays.mask)
        weights = arrays.token_weights.expand(arrays.mask.shape).contiguous()
        sent = _autograd.torch_cotangents(way, [weights], arrays.mask, (values,))
        outputs = inputs.gradients(way, [values], sent)
        losses = torch.where(arrays.mask, values.detach() * torch.where(arrays.mask, weights, 0).to(values.dtype), 0)
        return {**outputs, "token_loss": losses.contiguous(), "loss": losses.double().sum().float()}

    def scalar(problem: Problem, way: str | None = None) -> Mapping[str, Any]:
        import torch

        arrays = problem.torch()
        inputs = _autograd.TorchInputs(arrays, way, inplace)
        _expect_any(int(arrays.mask.sum()))
        _memory.enter_pass("forward")
        with _autograd.refusal(way):
            loss = _expect_scalar(fn(inputs.tensors["logits"][arrays.mask], *(x[arrays.mask] for x in _teacher(arrays))))
        upstream = _upstream(way, problem)
        outputs = inputs.gradients(way, [loss], [torch.full_like(loss, upstream)])
        outputs = {name: (x.double() / upstream).to(x.dtype) if upstream != 1.0 else x for name, x in outputs.items()}
        return {**outputs, "loss": loss.detach().contiguous()}

    with_grad = _autograd.with_grad("logits")
    if reduced:
        return _autograd.campaign(fn, scalar, "torch", [*_autograd.UPSTREAM, _autograd.SECOND_PASS, with_grad])
    ways = [*_autograd.layouts("logits"), _autograd.SECOND_PASS, _autograd.STRIDED_COTANGENT, with_grad]
    return _autograd.campaign(fn, per_token, "torch", ways)


def _jax(fn: Divergence, reduced: bool, inplace: bool) -> _autograd.Kernel:
    import jax
    import jax.numpy as jnp

    @jax.jit
    def run(logits: Any, teacher: Sequence[Any], mask: Any, weights: Any) -> tuple[Any, Any, Any]:
        values, backward = jax.vjp(lambda logits: _expect_tokens(fn(logits, *teacher), mask), logits)
        kept = jnp.where(mask, weights, 0).astype(values.dtype)
        return jnp.where(mask, values * kept, 0), backward(kept)[0], None

    def per_token(problem: Problem, way: str | None = None) -> Mapping[str, Any]:
        import numpy as np

        arrays = problem.jax()
        weights = jnp.broadcast_to(arrays.token_weights, arrays.mask.shape)
        _memory.enter_pass("both")
        losses, dlogits, _ = jax.block_until_ready(run(arrays.logits, _teacher(arrays), arrays.mask, weights))
        _memory.enter_pass(None)
        return {"dlogits": dlogits, "token_loss": losses, "loss": np.asarray(losses, np.float64).sum().astype(np.float32)}

    def scalar(problem: Problem, way: str | None = None) -> Mapping[str, Any]:
        import numpy as np

        arrays = problem.jax()
        at = np.nonzero(np.asarray(arrays.mask))
        _expect_any(len(at[0]))
        teacher = [x[at] for x in _teacher(arrays)]
        upstream = _upstream(way, problem)
        loss, backward = jax.vjp(lambda logits: _expect_scalar(fn(logits[at], *teacher)), arrays.logits)
        (dlogits,) = backward(jnp.full_like(loss, upstream))
        return {"dlogits": (dlogits / upstream).astype(dlogits.dtype), "loss": loss}

    return _autograd.campaign(fn, scalar if reduced else per_token, "jax", [*_autograd.UPSTREAM] if reduced else [])


def _numpy(fn: Divergence, reduced: bool, inplace: bool) -> _autograd.Kernel:
    import numpy as np

    def pair(returned: Any) -> Any:
        if not isinstance(returned, (tuple, list)) or len(returned) != 2:
            raise OutputError("dlogits", type(returned).__name__, "a pair of the values and the gradient by the student's logits")
        return returned

    def per_token(problem: Problem, way: str | None = None) -> Mapping[str, Any]:
        arrays = problem.numpy()
        weights = np.where(arrays.mask, np.broadcast_to(arrays.token_weights, arrays.mask.shape), 0)
        values, dlogits = pair(fn(arrays.logits, *_teacher(arrays), weights))
        losses = np.where(arrays.mask, _expect_tokens(values, arrays.mask) * weights.astype(values.dtype), 0).astype(values.dtype)
        return {"dlogits": dlogits, "token_loss": losses, "loss": losses.sum(dtype=np.float64).astype(np.float32)}

    def scalar(problem: Problem, way: str | None = None) -> Mapping[str, Any]:
        arrays = problem.numpy()
        _expect_any(int(arrays.mask.sum()))
        upstream = _upstream(way, problem)
        loss, gradient = pair(fn(arrays.logits[arrays.mask], *(x[arrays.mask] for x in _teacher(arrays)), upstream))
        dlogits = np.zeros(arrays.logits.shape, gradient.dtype)
        dlogits[arrays.mask] = (gradient.astype(np.float64) / upstream).astype(gradient.dtype)
        return {"dlogits": dlogits, "loss": _expect_scalar(np.asarray(loss))}

    return _autograd.campaign(fn, scalar if reduced else per_token, "numpy", [*_autograd.UPSTREAM] if reduced else [])
