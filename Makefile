# make demo        set up .venv, build, and generate text with the bundled model
# make test        set up what the tests need and run them all: pytest, then ctest
# make test-gpu    the tests that need a GPU
# make bench       measure every op against this machine's roof
# make lint        ruff, mypy, layering
# make wheel       build the wheel into dist/
# make clean       remove what the above built; .venv stays (make distclean removes it)
#
# PYTHON=python3.12   the Python to start from (3.10 or later)
# VENV=none           use PYTHON as it is: nothing is created, installed or built
# CUDA=AUTO|ON|OFF    build the CUDA ops; by default where there is an NVIDIA GPU
# TORCH=torch==X      the torch to install. pip's default index may have it with CUDA (gigabytes)
#                     even where there is no GPU; pip's own settings can name another index.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
MODEL ?= models/demo
PROMPT ?= def fibonacci(n):
GPU := $(shell command -v nvidia-smi 2>/dev/null)
CUDA ?= $(if $(GPU),AUTO,OFF)
CUDA_ARCHS ?=
PYTEST_ARGS ?=
CPP_DIR := build/cpp

# The stable ABI lets one build serve every torch from 2.10 on; tools are pinned to a range that is
# known to work. The compiler comes from PyPI where there is a GPU but no nvcc.
BUILD_TOOLS := 'scikit-build-core>=0.10,<2' 'pybind11>=2.13,<4' 'cmake>=3.25,<5' 'ninja>=1.11,<2'
NVCC := $(firstword $(wildcard $(CUDACXX) $(CUDA_HOME)/bin/nvcc /usr/local/cuda/bin/nvcc) \
          $(shell command -v nvcc 2>/dev/null))
COMPILER := $(foreach part,cuda-nvcc cuda-crt nvvm cuda-cccl cuda-runtime,'nvidia-$(part)==13.0.*')
BUILD_TOOLS += $(if $(filter OFF,$(CUDA)),,$(if $(NVCC),,$(COMPILER)))

# Read by the build backend, whatever the age of pip.
export SKBUILD_BUILD_DIR := build/python
export SKBUILD_CMAKE_DEFINE := \
  RIDGELINE_CUDA=$(CUDA)$(if $(CUDA_ARCHS),;RIDGELINE_CUDA_ARCHS=$(CUDA_ARCHS))
PIP_INSTALL = $(RUN) -m pip install -qq --disable-pip-version-check
BUILD_INSTALL = $(WITH_TOOLS); $(PIP_INSTALL) --no-build-isolation $(TORCH) $(BUILD_TOOLS)

# A venv's programs (cmake, ninja) come before the machine's.
ifeq ($(VENV),none)
  RUN := $(PYTHON)
  WITH_TOOLS := true
else
  RUN := $(VENV)/bin/python
  WITH_TOOLS := export PATH="$$(cd $(VENV)/bin && pwd):$$PATH"
  INSTALLED := $(VENV)/.stamp-installed
  TESTABLE := $(VENV)/.stamp-testable
endif

SOURCES := CMakeLists.txt pyproject.toml python/ridgeline/_version.py \
  $(shell find cmake csrc -type f 2>/dev/null)

.PHONY: demo setup test test-python test-cpp test-gpu bench lint wheel clean distclean
.DEFAULT_GOAL := demo

demo: $(INSTALLED)
	@$(RUN) -m ridgeline generate --model $(MODEL) "$(PROMPT)"

# All that the tests need, built and installed.
setup: $(TESTABLE)

test: test-python test-cpp

test-python: $(TESTABLE)
	@$(RUN) -m pytest $(PYTEST_ARGS)

# Engine and plain C++ parts, without Python or torch.
test-cpp: $(TESTABLE)
	@$(WITH_TOOLS); cmake -S . -B $(CPP_DIR) -G Ninja --log-level=WARNING \
	  -DRIDGELINE_PYTHON=OFF -DRIDGELINE_TESTS=ON
	@$(WITH_TOOLS); cmake --build $(CPP_DIR) && ctest --test-dir $(CPP_DIR) --output-on-failure

test-gpu: $(TESTABLE)
	@$(RUN) -m pytest -v -m gpu $(PYTEST_ARGS)

bench: $(INSTALLED)
	@$(RUN) benchmarks/run_all.py $(BENCH_ARGS)

lint: $(TESTABLE)
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy
	@$(RUN) -m pytest -q tests/test_layering.py

wheel: $(INSTALLED)
	@$(WITH_TOOLS); $(RUN) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls -lh dist/*.whl | awk '{print $$9 ": " $$5}'

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f .venv/.stamp-installed .venv/.stamp-testable
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv

ifneq ($(VENV),none)
$(VENV)/.stamp-created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10+ is needed")'
	@echo "Creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.stamp-tools: $(VENV)/.stamp-created
	@echo "Installing $(TORCH) and the build tools"
	@$(PIP_INSTALL) --upgrade 'pip>=23.1'
	@$(PIP_INSTALL) $(TORCH) $(BUILD_TOOLS)
	@touch $@

# Changes only when the options of the build do.
OPTIONS := $(TORCH) $(BUILD_TOOLS) $(SKBUILD_CMAKE_DEFINE)
$(VENV)/.options: FORCE | $(VENV)/.stamp-tools
	@echo "$(OPTIONS)" | cmp -s - $@ || echo "$(OPTIONS)" > $@
FORCE:

# Editable: changed Python files are live, changed C++ files are compiled again here, one by one.
$(INSTALLED): $(VENV)/.options $(SOURCES)
	@echo "Building and installing ridgeline (CUDA=$(CUDA)); the first time takes minutes"
	@$(BUILD_INSTALL) -e '.[llm]'
	@touch $@

$(TESTABLE): $(VENV)/.options $(SOURCES)
	@echo "Building and installing ridgeline for tests (CUDA=$(CUDA)); the first time takes minutes"
	@$(BUILD_INSTALL) -e '.[dev]'
	@touch $(INSTALLED) $@
endif
