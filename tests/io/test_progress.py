"""Progress of long work: lines far apart in a file, a bar with the time left on a terminal, nothing for short work."""

import io
import re
import sys

import pytest

from octfm.evaluation.efficiency import label_efficiency
from octfm.evaluation.probe import probe
from octfm.io import progress as module
from octfm.io.progress import Progress
from support.command_line import octfm_here
from support.probe_cohort import Cohort


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_are_a_share_of_the_work_apart():
    lines: list[str] = []
    with Progress("embed", 1000, echo=lines.append, pause_s=0) as progress:
        for _ in range(1000):
            progress.advance()
    assert len(lines) == 20 and lines[0].startswith("embed: 50 of 1,000 volumes, ")
    assert lines[-1].startswith("embed: 1,000 of 1,000 volumes, ") and "min left" in lines[-1]


def test_failures_are_counted_in_the_line():
    lines: list[str] = []
    with Progress("prepare", 4, failure="not prepared", echo=lines.append, pause_s=0) as progress:
        progress.advance(4, failed=2)
    assert lines[-1].endswith(", 2 not prepared")


def test_short_work_prints_nothing_unless_asked(capsys):
    for always in (False, True):
        with Progress("scan", 3, "files", always=always) as progress:
            progress.up_to(3, 3)
        out, err = capsys.readouterr()
        assert out == "" and bool(err) == always


class Window:
    """What a program with a window of its own may put in the place of a stream."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None: ...


@pytest.mark.parametrize("stream", [None, Window()])
def test_programs_without_a_console_make_progress(monkeypatch, stream):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream)
    with Progress("prepare", 3, always=True) as progress:
        progress.up_to(3, 3)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with Progress("prepare", 3, always=True) as progress:
        progress.up_to(3, 3)
    assert "3/3" in terminal.getvalue()


@pytest.mark.parametrize("after", [0.0, 1000.0])
def test_a_terminal_gets_a_bar_with_the_time_left_once_work_is_long(monkeypatch, after):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(module, "SHOW_AFTER_S", after)
    with Progress("scan [b]", 1, "files") as progress:
        for done in range(5):
            progress.up_to(done, 4)
    text = terminal.getvalue()
    assert ("4/4" in text and "left" in text and "scan [b]" in text) == (after == 0.0)
    assert bool(text) == (after == 0.0)


def test_fits_of_a_probe_are_counted_on_a_terminal(monkeypatch, tmp_path):
    terminal, cohort = Terminal(), Cohort()
    files = [cohort.embeddings(tmp_path / f"{name}.parquet", name=name) for name in ("pretrained", "random_init")]
    labels = cohort.labels(tmp_path / "labels.tsv")
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(module, "SHOW_AFTER_S", 0.0)
    probe(files, labels, targets=["disease", "diagnosis"], resamples=20)
    label_efficiency(files, labels, targets=["disease"], fractions=(0.5, 1.0), resamples=20)
    assert re.search(r"probe.*4/4.*left", terminal.getvalue())
    assert re.search(r"label efficiency.*4/4.*left", terminal.getvalue())


def test_a_quick_phantom_says_nothing_but_its_result(tmp_path):
    code, out, err = octfm_here("phantom", "clinic", "--participants=1", "--size=8x64x48", "--workers=0", cwd=tmp_path)
    assert (code, err) == (0, "") and out.count("\n") == 1
