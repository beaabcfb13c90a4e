#!/usr/bin/env bash
# The figures behind `worst_seen` of class `external`: judge_jax.py over shapes, regimes and dtypes.
# Needs `assay` on the path and a Python with jax and safetensors. Prints the largest κ needed by gate.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
# Many rows of two columns: one non-target error is then the whole row's norm, with nothing to average it away.
for shape in 512x512x2 64x16x3 3x5x97 4x8x1023 4x8x2049 2x4x151936; do
  for regime in small normal peaked negative confident holes ties shifted_up shifted_down; do
    for dtype in f32 bf16 f16; do
      assay generate --quiet --shape $shape --regime $regime --dtype $dtype --seed 1 -o problem.safetensors
      python3 "$here/judge_jax.py" problem.safetensors candidate.safetensors
      assay judge --quiet --problem problem.safetensors --candidate candidate.safetensors \
        --json "$shape-$regime-$dtype.json" || true
    done
  done
done
python3 - *.json <<'END'
import json, sys
worst = {}
for path in sys.argv[1:]:
    for check in json.load(open(path))["checks"]:
        dtype = path.split("-")[2].split(".")[0] if check["output"].startswith("dlogits") else "f32"
        key = (check["output"], dtype)
        worst[key] = max(worst.get(key, (0.0, "")), (check["kappa_needed"], path))
for (output, dtype), (kappa, path) in sorted(worst.items()):
    print(f"{output:16} {dtype:5} {kappa:9.4f}  {path}")
END
