from __future__ import annotations

import json
import multiprocessing
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernels import honest, too_large

import assay


@pytest.mark.parametrize("dtype", ["bf16", "f32", "f16"])
@pytest.mark.parametrize("seed", range(3))
def test_an_honest_kernel_passes_and_one_with_too_large_a_gradient_fails(
    one: Callable[..., assay.Problem], dtype: str, seed: int
) -> None:
    problem = one(dtype, seed=seed)
    verdicts = problem.check(honest(problem))
    assert verdicts and verdicts.passed, verdicts
    assert verdicts.failures == []
    verdicts.raise_for_failure()
    assert "PASS" in repr(verdicts)
    wrong = problem.check(too_large(problem))
    assert not wrong
    assert any("dlogits" in failure for failure in wrong.failures)
    assert json.loads(wrong.to_json())["pass"] is False
    with pytest.raises(AssertionError, match="FAIL kernel: dlogits"):
        wrong.raise_for_failure()


def zeros(problem: assay.Problem) -> dict[str, Any]:
    return {"loss": np.float32(0), "dlogits": np.zeros(problem.shape, np.float32)}


def test_zeros_and_nan_fail(problem: assay.Problem) -> None:
    assert not problem.check(zeros(problem))
    outputs = honest(problem)
    outputs["dlogits"][0, 0, 0] = np.nan
    verdicts = problem.check(outputs)
    assert not verdicts and "NONFINITE" in repr(verdicts)


def test_the_loss_may_be_a_scalar_of_any_kind(problem: assay.Problem) -> None:
    outputs = honest(problem)
    loss = outputs["loss"]
    for same in (loss, np.asarray(loss), np.asarray([loss]), float(loss), array("f", [loss])):
        assert problem.check(outputs | {"loss": same}), type(same)


def test_bits_of_bf16_are_taken_for_bf16(problem: assay.Problem) -> None:
    outputs = honest(problem)
    assert problem.check(outputs | {"dlogits": outputs["dlogits"].view(np.uint16)})


def test_an_lm_head_has_two_gradients(one: Callable[..., assay.Problem]) -> None:
    problem = one("f32", "2x4x16x257")
    zeros = {name: np.zeros(getattr(problem, name).shape, np.float32) for name in ("hidden", "lm_head")}
    outputs: dict[str, Any] = {"loss": 0.0, "dhidden": zeros["hidden"], "dlm_head": zeros["lm_head"]}
    assert not problem.check(outputs)
    assert not problem.check(outputs | {"dlogits_dtype": "bf16"})
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({"dlogits_dtype": "bf17"}, "dlogits_dtype"),
        ({"dlogits": np.zeros(1, np.float32)}, "dlogits"),
        ({"dlm_head": zeros["lm_head"].T.copy()}, "dlm_head"),
    ]
    for wrong, field in wrongs:
        with pytest.raises(assay.OutputError) as error:
            problem.check(outputs | wrong)
        assert error.value.field == field


class NoMemory:
    """An array at address 0, as a tensor without storage is."""

    __array_interface__ = {"version": 3, "data": (0, False), "shape": (2, 8, 1023), "strides": None, "typestr": "<f4"}


@pytest.mark.parametrize(
    ("change", "field", "said"),
    [
        (lambda outputs: None, "outputs", "expected a dict of loss, dlogits"),
        (lambda outputs: [outputs], "outputs", "list"),
        (lambda outputs: {"loss": 0.0}, "dlogits", "got nothing"),
        (lambda outputs: {"dlogits": outputs["dlogits"]}, "loss", "got nothing"),
        (lambda outputs: outputs | {"dlogit": 0.0}, "dlogit", "is `dlogits` meant?"),
        (lambda outputs: outputs | {"loss": None}, "loss", "NoneType"),
        (lambda outputs: outputs | {"loss": "0.5"}, "loss", "str"),
        (lambda outputs: outputs | {"loss": np.zeros(2, np.float32)}, "loss", "expected a scalar"),
        (lambda outputs: outputs | {"dlogits": outputs["dlogits"][0]}, "dlogits", "[2, 8, 1023]"),
        (lambda outputs: outputs | {"loss": 0}, "loss", "0, an integer of Python"),
        (lambda outputs: outputs | {"dlogits": outputs["dlogits"][..., :-1]}, "dlogits", "shape [2, 8, 1022]"),
        (lambda outputs: outputs | {"dlogits": np.asfortranarray(outputs["dlogits"])}, "dlogits", "strides"),
        (lambda outputs: outputs | {"dlogits": NoMemory()}, "dlogits", "NoMemory without memory of its own"),
        (lambda outputs: outputs | {"dlogits": np.zeros((2, 8, 1023), np.int32)}, "dlogits", "int32"),
        (lambda outputs: outputs | {"dlogits": np.zeros((2, 8, 1023), ">f4")}, "dlogits", "float32, with its bytes in big-endian"),
        (lambda outputs: outputs | {"dlogits": np.zeros((2, 8, 1023), object)}, "dlogits", "Python objects"),
        (lambda outputs: outputs | {"dlogits": np.zeros((2, 8, 1023), np.complex64)}, "dlogits", "complex64"),
        (lambda outputs: outputs | {"logp": np.zeros((8, 2), np.float32)}, "logp", "[B,T]"),
    ],
)
def test_an_output_that_cannot_be_judged_is_named(
    problem: assay.Problem, change: Callable[[dict[str, Any]], Any], field: str, said: str
) -> None:
    with pytest.raises(assay.OutputError) as error:
        problem.check(change(honest(problem)))
    assert error.value.field == field
    assert said in str(error.value)


def test_a_grade_and_an_edge_that_there_is_not_are_named(problem: assay.Problem) -> None:
    with pytest.raises(assay.AssayError, match="exact"):
        problem.check(zeros(problem), grade="best")
    with pytest.raises(assay.AssayError, match="overflow"):
        problem.check(zeros(problem), allow=["overflows"])


def test_jax_outputs_are_read_where_they_lie(problem: assay.Problem) -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    outputs = {name: jax.numpy.asarray(array) for name, array in honest(problem).items()}
    assert problem.check(outputs)
    # What is still being computed is waited for.
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 2000, lambda _, y: y + 0, x))
    assert problem.check(outputs | {"dlogits": slow(outputs["dlogits"])})


def test_torch_outputs_are_read_where_they_lie(problem: assay.Problem) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    outputs = {name: torch.from_numpy(np.asarray(array, np.float32)) for name, array in honest(problem).items()}
    outputs["dlogits"] = outputs["dlogits"].to(torch.bfloat16)
    assert problem.check(outputs)
    # A loss may wait for its backward pass, and numbers may be noted as negated.
    assert problem.check(outputs | {"loss": outputs["loss"].clone().requires_grad_()})
    assert problem.check(outputs | {"dlogits": torch._neg_view(-outputs["dlogits"])})
    assert not problem.check(outputs | {"dlogits": torch._neg_view(outputs["dlogits"])})
    for name, tensor, said in [
        ("dlogits", outputs["dlogits"].float().requires_grad_(), "requires a gradient"),
        ("dlogits", without_storage(torch, outputs["dlogits"]), "without memory of its own"),
        ("dlogits", torch.zeros((2, 8, 1023), device="meta"), "meta"),
        ("dlogits", torch.zeros((2, 1023, 8)).transpose(1, 2), "strides"),
        ("dlogits", torch.zeros((2, 8, 1023), dtype=torch.int64), "int64"),
        ("dlogits", torch.zeros((2, 8, 1023)).to_sparse(), "Tensor"),
    ]:
        with pytest.raises(assay.OutputError) as error:
            problem.check(outputs | {name: tensor})
        assert error.value.field == name and said in str(error.value), str(error.value)


def without_storage(torch: Any, tensor: Any) -> Any:
    """A subclass that wraps a tensor and has no memory itself, as quantized and distributed ones are."""

    class Wrapper(torch.Tensor):  # type: ignore[misc]
        @staticmethod
        def __new__(cls, inner: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        @classmethod
        def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
            raise RuntimeError("not implemented")

    return Wrapper(tensor)


def in_child(problem: assay.Problem, answers: Any) -> None:
    try:
        answers.put(bool(problem.check(honest(problem))))
    except assay.AssayError as error:
        answers.put(str(error))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
def test_a_fork_after_it_computed_is_an_error_and_no_hang(problem: assay.Problem) -> None:
    assert problem.check(honest(problem))
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=in_child, args=(problem, answers))
    child.start()
    try:
        answer = answers.get(timeout=60)
    finally:
        child.kill()
    assert "fork" in answer and "spawn" in answer
