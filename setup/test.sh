#!/usr/bin/env bash
# `cargo test` with its arguments, and then the slowest tests of all its binaries.
set -euo pipefail
cd "$(dirname "$0")/.."

mkdir -p target/assay
log=target/assay/tests.log
"${CARGO:-cargo}" --config "target.'cfg(all())'.runner = 'setup/timed.sh'" test "$@" 2>&1 | tee "$log"

echo
echo "The slowest tests, in seconds:"
# libtest: `test NAME ... ok <1.234s>`; the harnesses that make their own trials: `took <1.234s> NAME`.
sed -nE 's/^test (.*) \.\.\. .*<([0-9.]+)s>$/\2 \1/p; s/^took <([0-9.]+)s> (.*)$/\1 \2/p' "$log" | sort -rn | sed -n 1,20p
