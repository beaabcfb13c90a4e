#!/usr/bin/env bash
# The README's Python example, from the wheel in dist, in a virtual environment of its own.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --disable-pip-version-check --quiet numpy dist/*.whl
sed -n '/^```python$/,/^```$/p' README.md | sed '/^```/d' >"$folder/example.py"
cd "$folder"
venv/bin/python example.py
# The command comes with the package: what needs no plugin works, and what needs one says so.
venv/bin/assay --version
venv/bin/assay emit --shape 1x8x4096 --target h100 -o kernel
venv/bin/assay compile --target h100 2>&1 | tee compile.txt || true
grep -q "make setup" compile.txt
