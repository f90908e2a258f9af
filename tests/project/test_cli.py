"""The command line as a user meets it: one line per mistake, exit codes, nothing half-written."""

import errno
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import typer

import octfm
from octfm import cli
from octfm.cli.main import SPINS
from octfm.cli.options import is_named_as_file, page_option
from octfm.encoder import embed_files
from octfm.errors import ConfigError
from octfm.io.location import write_whole
from octfm.layers.table import only_writer
from octfm.phantom import write
from octfm.pretraining import preflight
from octfm.pretraining.preflight import resources
from octfm.run.folder import locked
from octfm.store import writer
from support.command_line import octfm_command, octfm_here
from support.small_store import small_store
from support.tiny_runs import tiny


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("store") / "prepared").path


SAID = "octfm: interrupted; the same command continues\n"
WRONG = {
    "no such folder": (["scan", "nowhere"], "nowhere"),
    "no catalog": (["prepare", "nowhere"], "nowhere"),
    "no store": (["pretrain", "vit_s", "data.store=nowhere"], "no prepared store here"),
    "no store named": (["pretrain", "vit_s"], "data.store is not set"),
    "no phantoms for their truth": (["pretrain", "vit_s", "objective.name=dense"], "set data.phantoms.seed=1"),
    "unknown key": (["pretrain", "vit_s", "model.widht=3"], "did you mean model.width?"),
    "unknown config": (
        ["pretrain", "vit_xxl"],
        "packaged configs: anchored, data2vec_prototype, demo, demo_vjepa2, dense, mae, pretrain_vjepa",
    ),
    "unknown device": (["pretrain", "vit_s", "data.store={store}", "--device", "tpu"], "expected auto, cpu, cuda"),
    "misspelt config": (["pretrain", "vit_ss"], "did you mean vit_s?"),
    "patches that do not tile": (
        ["doctor", "vit_s", "data.store={store}", "model.patch_size=[3,16,16]"],
        "FAIL  token grid",
    ),
    "options that --tpu ignores": (
        ["doctor", "vit_s", "--tpu", "v4-32", "--ranks", "1", "--out", "x"],
        "does nothing with --out, --ranks;",
    ),
    "other options that --tpu ignores": (
        ["doctor", "vit_s", "--tpu", "v4-32", "--plot", "x.png", "--device", "cpu"],
        "--device, --plot;",
    ),
    "whitened goals on a TPU": (
        ["doctor", "vit_s", "--tpu", "v4-32", "objective.target_norm=whiten"],
        "xla_spmd compiles every step",
    ),
    "no run": (["embed", "nowhere"], "nowhere"),
    "no run to probe": (["probe", "nowhere"], "nowhere: no run here (config.yaml is missing)"),
    "nothing to segment": (["segment"], "give scans (octfm segment scan.e2e)"),
    "a table that Excel would write": (
        ["segment", "--sample", "healthy", "--out", "eyes.xlsx"],
        "--out eyes.xlsx: expected a folder or a table FILE.csv, got another file",
    ),
    "a table where a folder is written": (["embed", "a.dcm", "--out", "vectors.csv"], "vectors.csv: expected a folder"),
    "settings of a training for samples": (
        ["segment", "--sample", "--store", "{store}", "--steps", "3", "--allow-seen"],
        "--sample segments synthetic scans and does nothing with --store, --steps, --allow-seen; leave out one",
    ),
    "options of files for samples": (
        ["segment", "--sample", "--layouts", "line", "--axial-length", "24", "--dicom"],
        "does nothing with --axial-length, --dicom, --layouts;",
    ),
    "options of a training for scans": (
        ["segment", "scan.e2e", "--no-baselines", "--allow-seen"],
        "does nothing with --baselines, --allow-seen;",
    ),
    "options of files for a training": (
        ["segment", "encoder=x", "--store", "{store}", "truth=.", "--dicom", "--layouts", "line", "--only-corrected"],
        "segment: trains on a store and does nothing with --dicom, --layouts, --only-corrected;",
    ),
    "layouts for a finished training": (
        ["segment", "a.dcm", "--apply", "x", "--layouts", "line"],
        "--apply: segments raster scans with a finished training and does nothing with --layouts;",
    ),
    "a table of a finished training": (
        ["segment", "a.dcm", "--apply", "x", "--out", "found.csv"],
        "--apply: writes files into a folder; give --out FOLDER",
    ),
    "layouts for a store": (
        ["embed", "--store", "{store}", "--layouts", "line"],
        "--store: embeds what it holds and does nothing with --layouts;",
    ),
    "layouts without scans": (
        ["embed", "encoder-2", "--layouts", "line"],
        "embed: without scans, takes the store prepared and does nothing with --layouts;",
    ),
    "a spacing for a sample": (
        ["view", "--sample", "--spacing", "0.1,0.004,0.01"],
        "--sample shows a synthetic scan and its layers and does nothing with --spacing; leave out one or the other",
    ),
    "no scan in a folder": (["segment", "."], ".: no scan in it; check the path, or run octfm scan, which lists"),
    "no table": (["agree", "nowhere.csv"], "nowhere.csv: no such file or folder; check the path"),
    "a store to segment": (["segment", "{store}"], "a prepared store; expected scans"),
    "a page in place of the scan": (
        ["view", "{store}/store.json", "--out", "{store}/store.json"],
        "store.json: is there already and is no HTML page; choose another name for --out",
    ),
    "a page in place of settings": (["report", "runs/a", "--out", "{store}/store.json"], "is no HTML page"),
    "a file for a folder": (["scan", "{store}", "--out", "{store}/store.json"], "store.json: expected a folder, got"),
    "a word for a number": (
        ["doctor", "vit_s", "model.depth=six"],
        "override 'model.depth': expected a whole number, got 'six'",
    ),
    "a folder of something else": (["scan", ".", "--out", "{store}"], "the folder is not empty and holds no catalog"),
    "a config of fine-tuning": (["pretrain", "study_group_linear"], "settings of octfm finetune, which takes it"),
    "a config of pretraining": (["finetune", "vit_s", "encoder=x"], "settings of octfm pretrain, which takes it"),
    "no such run to report": (["report", "nowhere"], "nowhere"),
    "bad size": (["phantom", "out", "--size", "big"], "expected B-scans x rows x columns"),
    "unknown sabotage": (["demo", "--sabotage", "gremlins"], "expected one of teacher-frozen"),
    "unknown objective": (["demo", "--objective", "simclr"], "expected one of mae, vjepa2; got 'simclr'"),
    "sabotage of own data": (["demo", "--sabotage", "nan-volume", "--data", "."], "does nothing with --data;"),
    "sabotage of another seed": (["demo", "--sabotage", "nan-volume", "--seed", "3"], "does nothing with --seed;"),
    "max-samples alone": (["demo", "--max-samples", "5"], "give --data FOLDER"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_one_line_and_exit_code_1(case, tmp_path, store):
    words, message = WRONG[case]
    code, out, err = octfm_here(*(word.format(store=store) for word in words), cwd=tmp_path)
    assert code == 1, (out, err)
    if message.startswith("FAIL"):
        assert message in out and err == ""
    else:
        assert err.startswith("octfm: ") and message in err and err.count("\n") == 1, err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == [], "nothing half-written"


def test_a_mistake_ends_the_process_with_1(tmp_path):
    code, out, err = octfm_command("scan", "nowhere", cwd=tmp_path)
    assert (code, out) == (1, "") and err.startswith("octfm: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "replaced"),
    [
        (b"", True),
        (b"<!doctype html>\n<html>", True),
        (b"\xef\xbb\xbf<!DOCTYPE html>\r\n", True),
        (b"<html><body>", True),
        (b"\n" * 64 + b"\x80" * 64, False),
        (b"<!-- a scan --><Heyex>", False),
    ],
    ids=["nothing", "page", "saved by an editor", "without doctype", "voxels of the value of a newline", "XML"],
)
def test_a_page_replaces_pages_only(content, replaced, tmp_path):
    (page := tmp_path / "page.html").write_bytes(content)
    refused = nullcontext() if replaced else pytest.raises(ConfigError, match="is no HTML page; choose another name")
    with refused:
        assert page_option("HTML file.").parser(str(page)) == page


def test_wrong_usage_is_exit_code_2(tmp_path):
    assert octfm_command("pretrain", cwd=tmp_path)[0] == 2
    assert octfm_here("fly", cwd=tmp_path)[0] == 2


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["pretran", "vit_s"], "pretrain"),
        (["pretrain", "vit_s", "--stoer", "x"], "--store"),
        (["doctor", "vit_s", "--model.depth=6"], "settings are written model.depth=VALUE"),
        (["segment", ".", "--layouts", "star"], "for '--layouts': 'star' is not one of 'any', 'line'; try"),
    ],
)
def test_a_misspelt_verb_or_option_finds_the_one_that_was_meant(words, meant, tmp_path):
    code, _, err = octfm_here(*words, cwd=tmp_path)
    assert code == 2 and meant in err and err.count("\n") == 1, err


def test_a_suggestion_ends_with_one_mark(tmp_path):
    assert "Did you mean 'segment'; try octfm --help" in octfm_here("segmnt", cwd=tmp_path)[2]


@pytest.mark.parametrize(
    "hidden",
    [".t.csv.lock", ".t.csv.19248.99b5208d.partial", ".t.csv.partial", ".t.csv.7.99b5208d.partial/config.json"],
)
def test_a_folder_that_cannot_be_written_is_reported_by_the_name_that_was_given(hidden):
    """root may write anywhere, so the system's error is made here."""
    from octfm.cli.main import _system_error

    problem = _system_error(PermissionError(errno.EACCES, "Permission denied", f"found/{hidden}"))
    assert (
        problem.replace("/config.json", "")
        == "found/t.csv: permission denied; change the permissions, or choose another path"
    )


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (
            BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
            "unavailable; raise the limit of processes",
        ),
        (OSError(errno.EMFILE, "Too many open files", "a.dcm"), "a.dcm: Too many open files; raise the limit"),
        (OSError(errno.ENFILE, "Too many open files in system"), "Too many open files in system; raise the limit"),
        (
            FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/var/tmp']"),
            "found in ['/tmp', '/var/tmp']; free space in one, or name a writable folder in TMPDIR",
        ),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory: Cannot allocate memory; choose smaller"),
        (RuntimeError("can't start new thread"), "starts no further thread; raise the limit"),
        (MemoryError(), "out of memory: the system refused more; choose smaller sizes"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 18874368 bytes."),
            "you tried to allocate 18874368 bytes; choose smaller sizes",
        ),
    ],
    ids=[
        "processes",
        "files",
        "files of all",
        "no temporary folder",
        "memory for a process",
        "threads",
        "memory",
        "memory of torch",
    ],
)
def test_a_limit_of_the_machine_is_named_in_one_line(raised, said, tmp_path):
    """As `docker run --pids-limit`, or what a cluster allows a job."""
    with mock.patch("support.command_line.COMMAND", side_effect=raised):
        code, _, err = octfm_here("models", cwd=tmp_path)
    assert code == 1 and said in err and err.count("\n") == 1, err


def test_output_that_nobody_reads_any_more_is_an_error_of_one_line(tmp_path):
    """As `octfm … | head`: a training ended with code 1 and no word."""
    with mock.patch("typer.echo", side_effect=BrokenPipeError(errno.EPIPE, "Broken pipe")):
        code, _, err = octfm_here("models", cwd=tmp_path)
    assert code == 1 and "its output is read no further" in err and err.count("\n") == 1, err


def test_a_code_is_kept_where_nobody_reads_its_line():
    """As `octfm … 2>&1 | tee log` when a job is ended: 75 says that the run has saved, and was 1."""
    body = """
from contextlib import suppress
from octfm.cli import main
from octfm.errors import Preempted
def work(**_):
    with suppress(BrokenPipeError):  # at once only if Python does not buffer
        print("a line that nobody reads")
    raise Preempted("saved")
main.app = work
main.main()
"""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as pipe:
        assert subprocess.run([sys.executable, "-c", body], stdout=pipe, stderr=pipe).returncode == 75


@pytest.mark.slow
def test_a_current_folder_that_was_deleted_is_named(tmp_path):
    """A scan from there ended in "no such file" without a name, and `python -m octfm` in a traceback."""
    (tmp_path / "gone").mkdir()
    (tmp_path / "scan.dcm").write_bytes(b"read by a child process")
    done = subprocess.run(
        ["sh", "-c", 'rmdir "$PWD" && exec "$0" -m octfm scan "$1" --out "$1/catalog"', sys.executable, tmp_path],
        cwd=tmp_path / "gone",
        capture_output=True,
        text=True,
    )
    words = "octfm: the current folder has been deleted; cd into another one, and run the same command again\n"
    assert (done.returncode, done.stderr.splitlines(keepends=True)[-1]) == (1, words), done.stderr


def test_a_disk_that_cannot_be_written_is_reported_by_the_whole_name(tmp_path, monkeypatch):
    """On a read-only disk even deleting what is not there fails; long names were reported without their end."""

    def refuse(path, *_, **__):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    for name in ("write_bytes", "unlink"):
        monkeypatch.setattr(Path, name, refuse)
    with pytest.raises(OSError) as caught:
        write_whole(tmp_path / f"{'long' * 20}.html", b"")
    assert caught.value.filename == str(tmp_path / f"{'long' * 20}.html")


def test_doctor_then_pretrain_then_resume(store, tmp_path):
    words = tiny(f"data.store={store}")
    with mock.patch.object(resources, "forecast", lambda *_: resources.passed("forecast", "not asked here")):
        code, out, err = octfm_here("doctor", "vit_s", *words, cwd=tmp_path)
    assert code == 0 and "PASS  objective learns" in out, (out, err)
    assert list(tmp_path.iterdir()) == []
    for _ in range(2):
        with mock.patch.object(preflight, "checks", lambda *_, **__: []):  # the doctor has made them
            code, out, err = octfm_here("pretrain", "vit_s", *words, "--out", "runs/a", "--device", "cpu", cwd=tmp_path)
        assert code == 0 and "pretraining done: 8 updates" in out, (out, err)
    assert "resuming runs/a after 8 updates" in out


def test_doctor_exits_with_1_when_a_check_fails(store, tmp_path):
    code, out, err = octfm_here(
        "doctor", "vit_s", *tiny(f"data.store={store}", "steps=4000", "schedule.ema_base=0.99999"), cwd=tmp_path
    )
    assert code == 1 and "FAIL  teacher momentum" in out, (out, err)


def test_version_is_told_once():
    from importlib.metadata import version

    assert version("octfm") == octfm.__version__


def test_a_folder_that_is_there_may_be_named_like_a_table(tmp_path):
    (tmp_path / "run.json").mkdir()
    assert not is_named_as_file(tmp_path / "run.json") and is_named_as_file(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("signals", "repeated_s", "printed"),
    [
        *((signals, 1.0, ("tidied\n", SAID)) for signals in ("INT INT", "TERM HUP", "HUP HUP")),
        ("INT INT", 0.0, ("", "")),  # somebody who lost patience
    ],
)
def test_a_verb_that_is_terminated_ends_as_by_ctrl_c(signals, repeated_s, printed):
    """Schedulers send SIGTERM at the end of the hours: exit code -15 and no word say nothing about the results. Shells
    and wrappers repeat signals, which then came while Python was ending, with a traceback."""
    first, second = (f"signal.raise_signal(signal.SIG{name})" for name in signals.split())
    body = f"""
import atexit, signal
from octfm.cli import main
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)  # whoever started the tests may ignore them
def work(**_):
    try:
        {first}
    finally:
        {second}
        print("tidied")
atexit.register(lambda: {second})
class Late:
    def __del__(self, send=signal.raise_signal, number=signal.SIG{signals.split()[1]}):
        send(number)
late = Late()  # ends with the interpreter, after its handlers of signals
main.app, main.REPEATED_S = work, {repeated_s}
main.main()
"""
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True)
    assert (done.returncode, (done.stdout, done.stderr)) == (130, printed)


def test_a_verb_under_nohup_goes_on():
    body = "main.app = lambda **_: signal.raise_signal(signal.SIGHUP); main.main()"
    ignored = "import signal; from octfm.cli import main; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    assert subprocess.run([sys.executable, "-c", f"{ignored}; {body}"]).returncode == 0


def test_ctrl_c_while_the_command_is_imported_is_one_line(monkeypatch, capsys):
    class Impatient:
        def find_spec(self, name, *_):
            if name == "octfm.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "octfm.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Impatient(), *sys.meta_path])
    with pytest.raises(SystemExit, match="130"):
        cli.run()
    assert capsys.readouterr().err == "octfm: interrupted before it began\n"


@pytest.mark.parametrize("raised", [typer.Abort, KeyboardInterrupt])
def test_an_interruption_is_one_line(raised, tmp_path):
    """typer raises Abort, a RuntimeError, for some of them."""
    with mock.patch("support.command_line.COMMAND", side_effect=raised):
        assert octfm_here("models", cwd=tmp_path) == (130, "", SAID)


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_a_verb_without_standard_streams_writes_what_libraries_print_into_no_file(closed, tmp_path):
    """As `octfm … 2>&-`: the next file that was opened became stderr, and no child process started."""
    body = """
import os, subprocess, sys
from octfm.cli import main
from octfm.io.isolation import UNLIMITED, each
def work(**_):
    with open("file", "wb") as file:
        assert file.fileno() > 2
        os.write(2, b"printed")
        file.write(b"%d" % next(each(abs, [-3], UNLIMITED, lambda _: 60.0)))
    assert subprocess.run([sys.executable, "-c", "import os; [os.fstat(number) for number in range(3)]"]).returncode == 0
    print("done", sys.stdin.read(), file=sys.stderr)
main.app = work
main.main()
"""
    shut = " ".join(f"{number}>&-" for number in closed)
    done = subprocess.run(
        ["sh", "-c", f'"$0" -c "$1" {shut}', sys.executable, body], cwd=tmp_path, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0 and (tmp_path / "file").read_bytes() == b"3"


def test_a_verb_in_the_background_goes_on_when_its_terminal_is_closed(tmp_path):
    """After `octfm … & disown` no signal says so; the next line that it printed ended it, with a checkpoint unsaved."""
    body = """
import sys, time
from pathlib import Path
from octfm.cli import main
from octfm.cli.options import echo_line
from octfm.io.progress import Progress
def work(**_):
    with Progress("training", 2, "steps", always=True) as bar:
        bar.advance()
        print("bar", flush=True)
        sys.stdin.read()  # until the terminal is closed
        for err in (False, True):
            echo_line("step 2", err=err)
        bar.advance()
    Path("saved").touch()
main.app = work
main.main()
"""
    terminal, line = os.openpty()
    work = subprocess.Popen(
        [sys.executable, "-c", body],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=line,
        stderr=line,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(line)
    seen = b""
    while b"bar" not in seen:
        seen += os.read(terminal, 1000)
    os.close(terminal)
    assert work.stdin
    work.stdin.close()
    assert work.wait(60) == 0 and (tmp_path / "saved").exists()


def test_a_terminal_shows_at_once_what_unbuffered_python_writes():
    body = "import os; from octfm.cli import main; main._open_streams(); print('1', end=''); os.write(1, b'2')"
    terminal, line = os.openpty()
    subprocess.run([sys.executable, "-u", "-c", body], stdout=line, stdin=subprocess.DEVNULL, check=True)
    os.close(line)
    assert os.read(terminal, 10) == b"12"
    os.close(terminal)


@pytest.mark.parametrize(
    ("chosen", "spins"), [({}, SPINS), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")]
)
def test_threads_that_wait_leave_their_core_to_others_before_torch_is_imported(chosen, spins):
    """Beside other programs the threads of one verb waited so busily for each other that it took up to four times as long."""
    body = "main.app = lambda **_: print('torch' in sys.modules, os.environ.get('GOMP_SPINCOUNT')); main.main()"
    clean = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", f"import os, sys; from octfm.cli import main; {body}"],
        env=clean | chosen,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["False", spins]


@pytest.mark.parametrize(
    ("quota", "chosen", "threads"),
    [("150000", {}, "2"), ("150000", {"OMP_NUM_THREADS": "3"}, "3"), ("max", {}, "None")],
)
def test_torch_starts_no_more_threads_than_a_container_has_cores(tmp_path, quota, chosen, threads):
    """As `docker run --cpus 1.5` on a host of 64 cores, all of which torch may run on and counts."""
    (tmp_path / "cpu.max").write_text(f"{quota} 100000\n")
    body = (
        f"cores.GROUP = pathlib.Path({str(tmp_path)!r}); os.cpu_count = lambda: 64; "
        "os.sched_getaffinity = lambda _: set(range(64)); "
        "main.app = lambda **_: print(os.environ.get('OMP_NUM_THREADS')); main.main()"
    )
    clean = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "SLURM_CPUS_ON_NODE")}
    done = subprocess.run(
        [sys.executable, "-c", f"import os, pathlib; from octfm.cli import main; from octfm.io import cores; {body}"],
        env=clean | chosen,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [threads], done.stderr


def test_names_of_files_and_what_is_printed_are_utf8_in_every_locale(tmp_path):
    """In ASCII or Latin-1 the folder Müller had other letters: all of its files were rejected as not UTF-8."""
    (tmp_path / "Müller").touch()
    body = "main.app = lambda **_: print(sys.argv, [path.name for path in Path().iterdir()], '\\xb5m'); main.main()"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; from pathlib import Path; from octfm.cli import main; {body}", "Müller"],
        env=os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        cwd=tmp_path,
    )
    assert done.stdout.decode() == "['-c', 'Müller'] ['Müller'] µm\n"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EACCES])
def test_a_folder_that_cannot_be_synced_or_listed_is_written_to(tmp_path, monkeypatch, number):
    """As on network file systems, and in a folder to drop files into; the file itself is on the disk by then."""
    opened = os.open

    def refuse_folders(path, *flags):
        if Path(path).is_dir():
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *flags)

    monkeypatch.setattr(os, "open", refuse_folders)
    write_whole(tmp_path / "a.csv", b"whole")
    assert (tmp_path / "a.csv").read_bytes() == b"whole"
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(number, "no")))
    with pytest.raises(OSError, match="no"):
        write_whole(tmp_path / "b.csv", b"lost")


@pytest.mark.parametrize(
    "hold",
    [
        writer.exclusive,
        embed_files._exclusive,
        lambda folder: only_writer(folder / "table.csv"),
        lambda folder: write._new_folder(folder / "clinic"),
        lambda folder: locked(folder, lambda line: print(line, file=sys.stderr)),
    ],
    ids=["prepare", "embed", "segment", "phantom", "pretrain"],
)
def test_a_file_system_without_locks_is_written_to_with_a_warning(hold, tmp_path, monkeypatch, capsys):
    """As NFS without a lock daemon, or Lustre mounted without flock: prepare and embed ended in an error there."""
    monkeypatch.setattr("fcntl.flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with hold(tmp_path):
        pass
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be locked here (No locks available)" in line


@pytest.mark.parametrize(
    "words",
    [
        ["scan", "C:\\Users\\anna\\oct"],
        ["scan", ".", "--out", "C:\\Users\\anna\\catalog"],
        ["segment", "C:/Users/anna/a.e2e"],
        ["segment", "a.e2e", "--out", "C:Usersannatable.csv"],
        ["view", "C:\\a.e2e"],
        ["report", "run", "--out", "c:report.html"],
        ["doctor", "vit_s", "data.store=C:\\Users\\anna\\prepared"],
        ["finetune", "study_group_linear", "--out", "tuned", "labels=C:/Users/anna/labels.csv"],
    ],
    ids=" ".join,
)
def test_a_path_of_windows_is_refused_with_that_of_wsl(words, tmp_path):
    """A shell may leave the backslashes or not; the output was a new folder called C:… in the current one."""
    code, out, err = octfm_here(*words, cwd=tmp_path)
    assert (code, out) == (1, "") and "a path of Windows; in WSL write /mnt/c/… instead" in err
    assert not any(tmp_path.iterdir())
