"""Campaigns without a loss: a function from logits to logp and entropy, and the backward pass that its framework makes of it."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from typing import Any

from . import _autograd, _memory, _ranks, _specs
from ._check import check
from ._errors import AssayError, OutputError
from ._native import Problem
from ._ranks import Shard
from ._report import Report

# pytest shows the test's own frames alone.
__tracebackhide__ = methodcaller("errisinstance", AssayError)

Scores = Callable[..., Any]


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
    judged as it is. Almost half of the problems are asked as callers differ, by turns: with logits that are a view, cotangents that are
    strided or expanded from one number, a second backward pass of a kept graph, a frozen head or frozen hidden states, or a `.grad` that
    is set; in JAX with what is frozen. A failure that a plain call of the same problem does not have names the way. A function that raises
    an error for a view or for a second backward pass refuses it, and the report counts that as skipped. Inputs must be what they were after
    the backward pass, unless `inplace=True`.

    With `ranks=N` and `cut="vocabulary"` the function runs in N processes of one gloo group, each with its share of the logits, or of the head,
    and an `assay.Shard`:

        def logp(logits, ids, shard):                 # [B,T,V/N], [B,T] -> [B,T], the same on every rank
            ...

    In JAX `ranks=N` puts the whole arrays on N devices of this process, for a function with `shard_map` over them.

    For a function without a backward pass, `problem.check({"logp": …})` judges the forward pass alone, for each problem of
    `assay.problems("logp")`.

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
    if "top" in options:
        warnings.warn("`top` is the old name of `ids_per_token`", DeprecationWarning, stacklevel=2)
        ids_per_token = options.pop("top")
    if type(ids_per_token) is not int or ids_per_token < 1:
        raise AssayError(f"ids_per_token: got {ids_per_token!r}, expected an integer of at least 1")
    _autograd.expect_options(framework, _FRAMEWORKS, options)
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
    has_head = _autograd.has_head({**options, "lm_head": lm_head})
    scores: dict[str, Any] = {
        "framework": framework,
        "entropy": entropy,
        "lm_head": has_head,
        "inplace": bool(options.get("inplace")),
    }
    if framework == "jax" and options.get("ranks") is not None:
        # Devices of one process, which share its arrays.
        scores["ranks"] = _jax_devices(options.pop("ranks"), options.pop("cut", "vocabulary"))
    options["variants"] = [made(variant, **scores) for variant in options.get("variants", ())]
    return check(made(fn, **scores), spec, lm_head=lm_head, **options)


def made(fn: Scores, framework: str, entropy: bool, lm_head: bool, inplace: bool, ranks: int = 1) -> _autograd.Kernel:
    """Makes a kernel of a function of logits and ids; `ranks` is the number of JAX's devices that have its arrays."""
    kernel = _jax(fn, entropy, lm_head, ranks) if framework == "jax" else _torch(fn, entropy, lm_head, inplace)
    scores = {"framework": framework, "entropy": entropy, "lm_head": lm_head, "inplace": inplace}
    setattr(kernel, _autograd.SCORES, (fn, scores))
    return kernel


def check_invariance(fn: Scores, *, relations: Sequence[str] | None = None, **options: Any) -> Report:
    """Asks whether the log-probabilities of a token have the same bits in another batch, order, length or call, and judges nothing else.

        >>> import assay, jax
        >>> def of_batch(logits, ids):
        ...     x = jax.nn.log_softmax(logits.astype("float32"))
        ...     drift = 1e-6 * logits.shape[0]
        ...     return jax.numpy.take_along_axis(x, ids[..., None], -1)[..., 0] - drift
        >>> options = dict(framework="jax", dtypes=["f32"], shapes=["2x3x7"], cases=4, wide=0, repro_dir=None, progress=False)
        >>> assay.check_invariance(of_batch, relations=["batch"], **options).causes[0].gate
        'batch-invariance'
        >>> assay.check_invariance(of_batch, relations=["order"], **options).passed
        True

    Args:
        fn: A function from logits and ids to logp, or to a pair of logp and entropy, as `assay.check_logp` takes it.
        relations: The names of the relations, as `assay.check` lists them; by default all that apply.
        options: The other arguments of `assay.check_logp`; `variants` are functions as `fn` is.

    Raises:
        SpecError, ProblemError, AssayError: As `assay.check_logp`.
    """
    asked = "bits" if relations is None else list(relations)
    return check_logp(fn, **{"invariant": asked, "judged": False, **options})


def _scores(returned: Any, entropy: bool) -> tuple[Any, ...]:
    """Logp and, where it is asked for, entropy."""
    pair = tuple(returned) if isinstance(returned, Sequence) else (returned,)
    if len(pair) != 1 + entropy:
        expected = "a pair of logp and entropy" if entropy else "logp alone, or `entropy=True`"
        raise OutputError("logp", f"{len(pair)} arrays", expected)
    return pair


def _cotangents(arrays: Any, entropy: bool) -> list[Any]:
    """The cotangents of what a function returns."""
    return [arrays.dlogp, arrays.dentropy] if entropy else [arrays.dlogp]


def _share(arrays: Any, shard: Shard, turned: bool) -> Any:
    """Returns the arrays of one rank: its share of logits, or of the head, and of what tokens have."""
    share: dict[str, Any] = {}
    for name in ("ids", "mask", "dlogp", "dentropy", "hidden"):
        if (array := getattr(arrays, name, None)) is not None:
            share[name] = shard.of_tokens(array).contiguous()
    if hasattr(arrays, "lm_head"):
        of_head = (slice(None), shard.slice) if turned else (shard.slice,)
        share["lm_head"] = (arrays.lm_head[of_head] if shard.cut == "vocabulary" else arrays.lm_head).contiguous()
    else:
        share["logits"] = shard.of_logits(arrays.logits).contiguous()
    return types.SimpleNamespace(**share)


def _torch(fn: Scores, entropy: bool, lm_head: bool, inplace: bool) -> _autograd.Kernel:
    def kernel(problem: Problem, way: str | None = None, shard: Shard | None = None) -> Mapping[str, Any]:
        arrays = problem.torch()
        if shard is not None:
            arrays = _share(arrays, shard, problem.layout == "hv")
        inputs = _autograd.TorchInputs(arrays, way, inplace)
        # A head is `[V,H]`, as `torch.nn.Linear` has it.
        turned = problem.layout == "hv"
        given = [x.T if name == "lm_head" and turned else x for name, x in inputs.tensors.items()]
        _memory.enter_pass("forward")
        with _autograd.refusal(way):
            scores = _scores(fn(*given, arrays.ids, *(() if shard is None else (shard,))), entropy)
        sent = _autograd.torch_cotangents(way, _cotangents(arrays, entropy), arrays.mask, scores)
        outputs = inputs.gradients(way, scores, sent)
        if shard is not None and shard.cut != "vocabulary" and lm_head:
            # Trainers add up the gradients of what all ranks have.
            import torch.distributed as distributed

            distributed.all_reduce(outputs["dlm_head"])
        outputs |= {name: score.detach().contiguous() for name, score in zip(("logp", "entropy"), scores)}
        return outputs | _autograd.of_frozen(way, kernel, problem)

    first = _autograd.differentiated(lm_head)[0]
    ways = [
        *_autograd.layouts(first),
        _autograd.SECOND_PASS,
        _autograd.STRIDED_COTANGENT,
        _autograd.EQUAL_COTANGENT,
        _autograd.with_grad(first),
        *(_autograd.FROZEN.values() if lm_head else ()),
    ]
    return _autograd.campaign(fn, kernel, "torch", ways)


def _jax_devices(ranks: object, cut: object) -> int:
    """Checks that JAX has as many devices as ranks are asked for."""
    import jax

    count, _ = _ranks.expect(ranks, cut)
    if count > (found := len(jax.devices())):
        flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        raise AssayError(f"ranks: got {count}, expected at most {found}, the devices of JAX; {flag} makes as many of a CPU")
    return count


def _jax(fn: Scores, entropy: bool, lm_head: bool, ranks: int) -> _autograd.Kernel:
    import jax
    import jax.numpy as jnp

    mesh = jax.sharding.Mesh(jax.devices()[:ranks], ("ranks",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    @functools.partial(jax.jit, static_argnames="frozen")
    def run(inputs: dict[str, Any], ids: Any, mask: Any, cotangents: list[Any], frozen: str | None) -> tuple[Any, Any]:
        def scored(free: dict[str, Any]) -> tuple[Any, ...]:
            return _scores(fn(*({**inputs, **free}[name] for name in inputs), ids), entropy)

        scores, backward = jax.vjp(scored, {name: x for name, x in inputs.items() if name != frozen})
        counts = [mask[..., None] if array.ndim > mask.ndim else mask for array in cotangents]
        kept = (jnp.where(*given, 0) for given in zip(counts, cotangents))
        sent = (array.astype(score.dtype) for array, score in zip(kept, scores))
        return scores, backward(tuple(sent))[0]

    def kernel(problem: Problem, way: str | None = None) -> Mapping[str, Any]:
        arrays = problem.jax()
        turned = problem.layout == "hv"
        named = {name: getattr(arrays, name) for name in _autograd.differentiated(hasattr(arrays, "lm_head"))}
        given = {name: x.T if name == "lm_head" and turned else x for name, x in named.items()}
        asked = (given, arrays.ids, arrays.mask, _cotangents(arrays, entropy))
        if ranks > 1:
            asked = jax.device_put(asked, everywhere)
        _memory.enter_pass("both")
        scores, gradients = jax.block_until_ready(run(*asked, _autograd.frozen(way)))
        _memory.enter_pass(None)
        if ranks > 1:
            scores, gradients = jax.device_put((scores, gradients), jax.devices()[0])
        outputs = dict(zip(("logp", "entropy"), scores))
        for name, x in gradients.items():
            outputs[_autograd.GRADIENTS[name]] = x.T if name == "lm_head" and turned else x
        return outputs | _autograd.of_frozen(way, kernel, problem)

    return _autograd.campaign(fn, kernel, "jax", list(_autograd.FROZEN.values()) if lm_head else [])


_FRAMEWORKS = ("torch", "jax")
