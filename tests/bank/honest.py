"""Honest kernels: ways of writing the same losses, each of which must pass, whatever the problems."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import assay
from plain import plain

# The panel's kernels.
sys.path.append(str(Path(__file__).parent.parent / "panel"))

REGIMES = 11  # in which every log-probability is a number


@dataclass(frozen=True)
class HonestForm:
    """A kernel and the campaign that it must pass."""

    name: str
    fn: Callable[..., Any]
    campaign: str = "check"
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, **options: Any) -> assay.Report:
        """Runs the campaign. The options of the form override those given."""
        report: assay.Report = getattr(assay, self.campaign)(self.fn, **(options | self.options))
        return report


def each_wide(*dtypes: str) -> dict[str, Any]:
    """The options of a campaign of V = 151,936 alone, in every regime and each dtype."""
    cases = REGIMES * len(dtypes)
    return {"dtypes": list(dtypes), "cases": cases, "wide": cases}


#: The losses that the panel's kernels compute, with and without an entropy.
LOSSES: dict[str, dict[str, Any]] = {
    "dapo": {"loss_type": "dapo"},
    "grpo with KL": {"loss_type": "grpo", "beta": 0.04},
    "sequences, T 0.7": {"importance_sampling_level": "sequence", "temperature": 0.7},
    "CISPO": {"loss_type": "cispo", "epsilon_high": 5.0},
    "SAPO": {"loss_type": "sapo"},
}


def forms() -> list[HonestForm]:
    """Returns all forms that this Python has the frameworks for."""
    found = of_numpy() + of_panel("numpy_kernels", ["textbook", "gaps", "float64"])
    if find_spec("torch"):
        import cross_entropies
        import divergences
        import honest_torch

        names = ["logsumexp", "logsumexp_float64", "log_softmax", "cross_entropy", "textbook", "gaps"]
        found += of_panel("torch_kernels", names) + honest_torch.FORMS + cross_entropies.FORMS + divergences.FORMS
    if find_spec("jax"):
        import honest_jax

        found += of_panel("jax_kernels", ["logsumexp", "log_softmax", "textbook", "gaps"]) + honest_jax.FORMS
    return found


def of_numpy() -> list[HonestForm]:
    options: dict[str, dict[str, Any]] = {
        "": {},
        " in three dtypes": {"dtypes": ["f32", "bf16", "f16"]},
        " with KL": {"beta": 0.04, "use_bias_correction_kl": False},
        " of sequences": {"importance_sampling_level": "sequence", "temperature": 0.7},
        " of a head": {"lm_head": True},
        " of a head [H,V]": {"lm_head": True, "layout": "hv"},
        ", garbage": {"masked_garbage": True},
        ", wide": each_wide("f32", "bf16", "f16"),
    }
    return [HonestForm(f"numpy plain{name}", plain, options=of) for name, of in options.items()]


def of_panel(module: str, names: list[str]) -> list[HonestForm]:
    """The panel's kernels, which take a problem of its protocol."""
    found = []
    for name in names:
        for loss, options in LOSSES.items():
            found.append(HonestForm(f"{module} {name}, {loss}", of_protocol(module, name), options=options))
        wide = {**LOSSES["dapo"], **each_wide("f32", "bf16")}
        found.append(HonestForm(f"{module} {name}, wide", of_protocol(module, name), options=wide))
    # A program is compiled for each shape.
    few = {"shapes": "few"} if module == "jax_kernels" else {}
    return [HonestForm(form.name, form.fn, form.campaign, few | form.options) for form in found]


def of_protocol(module: str, name: str) -> Callable[[Any], Any]:
    def kernel(problem: Any) -> Any:
        from importlib import import_module

        import numpy as np
        from protocol import Problem, Tokens, read_spec

        a = problem.numpy()
        form, numbers = read_spec(problem.spec.to_dict())
        no_ref = np.zeros(a.mask.shape, np.float32)
        tokens = Tokens(
            ids=np.where(a.mask, a.ids, 0),
            mask=a.mask.astype(np.float32),
            advantages=a.advantages[:, None].astype(np.float32),
            old_logp=np.where(a.mask, a.old_logp, 0).astype(np.float32),
            ref_logp=np.where(a.mask, getattr(a, "ref_logp", no_ref), 0).astype(np.float32),
        )
        logits = np.where(a.mask[..., None], a.logits, np.zeros((), a.logits.dtype))
        outputs = dict(getattr(import_module(module), name)(Problem(logits, tokens, form, numbers)))
        # The entropy is judged where the loss has it.
        if not numbers.entropy_coef:
            del outputs["entropy"]
        return outputs

    kernel.__name__ = name
    return kernel
