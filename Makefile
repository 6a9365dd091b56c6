# make demo and make test need nothing done before: they make their own virtual environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.duotone-base
READY := $(VENV)/.duotone-ready
SITE := $(VENV)/.duotone-site
# Workers and threads: two cores run two single-threaded test processes best.
WORKERS ?= 2

.PHONY: demo docs test test-all test-oldest lint format gpu-test test-vllm bench clean

demo: $(BASE)
	$(BIN)/duotone compare --scheme duotone-klt --beside calibquant --later-question

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# The slow tests as well: all cases and examples, and every shape checked.
test-all: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not gpu"

# Tests of hf with the oldest transformers that pyproject.toml allows, in a folder of its own.
OLDEST ?= .venv-oldest
test-oldest: $(READY) $(OLDEST)/ready
	OMP_NUM_THREADS=1 PYTHONPATH=$(OLDEST):src \
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests/hf

$(OLDEST)/ready:
	$(BIN)/python -m pip install --quiet --target $(OLDEST) transformers==5.17.0
	touch $@

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# On a machine with a GPU, with whatever Python holds a CUDA build of torch. A process per file, so
# many at a time: most of a test's time is compiling. 5: a file has none that can run here.
GPU_WORKERS ?= 4
GPU_PYTEST := $(PYTHON) -m pytest -o addopts="--import-mode=importlib" -p no:benchmark -m gpu -q
gpu-test:
	grep -rlE "mark.gpu|NEEDS_KERNELS" tests --include="test_*.py" | sort | \
	PYTHONPATH=src xargs -P $(GPU_WORKERS) -I FILE sh -c '$(GPU_PYTEST) FILE || test $$? = 5'

# Tests of the plug-in in vLLM's build without kernels, on a CPU, in an environment of its own.
VLLM_VENV ?= .venv-vllm
test-vllm: $(VLLM_VENV)/ready
	PYTHONPATH=src $(VLLM_VENV)/bin/python -m pytest tests/serve -m vllm -p no:cacheprovider

$(VLLM_VENV)/ready: .ci/vllm
	.ci/vllm $(PYTHON) $(VLLM_VENV)
	touch $@

# The pages of docs/ as a site in site/; a warning is an error.
docs: $(SITE)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "python -m http.server -d site shows it, with its search"

bench:
	PYTHONPATH=src $(PYTHON) -m duotone bench kernel --table decode --out results/kernels/$(shell date +%F).json
	PYTHONPATH=src $(PYTHON) -m benchmarks.quality.table ingredients --out results/quality

PIP = $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

# What users install. Of pip's output stays what is downloaded and installed.
$(BASE): SHELL := /bin/bash
$(BASE): .SHELLFLAGS := -o pipefail -c
$(BASE): pyproject.toml constraints.txt
	@echo "Installing torch, transformers and duotone into $(VENV), once; this takes a minute or more."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) torch | { grep --line-buffered -E "^ *(Downloading|Installing)" || true; }
	@$(PIP) -e . | { grep --line-buffered -E "^ *(Downloading|Installing)" || true; }
	touch $@

$(READY): $(BASE)
	$(PIP) --quiet -e ".[dev]"
	touch $@

$(SITE): $(BASE)
	$(PIP) --quiet -e ".[docs]"
	touch $@

clean:
	rm -rf site $(VENV) $(VLLM_VENV) $(OLDEST) .pytest_cache .ruff_cache .hypothesis
