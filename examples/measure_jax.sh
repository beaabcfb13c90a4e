#!/usr/bin/env bash
# The figures behind `worst_seen` of the classes `external` and `external-lm-head`: judge_jax.py and judge_head_jax.py over
# shapes, regimes and dtypes. Needs `assay` on the path and a Python with jax and safetensors. Prints the largest κ needed
# by class and gate.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
mkdir external external-lm-head

# judged CLASS EXAMPLE NAME OPTION...
judged() {
  local class=$1 example=$2 name=$3
  shift 3
  assay generate --quiet --seed 1 "$@" -o problem.safetensors
  python3 "$here/$example" problem.safetensors candidate.safetensors
  assay judge --quiet --problem problem.safetensors --candidate candidate.safetensors --json "$class/$name.json" || true
}

for dtype in f32 bf16 f16; do
  for regime in small normal peaked negative confident ties shifted_up shifted_down holes; do
    # Many rows of two columns: one non-target error is then the whole row's norm, with nothing to average it away.
    for shape in 512x512x2 64x16x3 3x5x97 4x8x1023 4x8x2049 2x4x151936; do
      judged external judge_jax.py "$shape-$regime-$dtype" --shape $shape --regime $regime --dtype $dtype
    done
    # A product is no −∞.
    [ $regime = holes ] && continue
    for shape in 64x16x4x3 3x5x33x97 4x8x128x1023 2x4x257x4099; do
      name="$shape-$regime-$dtype"
      judged external-lm-head judge_head_jax.py "$name-hv" --shape $shape --regime $regime --dtype $dtype --layout hv
      judged external-lm-head judge_head_jax.py "$name-vh" --shape $shape --regime $regime --dtype $dtype --layout vh --f32-logits
    done
  done
done
python3 - external*/*.json <<'END'
import json, sys
worst = {}
for path in sys.argv[1:]:
    name = path.split("/")
    for check in json.load(open(path))["checks"]:
        dtype = name[1].split("-")[2].split(".")[0] if check["output"].startswith("d") else "f32"
        key = (name[0], check["output"], dtype)
        worst[key] = max(worst.get(key, (0.0, "")), (check["kappa_needed"], path))
for (of, output, dtype), (kappa, path) in sorted(worst.items()):
    print(f"{of:16} {output:16} {dtype:5} {kappa:9.4f}  {path}")
END
