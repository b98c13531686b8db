# make demo: set up what it needs, and train a BERT text classifier on two processes.
# make quick: the tests that start no ranks and no long programs.   make test: all but the slow ones.   make slow: those that take minutes.
# make gpu: what only an accelerator can show, as a table.
# make check: lint, format and types.   make docs: the site, in build/docs.
# make machines: two machines in network namespaces, and engines on them; needs root (CONTRIBUTING.md).
# make shards: files that webdataset, mosaicml-streaming and litdata write, and a server of the S3 protocol.
# make exports: llama.cpp and vLLM on what is exported for them; llama.cpp is compiled, which takes minutes.
# make chaos: random faults on two such machines; writes docs/chaos.json and its table in docs/laws.md.
# make pictures: those of the README, from real runs.
# make dist: an sdist and a wheel of every distribution, in dist/.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Whose dependency is large and not needed to test it: installed without it.
ALONE := $(wildcard plugins/ray)
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
# What requirements.txt names: what the first pages need.
FIRST := $(shell sed -n '/^\./p' requirements.txt)
# The other plugins.
LATER := $(filter-out $(FIRST) $(addprefix ./,$(ALONE)),$(addprefix ./,$(PLUGINS)))
DIST := dist
# Tests start hundreds of processes. With this variable, which containers like to set, each would compile our files again.
unexport PYTHONDONTWRITEBYTECODE
DEMO_OUT := runs/demo-$(shell date +%Y%m%d-%H%M%S)

# An environment in the folder $(1), in which all can be imported, too, that is installed in $(VENV).
define beside
test -x $(1)/bin/python || $(BIN)/python -m venv $(1)
$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(\"%s\")" % sysconfig.get_path("purelib"))' > "$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/installed.pth"
$(1)/bin/python -m pip install --quiet --upgrade pip
endef

.PHONY: demo quick test slow machines shards exports chaos gpu check docs pictures install dist release-check clean

demo: $(VENV)/.demo
	$(BIN)/distcore train examples/demo.yaml --out $(DEMO_OUT)
	@echo
	@echo "distcore is $(BIN)/distcore; after 'source $(BIN)/activate' it is distcore alone. Three things to try with this run:"
	@echo "  $(BIN)/distcore report $(DEMO_OUT)"
	@echo "  $(BIN)/distcore eval $(DEMO_OUT) --strategy fsdp --nproc 2"
	@echo "  $(BIN)/distcore checkpoint export $(DEMO_OUT) --to $(DEMO_OUT)/export"

quick: install
	$(BIN)/python -m pytest --numprocesses logical --dist loadfile -m "not slow and not machines and not gpu and not ranks and not programs"

# One more at once than there are cores: a test that starts ranks waits for them a third of its time.
# In the order of conftest.py, which begins with the files that take longest.
test: quick
	$(BIN)/python -m pytest --numprocesses $$(($$(getconf _NPROCESSORS_ONLN) + 1)) --dist loadfile --no-loadscope-reorder -m "not slow and not machines and not gpu and (ranks or programs)"

slow: install
	$(BIN)/python -m pytest -m "slow and not machines"

machines: $(VENV)/.machines $(VENV)/.ray
	$(BIN)/python -m pytest -m machines tests/machines

# In an environment of its own: the models of Kubeflow would bring versions of what the others need.
$(VENV)/.machines: $(VENV)/.installed
	test -x build/machines/bin/python || $(BIN)/python -m venv build/machines
	build/machines/bin/python -m pip install --quiet --upgrade pip
	build/machines/bin/python -m pip install --quiet --group machines
	touch $@

# Another one, with Ray beside all that is installed here: on a cluster distcore and Ray must be in one environment.
$(VENV)/.ray: $(VENV)/.installed
	$(call beside,build/ray)
	build/ray/bin/python -m pip install --quiet --group ray
	touch $@

shards: $(VENV)/.shards
	$(BIN)/python -m pytest plugins/shards/tests/test_foreign_shards.py plugins/shards/tests/test_remote_shards.py plugins/tasks/tests/image_classification/test_image_shards.py
	build/shards/bin/python -m pytest plugins/data/tests/test_s3.py

# The packages that write shards, beside all that is installed here: together with what they ask for they cannot be.
$(VENV)/.shards: $(VENV)/.installed
	$(call beside,build/shards)
	build/shards/bin/python -m pip install --quiet --no-deps --group shards
	build/shards/bin/python -m pip install --quiet --group s3
	touch $@

exports: $(VENV)/.gguf $(VENV)/.vllm
	$(BIN)/python -m pytest -m slow plugins/tasks/tests/gguf_export plugins/tasks/tests/huggingface_export/test_vllm.py

$(VENV)/.gguf: $(VENV)/.installed
	test -x build/gguf/bin/python || $(BIN)/python -m venv build/gguf
	build/gguf/bin/python -m pip install --quiet --upgrade pip
	build/gguf/bin/python -m pip install --quiet --group gguf
	touch $@

# vLLM as far as it reads folders: with all that it asks for it would bring CUDA, and a torch of its own.
$(VENV)/.vllm: $(VENV)/.installed
	$(call beside,build/vllm)
	build/vllm/bin/python -m pip install --quiet --no-deps --group vllm
	touch $@

chaos: install
	$(BIN)/python benchmarks/chaos.py --page

# Goes on where the last call ended (tests/gpu/conftest.py). Where there is no accelerator everything is skipped.
gpu: install
	$(BIN)/python -m pytest -m "gpu and not alone" --numprocesses 6 tests/gpu || true
	$(BIN)/python -m pytest -m "gpu and alone" tests/gpu || true
	$(BIN)/python tools/gpu_page.py

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Strict: a broken link, a page that no other leads to, or an unknown name is an error. Every page is made afresh: what was
# read by an earlier call would not warn again, and one that was interrupted leaves half of what it knew.
docs: $(VENV)/.docs
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --nitpicky --fresh-env --write-all --conf-dir docs --doctree-dir build/doctrees . build/docs

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group docs
	touch $@

pictures: install
	$(BIN)/python tools/pictures.py

install: $(VENV)/.installed

# What make demo needs, and no more: the rest takes minutes.
# An old Python is refused before torch is fetched for it. Without pip, a Python in the environment is one that Debian's
# python3 left there when it lacked python3-venv.
# torch first, at the version of the constraints: an open range would take the newest build with all of CUDA. What is
# installed without isolation needs in the environment what builds it.
$(VENV)/.demo: pyproject.toml constraints.txt requirements.txt $(addsuffix /pyproject.toml,core $(PLUGINS))
	@echo "set-up, 1 of 4: an environment in $(VENV)"
	@test -x $(BIN)/pip || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is no Python 3.11 or newer; name one, such as: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "set-up, 2 of 4: torch"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch hatchling editables
	@echo "set-up, 3 of 4: distcore with the strategies of the first pages, and what they need"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation $(addprefix --editable ,$(FIRST))
	touch $@

$(VENV)/.installed: $(VENV)/.demo
	@echo "set-up, 4 of 4: the tools of developers and tests, and every plugin"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dev
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation $(addprefix --editable ,$(LATER))
	$(if $(ALONE),$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps $(addprefix --editable ./,$(ALONE)))
	$(if $(filter plugins/horovod,$(PLUGINS)),$(BIN)/python -m distcore_horovod.build --if-missing || echo "going on without horovod")
	touch $@

# Each wheel is built from its sdist, so that the sdist is known to hold what a build needs.
dist: install
	rm -f $(DIST)/*.tar.gz $(DIST)/*.whl
	for source in . core $(PLUGINS); do $(BIN)/python -m build --quiet --no-isolation --outdir $(DIST) $$source || exit 1; done
	$(BIN)/python -m twine check --strict $(DIST)/*.tar.gz $(DIST)/*.whl

release-check: dist
	$(BIN)/python tools/release_check.py $(DIST)

clean:
	rm -rf dist build .pytest_cache .mypy_cache .ruff_cache
