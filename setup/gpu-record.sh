#!/usr/bin/env bash
# On a machine with an NVIDIA GPU, its driver and no Rust: judges and times the kernels for GPUs there, and keeps a record of it with
# device, driver and date. `make gpu-bundle` makes the folder that this stands in.
#
#   ./gpu-record.sh [--into FOLDER] [--shape BxTxV] [--plugin xla_cuda_plugin.so]
#
# Without a plugin the kernels run through the driver alone. What is not there (compute-sanitizer, ncu, a plugin) reads *ignored*. Ends
# with 1 if anything failed; the record is written all the same, and says so.
set -uo pipefail
called_from=$PWD
cd "$(dirname "$0")"
assay=./assay
into='' shape=1x4096x151936 plugin=${ASSAY_PJRT_PLUGIN:-}
while [ $# -gt 0 ]; do
	case $1 in
	--into | --shape | --plugin) [ $# -gt 1 ] || { echo "$1: a value is missing" >&2; exit 2; } ;;
	esac
	case $1 in
	--into) case $2 in /*) into=$2 ;; *) into=$called_from/$2 ;; esac ;;
	--shape) shape=$2 ;;
	--plugin) case $2 in /*) plugin=$2 ;; *) plugin=$called_from/$2 ;; esac ;;
	*) echo "got \`$1\`, expected --into FOLDER, --shape BxTxV or --plugin FILE" >&2; exit 2 ;;
	esac
	shift 2
done
[ -x "$assay" ] || { echo "assay: not beside this script; make gpu-bundle makes the folder that this stands in" >&2; exit 2; }
[ -z "$plugin" ] || [ -f "$plugin" ] || { echo "--plugin $plugin: no such file" >&2; exit 2; }

# One line, safe in JSON.
words() { tr -d '"\\' | tr -s '[:cntrl:] ' ' ' | sed 's/^ //; s/ $//'; }
asked() { nvidia-smi --query-gpu="$1" --format=csv,noheader -i 0 2>/dev/null | words; }
device=$(asked name) driver=$(asked driver_version)
date=$(date -u +%Y-%m-%d)
: "${device:=unknown: no nvidia-smi}" "${driver:=unknown: no nvidia-smi}"
folder=$(printf %s "${device%%:*}" | tr -c 'A-Za-z0-9' - | tr A-Z a-z)
: "${into:=records/$folder/$date-gpu}"
mkdir -p "$into"

steps='' failed=0
# note NAME OUTCOME COMMAND: a line of the record.
note() {
	steps+="${steps:+,}
    {\"name\": \"$1\", \"outcome\": \"$2\", \"command\": \"$(printf %s "${3//"$into"/RECORD}" | words)\"}"
	echo "$2  $1"
}
# step NAME COMMAND...: runs it, its output in NAME.log.
step() {
	local name=$1
	shift
	if "$@" >"$into/$name.log" 2>&1; then note "$name" passed "$*"; else
		failed=1
		note "$name" failed "$*"
		tail -5 "$into/$name.log"
	fi
}
absent() { note "$1" "ignored: $2" ''; }

ids=(gpu-one-pass-driver gpu-two-pass-driver)
through=()
if [ -n "$plugin" ]; then
	ids+=(gpu-one-pass gpu-two-pass xla)
	through=(--plugin "$plugin")
fi

step list "$assay" list "${through[@]}"
for id in "${ids[@]}"; do
	# A chip without clusters has no one-pass kernel.
	if ! "$assay" list "${through[@]}" | grep -q " $id .* yes "; then
		absent "$id" "it does not run here, list.log says why"
		continue
	fi
	step "replay-$id" "$assay" replay fixtures/*.safetensors --impl "$id" "${through[@]}" -q --json "$into/replay-$id.json"
	for dtype in bf16 f16 f32; do
		step "bench-$id-$dtype" "$assay" bench --impl "$id" --shape "$shape" --dtype "$dtype" "${through[@]}" -q \
			--json "$into/bench-$id-$dtype.json"
	done
	for tool in memcheck racecheck synccheck initcheck; do
		if command -v compute-sanitizer >/dev/null; then
			step "$tool-$id" compute-sanitizer --tool "$tool" --error-exitcode 1 "$assay" bench --impl "$id" --shape 1x16x33001 \
				"${through[@]}" -q
		else
			absent "$tool-$id" "no compute-sanitizer"
		fi
	done
	if command -v ncu >/dev/null; then
		step "ncu-$id" ncu --set full --launch-count 2 -f -o "$into/ncu-$id" "$assay" bench --impl "$id" --shape "$shape" \
			"${through[@]}" -q
	else
		absent "ncu-$id" "no ncu"
	fi
done
# Passes if no trial fails, and one has run.
trials() {
	env ${plugin:+ASSAY_PJRT_PLUGIN="$plugin"} ./devices "match_reference: gpu-" >"$into/devices.txt" 2>&1
	local status=$?
	cat "$into/devices.txt"
	[ $status -eq 0 ] && grep -q '\.\.\. ok$' "$into/devices.txt"
}
if [ -x devices ]; then
	step devices trials
else
	absent devices "the bundle has no test of devices"
fi
shopt -s nullglob
results=("$into"/replay-*.json "$into"/bench-*.json)
if [ ${#results[@]} -gt 0 ]; then
	step page "$assay" report "${results[@]}" -o "$into/page.html"
else
	absent page "there is no result"
fi

# Where nvidia-smi is not, what the driver calls it.
case $device in
unknown:*) [ ${#results[@]} -eq 0 ] || device=$(sed -n 's/^ *"device": "\(.*\)",$/\1/p' "${results[@]}" | sed -n 1p | words) ;;
esac
outcome=passed
[ $failed -eq 0 ] || outcome=failed
cat >"$into/record.json" <<RECORD
{
  "device": "$device",
  "driver": "$driver",
  "date": "$date",
  "assay": "$("$assay" --version | words)",
  "shape": "$shape",
  "outcome": "$outcome",
  "steps": [$steps
  ]
}
RECORD
echo "$outcome: $into/record.json"
exit $failed
