# Two commands do everything, set-up included:
#   make demo    train three ways on built-in data, compare margins, write the report
#   make test    lint, types and the quick tests, 2 to 4 minutes on two cores; make test-all adds the slow ones
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2

.PHONY: venv demo test test-quick test-all test-machines lint types format bench studies site gallery statements pictures dist try-wheel opponents architecture lock clean

venv: $(READY)

# torch comes first and by its exact version, so that nothing else can choose another one. -qq: errors only, since mirrors
# without every package make pip warn once for each.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Excite needs Python 3.11 or newer; this is " + sys.version.split()[0] + ": try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' requirements.lock)"
	$(PIP) -r requirements.lock
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

demo: venv
	$(BIN)/excite demo --out runs/demo --fresh

# mypy runs beside the tests: it uses one core, for a minute without its cache.
test: lint
	@$(MAKE) --no-print-directory -j2 types test-quick

test-quick: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m "not slow"

test-all: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

# The quick tests with other kernels, numbers of threads, random examples, in random order and under load (tests/machines.py).
MACHINES ?=
test-machines: venv
	WORKERS=$(WORKERS) $(BIN)/python tests/machines.py $(MACHINES)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --no-cache

types: venv
	$(BIN)/mypy

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Speed, side by side with peers, as ratios measured in one run; docs/benchmarks.md is its output.
bench: venv
	$(BIN)/python -m benchmarks

# The results pages under docs/results; what is trained already under runs/studies is not trained again.
SCALE ?= quick
studies: venv
	for name in $$($(BIN)/python -c 'from excite.studies import STUDIES; print(*STUDIES)'); do \
		$(BIN)/excite study run $$name --scale $(SCALE) --workers $(WORKERS) --docs docs/results || exit 1; \
	done
	$(BIN)/python tools/gallery.py

# docs/gallery.md, from the results pages.
gallery: venv
	$(BIN)/python tools/gallery.py

# Index of the papers' statements by number, and the tables of verdicts, from docs/theory/statements.toml.
statements: venv
	$(BIN)/python tools/statements.py

# docs/images/*.png: pictures of pages for the guides, from small trainings.
pictures: venv
	$(BIN)/python tools/screenshots.py
	$(BIN)/python tools/pictures.py
	$(BIN)/python tools/language_pictures.py

# Attacks that `python -m benchmarks.attackbench` and `python -m benchmarks.autoattack` compare with, in a folder of their own and
# without what they require: they would install another torch, and torchvision and visdom, which these attacks do not use.
OPPONENTS := adv-lib==0.2.8 torchattacks==3.5.1 foolbox==3.3.4 eagerpy==0.30.0
opponents: venv
	$(PIP) --no-deps --upgrade --target build/opponents $(OPPONENTS)

# The documentation as a site, in build/site.
site: venv
	$(BIN)/mkdocs build --strict

# Wheel and source archive, in dist.
dist: venv
	rm -rf dist
	$(BIN)/python -m hatchling build

# The wheel in a fresh environment: the shortest demo runs from it.
try-wheel: dist
	tools/try_wheel.sh $(BIN)/python

# The drawing of docs/development/architecture.md, from the import graph.
architecture: venv
	$(BIN)/python tools/architecture.py

# Exact versions of what is installed now; local suffixes such as +cpu are dropped.
lock: venv
	$(BIN)/python -m pip list --format=freeze --exclude excite --exclude pip --exclude setuptools | sed 's/+[a-z0-9.]*$$//' > requirements.lock

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
