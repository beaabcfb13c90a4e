"""The opponents of a bench, by name: plain functions of PyTorch and JAX, as users run them without a kernel, and published projects' own.

Each makes logp of logits, or of hidden states and a head, in its own way. The loss of logp, arrays of `[B,T]`, is a plain one that all of
them share; a loss that it does not have is the reason why an opponent takes no turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from . import _frameworks
from . import spec as spec_of
from ._errors import AssayError
from ._native import Problem, Spec
from ._programs import JaxProgram, Program, TorchProgram

#: Takes logits, or hidden states and a head `[V,H]`, and ids; returns logp `[B,T]`, or a pair of logp and entropies.
Scores = Callable[..., Any]


class NotHere(Exception):
    """The reason why an opponent takes no turns."""


def opponent(name: str, problem: Problem, device: str | None, inplace: bool, framework: str | None) -> Program:
    """Makes the opponent of that name.

    Raises:
        NotHere: It is not installed, or has no such loss.
    """
    return _OPPONENTS[name](problem, device, inplace, framework)


def expect(name: object) -> None:
    """Checks that there is an opponent of that name.

    Raises:
        AssayError: There is none.
    """
    if not isinstance(name, str) or name not in _OPPONENTS:
        raise AssayError(f"against: got {name!r}, expected a function, or one of {', '.join(_OPPONENTS)}")


def _installed(module: str, package: str | None = None) -> Any:
    """Imports a module of a package, which is called as the module is if no name is given."""
    name = package or module
    try:
        return import_module(module)
    except ImportError:
        raise NotHere(f"{name} is not installed here: `pip install {name}`") from None
    except Exception as reason:
        # A package of another release than its own dependencies expect.
        raise NotHere(f"{name} cannot be imported: {type(reason).__name__}: {' '.join(str(reason).split())[:200]}") from None


def _torch(problem: Problem, device: str | None, scores: Scores) -> Program:
    _installed("torch")
    return TorchProgram(_of_problem(problem, scores, _installed("torch")), problem, device, False)


def _eager(problem: Problem, device: str | None, inplace: bool, framework: str | None) -> Program:
    _installed("torch")
    return _torch(problem, device, _torch_scores(problem.spec))


def _compiled(problem: Problem, device: str | None, inplace: bool, framework: str | None) -> Program:
    return _torch(problem, device, _installed("torch").compile(_torch_scores(problem.spec), dynamic=False))


def _trl(problem: Problem, device: str | None, inplace: bool, framework: str | None) -> Program:
    """TRL's functions in PyTorch: of logits, and of hidden states in chunks."""
    utils = _installed("trl.trainer.utils", "trl")
    fields = problem.spec.to_dict()
    _expect_temperature_alone(fields, "TRL's functions")
    temperature = fields["temperature"]

    def of_logits(logits: Any, ids: Any) -> Any:
        if fields["dentropy"]:
            return utils.selective_log_softmax_and_entropy(logits, ids, temperature=temperature)
        return utils.selective_log_softmax(logits / temperature if temperature != 1.0 else logits, ids)

    def of_hidden(hidden: Any, lm_head: Any, ids: Any) -> Any:
        chunk = utils._CHUNKED_LOGPROB_CHUNK_SIZE
        extras = ("entropy",) if fields["dentropy"] else ()
        given = (hidden.flatten(0, 1), lm_head, None, ids.flatten(), temperature, chunk, None, 1.0, extras)
        logp, entropy, *_ = _installed("trl.kernels", "trl").ChunkedLogProbFunction.apply(*given)
        logp = logp.view(ids.shape)
        return (logp, entropy.view(ids.shape)) if fields["dentropy"] else logp

    return _torch(problem, device, of_hidden if len(problem.shape) == 4 else of_logits)


def _liger(problem: Problem, device: str | None, inplace: bool, framework: str | None) -> Program:
    """Liger's loss of hidden states in PyTorch. Its loss of logits is a Triton kernel."""
    _installed("torch")
    if len(problem.shape) != 4:
        raise NotHere(
            "Liger's loss of logits is a Triton kernel, which this bench does not call; lm_head=True has the one of hidden states"
        )
    chunked_loss = _installed("liger_kernel.chunked_loss", "liger-kernel")
    fields = problem.spec.to_dict()
    _expect_temperature_alone(fields, "Liger's loss")
    objective, kl, reduction = _expect_plain(problem.spec)
    if problem.layout != "vh" or "ppo_clip" not in objective or (kl and kl["estimator"] != "k3"):
        raise NotHere("Liger's loss is PPO-clip with the KL estimator k3, and its head is [V,H]")
    kinds = {"token_mean": "dapo", "sequence_mean": "grpo"}
    kind = kinds.get(reduction[0])
    if kind is None or (kind == "grpo" and reduction[1].get("rows") != "all"):
        raise NotHere(f"Liger has no reduction {reduction[0]} here")
    module = chunked_loss.LigerFusedLinearGRPOLoss(
        beta=kl["beta"] if kl else 0.0,
        compiled=False,
        use_ref_model=kl is not None,
        temperature=fields["temperature"],
        epsilon_low=objective["ppo_clip"]["epsilon_low"],
        epsilon_high=objective["ppo_clip"]["epsilon_high"],
        loss_type=kind,
        importance_sampling_level=fields["ratio"]["level"],
    )

    def loss(x: Any) -> Any:
        given = {"old_per_token_logps": x.old_logp, "ref_per_token_logps": getattr(x, "ref_logp", None)}
        return module(x.hidden, x.lm_head, x.ids, x.mask, x.advantages, **given)[0]

    return TorchProgram(loss, problem, device, False)


def _jax(problem: Problem, device: str | None, inplace: bool, framework: str | None) -> Program:
    _installed("jax")
    return JaxProgram(
        _of_problem(problem, _jax_scores(problem.spec), _frameworks.imported("jax").numpy), problem, device, inplace
    )


def _assay(problem: Problem, device: str | None, inplace: bool, framework: str | None) -> Program:
    """This package's own operation, in the framework of the kernel."""
    if framework == "jax":
        return _assay_jax(problem, device, inplace, None)
    _installed("torch")
    from . import torch as ours

    spec, has_head, fields = problem.spec, len(problem.shape) == 4, problem.spec.to_dict()
    if has_scores(problem):
        _expect_plain_logits(fields)
        if fields["logits"]["scale"] != 1.0:
            raise NotHere("assay.torch.logp_and_entropy has no scale of logits")

    def scores(*given: Any) -> Any:
        *inputs, ids = given
        options = {"temperature": fields["temperature"], "softcap": fields["logits"]["softcap"]}
        if has_head:
            found = ours.logp_and_entropy(None, ids, hidden=inputs[0], lm_head=inputs[1], **options)
        else:
            found = ours.logp_and_entropy(inputs[0], ids, **options)
        return found if fields["dentropy"] else found[0]

    def loss(x: Any) -> Any:
        named = {name: getattr(x, name) for name in _GIVEN if name in vars(x)}
        given = {"hidden": x.hidden, "lm_head": x.lm_head} if has_head else {"inplace": inplace}
        return ours.grpo_loss(None if has_head else x.logits, **named, **given, spec=spec).loss

    if problem.layout == "hv":
        raise NotHere("assay's own operation takes a head of [V,H]")
    return TorchProgram(scores if has_scores(problem) else loss, problem, device, inplace and not has_head)


def _xla(problem: Problem, device: str | None, inplace: bool, framework: str | None) -> Program:
    """This package's loss as JAX's own operations."""
    return _assay_jax(problem, device, inplace, "xla")


def _assay_jax(problem: Problem, device: str | None, inplace: bool, implementation: str | None) -> Program:
    _installed("jax")
    from . import jax as ours

    spec, has_head = problem.spec, len(problem.shape) == 4
    if has_scores(problem):
        raise NotHere("assay.jax is called with a loss here")
    named: dict[str, Any] = {} if implementation is None else {"implementation": implementation}

    def loss(x: Any) -> Any:
        given = {name: getattr(x, name) for name in _GIVEN if name in vars(x)}
        if has_head:
            # A head is `[H,V]` there.
            lm_head = x.lm_head if problem.layout == "hv" else x.lm_head.T
            return ours.grpo_loss_of_hidden(x.hidden, lm_head, **given, **named, spec=spec).loss
        return ours.grpo_loss(x.logits, **given, **named, spec=spec).loss

    return JaxProgram(loss, problem, device, inplace)


#: The arrays of tokens that this package's operations take, by their names in a problem.
_GIVEN = ("ids", "advantages", "mask", "old_logp", "ref_logp", "rollout_logp", "rollout_weights", "token_weights")

_OPPONENTS: dict[str, Callable[[Problem, str | None, bool, str | None], Program]] = {
    "eager": _eager,
    "torch.compile": _compiled,
    "trl": _trl,
    "liger": _liger,
    "jax": _jax,
    "xla": _xla,
    "assay": _assay,
}


def has_scores(problem: Problem) -> bool:
    """Whether a problem asks for logp and entropy, by cotangents, and not for a loss."""
    return hasattr(problem, "dlogp")


# The plain loss.


def _expect_plain(spec: Spec) -> tuple[Any, Any, tuple[str, dict[str, Any]]]:
    """Returns objective, KL term and reduction, if the plain loss has all that the spec asks for.

    Raises:
        NotHere: It lacks a field.
    """
    fields, usual = spec.to_dict(), spec_of("trl").to_dict()
    free = ("objective", "kl", "reduction", "temperature", "logits")
    for name, value in fields.items():
        # A ratio that no token of a problem comes near to clamping is the plain one, but that is not known here.
        if name not in free and value != usual[name]:
            raise NotHere(f"the plain loss of opponents has no `{name}: {value}`")
    objective, kl, reduction = fields["objective"], fields["kl"], fields["reduction"]
    clip = objective.get("ppo_clip") if isinstance(objective, Mapping) else None
    if clip is None or clip["delta"] is not None or clip["dual_clip"] is not None:
        raise NotHere(f"the plain loss of opponents is PPO-clip, not `{objective}`")
    plain_kl = {"gradient": "own", "importance": "one", "difference_clamp": None, "value_clamp": None, "averaging": None}
    if kl is not None and (
        kl["estimator"] not in ("k1", "k3") or any(kl[name] != value for name, value in plain_kl.items())
    ):
        raise NotHere(f"the plain loss of opponents has no KL term `{kl}`")
    name, options = (reduction, {}) if isinstance(reduction, str) else next(iter(reduction.items()))
    if name not in ("token_mean", "sequence_mean", "normalizer"):
        raise NotHere(f"the plain loss of opponents has no reduction `{name}`")
    return objective, kl, (name, options)


def _of_problem(problem: Problem, scores: Scores, xp: Any) -> Callable[..., Any]:
    """Returns a function for a program: the scores themselves, or the plain loss of their logp, by `xp`, torch or jax.numpy."""
    spec, has_head = problem.spec, len(problem.shape) == 4
    if has_scores(problem):
        return scores
    objective, kl, (reduction, options) = _expect_plain(spec)
    low, high = (sign * objective["ppo_clip"][name] + 1 for sign, name in ((-1, "epsilon_low"), (1, "epsilon_high")))

    def loss(x: Any) -> Any:
        turned = problem.layout == "hv"
        inputs = (x.hidden, x.lm_head.T if turned else x.lm_head) if has_head else (x.logits,)
        logp = xp.where(x.mask, scores(*inputs, xp.where(x.mask, x.ids, 0)), 0.0)
        ratio, advantages = xp.exp(xp.where(x.mask, logp - x.old_logp, 0.0)), x.advantages[:, None]
        token_loss = -xp.minimum(ratio * advantages, xp.clip(ratio, low, high) * advantages)
        if kl is not None:
            d = xp.where(x.mask, x.ref_logp - logp, 0.0)
            token_loss = token_loss + kl["beta"] * (xp.exp(d) - d - 1 if kl["estimator"] == "k3" else -d)
        token_loss = xp.where(x.mask, token_loss, 0.0)
        counts = x.mask.sum(-1)
        if reduction == "token_mean":
            return token_loss.sum() / xp.clip(counts.sum(), 1)
        if reduction == "normalizer":
            return token_loss.sum() / options
        rows = {"all": len(counts), "non_empty": xp.clip((counts > 0).sum(), 1)}.get(options["rows"], options["rows"])
        return (token_loss.sum(-1) / xp.clip(counts, 1)).sum() / rows

    return loss


def _torch_scores(spec: Spec) -> Scores:
    fields = spec.to_dict()
    scale, softcap, temperature = fields["logits"]["scale"], fields["logits"]["softcap"], fields["temperature"]
    _expect_plain_logits(fields)

    def scores(*given: Any) -> Any:
        *inputs, ids = given
        x = (inputs[0] if len(inputs) == 1 else inputs[0] @ inputs[1].T).float()
        x = x * scale if scale != 1.0 else x
        x = softcap * (x / softcap).tanh() if softcap else x
        logps = (x / temperature if temperature != 1.0 else x).log_softmax(-1)
        logp = logps.gather(-1, ids[..., None])[..., 0]
        return (logp, -(logps.exp() * logps).sum(-1)) if fields["dentropy"] else logp

    return scores


def _jax_scores(spec: Spec) -> Scores:
    jax = _frameworks.imported("jax")
    fields = spec.to_dict()
    scale, softcap, temperature = fields["logits"]["scale"], fields["logits"]["softcap"], fields["temperature"]
    _expect_plain_logits(fields)

    def scores(*given: Any) -> Any:
        *inputs, ids = given
        x = inputs[0] if len(inputs) == 1 else jax.numpy.einsum("bth,vh->btv", *inputs, preferred_element_type="float32")
        x = x.astype("float32") * scale
        x = softcap * jax.numpy.tanh(x / softcap) if softcap else x
        logps = jax.nn.log_softmax(x / temperature)
        logp = jax.numpy.take_along_axis(logps, ids[..., None], -1)[..., 0]
        return (logp, -(jax.numpy.exp(logps) * logps).sum(-1)) if fields["dentropy"] else logp

    return scores


def _expect_temperature_alone(fields: Mapping[str, Any], whose: str) -> None:
    _expect_plain_logits(fields)
    if fields["logits"]["softcap"] or fields["logits"]["scale"] != 1.0:
        raise NotHere(f"{whose} change no logits but by temperature")


def _expect_plain_logits(fields: Mapping[str, Any]) -> None:
    if fields["temperature_divides"] != "logits" or fields["temperature"] == "given" or fields["logits"]["bias"]:
        raise NotHere("the plain scores of opponents divide logits by one temperature, and have no bias")
    if fields["support"] != spec_of("trl").to_dict()["support"]:
        raise NotHere(f"the plain scores of opponents are of the whole vocabulary, not of `support: {fields['support']}`")
