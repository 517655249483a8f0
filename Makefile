# Needs Python 3.11+ and make. Every target but dist and clean first brings .venv up to date with pyproject.toml and
# requirements.lock, so `make train` and `make test` work in a fresh clone.
PYTHON  ?= python3
WORKERS ?= 2
GPUS    ?= 80 86 89 90
ARGS    ?=
RELEASE_TOOLS := build==1.6.1 twine==7.0.0 cffconvert==2.0.0

# Bytecode is kept, out of the sources, whatever the environment says: tests start many processes, each of which would
# otherwise compile PyTorch's modules anew.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX     := $(CURDIR)/.venv/bytecode

BIN       := .venv/bin
INSTALLED := .venv/.installed

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup train test test-main interpret emulate lint format types docs aot bench gpu dist clean

help:
	@echo "make train [ARGS=...]   train a small GPT in NVFP4 beside its BF16 twin (ARGS=--help lists the options)"
	@echo "make test [ARGS=...]    all tests, and the kernels under Triton's interpreter"
	@echo "make lint | format      ruff: check, or rewrite in place"
	@echo "make types              strict type check"
	@echo "make docs               documentation, warnings as errors, into docs/_build/html"
	@echo "make interpret          only the kernel parity tests under Triton's interpreter (CPU)"
	@echo "make emulate [GPUS=89]  casts and products as ptxas compiles them for Ampere, Ada and Hopper, run by NumPy"
	@echo "make aot                compile the kernels ahead of time for GPUs that are not here"
	@echo "make bench [ARGS=...]   benchmarks (a GPU makes them meaningful)"
	@echo "make gpu                what only a GPU can show: parity, GPU tests, benchmarks, the 10m preset"
	@echo "make dist               wheel and source distribution of the last commit, into dist/, checked and installed"
	@echo "make clean              remove caches and build outputs; keeps .venv and runs/"

setup: $(INSTALLED)

# Without bytecode, which takes as long as all the rest: Python writes that of a module when the module is first imported.
$(INSTALLED): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "fp4engine needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1); try: make PYTHON=python3.12 ..." >&2; exit 2; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	@echo "installing into .venv; the first time this takes minutes, and pip says nothing meanwhile"
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c requirements.lock -e ".[dev,docs,examples,export,integrations]"
	@touch $@

train: $(INSTALLED)
	$(BIN)/python examples/train_gpt.py $(ARGS)

# The interpreter runs first so that the summary of the whole suite comes last; `make -k test` runs both whatever happens.
test: interpret test-main

test-main: $(INSTALLED)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

# A process of its own: Triton decides at import whether its kernels are compiled or interpreted.
interpret: $(INSTALLED)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests/parity

EMULATED = $(addprefix tests/parity/test_,quantize_kernels.py dequantize_kernel.py tiles_kernel.py cast_fp8_kernel.py \
             gemm_kernel.py blackwell_kernel.py)

emulate: $(INSTALLED)
	for gpu in $(GPUS); do EMULATED_GPU=$$gpu $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(EMULATED) || exit 1; done

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(INSTALLED)
	$(BIN)/basedpyright

docs: $(INSTALLED)
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html

aot: $(INSTALLED)
	@if [ -f tools/aot.py ]; then set -x; $(BIN)/python tools/aot.py $(ARGS); else echo "make aot: no kernels to compile yet"; fi

bench: $(INSTALLED)
	$(BIN)/python benchmarks/run.py $(ARGS)

gpu: $(INSTALLED)
	$(BIN)/python -m pytest -n $(WORKERS) -p no:cacheprovider tests/parity
	$(BIN)/python -m pytest -p no:cacheprovider -m gpu tests/modules tests/unit tests/examples
	$(BIN)/python benchmarks/run.py
	$(BIN)/python examples/train_gpt.py --preset 10m --name 10m

# From the commit: beside it may lie files that git does not know, and a build would take them. The wheel then has to run the
# README's example where nothing but its own dependencies is installed.
dist:
	rm -rf dist build
	mkdir -p build/source
	git archive HEAD | tar -x -C build/source
	$(PYTHON) -m venv build/tools
	build/tools/bin/python -m pip install --quiet --disable-pip-version-check $(RELEASE_TOOLS)
	build/tools/bin/cffconvert --validate --infile build/source/CITATION.cff
	build/tools/bin/python -m build --outdir dist build/source
	build/tools/bin/twine check --strict dist/*
	$(PYTHON) -m venv build/empty
	build/empty/bin/python -m pip install --quiet --disable-pip-version-check -c requirements.lock dist/*.whl
	sed -n '/^```python/,/^```$$/{/^```/d;p;}' build/source/README.md > build/readme.py
	cd build && empty/bin/python -I readme.py

clean:
	rm -rf docs/_build dist build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
