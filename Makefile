# Needs Python 3.11 or later, make and pip; `make demo` and `make test` set up the rest, inside the checkout.
# Another Python: make test PYTHON=python3.12. More for the command: make test ARGS="-k scheduler".

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
NEW_ENOUGH = import sys; sys.exit(sys.version_info < (3, 11) and \
	"hibachi needs Python 3.11 or later; this is " + sys.version.split()[0] + ". Name another: make PYTHON=...")

PROJECTS := pyproject.toml hatch_build.py constraints.txt $(wildcard hibachi_*/pyproject.toml hibachi_*/hatch_build.py)
# The demo is NumPy only and keeps its download small, unless everything is here already.
DEMO := $(if $(wildcard .venv/installed),.venv,.venv-demo)

.PHONY: help demo test test-all check format clean

help:  ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' Makefile

demo: $(DEMO)/installed  ## watch continuous batching, on NumPy
	@$(DEMO)/bin/hibachi demo $(ARGS)

test: check  ## lint, types and the tests, conformance among them
	.venv/bin/python -m pytest $(ARGS)

test-all: check  ## the same with the slow tests and the installs
	.venv/bin/python -m pytest -m "" $(ARGS)

check: .venv/installed  ## ruff and mypy
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

format: .venv/installed  ## let ruff write
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

clean:  ## remove all that make made, environments included
	rm -rf .venv .venv-demo dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

.venv/installed: EXTRAS = torch,jax,text,gguf,test,dev
.venv-demo/installed: EXTRAS = text

# Installs again when a project file or a constraint changed; otherwise nothing here needs the network.
%/installed: $(PROJECTS)
	@test -x $*/bin/pip || { $(or $(PYTHON),python3) -c '$(NEW_ENOUGH)' && $(or $(PYTHON),python3) -m venv $*; }
	@echo "Installing hibachi[$(EXTRAS)] into $* ..."
	@$*/bin/python -m pip install --quiet "pip>=23.2"
	@$*/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[$(EXTRAS)]"
	@touch $@
