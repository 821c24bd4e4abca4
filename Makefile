# Every target does the set-up that it needs. `make help` lists them.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
MODEL := smollm2-135m
QUICK_FLAG := $(if $(filter-out 0 false no,$(QUICK)),--quick)

# Stamps are written on success alone, so what was interrupted is done again.
INSTALLED := $(VENV)/.installed
FETCHED := $(VENV)/.model-fetched
# One set-up at a time, also from several shells; without flock (macOS) runs must not overlap.
ALONE := $(if $(shell command -v flock),flock .setup.lock)

FITS := import sys; sys.exit(sys.version_info < (3, 11))
REFUSE := import sys; sys.version_info >= (3, 11) or sys.exit("Python %d.%d is too old, 3.11 or newer is needed; name one: make PYTHON=python3.12 ..." % sys.version_info[:2])

# What acceptance runs beyond a report's defaults.
ACCEPT_0 := -p num_generated 64 -p num_alone 64 -p num_compositions 8 -p pairs 20 -p slow_down 0.25
ACCEPT_1 := -p num_prompts 64 -p mode_pairs 12
ACCEPT_2 := -p num_prompts 64 -p mode_pairs 12
ACCEPT_3 := -p num_prompts 64 -p mode_pairs 12 -p overload_pairs 10
ACCEPT_4 := -p num_prompts 24 -p pairs 10 -p mode_pairs 10 -p every_row True

.DEFAULT_GOAL := help
.PHONY: help setup test lint format report golden accept bench-chunked bench-continuous bench-prefix bench-pd bench-peers bench-ops bench-scheduler gpu-check lab clean distclean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Make .venv, install the package with its dependencies, fetch the default model
	@$(ALONE) $(MAKE) --no-print-directory --silent $(FETCHED)

$(INSTALLED): pyproject.toml requirements.lock
	@$(PY) -c '$(FITS)' 2>/dev/null || { $(PYTHON) -c '$(REFUSE)' && $(PYTHON) -m venv --clear $(VENV); }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip --upgrade
	$(PY) -m pip install --disable-pip-version-check --no-compile -c requirements.lock -e '.[dev]'
	@touch $@

$(FETCHED): $(INSTALLED) engine/models/hub.py engine/models/gguf_import.py
	$(PY) -m engine.models.hub $(MODEL)
	@touch $@

test: setup ## Run the tests, two files at a time (ARGS="-k scheduler" goes to pytest)
	$(PY) -m pytest -n 2 --dist loadfile $(ARGS)

lint: setup ## Check style, format and types
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

format: setup ## Sort imports and format
	$(PY) -m ruff check --fix --select I
	$(PY) -m ruff format

report: setup ## Run the notebooks and write reports/*.html (STAGE=n for one stage, QUICK=1 for a fast run)
	$(PY) -m lab report $(addprefix --stage ,$(STAGE)) $(QUICK_FLAG) $(ARGS)

golden: setup ## Run a stage's golden matrix on the real model (STAGE=n, default 0)
	$(PY) -m lab golden --stage $(or $(STAGE),0) $(ARGS)

accept: test ## Accept stages: the tests, then each one's full report (STAGE=n, or STAGE="0 1")
	@for stage in $(or $(STAGE),0); do $(MAKE) --no-print-directory accept-$$stage || exit 1; done

accept-%: setup
	$(PY) -m lab report --stage $* $(ACCEPT_$*)

bench-chunked: setup ## Chunked against whole prefills on long_prompts_with_decode, in pairs (CHUNK=tokens)
	$(PY) -m lab bench workloads/long_prompts_with_decode.yaml --options max_num_seqs=8 num_kv_blocks=1024 enable_prefix_caching=False --baseline enable_chunked_prefill=False max_num_batched_tokens=2048 --feature max_num_batched_tokens=$(or $(CHUNK),128) $(ARGS)

bench-continuous: setup ## Continuous against static batching on mixed_lengths, in pairs (TRACE=path: on a public trace)
	$(PY) -m lab bench $(or $(TRACE),workloads/mixed_lengths.yaml) --options max_num_seqs=8 num_kv_blocks=512 enable_prefix_caching=False enable_chunked_prefill=False max_num_batched_tokens=2048 --baseline batching=static --feature batching=continuous $(ARGS)

bench-prefix: setup ## Prefix caching on and off on shared_prefix, in pairs (TRACE=path: on a public trace)
	$(PY) -m lab bench $(or $(TRACE),workloads/shared_prefix.yaml) --options max_num_seqs=8 num_kv_blocks=512 --baseline enable_prefix_caching=False --feature enable_prefix_caching=True $(ARGS)

bench-pd: setup ## Prefill and decode apart (1P1D) against one engine on pd_interference, in pairs (CHANNEL=nixl|distributed)
	$(PY) -m lab bench workloads/pd_interference.yaml --options max_num_seqs=8 num_kv_blocks=512 kv_channel=$(or $(CHANNEL),auto) --baseline disaggregated=False --feature disaggregated=True $(ARGS)

bench-ops: setup ## Measure every op against torch's
	$(PY) -m lab.bench_ops $(ARGS)

bench-peers: setup ## Side by side with vLLM, transformers and llama.cpp on the CPU (builds .venv-peers; QUICK=1 for a fast run)
	$(PY) -m lab report --stage peers --stage peers_exactness $(QUICK_FLAG) $(ARGS)

gpu-check: ## On a GPU: the kernels' exactness, the goldens, and their speed (needs no set-up: torch, triton, transformers, pandas)
	$(if $(wildcard $(PY)),$(PY),$(PYTHON)) -m lab.gpu_check $(ARGS)

bench-scheduler: setup ## Measure the scheduler's own cost per step, without a model
	$(PY) -m lab.bench_scheduler $(ARGS)

lab: setup ## Open the notebooks in JupyterLab
	$(PY) -m jupyterlab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/notebooks $(ARGS)

clean: ## Remove what was built: HTML, records, traces, caches
	rm -rf reports/*.html reports/quick reports/runs build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name '.venv*' -prune -o -type d \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +

distclean: clean ## Remove the environments too (the model stays in the user's cache)
	rm -rf $(VENV) .venv-peers .setup.lock
