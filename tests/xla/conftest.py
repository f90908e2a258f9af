"""These tests need torch_xla, so an environment of their own (`make test-xla`); elsewhere none of them is collected."""

import importlib.util
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
collect_ignore_glob = [] if importlib.util.find_spec("torch_xla") else ["test_*.py"]

# Before torch_xla is imported. Optimizing programs of this size takes a CPU longer than running them unoptimized.
os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "4")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
