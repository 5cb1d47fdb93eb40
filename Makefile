# Everything a newcomer needs, on a machine with git, make, Python 3.11 (or newer) and pip:
#   make demo    see it work        make test    check it        make help    the rest

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
PIP := $(PY) -m pip --disable-pip-version-check
MANIFESTS := $(wildcard packages/*/pyproject.toml)

# The first Python that is new enough; `make setup PYTHON=…` names another.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)

# Few workers, each with one thread: the machines this runs on are small, and torch would otherwise start a thread per core.
WORKERS ?= auto
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest
QUICK := not slow and not stress and not benchmark and not memray
# What was compiled for the installed package serves its wheel too.
OBJECTS := LAYERZERO_CPU_OBJECTS="$(CURDIR)/build/native"
PROVE := LAYERZERO_PROVE=1 $(PY) -m tools.prove

.PHONY: help setup setup-run demo test pytest lint format imports type docs requirements \
	prove-overhead prove-stress prove-truth prove-correctness prove-perfdb prove-tune prove-tokenizers prove-tuned prove-isolation prove-faults prove-warmup prove-liger prove-triton prove-ranks prove-fuzz prove-telemetry soak prove-long prove-compile prove-coverage tools prove-tools gates artifacts bench wheels lock clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

# --- set-up: plain venv and pip; torch first, so that a CPU build the machine offers is taken; then the rest, pinned ---------

$(PY):
	@test -n "$(PYTHON)" || { echo "need Python 3.11 or newer with venv; none found (make setup PYTHON=/path/to/python)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run-stamp: constraints.txt tools/workspace.py $(MANIFESTS) | $(PY)
	@echo "setting up $(VENV): torch, then the packages (a minute or two, once)"
	@mkdir -p build
	$(PIP) install -qq -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(PY) -m tools.workspace requirements run > build/requirements-run.txt
	$(PIP) install -qq -c constraints.txt -r build/requirements-run.txt
	$(PIP) install -qq -c constraints.txt tokenizers tiktoken # the libraries behind the demo's last stop, text in and out
	LAYERZERO_CPU_LATER=1 $(PIP) install -qq --no-deps --no-build-isolation $$($(PY) -m tools.workspace packages | sed 's/^/-e /')
	@touch $@

$(VENV)/.dev-stamp: $(VENV)/.run-stamp pyproject.toml
	$(PY) -m tools.workspace requirements dev > build/requirements-dev.txt
	$(PIP) install -qq -c constraints.txt -r build/requirements-dev.txt
	$(PIP) install -qq --no-deps $$($(PY) -m tools.workspace requirements bare)
	@touch $@

# native code is compiled after the packages are installed, and again when its text has changed; without a compiler it stays away
$(VENV)/.native-stamp: $(VENV)/.run-stamp $(wildcard packages/layerzero-cpu/src/layerzero_cpu/native/*) packages/layerzero-cpu/src/layerzero_cpu/build.py $(wildcard packages/layerzero-accel/src/layerzero_accel/native/*)
	-$(PY) -m layerzero_accel.build --if-needed
	-$(PY) -m layerzero_cpu.build --if-needed --cache build/native
	@touch $@

setup-run: $(VENV)/.run-stamp $(VENV)/.native-stamp ## virtual environment with the packages only
setup: $(VENV)/.run-stamp ## virtual environment with the packages and the tools
	@$(MAKE) --no-print-directory -j2 $(VENV)/.dev-stamp $(VENV)/.native-stamp # one unpacks while the other compiles

# --- the two commands ---------------------------------------------------------------------------------------------------------

demo: setup-run ## a tour on this machine; writes build/demo.html
	@mkdir -p build
	$(BIN)/lz demo --html build/demo.html

test: lint imports type pytest ## quick lane of everything

pytest: setup ## quick lane of the tests alone
	@mkdir -p build/junit && rm -f build/junit/*.xml
	$(PYTEST) -m "$(QUICK)" -n $(WORKERS) --maxprocesses=4 --dist=worksteal --junitxml=build/junit/quick.xml

# --- single checks ------------------------------------------------------------------------------------------------------------

lint: setup ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup ## let ruff put the layout right
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

imports: setup ## the floors of the core
	$(BIN)/lint-imports --no-logo --cache-dir build/import-linter

type: setup ## mypy --strict on the core
	$(BIN)/mypy --cache-dir build/mypy

docs: setup ## links of the documentation
	$(PY) -m tools.check_docs

requirements: setup ## which requirement lines are shown, by section (after `make test`)
	@$(PY) -m tools.requirements $(ARGS)

# --- long lanes: each leaves build/prove/NAME.log with commit, machine, output and time ------------------------------------------

prove-overhead: setup ## dispatch overhead against the budget; wants an idle machine
	$(PROVE) overhead -- $(PY) benchmarks/overhead.py --json build/prove/overhead.json

prove-stress: setup ## threads, forks, leaks, long counts
	$(PROVE) stress -- $(PY) -m pytest -m stress --junitxml=build/prove/stress.xml

prove-truth: setup ## what explain names is what ran, over many contexts
	$(PROVE) truth -- $(PY) -m pytest -k truth --junitxml=build/prove/truth.xml

prove-correctness: setup ## kernels against the reference, whole grid; the parity ladder, full lane
	$(PROVE) correctness -- $(PY) -m pytest -m "correctness or slow" --junitxml=build/prove/correctness.xml
	$(PROVE) verify -- $(BIN)/lz verify --lane full --html build/prove/verify.html

prove-perfdb: setup ## kill writers, flip bits, truncate: no acknowledged row lost, no wrong value served
	$(PROVE) perfdb -- env LAYERZERO_PROVE=1 $(PY) -m pytest -s packages/layerzero-core/tests/test_perfdb.py --junitxml=build/prove/perfdb.xml

artifacts: setup ## what a run declared, decided, measured and logged, in build/artifacts
	$(PY) -m tools.artifacts build/artifacts

prove-tune: setup ## two tuning runs agree; lookups, queries, opening and recording inside their budgets; wants an idle machine
	$(PROVE) tune -- env LAYERZERO_PROVE=1 $(PY) -m pytest -s packages/layerzero-core/tests/test_tuning_agreement.py --junitxml=build/prove/tune.xml
	$(PROVE) selection-store -- $(PY) benchmarks/selection_store.py --json build/prove/selection_store.json

prove-tokenizers: setup ## 20 000 texts exact to each library; 100 000 prompts through the prefix cache from 16 threads
	$(PROVE) tokenizers -- env LAYERZERO_PROVE=1 $(PY) -m pytest -s packages/layerzero-tokenizers/tests --junitxml=build/prove/tokenizers.xml

prove-hub: setup ## installers killed at random, 1 000 000 mutated locks and policies: only whole builds, only our errors
	$(PROVE) hub -- env LAYERZERO_PROVE=1 $(PY) -m pytest -s packages/layerzero-hub/tests/test_installers.py packages/layerzero-hub/tests/test_hub_fuzz.py --junitxml=build/prove/hub.xml

prove-isolation: setup ## 500 faults injected into isolated children: answered in time, no process or memory left
	$(PROVE) isolation -- env LAYERZERO_PROVE=1 $(PY) -m pytest -s packages/layerzero-core/tests/test_isolation.py packages/layerzero-core/tests/test_isolation_prove.py --junitxml=build/prove/isolation.xml

prove-faults: setup ## every failure of the checklist injected for real: signals, kills, full disks, limits, corrupt files; wants an idle machine
	$(PROVE) faults -- env LAYERZERO_PROVE=1 $(PY) -m pytest -s tests/faults packages/layerzero-core/tests/test_health_wiring.py packages/layerzero-core/tests/test_memory.py packages/layerzero-core/tests/test_canary.py packages/layerzero-core/tests/test_failover.py --junitxml=build/prove/faults.xml
	$(PROVE) faults-cost -- $(PY) benchmarks/faults.py --machine prove --json build/prove/faults.json

prove-warmup: setup ## real compilers counted: nothing compiles after warm-up; every inductor program against the reference
	$(PROVE) warmup -- env LAYERZERO_PROVE=1 $(PY) -m pytest -s packages/layerzero-core/tests/test_jit.py packages/layerzero-core/tests/test_warmup.py packages/layerzero-core/tests/test_inductor.py packages/layerzero-verify/tests/testing/test_kit_builtins.py -k "not built_in_backend" --junitxml=build/prove/warmup.xml

prove-liger: setup ## the conformance kit over Liger's real kernels, run on the CPU by Triton's interpreter
	$(PROVE) liger -- env LAYERZERO_PROVE=1 $(PY) -m pytest -s packages/layerzero-liger/tests --junitxml=build/prove/liger.xml

prove-triton: setup ## every Triton kernel compiled for SM 8.0, 9.0, 10.0 and gfx942, and run by the interpreter; no GPU needed
	$(PROVE) triton -- env LAYERZERO_PROVE=1 $(PY) -m pytest packages/layerzero-triton/tests/test_kernels_compiled.py packages/layerzero-triton/tests/test_kernels_interpreted.py packages/layerzero-triton/tests/test_custom.py --junitxml=build/prove/triton.xml

prove-cpu: setup ## CPU kernels: sanitizers, 200 000 drawn calls, the kit on every instruction set, wheel in a fresh environment
	$(PROVE) cpu -- env LAYERZERO_PROVE=1 $(PY) -m pytest -s packages/layerzero-cpu/tests --junitxml=build/prove/cpu.xml

prove-tuned: setup ## tuned choice against the oracle, torch and each library; wants an idle machine, about eight minutes
	$(PROVE) tuned -- $(PY) benchmarks/tuned.py --machine prove --state build/tuned/prove --json build/prove/tuned.json --budget 480
	$(BIN)/lz report build/prove/tuned.json --out build/prove/tuned.html

prove-long: setup ## what the quick lane shortens, whole: examples as programs of their own, the kit's mistakes, policies
	$(PROVE) long -- env LAYERZERO_PROVE=1 $(PY) -m pytest tests/meta/test_examples.py packages/layerzero-verify/tests/testing/test_kit_meta.py packages/layerzero-core/tests/test_policy_properties.py packages/layerzero-core/tests/test_leaks.py --junitxml=build/prove/long.xml

prove-compile: setup ## every op under Inductor with and without gradients, opcheck in full; a Llama block against plain torch
	$(PROVE) compile -- env LAYERZERO_PROVE=1 $(PY) -m pytest -s packages/layerzero-core/tests/test_torch_ops_written.py packages/layerzero-core/tests/test_torch_ops_attention_forms.py packages/layerzero-core/tests/test_torch_ops_library.py packages/layerzero-core/tests/test_torch_ops_traced.py packages/layerzero-core/tests/test_torch_ops_export.py packages/layerzero-core/tests/test_graphs.py -m "slow or not slow" --junitxml=build/prove/compile.xml
	$(PROVE) compiled-block -- $(PY) benchmarks/compiled.py --machine prove --json build/prove/compiled.json

prove-grouped: setup ## the machine code of grouped attention's Hopper kernel: products in flight beside the softmax, no spills
	$(PROVE) grouped -- $(PY) -m pytest packages/layerzero-triton/tests/test_grouped_compiled.py --junitxml=build/prove/grouped.xml

prove-ranks: setup ## torchrun on 2, 4 and 8 processes; eight ranks agree, disagree 1 000 times and are killed 20 times
	$(PROVE) ranks-torchrun -- $(PY) -m pytest -s tests/distributed --junitxml=build/prove/ranks.xml
	$(PROVE) ranks -- $(PY) benchmarks/ranks.py --json build/prove/ranks.json

# as many as the machine manages in FUZZ_MINUTES; the next run goes on where this one stopped
FUZZ_MINUTES ?= 600
prove-fuzz: setup ## 1 000 000 mutated inputs for each of seven targets, resumable; only our exceptions come out
	$(PROVE) fuzz -- $(PY) -m tools.fuzz --iterations 1000000 --minutes $(FUZZ_MINUTES) --json build/prove/fuzz.json
	$(PROVE) fuzz-figures -- $(PY) -m pytest tests/fuzz --junitxml=build/prove/fuzz.xml

prove-telemetry: setup ## what counting costs a hot call; wants an idle machine
	$(PROVE) telemetry -- $(PY) benchmarks/telemetry.py --json build/prove/telemetry.json

MINUTES ?= 30
soak: setup ## a process under full load for MINUTES=30, faults and changes all the while; memory must stay flat
	$(PROVE) soak -- env OMP_NUM_THREADS=1 $(PY) -m tools.soak --minutes $(MINUTES) --json build/prove/soak.json

prove-accel: setup ## the tests of the core with layerzero-accel and without it; its own under the sanitizers; the figures want an idle machine
	$(PROVE) accel-off -- env LAYERZERO_PROVE=0 LAYERZERO_ACCEL=off $(PYTEST) -m "$(QUICK)" -n $(WORKERS) --maxprocesses=4 --dist=worksteal packages/layerzero-core/tests --junitxml=build/prove/accel-off.xml
	$(PROVE) accel-on -- env LAYERZERO_PROVE=0 LAYERZERO_ACCEL=on $(PYTEST) -m "$(QUICK)" -n $(WORKERS) --maxprocesses=4 --dist=worksteal packages/layerzero-core/tests --junitxml=build/prove/accel-on.xml
	$(PROVE) accel -- env LAYERZERO_ACCEL=on $(PYTEST) packages/layerzero-accel/tests --junitxml=build/prove/accel.xml
	$(PROVE) accel-bench -- env LAYERZERO_ACCEL=on $(PY) benchmarks/accel.py --json build/prove/accel.json

# an environment of their own that sees what is in $(VENV); nothing of it is needed to build, test or run
TOOLS := build/venv-tools
$(TOOLS)/.stamp: $(VENV)/.dev-stamp pyproject.toml constraints.txt
	$(PY) -m venv $(TOOLS)
	$(PY) -m tools.workspace requirements tools > build/requirements-tools.txt
	$(PY) -c "import sys, sysconfig; print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" > "$$($(TOOLS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/workspace.pth"
	$(TOOLS)/bin/python -m pip --disable-pip-version-check install -qq -c constraints.txt -r build/requirements-tools.txt
	@touch $@

tools: $(TOOLS)/.stamp ## type checkers, profilers, pytest plugins and hooks of docs/tooling.md, in build/venv-tools

prove-tools: setup tools ## each of them once on our own code: pyright, typeguard, pre-commit, memray, pyinstrument, …
	$(PROVE) tools -- env LAYERZERO_PROVE=1 LAYERZERO_REQUIRE=1 OMP_NUM_THREADS=1 PATH="$(CURDIR)/$(TOOLS)/bin:$$PATH" $(TOOLS)/bin/python -m pytest tests/tooling -o asyncio_default_fixture_loop_scope=function --junitxml=build/prove/tools.xml --benchmark-json=build/prove/tools-benchmark.json

gates: setup ## figures inside their limits or waived, no open P0 or P1, nothing wrong that was right before
	$(PY) -m tools.gates

prove-coverage: setup ## coverage of the core, at least 80 %
	@mkdir -p build/coverage
	$(PROVE) coverage -- $(PY) -m pytest -m "$(QUICK)" --cov --cov-report=term --cov-report=html

bench: setup ## benchmarks, results as JSON under build/bench
	@mkdir -p build/bench
	$(PY) benchmarks/overhead.py --json build/bench/overhead.json
	$(PY) benchmarks/grouped.py --json build/bench/grouped.json
	$(PY) benchmarks/tokenization.py --json build/bench/tokenizers.json

# --- making things ------------------------------------------------------------------------------------------------------------

wheels: setup ## wheels of all packages in dist/
	rm -rf dist
	for package in $$($(PY) -m tools.workspace packages); do \
		$(OBJECTS) $(PY) -m build --wheel --no-isolation --outdir dist $$package; done

lock: setup ## constraints.txt and requirements.lock from the pyproject files
	$(PY) -m tools.lock

clean: ## everything made, the virtual environment too
	rm -rf $(VENV) .tox build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
