#!/usr/bin/env bash
# On a host with a v5e, v6e, v5p or v7x: judges and times the kernels for TPUs there, and keeps a record of it with device, libtpu and
# date, in a folder and as one archive. It changes no setting of the machine. `make tpu-record` builds what it needs and runs it.
#
#   setup/tpu-record.sh [--into FOLDER] [--budget SECONDS] [--shape BxTxV] [--plugin libtpu.so] [--fixtures FOLDER] [--python PYTHON]
#
# Each step has a time limit, and record.json is written again after every step, so that a run that is ended keeps what it has. What a
# machine lacks reads *ignored*, what the budget has no time for *not run*. Ends with 1 if a step failed, with 2 if it was called wrongly,
# and with 128 and the signal's number where a signal ended it.
#
# It takes `assay` and the test of devices, `devices`, from beside itself, where they were copied to, else from target/release; the
# recorded logits from `fixtures` there, unless --fixtures says otherwise.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
refuse() {
	echo "$*" >&2
	exit 2
}

into='' budget=3600 shape=1x4096x151936 plugin='' fixtures='' python=python3
while [ $# -gt 0 ]; do
	case $1 in
	--into | --budget | --shape | --plugin | --fixtures | --python) [ $# -gt 1 ] || refuse "$1: a value is missing" ;;
	*) refuse "got \`$1\`, expected --into, --budget, --shape, --plugin, --fixtures or --python" ;;
	esac
	case $1 in
	--into) into=$2 ;;
	--budget) budget=$2 ;;
	--shape) shape=$2 ;;
	--plugin) plugin=$2 ;;
	--fixtures) fixtures=$2 ;;
	--python) python=$2 ;;
	esac
	shift 2
done
[[ $budget =~ ^[1-9][0-9]{0,5}$ ]] || refuse "--budget: got \`$budget\`, expected seconds, 1 to 999999"
[[ $shape =~ ^[1-9][0-9]*x[1-9][0-9]*x[1-9][0-9]*$ ]] || refuse "--shape: got \`$shape\`, expected BxTxV, such as 1x4096x151936"
# Beside this script, or in the tree that it is a part of.
root=$(dirname "$here")
[ ! -x "$here/assay" ] || root=$here
# The one asked for, else what the environment names for us or for JAX, else what `make setup-tpu` installed.
[ -n "$plugin" ] || plugin=${ASSAY_PJRT_PLUGIN:-${TPU_LIBRARY_PATH:-$root/.plugins/libtpu.so}}
[ -f "$plugin" ] || refuse "--plugin: got \`$plugin\`, expected a libtpu.so; \`make setup-tpu\` installs one"
plugin=$(realpath "$plugin")
if [ -n "$into" ]; then
	case $into in /*) ;; *) into=$PWD/$into ;; esac
	[ -z "$(ls -A "$into" 2>/dev/null)" ] || refuse "--into: \`$into\` is not empty, expected a new folder"
fi

# first FILE...: the first that is a program.
first() {
	local file
	for file; do [ ! -x "$file" ] || { echo "$file" && return; }; done
}
assay=$(first "$root/assay" "$root/target/release/assay")
[ -n "$assay" ] || refuse "assay: neither beside this script nor in target/release; \`make tpu-record\` builds it"
shopt -s nullglob
# Of several builds the newest.
built=("$root"/target/release/deps/devices-*[0-9a-f])
[ ${#built[@]} -lt 2 ] || mapfile -t built < <(ls -t "${built[@]}")
devices=$(first "$root/devices" ${built[@]+"${built[@]}"})
if [ -n "$fixtures" ]; then
	[ -d "$fixtures" ] || refuse "--fixtures: got \`$fixtures\`, expected a folder of recorded *.safetensors"
	fixtures=$(realpath "$fixtures")
fi
fixtures=${fixtures:-$root/fixtures}
recorded=("$fixtures"/*.safetensors)
# What tests look for they look for here.
cd "$root" || refuse "$root: cannot be entered"

# Without a TPU libtpu asks the cloud's metadata server for minutes before it gives up; JAX tells it not to where there is no chip.
chips=(/dev/accel[0-9]* /dev/vfio/[0-9]*)
[ ${#chips[@]} -gt 0 ] || export TPU_SKIP_MDS_QUERY=${TPU_SKIP_MDS_QUERY:-1}

date=$(date -u +%Y-%m-%d)
scratch=$(mktemp -d)
child=
device='' count='' platform='' version='' now='' steps='' recording='' failed=0 unrun=0 outcome=running

# One line, safe in JSON.
words() { tr -d '"\\' | tr -s '[:cntrl:] ' ' ' | sed 's/^ //; s/ $//'; }
# How the kernels were lowered of which there is a result: mosaic on a TPU.
lowerings() { cat "$into"/*-*.json 2>/dev/null | sed -n 's/^ *"lowering": "\([a-z]*\)",*$/\1/p' | sort -u | words; }
# write: the record as it is now. It is renamed into its place, so that there is a whole one at any time.
write() {
	[ -n "$recording" ] || return 0
	cat >"$into/.record" <<RECORD
{
  "device": "$device",
  "devices": ${count:-0},
  "libtpu": "$version",
  "plugin": "$(basename "$plugin" | words)",
  "sha256": "$sha256",
  "date": "$date",
  "assay": "$("$assay" --version | words)",
  "shape": "$shape",
  "lowering": "$(lowerings)",
  "budget_s": $budget,
  "seconds": $SECONDS,
  "outcome": "$outcome",
  "running": "$now",
  "steps": [$steps
  ]
}
RECORD
	mv "$into/.record" "$into/record.json"
}
# note NAME OUTCOME SECONDS COMMAND: a line of the record.
note() {
	local command=${4//"$into"/RECORD}
	command=${command//"$plugin"/$(basename "$plugin")}
	steps+="${steps:+,}
    {\"name\": \"$1\", \"outcome\": \"$(words <<<"$2")\", \"seconds\": $3, \"command\": \"$(words <<<"${command//"$root/"/}")\"}"
	printf '%-28s %4s s  %s\n' "$1" "$3" "$2"
	write
}
ended() {
	trap '' INT TERM HUP
	# `timeout` hands the signal on to all that it started, and after ten seconds a KILL.
	[ -z "$child" ] || { kill -TERM "$child" 2>/dev/null && wait "$child"; }
	[ -z "$now" ] || note "$now" "failed: ended by SIG$1" 0 ''
	now='' outcome="failed: ended by SIG$1"
	finish
	exit "$2"
}
trap 'rm -rf "$scratch"' EXIT
trap 'ended INT 130' INT
trap 'ended TERM 143' TERM
trap 'ended HUP 129' HUP

# A step ends with this script, however that ends.
tied=()
! command -v setpriv >/dev/null || tied=(setpriv --pdeathsig TERM)
# limited LIMIT LOG COMMAND...: runs it in a group of its own, for no longer than the limit and what is left of the budget. bash runs a
# trap only between foreground commands, so that it is waited for in the background.
limited() {
	local limit=$1 log=$2 left=$((budget - SECONDS)) status=0
	shift 2
	[ "$left" -ge "$limit" ] || limit=$left
	# 0 would be no limit.
	[ "$limit" -ge 1 ] || limit=1
	"${tied[@]}" timeout -k 10 "$limit" "$@" >"$log" 2>&1 &
	child=$!
	wait "$child" || status=$?
	child=
	return "$status"
}
# Seconds below which no step is begun: a command loads libtpu and compiles before it does anything.
least=5
# step NAME LIMIT CHECK COMMAND...: runs the command, its output in NAME.log. Passes if it ends with 0 and CHECK, a function that is given
# the step's name and says what is wrong, has nothing to say. A command that ends with 77 is ignored, for the reason of its last line.
step() {
	local name=$1 limit=$2 check=$3 log status=0 began=$SECONDS wrong
	shift 3
	if [ $((budget - SECONDS)) -lt $least ]; then
		unrun=$((unrun + 1))
		note "$name" "not run: the budget of $budget s is spent" 0 "$*"
		return
	fi
	log=$into/$name.log now=$name
	write
	limited "$limit" "$log" "$@" || status=$?
	now=
	case $status in
	0)
		wrong=$("$check" "$name")
		if [ -z "$wrong" ]; then
			note "$name" passed $((SECONDS - began)) "$*"
			return
		fi
		;;
	77)
		note "$name" "ignored: $(tail -n 1 "$log")" $((SECONDS - began)) "$*"
		return
		;;
	124 | 137) wrong="it took longer than its time limit or the budget" ;;
	*) wrong="ended with $status" ;;
	esac
	failed=1
	note "$name" "failed: $wrong" $((SECONDS - began)) "$*"
	tail -n 5 "$log" | cut -c 1-400
}
absent() { note "$1" "ignored: $2" 0 ''; }
anything() { :; }

# A kernel's figures and verdicts count where Mosaic kernels ran, and a TPU: loops of XLA operations are another program.
is_mosaic() {
	if grep -qs '"lowering": "loops"' "$into/$1.json"; then
		echo 'loops were taken, not Mosaic kernels (ASSAY_LOOPS)'
	elif ! grep -qs '"lowering": "mosaic"' "$into/$1.json"; then
		echo 'no Mosaic kernel is in its result'
	fi
}
is_measured() { grep -qs '"avg_step_ms": [0-9]' "$into/$1.json" || echo 'no time is in its result'; }
some_trial() { grep -q '\.\.\. ok$' "$into/$1.log" || echo 'no trial has run'; }

# replay ID: the recorded logits of Qwen, judged.
replay() {
	if [ ${#recorded[@]} -eq 0 ]; then
		absent "replay-$1" "there are no recorded logits in $fixtures"
		return
	fi
	step "replay-$1" 600 is_mosaic "$assay" replay "${recorded[@]}" --impl "$1" --plugin "$plugin" -q --json "$into/replay-$1.json"
}
# bench NAME ID SHAPE DTYPE CHECK
bench() {
	step "bench-$1" 300 "$5" "$assay" bench --impl "$2" --shape "$3" --dtype "$4" --plugin "$plugin" -q --json "$into/bench-$1.json"
}

# figure KEY FILE: a number of a bench's result.
figure() { sed -n "s/^ *\"$1\": \([0-9.]*\),\$/\1/p" "$2" 2>/dev/null | sed -n 1p; }
# What the device's allocator says of each bench, a process each: arguments, outputs, and what lies beside them.
memory() {
	local file name peak
	for file in "$into"/bench-*.json; do
		name=$(basename "$file" .json) peak=$(figure peak_bytes_in_use "$file")
		if [ -n "$peak" ]; then
			echo "$name $peak bytes at the peak, of $(figure argument_bytes "$file") given"
		else
			sed -n "s/^ *\"peak_bytes_in_use\": \"\(.*\)\",\$/$name: no peak_bytes_in_use, \1/p" "$file"
		fi
	done >"$into/memory.txt"
	if grep -q ' bytes at the peak' "$into/memory.txt"; then
		note memory passed 0 ''
	elif [ -s "$into/memory.txt" ]; then
		absent memory "the device says nothing of its memory, memory.txt has why"
	else
		absent memory "no bench has a result"
	fi
}
# MLLM-JAX's shapes: the times recorded on a v6e, from docs/tpu.md, next to those of this run.
beside_the_seed() {
	local shape id recorded took
	for shape in "$@"; do
		recorded=$(sed -n "s/^| v6e:2x4 | $shape | xla-seed |.*| \([0-9.]*\) | [0-9.]* |\$/\1/p" "$root/docs/tpu.md" 2>/dev/null)
		for id in xla-seed tile-one-pass; do
			took=$(figure avg_step_ms "$into/bench-seed-$shape-$id.json")
			took=${took:+$took ms}
			echo "$shape $id: ${took:-no time} here, xla-seed on a v6e recorded ${recorded:-as docs/tpu.md has it} ms"
		done
	done >"$into/seed.txt"
}

# finish: the page, the record's last state and the archive.
finish() {
	[ -n "$recording" ] || return 0
	local results=("$into"/replay-*.json "$into"/bench-*.json)
	if [ ${#results[@]} -gt 0 ] && timeout 60 "$assay" report "${results[@]}" -o "$into/page.html" >"$into/page.log" 2>&1; then
		rm -f "$into/page.log"
	fi
	write
	tar -C "$(dirname "$into")" -czf "$into.tar.gz" "$(basename "$into")"
	echo "$outcome: $into/record.json, $into.tar.gz"
}

# What is asked before anything is recorded: whether this is a TPU's plugin at all, and which device it has.
sha256=$(sha256sum "$plugin" | cut -d ' ' -f 1)
listed=0
limited 300 "$scratch/list" "$assay" list --plugin "$plugin" || listed=$?
line=$(sed -n 's/^devices *\([0-9]*\) of \(.*\), platform \([^ ]*\)$/\3 \1 \2/p' "$scratch/list")
read -r platform count device <<<"$line"
version=$(awk '/^plugin / { on = 1; print; next } /^[^ ]/ { on = 0 } on' "$scratch/list" | words | sed 's/^.*(C API \([0-9.]*\)): */C API \1, /')
# Why there is no device, in the command's words.
why=$(tr -s '\n ' ' ' <"$scratch/list" | grep -oE '(create a client of|PJRT plugin) .*' | sed 's/ not here .*//' | cut -c 1-300)
case $platform$why in PJRT*) refuse "--plugin: $why; expected a libtpu.so, which \`make setup-tpu\` installs" ;; esac
if [ $listed -eq 0 ] && [ -n "$platform" ] && [ "$platform" != tpu ]; then
	refuse "--plugin: got \`$plugin\`, whose platform is $platform, expected a TPU's"
fi
folder=$(printf %s "${device:-no-device}" | tr -c 'A-Za-z0-9' - | tr '[:upper:]' '[:lower:]')
if [ -z "$into" ]; then
	into=$root/benches/records/$folder/$date-tpu
	# A second record of a day.
	for again in '' -2 -3 -4 -5 -6 -7 -8 -9; do [ -e "$into$again" ] || { into+=$again && break; }; done
fi
mkdir -p "$into" || refuse "--into: \`$into\` cannot be made"
into=$(cd "$into" && pwd)
cp "$scratch/list" "$into/list.log"
recording=yes

if [ -z "$platform" ]; then
	# No step can run; the record says why.
	failed=1
	[ $listed -ne 124 ] || why='it took longer than its time limit or the budget'
	note list "failed: ${why:-list.log says why}" $SECONDS "$assay list --plugin $plugin"
else
	note list passed $SECONDS "$assay list --plugin $plugin"
	for id in tile-one-pass tile-two-pass; do
		replay "$id"
	done
	if [ -n "$devices" ]; then
		step devices 900 some_trial env ASSAY_PJRT_PLUGIN="$plugin" "$devices" "match_reference: tile-"
	else
		absent devices 'no test of devices is built (cargo test --release --locked --test devices --no-run)'
	fi
	for id in tile-one-pass tile-two-pass; do bench "$id" "$id" "$shape" bf16 is_mosaic; done
	for id in xla xla-online xla-seed; do bench "$id" "$id" "$shape" bf16 is_measured; done
	memory
	if ! command -v "$python" >/dev/null; then
		absent jax "no $python"
	elif ! "$python" -c 'import jax, assay' 2>/dev/null; then
		absent jax "$python has not both jax and assay (pip install jax, make wheel)"
	else
		step jax 300 anything env TPU_LIBRARY_PATH="$plugin" "$python" "$here/tpu_record_jax.py" --shape "$shape"
	fi
	# By the shape that was asked for a dry run is known: MLLM-JAX's shapes are a gigabyte.
	seed=(1x2048x151643 4x1024x151643)
	[ "$shape" = 1x4096x151936 ] || seed=()
	for of_seed in ${seed[@]+"${seed[@]}"}; do
		bench "seed-$of_seed-xla-seed" xla-seed "$of_seed" bf16 is_measured
		bench "seed-$of_seed-tile-one-pass" tile-one-pass "$of_seed" bf16 is_mosaic
	done
	if [ ${#seed[@]} -gt 0 ]; then
		beside_the_seed "${seed[@]}"
	else
		absent seed "--shape $shape is not one of MLLM-JAX's"
	fi
	for dtype in f32 f16; do
		for id in tile-one-pass tile-two-pass; do bench "$id-$dtype" "$id" "$shape" "$dtype" is_mosaic; done
	done
	# Over all chips, where there are several.
	if [ "$count" -gt 1 ]; then
		for id in tile-one-pass-rows tile-two-pass-vocab; do replay "$id"; done
	else
		absent several-devices "the plugin has one device"
	fi
fi

outcome=passed
[ $unrun -eq 0 ] || outcome="passed, $unrun steps not run"
[ $failed -eq 0 ] || outcome=failed
finish
exit $failed
