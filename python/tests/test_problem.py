from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from kernels import honest

import assay


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_the_same_arguments_give_the_same_problems_and_another_seed_others() -> None:
    def bits(seed: int) -> list[bytes]:
        return [problem.numpy().logits.tobytes() for problem in assay.problems("trl", 3, seed)]

    assert bits(1) == bits(1)
    assert bits(1) != bits(2)
    assert len(set(bits(1))) == 3


@pytest.mark.parametrize("dtype", ["bf16", "f32", "f16"])
def test_numpy_is_lent_the_memory_read_only(one: Callable[..., assay.Problem], dtype: str) -> None:
    problem = one(dtype)
    arrays = problem.numpy()
    assert str(arrays.logits.dtype) == {"bf16": "bfloat16", "f32": "float32", "f16": "float16"}[dtype]
    assert arrays.logits.shape == problem.shape == problem.logits.shape == (2, 8, 1023)
    assert problem.dtype == problem.logits.dtype == dtype
    assert address(arrays.logits) == address(problem.numpy().logits), "lent, not copied"
    assert not arrays.logits.flags.writeable
    with pytest.raises(ValueError):
        arrays.old_logp[0, 0] = 0
    assert (arrays.mask.dtype, arrays.ids.dtype, arrays.old_logp.dtype) == (np.bool_, np.int64, np.float32)
    for absent in ("hidden", "rollout_logp"):
        for holder in (problem, arrays):
            with pytest.raises(AttributeError, match=f"no `{absent}`, expected one of logits, ids"):
                getattr(holder, absent)


def test_bf16_without_ml_dtypes_are_bits_under_a_name_that_says_so(
    problem: assay.Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = problem.numpy().logits.view(np.uint16)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    arrays = problem.numpy()
    assert np.array_equal(arrays.logits_bits, expected)
    with pytest.raises(AttributeError, match="logits_bits"):
        arrays.logits


def test_what_is_lent_outlives_its_problem(one: Callable[..., assay.Problem]) -> None:
    problem = one("f32")
    logits, old_logp = problem.numpy().logits, problem.numpy().old_logp
    copies = logits.copy(), old_logp.copy()
    del problem
    gc.collect()
    others = [one("f32", seed=seed) for seed in range(1, 20)]
    assert np.array_equal(logits, copies[0]) and np.array_equal(old_logp, copies[1])
    del others


@pytest.mark.parametrize("shape", ["1x1x1", "1x3x5", "2x8x257", "3x7x1023", "1x4x16x257"])
def test_numpy_reads_the_capsule_too(one: Callable[..., assay.Problem], shape: str) -> None:
    problem = one("f32", shape)
    for name in ("logits", "hidden", "lm_head", "ids", "mask", "advantages", "old_logp"):
        array = getattr(problem, name, None)
        if array is None:
            continue
        by_capsule = np.from_dlpack(array)
        assert np.array_equal(by_capsule, np.asarray(array)) and not by_capsule.flags.writeable, name
        assert address(by_capsule) == address(np.asarray(array)), name


def test_a_capsule_that_nobody_takes_is_given_back(problem: assay.Problem) -> None:
    for _ in range(1000):
        problem.logits.__dlpack__()
        problem.logits.__dlpack__(max_version=(1, 0))
    with pytest.raises(BufferError, match="dl_device"):
        problem.logits.__dlpack__(dl_device=(2, 0))


def test_a_copy_is_anothers_to_write_to(one: Callable[..., assay.Problem]) -> None:
    problem = one("f32")
    copy: np.ndarray = np.from_dlpack(problem.logits, copy=True)
    before = np.asarray(problem.logits).copy()
    copy[...] = 0
    assert np.array_equal(np.asarray(problem.logits), before)


@pytest.mark.parametrize("dtype", ["bf16", "f32", "f16"])
def test_jax_takes_it_without_a_copy(one: Callable[..., assay.Problem], dtype: str) -> None:
    pytest.importorskip("jax", reason="JAX is not installed")
    problem = one(dtype)
    logits = problem.jax().logits
    assert logits.unsafe_buffer_pointer() == address(problem.numpy().logits)
    assert np.array_equal(np.asarray(logits), problem.numpy().logits)


@pytest.mark.parametrize("dtype", ["bf16", "f32", "f16"])
def test_torch_takes_it_without_a_copy(one: Callable[..., assay.Problem], dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    problem = one(dtype)
    arrays = problem.torch()
    assert arrays.logits.data_ptr() == address(problem.numpy().logits)
    expected = problem.numpy().logits.astype(np.float32)
    assert torch.equal(arrays.logits.float(), torch.from_numpy(expected))
    assert (arrays.ids.dtype, arrays.mask.dtype) == (torch.int64, torch.bool)


@pytest.mark.parametrize("shape", ["2x8x257", "2x4x16x257"])
def test_a_file_holds_the_same_problem_and_spec(
    one: Callable[..., assay.Problem], tmp_path: Path, shape: str
) -> None:
    problem = one("bf16", shape)
    path = tmp_path / "problem.safetensors"
    problem.save(path)
    read = assay.load(path)
    assert (read.spec, read.shape, read.dtype, read.layout) == (problem.spec, problem.shape, problem.dtype, problem.layout)
    assert read.recipe == problem.recipe is not None
    assert vars(read.numpy()).keys() == vars(problem.numpy()).keys()
    for name, array in vars(problem.numpy()).items():
        assert np.asarray(getattr(read, name)).tobytes() == array.tobytes(), name


def test_a_part_is_a_problem_of_its_own(one: Callable[..., assay.Problem]) -> None:
    problem = one("bf16", "3x5x257")
    part = problem.select(batch=[2, 0], tokens=range(1, 4), columns=range(256, -1, -2))
    assert (part.shape, part.dtype, part.recipe, part.spec) == ((2, 3, 129), "bf16", None, problem.spec)
    whole, arrays = problem.numpy(), part.numpy()
    assert np.array_equal(arrays.logits, whole.logits[[2, 0], 1:4, ::-2])
    assert np.array_equal(arrays.advantages, whole.advantages[[2, 0]])
    ids, mask = whole.ids[[2, 0], 1:4], whole.mask[[2, 0], 1:4]
    assert np.array_equal(arrays.ids, np.where(ids % 2 == 0, (256 - ids) // 2, -1))
    assert np.array_equal(arrays.mask, mask & (ids % 2 == 0))
    assert np.array_equal(problem.select().numpy().logits, whole.logits)
    assert problem.select(batch=[1]).check(honest(problem.select(batch=[1])))


def test_a_part_of_a_problem_with_an_lm_head_has_some_of_its_units(one: Callable[..., assay.Problem]) -> None:
    problem = one("f32", "2x3x16x33")
    part = problem.select(tokens=[2], columns=range(30), units=[3, 1])
    assert part.shape == (2, 1, 2, 30)
    assert np.array_equal(part.numpy().hidden, problem.numpy().hidden[:, 2:, [3, 1]])
    assert np.array_equal(part.numpy().lm_head, problem.numpy().lm_head[:30, [3, 1]])


def test_a_problem_is_simplified_while_a_question_is_answered_with_yes(problem: assay.Problem) -> None:
    def has_a_negative(part: assay.Problem) -> bool:
        arrays = part.numpy()
        return bool((arrays.mask & (arrays.advantages < 0)[:, None] & (arrays.ids > 0)).any())

    simple = problem.simplify(has_a_negative)
    assert has_a_negative(simple) and simple.shape == (1, 1, 2) and simple.spec == problem.spec
    assert simple.numpy().advantages.tolist() == [-1.0]
    asked = []

    def counted(part: assay.Problem) -> bool:
        asked.append(part.shape)
        return has_a_negative(part)

    kept = problem.simplify(counted, calls=3)
    assert len(asked) == 4 and np.prod(kept.shape) > np.prod(simple.shape)
    with pytest.raises(assay.ProblemError, match="fails: got no of the problem itself"):
        problem.simplify(lambda _: False)
    with pytest.raises(ZeroDivisionError):
        problem.simplify(lambda part: part.shape == problem.shape or 1 / 0)


def test_a_problem_with_an_lm_head_is_simplified(one: Callable[..., assay.Problem]) -> None:
    simple = one("f32", "2x3x16x33").simplify(lambda part: part.numpy().mask.any())
    assert (simple.shape[0], simple.shape[1], simple.shape[3]) == (1, 1, 1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"batch": [2]}, "batch: got 2, expected indices below 2"),
        ({"tokens": [0, -1]}, "tokens: got -1, expected indices below 8"),
        ({"columns": []}, "columns: got none, expected indices below 1023"),
        ({"units": [0]}, "units: got some of a problem with logits, expected an LM head"),
    ],
)
def test_a_part_that_there_is_not_is_named(problem: assay.Problem, given: dict[str, list[int]], said: str) -> None:
    with pytest.raises(assay.ProblemError) as error:
        problem.select(**given)
    assert said in str(error.value)


def test_another_spec_is_taken_for_a_file(problem: assay.Problem, tmp_path: Path) -> None:
    path = tmp_path / "problem.safetensors"
    problem.save(path)
    assert assay.load(path, "trl", beta=0.04).spec == assay.spec("trl", beta=0.04)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda: next(assay.problems("trl", 1, dtypes=["f31"])), "f31"),
        (lambda: next(assay.problems("trl", 1, shapes=["2x3"])), "BxTxV"),
        (lambda: next(assay.problems("trl", 1, shapes=["1x99999999x999999999"])), "memory"),
        (lambda: next(assay.problems("trl", 1, regimes=["normale"])), "normal"),
        (lambda: assay.load("nowhere.safetensors"), "nowhere.safetensors"),
        (lambda: assay.load(__file__), "test_problem.py"),
    ],
)
def test_what_is_wrong_is_named(given: object, said: str) -> None:
    with pytest.raises(assay.ProblemError) as error:
        given()  # type: ignore[operator]
    assert said in str(error.value)
