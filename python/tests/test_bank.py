"""The bank of wrong kernels in `tests/bank`: one of each kind, on problems that are few. `make campaign-bank` runs all of it."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import assay

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "bank"))
import_module("wrong")
PLAIN = import_module("plain").plain
KERNELS: list[Any] = list(import_module("entries").BANK)
BY_NAME = {kernel.name: kernel for kernel in KERNELS}

# The problems by which each is found: the first of the deck, which deals what is most telling first, or some of its second round.
FIRST: dict[str, Any] = {"n": 22}
SECOND: dict[str, Any] = {"first": 108, "n": 22}
FEW: dict[str, dict[str, Any]] = {
    "last_full_tile_of_4096_lost": {"n": 2, "shapes": ["1x2x8192"]},
    "ids_in_16_bits": {"n": 2, "shapes": ["1x4x100352"]},
    "wide_bf16_not_upcast": {"n": 2, "shapes": ["1x2x100352"], "dtypes": ["bf16"]},
    "last_block_of_32_tokens_has_no_gradient": FIRST,
    "advantage_of_row_mod_32": FIRST,
    "tail_of_16_units_dropped": {"n": 3},
    "log_of_softmax": FIRST,
    "chunks_merged_by_log1p": FIRST,
    "mean_over_padding": {"n": 3},
    "both_branches_at_a_bound": SECOND,
    "log_ratio_clamped": SECOND,
    "divided_by_steps_again": {"n": 3},
    "sum_in_bf16": {"n": 3},
}


def passes(kernel: Any, problems: dict[str, Any], options: dict[str, Any]) -> bool:
    dealt = assay.problems(**problems, **options)
    return all(problem.check(kernel(problem)) for problem in dealt if problem.numpy().mask.any())


@pytest.mark.parametrize("name", FEW)
def test_bank_kernel_fails_few_problems_and_plain_passes(name: str) -> None:
    kernel = BY_NAME[name]
    assert not kernel.harmless
    assert not passes(kernel.fn, FEW[name], kernel.options)
    assert passes(PLAIN, FEW[name], kernel.options)


@pytest.mark.parametrize(
    ("name", "cases", "said"), [("count_kept_by_address", 1, "stale-memory"), ("mean_over_nothing", 40, "no token counts")]
)
def test_bank_kernel_fails_a_campaign(name: str, cases: int, said: str) -> None:
    options: dict[str, Any] = {"wide": 0, "power": False, "shrink": False, "repro_dir": None, "progress": False}
    report = assay.check(BY_NAME[name].fn, cases=cases, **options)
    assert [said in f"{cause.gate} in {cause._data['first']}" for cause in report.causes] == [True], report
    assert assay.check(PLAIN, cases=cases, **options).passed


def test_bank_selection_has_every_kind() -> None:
    kinds = {BY_NAME[name].kind for name in FEW} | {"memory"}
    assert kinds == {kernel.kind for kernel in KERNELS if kernel.kind != "callers"}


def test_bank_explains_each_kernel_once() -> None:
    assert len(BY_NAME) == len(KERNELS)
    for kernel in KERNELS:
        assert kernel.is_wrong_by, kernel.name
        re.compile(kernel.says)


def test_bank_gaps_are_kernels_of_the_bank_with_a_reason() -> None:
    callers = (Path(__file__).parents[2] / "tests" / "bank" / "callers.py").read_text()
    for name, reason in import_module("entries").gaps().items():
        assert reason and (name in BY_NAME or name in callers), name
        assert name not in BY_NAME or not BY_NAME[name].harmless, name


def test_bank_finds_a_misleading_cause() -> None:
    kernel = BY_NAME["divided_by_steps_again"]
    right = {"diagnoses": ["dlogits are 0.25 times what they should be, the loss 0.25 times: 1/4, as of accumulation"], "computes": [], "like": []}
    wrong = {"diagnoses": ["only the target has a gradient"], "computes": [], "like": [{"mutant": "length-factor"}]}
    assert kernel.misleading([right]) == []
    assert kernel.misleading([right, wrong]) == ["likely only the target has a gradient", "like length-factor"]
