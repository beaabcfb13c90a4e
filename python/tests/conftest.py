from __future__ import annotations

import os
from collections.abc import Callable

# Before JAX is imported: eight devices, to cut arrays over, and XLA's least optimisation, as of the tests of devices.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
FAST = "" if "ASSAY_FULL_OPTIMIZATION" in os.environ else " --xla_backend_optimization_level=0"
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8" + FAST)
# Before PyTorch imports Triton, whose own functions are interpreted or compiled for good from then on.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest  # noqa: E402

import assay  # noqa: E402


@pytest.fixture
def problem() -> assay.Problem:
    return next(assay.problems("trl", n=1, shapes=["2x8x1023"]))


@pytest.fixture
def one() -> Callable[..., assay.Problem]:
    """One problem of the dtype and shape that are named."""

    def made(dtype: str = "bf16", shape: str = "2x8x1023", seed: int = 0) -> assay.Problem:
        return next(assay.problems("trl", 1, seed, dtypes=[dtype], shapes=[shape]))

    return made
