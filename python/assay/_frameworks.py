"""A problem's arrays as NumPy's, PyTorch's and JAX's, lent without a copy where alignment allows."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from ._native import Array


class Arrays(SimpleNamespace):
    """A problem's arrays by name: those that it has."""

    def __getattr__(self, name: str) -> Any:
        if f"{name}_bits" in vars(self):
            raise AttributeError(
                f"`{name}` is bf16, which NumPy has only where ml_dtypes is installed: take `{name}_bits`, its bits as uint16"
            )
        raise AttributeError(f"this problem has no `{name}`, expected one of {', '.join(vars(self))}")

    def __repr__(self) -> str:
        held = (f"{name}: {array.dtype}{list(array.shape)}" for name, array in vars(self).items())
        return f"<assay.Arrays {', '.join(held)}>"


def numpy(arrays: Mapping[str, Array]) -> Arrays:
    import numpy as np

    try:
        from ml_dtypes import bfloat16
    except ImportError:
        bfloat16 = None
    held: dict[str, Any] = {}
    for name, array in arrays.items():
        if array.dtype != "bf16":
            held[name] = np.asarray(array)
        elif bfloat16 is None:
            held[f"{name}_bits"] = np.asarray(array)
        else:
            held[name] = np.asarray(array).view(bfloat16)
    return Arrays(**held)


def torch(arrays: Mapping[str, Array], device: Any) -> Arrays:
    import torch

    return Arrays(**{name: torch.from_dlpack(array).to(device) for name, array in arrays.items()})


def jax(arrays: Mapping[str, Array], device: Any) -> Arrays:
    import jax

    def lent(array: Array) -> Any:
        # JAX without x64 has no 64-bit types: what is narrowed is a copy.
        if array.dtype in ("i64", "f64") and not jax.config.jax_enable_x64:
            import numpy as np

            return jax.numpy.asarray(np.asarray(array))
        return jax.dlpack.from_dlpack(array)

    on_default = {name: lent(array) for name, array in arrays.items()}
    if device is None:
        return Arrays(**on_default)
    return Arrays(**jax.device_put(on_default, jax.devices(device)[0] if isinstance(device, str) else device))
