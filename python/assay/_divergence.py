"""Campaigns for the divergence of a student from a teacher: a function of logits, or of hidden states and heads, and its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from typing import Any, NamedTuple

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
    lm_head: bool = False,
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

    With `lm_head` the student's logits are the product of hidden states and a head, and the gradients of both are judged; the teacher has
    hidden states and a head of its own, mostly of another width:

        def fn(hidden, lm_head, teacher_hidden, teacher_lm_head):    # [B,T,H], [V,H], [B,T,G], [V,G] -> [B,T]

    The teacher's product is exact in any order of summation, as no sum in it has more than two terms that are not 0: its logits are known to
    the last bit, and rounding them to 16 bits fails unless `rounds_logits` is set. With `teacher_top_k` the last two arguments are `teacher_logp` and `teacher_ids`.

    Teachers are independent of the student, near to it (by differences of 1e-3 and of one unit in the last place), sharper, flatter,
    without probability in a quarter of the entries, and far apart, by turns. For a mean or a sum the function is given the tokens that
    count alone, `[N,V]`, and returns a scalar.

    Args:
        fn: Takes the student's logits and the teacher's; returns one divergence for each token, or a scalar with a `reduction`. In NumPy it
            is given the upstream gradient too, `[B,T]` or a scalar, and returns the values and the gradient by the student's logits, or with
            `lm_head` by hidden states and by the head.
        kind: "forward_kl", "reverse_kl" or "jensen_shannon".
        beta: The weight of the teacher in the mixture of "jensen_shannon", from 0 to 1; 0.5 by default.
        temperature: The number that both logits are divided by. A teacher's log-probabilities are of this temperature already.
        temperature_squared: Whether the divergence is multiplied by the square of the temperature.
        teacher_top_k: K, the number of the teacher's entries, fewer where the vocabulary is smaller; None gives the teacher's logits.
        rest: The probability outside these entries: "tail" is one more bin, "renormalized" divides both by their sums over the entries,
            "ignored" leaves it out.
        lm_head: Whether `fn` takes hidden states and heads in place of logits; shapes are then `BxTxHxV`.
        reduction: "none" for one divergence for each token, "mean" over tokens (TRL's "batchmean"), or "sum".
        framework: "torch", "jax" or "numpy", whose arrays `fn` takes.
        options: The other arguments of `assay.check`.

    Raises:
        SpecError, ProblemError: The divergence or an option is invalid, as for `assay.check`.
        AssayError: The framework, the reduction or an option is unknown.
    """
    if not callable(fn):
        raise AssayError(f"fn: got {type(fn).__name__}, expected a function of a student's and a teacher's logits, or hidden states and heads")
    if reduction not in _REDUCTIONS:
        raise AssayError(f"reduction: got {reduction!r}, expected one of {', '.join(_REDUCTIONS)}")
    for name in ("packed", "ranks"):
        if options.get(name):
            raise AssayError(f"{name}: got {options[name]!r}, expected none: a divergence is of the logits of one token")
    _autograd.expect_options(framework, _FRAMEWORKS, options)
    spec = _spec(kind, beta, temperature, temperature_squared, teacher_top_k, rest, reduction)
    lm_head = _autograd.has_head({**options, "lm_head": lm_head})
    made = {"torch": _torch, "jax": _jax, "numpy": _numpy}[framework]
    called = _Called(fn, framework, lm_head, is_turned=options.get("layout") == "hv", is_reduced=reduction != "none")
    return check(made(called, bool(options.get("inplace"))), spec, lm_head=lm_head, **options)


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


class _Called(NamedTuple):
    """A divergence, and how it is called."""

    fn: Divergence
    framework: str
    lm_head: bool
    is_turned: bool
    """Whether the head of a problem is `[H,V]`, of which the function is given the transpose."""
    is_reduced: bool

    def on(self, student: Mapping[str, Any], teacher: Sequence[Any], *more: Any, at: Any = ...) -> Any:
        """Calls the function on the tokens `at` of a student's arrays and a teacher's."""
        if not self.lm_head:
            return self.fn(student["logits"][at], *(x[at] for x in teacher), *more)
        head = student["lm_head"].T if self.is_turned else student["lm_head"]
        hidden, *others = teacher
        # A head has no tokens; ids of likeliest entries do.
        others = [x if x.ndim == 2 else x[at] for x in others]
        return self.fn(student["hidden"][at], head, hidden[at], *others, *more)

    def teacher(self, arrays: Any) -> list[Any]:
        """What a function is given of the teacher."""
        if not hasattr(arrays, "teacher_logits"):
            return [arrays.teacher_logp, arrays.teacher_ids]
        if not self.lm_head:
            return [arrays.teacher_logits]
        return _factors(self.framework, arrays.teacher_logits, arrays.mask, arrays.hidden.dtype)


def _factors(framework: str, logits: Any, mask: Any, dtype: Any) -> list[Any]:
    """Hidden states `[B,T,G]` and a head `[V,G]` whose product are the logits of the tokens that count, with `G` twice the smaller of `B·T`
    and `V`.

    A logit is the sum of two numbers of the dtype, the second times a power of two. One factor has these numbers, and the other 1 and that
    power, in the two places of each token, or of each vocabulary entry, and 0 elsewhere: no order of summation rounds anything.

    Raises:
        AssayError: The logits are not such sums.
    """
    if framework == "torch":
        import torch as xp

        def cast(x: Any, dtype: Any) -> Any:
            return x.to(dtype)

        def eye(count: int) -> Any:
            return xp.eye(count, device=logits.device)
    else:
        import numpy as np

        xp = np
        if framework == "jax":
            import jax.numpy as xp

        def cast(x: Any, dtype: Any) -> Any:
            return x.astype(dtype)

        def eye(count: int) -> Any:
            return xp.eye(count, dtype="float32")

    batch, tokens, vocab = logits.shape
    count = batch * tokens
    rows = cast(logits, eye(1).dtype).reshape(count, vocab)
    counts = mask.reshape(count, 1)
    given = xp.where(counts, rows, xp.zeros_like(rows))
    low_scale = {"bfloat16": 2.0**-8, "float16": 2.0**-11}.get(str(dtype).removeprefix("torch."), 1.0)
    high = cast(given, dtype)
    low = cast((given - cast(high, given.dtype)) / low_scale, dtype)
    if not bool((cast(high, given.dtype) + cast(low, given.dtype) * low_scale == given).all()):
        raise AssayError("teacher_logits: got logits that are no sums of two numbers of the head's dtype, expected those of a campaign's problem")
    width = min(count, vocab)
    places = xp.stack([eye(width), low_scale * eye(width)], 2).reshape(width, 2 * width)
    if count <= vocab:
        states, head = places, xp.stack([high, low], 1).reshape(2 * width, vocab).T
    else:
        states, head = xp.stack([high, low], 2).reshape(count, 2 * width), places
    # What is under the mask is garbage in hidden states as it is in logits.
    states = xp.where(xp.isnan(rows).any(1)[:, None], float("nan"), states)
    # Dense, as a head is.
    head = head.contiguous() if framework == "torch" else xp.ascontiguousarray(head) if framework == "numpy" else head
    return [cast(states, dtype).reshape(batch, tokens, 2 * width), cast(head, dtype)]


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


def _torch(called: _Called, inplace: bool) -> _autograd.Kernel:
    def per_token(problem: Problem, way: str | None = None) -> Mapping[str, Any]:
        import torch

        arrays = problem.torch()
        inputs = _autograd.TorchInputs(arrays, way, inplace)
        teacher = called.teacher(arrays)
        _memory.enter_pass("forward")
        with _autograd.refusal(way):
            values = _expect_tokens(called.on(inputs.tensors, teacher), arrays.mask)
        weights = arrays.token_weights.expand(arrays.mask.shape).contiguous()
        sent = _autograd.torch_cotangents(way, [weights], arrays.mask, (values,))
        outputs = inputs.gradients(way, [values], sent)
        losses = torch.where(arrays.mask, values.detach() * torch.where(arrays.mask, weights, 0).to(values.dtype), 0)
        outputs |= {"token_loss": losses.contiguous(), "loss": losses.double().sum().float()}
        return outputs | _autograd.of_frozen(way, per_token, problem)

    def scalar(problem: Problem, way: str | None = None) -> Mapping[str, Any]:
        import torch

        arrays = problem.torch()
        inputs = _autograd.TorchInputs(arrays, way, inplace)
        teacher = called.teacher(arrays)
        _expect_any(int(arrays.mask.sum()))
        _memory.enter_pass("forward")
        with _autograd.refusal(way):
            loss = _expect_scalar(called.on(inputs.tensors, teacher, at=arrays.mask))
        upstream = _upstream(way, problem)
        outputs = inputs.gradients(way, [loss], [torch.full_like(loss, upstream)])
        outputs = {name: (x.double() / upstream).to(x.dtype) if upstream != 1.0 else x for name, x in outputs.items()}
        return {**outputs, "loss": loss.detach().contiguous(), **_autograd.of_frozen(way, scalar, problem)}

    first = _autograd.differentiated(called.lm_head)[0]
    with_grad = _autograd.with_grad(first)
    frozen = _autograd.FROZEN.values() if called.lm_head else ()
    if called.is_reduced:
        ways = [*_autograd.UPSTREAM, _autograd.SECOND_PASS, with_grad, *frozen]
        return _autograd.campaign(called.fn, scalar, "torch", ways)
    ways = [*_autograd.layouts(first), _autograd.SECOND_PASS, _autograd.STRIDED_COTANGENT, with_grad, *frozen]
    return _autograd.campaign(called.fn, per_token, "torch", ways)


def _jax(called: _Called, inplace: bool) -> _autograd.Kernel:
    import functools

    import jax
    import jax.numpy as jnp

    @functools.partial(jax.jit, static_argnames="frozen")
    def run(inputs: dict[str, Any], teacher: Sequence[Any], mask: Any, weights: Any, frozen: str | None) -> tuple[Any, Any]:
        free = {name: x for name, x in inputs.items() if name != frozen}
        values, backward = jax.vjp(lambda free: _expect_tokens(called.on({**inputs, **free}, teacher), mask), free)
        kept = jnp.where(mask, weights, 0).astype(values.dtype)
        return jnp.where(mask, values * kept, 0), backward(kept)[0]

    def inputs_of(arrays: Any) -> dict[str, Any]:
        return {name: getattr(arrays, name) for name in _autograd.differentiated(called.lm_head)}

    def per_token(problem: Problem, way: str | None = None) -> Mapping[str, Any]:
        import numpy as np

        arrays = problem.jax()
        weights = jnp.broadcast_to(arrays.token_weights, arrays.mask.shape)
        teacher = called.teacher(arrays)
        _memory.enter_pass("both")
        losses, gradients = jax.block_until_ready(run(inputs_of(arrays), teacher, arrays.mask, weights, _autograd.frozen(way)))
        _memory.enter_pass(None)
        outputs = {_autograd.GRADIENTS[name]: x for name, x in gradients.items()}
        outputs |= {"token_loss": losses, "loss": np.asarray(losses, np.float64).sum().astype(np.float32)}
        return outputs | _autograd.of_frozen(way, per_token, problem)

    def scalar(problem: Problem, way: str | None = None) -> Mapping[str, Any]:
        import numpy as np

        arrays = problem.jax()
        at = np.nonzero(np.asarray(arrays.mask))
        _expect_any(len(at[0]))
        teacher = called.teacher(arrays)
        upstream, inputs, frozen = _upstream(way, problem), inputs_of(arrays), _autograd.frozen(way)
        free = {name: x for name, x in inputs.items() if name != frozen}
        loss, backward = jax.vjp(lambda free: _expect_scalar(called.on({**inputs, **free}, teacher, at=at)), free)
        (gradients,) = backward(jnp.full_like(loss, upstream))
        outputs = {_autograd.GRADIENTS[name]: (x / upstream).astype(x.dtype) for name, x in gradients.items()}
        return {**outputs, "loss": loss, **_autograd.of_frozen(way, scalar, problem)}

    frozen = [*_autograd.FROZEN.values()] if called.lm_head else []
    if called.is_reduced:
        return _autograd.campaign(called.fn, scalar, "jax", [*_autograd.UPSTREAM, *frozen])
    return _autograd.campaign(called.fn, per_token, "jax", frozen)


def _numpy(called: _Called, inplace: bool) -> _autograd.Kernel:
    import numpy as np

    names = [_autograd.GRADIENTS[name] for name in _autograd.differentiated(called.lm_head)]

    def computed(returned: Any) -> Any:
        if not isinstance(returned, (tuple, list)) or len(returned) != 1 + len(names):
            raise OutputError(names[0], type(returned).__name__, f"{1 + len(names)} values: the divergences, then {' and '.join(names)}")
        return returned

    def turned(name: str, gradient: Any) -> Any:
        """The gradient in the problem's layout, of a function that is given a transposed head."""
        return np.ascontiguousarray(gradient.T) if name == "dlm_head" and called.is_turned else gradient

    def per_token(problem: Problem, way: str | None = None) -> Mapping[str, Any]:
        arrays = problem.numpy()
        weights = np.where(arrays.mask, np.broadcast_to(arrays.token_weights, arrays.mask.shape), 0)
        values, *gradients = computed(called.on(vars(arrays), called.teacher(arrays), weights))
        losses = np.where(arrays.mask, _expect_tokens(values, arrays.mask) * weights.astype(values.dtype), 0).astype(values.dtype)
        outputs = {name: turned(name, x) for name, x in zip(names, gradients)}
        return {**outputs, "token_loss": losses, "loss": losses.sum(dtype=np.float64).astype(np.float32)}

    def scalar(problem: Problem, way: str | None = None) -> Mapping[str, Any]:
        arrays = problem.numpy()
        _expect_any(int(arrays.mask.sum()))
        upstream = _upstream(way, problem)
        loss, *gradients = computed(called.on(vars(arrays), called.teacher(arrays), upstream, at=arrays.mask))
        outputs = {name: turned(name, (x.astype(np.float64) / upstream).astype(x.dtype)) for name, x in zip(names, gradients)}
        # Masked tokens were not given.
        first = outputs[names[0]]
        spread = np.zeros((*arrays.mask.shape, first.shape[-1]), first.dtype)
        spread[arrays.mask] = first
        return {**outputs, names[0]: spread, "loss": _expect_scalar(np.asarray(loss))}

    ways = [*_autograd.UPSTREAM] if called.is_reduced else []
    return _autograd.campaign(called.fn, scalar if called.is_reduced else per_token, "numpy", ways)
