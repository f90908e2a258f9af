#!/usr/bin/env bash
# Makes an environment of torch_xla 2.9 for a CPU (Linux x86-64, gcc; 3 GB): tests/xla/environment.sh [.venv-xla]
#
# torch_xla needs torch 2.9.0, of which PyPI has the build for CUDA alone: its 4 GB of NVIDIA's libraries are left out, and
# empty_cuda.py writes empty ones in their place, so that torch can be loaded.
# Never run pip in it without --no-deps for what depends on torch: it would fetch the real ones.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$here/../..
dir=${1:-$root/.venv-xla}
"${PYTHON:-python3}" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14) and "torch 2.9 needs Python 3.11 to 3.13; set PYTHON=python3.11")'
"${PYTHON:-python3}" -m venv "$dir"
pip() { "$dir/bin/python" -m pip --disable-pip-version-check -q "$@"; }
pip install --no-deps torch==2.9.0 torch_xla==2.9.0 nvidia-cuda-runtime-cu12==12.8.90 nvidia-cuda-cupti-cu12==12.8.90 \
    nvidia-nvshmem-cu12==3.3.20
pip install -c "$root/constraints.txt" typing-extensions sympy networkx jinja2 filelock fsspec absl-py requests \
    numpy scipy pyyaml pydantic tensorstore zarr pyarrow typer rich pytest pytest-timeout
pip install --no-deps -e "$root"
"$dir/bin/python" "$here/empty_cuda.py" "$dir"
PJRT_DEVICE=CPU "$dir/bin/python" -c 'import torch_xla; print("torch_xla", torch_xla.__version__)'
