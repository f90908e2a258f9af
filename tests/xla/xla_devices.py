"""Four virtual devices of a CPU for torch_xla; import this before it. Not a conftest.py: tests/ has the one of that
name."""

import importlib.util
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

if importlib.util.find_spec("torch_xla"):
    # Before torch_xla is imported. Optimizing programs of this size takes a CPU longer than running them unoptimized.
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    os.environ.setdefault("CPU_NUM_DEVICES", "4")
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
