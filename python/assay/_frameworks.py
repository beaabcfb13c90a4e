"""A problem's arrays as NumPy's, PyTorch's and JAX's, lent without a copy where alignment allows."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from ._errors import AssayError
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


def imported(name: str) -> Any:
    """Returns the framework of that name.

    Raises:
        AssayError: It is not installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as reason:
        if reason.name != name:
            raise
        raise AssayError(f"framework: got {name}, which is not installed here, expected one that is: `pip install {name}`") from None


def torch_device(device: Any) -> Any:
    """Returns a device of PyTorch's.

    Raises:
        AssayError: It is unknown, or a GPU where PyTorch has none.
    """
    torch = imported("torch")
    try:
        found = torch.device(device)
    except RuntimeError as reason:
        raise AssayError(f"device: got {device!r}, expected one of PyTorch's: {str(reason).splitlines()[0]}") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise AssayError(f"device: got {device!r}, expected 'cpu': PyTorch {torch.__version__} has no GPU here")
    return found


def jax_device(device: Any) -> Any:
    """Returns a device of JAX's, or None for its default.

    Raises:
        AssayError: JAX has no such platform here.
    """
    if not isinstance(device, str):
        return device
    jax = imported("jax")
    try:
        return jax.devices(device)[0]
    except RuntimeError:
        raise AssayError(f"device: got {device!r}, expected a platform that JAX has here, such as {jax.default_backend()!r}") from None


def numpy(arrays: Mapping[str, Array]) -> Arrays:
    np = imported("numpy")
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
    torch, device = imported("torch"), torch_device(device)
    return Arrays(**{name: torch.from_dlpack(array).to(device) for name, array in arrays.items()})


def jax(arrays: Mapping[str, Array], device: Any) -> Arrays:
    jax, device = imported("jax"), jax_device(device)

    def lent(array: Array) -> Any:
        # JAX without x64 has no 64-bit types: what is narrowed is a copy.
        if array.dtype in ("i64", "f64") and not jax.config.jax_enable_x64:
            import numpy as np

            return jax.numpy.asarray(np.asarray(array))
        return jax.dlpack.from_dlpack(array)

    on_default = {name: lent(array) for name, array in arrays.items()}
    if device is None:
        return Arrays(**on_default)
    return Arrays(**jax.device_put(on_default, device))
