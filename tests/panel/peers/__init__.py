"""Published projects' own functions, each driven by a thin adapter."""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from unittest.mock import MagicMock

import numpy as np


def bare(*packages: str) -> None:
    """Lets modules of these packages be imported without the packages' own `__init__`, which imports far more."""
    for name in packages:
        spec = find_spec(name)
        assert spec is not None and spec.submodule_search_locations is not None, f"{name} is not installed"
        module = ModuleType(name)
        module.__path__, module.__spec__ = list(spec.submodule_search_locations), spec
        sys.modules[name] = module


class Absent:
    """Finds packages that are not installed and not used by what is called here."""

    def __init__(self, *packages: str) -> None:
        self.packages = packages

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.split(".")[0] in self.packages else None

    def create_module(self, spec: ModuleSpec) -> MagicMock:
        return MagicMock(__path__=[], __name__=spec.name)

    def exec_module(self, module: MagicMock) -> None:
        pass


def absent(*packages: str) -> None:
    sys.meta_path.append(Absent(*packages))


def fits_identity(logits: np.ndarray) -> bool:
    """Whether logits can be the product of themselves and an identity that fits memory: −∞ · 0 is NaN."""
    return logits.shape[-1] <= 4099 and bool(np.isfinite(logits.astype(np.float32)).all())
