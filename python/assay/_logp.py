"""Campaigns without a loss: a function from logits to logp and entropy, and the backward pass that its framework makes of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import _specs
from ._check import check
from ._errors import AssayError, OutputError
from ._native import Problem
from ._report import Report

Scores = Callable[..., Any]
#: The arrays that a function is given and differentiated by, and what their gradients are called.
_GRADIENTS = {"logits": "dlogits", "hidden": "dhidden", "lm_head": "dlm_head"}


def check_logp(
    fn: Scores,
    *,
    framework: str = "torch",
    entropy: bool = False,
    ids_per_token: int = 1,
    lm_head: bool = False,
    temperature: float = 1.0,
    temperature_divides: str = "logits",
    logits: Mapping[str, object] | None = None,
    **options: Any,
) -> Report:
    """Judges log-probabilities without a loss, such as `selective_log_softmax`, `logprobs_of_labels` or those by an LM head:
    forward, and backward with drawn cotangents.

        >>> import assay, jax
        >>> def logp(logits, ids):
        ...     x = jax.nn.log_softmax(logits.astype("float32") / 0.7)
        ...     return jax.numpy.take_along_axis(x, ids[..., None], -1)[..., 0]
        >>> options = dict(dtypes=["f32"], shapes=["2x3x7"], cases=4, wide=0, power=False, repro_dir=None)
        >>> assay.check_logp(logp, framework="jax", temperature=0.7, progress=False, **options).passed
        True

    In PyTorch:

        def logp(logits, ids):                        # [B,T,V], [B,T] -> [B,T]
            return selective_log_softmax(logits / 0.7, ids)

        print(assay.check_logp(logp, temperature=0.7))

    With `ids_per_token=K` the function returns the logp of K ids of each token, as distillation needs it:

        def top_logp(logits, ids):                    # [B,T,V], [B,T,K] -> [B,T,K]
            return logits.log_softmax(-1).gather(-1, ids)

        print(assay.check_logp(top_logp, ids_per_token=8))

    Ids are a token's largest logits and some others. In half of the tokens one id occurs twice, with two cotangents, which add up.

    The backward pass is `torch.autograd.grad` or `jax.vjp` of `fn`; a hand-written one (`autograd.Function`, `custom_vjp`) is
    judged as it is. For a function without a backward pass, `problem.check({"logp": …})` judges the forward pass alone, for
    each problem of `assay.problems("logp")`.

    Args:
        fn: Takes `logits` and `ids`, or with `lm_head` `hidden` `[B,T,H]`, a head `[V,H]` and `ids`; returns logp `[B,T]`, with
            `entropy` a pair of that and entropies `[B,T]`. Masked tokens are given and asked for like any other; what is
            returned for them is not looked at, and their cotangents are 0.
        ids_per_token: K, the number of ids per token. With more than 1, `ids` and logp are `[B,T,K]`. `top` is the old name.
        framework: "torch" or "jax", whose arrays `fn` takes and which differentiates it.
        entropy: Whether `fn` returns entropies too.
        lm_head: Whether `fn` takes hidden states and an LM head.
        temperature: The number that `fn` divides logits by.
        temperature_divides: "logits" or "logp", the numbers that are divided.
        logits: Other changes of logits before their softmax: `{"softcap": 30.0}`, `{"scale": 0.5}`.
        options: The other arguments of `assay.check`.

    Raises:
        SpecError, ProblemError: The spec or an option is invalid, as for `assay.check`.
        AssayError: The framework or an option is unknown.
    """
    if not callable(fn):
        raise AssayError(f"fn: got {type(fn).__name__}, expected a function of logits and ids")
    if framework not in _KERNELS:
        raise AssayError(f"framework: got {framework!r}, expected one of {', '.join(_KERNELS)}")
    if "top" in options:
        warnings.warn("`top` is the old name of `ids_per_token`", DeprecationWarning, stacklevel=2)
        ids_per_token = options.pop("top")
    if type(ids_per_token) is not int or ids_per_token < 1:
        raise AssayError(f"ids_per_token: got {ids_per_token!r}, expected an integer of at least 1")
    if options.get("isolate"):
        raise AssayError("isolate: got True, expected False: another process cannot import what is made of `fn`")
    asked = {} if logits is None else {"logits": dict(logits)}
    spec = _specs.spec(
        _specs.LOGP,
        None,
        None,
        {
            "entropy": entropy,
            "temperature": temperature,
            "temperature_divides": temperature_divides,
            "ids_per_token": ids_per_token,
            **asked,
        },
    )
    return check(_KERNELS[framework](fn, entropy), spec, lm_head=lm_head, **options)


def _named(fn: Scores, kernel: Callable[[Problem], Mapping[str, Any]]) -> Callable[[Problem], Mapping[str, Any]]:
    kernel.__name__ = getattr(fn, "__name__", type(fn).__name__)
    return kernel


def _scores(returned: Any, entropy: bool) -> tuple[Any, ...]:
    """Logp and, where it is asked for, entropy."""
    pair = tuple(returned) if isinstance(returned, Sequence) else (returned,)
    if len(pair) != 1 + entropy:
        expected = "a pair of logp and entropy" if entropy else "logp alone, or `entropy=True`"
        raise OutputError("logp", f"{len(pair)} arrays", expected)
    return pair


def _arrays(arrays: Any, entropy: bool) -> tuple[list[str], list[Any]]:
    """The names of what a function is differentiated by, and the cotangents of what it returns, 0 where masked."""
    names = ["hidden", "lm_head"] if hasattr(arrays, "lm_head") else ["logits"]
    return names, [arrays.dlogp, arrays.dentropy] if entropy else [arrays.dlogp]


def _outputs(scores: Sequence[Any], names: Sequence[str], gradients: Sequence[Any]) -> dict[str, Any]:
    of_tokens = dict(zip(("logp", "entropy"), scores))
    return {**of_tokens, **{_GRADIENTS[name]: gradient for name, gradient in zip(names, gradients)}}


def _torch(fn: Scores, entropy: bool) -> Callable[[Problem], Mapping[str, Any]]:
    import torch

    def kernel(problem: Problem) -> Mapping[str, Any]:
        arrays = problem.torch()
        names, cotangents = _arrays(arrays, entropy)
        inputs = [getattr(arrays, name).clone().requires_grad_() for name in names]
        # A head is `[V,H]`, as `torch.nn.Linear` has it.
        given = [x.T if name == "lm_head" and problem.layout == "hv" else x for name, x in zip(names, inputs)]
        scores = _scores(fn(*given, arrays.ids), entropy)
        sent = [
            array.where(arrays.mask[..., None] if array.ndim > arrays.mask.ndim else arrays.mask, 0).to(score.dtype)
            for array, score in zip(cotangents, scores)
        ]
        gradients = torch.autograd.grad(scores, inputs, sent)
        return _outputs([score.detach() for score in scores], names, gradients)

    return _named(fn, kernel)


def _jax(fn: Scores, entropy: bool) -> Callable[[Problem], Mapping[str, Any]]:
    import jax
    import jax.numpy as jnp

    @jax.jit  # type: ignore[untyped-decorator]
    def run(inputs: list[Any], ids: Any, mask: Any, cotangents: list[Any]) -> tuple[Any, Any]:
        scores, backward = jax.vjp(lambda *inputs: _scores(fn(*inputs, ids), entropy), *inputs)
        counts = [mask[..., None] if array.ndim > mask.ndim else mask for array in cotangents]
        kept = (jnp.where(*given, 0) for given in zip(counts, cotangents))
        sent = (array.astype(score.dtype) for array, score in zip(kept, scores))
        return scores, backward(tuple(sent))

    def kernel(problem: Problem) -> Mapping[str, Any]:
        arrays = problem.jax()
        names, cotangents = _arrays(arrays, entropy)
        turned = problem.layout == "hv"
        inputs = [getattr(arrays, name) for name in names]
        given = [x.T if name == "lm_head" and turned else x for name, x in zip(names, inputs)]
        scores, gradients = run(given, arrays.ids, arrays.mask, cotangents)
        gradients = [x.T if name == "lm_head" and turned else x for name, x in zip(names, gradients)]
        return _outputs(scores, names, gradients)

    return _named(fn, kernel)


_KERNELS: dict[str, Callable[[Scores, bool], Callable[[Problem], Mapping[str, Any]]]] = {"torch": _torch, "jax": _jax}
