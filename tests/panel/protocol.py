"""Protocol `assay-check/1`: a kernel that is asked line by line, over files in shared memory."""

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401, so that NumPy knows bfloat16
import numpy as np
from safetensors.numpy import load_file, save_file

Array = Any  # of NumPy, PyTorch or JAX
Outputs = dict[str, np.ndarray]

OUTPUTS = ["logp", "entropy", "token_loss"]
ERROR_LENGTH = 4000  # a line has at most 64 KiB

PLAIN = {
    "advantages": "sequence",
    "old_logp": "given",
    "logits": {"scale": 1.0, "softcap": None, "bias": False},
    "support": {"vocab": None, "excluded_ids": [], "keep_sampled": False},
    "temperature_divides": "logits",
    "rejection": [],
    "dentropy": False,
    "denominator_epsilon": 0.0,
    "scale": 1.0,
}
PLAIN_RATIO = {"denominator_epsilon": 0.0}
PLAIN_KL = {"estimator": "k3", "gradient": "own", "clamp_after_importance": False}


class Unsupported(Exception):
    """What a kernel does not compute."""


class Form(NamedTuple):
    """What shapes the loss; a program is compiled for each."""

    objective: str  # ppo_clip, cispo or sapo
    level: str  # token or sequence: of what the ratio is
    kl: str  # none, one or ratio: by what k3 is multiplied
    row_means: bool  # the mean over rows of their means, not over all tokens


class Numbers(NamedTuple):
    """What may change from call to call."""

    first: float  # ppo_clip: 1 − ε_low; cispo: 0; sapo: τ where A > 0
    second: float  # ppo_clip: 1 + ε_high; cispo: the bound; sapo: τ elsewhere
    temperature: float
    beta: float
    entropy_coef: float


class Tokens(NamedTuple):
    """A batch but for its logits: [B,T], and [B,1] advantages."""

    ids: Array
    mask: Array
    advantages: Array
    old_logp: Array
    ref_logp: Array


@dataclass(frozen=True)
class Problem:
    """One question."""

    logits: np.ndarray  # [B,T,V], f32, bf16 or f16
    tokens: Tokens
    form: Form
    numbers: Numbers


Kernel = Callable[[Problem], Outputs]


def expect_plain(given: dict[str, Any], plain: dict[str, Any]) -> None:
    for name, value in given.items():
        if value != plain.get(name):
            raise Unsupported(f"{name} {value}")


def read_spec(spec: dict[str, Any]) -> tuple[Form, Numbers]:
    """TRL's losses: GRPO, DAPO, GSPO, CISPO and SAPO with k3 and an entropy bonus. What is not read must be plain."""
    match spec["objective"]:
        case {"ppo_clip": {"epsilon_low": low, "epsilon_high": high, "delta": None, "dual_clip": None}}:
            objective, first, second = "ppo_clip", 1 - low, 1 + high
        case {"cispo": {"upper": upper, "lower": None}}:
            objective, first, second = "cispo", 0.0, upper
        case {"sapo": {"tau_positive": positive, "tau_negative": negative}}:
            objective, first, second = "sapo", positive, negative
        case other:
            raise Unsupported(f"objective {other}")
    level, kl, reduction = spec["ratio"]["level"], spec["kl"], spec["reduction"]
    expect_plain(spec["ratio"], PLAIN_RATIO | {"level": level if level in ("token", "sequence") else None})
    if kl is not None:
        importance = kl["importance"] if level == "token" and kl["importance"] == "ratio" else "one"
        expect_plain(kl, PLAIN_KL | {"beta": kl["beta"], "importance": importance})
    if reduction not in ("token_mean", {"sequence_mean": {"rows": "all"}}):
        raise Unsupported(f"reduction {reduction}")
    read = ("objective", "ratio", "kl", "reduction", "temperature", "entropy_coef")
    expect_plain({name: value for name, value in spec.items() if name not in read}, PLAIN)
    beta = kl["beta"] if kl is not None else 0.0
    numbers = Numbers(first, second, spec["temperature"], beta, spec["entropy_coef"])
    return Form(objective, level, kl["importance"] if kl is not None else "none", reduction != "token_mean"), numbers


def read_problem(path: str, spec: dict[str, Any]) -> Problem:
    form, numbers = read_spec(spec)
    file = load_file(path)
    mask = file["mask"].astype(np.float32)
    of_token = {name: file[name].astype(np.float32) for name in ("old_logps", "ref_logps")}
    tokens = Tokens(
        ids=np.clip(file["ids"], 0, file["logits"].shape[-1] - 1),
        mask=mask,
        advantages=file["advantages"].astype(np.float32)[:, None],
        old_logp=of_token["old_logps"],
        ref_logp=of_token["ref_logps"],
    )
    return Problem(file["logits"], tokens, form, numbers)


def versions(*packages: str) -> str:
    return ", ".join(f"{package} {version(package)}" for package in packages)


def serve(
    kernel: Kernel, about: str, outputs: list[str] = OUTPUTS, dtypes: tuple[str, ...] = ("f32", "bf16", "f16")
) -> None:
    """Answers until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    hello = {"protocol": "assay-check/1", "dtypes": dtypes, "outputs": outputs, "about": about}
    print(json.dumps(hello), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        reply = {"id": request["id"]}
        try:
            returned = kernel(read_problem(request["problem"], request["spec"]))
            save_file({name: np.ascontiguousarray(array) for name, array in returned.items()}, request["candidate"])
        except Unsupported as what:
            reply["unsupported"] = str(what)
        except Exception:
            reply["error"] = traceback.format_exc()[-ERROR_LENGTH:]
        print(json.dumps(reply), file=answers, flush=True)
