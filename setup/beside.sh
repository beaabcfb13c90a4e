#!/usr/bin/env bash
# Starts a test binary as soon as one of two places is free, and does not wait for its end: a binary's last tests leave cores idle
# that the next one's can use. What it says is printed at once when it has ended, where it fails its name goes to a list.
#
# RUSTC_BOOTSTRAP: that libtest says how long each test took is an option of nightly's, and a fresh machine has only stable. What
# makes its own trials says it by itself; what comes from documentation is run as it is.
set -euo pipefail
case $1 in
# Whose training steps multiply small matrices: two threads take twice the processor's time of one.
*/deps/it-*) export RAYON_NUM_THREADS=1 ;;
esac
case $1 in
*/deps/devices-* | */deps/memory-*) timed=() ;;
*/deps/*) timed=(-Z unstable-options --report-time) ;;
*) exec "$@" ;;
esac

place=0
until exec 9>"$ASSAY_TEST_RUNS/place$place" && flock --nonblock 9; do
	place=$((1 - place))
	sleep 0.1
done

# XLA's CPU compiler writes a fused kernel by MLIR's passes, four times as long as by its older emitters, and cuts a program into up to 32
# modules, which takes a fourth more of the processors where two of them are all there are; no field of the compile options that every
# plugin has says so, and the flags reach the commands that tests start too.
if [ -z "${ASSAY_FULL_OPTIMIZATION-}" ]; then
	export XLA_FLAGS="${XLA_FLAGS-} --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true --xla_cpu_parallel_codegen_split_count=1"
fi

name=$(basename "$1")
run() {
	local log=$ASSAY_TEST_RUNS/$name.log status=0
	RUSTC_BOOTSTRAP=1 "$@" ${timed[@]+"${timed[@]}"} >"$log" 2>&1 &
	echo $! >>"$ASSAY_TEST_RUNS/pids"
	wait $! || status=$?
	[ "$status" = 0 ] || echo "$name ended with $status" >>"$ASSAY_TEST_RUNS/failed"
	# Of this script, and on the last line of the binary.
	times >"$log.times"
	{
		flock 8
		printf '\n     Of %s, user and system time %s\n' "$name" "$(tail -n 1 "$log.times")"
		cat "$log"
	} 8>"$ASSAY_TEST_RUNS/print"
}
run "$@" &
