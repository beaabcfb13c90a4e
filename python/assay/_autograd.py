"""The ways in which callers differ when they call a function and ask its framework for gradients.

A way is named by the words that a report has after "called". In the plain one, None, the inputs are dense and all need gradients, and the
backward pass is run once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from . import _frameworks, _memory
from ._errors import AssayError, InputMutated, OutputError
from ._native import Problem

#: The arrays that a function is differentiated by, and the names of their gradients.
GRADIENTS = {"logits": "dlogits", "hidden": "dhidden", "lm_head": "dlm_head"}
Kernel = Callable[..., Mapping[str, Any]]

SECOND_PASS = "with a second backward pass of a kept graph, after one for other cotangents"
STRIDED_COTANGENT = "with cotangents that are a transposed part of a larger tensor"
EQUAL_COTANGENT = "with one cotangent expanded to all tokens, as of logp.sum()"
FROZEN = {"lm_head": "with a frozen head, which needs no gradient", "hidden": "with frozen hidden states, which need no gradient"}
#: The numbers by which the loss is multiplied before it is differentiated. The gradient is divided by them again, and in 16 bits is not to
#: be rounded twice: they are powers of 2 in bf16, and in f16, whose small numbers have fewer bits, only the sign changes.
UPSTREAM = {
    "with an upstream gradient of 3 (4 in bf16, -1 in f16)": {"f64": 3.0, "f32": 3.0, "bf16": 4.0, "f16": -1.0},
    "with an upstream gradient of 0.37 (0.25 in bf16, -1 in f16)": {"f64": 0.37, "f32": 0.37, "bf16": 0.25, "f16": -1.0},
}
_LAYOUTS = ("{}[:, :-1], a view of a longer tensor", "{}[..., :-3], a view of a wider tensor", "{} as the transpose(0, 1) of a tensor")


def layouts(array: str) -> list[str]:
    """Returns the ways in which logits, or hidden states, are a view."""
    return [f"with {words.format(array)}" for words in _LAYOUTS]


def with_grad(array: str) -> str:
    """Returns the way in which the `.grad` of logits, or of hidden states, is set."""
    return f"with {array}.grad set before"


def differentiated(lm_head: bool) -> list[str]:
    """Returns the names of the arrays that a function is differentiated by."""
    return ["hidden", "lm_head"] if lm_head else ["logits"]


def has_head(options: Mapping[str, Any]) -> bool:
    """Whether the problems of a campaign have an LM head, as the options of `assay.check` say."""
    shapes = options.get("shapes", ())
    return bool(options.get("lm_head")) or any(shape.count("x") == 3 for shape in ([shapes] if isinstance(shapes, str) else shapes))


def expect_options(framework: str, known: Iterable[str], options: Mapping[str, Any]) -> None:
    """Checks what the campaigns of differentiable functions have in common.

    Raises:
        AssayError: The framework is unknown, or `isolate` is set.
    """
    if framework not in known:
        raise AssayError(f"framework: got {framework!r}, expected one of {', '.join(known)}")
    if options.get("isolate"):
        raise AssayError("isolate: got True, expected False: another process cannot import what is made of `fn`")
    _frameworks.imported(framework)
    if options.get("device") is not None:
        (_frameworks.torch_device if framework == "torch" else _frameworks.jax_device)(options["device"])


def campaign(fn: object, kernel: Kernel, framework: str, ways: Sequence[str]) -> Kernel:
    """Gives a kernel the name of the function that it calls, its framework, and the ways in which a campaign calls it."""
    kernel.__name__ = getattr(fn, "__name__", type(fn).__name__)
    setattr(kernel, FRAMEWORK, framework)
    setattr(kernel, WAYS, [(way, way == EQUAL_COTANGENT, False) for way in ways])
    return kernel


#: The attribute of a kernel that names the framework which differentiates it, and whose passes it tells apart.
FRAMEWORK = "_assay_framework"

#: The attribute of a kernel that names its ways: each with whether it is for problems with equal cotangents, and whether it is a variant.
WAYS = "_assay_ways"


#: The attribute of a kernel that has the function of logits and ids that it calls, with the arguments that make a kernel of it again.
SCORES = "_assay_scores"


@contextmanager
def refusal(way: str | None) -> Iterator[None]:
    """Counts an error as a refusal where a function may refuse a way of calling: a layout, or a second backward pass."""
    try:
        yield
    except NotImplementedError:
        raise
    except Exception as reason:
        if way != SECOND_PASS and way not in [*layouts("logits"), *layouts("hidden")]:
            raise
        # Without the numbers, which differ from problem to problem.
        line = re.sub(r"\d+", "…", str(reason).strip().split("\n")[0])[:200]
        raise NotImplementedError(f"called {way}: {type(reason).__name__}: {line}") from reason


def frozen(way: str | None) -> str | None:
    """Returns the name of the array that needs no gradient in a way of calling."""
    return next((name for name, words in FROZEN.items() if words == way), None)


def of_frozen(way: str | None, kernel: Kernel, problem: Problem) -> dict[str, Any]:
    """Returns the gradient of what is frozen in a way of calling, which the judge needs too, from a plain call."""
    name = frozen(way)
    return {} if name is None else {GRADIENTS[name]: kernel(problem)[GRADIENTS[name]]}


class TorchInputs:
    """The arrays that a function is differentiated by, as tensors laid out for a way of calling."""

    def __init__(self, arrays: Any, way: str | None, inplace: bool) -> None:
        import torch

        self._torch, self._inplace = torch, inplace
        self.names = differentiated(hasattr(arrays, "lm_head"))
        self._bases, self._before = {}, {}
        self.tensors: dict[str, Any] = {}
        for name in self.names:
            array = getattr(arrays, name)
            is_first = name == self.names[0]
            self._bases[name], tensor = _laid_out(array, layouts(name).index(way) if is_first and way in layouts(name) else None)
            self._before[name] = self._bases[name].clone()
            self.tensors[name] = tensor.requires_grad_(frozen(way) != name)
        self._expects_grad = way == with_grad(self.names[0])
        if self._expects_grad:
            first = self.tensors[self.names[0]]
            first.grad = torch.ones_like(first)

    def gradients(self, way: str | None, results: Sequence[Any], sent: Sequence[Any]) -> dict[str, Any]:
        """Differentiates `results`, and returns the gradients by name, dense.

        Raises:
            InputMutated: An input, or its `.grad`, is not what it was.
        """
        wanted = [name for name in self.names if self.tensors[name].requires_grad]
        inputs = [self.tensors[name] for name in wanted]
        with refusal(way):
            if way == SECOND_PASS:
                self._torch.autograd.grad(results, inputs, [-2 * array for array in sent], retain_graph=True)
            _memory.enter_pass("backward")
            gradients = self._torch.autograd.grad(results, inputs, sent)
            _memory.enter_pass(None)
        self._expect_unchanged()
        return {GRADIENTS[name]: gradient.contiguous() for name, gradient in zip(wanted, gradients)}

    def _expect_unchanged(self) -> None:
        torch = self._torch
        for name, base in self._bases.items():
            before = self._before[name]
            if self._inplace and name != "lm_head":
                # What is around a view is not the function's to write to.
                tensor = self.tensors[name].detach()
                before.as_strided(tensor.shape, tensor.stride()).copy_(tensor)
            if not torch.equal(base.view(torch.uint8), before.view(torch.uint8)):
                raise InputMutated(f"`{name}`: got other bytes after the backward pass, expected an input that is only read", name)
        first = self.tensors[self.names[0]]
        if self._expects_grad and not bool((first.grad == 1).all()):
            raise InputMutated("`.grad`: got other numbers after `torch.autograd.grad`, expected it untouched", f"{self.names[0]}.grad")


def _laid_out(array: Any, layout: int | None) -> tuple[Any, Any]:
    """Returns a tensor with the content of `array`, and the tensor that has the memory, NaN outside."""
    if layout is None:
        base = array.detach().clone().contiguous()
        return base, base.detach()
    if layout == 2:
        base = array.transpose(0, 1).contiguous().clone()
        return base, base.transpose(0, 1)
    more = (0, 1, 0) if layout == 0 else (0, 0, 3)
    base = array.new_full([extent + added for extent, added in zip(array.shape, more)], float("nan"))
    view = base[:, : array.shape[1], : array.shape[2]]
    view.copy_(array)
    return base, view.detach()


def torch_cotangents(way: str | None, arrays: Sequence[Any], mask: Any, scores: Sequence[Any]) -> list[Any]:
    """Returns the cotangents of scores, 0 where masked, laid out for a way of calling."""
    sent = []
    for array, score in zip(arrays, scores):
        if array.shape != score.shape:
            raise OutputError("logp", f"shape {list(score.shape)}", f"{list(array.shape)}, that of the ids")
        array = array.where(mask[..., None] if array.ndim > mask.ndim else mask, 0).to(score.dtype)
        if way == EQUAL_COTANGENT and bool((array == array.flatten()[0]).all()):
            array = array.flatten()[0].clone().expand(array.shape)
        elif way == STRIDED_COTANGENT:
            base = array.new_full((array.shape[1], array.shape[0] + 1, *array.shape[2:]), float("nan"))
            view = base.transpose(0, 1)[:-1]
            array = view.copy_(array)
        sent.append(array)
    return sent
