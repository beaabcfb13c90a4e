"""The entries of the bank: kernels with what a campaign must say of them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: The campaigns that an entry may ask for, by the name of the function of `assay`.
CAMPAIGNS = ("check", "check_logp", "check_loss", "check_cross_entropy", "check_divergence")


@dataclass(frozen=True)
class WrongKernel:
    """A kernel that is wrong in one way, and the words that describe it rightly."""

    name: str
    fn: Callable[..., Any]
    kind: str
    #: A regular expression that the printed causes match if they describe it rightly.
    says: str
    #: A regular expression of explanations that are true of it too, though they are not the heart of it.
    also: str = ""
    campaign: str = "check"
    #: The arguments of the campaign, its spec among them.
    options: dict[str, Any] = field(default_factory=dict)
    #: The reason why it may pass; empty if it may not.
    harmless: str = ""

    @property
    def is_wrong_by(self) -> str:
        """The first line of the kernel's docstring."""
        return (self.fn.__doc__ or "").strip().split("\n")[0]


    def is_said_by(self, report: str) -> bool:
        """Whether the printed causes of a report describe the kernel rightly."""
        return re.search(self.says, causes_of(report)) is not None

    def misleading(self, causes: list[dict[str, Any]]) -> list[str]:
        """Returns the explanations in a report's causes that are not of this kernel: diagnoses, other losses, and names of wrong kernels
        of which none is right."""
        right = f"{self.says}|{self.also}" if self.also else self.says
        said: list[str] = []
        for cause in causes:
            said += [f"likely {text}" for text in cause["diagnoses"]]
            said += [f"computes {' which is '.join(names)}" for names in cause["computes"]]
            names = [like["mutant"] for like in cause["like"]]
            said += [f"like {' or '.join(names)}"] if names else []
        return [text for text in said if not re.search(right, text)]


def causes_of(report: str) -> str:
    """Returns the causes of a printed report in one line: text is wrapped at the width of a terminal."""
    return " ".join(re.split(r"\n *covered ", report)[0].split())


BANK: list[WrongKernel] = []


def gaps() -> dict[str, str]:
    """Returns the kernels whose causes do not describe them yet, or say something else too: by name, with what is printed."""
    with (Path(__file__).parent / "gaps.toml").open("rb") as file:
        return tomllib.load(file)


def wrong(
    kind: str,
    says: str,
    /,
    *,
    also: str = "",
    campaign: str = "check",
    harmless: str = "",
    name: str = "",
    **options: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds a kernel to the bank; `options` are those of its campaign."""

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        BANK.append(WrongKernel(name or fn.__name__, fn, kind, says, also, campaign, options, harmless))
        return fn

    return add
