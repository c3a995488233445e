# Everything runs in .venv, made on first use. `make quickstart` trains an agent on this machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCHMARKS := architectures head history methods packing parity prefix_cache rollout step tree_row weight_sync

.PHONY: quickstart test lint bench server-cpu warm-start clean

quickstart: $(VENV)/.installed
	$(BIN)/mt-grpo train --config recipes/quickstart.yaml

test: lint server-cpu
	$(BIN)/python -m pytest --numprocesses=2 --dist=loadfile --max-worker-restart=0 --cov=mt_grpo.trajectory \
		--cov=mt_grpo.credit --cov=mt_grpo.rewards --cov-branch --cov-report=term-missing --cov-fail-under=100

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

# Every benchmark that needs no GPU, one after another; each prints a table and writes benchmarks/results/.
bench: $(VENV)/.installed server-cpu
	set -e; for name in $(BENCHMARKS); do $(BIN)/python benchmarks/$$name.py; done

# The environment of a vLLM server that runs on a CPU; tests and `mt-grpo serve` use it where it is there.
server-cpu: .venv-vllm/.installed

.venv-vllm/.installed: pyproject.toml scripts/install_server_cpu.sh
	PYTHON=$(PYTHON) scripts/install_server_cpu.sh .venv-vllm
	touch $@

warm-start: $(VENV)/.installed
	$(BIN)/python scripts/warm_start.py

$(VENV)/.installed: pyproject.toml scripts/install.sh
	PYTHON=$(PYTHON) scripts/install.sh $(VENV) ".[test]"
	touch $@

clean:
	rm -rf $(VENV) .venv-vllm runs
