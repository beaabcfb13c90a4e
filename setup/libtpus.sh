#!/usr/bin/env bash
# The kernels and xla compiled with two versions of libtpu, as the table of docs/tpu.md: bf16, 1x4096x151936 for each device.
# Usage: setup/libtpus.sh VERSION=libtpu.so VERSION=libtpu.so
set -euo pipefail
cd "$(dirname "$0")/.."

[ $# = 2 ] || { echo "usage: setup/libtpus.sh VERSION=FILE VERSION=FILE" >&2; exit 2; }
names=("${1%%=*}" "${2%%=*}") libraries=("${1#*=}" "${2#*=}")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

echo "| program | target | cycles, ${names[0]} | ${names[1]} | peak bytes, ${names[0]} | ${names[1]} |"
echo "|---|---|---|---|---|---|"
for row in xla:v6e:2x4 tile-one-pass:v6e:2x4 tile-two-pass:v6e:2x4 tile-one-pass:v5e tile-one-pass:v5p tile-one-pass:v7x; do
	cycles=() peaks=()
	for library in "${libraries[@]}"; do
		"${ASSAY:-target/release/assay}" compile -q --impl "${row%%:*}" --target "${row#*:}" --shape 1x4096x151936 \
			--libtpu "$library" --json "$scratch/figures.json"
		cycles+=("$("${PYTHON:-python3}" -c 'import json, sys; print(json.load(open(sys.argv[1]))["cycles"])' "$scratch/figures.json")")
		peaks+=("$("${PYTHON:-python3}" -c 'import json, sys; print(json.load(open(sys.argv[1]))["memory"]["peak_bytes"])' "$scratch/figures.json")")
	done
	echo "| \`${row%%:*}\` | ${row#*:} | ${cycles[0]} | ${cycles[1]} | ${peaks[0]} | ${peaks[1]} |"
done
