#!/usr/bin/env bash
# Everything that only a GPU can prove, in at most eight minutes: tests/gpu, then benchmarks/gpu.py.
#
#   launch/gpu.sh [--out gpu-results] [--peer VJEPA2_CLONE] [--minutes 2.5] [--rehearse]
#
# PYTHON names an interpreter whose torch sees the device. Packages that it lacks are taken from wheels/, where
# launch/gpu_bundle.sh has put them. Run it again with the same --out to measure what is missing; tests that have passed
# are not run again. Ends with 1 if a test failed. --rehearse: tiny sizes, on the CPU.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
python=${PYTHON:-python3}
out=gpu-results
options=()
while [ $# -gt 0 ]; do
    case "$1" in
        --out)
            out=$2
            shift
            ;;
        --rehearse)
            export OCTFM_GPU_TESTS_ON=cpu
            options+=("$1")
            ;;
        *) options+=("$1") ;;
    esac
    shift
done
[ ${#options[@]} -gt 0 ] || [ ! -d peer ] || options=(--peer peer)
mkdir -p "$out"
out=$(cd "$out" && pwd)

export PYTHONPATH=$PWD/src:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}
export PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
if ! "$python" -c 'import numpy, pydantic, pytest, tensorstore, torch, yaml' 2>"$out/missing.txt"; then
    if ! compgen -G 'wheels/*.whl' >/dev/null; then
        tail -1 "$out/missing.txt" >&2
        echo "install it, or make a bundle with wheels: launch/gpu_bundle.sh" >&2
        exit 1
    fi
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$out/site" wheels/*.whl || exit 1
    export PYTHONPATH=$out/site:$PYTHONPATH
fi
rm -f "$out/missing.txt"
"$python" -c 'import torch; print("torch", torch.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA")'

code=0
if [ ! -f "$out/tests-passed" ]; then
    # pytest's own time limits need a plugin that a bare image lacks.
    timeout --kill-after 10 "${OCTFM_GPU_TESTS_S:-300}" "$python" -m pytest -q -p no:cacheprovider -m gpu --durations 10 \
        --show-capture=no tests/gpu 2>&1 | tee "$out/tests.txt" || code=1
    [ "$code" -ne 0 ] || touch "$out/tests-passed"
fi
"$python" benchmarks/gpu.py --out "$out" "${options[@]}" || code=1
exit "$code"
