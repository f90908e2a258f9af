#!/usr/bin/env bash
# One command for all hosts of a TPU pod slice: create it, bring one commit to every worker, start there, follow the log (F20).
#
#   launch/tpu_pod.sh start --name oct --zone us-central2-b --type v4-32 -- \
#       pretrain vit_s data.store=gs://... data.per_device_batch_size=2 --out gs://...
#   launch/tpu_pod.sh tail|stop|delete --name oct --zone us-central2-b
#
# --dry-run prints every command instead of running it. --project, --version (of the TPU software) and --setup (a command that makes .venv on
# a worker) are optional; runtime.parallel=xla_spmd is added. Tested with a fake gcloud only: nobody has run it on a TPU.
set -euo pipefail

usage() {
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

refuse() {
    echo "${0##*/}: $*" >&2
    exit 1
}

verb=${1:-}
[ $# -gt 0 ] && shift
name="" zone="" type="" project="" version=tpu-ubuntu2204-base dry=0
# torch_xla needs torch 2.9, so not the versions of constraints.txt; the system's Python is older than octfm's oldest.
setup="(command -v python3.11 || sudo apt-get install -y -q python3.11-venv) && python3.11 -m venv .venv && \
.venv/bin/pip install -q torch==2.9.0 'torch_xla[tpu]==2.9.0' -e ."
while [ $# -gt 0 ]; do
    case $1 in
    --dry-run) dry=1 && shift ;;
    --name | --zone | --type | --project | --version | --setup)
        [ $# -gt 1 ] || usage
        declare "${1#--}=$2"
        shift 2
        ;;
    --) shift && break ;;
    *) usage ;;
    esac
done
if [ -z "$name" ] || [ -z "$zone" ]; then usage; fi

where=("$name" --zone "$zone")
[ -z "$project" ] || where+=(--project "$project")
home=octfm-pod # on every worker

run() {
    if [ "$dry" = 1 ]; then
        printf '%q ' "$@"
        printf '\n'
    else
        "$@"
    fi
}

on_all() { run gcloud compute tpus tpu-vm ssh "${where[@]}" --worker=all --command "$1"; }

# Every worker says one line of its own; nothing is asked in a dry run.
answers() { gcloud compute tpus tpu-vm ssh "${where[@]}" --worker=all --command "$1" 2>/dev/null; }

create() {
    if [ "$dry" = 0 ] && gcloud compute tpus tpu-vm describe "${where[@]}" >/dev/null 2>&1; then
        echo "$name exists"
        return
    fi
    [ -n "$type" ] || refuse "$name does not exist: name its --type, for example v4-32"
    run gcloud compute tpus tpu-vm create "${where[@]}" --accelerator-type "$type" --version "$version"
}

# Into the folder that is there, since it holds the .venv and the logs of earlier runs.
sync_commit() {
    local bundle
    bundle=$(mktemp -d)/octfm.bundle
    git bundle create -q "$bundle" HEAD
    run gcloud compute tpus tpu-vm scp "$bundle" "$name:octfm.bundle" "${where[@]:1}" --worker=all
    rm -r "$(dirname "$bundle")"
    on_all "git init -q $home && git -C $home fetch -q ../octfm.bundle HEAD && git -C $home checkout -q --force --detach $commit"
    on_all "cd $home && $setup"
}

require_one_commit() {
    if [ "$dry" = 1 ]; then
        on_all "git -C $home rev-parse HEAD"
        return
    fi
    local said workers other
    workers=$(gcloud compute tpus tpu-vm describe "${where[@]}" --format 'value(networkEndpoints.len())')
    said=$(answers "echo commit \$(hostname) \$(git -C $home rev-parse HEAD)") || refuse "not every worker answers: $said"
    other=$(awk -v wanted="$commit" '$1 == "commit" && $3 != wanted {print $2 " has " ($3 == "" ? "nothing" : $3)}' <<<"$said")
    [ -z "$other" ] || refuse "workers differ in commit, expected $commit: ${other//$'\n'/, }; start again to sync them (F20)"
    [ "$(grep -c '^commit ' <<<"$said")" = "$workers" ] || refuse "$(grep -c '^commit ' <<<"$said") of $workers workers answered; see gcloud (F20)"
    echo "$workers workers at commit $commit"
}

# A run that was not stopped holds the chips, and the next one hangs without a word.
report_holders() {
    local question
    # shellcheck disable=SC2016  # expanded on the worker
    question='held=$(sudo fuser /dev/accel* /dev/vfio/[0-9]* 2>/dev/null | tr -s " \n" "\n" | sort -u | grep . || true)
if [ -z "$held" ]; then echo "holder $(hostname) nobody"; else for p in $held; do echo "holder $(hostname) $p $(ps -o user=,args= -p $p)"; done; fi'
    if [ "$dry" = 1 ]; then
        on_all "$question"
        return
    fi
    local said
    said=$(answers "$question" | grep '^holder ' || true)
    echo "${said//holder /accelerators of }"
    if grep -vq ' nobody$' <<<"$said"; then
        refuse "accelerators are held; stop that first: ${0##*/} stop --name $name --zone $zone"
    fi
}

start() {
    [ $# -gt 0 ] || usage
    # Any other command, and any other engine, would run on every worker as if it were alone (F10).
    [ "$1" = pretrain ] || refuse "of octfm's commands only pretrain shares its work among workers, got $1; run that on one machine (F10)"
    case " $* " in
    *" runtime.parallel=xla_spmd "*) ;;
    *" runtime.parallel="*) refuse "a pod trains with runtime.parallel=xla_spmd, got $*; leave runtime.parallel out (F10)" ;;
    *) set -- "$@" runtime.parallel=xla_spmd ;;
    esac
    [ -z "$(git status --porcelain --untracked-files=no)" ] || refuse "uncommitted changes would not reach the workers: commit them first"
    commit=$(git rev-parse HEAD)
    create
    report_holders # before the code of a run that still goes on is exchanged
    sync_commit
    require_one_commit
    local words
    printf -v words '%q ' "$@"
    on_all "cd $home && if [ -f run.log ]; then mv run.log run.\$(date -r run.log +%Y%m%dT%H%M%S).log; fi"
    on_all "cd $home && (nohup .venv/bin/python -m octfm $words> run.log 2>&1 & echo \$! > run.pid)"
    follow
}

follow() { run gcloud compute tpus tpu-vm ssh "${where[@]}" --worker=0 --command "tail -n 50 -F $home/run.log"; }

case $verb in
start) start "$@" ;;
tail) follow ;;
stop) on_all "test ! -f $home/run.pid || kill -TERM \$(cat $home/run.pid) 2>/dev/null || true" ;;
delete) run gcloud compute tpus tpu-vm delete "${where[@]}" --quiet ;;
*) usage ;;
esac
