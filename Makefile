# Everything runs in .venv, made on first use. `make quickstart` trains an agent on this machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCHMARKS := answers architectures head history methods packing parity prefix_cache rollout step tokens_trained tree_row \
	viewer weight_sync weight_fetch weight_delta weight_pause admission

# A process more than there are cores, since tests wait too, and four at most: each takes up to 3.5 GB with the vLLM
# server of its tests. Files are handed out as tests/conftest.py orders them.
PROCESSES := $(shell $(PYTHON) -c "import os; print(min((os.cpu_count() or 1) + 1, 4))")
WORKERS := --numprocesses=$(PROCESSES) --dist=loadfile --no-loadscope-reorder --max-worker-restart=0

TRL_OLDEST := 1.15.0
MCP_OLDEST := 1.30.0

.PHONY: quickstart test alone others covering check lint format bench browser sandbox server-cpu trl-oldest warm-start clean
.PHONY: ablation bench-environments bench-quick interop interop-games interop-agents interop-deepspeed interop-device interop-harbor interop-trl interop-verifiers

quickstart: $(VENV)/.installed
	$(BIN)/mt-grpo train --config recipes/quickstart.yaml

# Tests that cover all of the rooms that are held to it. Coverage makes any Python take half as long again, so the others
# run without.
COVERING := credit rewards test_trajectory.py forward/test_routes.py integrations/test_verl_names.py \
	rollout/test_branching.py rollout/test_token_row.py runlog/test_runlog.py training/test_nonfinite.py \
	training/test_reward_batch.py training/test_reward_columns.py

# What one process does alone goes beside what the others do.
test:
	$(MAKE) --jobs=3 $(VENV)/.installed server-cpu browser sandbox
	$(MAKE) --jobs=2 alone others || { echo "Lines above that begin with make and have *** say what failed." >&2; exit 1; }

alone:
	$(MAKE) $(if $(filter output-sync,$(.FEATURES)),--output-sync) lint trl-oldest covering

others: $(VENV)/.installed
	$(BIN)/python -m pytest $(WORKERS) $(COVERING:%=--ignore=tests/%) -m "not bench"

covering: $(VENV)/.installed
	$(BIN)/python -m pytest $(COVERING:%=tests/%) --cov=mt_grpo.trajectory --cov=mt_grpo.token_tree \
		--cov=mt_grpo.credit --cov=mt_grpo.rewards --cov-branch --cov-report=term-missing --cov-fail-under=100

# What most changes break, in minutes: lint, and every test that is quick and needs no server. With `ROOM=credit` only
# those of one room.
check: lint
	$(BIN)/python -m pytest $(WORKERS) -m "not slow and not server" $(ROOM:%=tests/%)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The oldest TRL that is allowed: what we rely on in it, and a run of it.
trl-oldest: $(VENV)/.installed .venv-trl-oldest/.installed
	PYTHONPATH=$(CURDIR)/.venv-trl-oldest $(BIN)/python -c "import trl; assert trl.__version__ == '$(TRL_OLDEST)', trl.__file__"
	PYTHONPATH=$(CURDIR)/.venv-trl-oldest $(BIN)/python -m pytest tests/training/test_trl_contract.py
	PYTHONPATH=$(CURDIR)/.venv-trl-oldest $(BIN)/python -m mt_grpo train --config recipes/quickstart.yaml --max_steps 2 --do_eval false \
		--output_dir runs/trl-oldest --overwrite_output_dir true

.venv-trl-oldest/.installed: $(VENV)/.installed
	$(BIN)/pip install --quiet --no-deps --upgrade --target .venv-trl-oldest trl==$(TRL_OLDEST)
	touch $@

# What people bring, with other versions of its libraries than those in .venv.
interop: $(VENV)/.installed .venv-mcp-oldest/.installed
	PYTHONPATH=$(CURDIR)/.venv-mcp-oldest $(BIN)/python -c "from importlib.metadata import version; assert version('mcp') == '$(MCP_OLDEST)'"
	PYTHONPATH=$(CURDIR)/.venv-mcp-oldest $(BIN)/python -m pytest tests/tools/test_mcp.py tests/tools/test_mcp_pool.py tests/tools/test_tool_file.py

# Games and environments of others, played for real, each library in an environment of its own over that of .venv.
interop-games: .venv-interop/games/.installed .venv-interop/openenv/.installed
	.venv-interop/games/bin/python -m pytest tests/interop/test_games.py
	.venv-interop/openenv/bin/python -m pytest tests/interop/test_openenv_servers.py

# What a second OpenEnv server gains. It needs OpenEnv, so `make bench` leaves it out.
bench-environments: .venv-interop/openenv/.installed
	.venv-interop/openenv/bin/python benchmarks/environment_pool.py

# Agents of frameworks, trained for real, once on a real server.
interop-agents: .venv-interop/agents/.installed server-cpu
	.venv-interop/agents/bin/python -m pytest tests/interop/test_agent_frameworks.py

# Tasks of Harbor in real containers, inside a Debian that has podman, Docker and Python 3.13; with `ENGINE=docker` those
# of Docker.
ENGINE ?= podman
interop-harbor:
	scripts/containers.sh .venv-interop/containers -e "/host$(CURDIR)[harbor]" pytest pytest-timeout hypothesis
	.venv-interop/containers/engine $(ENGINE) & engine=$$!; .venv-interop/containers/in bash -c \
		"until $(ENGINE) image inspect localhost/agents:1 > /dev/null 2>&1; do sleep 1; done; cd /host$(CURDIR) && \
		MT_GRPO_ENGINE=$(ENGINE) python -m pytest -p no:cacheprovider tests/interop/test_harbor.py"; \
		status=$$?; kill $$engine $$(cat .venv-interop/containers/root/run/docker.pid 2> /dev/null); exit $$status

# DeepSpeed on two processes without a GPU, once with a real server.
interop-deepspeed: .venv-interop/deepspeed/.installed server-cpu
	.venv-interop/deepspeed/bin/python -m pytest tests/interop/test_deepspeed.py

# What would be left behind on the CPU where a model is on a GPU, on a device that a C++ compiler makes.
interop-device: $(VENV)/.installed
	OTHER_DEVICE=1 $(BIN)/python -m pytest tests/interop/test_other_device.py

# TRL's own tests of its trainer with ours in its place: `make interop-trl TRL=path/to/a/clone`. docs/trl.md says what
# fails, and why.
interop-trl: .venv-interop/trl/.installed
	.venv-interop/trl/bin/python tests/interop/trl_tests.py $(TRL)

.venv-interop/trl/.installed: $(VENV)/.installed scripts/install_over.sh
	scripts/install_over.sh $(VENV) .venv-interop/trl .
	.venv-interop/trl/bin/pip install --quiet jmespath
	touch $@

.venv-interop/deepspeed/.installed: $(VENV)/.installed scripts/install_over.sh
	scripts/install_over.sh $(VENV) .venv-interop/deepspeed ".[deepspeed]"
	touch $@

.venv-interop/agents/.installed: $(VENV)/.installed scripts/install_over.sh
	scripts/install_over.sh $(VENV) .venv-interop/agents ".[agents]"
	touch $@

.venv-interop/games/.installed: $(VENV)/.installed scripts/install_over.sh
	scripts/install_over.sh $(VENV) .venv-interop/games ".[textarena,reasoning-gym]"
	touch $@

.venv-interop/openenv/.installed: $(VENV)/.installed scripts/install_over.sh
	scripts/install_over.sh $(VENV) .venv-interop/openenv ".[openenv]"
	touch $@

# Environments of verifiers, trained unmodified: the last version with `load_environment`, and that with tasksets.
VERIFIERS = git+https://github.com/PrimeIntellect-ai/verifiers
VERIFIERS_ENVIRONMENTS = a60a606ecc4d309247edf9ff92c3eabca362781f

interop-verifiers: .venv-interop/verifiers/.installed .venv-interop/verifiers-v1/.installed
	.venv-interop/verifiers/bin/python -m pytest tests/interop/test_verifiers.py
	.venv-interop/verifiers-v1/bin/python -m pytest tests/interop/test_verifiers.py

.venv-interop/verifiers/.installed: $(VENV)/.installed scripts/install_over.sh
	scripts/install_over.sh $(VENV) .venv-interop/verifiers ".[verifiers]"
	.venv-interop/verifiers/bin/pip install --quiet --no-deps "$(VERIFIERS)@v0.2.0#subdirectory=environments/tool_test"
	touch $@

.venv-interop/verifiers-v1/.installed: $(VENV)/.installed scripts/install_over.sh
	scripts/install_over.sh $(VENV) .venv-interop/verifiers-v1 ".[verifiers-v1]"
	for name in glossary kuhn_poker; do .venv-interop/verifiers-v1/bin/pip install --quiet --no-deps \
		"$(VERIFIERS)@$(VERIFIERS_ENVIRONMENTS)#subdirectory=environments/$$name" || exit 1; done
	touch $@

# The oldest that is allowed, and what it needs beside what the newest needs.
.venv-mcp-oldest/.installed: $(VENV)/.installed
	$(BIN)/pip install --quiet --no-deps --upgrade --target .venv-mcp-oldest mcp==$(MCP_OLDEST) httpx-sse pydantic-settings python-dotenv
	touch $@

# Every benchmark that needs no GPU, one after another; each prints a table and writes benchmarks/results/. At last
# these are held against the committed ones.
bench: $(VENV)/.installed server-cpu
	set -e; for name in $(BENCHMARKS); do $(BIN)/python benchmarks/$$name.py; done
	$(BIN)/python benchmarks/compare.py

# Those with a real vLLM server in their quick mode, in minutes: what they measure is tested elsewhere, and `make test`
# leaves them out.
bench-quick: $(VENV)/.installed server-cpu
	$(BIN)/python -m pytest tests/test_benchmarks.py -m bench

# Credit rules compared over many runs, in about an hour on two cores; goes on where it was interrupted.
ablation: $(VENV)/.installed
	$(BIN)/python benchmarks/ablation.py

# The environment of a vLLM server that runs on a CPU; tests and `mt-grpo serve` use it where it is there.
server-cpu: .venv-vllm/.installed

.venv-vllm/.installed: pyproject.toml scripts/install_server_cpu.sh
	PYTHON=$(PYTHON) scripts/install_server_cpu.sh .venv-vllm
	touch $@

# A browser for the tests of `mt-grpo view`, where it can be installed.
browser:
	scripts/install_package.sh chromium-headless-shell "tests of the page" chromium-headless-shell fonts-dejavu-core

# Sandboxes without containers, for the tests of tasks in a terminal.
sandbox:
	scripts/install_package.sh bwrap "tests of sandboxes" bubblewrap

warm-start: $(VENV)/.installed
	$(BIN)/python scripts/warm_start.py

$(VENV)/.installed: pyproject.toml scripts/install.sh
	PYTHON=$(PYTHON) scripts/install.sh $(VENV) ".[test]"
	touch $@

clean:
	rm -rf $(VENV) .venv-vllm .venv-trl-oldest .venv-mcp-oldest .venv-interop runs
