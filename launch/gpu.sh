#!/usr/bin/env bash
# Everything that only a GPU can prove, in at most eight minutes: tests/gpu, then benchmarks/gpu.py.
#
#   launch/gpu.sh [--out gpu-results] [--peer VJEPA2_CLONE] [--minutes 2.5] [--rehearse]
#
# PYTHON names an interpreter whose torch sees the device. Packages that it lacks are taken from wheels/, where
# launch/gpu_bundle.sh has put them. Run it again with the same --out to measure what is missing; tests that have passed
# are not run again. Ends with 1 if a test failed. --rehearse: tiny sizes, on the CPU.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
out=gpu-results
options=()
while [ $# -gt 0 ]; do
    case "$1" in
        --out)
            out=$2
            shift
            ;;
        --peer)
            options+=("$1" "$(realpath "$2")")
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
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$root" || exit 1
if [ -d peer ] && [[ " ${options[*]} " != *" --peer "* ]]; then
    options+=(--peer peer)
fi

export PYTHONPATH=$PWD/src:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}
export PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
wheels=()
for module in torch numpy yaml tensorstore pydantic pytest; do
    "$python" -c "import $module" 2>/dev/null && continue
    case "$module" in
        pydantic) wheels+=(wheels/pydantic*.whl wheels/annotated_types*.whl wheels/typing_*.whl) ;;
        pytest) wheels+=(wheels/pytest*.whl wheels/pluggy*.whl wheels/iniconfig*.whl wheels/packaging*.whl wheels/pygments*.whl) ;;
        *)
            echo "$python has no $module; name another interpreter with PYTHON=" >&2
            exit 1
            ;;
    esac
done
for wheel in "${wheels[@]}"; do
    if [ ! -f "$wheel" ]; then
        echo "$python lacks packages, and there is no $wheel; install pydantic and pytest, or use launch/gpu_bundle.sh" >&2
        exit 1
    fi
done
if [ ${#wheels[@]} -gt 0 ]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$out/site" "${wheels[@]}" || exit 1
    export PYTHONPATH=$out/site:$PYTHONPATH
fi
if [ "${OCTFM_GPU_TESTS_ON:-cuda}" = cuda ] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "torch of $python finds no CUDA device; --rehearse runs everything in tiny sizes on the CPU" >&2
    exit 1
fi

code=0
if [ ! -f "$out/tests-passed" ]; then
    # pytest's own time limits need a plugin that a bare image lacks.
    timeout --kill-after 10 "${OCTFM_GPU_TESTS_S:-300}" "$python" -m pytest -q -p no:cacheprovider -m gpu --durations 10 \
        --show-capture=no tests/gpu 2>&1 | tee "$out/tests.txt" || code=1
    [ "$code" -ne 0 ] || touch "$out/tests-passed"
fi
"$python" benchmarks/gpu.py --out "$out" "${options[@]}" || code=1
exit "$code"
