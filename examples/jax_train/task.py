"""Word problems as those of `assay train`, in bytes: `Tom has 3, wants 5:` is answered ` #### 3` and an end."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

END = 256
NAMES = ("Ann", "Ben", "Kim", "Tom")


class Exercise(NamedTuple):
    prompt: str
    answer: int


def exercises(rng: np.random.Generator, count: int, largest: int, pairs: list[tuple[int, int]]) -> list[Exercise]:
    """All prompts have one length: numbers have one digit."""
    if not 1 <= largest <= 9:
        raise SystemExit(f"task.largest: got {largest}, expected 1 to 9")
    chosen = [pairs[i] for i in rng.integers(0, len(pairs), count)]
    return [Exercise(f"{NAMES[rng.integers(len(NAMES))]} wants {a}, has {b}:", a) for a, b in chosen]


def split(rng: np.random.Generator, largest: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Pairs to train on, and others to evaluate."""
    pairs = [(a, b) for a in range(1, largest + 1) for b in range(1, largest + 1)]
    rng.shuffle(pairs)
    held = max(1, len(pairs) // 5)
    return pairs[held:], pairs[:held]


def encode(texts: list[str]) -> np.ndarray:
    return np.array([list(text.encode()) for text in texts], np.int32)


def reward(completion: np.ndarray, exercise: Exercise) -> tuple[float, float]:
    """For the answer 1; for the format ½ for one `####`, and ½ for nothing but one number after it."""
    ends = np.flatnonzero(completion == END)
    text = bytes(int(byte) % 256 for byte in completion[: ends[0] if len(ends) else None]).decode(errors="replace")
    number = re.fullmatch(r"\s*(-?\d+)\s*", text.rpartition("####")[2]) if "####" in text else None
    of_format = 0.5 * (text.count("####") == 1) + 0.5 * (number is not None and len(ends) > 0)
    return float(number is not None and int(number[1]) == exercise.answer), of_format
