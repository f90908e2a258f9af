# Two commands on a fresh machine: `make demo` and `make test`. Everything else is for those who work on octfm.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two workers with one thread each: with a thread per core in each worker they wait for each other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2
STAMP := $(VENV)/.installed

.PHONY: demo test test-s3 test-all lint wheel clean

demo: $(STAMP)
	$(BIN)/octfm demo --out demo

test: $(STAMP)
	$(BIN)/ruff check src tests benchmarks docs
	$(BIN)/ruff format --check src tests benchmarks docs
	$(PYTEST) -m "not slow and not gpu"

test-all: $(STAMP) lint
	$(PYTEST) -m "not gpu"

# S3 in an environment of its own: see constraints-s3.txt.
test-s3: .venv-s3/.installed
	OMP_NUM_THREADS=1 .venv-s3/bin/python -m pytest -q -n 2 -m "not gpu" -k "s3" tests/test_buckets.py

.venv-s3/.installed: pyproject.toml constraints.txt constraints-s3.txt
	test -x .venv-s3/bin/python || $(PYTHON) -m venv .venv-s3
	(grep -v python-dateutil constraints.txt; cat constraints-s3.txt) > .venv-s3/constraints.txt
	.venv-s3/bin/python -m pip install -q --disable-pip-version-check -c .venv-s3/constraints.txt torch
	.venv-s3/bin/python -m pip install -q --disable-pip-version-check -c .venv-s3/constraints.txt -e '.[test,test-s3]'
	touch .venv-s3/.installed

lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks docs
	$(BIN)/ruff format --check src tests benchmarks docs
	$(BIN)/pyright

wheel: $(STAMP)
	$(BIN)/python -m build --wheel --no-isolation

# torch is asked for by its pinned version first: a range would let pip take a newer build with gigabytes of CUDA.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "octfm needs Python 3.11 or newer; set PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[test,dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) .venv-s3 demo dist .pytest_cache .ruff_cache .hypothesis
