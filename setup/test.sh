#!/usr/bin/env bash
# `cargo test` with its arguments, two of its binaries beside one another, and then the slowest tests of them all.
set -euo pipefail
cd "$(dirname "$0")/.."

export ASSAY_TEST_RUNS=$PWD/target/assay/tests
rm -rf "$ASSAY_TEST_RUNS"
mkdir -p "$ASSAY_TEST_RUNS"
touch "$ASSAY_TEST_RUNS/"{pids,failed}
# Candle's own pool has its threads spin between two operations, four fifths of the processor's time at a test's sizes, and without a
# number of threads it reads the kernel's list of processors before each product.
export CANDLE_NUM_THREADS=${CANDLE_NUM_THREADS:-1} RAYON_NUM_THREADS=${RAYON_NUM_THREADS:-$(getconf _NPROCESSORS_ONLN)}
# What was started beside is not ended by a key.
trap 'xargs -r kill <"$ASSAY_TEST_RUNS/pids"; exit 130' INT TERM

log=target/assay/tests.log
# The log ends when the last of them has.
"${CARGO:-cargo}" --config "target.'cfg(all())'.runner = ['$PWD/setup/beside.sh']" test "$@" 2>&1 | tee "$log"

echo
echo "The slowest tests, in seconds:"
# libtest: `test NAME ... ok <1.234s>`; the harnesses that make their own trials: `took <1.234s> NAME`.
sed -nE 's/^test (.*) \.\.\. .*<([0-9.]+)s>$/\2 \1/p; s/^took <([0-9.]+)s> (.*)$/\1 \2/p' "$log" | sort -rn | sed -n 1,20p

if [ -s "$ASSAY_TEST_RUNS/failed" ]; then
	cat "$ASSAY_TEST_RUNS/failed" >&2
	exit 1
fi
