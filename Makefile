# `make test` is all a newcomer needs: it makes .venv, fetches the default model into it and runs every test.
# Nothing outside this checkout is needed or touched, but pip's cache. Works with GNU make 3.81.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	if $$p -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then echo $$p; break; fi; done)
BIN := .venv/bin
# Four workers for two cores: one for the tests that look at the clock, which goes first, and three for all others
# (tests/conftest.py); many tests wait for time to pass more than they compute.
PYTEST_ARGS ?= -n 4 --dist loadscope

export DISCO_MODELS_DIR := $(CURDIR)/.venv/models
# A run of the tests starts Python a thousand times, which would compile everything a thousand times.
unexport PYTHONDONTWRITEBYTECODE
# llama.cpp is compiled once, minutes on a small machine; afterwards its wheel comes out of pip's cache.
ifndef CMAKE_BUILD_PARALLEL_LEVEL
export CMAKE_BUILD_PARALLEL_LEVEL := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
endif
# In double quotes: a checkout's path may have spaces.
export CMAKE_ARGS := "-DCMAKE_PROJECT_llama_cpp_INCLUDE=$(CURDIR)/native/llama_cpp.cmake" $(CMAKE_ARGS)

PIP := $(BIN)/python -m pip --disable-pip-version-check
LOCK := $(CURDIR)/.venv/tools/bin/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate
LOCKS := requirements-build.lock requirements-dev.lock

.PHONY: test fast check clients contract agents audit lock sbom fmt docs site model screenshots film binary test-binary clean

test: model
	$(BIN)/python -m pytest $(PYTEST_ARGS)

fast: model
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

# On a busy machine mypy's workers give up on each other, without a word on the code: then one process looks at all of it.
check: .venv/.stamp
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy -n 2 || $(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/sentences.py --quiet

# Unmodified client libraries, in .venv-clients and node_modules, against a daemon with a device and a scripted server.
# Where no registry answers, or node is not there, they are skipped, and the reason is printed.
clients: model
	$(BIN)/python -m tests.clients $(CLIENTS)

# The agents that people use, in .venv-agents and node_modules, in a network namespace of their own: AGENTS="--runs 20".
# Where no registry answers, node is too old or no namespace can be made, they are skipped, and the reason is printed.
agents: model
	$(BIN)/python -m tests.coding_agents $(AGENTS)

# What the daemon answers against its own /openapi.json: 2,000 cases that schemathesis makes, in .venv-contract.
contract: model
	$(BIN)/python -m tests.contract $(CONTRACT)

# Known vulnerabilities of what is installed for users; asks the Python Packaging Authority's database.
audit: .venv/tools/.stamp
	.venv/tools/bin/pip-audit --require-hashes --disable-pip -r requirements-fleet.lock -r requirements-build.lock

# Newer versions: remove a line from a lock file, or the file; those that stay are kept as they are.
lock: .venv/tools/.stamp
	$(LOCK) --extra dev --extra binary -o requirements-dev.lock pyproject.toml
	$(LOCK) -c requirements-dev.lock -o requirements.lock pyproject.toml
	$(LOCK) -c requirements-dev.lock --extra fleet -o requirements-fleet.lock pyproject.toml
	$(LOCK) --group build -o requirements-build.lock
	$(LOCK) --group tools -o requirements-tools.lock
	$(LOCK) --group site -o requirements-site.lock
	$(LOCK) -o tests/clients/requirements.lock tests/clients/requirements.in
	$(LOCK) -o tests/contract/requirements.lock tests/contract/requirements.in
	$(LOCK) -o tests/coding_agents/requirements.lock tests/coding_agents/requirements.in
	$(LOCK) -o benchmarks/peers/requirements.lock benchmarks/peers/requirements.in

# The list of what users get, dist/sbom.cdx.json, in CycloneDX's form.
sbom: .venv/tools/.stamp
	mkdir -p dist
	.venv/tools/bin/cyclonedx-py requirements --output-reproducible --pyproject pyproject.toml \
		--of JSON -o dist/sbom.cdx.json requirements.lock

fmt: .venv/.stamp
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# The pictures in the documents are those that the tests compare the screens with.
screenshots: .venv/.stamp
	UPDATE_SNAPSHOTS=1 $(BIN)/python -m pytest -q tests/tui

# The picture of the README that moves: a real answer that loses its server, as the terminal UI shows it. Half a minute.
film: model
	$(BIN)/python -m tests.fixtures.film_tui

# What documents say by code (command line, settings, routes, bounds, the states of an answer), and build/site, all pages
# as a site. A link that leads nowhere ends it. The pages are written first, without what the site is made with.
docs: .venv/.stamp
	$(BIN)/python docs/generate.py
	@$(MAKE) site

site: .venv/site/.stamp
	$(BIN)/python docs/site.py
	.venv/site/bin/zensical build --strict -f build/zensical.toml

model: .venv/.stamp .venv/.kernels
	$(BIN)/disco models fetch

# One executable with all in it, dist/disco: docs/howto/binary.md. NATIVE=1: for this very processor, and minutes sooner.
binary: model
	PYTHONPATH=.ci $(BIN)/python -m binary.build $(if $(NATIVE),--native)

test-binary:
	$(BIN)/python -m pytest tests/e2e/cli/test_binary.py tests/e2e/cli/test_launcher.py \
		tests/e2e/cli/test_service_live.py

# The stamp is written last: a run that was killed, or a change of pyproject.toml or a lock file, installs again. All that
# is installed comes from the lock files, by their hashes, the tools that build it too.
.venv/.stamp: pyproject.toml $(LOCKS)
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 with venv found: install one, or make PYTHON=/path/to/python" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear .venv
	$(PIP) install --no-compile --require-hashes -r requirements-build.lock
	$(BIN)/python native/install_locked.py requirements-dev.lock --no-compile \
		--then $(PIP) install --no-compile --no-deps --no-build-isolation -e .
	mkdir -p .venv/names && ln -sfn ../../tui .venv/names/disco_tui
	@touch $@

# An environment, and pip's cache, may have llama.cpp as it was compiled before our kernels in native/ changed.
.venv/.kernels: .venv/.stamp native/current_kernels.py $(wildcard native/*.h native/*.cpp)
	$(BIN)/python native/current_kernels.py --no-compile --require-hashes --no-build-isolation -r requirements-dev.lock
	@touch $@

.venv/site/.stamp: requirements-site.lock | .venv/.stamp
	"$(PYTHON)" -m venv --clear .venv/site
	.venv/site/bin/python -m pip install --disable-pip-version-check -q --require-hashes -r requirements-site.lock
	@touch $@

.venv/tools/.stamp: requirements-tools.lock .venv/.stamp
	"$(PYTHON)" -m venv --clear .venv/tools
	.venv/tools/bin/python -m pip install --disable-pip-version-check -q --require-hashes -r requirements-tools.lock
	@touch $@

clean:
	rm -rf .venv .venv-clients .venv-contract .venv-agents .venv-peers tests/clients/node/node_modules tests/coding_agents/node/node_modules build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
