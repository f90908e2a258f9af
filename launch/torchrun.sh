#!/usr/bin/env bash
# octfm pretrain (or finetune) on several ranks of this host, or on one host of several:
#
#   launch/torchrun.sh [torchrun options] -- pretrain CONFIG [section.key=value ...] --out RUN
#   launch/torchrun.sh --standalone --nproc-per-node 8 --max-restarts 3 -- \
#       pretrain vit_s data.store=prepared/ data.per_device_batch_size=4 --out runs/a
#
# Ends with 75 when the run was stopped and saved (run again to continue), which torchrun alone turns into 1. A mistake
# in the settings ends the job at once, on one host; torchrun alone starts it --max-restarts times, to the same error.
# PYTHON names the interpreter; TORCHRUN the launcher, should `$PYTHON -m torch.distributed.run` not be it.
set -euo pipefail

options=()
while [ $# -gt 0 ] && [ "$1" != "--" ]; do
    options+=("$1")
    shift
done
if [ $# -lt 2 ]; then
    echo "usage: ${0##*/} [torchrun options] -- pretrain CONFIG [section.key=value ...] --out RUN" >&2
    exit 2
fi
shift
if [ ${#options[@]} -eq 0 ]; then
    options=(--standalone --nproc-per-node "${OCTFM_RANKS:-gpu}" --max-restarts 3)
fi

python=${PYTHON:-python3}
read -r -a launcher <<<"${TORCHRUN:-$python -m torch.distributed.run}"
# More threads than one make CPU ranks of one host wait for each other.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
OCTFM_EXIT_FILE=$(mktemp)
export OCTFM_EXIT_FILE OCTFM_LAUNCHER=torchrun.sh # which takes every code from the file
trap 'rm -f "$OCTFM_EXIT_FILE"' EXIT

# Long enough to finish a step and to save it, once somebody asked to stop.
"${launcher[@]}" --shutdown-timeout "${OCTFM_GRACE_S:-100}" "${options[@]}" -m octfm "$@" &
agent=$!
trap 'kill -TERM "$agent" 2>/dev/null || true' TERM INT
code=0
wait "$agent" || code=$?
while kill -0 "$agent" 2>/dev/null; do # a signal ended `wait`, not the job
    code=0
    wait "$agent" || code=$?
done
case $code:$(cat "$OCTFM_EXIT_FILE" 2>/dev/null) in
    0:75) ;;
    *:75) code=75 ;;
    *:[12]) code=$(cat "$OCTFM_EXIT_FILE") ;; # ended as if done, not to be started again
esac
exit "$code"
