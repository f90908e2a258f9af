# Two commands on a fresh machine: `make demo` and `make test`. Everything else is for those who work on octfm.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two workers with one thread each: with a thread per core in each worker they wait for each other.
# A file's tests go to one worker, so that stores and runs that they share are made once.
# Bytecode is kept even where the environment forbids it: every process that a test starts would compile octfm again (0.7 s).
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile
STAMP := $(VENV)/.installed
# What the demonstration needs is a part of what the tests need.
DEMO := $(if $(wildcard $(STAMP)),$(STAMP),$(VENV)/.demo)
# TORCH_INDEX=… for another build of torch, or a mirror.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
XLA := .venv-xla
GPU_OUT ?= gpu-results

.PHONY: weights encoder demo test test-all test-xla gpu lint docs wheel clean

# Bytecode is kept, as for the tests: the clinic starts some sixteen processes.
demo: $(DEMO)
	PYTHONDONTWRITEBYTECODE= $(BIN)/octfm demo --out demo

test: $(STAMP)
	$(BIN)/ruff check src tests benchmarks docs
	$(BIN)/ruff format --check src tests benchmarks docs
	$(PYTEST) -m "not slow and not gpu"

test-all: $(STAMP) lint
	OCTFM_EXPLORE=1 $(PYTEST) -m "not gpu"

# In an environment of its own (4 GB), since torch_xla needs torch 2.9: virtual devices of a CPU, and libtpu's compiler without a TPU.
test-xla: $(XLA)/.installed
	OMP_NUM_THREADS=1 $(XLA)/bin/python -m pytest -q -p no:cacheprovider tests/xla

$(XLA)/.installed: tests/xla/environment.sh tests/xla/empty_cuda.py
	PYTHON=$(PYTHON) tests/xla/environment.sh $(XLA)
	touch $@

# On a machine with a GPU: tests/gpu, then benchmarks/gpu.py, in at most eight minutes; again with the same GPU_OUT, it
# goes on. PYTHON is an interpreter whose torch sees the device; PEER a clone of facebookresearch/vjepa2.
gpu:
	PYTHON=$(PYTHON) launch/gpu.sh --out $(GPU_OUT) $(if $(PEER),--peer $(PEER))

lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks docs
	$(BIN)/ruff format --check src tests benchmarks docs
	$(BIN)/pyright

# Trains the network of octfm segment on streamed phantoms, resumable: some 2 hours on one core.
weights: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m octfm.layers.training --out runs/weights

# Makes a run of `octfm pretrain` on streamed phantoms, or one of its checkpoints, the encoder of load_encoder(). encoder-2 is of
# octfm pretrain dense steps=2600 seed=2 data.phantoms.seed=2 model.init=encoder-1@738ef77ebd1d model.depth=6 model.summary=8
#   objective.pool=summary ckpt_every_steps=200 validate_every_steps=200 --out runs/dense     (67 CPU-minutes)
# Then pytest tests/encoder/test_packaged_encoder.py tests/project/test_wheel.py and a line in docs/results.md. New weights get a new name
# (CURRENT_ENCODER), since results name it; two at most are kept. `python -m octfm.encoder.packaging RUN --weights FOLDER` tries one.
encoder: $(STAMP)
	$(if $(RUN),,$(error RUN is missing; make encoder RUN=runs/dense))
	OMP_NUM_THREADS=1 $(BIN)/python -m octfm.encoder.packaging $(RUN) $(if $(POOL),--pool $(POOL))

# Fails on a broken link or anchor. The pages in site/ need no network.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# dist/: the source distribution, and the wheel built from it.
wheel: $(STAMP)
	$(BIN)/python -m build --no-isolation

# torch comes first and alone: 2.13.0+cpu of PyTorch's own index precedes PyPI's 2.13.0, which on Linux brings gigabytes of CUDA.
$(VENV)/.demo: pyproject.toml constraints.txt
	@echo 'Installing into $(VENV): about 1.5 GB, of which torch is 0.9; the demonstration then takes 1.3 GB and 5 to 12 minutes.'
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "octfm needs Python 3.11 or newer; set PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-deps torch --extra-index-url $(TORCH_INDEX)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(STAMP): pyproject.toml constraints.txt
	$(MAKE) --no-print-directory $(VENV)/.demo
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[test,dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) $(XLA) demo dist site .pytest_cache .ruff_cache .hypothesis
