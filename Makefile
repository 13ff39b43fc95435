# `make demo` and `make test` each make .venv if it is missing, install what they need, and do their job.
# Another interpreter: make test PYTHON=python3.12. A part of the tests: make test PYTEST_ARGS="-k sampler".

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=

BIN := $(VENV)/bin
RUN_READY := $(VENV)/.ready-run
VLM_READY := $(VENV)/.ready-vlm
DEV_READY := $(VENV)/.ready-dev
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo demo-vlm test coverage test-fast test-gpu lint format doctor clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(RUN_READY) ## DoorKey-6x6 with VLM-guided replay beside uniform replay; results in runs/demo/
	$(BIN)/vlmrb demo

demo-vlm: $(VLM_READY) ## a small DoorKey-8x8, clips scored by a tiny trained model of the Perception-LM family; results in runs/demo_vlm/
	$(BIN)/vlmrb fit -c configs/minigrid/doorkey_8x8_small_dqn.yaml -c configs/scorer/tiny_vlm.yaml \
		--run_dir runs/demo_vlm --overwrite true

test: $(DEV_READY) ## every test that needs no GPU
	$(BIN)/python -m pytest -n auto -m "not gpu" --durations 20 $(PYTEST_ARGS)

coverage: $(DEV_READY) ## the same, and which lines they reach; takes longer
	$(BIN)/python -m pytest -n auto -m "not gpu" --cov=vlmrb --cov-report=term:skip-covered $(PYTEST_ARGS)

test-fast: $(DEV_READY) ## the tests that take no more than a few seconds each
	$(BIN)/python -m pytest -n auto -m "not slow and not gpu" $(PYTEST_ARGS)

test-gpu: $(DEV_READY) ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

lint: $(DEV_READY) ## ruff, format check, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src

format: $(DEV_READY) ## let ruff fix and format the tree
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

doctor: $(RUN_READY) ## look at the installation, GPU, rendering and disk
	$(BIN)/vlmrb doctor

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "vlmrb needs Python 3.11 or newer; name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): about 5 GB the first time, most of it PyTorch with its CUDA libraries"

# A stamp is as old as the last complete installation; a newer pyproject.toml, or an interrupted one, repeats it.
$(RUN_READY): pyproject.toml | $(BIN)/pip
	$(INSTALL) -e .
	@touch $@

$(VLM_READY): pyproject.toml | $(BIN)/pip
	$(INSTALL) -e '.[vlm]'
	@touch $(RUN_READY) $@

$(DEV_READY): pyproject.toml | $(BIN)/pip
	$(INSTALL) -e '.[dev]'
	@touch $(RUN_READY) $@

clean: ## remove caches and build products; runs/ and .venv stay
	rm -rf build dist src/*.egg-info .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv as well
	rm -rf $(VENV)
