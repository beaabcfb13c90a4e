#!/usr/bin/env bash
# Judges and times the kernels for GPUs on a machine with an NVIDIA GPU and its driver, and keeps a record of it. Rust is not needed:
# `make gpu-bundle` builds the two programs that this runs.
#
#   setup/gpu-record.sh [--bundle FOLDER|ARCHIVE] [--fixtures FOLDER] [--into FOLDER] [--budget SECONDS] [--shape BxTxV]
#                       [--plugin xla_cuda_plugin.so] [--python FILE] [--small] [--list]
#
# --bundle    the unpacked bundle, or its archive, gpu-bundle.tar.gz or .tar.xz; target/gpu-bundle if nothing is said. The Python part beside
#             an archive (gpu-bundle-python.tar.gz) is unpacked too.
# --fixtures  the recorded logits; `fixtures` of the tree if nothing is said.
# --into      the folder for the record: DEVICE/DATE-gpu, and gpu-record.tar.gz with the same; `records` if nothing is said.
# --budget    seconds in all, 900 if nothing is said. Steps run in the order of their worth; one that no longer fits reads *not run*.
# --small     small shapes instead of a model's, to try this script without a device.
# --list      prints the steps and their limits, and runs nothing.
#
# A step that needs what the machine lacks (PyTorch, JAX, a plugin, compute-sanitizer, ncu) reads *ignored*, with the reason. The record is
# rewritten before and after every step, so that a killed run keeps what it has. Nothing here changes clocks or any other setting of the
# machine. Exit code: 0, or 1 if a step failed, 2 for bad usage, 130 or 143 if the run was interrupted.
#
# shellcheck disable=SC2329 # functions that are called by a name in a variable, or by a trap
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

refuse() {
	echo "gpu-record: $*" >&2
	exit 2
}

bundle='' fixtures='' into=records budget=900 shape=1x4096x151936 plugin=${ASSAY_PJRT_PLUGIN:-} python=python3 small='' list_only=''
while [ $# -gt 0 ]; do
	case $1 in
	--small) small=yes && shift && continue ;;
	--list) list_only=yes && shift && continue ;;
	--bundle | --fixtures | --into | --budget | --shape | --plugin | --python) ;;
	*) refuse "got \`$1\`, expected --bundle, --fixtures, --into, --budget, --shape, --plugin, --python, --small or --list" ;;
	esac
	[ $# -gt 1 ] || refuse "\`$1\`: got no value, expected one behind it"
	case $1 in
	--bundle) bundle=$2 ;;
	--fixtures) fixtures=$2 ;;
	--into) into=$2 ;;
	--budget) budget=$2 ;;
	--shape) shape=$2 ;;
	--plugin) plugin=$2 ;;
	--python) python=$2 ;;
	esac
	shift 2
done
[[ $budget =~ ^[1-9][0-9]{0,5}$ ]] || refuse "\`--budget\`: got \`$budget\`, expected whole seconds from 1 to 999999"
[[ $shape =~ ^[1-9][0-9]*x[1-9][0-9]*x[1-9][0-9]*$ ]] || refuse "\`--shape\`: got \`$shape\`, expected BxTxV, such as 1x4096x151936"
if [ -n "$plugin" ]; then
	[ -f "$plugin" ] || refuse "\`--plugin\`: got \`$plugin\`, expected a file, XLA's xla_cuda_plugin.so"
	plugin=$(realpath "$plugin")
fi
if [ -n "$fixtures" ]; then
	[ -d "$fixtures" ] || refuse "\`--fixtures\`: got \`$fixtures\`, expected a folder with the recorded *.safetensors"
else
	fixtures=$root/fixtures
fi

# What has begun ends with this script: the step that runs, with its children, and the scratch folder.
scratch='' running=''
stop_step() {
	[ -n "$running" ] || return 0
	# `timeout` passes the signal on to all processes of its step, and kills those that remain.
	kill -TERM "$running" 2>/dev/null
	wait "$running" 2>/dev/null
	running=''
}
tidy() {
	stop_step
	[ -z "$scratch" ] || rm -rf "$scratch"
}
trap tidy EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
scratch=$(mktemp -d) || refuse "mktemp: there is no folder for temporary files; set TMPDIR to one"

started=$EPOCHSECONDS
# A machine without xz may have Python's.
unpack() { tar -xf "$1" -C "$scratch" 2>/dev/null || "$python" -m tarfile -e "$1" "$scratch" 2>/dev/null; }
if [ -f "$bundle" ]; then
	for archive in "$bundle" "${bundle%.tar.*}-python.tar.${bundle##*.}"; do
		[ ! -f "$archive" ] || unpack "$archive" || refuse "\`--bundle\`: got \`$archive\`, which neither tar nor $python can unpack"
	done
	bundle=$scratch/gpu-bundle
elif [ -z "$bundle" ]; then
	bundle=$root/target/gpu-bundle
	# Unpacked, the bundle has this script too.
	[ ! -x "$root/assay" ] || bundle=$root
fi
[ -x "$bundle/assay" ] || refuse "\`--bundle\`: got \`$bundle\`, expected a folder with the program \`assay\`, or its archive; make gpu-bundle makes both"
bundle=$(realpath "$bundle")
case $python in */*) python=$(realpath -s "$python") ;; esac
fixtures=$(realpath "$fixtures" 2>/dev/null || echo "$fixtures")
assay=$bundle/assay

# words TEXT: sets `line` to it as one line that is safe in JSON. No process is started: a record of a hundred such is written often.
line=''
words() {
	line=${1//[\"\\]/}
	line=${line//[[:cntrl:]]/ }
	while [[ $line == *'  '* ]]; do line=${line//'  '/ }; done
	line=${line# }
	line=${line% }
}
gpu=${CUDA_VISIBLE_DEVICES:-0}
gpu=${gpu%%,*}
# queried FIELDS: sets `line` to what nvidia-smi says of the device, or to nothing. Queries alone: this script sets nothing.
queried() {
	local answer
	# What is wrong it says on the same channel as what is right.
	answer=$(timeout 10 nvidia-smi --query-gpu="$1" --format=csv,noheader -i "$gpu" 2>/dev/null) || answer=''
	words "$answer"
}
queried name && known=$line
# nvidia-smi may not know a slice of a device by the name that CUDA_VISIBLE_DEVICES gives it.
of_gpu=()
[ -z "$known" ] || of_gpu=(-i "$gpu")
queried driver_version && driver=$line
queried compute_cap && capability=$line
date=$(date -u +%Y-%m-%d)
through=()
[ -z "$plugin" ] || through=(--plugin "$plugin")
if [ -z "$known" ] && [ -z "$list_only" ]; then
	# What CUDA's driver calls it.
	timeout 60 "$assay" bench -q --impl gpu-two-pass-driver --shape 1x1x64 --json "$scratch/tried.json" >"$scratch/tried.log" 2>&1
	[ ! -f "$scratch/tried.json" ] || words "$(sed -n 's/^ *"device": "\(.*\)",$/\1/p' "$scratch/tried.json")"
	known=$line
fi
: "${known:=unknown}"
case ${known,,} in
*b200*) target=b200 ;;
*h200*) target=h200 ;;
*) case ${capability%%.*} in 9 | '') target=h100 ;; 1[0-9]) target=b200 ;; *) target='' ;; esac ;;
esac

if [ -n "$small" ]; then
	shape=1x2x257
	vocabularies=(129 65) logp_shape=1x3x257 cluster_shape=1x1x257 problem_shape=1x4x257 torch_shape=2x3x65
else
	vocabularies=(151643 256000) logp_shape=1x8192x151936 cluster_shape=1x4x151936 problem_shape=1x64x151936 torch_shape=$shape
fi

# --- Whether a step can run: each sets `why` to the reason why not. ---

# Ends a step's processes if this script is killed outright.
tied=()
! setpriv --pdeathsig TERM bash -c : 2>/dev/null || tied=(setpriv --pdeathsig TERM)
# ran LIMIT FILE COMMAND...: runs it, its output in FILE; returns its exit code, 124 or 137 if it was ended for time. In the background,
# since bash heeds a signal between commands and while it waits, not while one runs.
ran() {
	local limit=$1 file=$2 status
	shift 2
	"${tied[@]}" timeout -k 5 "$limit" "$@" >"$file" 2>&1 </dev/null &
	running=$!
	wait "$running"
	status=$?
	running=''
	return $status
}
why=''
# Without a chip of sm_90 there is no one-pass kernel; a build may lack an implementation.
lacks_kernel() {
	[ -f "$scratch/list" ] || ran 60 "$scratch/list" "$assay" list "${through[@]}"
	grep -q "[ │]$1 .* yes " "$scratch/list" || why="$1 does not run here, list.log says why"
}
lacks_fixtures() {
	if compgen -G "$fixtures/*.safetensors" >/dev/null; then lacks_kernel "$1"; else
		why="no *.safetensors in $fixtures; --fixtures names another folder"
	fi
}
lacks_plugin() {
	if [ -n "$plugin" ]; then lacks_kernel "$1"; else why="no plugin; --plugin names XLA's xla_cuda_plugin.so"; fi
}
lacks_plugin_or_fixtures() {
	lacks_plugin "$1"
	[ -n "$why" ] || lacks_fixtures "$1"
}
lacks_tool() { command -v "$1" >/dev/null || why="no $1 on this machine"; }
lacks_tool_or_kernel() {
	lacks_tool "$1"
	[ -n "$why" ] || lacks_kernel "$2"
}
lacks_trials() { [ -x "$bundle/devices" ] || why="the bundle has no program devices; make gpu-bundle builds it"; }
lacks_results() { compgen -G "$record/bench-*.json" >/dev/null || why="there is no result to show"; }
# asked_python NAME CODE: runs the code once; it prints the reason, or nothing. Importing a framework takes seconds.
asked_python() {
	if ! command -v "$python" >/dev/null; then
		why="no $python on this machine; --python names another"
		return
	fi
	[ -f "$scratch/$1" ] || ran 90 "$scratch/$1" "$python" -c "$2" || echo "Python ended with an error" >>"$scratch/$1"
	why=$(tail -1 "$scratch/$1")
}
lacks_torch() {
	asked_python torch 'import importlib.util as u
if u.find_spec("torch") is None: print("no PyTorch on this machine")
else:
    import torch
    torch.cuda.is_available() or print("PyTorch", torch.__version__, "sees no GPU")'
}
lacks_torch_or_package() {
	lacks_torch
	[ -n "$why" ] || asked_python package 'import importlib.util as u
if u.find_spec("assay") is None or u.find_spec("assay._native") is None:
    print("no Python package assay; make gpu-bundle EXTENSION=1 makes gpu-bundle-python.tar.gz")'
}
lacks_torch_or_text() {
	lacks_text
	[ -n "$why" ] || lacks_torch
}
lacks_text() { [ -n "$target" ] || why="there is no text for a chip of compute capability $capability to emit"; }
lacks_jax() {
	lacks_text
	[ -n "$why" ] || asked_python jax 'import importlib.util as u
if u.find_spec("jax") is None: print("no JAX on this machine")
else:
    import jax
    try: jax.devices("cuda")
    except RuntimeError as error: print("JAX", jax.__version__, "sees no GPU:", *str(error).split())'
}

# --- The steps. ---

names=() needs=() limits=() lacking=() expected=() commands=() outcomes=() spent=()
# plan NAME SECONDS LIMIT LACKING EXPECTED COMMAND...: a step. It is begun if SECONDS of the budget are left, and ended after LIMIT seconds.
# LACKING is a command that prints why it cannot run here, EXPECTED a pattern that its output must have to pass.
plan() {
	names+=("$1") needs+=("$2") limits+=("$3") lacking+=("$4") expected+=("$5") outcomes+=('not run: the run ended before it') spent+=(0)
	shift 5
	commands+=("$(printf '%q ' "$@")")
}
bench() {
	local name=$1 id=$2 lack=$3
	shift 3
	plan "$name" 15 150 "$lack $id" '' "$assay" bench --impl "$id" "$@" --json "$record/$name.json"
}

folder=${known//[^A-Za-z0-9]/-}
folder=${folder,,}
[ -n "$list_only" ] || mkdir -p "$into" || refuse "\`--into\`: got \`$into\`, expected a folder that can be written"
into=$(realpath -m "$into")
place=$folder/$date-gpu
# A second record of a day does not go over the first.
for ((again = 2; ${#list_only} == 0; again++)); do
	[ -e "$into/$place" ] || break
	place=$folder/$date-gpu-$again
done
record=$into/$place

driven=(gpu-one-pass-driver gpu-two-pass-driver)
compiled=(gpu-one-pass gpu-two-pass xla)
torch_step() { # NAME ARGUMENTS...
	plan "$1" 30 240 lacks_torch_or_package '"passed": true' "$python" "$root/setup/gpu_record_torch.py" "${@:2}" --json "$record/$1.json"
}
kernel_step() { # NAME LACKING jax|torch XLA_FLAGS
	plan "$1" 30 180 "$2" '"passed": true' env XLA_FLAGS="$4" XLA_PYTHON_CLIENT_PREALLOCATE=false "$python" "$root/setup/gpu_record_kernel.py" \
		"$3" --assay "$assay" --target "$target" --problem-shape "$problem_shape" --shape "$shape" --scratch "$scratch" --json "$record/$1.json"
}

# Device and driver.
plan device 2 30 'lacks_tool nvidia-smi' '' nvidia-smi -q -d MEMORY,CLOCK,POWER,TEMPERATURE,COMPUTE,ECC,PERFORMANCE "${of_gpu[@]}"
plan driver 2 30 'lacks_tool nvidia-smi' '' nvidia-smi
plan list 2 60 '' 'gpu-two-pass-driver .* yes ' "$assay" list "${through[@]}"
# The recorded logits of a Qwen model through both kernels.
for id in "${driven[@]}"; do
	plan "replay-$id" 10 120 "lacks_fixtures $id" '' "$assay" replay "$fixtures"/*.safetensors --impl "$id" --json "$record/replay-$id.json"
done
plan devices 20 240 lacks_trials '\.\.\. ok$' env ${plugin:+ASSAY_PJRT_PLUGIN="$plugin"} "$bundle/devices" 'match_reference: gpu-'
# One timing of each kernel.
for id in "${driven[@]}"; do
	bench "bench-$id-bf16" "$id" lacks_kernel --shape "$shape" --dtype bf16
done
# The other way in which a cluster's CTAs may meet, beside the default.
name=bench-gpu-one-pass-driver-bf16-stores
plan "$name" 15 150 'lacks_kernel gpu-one-pass-driver' '' env ASSAY_GPU_MEETING=stores "$assay" bench --impl gpu-one-pass-driver \
	--shape "$shape" --dtype bf16 --json "$record/$name.json"
# The operation of PyTorch on CUDA tensors: a campaign, a step's time, and the same captured in a CUDA graph.
torch_step torch-campaign campaign ${small:+--cases 6}
torch_step torch-step step --shape "$torch_shape"
torch_step torch-graph graph --shape "$torch_shape"
# jax.jit of the emitted kernel: XLA's defaults, without command buffers, and with its call in one, however few calls there are.
kernel_step jax-default lacks_jax jax ''
kernel_step jax-no-command-buffers lacks_jax jax '--xla_gpu_enable_command_buffer='
kernel_step jax-command-buffers lacks_jax jax '--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1'
kernel_step torch-kernel lacks_torch_or_text torch ''
# More shapes and dtypes. On a B200 the driver's kernels are the text for sm_100.
for id in "${driven[@]}"; do
	for dtype in f32 f16; do
		bench "bench-$id-$dtype" "$id" lacks_kernel --shape "$shape" --dtype "$dtype"
	done
	for v in "${vocabularies[@]}"; do
		bench "bench-$id-bf16-$v" "$id" lacks_kernel --shape "${shape%x*}x$v" --dtype bf16
	done
done
# gpu-logp is the first of the two kernels: its time is that of grpo_statistics.
bench bench-gpu-logp-bf16 gpu-two-pass-driver lacks_kernel --shape "$logp_shape" --dtype bf16
for id in "${compiled[@]}"; do
	plan "replay-$id" 20 180 "lacks_plugin_or_fixtures $id" '' "$assay" replay "$fixtures"/*.safetensors --impl "$id" "${through[@]}" --json "$record/replay-$id.json"
	bench "bench-$id-bf16" "$id" lacks_plugin --shape "$shape" --dtype bf16 "${through[@]}"
done
# Few rows of a vocabulary whose clusters are of eight CTAs: the sanitizer slows a launch down by orders of magnitude.
for id in "${driven[@]}"; do
	plan "memcheck-$id" 20 180 "lacks_tool_or_kernel compute-sanitizer $id" '' compute-sanitizer --tool memcheck --error-exitcode 1 "$assay" bench \
		--impl "$id" --shape "$cluster_shape" --dtype bf16
done
# Counters, at the clocks that the kernels were timed at: ncu would lock them to the base clock.
sections=()
for section in SpeedOfLight MemoryWorkloadAnalysis Occupancy LaunchStats WarpStateStats SchedulerStats InstructionStats; do
	sections+=(--section "$section")
done
for id in "${driven[@]}"; do
	# shellcheck disable=SC2016 # of the shell that runs it: a report to open, and its text in the log
	plan "ncu-$id" 30 180 "lacks_tool_or_kernel ncu $id" 'PROF.*grpo_' bash -c 'report=$1; shift; ncu -f -o "$report" "$@" && ncu --import "$report.ncu-rep"' \
		ncu "$record/ncu-$id" --clock-control none --kernel-name 'regex:grpo_' --launch-skip 3 --launch-count 2 "${sections[@]}" \
		"$assay" bench --impl "$id" --shape "$shape" --dtype bf16
done
# shellcheck disable=SC2016 # of the shell that runs it, once there are results
plan page 1 60 lacks_results '' bash -c 'shopt -s nullglob; exec "$0" report "$1"/replay-*.json "$1"/bench-*.json -o "$1/page.html"' "$assay" "$record"

if [ -n "$list_only" ]; then
	for i in "${!names[@]}"; do printf '%-34s at least %3d s of the budget, at most %3d s\n' "${names[i]}" "${needs[i]}" "${limits[i]}"; done
	exit 0
fi
mkdir -p "$record" || refuse "\`--into\`: got \`$into\`, expected a folder that can be written"
cd "$bundle" || exit 2
# The package with its extension, where the bundle has it.
[ ! -e "$bundle/python/assay/_native.abi3.so" ] || export PYTHONPATH=$bundle/python${PYTHONPATH:+:$PYTHONPATH}
words "$("$assay" --version)"
version=$line
# Paths of this machine say nothing to a reader.
shown=()
for i in "${!commands[@]}"; do
	text=${commands[i]//"$record"/RECORD}
	text=${text//"$fixtures"/FIXTURES}
	text=${text//"$bundle"/BUNDLE}
	text=${text//"$root"/TREE}
	words "${text//"$scratch"/SCRATCH}"
	shown[i]=$line
done

remaining=0
# Sets `remaining` to the seconds of the budget that are left.
look_at_clock() { remaining=$((budget - EPOCHSECONDS + started)); }
failed=0
# Writes record.json in one move: whoever reads it, or ends this script, finds a whole one.
write() {
	local i comma=''
	{
		printf '{\n  "device": "%s",\n  "driver": "%s",\n  "capability": "%s",\n' "$known" "${driver:-unknown}" "${capability:-unknown}"
		printf '  "date": "%s",\n  "assay": "%s",\n  "shape": "%s",\n' "$date" "$version" "$shape"
		printf '  "budget_s": %d,\n  "spent_s": %d,\n  "outcome": "%s",\n  "steps": [' "$budget" $((EPOCHSECONDS - started)) "$1"
		for i in "${!names[@]}"; do
			words "${outcomes[i]}"
			printf '%s\n    {"name": "%s", "outcome": "%s", "seconds": %d, "command": "%s"}' "$comma" "${names[i]}" "$line" \
				"${spent[i]}" "${shown[i]}"
			comma=,
		done
		printf '\n  ]\n}\n'
	} >"$record/record.json.new"
	mv "$record/record.json.new" "$record/record.json"
}
# What the clocks were when a step ended: a row of clocks.csv.
note_clocks() {
	queried clocks.sm,clocks.mem,temperature.gpu,power.draw,pstate
	[ -z "$line" ] || echo "$1, $line" >>"$record/clocks.csv"
}
# The record in one file, for whoever carries it away.
pack() {
	tar -C "$into" -czf "$into/gpu-record.tar.gz.new" "$place" && mv "$into/gpu-record.tar.gz.new" "$into/gpu-record.tar.gz"
}
interrupted() {
	stop_step
	[ -z "${current:-}" ] || outcomes[current]="stopped: the run was interrupted"
	write interrupted
	pack
	echo "interrupted: $record/record.json" >&2
	exit "$1"
}
trap 'interrupted 130' INT
trap 'interrupted 143' TERM HUP

for i in "${!names[@]}"; do
	name=${names[i]} limit=${limits[i]} current=$i
	look_at_clock
	if [ "$remaining" -lt "${needs[i]}" ]; then
		outcomes[i]="not run: $((remaining < 0 ? 0 : remaining)) s of the budget are left, ${needs[i]} s are needed"
		echo "${outcomes[i]}  $name"
		continue
	fi
	why=''
	${lacking[i]}
	if [ -n "$why" ]; then
		outcomes[i]="ignored: $why"
		echo "${outcomes[i]}  $name"
		continue
	fi
	outcomes[i]='not finished: the run ended during it'
	write running
	# Looking for what it needs may have taken seconds.
	look_at_clock
	[ "$remaining" -ge 1 ] || remaining=1
	begun=$EPOCHSECONDS
	arguments=()
	eval "arguments=(${commands[i]})"
	ran $((limit < remaining ? limit : remaining)) "$record/$name.log" "${arguments[@]}"
	status=$?
	spent[i]=$((EPOCHSECONDS - begun))
	# Many rented machines keep the counters from their users.
	if grep -q ERR_NVGPUCTRPERM "$record/$name.log"; then
		outcomes[i]='ignored: this machine does not let its users read counters (ERR_NVGPUCTRPERM)'
	elif [ $status -eq 0 ] && { [ -z "${expected[i]}" ] || grep -q -- "${expected[i]}" "$record/$name.log"; }; then
		outcomes[i]=passed
	elif [ $status -eq 0 ]; then
		outcomes[i]="failed: nothing in $name.log reads \`${expected[i]}\`" failed=1
	elif [ $status -eq 124 ] || [ $status -eq 137 ]; then
		# Ending a step for the budget's sake says nothing of the kernel.
		if [ "$limit" -le "$remaining" ]; then outcomes[i]="failed: it took more than its $limit s" failed=1; else
			outcomes[i]="stopped: the budget ended after $remaining s of it"
		fi
	else
		outcomes[i]="failed: exit code $status, $name.log says why" failed=1
	fi
	note_clocks "$name"
	write running
	echo "${outcomes[i]}  $name, ${spent[i]} s"
	[ "${outcomes[i]#failed}" = "${outcomes[i]}" ] || tail -5 "$record/$name.log"
done
current=''
outcome=passed
[ $failed -eq 0 ] || outcome=failed
write $outcome
pack || failed=1
echo "$outcome: $into/gpu-record.tar.gz, to be unpacked in benches/records"
exit $failed
