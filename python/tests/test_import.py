from __future__ import annotations

import subprocess
import sys


def test_no_framework_is_imported_with_the_package() -> None:
    code = "import sys, assay; print(sorted({'numpy', 'torch', 'jax', 'pytest', 'json'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_it_is_imported_within_20_ms() -> None:
    code = "import time; start = time.perf_counter(); import assay; print(time.perf_counter() - start)"

    def seconds() -> float:
        return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)

    # The best of several: the machine may be busy.
    assert min(seconds() for _ in range(10)) < 0.020
