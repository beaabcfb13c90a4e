"""Records of benches: what got slower is told by ratios alone."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

_PATH = Path(__file__).parents[2] / "benches/record.py"
_SPEC = importlib.util.spec_from_file_location("record", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
record: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(record)


def write(folder: Path, own: float, copy: float, ratio: float) -> Path:
    folder.mkdir()

    def times(median: float) -> dict[str, Any]:
        return {"calls": 5, "median": median, "least": median, "p90": median}

    programs = [{"name": "mine", "times": times(own)}, {"name": "absent", "why_untimed": "it is not installed"}]
    table = {"logits_bytes": 8, "bound": {"name": "a copy of the logits", "times": times(copy)}, "programs": programs}
    (folder / "torch.json").write_text(json.dumps(table))
    command = {"impl": "native", "step_s_p50": own, "ratio_to_copy": ratio}
    (folder / "native-f32.json").write_text(json.dumps(command))
    return folder


def test_only_ratios_that_grew_are_slower(tmp_path: Path) -> None:
    before = write(tmp_path / "before", 2.0, 1.0, 1.2)
    # A machine that is three times as fast, and a kernel that is as near to its copy as before.
    same = write(tmp_path / "same", 0.7, 0.35, 1.31)
    assert record.compare(before, same) == ["2 ratios compared, 0 slower by more than 10 %, 0 no longer timed"]
    slower = write(tmp_path / "slower", 2.3, 1.0, 1.33)
    assert record.compare(before, slower) == [
        "2 ratios compared, 2 slower by more than 10 %, 0 no longer timed",
        "native-f32: ratio_to_copy: 1.20 × before, 1.33 × now",
        "torch: mine: 2.00 × before, 2.30 × now",
    ]


def test_what_is_no_longer_timed_is_told(tmp_path: Path) -> None:
    before, after = write(tmp_path / "before", 2.0, 1.0, 1.2), write(tmp_path / "after", 2.0, 1.0, 1.2)
    table = json.loads((after / "torch.json").read_text())
    wrong = {"name": "mine", "outcome": "wrong", "why_untimed": "loss"}
    (after / "torch.json").write_text(json.dumps(table | {"bound": None, "programs": [wrong]}))
    assert record.compare(before, after) == [
        "1 ratios compared, 0 slower by more than 10 %, 1 no longer timed",
        "torch: mine: 2.00 × before, and not timed now",
    ]
    assert list(record.tables(after))[1:] == ["| native-f32: native | 2000.0 | 1.200 (copy) | – |"]


def test_records_without_a_table_in_common_are_no_comparison(tmp_path: Path) -> None:
    before = write(tmp_path / "before", 2.0, 1.0, 1.2)
    (tmp_path / "empty").mkdir()
    for pair in [(tmp_path / "empty", before), (before, tmp_path / "empty")]:
        with pytest.raises(SystemExit, match="compare: got"):
            record.compare(*pair)


def test_a_record_has_its_tables_as_markdown(tmp_path: Path) -> None:
    lines = list(record.tables(write(tmp_path / "one", 2.0, 1.0, 1.2)))
    assert lines[1:] == [
        "| native-f32: native | 2000.0 | 1.200 (copy) | – |",
        "| torch: mine | 2000.0 | 2.00 | – |",
        "| torch: a copy of the logits | 1000.0 | 1 | – |",
    ]
