# make demo: set up, and train a BERT text classifier on two processes.   make test: set up, and run the tests.
# make slow: the tests that take many minutes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
DEMO_OUT := runs/demo-$(shell date +%Y%m%d-%H%M%S)

.PHONY: demo test slow check install wheels clean

demo: install
	$(BIN)/distcore train examples/demo.yaml --out $(DEMO_OUT)

test: install
	$(BIN)/python -m pytest

slow: install
	$(BIN)/python -m pytest -m slow

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(VENV)/.installed

# torch first, at the version of the constraints: an open range would take the newest build with all of CUDA.
$(VENV)/.installed: pyproject.toml constraints.txt $(addsuffix /pyproject.toml,$(PLUGINS))
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dev
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable . $(addprefix --editable ./,$(PLUGINS))
	$(if $(filter plugins/horovod,$(PLUGINS)),$(BIN)/python -m distcore_horovod.build --if-missing || echo "going on without horovod")
	touch $@

wheels: install
	for source in . $(PLUGINS); do $(BIN)/python -m build --quiet --wheel --no-isolation --outdir dist $$source || exit 1; done

clean:
	rm -rf dist build .pytest_cache .mypy_cache .ruff_cache
