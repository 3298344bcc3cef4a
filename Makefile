# `make test`, `make test-fast` and `make demo` need Python 3.11 (or the one named in PYTHON) and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: test test-fast demo screenshots docs bench bench-all bench-packages bench-measurement bench-spectrum bench-alerts bench-pulse bench-new-user lint format types check clean

test: $(READY)
	$(BIN)/python -m pytest -q -n 2

# for daily work: every package, without the tests marked slow (under 90 seconds on two idle cores)
test-fast: $(READY)
	$(BIN)/python -m pytest -q -n 2 -m "not slow"

demo: $(READY)
	$(BIN)/python -m curvmon demo

docs: $(READY)
	PYTHONPATH=. $(BIN)/python docs/make_api.py

# the pictures in docs/images that show the demo, and the same run without its accident; needs Chromium
screenshots: demo
	$(BIN)/python -m curvmon demo --spike -1 --out runs/demo_healthy
	$(BIN)/python -m tests.helpers.screenshots

# about half an hour; DATA=cifar10_subset.npz for real images
bench: $(READY)
	$(BIN)/python -m benchmarks.products
	$(BIN)/python -m benchmarks.speed $(if $(DATA),--data $(DATA)) --write docs/speed-table.md
	$(BIN)/python -m benchmarks.memory --write docs/memory-table.md

# a whole measurement of the monitor, on the CPU and on a pretend accelerator; DATA=cifar10_subset.npz for real images
bench-measurement: $(READY)
	$(BIN)/python -m benchmarks.measurement $(if $(DATA),--data $(DATA)) --write docs/measurement-table.md

# All tables below docs/ but that of alerts, in one run: two processes with one thread each, about an hour on two idle
# cores. An interrupted run is continued. DATA=cifar10_subset.npz for real images.
bench-all: $(READY) bench-packages
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m benchmarks.all $(if $(DATA),--data $(DATA))

# HVPs of all packages, half an hour or more; the monitor's warm starts, a quarter of an hour
bench-spectrum: $(READY) bench-packages
	$(BIN)/python -W ignore -m benchmarks.spectra $(if $(DATA),--data $(DATA)) --write docs/spectrum-table.md
	$(BIN)/python -W ignore -m benchmarks.monitor_warm_starts $(if $(DATA),--data $(DATA)) --write docs/warm-start-table.md

# The other packages go in without what they ask for: one of them wants torchvision, which this torch does not take.
bench-packages: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps pyhessian curvlinops-for-pytorch \
		backpack-for-pytorch einops einconv linear_operator opt_einsum unfoldNd hessian-eigenthings

# about an hour on two idle cores the first time; recorded runs are kept below runs/. DATA=cifar10_subset.npz for real
# images.
bench-alerts: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps river
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m benchmarks.alerts $(if $(DATA),--data $(DATA)) --write docs/alerts-table.md

# about half an hour on an idle core the first time; recorded runs are kept below runs/. DATA=cifar10_subset.npz for real
# images.
bench-pulse: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m benchmarks.pulse $(if $(DATA),--data $(DATA)) --write docs/pulse-table.md

# six projects with CurvatureMonitor() and no arguments, half an hour on an idle core; DATA=cifar10_subset.npz for images
bench-new-user: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.new_user $(if $(DATA),--data $(DATA)) --seeds 2 --write docs/new-user-table.md

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

check: lint types test

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The stamp is written last: an interrupted installation is taken up again.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build runs .pytest_cache .mypy_cache .ruff_cache *.egg-info
