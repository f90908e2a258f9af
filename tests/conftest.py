"""What every test may use: the real OCT data (internal, never committed) or a skip that says where it was looked
for."""

import gc
import os
import pickle
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from octfm.io.heap import keep_freed_memory
from support.bucket_servers import endpoints, faulty, place  # noqa: F401
from support.examples import EXPLORING, examples

ROOT = Path(__file__).parent.parent
# The environments of XLA and of GPUs have no hypothesis, and no property tests.
if find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    # A busy machine fails no test for its slowness, and no test minds that its folder is that of the examples before.
    lenient = settings(
        deadline=None,
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.function_scoped_fixture,
            HealthCheck.differing_executors,
        ],
    )
    # The same examples in every run, so that a commit is red for what it changed.
    settings.register_profile("repeatable", lenient, derandomize=True, max_examples=examples(100))
    settings.register_profile("exploring", lenient)
    settings.load_profile("exploring" if EXPLORING else "repeatable")
DISTRIBUTIONS: dict[tuple, Any] = {}
SAFE_PATH, SIGTERM = os.environ.get("PYTHONSAFEPATH"), signal.getsignal(signal.SIGTERM)
# Importing 130 files and torch makes half a million objects that stay. Going through them again and again took a third
# of the time that collecting the tests takes.
gc.disable()
# The disk keeps what a killed process wrote in any case, and no test pulls its plug: waiting for it would take a second
# for every small store. A descriptor that is not open is an error all the same.
os.fsync = os.fstat
# As the commands that read scans do: without it a tenth of the CPU time is the kernel's, which clears pages.
keep_freed_memory()


def pytest_collection_finish():
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if config.getvalue("dist") != "loadfile":
        return None
    from support.handing_out import HandingOut

    return HandingOut(config, log)


@pytest.fixture(scope="session")
def real_data() -> Path:
    folder = Path(os.environ.get("OCTFM_REAL_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "medvisbonn_amd_spectralis_145.npz").is_file():
        pytest.skip(f"real OCT data not found in {folder}; set OCTFM_REAL_DATA")
    return folder


@pytest.fixture(autouse=True)
def what_the_command_sets_ends_with_the_test():
    """The command sets PYTHONSAFEPATH for what it starts, and how SIGTERM ends it; run inside this process, by a
    fixture even, it would do so for every later test."""
    _as_it_was()
    yield
    _as_it_was()


def _as_it_was() -> None:
    signal.signal(signal.SIGTERM, SIGTERM)
    os.environ.pop("PYTHONSAFEPATH", None)
    if SAFE_PATH is not None:
        os.environ["PYTHONSAFEPATH"] = SAFE_PATH


@pytest.fixture(scope="module", autouse=True)
def charts_are_drawn_where_they_are_looked_at(request):
    """Every page of a scan or run has some, and drawing them takes longer than all else that most tests of a page do."""
    if request.node.get_closest_marker("drawn") or not find_spec("matplotlib"):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        _leave_undrawn(patch)
        yield


def _leave_undrawn(patch: pytest.MonkeyPatch) -> None:
    """Charts are made, and their <svg> stays empty; pictures with pixels are drawn. Every `octfm scan` makes six
    charts, which takes longer than to scan a few small files: each is made once per scanner and size."""
    from matplotlib.figure import Figure

    from octfm.report import data_health

    draw, distribution = Figure.savefig, data_health._distribution

    def remembered(acquisitions, name, title, caption, axis, measure):
        key = name, *((a.scanner, measure(a)[axis]) for a in acquisitions)
        if key not in DISTRIBUTIONS:
            DISTRIBUTIONS[key] = distribution(acquisitions, name, title, caption, axis, measure)
        return DISTRIBUTIONS[key]

    def savefig(figure: Figure, file: Any, **options: Any) -> None:
        if options.get("format") == "svg":
            file.write("<svg></svg>")
        else:
            draw(figure, file, **options)

    patch.setattr(Figure, "savefig", savefig)
    patch.setattr(data_health, "_distribution", remembered)


@pytest.fixture(scope="module")
def remembered_charts():
    """The pages of a file's tests draw every chart and picture once: most show the same run."""
    from octfm.report import figures, images
    from octfm.report.trust import figures as of_trust

    drawing = {
        figures: ("_chart", "_forest_plot", "overview_forest", "efficiency_plots"),
        images: ("_bscan", "_enface"),
        of_trust: ("bars", "reliability", "bland_altman"),
    }

    def remembering(draw):
        drawn = {}

        def remembered(*args, **options):
            key = pickle.dumps((args, options))
            if key not in drawn:
                drawn[key] = draw(*args, **options)
            return drawn[key]

        return remembered

    with pytest.MonkeyPatch.context() as patch:
        for module, names in drawing.items():
            for name in names:
                patch.setattr(module, name, remembering(getattr(module, name)))
        yield


@pytest.fixture(scope="module")
def remembered_bscans():
    """The packaged network looks once at every B-scan that the tests of a file give it."""
    from octfm.layers.finder import LayerFinder
    from support.remembered_bscans import RememberedBscans

    with pytest.MonkeyPatch.context() as patch:
        memory = RememberedBscans()

        def find(finder, volume):
            return memory.of(finder, volume)

        patch.setattr(LayerFinder, "find", find)
        yield


@pytest.fixture(scope="module")
def light_checks():
    """The three checks before step 0 that take most of their time pass unasked; they have tests of their own."""
    from octfm.pretraining.preflight import objective, resources
    from octfm.pretraining.preflight.check import passed

    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((objective, "overfit"), (resources, "memory"), (resources, "forecast")):
            patch.setattr(module, name, lambda *_, name=name: passed(name, "not asked here"))
        yield


@pytest.fixture
def undrawn(monkeypatch):
    """As in other modules, for one test of a module that looks at charts."""
    _leave_undrawn(monkeypatch)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Twelve participants with both eyes, on one of two scanners each. Tests do not change it."""
    from support.small_store import small_store

    return small_store(tmp_path_factory.mktemp("store") / "prepared")


@pytest.fixture(scope="module")
def run(store, tmp_path_factory):
    """An encoder that made three updates on `store`."""
    from support.tiny_runs import config, quick_pretrain, quiet

    return quick_pretrain(config(steps=3), store, tmp_path_factory.mktemp("runs") / "run", echo=quiet)


@pytest.fixture(scope="module")
def whole(store, tmp_path_factory):
    """A run of config() on `store` that nothing disturbed."""
    from support.tiny_runs import config, quick_pretrain, quiet

    return quick_pretrain(config(), store, tmp_path_factory.mktemp("whole") / "run", echo=quiet)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from support.browser import Browser

    with Browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture(scope="session")
def ranks():
    """Runs jobs of several ranks in processes of its own."""
    # Not above: the process that only hands out tests to workers would import torch before it starts them.
    from support.ranks import Ranks

    jobs = Ranks()
    yield jobs
    jobs.close()
