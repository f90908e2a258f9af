#!/usr/bin/env bash
# Packs what launch/gpu.sh needs for a machine with a GPU and no network, as one archive of some megabytes:
#
#   launch/gpu_bundle.sh octfm-gpu.tar.gz [--peer VJEPA2_CLONE] [--no-wheels]
#   (there) tar xzf octfm-gpu.tar.gz && octfm-gpu/launch/gpu.sh
#
# In it are the code as it is in the working tree, its commit, and wheels of pydantic and pytest with what they need, for
# Python OCTFM_GPU_PYTHON (default 3.12) on Linux x86-64. torch, numpy, pyyaml and tensorstore have to be there already.
# --peer takes along the Python files of facebookresearch/vjepa2, to compare with.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ $# -lt 1 ] || [ "${1#-}" != "$1" ]; then
    echo "usage: ${0##*/} ARCHIVE.tar.gz [--peer VJEPA2_CLONE] [--no-wheels]" >&2
    exit 2
fi
archive=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
shift
peer='' wheels=yes
while [ $# -gt 0 ]; do
    case "$1" in
        --peer)
            peer=$2
            shift
            ;;
        --no-wheels) wheels='' ;;
        *)
            echo "${0##*/}: unknown option $1" >&2
            exit 2
            ;;
    esac
    shift
done
if [ -n "$peer" ] && [ ! -f "$peer/src/models/vision_transformer.py" ]; then
    echo "${0##*/}: $peer is no clone of facebookresearch/vjepa2 (src/models/vision_transformer.py is missing)" >&2
    exit 1
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
there=$work/octfm-gpu
mkdir -p "$there"
cd "$root"
git ls-files -z --cached --others --exclude-standard -- \
    src tests/gpu tests/support tests/conftest.py benchmarks launch Makefile pyproject.toml LICENSE |
    tar c --null --files-from=- --ignore-failed-read | tar x -C "$there"
git rev-parse --short HEAD >"$there/COMMIT"
if [ -n "$(git status --porcelain)" ]; then
    echo "$(cat "$there/COMMIT") with changes" >"$there/COMMIT"
fi
if [ -n "$peer" ]; then
    (cd "$peer" && find src LICENSE -name '*.py' -o -name LICENSE | tar c --files-from=-) | (mkdir "$there/peer" && tar x -C "$there/peer")
fi
if [ -n "$wheels" ]; then
    # pip takes the newest that fits these platforms, with what it needs.
    "${PYTHON:-python3}" -m pip --disable-pip-version-check download -q -d "$there/wheels" --only-binary=:all: \
        --implementation cp --python-version "${OCTFM_GPU_PYTHON:-3.12}" --platform manylinux_2_28_x86_64 \
        --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
        pydantic pytest
fi
tar czf "$archive" -C "$work" octfm-gpu
echo "$archive: $(du -h "$archive" | cut -f1), commit $(cat "$there/COMMIT")"
