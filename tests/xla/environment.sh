#!/usr/bin/env bash
# Makes an environment of torch_xla 2.9 for a CPU (Linux x86-64, gcc, nm; 4 GB): tests/xla/environment.sh [.venv-xla]
# tests/xla/environment.sh --possible says why it could not be made here, and ends with 1, or nothing.
#
# torch_xla needs torch 2.9.0, of which PyPI has the build for CUDA alone: its 4 GB of NVIDIA's libraries are left out, and
# empty_cuda.py writes empty ones in their place, so that torch can be loaded.
# JAX and libtpu compile for a TPU that is not there (octfm doctor --tpu).
# Never run pip in it without --no-deps for what depends on torch: it would fetch the real ones.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$here/../..
python=${PYTHON:-python3}
torch_xla=2.9.0

needed() {
    if [ "$(uname -sm)" != "Linux x86_64" ]; then
        echo "torch_xla exists for Linux x86-64 only, this is $(uname -sm)"
    elif ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'; then
        echo "torch 2.9 needs Python 3.11 to 3.13; set PYTHON=python3.11"
    elif ! command -v gcc >/dev/null || ! command -v nm >/dev/null; then
        echo "gcc and nm (binutils) are needed"
    elif [ "$(df -Pk "$root" | awk 'NR == 2 {print $4}')" -lt 6000000 ]; then
        echo "less than 6 GB of disk are free"
    elif [[ $("$python" -m pip --disable-pip-version-check index versions torch_xla 2>/dev/null) != *"$torch_xla"* ]]; then
        echo "pip finds no torch_xla $torch_xla (no network, or an index without it)"
    fi
}
why=$(needed)
if [ -n "$why" ]; then
    echo "$why" >&2
    exit 1
fi
[ "${1:-}" != --possible ] || exit 0
dir=${1:-$root/.venv-xla}
"$python" -m venv "$dir"
pip() { "$dir/bin/python" -m pip --disable-pip-version-check -q "$@"; }
pip install --no-deps torch==2.9.0 torch_xla=="$torch_xla" nvidia-cuda-runtime-cu12==12.8.90 nvidia-cuda-cupti-cu12==12.8.90 \
    nvidia-nvshmem-cu12==3.3.20
pip install -c "$root/constraints.txt" typing-extensions sympy networkx jinja2 filelock fsspec absl-py requests \
    numpy scipy pyyaml pydantic google-crc32c pyarrow typer rich pytest pytest-timeout jax==0.10.2 libtpu==0.0.51
pip install --no-deps -e "$root"
"$dir/bin/python" "$here/empty_cuda.py" "$dir"
PJRT_DEVICE=CPU "$dir/bin/python" -c 'import torch_xla; print("torch_xla", torch_xla.__version__)'
