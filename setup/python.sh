#!/usr/bin/env bash
# The Python package's types and tests, with the extension of target/debug: links to it and to the package's sources make up
# target/python/package. Usage: setup/python.sh VENV [pytest's arguments]
set -euo pipefail
cd "$(dirname "$0")/.."

python=$PWD/$1/bin/python
shift
extension=$PWD/target/debug/lib_native.so
[ -f "$extension" ] || { echo "$extension is not there: run \`cargo build --all-features\`" >&2; exit 1; }
package=$PWD/target/python/package
rm -rf "$package"
mkdir -p "$package/assay"
ln -s "$PWD"/python/assay/*.py* "$package/assay"
ln -s "$extension" "$package/assay/_native.abi3.so"

export PYTHONPATH=$package MYPYPATH=$package PYTHONDONTWRITEBYTECODE=1
"$python" -m mypy --config-file python/pyproject.toml --cache-dir target/python/mypy python/assay python/tests
"$python" -m mypy.stubtest --mypy-config-file python/pyproject.toml --allowlist python/tests/stubs_allowed.txt assay._native
# Tests of a file stay together: they share what is compiled.
"$python" -m pytest -n auto --dist loadfile -c python/pyproject.toml -p no:cacheprovider -q -r s --durations 5 python/tests "$@"
