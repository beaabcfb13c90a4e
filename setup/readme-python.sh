#!/usr/bin/env bash
# The README's Python example, from the wheel in dist, in a virtual environment of its own.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --disable-pip-version-check --quiet numpy ml_dtypes dist/*.whl
sed -n '/^```python$/,/^```$/p' README.md | sed '/^```/d' >"$folder/example.py"
cd "$folder"
venv/bin/python example.py
# The command comes with the package.
venv/bin/assay --version
