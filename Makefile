# Two commands need nothing but Python >= 3.11 (with its pip, or uv) and make: `make demo` and `make test`.
# Everything else stands on the same `.venv`, which scripts/bootstrap.py fills from the locks in requirements/.

SHELL := /bin/sh
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
LOCKS := requirements/all.txt requirements/build.txt requirements/uv.txt
PYTHON_DIRS := src tests scripts docs apps $(wildcard bench examples)

# An empty variable is not an unset one: OpenSSL would look for certificates in the file named "".
ifeq ($(strip $(SSL_CERT_FILE)),)
unexport SSL_CERT_FILE
endif
ifeq ($(strip $(SSL_CERT_DIR)),)
unexport SSL_CERT_DIR
endif

.PHONY: help install demo forage test test-all check format soak bench docs reference screenshots lock clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*##/\1\t/p' Makefile | while IFS="$$(printf '\t')" read -r target text; do \
	  printf '  make %-11s %s\n' "$$target" "$$text"; done

# Remade when a lock, the project's metadata or the script is newer; the script itself looks at their
# content, so that a checkout, which touches every file, costs nothing.
$(INSTALLED): $(LOCKS) pyproject.toml $(wildcard apps/*/pyproject.toml) scripts/bootstrap.py scripts/python
	@sh scripts/python scripts/bootstrap.py install

install: $(INSTALLED)  ## fill .venv from the locks

demo: $(INSTALLED)  ## PostgreSQL, the log, Spark and lake tables, with crashes on the way; leaves its home in demo/
	@$(BIN)/millstream demo

forage: $(INSTALLED)  ## the discovery feed on http://127.0.0.1:4242, with its log in forage-home/ (PORT=… chooses another port)
	@$(BIN)/millstream-forage serve $(if $(PORT),--port $(PORT))

# Files of tests are divided among JOBS processes, each with a PostgreSQL and a Spark of its own (about 2 GiB a process);
# of the quick tier one process alone has Spark, and one Kafka. Tests wait for processes and periods for a fifth of their
# time: on two cores a third process works while two wait.
JOBS := 3
SIDE_BY_SIDE = -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 1
ifndef SEED
SEED := $(shell (od -An -N4 -tu4 /dev/urandom || date +%s) 2>/dev/null | tr -d ' ')
endif
DRAWN = --seed $(SEED) --hypothesis-seed $(SEED)
# pytest would rewrite all modules of each installed plugin's package, Millstream's too: name the plugins that tests need.
# And it would rewrite them all again in each run if no byte code were kept.
PYTEST = env -u PYTHONDONTWRITEBYTECODE PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(BIN)/python -m pytest \
  -p xdist -p pytest_timeout -p _hypothesis_pytestplugin -p millstream.testing.pytest_plugin

test: $(INSTALLED)  ## the quick tests, servers included (ARGS='-k name' picks among all, JOBS=4 is for more cores)
ifeq ($(strip $(ARGS)),)
	@$(PYTEST) $(SIDE_BY_SIDE) --tier quick --durations=20
else
	@$(PYTEST) $(ARGS)
endif

# Capture meets the oldest server that it knows first, in those tests that run on whichever server is chosen: the others
# start servers of fixed versions, or none.
test-all: $(INSTALLED)  ## every test, sieges and PostgreSQL 14 included, with new seeds (SEED=… repeats them)
	@echo "make test-all SEED=$(SEED) repeats this run"; \
	code=0; export HYPOTHESIS_PROFILE=new; \
	$(PYTEST) -q --no-header $(SIDE_BY_SIDE) $(DRAWN) tests/capture --millstream-postgres 14 || code=1; \
	$(PYTEST) $(SIDE_BY_SIDE) $(DRAWN) --durations=40 || code=1; \
	exit $$code

check: $(INSTALLED)  ## format, lint, types, layers, house rules, reference pages, documentation
	@$(BIN)/python scripts/check.py $(PYTHON_DIRS)

format: $(INSTALLED)  ## put the code into the project's format
	@$(BIN)/ruff format $(PYTHON_DIRS)
	@$(BIN)/ruff check --fix --exit-zero --quiet $(PYTHON_DIRS)

soak: $(INSTALLED)  ## capture from the versions that CI leaves out, then the crash tests for hours, with a printed seed (ARGS='--hypothesis-seed=…' repeats)
	@for version in 15 16 17; do $(PYTEST) -q --no-header $(SIDE_BY_SIDE) tests/capture --millstream-postgres $$version || exit 1; done
	@HYPOTHESIS_PROFILE=soak $(PYTEST) -m soak --timeout=0 -s $(ARGS)

bench: $(INSTALLED)  ## figures beside their peers, a JSON line each (ONLY=prefix picks)
	@$(BIN)/python -m bench $(if $(ONLY),--only '$(ONLY)')

docs: $(INSTALLED)  ## the site, in docs/_build/html
	@$(BIN)/python scripts/check.py --only docs

reference: $(INSTALLED)  ## write docs/reference/{cli,config,errors}.md again from the code
	@$(BIN)/python scripts/reference.py

screenshots: $(INSTALLED)  ## take the console's pictures in docs/how-to again, with Chromium
	@$(BIN)/python -m scripts.screenshots

lock: $(INSTALLED)  ## requirements/*.txt from pyproject.toml (ARGS=--upgrade for the newest versions)
	@sh scripts/python scripts/bootstrap.py lock $(ARGS)

clean:  ## take away what make has made
	rm -rf $(VENV) .cache build demo docs/_build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
