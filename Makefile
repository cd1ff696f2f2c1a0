# The commands people and CI use. Everything runs in .venv, which `make setup` makes and keeps up to date.

SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.stamp
EXTRAS := lab,torch,ssh,kubernetes,telemetry,debug,top,examples,dev
NOTEBOOK := examples/quickstart.ipynb
# Test modules at a time, each on a controller of its own: two more than cores, as many wait. JOBS=0: one by one.
JOBS ?= 4
PYTEST_ARGS ?=
LAB_ARGS ?=
# In a container one often is root, and Jupyter asks for this word then.
AS_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

# Tests that look at all of the sources: `make check` runs all of them, `make test` the cheap ones.
CHECKS = $(patsubst %,tests/unit/test_%.py,layers stubs reach site typing front_end wheel)

.PHONY: help setup bytecode front-end browser wheel demo lab examples test test-slow test-matrix fuzz check bench bench-data bench-tensor bench-train bench-debug bench-panel bench-scale compare test-clusters test-frameworks test-verbs random-programs models planted-faults soak chaos docs docs-serve gpu-report screenshots clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | column -t -s '|'

setup: $(STAMP) bytecode front-end ## make .venv with everything in it; does nothing when it is up to date

$(STAMP): pyproject.toml constraints.txt
	scripts/make-venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

bytecode: $(STAMP) # of the sources, also where Python writes none: each process would compile them anew, for 0.4 s
	@$(PY) -m compileall -q -j 0 monarch_nb kernel_ext benchmarks tests || true

front-end: $(STAMP) # the widgets in cells, and the JupyterLab panel linked into .venv, where npm is there
	@scripts/front-end build $(VENV)

browser: # Chromium for the tests in tests/browser; they are skipped without it
	@scripts/ensure-browser

wheel: setup ## build a wheel, with the panel, in dist/
	$(PY) -m hatchling build -t wheel

demo: setup ## run the quickstart notebook in a real kernel and say what it reached
	$(PY) scripts/demo.py

lab: setup ## open the quickstart notebook in JupyterLab; LAB_ARGS= adds arguments
	$(PY) -m jupyterlab $(AS_ROOT) $(LAB_ARGS) $(NOTEBOOK)

examples: setup ## run the notebooks of examples/ and save them with what they show; NAMES='quickstart tensors' for some
	$(PY) scripts/examples.py $(NAMES)

test: setup browser ## run the tests but the slow ones; PYTEST_ARGS= adds arguments
	$(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m 'not slow' --durations 40 $(PYTEST_ARGS)

test-slow: setup browser docs ## the slow tests, the site, those of random histories ten times as many, those in memory with processes
	$(PY) -m pytest -m slow $(PYTEST_ARGS)
	MONARCH_TEST_PROCESSES=1 $(PY) -m pytest -q tests/memory_network $(PYTEST_ARGS)
	MONARCH_TEST_EFFORT=10 $(PY) -m pytest -q tests/unit/test_*_random.py tests/unit/test_routing_*.py tests/unit/test_wire_*.py $(PYTEST_ARGS)

test-matrix: setup browser ## the wheel's suite on Python 3.11 to 3.14 and PyTorch from the oldest to the newest; ONLY='newest' for some
	$(PY) scripts/matrix.py $(ONLY) -- -n $(JOBS) $(PYTEST_ARGS)

fuzz: setup ## feed the parsers of bytes and words from outside for about a quarter of an hour; EFFORT= for another while
	MONARCH_TEST_EFFORT=$(or $(EFFORT),400) $(PY) -m pytest -n 2 -m fuzz --timeout 3600 --durations 20 tests/unit $(PYTEST_ARGS)

check: setup ## lint, format, types, layers, stubs, the shape of the code, the front end
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m mypy kernel_ext/monarch-stubs/*.pyi
	$(PY) -m pytest -q $(CHECKS)
	$(PY) scripts/house.py --check
	@scripts/front-end check

bench: setup ## measure; PEERS=torchmonarch,ray measures those too, in environments of their own
	PEERS='$(PEERS)' $(PY) -m benchmarks

bench-data: setup ## the same for the data plane alone
	PEERS='$(PEERS)' $(PY) -m benchmarks --data --out build/bench-data.json

bench-tensor: setup ## the same for sharded tensors alone
	PEERS='$(PEERS)' $(PY) -m benchmarks --tensors --out build/bench-tensor.json

bench-train: setup ## steps of training on a mesh beside DDP and FSDP2 under torchrun, in turns
	$(PY) -m benchmarks.training --out build/bench-train.json

bench-pythons: setup ## the same for actors on each Python from 3.11 to 3.14 that there is
	$(PY) -m benchmarks.pythons

bench-debug: setup ## the same for the debugger and for sampling alone
	$(PY) -m benchmarks --debug --out build/bench-debug.json

bench-panel: setup browser ## what displays of 1,000 ranks cost the kernel and the page, with a timeline and a history, in a quarter of an hour
	$(PY) -m benchmarks --panel --out build/bench-panel.json

bench-scale: setup ## what 64 to 512 procs on one machine cost, then 10 to 1,000 virtual hosts; PROCS='256', HOSTS='10000' for others
	@mkdir -p build
	$(PY) -m benchmarks.procs --out build/bench-procs.json $(PROCS)
	$(PY) -m benchmarks.scale --out build/bench-scale.json $(HOSTS)
	$(PY) -m benchmarks.curves build/bench-scale.json build/curves

compare: setup ## five small programs on ours, torchmonarch, Ray, Dask, ipyparallel and jupyter-distributed; SYSTEMS='ours dask' for some
	$(PY) -m benchmarks.compare $(SYSTEMS)

test-clusters: setup ## the tests of jobs on real servers, which it installs with apt-get where it can; KINDS='ssh' for some
	scripts/ensure-clusters $(if $(KINDS),network $(KINDS))
	$(PY) -m pip install --quiet --disable-pip-version-check kubernetes-validate kubeflow-trainer-api
	$(PY) scripts/check-kubernetes
	$(PY) -m pytest -m clusters --timeout 600 $(if $(KINDS),$(wildcard $(foreach kind,$(KINDS),tests/cluster*/test_*$(kind)*.py)),tests) $(PYTEST_ARGS)

test-loggers: setup ## metrics in TensorBoard, Weights & Biases and MLflow, which it installs
	$(PY) -m pip install --quiet --disable-pip-version-check '.[loggers]'
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -e .
	$(PY) -m pytest tests/cluster/test_metrics_export.py $(PYTEST_ARGS)

# The frameworks that people run, at their newest, in an environment of their own.
FRAMEWORKS_VENV := build/frameworks-venv
FRAMEWORKS := accelerate lightning peft torchtitan transformers trl

$(FRAMEWORKS_VENV)/.stamp: pyproject.toml constraints.txt
	scripts/make-venv $(FRAMEWORKS_VENV)
	$(FRAMEWORKS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --constraint constraints.txt --editable '.[lab,torch,debug,dev,loggers]' $(FRAMEWORKS)
	@touch $@

test-frameworks: $(FRAMEWORKS_VENV)/.stamp browser ## the pages of docs/frameworks and what goes wrong in each framework, which it installs
	$(FRAMEWORKS_VENV)/bin/python -m pytest -m frameworks --timeout 600 $$(grep -rl 'mark\.frameworks' tests --include='test_*.py') $(PYTEST_ARGS)

test-verbs: setup ## RDMABuffer over RDMA verbs, in a guest with a soft device where this machine has none (minutes)
	scripts/test-verbs $(PY)

# An environment of its own, with PyTorch as its index has it for this machine: with CUDA. GPU_PY= takes one that is there.
GPU_VENV := build/gpu-venv
GPU_PY ?= $(GPU_VENV)/bin/python

$(GPU_VENV)/.stamp: pyproject.toml constraints.txt
	scripts/make-venv $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[torch,gpu,dev]' accelerate lightning
	@touch $@

gpu-report: $(if $(filter $(GPU_VENV)/bin/python,$(GPU_PY)),$(GPU_VENV)/.stamp) ## see on a GPU what can be seen on one, and write docs/gpu.md; PART=tensors for some, which writes nothing
	PYTHONPATH=.:kernel_ext $(GPU_PY) -m tests.gpu $(if $(PART),--part $(PART),--page docs/gpu.md) $(ARGS)

random-programs: setup ## 1,000 random programs of sharded tensors against local torch; COUNT= for more, SEED= to repeat, RESULTS=file to go on later
	$(PY) -m tests.random_programs --count $(or $(COUNT),1000) $(if $(SEED),--seed $(SEED)) $(if $(RESULTS),--results $(RESULTS)) $(ARGS)

models: setup ## train all models in all ways against one process and write docs/models.md; NAMES='llama mamba' for some
	$(PY) -m tests.models $(NAMES)

planted-faults: setup ## plant faults in programs on real processes, ask which rank is to blame, and write docs/diagnosis.md; ONLY='DDP stuck' for some
	$(PY) -m tests.planted_faults $(if $(ONLY),--only '$(ONLY)',--page docs/diagnosis.md) $(ARGS)

soak: setup ## ten minutes of everything at once, in which nothing may grow; SECONDS= for another while
	@mkdir -p build
	$(PY) -m tests.soak --seconds $(or $(SECONDS),600) > build/soak.log

$(VENV)/.docs: $(STAMP)
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	@touch $@

chaos: setup ## 2,000 faults over a job on three hosts in network namespaces; FAULTS= for more or fewer, SEED= to repeat, OVER=ssh or slurm
	$(if $(OVER),scripts/ensure-clusters network $(firstword $(subst -, ,$(OVER))))
	$(PY) -m tests.chaos --faults $(or $(FAULTS),2000) $(if $(OVER),--over $(OVER)) $(if $(SEED),--seed $(SEED))

docs: setup $(VENV)/.docs ## build the site of this version beside others in build/site; dead links, names without a place are errors
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict --site-dir build/site/$$($(PY) -c 'from scripts.site.versions import this; print(this())')
	$(PY) -m scripts.site.versions build/site
	$(PY) -m scripts.site.check build/site

docs-serve: setup $(VENV)/.docs ## show the site at http://127.0.0.1:8000, and build it again as pages change
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs serve

screenshots: setup browser ## take the pictures of docs/images that README and the pages of docs/ show again
	$(PY) scripts/screenshots.py --pages
	$(PY) scripts/guide_pictures.py docs/images

clean: ## remove what the other targets made, but .venv
	rm -rf build dist labextension/lib labextension/built .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
