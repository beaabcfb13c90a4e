"""NumPy."""

from collections.abc import Callable

import numpy as np

from grpo import closed_form, total
from protocol import Outputs, Problem, Tokens, versions

ABOUT = versions("numpy")


def compute(problem: Problem, real: type, *, gaps: bool, total: Callable = total) -> Outputs:
    tokens = Tokens(*(array if array.dtype.kind == "i" else array.astype(real) for array in problem.tokens))
    logits: np.ndarray = problem.logits.astype(real)
    take = np.take_along_axis
    with np.errstate(all="ignore"):
        values = closed_form(np, take, logits, tokens, problem.form, problem.numbers, gaps=gaps, total=total)
    rounded = {name: np.asarray(array, np.float32) for name, array in values.items()}
    return {**rounded, "dlogits": values["dlogits"].astype(problem.logits.dtype)}


def textbook(problem: Problem) -> Outputs:
    return compute(problem, np.float32, gaps=False)


def gaps(problem: Problem) -> Outputs:
    return compute(problem, np.float32, gaps=True)


def float64(problem: Problem) -> Outputs:
    return compute(problem, np.float64, gaps=False)


def naive_sum(problem: Problem) -> Outputs:
    return compute(problem, np.float32, gaps=False, total=lambda x: np.add.accumulate(x, -1)[..., -1:])
