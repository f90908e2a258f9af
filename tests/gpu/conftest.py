"""The device of these tests: CUDA, or with OCTFM_GPU_TESTS_ON=cpu a rehearsal of them on the CPU.

They need torch, numpy, pyyaml, pydantic, tensorstore and pytest, and nothing else of what octfm depends on.
"""

import os

import pytest
import torch

# Read when cuBLAS is loaded; without it matrix products refuse deterministic mode.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(scope="session")
def device() -> str:
    name = os.environ.get("OCTFM_GPU_TESTS_ON", "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device; OCTFM_GPU_TESTS_ON=cpu rehearses these tests on the CPU")
    return name


@pytest.fixture
def deterministic():
    """Kernels that give the same bits every time, or refuse."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
