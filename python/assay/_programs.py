"""The programs of a bench: functions as users write them, ready to be called again and again.

A program has the arrays of one problem. `load` puts its inputs in place again, which is not timed; `call` runs the forward and the backward
pass, and returns when the results are there; `outputs` names them for the judge.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from . import _autograd, _memory
from ._errors import InputMutated
from ._frameworks import Arrays
from ._native import Problem


class Program:
    """One program on one problem."""

    #: The framework that runs it, "torch" or "jax", if that is known.
    framework: str | None = None
    #: The device of its arrays; None: the CPU.
    device: str | None = None

    def load(self) -> None:
        """Puts the inputs in place again."""

    def call(self) -> Any:
        """Runs both passes, to their end."""
        raise NotImplementedError

    def wait(self) -> None:
        """Waits until the device has done all that it was asked for."""
        if self.framework == "torch" and self.device is not None and str(self.device).startswith("cuda"):
            import torch

            torch.cuda.synchronize(self.device)

    def outputs(self, returned: Any) -> Mapping[str, Any]:
        """What `call` returned, by the names of the judge."""
        raise NotImplementedError

    def expect_unchanged(self) -> None:
        """Checks that the last call has only read its inputs.

        Raises:
            InputMutated: One has other bytes.
        """


class FunctionProgram(Program):
    """A function of a problem that returns its outputs, as `assay.check` takes it."""

    def __init__(self, fn: Callable[[Problem], Any], problem: Problem, device: str | None) -> None:
        self._fn, self._problem, self.device = fn, problem, device
        self.framework = None if device is None or "torch" not in sys.modules else "torch"

    def call(self) -> Any:
        _memory.enter_pass("both")
        outputs = self._fn(self._problem)
        _memory.wait_for(outputs)
        self.wait()
        _memory.enter_pass(None)
        return outputs

    def outputs(self, returned: Any) -> Mapping[str, Any]:
        return returned  # type: ignore[no-any-return]


class TorchProgram(Program):
    """A function of tensors that PyTorch differentiates: of a problem's arrays to its loss, or of logits and ids to logp."""

    def __init__(self, fn: Callable[..., Any], problem: Problem, device: str | None, inplace: bool) -> None:
        import torch

        self._torch, self._inplace, self.framework, self.device = torch, inplace, "torch", device
        self._source = problem.torch(device)
        # Of its own: the problem's memory is only lent, and other programs have it too.
        self._arrays = Arrays(
            **{name: array.clone() for name, array in vars(self._source).items() if name not in _OF_LOGITS}
        )
        self._scores = hasattr(self._arrays, "dlogp")
        self._fn = fn
        self._names = _autograd.differentiated(hasattr(self._source, "lm_head"))
        self._leaves = {name: getattr(self._source, name).clone().requires_grad_() for name in self._names}
        turned = problem.layout == "hv"
        self._turn = {
            name: (lambda x: x.T) if name == "lm_head" and turned else (lambda x: x.view_as(x)) for name in self._names
        }

    def load(self) -> None:
        if self._inplace:
            for name, leaf in self._leaves.items():
                leaf.data.copy_(getattr(self._source, name))

    def call(self) -> Any:
        torch = self._torch
        _memory.enter_pass("forward")
        if self._scores:
            # A view, as a model's logits are no leaf: what is written in place is no parameter.
            found = self._fn(*(self._turn[name](leaf) for name, leaf in self._leaves.items()), self._arrays.ids)
            results = tuple(found) if isinstance(found, (tuple, list)) else (found,)
            given = [self._arrays.dlogp, self._arrays.dentropy] if len(results) == 2 else [self._arrays.dlogp]
            sent = [array.where(self._arrays.mask, 0).to(result.dtype) for array, result in zip(given, results)]
        else:
            views = {name: leaf.view_as(leaf) for name, leaf in self._leaves.items()}
            loss, _ = _loss_alone(self._fn(Arrays(**{**vars(self._arrays), **views})))
            results, sent = (loss,), [torch.ones_like(loss)]
        _memory.enter_pass("backward")
        gradients = torch.autograd.grad(results, list(self._leaves.values()), sent)
        _memory.enter_pass(None)
        return results, gradients

    def outputs(self, returned: Any) -> Mapping[str, Any]:
        results, gradients = returned
        named = zip(("logp", "entropy") if self._scores else ("loss",), results)
        outputs = {name: result.detach().contiguous() for name, result in named}
        return outputs | {_autograd.GRADIENTS[name]: x.contiguous() for name, x in zip(self._names, gradients)}

    def expect_unchanged(self) -> None:
        held = {**vars(self._arrays), **({} if self._inplace else self._leaves)}
        for name, array in held.items():
            before, after = (x.detach().contiguous().view(self._torch.uint8) for x in (getattr(self._source, name), array))
            if not self._torch.equal(before, after):
                raise InputMutated(f"`{name}`: got other bytes after a call, expected an input that is only read", name)


#: The arrays that a program is differentiated by, which lie in leaves.
_OF_LOGITS = ("logits", "hidden", "lm_head")


class JaxProgram(Program):
    """A function of arrays that JAX differentiates and compiles, both passes into one program. Inputs that may be written to are donated."""

    def __init__(self, fn: Callable[..., Any], problem: Problem, device: str | None, inplace: bool) -> None:
        import jax

        self.framework, self.device = "jax", device
        arrays = dict(vars(problem.jax(device)))
        turned = problem.layout == "hv"
        self._scores = "dlogp" in arrays
        self._names = _autograd.differentiated("lm_head" in arrays)
        self._source = self._inputs = {name: arrays.pop(name) for name in self._names}
        self._others, self._inplace = arrays, inplace

        def run(inputs: dict[str, Any], others: dict[str, Any]) -> Any:
            def results(inputs: dict[str, Any]) -> tuple[Any, ...]:
                if not self._scores:
                    return (_loss_alone(fn(Arrays(**{**others, **inputs})))[0],)
                given = [x.T if name == "lm_head" and turned else x for name, x in inputs.items()]
                found = fn(*given, others["ids"])
                return tuple(found) if isinstance(found, (tuple, list)) else (found,)

            found, backward = jax.vjp(results, inputs)
            names = ("dlogp", "dentropy") if self._scores else ()
            sent = [jax.numpy.where(others["mask"], others[name], 0).astype(x.dtype) for name, x in zip(names, found)]
            return found, backward(tuple(sent) if self._scores else (jax.numpy.ones_like(found[0]),))[0]

        self._jax, self._run = jax, jax.jit(run, donate_argnums=(0,) if inplace else ())

    def load(self) -> None:
        if self._inplace:
            copies = {name: self._jax.numpy.array(x, copy=True) for name, x in self._source.items()}
            self._inputs = self._jax.block_until_ready(copies)

    def call(self) -> Any:
        _memory.enter_pass("both")
        returned = self._jax.block_until_ready(self._run(self._inputs, self._others))
        _memory.enter_pass(None)
        return returned

    def outputs(self, returned: Any) -> Mapping[str, Any]:
        results, gradients = returned
        named = dict(zip(("logp", "entropy") if self._scores else ("loss",), results))
        return named | {_autograd.GRADIENTS[name]: x for name, x in gradients.items()}


def _loss_alone(returned: Any) -> tuple[Any, Any]:
    """The loss, and what was returned besides it, which is neither judged nor timed."""
    if isinstance(returned, (tuple, list)) and len(returned) == 2 and isinstance(returned[1], Mapping):
        return returned[0], returned[1]
    # `GrpoLoss` of this package, and named tuples like it.
    return getattr(returned, "loss", returned), None
