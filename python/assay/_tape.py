"""The arithmetic between the logits and their gradient, by a framework's own operations: the extension's formulas, which it writes down as
lists of operations, and the sums over them.

`on` is the framework's module, `jax.numpy`, `numpy` or `torch`: what is called of it has the same name in all.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Array = Any

_OPERATORS: dict[str, Callable[..., Array]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "neg": operator.neg,
    "less": operator.lt,
    "equal": operator.eq,
    "and": operator.and_,
    "or": operator.or_,
}
_FUNCTIONS = {"exp": "exp", "exp_m1": "expm1", "ln": "log", "ln_1p": "log1p", "select": "where"}


def compute(
    on: Any,
    tape: Mapping[str, Any],
    inputs: Mapping[str, Array],
    constant: Callable[[float], Array],
    row_sum: Callable[[Array], Array] | None = None,
) -> dict[str, Array]:
    """The outputs of a list of operations, in the dtype of its inputs, which `constant` makes of a number too."""
    values: list[Array] = []
    for name, operands in tape["operations"]:
        if name == "input":
            values.append(inputs[operands])
        elif name == "constant":
            values.append(constant(float(operands)))
        elif name == "row_sum":
            assert row_sum is not None
            values.append(row_sum(values[operands[0]]))
        else:
            operation = _OPERATORS[name] if name in _OPERATORS else getattr(on, _FUNCTIONS[name])
            values.append(operation(*(values[operand] for operand in operands)))
    return {name: values[place] for name, place in tape["outputs"]}


class RowWeights(NamedTuple):
    """The factors of each sequence's terms, 0 for a sequence without tokens."""

    policy: Array
    kl_share: Array
    entropy: Array


def row_weights(
    on: Any,
    plan: Mapping[str, Any],
    counts: Array,
    total: Callable[[Array], Array],
    sequences: Array | float,
    normalizer: Array | float = 1.0,
) -> RowWeights:
    """Computes the weights of `sequences` sequences with `counts` tokens each; `total` sums over the batch. The policy's weights are
    divided by `normalizer`."""
    filled, one = counts > 0.0, on.ones_like(counts)

    def at_least_one(number: Array) -> Array:
        return on.where(number > 1.0, number, on.ones_like(number))

    def weight(divisor: Mapping[str, Any]) -> Array:
        over = one
        if divisor["tokens"] == "row":
            over = counts + divisor["epsilon"]
        elif divisor["tokens"] == "batch":
            over = at_least_one(total(counts)) + divisor["epsilon"]
        number = divisor["number"]
        if divisor["rows"] == "filled":
            over = over * at_least_one(total(on.where(filled, one, 0.0)))
        elif divisor["rows"] == "all":
            number = number * sequences
        return on.where(filled, 1.0 / (over * number), 0.0)

    policy = weight(plan["policy"]) / normalizer
    kl_share = one if plan["kl"] is None else on.where(filled, weight(plan["kl"]) / policy, 0.0)
    entropy = on.zeros_like(counts) if plan["entropy"] is None else -plan["entropy_coef"] * weight(plan["entropy"])
    return RowWeights(policy, kl_share, entropy)


def weighed(on: Any, mask: Array, terms: Mapping[str, Array], policy: Array, entropy: Array) -> Array:
    """Computes the term of each token in the loss. A weight of 0 gives 0, also for infinite terms."""
    pairs = ((policy, terms["reduced"]), (entropy, terms["entropy"]))
    first, second = (on.where(mask & (factor != 0.0), factor * term, 0.0) for factor, term in pairs)
    return first + second


def logged(on: Any, plan: Mapping[str, Any], of: Mapping[str, Array]) -> dict[str, Array]:
    """Computes the metrics of each token, whose mean over the tokens that count trainers log; clips are 1 or 0."""
    low, high = of["clipped_low"], of["clipped_high"]
    values = {"entropy_mean": of["entropy"], "ratio_mean": of["ratio"]}
    if plan["has_kl"]:
        values["kl_mean"] = of["kl"]
    values.update(clip_low=low, clip_high=high, clip_region=on.where(low > high, low, high))
    return values
