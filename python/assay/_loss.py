"""Campaigns for a loss as a trainer has it: a differentiable function, and the backward pass that its framework makes of it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from operator import methodcaller
from typing import Any

from . import _autograd, _memory
from ._check import check
from ._errors import AssayError, OutputError
from ._frameworks import Arrays
from ._native import Problem, Spec
from ._report import Report

# pytest shows the test's own frames alone.
__tracebackhide__ = methodcaller("errisinstance", AssayError)

Loss = Callable[[Arrays], Any]
#: The names of what a function may return besides the loss.
_EXTRAS = ("logp", "entropy", "token_loss")


def check_loss(
    fn: Loss,
    spec: str | os.PathLike[str] | Spec = "trl",
    *,
    framework: str = "torch",
    **options: Any,
) -> Report:
    """Judges a loss as a trainer calls it: a function of tensors, differentiated by its framework, with upstream gradients other than 1.

        >>> import assay, jax, jax.numpy as jnp
        >>> def loss(x):
        ...     logp = jnp.take_along_axis(jax.nn.log_softmax(x.logits), x.ids[..., None], -1)[..., 0]
        ...     return -jnp.where(x.mask, logp * x.advantages[:, None], 0.0).sum() / x.mask.sum(), {"logp": logp}
        >>> options = dict(dtypes=["f32"], shapes=["2x3x7"], cases=4, wide=0, power=False, repro_dir=None, masked_garbage=False)
        >>> spec = assay.spec(objective="policy_gradient")
        >>> assay.check_loss(loss, spec, framework="jax", progress=False, **options).passed
        True

    In PyTorch:

        def loss(x):                                  # x.logits needs a gradient
            return my_grpo_loss(x.logits, x.ids, x.advantages, x.mask, x.old_logp)

        print(assay.check_loss(loss, "trl", loss_type="dapo"))

    What `assay.check` cannot see is judged here: the gradients are those of `torch.autograd.grad` or `jax.vjp`, divided by the upstream
    gradient, which is 3 or 0.37 in some problems, as under gradient accumulation and loss scaling. Almost half of the problems are asked as
    callers differ, by turns, as in `assay.check_logp`; a failure that a plain call of the same problem does not have names the way.

    Args:
        fn: Takes the arrays of a problem, as `problem.torch()` or `problem.jax()` has them, of which `logits`, or `hidden` and `lm_head`,
            need gradients. It returns the loss, a scalar, or a pair of that and a dict of `logp`, `entropy` and `token_loss`, any of them.
        spec: The loss, as `assay.check` takes it.
        framework: "torch" or "jax", whose arrays `fn` takes and which differentiates it.
        options: The other arguments of `assay.check`, and the options of the spec.

    Raises:
        SpecError, ProblemError: The spec or an option is invalid, as for `assay.check`.
        AssayError: The framework or an option is unknown.
    """
    if not callable(fn):
        raise AssayError(f"fn: got {type(fn).__name__}, expected a function of a problem's arrays that returns its loss")
    kernels = {"torch": _torch, "jax": _jax}
    _autograd.expect_options(framework, kernels, options)
    kernel = kernels[framework](fn, _autograd.has_head(options), bool(options.get("inplace")))
    return check(kernel, spec, **options)


def _loss_and_extras(returned: Any) -> tuple[Any, dict[str, Any]]:
    """The loss, and what was returned besides it."""
    loss, extras = returned if isinstance(returned, (tuple, list)) and len(returned) == 2 else (returned, {})
    if not isinstance(extras, Mapping):
        raise OutputError("loss", f"a pair with {type(extras).__name__}", f"a scalar, or a pair of it and a dict of {', '.join(_EXTRAS)}")
    if not hasattr(loss, "shape") or loss.shape not in ((), (1,)):
        given = f"shape {list(loss.shape)}" if hasattr(loss, "shape") else type(loss).__name__
        raise OutputError("loss", given, "a scalar that can be differentiated, [] or [1]")
    return loss, dict(extras)


def _upstream(way: str | None, problem: Problem) -> float:
    return _autograd.UPSTREAM[way][problem.dtype] if way in _autograd.UPSTREAM else 1.0


def _torch(fn: Loss, lm_head: bool, inplace: bool) -> _autograd.Kernel:
    def kernel(problem: Problem, way: str | None = None) -> Mapping[str, Any]:
        import torch

        arrays = problem.torch()
        inputs = _autograd.TorchInputs(arrays, way, inplace)
        _memory.enter_pass("forward")
        with _autograd.refusal(way):
            loss, extras = _loss_and_extras(fn(Arrays(**{**vars(arrays), **inputs.tensors})))
        upstream = _upstream(way, problem)
        outputs = inputs.gradients(way, [loss], [torch.full_like(loss, upstream)])
        outputs = {name: (x.double() / upstream).to(x.dtype) if upstream != 1.0 else x for name, x in outputs.items()}
        outputs |= {name: array.detach().contiguous() for name, array in {**extras, "loss": loss}.items()}
        return outputs | _autograd.of_frozen(way, kernel, problem)

    first = _autograd.differentiated(lm_head)[0]
    layouts = _autograd.layouts(first)
    frozen = _autograd.FROZEN.values() if lm_head else ()
    small, large = reversed(_autograd.UPSTREAM)
    return _autograd.campaign(
        fn, kernel, "torch", [layouts[0], large, *layouts[1:], _autograd.SECOND_PASS, small, _autograd.with_grad(first), *frozen]
    )


def _jax(fn: Loss, lm_head: bool, inplace: bool) -> _autograd.Kernel:
    import jax

    @functools.partial(jax.jit, static_argnames="frozen")
    def run(inputs: dict[str, Any], others: dict[str, Any], upstream: float, frozen: str | None) -> tuple[Any, Any, Any]:
        def lost(free: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return _loss_and_extras(fn(Arrays(**{**others, **inputs, **free})))

        free = {name: x for name, x in inputs.items() if name != frozen}
        loss, backward, extras = jax.vjp(lost, free, has_aux=True)
        return loss, extras, backward(jax.numpy.full_like(loss, upstream))[0]

    def kernel(problem: Problem, way: str | None = None) -> Mapping[str, Any]:
        others = dict(vars(problem.jax()))
        inputs = {name: others.pop(name) for name in _autograd.differentiated("lm_head" in others)}
        upstream = _upstream(way, problem)
        _memory.enter_pass("both")
        loss, extras, gradients = jax.block_until_ready(run(inputs, others, upstream, _autograd.frozen(way)))
        _memory.enter_pass(None)
        outputs = {_autograd.GRADIENTS[name]: (x / upstream).astype(x.dtype) for name, x in gradients.items()}
        return {**outputs, **extras, "loss": loss, **_autograd.of_frozen(way, kernel, problem)}

    return _autograd.campaign(fn, kernel, "jax", [*_autograd.UPSTREAM, *(_autograd.FROZEN.values() if lm_head else ())])
