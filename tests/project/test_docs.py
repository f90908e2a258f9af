"""The guide says what the code does: links, verbs, options, settings, public names; examples run, pages build and
stay offline."""

import importlib
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml

import octfm
from octfm.config import find_config, known_keys
from octfm.formats import read_overlay
from octfm.layers.export import label_map
from octfm.models.objectives.builtin import BUILT_IN
from octfm.pretraining.settings import PretrainConfig
from octfm.tasks.finetune_settings import FinetuneConfig
from octfm.tasks.segment_settings import SegmentConfig
from support import ROOT, TESTS
from support.browser import Browser, needs_chromium
from support.command_line import inside
from support.segmented import found_in
from support.small_store import small_preprocessing, small_store

DOCS = ROOT / "docs"
PAGES = sorted(
    [*DOCS.glob("*.md"), *DOCS.glob("guide/*.md"), *DOCS.glob("log/*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"]
)
names = [str(page.relative_to(ROOT)) for page in PAGES]
GENERATED = {"commands.md", "settings.md"}
"""Pages that `make docs` makes from the code (docs/reference.py)."""
GUIDE = [page for page in PAGES if page.parent == DOCS / "guide"] + [ROOT / "README.md"]
CURRENT = [page for page in PAGES if page.parent in (DOCS, DOCS / "guide")] + [ROOT / "README.md"]
"""Log and changelog tell of commands as they were."""


def commands(text: str) -> list[str]:
    """Commands of octfm in code blocks (continued lines joined, comments dropped) and in single backticks that begin
    with one."""
    blocks = re.findall(r"^```(?:bash|console)\n(.*?)^```", text, re.S | re.M)
    lines = [line for block in blocks for line in re.sub(r"\\\n\s*", " ", block).splitlines()]
    found = [line.removeprefix("$ ").split(" #")[0].strip() for line in lines]
    # Text in code blocks is no inline code.
    inline = re.findall(r"`(octfm [^`|]+)`", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))
    return [line for line in [*found, *inline] if line.startswith("octfm ")]


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_every_link_leads_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        if other.parent == DOCS and other.name in GENERATED:
            continue
        assert other.exists(), f"{target}: no such file"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", other.read_text(), re.M)
            anchors = {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}
            assert anchor in anchors, f"{target}: no such section"


def test_every_link_leads_somewhere_on_the_site_too():
    """`make docs` fails otherwise, which takes half a minute to find out: there are files beside docs/ that are no pages."""
    pytest.importorskip("mkdocs", reason="the pages need octfm[docs]")
    hooks = runpy.run_path(str(DOCS / "site_hooks.py"))
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
        for target in re.findall(r"\]\((?!https?://|mailto:|#)([^)\s#]+)", hooks["ELSEWHERE"].sub("", text)):
            other = (page.parent / target).resolve()
            assert other.is_relative_to(DOCS) or other.name in hooks["PAGES"], f"{page.name}: {target}"


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: page.name)
def test_every_verb_option_and_setting_exists(page):
    import typer.main

    from octfm.cli.main import app

    program = typer.main.get_command(app)
    verbs, common = program.commands, {option for parameter in program.params for option in parameter.opts}
    keys = {key for cls in (PretrainConfig, FinetuneConfig, SegmentConfig) for key in known_keys(cls)}
    keys |= set(known_keys(octfm.Preprocessing))
    for command in commands(page.read_text()):
        words = command.split()
        if words[1] in ("--help", "…", *common):
            continue
        assert words[1] in verbs, f"{command}: no such verb"
        options = {
            option for parameter in verbs[words[1]].params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        for word in words[2:]:
            if word.startswith("--"):
                assert word.split("=")[0] in options | {"--help"}, f"{command}: {words[1]} has no {word}"
            elif match := re.fullmatch(r"([a-z_]+(?:\.[a-z_]+)*)=.*", word):
                assert match[1] in keys or words[words.index(word) - 1].startswith("--"), (
                    f"{command}: no setting {match[1]}"
                )
    # Settings in running text, `section.key` or `section.key=value`.
    sections = {key.split(".")[0] for key in keys if "." in key}
    for key in re.findall(r"`([a-z_]+\.[a-z_]+)(?:=[^`]*)?`", page.read_text()):
        if key.split(".")[0] in sections and not key.endswith(
            (".py", ".md", ".json", ".html", ".parquet", ".jsonl", ".yaml")
        ):
            assert key in keys, f"{key}: no such setting"


def test_the_jobs_on_several_ranks_divide_their_batch():
    """As printed, and in the headers of the scripts; otherwise the preflight stops them."""
    from octfm.pretraining.settings import load_config

    slurm = (ROOT / "launch" / "slurm.sbatch").read_text()
    gpus = re.findall(r"^#SBATCH --gpus-per-node=(\d+)", slurm, re.M)[0]
    pages = [(DOCS / "guide" / "scale-out.md").read_text(), slurm, (ROOT / "launch" / "torchrun.sh").read_text()]
    lines = re.sub(r" \\\n#?\s*", " ", "\n".join(pages)).splitlines()
    jobs = [line for line in lines if "pretrain vit_s" in line and ("torchrun.sh" in line or "sbatch" in line)]
    for job in jobs:
        options = dict(re.findall(r"--(\S+) (\d+)", job))
        ranks = options.get("nproc-per-node") or int(options["nodes"]) * int(options.get("gpus-per-node", gpus))
        data = load_config("vit_s", re.findall(r"data\.\w+=\d+", job)).data
        assert data.global_batch_size % (data.per_device_batch_size * int(ranks)) == 0, job
    assert len(jobs) == 4


def test_an_external_encoder_is_defined_on_the_page_whose_command_names_it():
    named = 0
    for page in GUIDE:
        text = page.read_text()
        for function in re.findall(r"--external \w+\.py:(\w+)", text):
            assert f"\ndef {function}(" in text, f"{page.name}: {function}"
            named += 1
    assert named == 2


def test_every_call_of_a_module_works_after_importing_octfm_alone():
    """As a reader of a page would type `octfm.formats.read_surfaces(file)`; nothing else has imported its module."""
    pages = "".join(page.read_text() for page in [*GUIDE, DOCS / "phantom.md", DOCS / "index.md"])
    calls = sorted(set(re.findall(r"\boctfm\.([a-z_]+\.[A-Za-z_.]+)\(", pages)))
    assert "formats.read_surfaces" in calls
    code = f"import octfm, operator\nfor call in {calls}:\n    operator.attrgetter(call)(octfm)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_every_guarantee_names_tests_that_exist_and_a_fast_one():
    """The check before a commit is merged runs no slow tests, so a guarantee that has no other could be lost in it."""
    lines = (DOCS / "guarantees.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("|") and "::test_" in line]
    assert len(rows) > 80
    sources = {path.stem: path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py")}
    for row in rows:
        file, fast = "", 0
        for other, name, more in re.findall(r"(?:(test_\w+)(?:\.py)?)?::(test_\w+)(…?)", row):
            file = other or file
            found = re.findall(rf"((?:^[@ )\]].*\n)*)^def {name}{'' if more else '[(]'}", sources[file], re.M)
            assert found, f"{file}::{name}: no such test"
            if not re.search(r"^pytestmark = .*pytest\.mark\.slow\b", sources[file], re.M):
                fast += sum(not re.search(r"^@(pytest\.mark\.slow|SLOW)$", marks, re.M) for marks in found)
        assert fast, f"a guarantee without a fast test: {row}"


def test_the_figures_of_readme_and_model_cards_are_those_of_the_results():
    """Numbers have one home; a result that is measured again is corrected wherever it is repeated."""
    from octfm.weights.card import MEASURED

    results, readme = (DOCS / "results.md").read_text(), (ROOT / "README.md").read_text()
    repeated = [readme[readme.index("## On your first scan") : readme.index("## Install")], *MEASURED.values()]
    for text in repeated:
        figures = re.findall(r"(?<![\d.])[+−]?\.\d{2,3}\b|\d\.\d+(?= µm)|\d+ %", text)
        assert len(figures) >= 5
        assert not [n for n in figures if not re.search(rf"(?<![\d.]){re.escape(n)}(?!\d)", results)]


def test_every_page_is_in_the_navigation():
    """`make docs` fails otherwise, and that takes longer to find out."""
    listed = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert listed - {"readme.md", "changelog.md"} - GENERATED == {
        str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")
    }


def test_every_verb_is_told_of_and_every_config_named_is_there():
    import typer.main

    from octfm.cli.main import app

    told = (
        " ".join(command for page in PAGES for command in commands(page.read_text())) + (ROOT / "README.md").read_text()
    )
    assert not [verb for verb in typer.main.get_command(app).commands if not re.search(rf"\b{verb}\b", told)]
    for page in GUIDE:
        for command in commands(page.read_text()):
            words = command.split()
            if (
                words[1] in ("pretrain", "doctor", "bench", "finetune")
                and len(words) > 2
                and re.fullmatch(r"[a-z_]+", words[2])
            ):
                find_config(words[2])


def test_the_reference_has_every_public_name_and_no_other():
    named = re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(), re.M)
    for name in named:
        module, _, last = name.rpartition(".")
        about = getattr(importlib.import_module(module), last).__doc__
        assert about, f"{name} has no docstring"
        assert not re.search(r"<\w+>", re.sub(r"`[^`]*`", "", about)), f"{name}: <word> is an element of the page"
    homes = {f"{home}.{name}" for name, home in octfm._HOME.items()}
    assert homes <= set(named), homes - set(named)


def reference_pages() -> dict[str, str]:
    sys.path.insert(0, str(DOCS))
    import reference

    assert set(reference.PAGES) == GENERATED
    return {name: write() for name, write in reference.PAGES.items()}


def test_the_reference_has_every_verb_option_and_setting_with_its_meaning():
    import typer.main

    from octfm.cli.main import app

    pages = reference_pages()
    parts = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", pages["commands.md"], re.S | re.M))
    verbs = typer.main.get_command(app).commands
    assert list(parts) == list(verbs)
    for name, verb in verbs.items():
        for parameter in verb.params:
            if parameter.param_type_name == "option":
                assert f"`{parameter.opts[0]}" in parts[name], f"{name}: {parameter.opts[0]}"
    rows = dict(re.findall(r"^\| `([a-z_0-9.]+)` \| [^|]+ \| [^|]+ \| (.*) \|$", pages["settings.md"], re.M))
    configs = (PretrainConfig, FinetuneConfig, SegmentConfig, octfm.Preprocessing)
    ours = {key for cls in configs for key in known_keys(cls) if not key.startswith("objective.")}
    assert ours | {"objective.goal_average", "objective.context_loss"} <= rows.keys()
    assert not [key for key, meaning in rows.items() if len(meaning) < 10], "a setting without a docstring"
    trained_by = {name for name, objective in BUILT_IN.items() if objective().teaches_summary}
    assert trained_by == set(re.findall(r"`(\w+)`", rows["model.summary"]))


@needs_chromium
@pytest.mark.slow
def test_search_works_from_a_disk_and_ranks_the_guide_first(tmp_path):
    """Pages opened as files: no server, no worker, no fetch. The log says the word more often, and in its title; the
    guide has it behind a dot only, and whoever searches writes it as an option."""
    pytest.importorskip("material", reason="the pages need octfm[docs]")
    docs = tmp_path / "docs"
    for page, text in {
        "index.md": "# Start",
        "guide/reading.md": "# Reading\n\n## Spacing\n\nEvery `.quokka` has millimetres.",
        "log/old.md": "# Quokka\n\n## A quokka in a quokka\n\nquokka quokka quokka",
    }.items():
        (docs / page).parent.mkdir(parents=True, exist_ok=True)
        (docs / page).write_text(text)
    shutil.copy(DOCS / "offline_search.js", docs)
    settings = {
        "site_name": "pages", "use_directory_urls": False, "theme": {"name": "material", "font": False},
        "plugins": yaml.safe_load((ROOT / "mkdocs.yml").read_text())["plugins"][:1], "hooks": [str(DOCS / "site_hooks.py")],
    }  # fmt: skip
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(settings))
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet"], cwd=tmp_path, capture_output=True, text=True, timeout=280,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with Browser(tmp_path) as browser:
        browser.open(tmp_path / "site" / "guide" / "reading.html")
        browser.js("document.querySelector('.md-search__input').focus()")
        browser.call("Input.insertText", text="--quokka")
        browser.wait("document.querySelectorAll('.md-search-result__item').length >= 2")
        first = "document.querySelector('.md-search-result__item a').href"
        assert "guide/reading.html" in browser.js(first)
        assert not browser.complaints
        assert all(url.startswith(("file:", "data:", "about:", "blob:")) for url in browser.asked)


def test_the_thresholds_in_the_questions_are_those_of_the_code():
    from octfm.pretraining.monitors.health import HealthConfig, verdicts

    page = " ".join((DOCS / "guide" / "faq.md").read_text().split())
    health = HealthConfig()
    row = {
        "step": 10_000, "warmup_steps": 10, "effective_rank": 50.0, "teacher_step": 1.0, "teacher_asked": 1.0, "grad_norm": 1.0,
        "dead_targets": 0.0, "data_wait_share": 0.0,
    }  # fmt: skip

    def masked(ratio, **changes):
        return verdicts({**row, "masked_over_baseline": ratio, **changes}, 100)[0].verdict

    assert [masked(r) for r in (0.019, 0.021, 0.969, 0.971)] == [
        "bad",
        "ok",
        "ok",
        "watch",
    ] and "between 0.02 and 0.97" in page
    assert masked(1.0, step=3 * 10 + 49) == "ok" and "three warm-ups and 50 steps" in page
    assert f"within {health.window} steps" in page and "less than half" in page and health.drop == 0.5
    assert (
        f"one step {health.loss_factor:g} times" in page and f"{health.lasting_factor:g} times in two of three" in page
    )
    assert (health.max_skips, health.skip_window) == (4, 50) and "four doubtful steps within 50" in page
    ranks = [
        verdicts({**row, "masked_over_baseline": 0.5, "effective_rank": r}, 100)[1].verdict
        for r in (1.9, 2.1, 3.9, 4.1)
    ]
    assert (
        ranks == ["bad", "watch", "watch", "ok"]
        and "Below 4 % of the width" in page
        and "below 1 % of the width, plus 1" in page
    )
    waiting = [
        len(verdicts({**row, "masked_over_baseline": 0.5, "data_wait_share": share}, 100)) for share in (0.19, 0.21)
    ]
    assert waiting[1] == waiting[0] + 1 and "More than 20 % waiting" in page


def blocks(page: str) -> dict[str, str]:
    """Python blocks of a page that are named as files."""
    text = (DOCS / "guide" / page).read_text()
    return dict(re.findall(r'^```python title="([\w.]+)"\n(.*?)^```', text, re.S | re.M))


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder as the examples expect it: runs/a, prepared, exported, scan.dcm and a RETFound file of random
    weights."""
    from octfm.encoder.export import export
    from octfm.phantom import phantom_volume
    from support.dicom_files import write_oct_dicom
    from support.retfound_file import random_file
    from support.tiny_runs import config, quick_pretrain, quiet

    folder = tmp_path_factory.mktemp("workplace")
    store = small_store(folder / "prepared")
    quick_pretrain(config(steps=2), store, folder / "runs" / "a", echo=quiet)
    export(folder / "runs" / "a", folder / "exported", echo=quiet)
    volume, _ = phantom_volume(5, size=(6, 64, 48))
    write_oct_dicom(folder / "scan.dcm", volume.voxels, volume.spacing_mm)
    random_file(folder / "RETFound_oct_weights.pth")
    return folder


def run_block(code: str, folder: Path) -> None:
    """As `python example.py` in `folder`, without the seconds that imports take."""
    (folder / "example.py").write_text(code)
    with inside(folder), pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.syspath_prepend(folder)
        runpy.run_path("example.py", run_name="__main__")


def test_the_torch_example_runs_and_is_short(workplace):
    code = blocks("export.md")["plain_torch.py"]
    run_block(code + "\nassert torch.isfinite(loss) and backbone.network.norm.weight.grad.abs().sum() > 0\n", workplace)
    assert len([line for line in code.splitlines() if line and not line.startswith(("import", "from"))]) <= 10


def test_the_monai_example_runs_and_is_short(workplace):
    pytest.importorskip("monai", reason="MONAI is optional; pip install 'octfm[bench]'")
    code = blocks("export.md")["monai_backbone.py"]
    shapes = "\nassert model(voxels).shape == (1, 2, *voxels.shape[2:]) and backbone.network.norm.weight.grad.abs().sum() > 0\n"
    run_block(code + shapes, workplace)
    assert len([line for line in code.splitlines() if line and not line.startswith(("import", "from"))]) <= 10


def test_the_retfound_example_runs(workplace):
    found = blocks("coming-from.md")
    (workplace / "my_retfound.py").write_text(found["my_retfound.py"])
    run_block(found["compare.py"], workplace)
    import pyarrow.parquet as pq

    table = pq.read_table(workplace / "runs" / "a" / "embeddings" / "retfound.parquet")
    vectors = np.array(table["vector"].to_pylist())
    assert vectors.shape == (24, 128) and vectors.std(0).min() > 0


def test_the_data_set_for_nnunet_has_scan_and_labels_on_one_grid(workplace, monkeypatch):
    nibabel = pytest.importorskip("nibabel")
    found = found_in(6, fluid_in=3)
    monkeypatch.setattr(octfm, "segment", lambda scan: found)
    run_block(blocks("coming-from.md")["to_nnunet.py"], workplace)
    folder = workplace / "nnUNet_raw" / "Dataset501_OCT"
    facts = json.loads((folder / "dataset.json").read_text(encoding="utf-8"))
    assert sorted(facts["labels"].values()) == list(range(13)) and facts["numTraining"] == 1
    scan, labels = (nibabel.load(folder / name) for name in ("imagesTr/oct_000_0000.nii.gz", "labelsTr/oct_000.nii.gz"))
    assert scan.shape == labels.shape and scan.header.get_zooms() == pytest.approx(found.spacing_mm[::-1])
    np.testing.assert_array_equal(scan.affine, labels.affine)
    # As a prediction comes back: with neither names nor a JSON.
    back = read_overlay(folder / "labelsTr" / "oct_000.nii.gz", of=replace(found.volume, source=workplace / "scan.dcm"))
    np.testing.assert_array_equal(back.values, label_map(found)[0])
    fluid = back.values == facts["labels"]["intraretinal_fluid"]
    np.testing.assert_array_equal(fluid, found.masks["intraretinal_fluid"])


@pytest.mark.parametrize("superior_first", [True, False])
def test_the_eyepy_example_keeps_pixels_and_lines_and_begins_with_the_lowest_bscan(
    workplace, monkeypatch, superior_first
):
    pytest.importorskip("eyepy", reason="install the extra `peers`", exc_type=ImportError)
    found = found_in(6, fluid_in=3)
    voxels = found.volume.voxels + np.arange(6, dtype=np.uint8)[:, None, None]
    found = replace(found, volume=replace(found.volume, voxels=voxels, superior_first=superior_first))
    monkeypatch.setattr(octfm, "segment", lambda scan: found)
    compare = f"""
import numpy as np
lowest_first = slice(None, None, {-1 if superior_first else 1})
assert np.array_equal(eye.data[lowest_first], volume.voxels) and eye.laterality == "OD"
assert np.array_equal(eye.layers["bm"].data[lowest_first], found.surfaces["bm"])
assert eye.scale == found.spacing_mm and eye[0].meta["start_pos"][1] > eye[5].meta["start_pos"][1]
"""
    run_block(blocks("coming-from.md")["to_eyepy.py"] + compare, workplace)


@pytest.mark.slow
def test_the_onnx_example_runs(workplace):
    pytest.importorskip("onnxruntime")
    from octfm.encoder.export import export

    shutil.rmtree(workplace / "exported")
    export(workplace / "runs" / "a", workplace / "exported", onnx=True)
    run_block(blocks("export.md")["with_onnx.py"], workplace)


def tour():
    """docs/execute.py, and the page that it runs."""
    sys.path.insert(0, str(DOCS))
    return importlib.import_module("execute"), (DOCS / "guide" / "tour.md").read_text()


def test_a_tour_on_a_busy_machine_has_the_same_shape():
    """Reading eight volumes is timed once: a pause of .1 s makes the doctor warn of a slow store, before all that
    passed."""
    execute, page = tour()
    (forecast,) = re.findall(r"^preflight: forecast: .*\n", page, re.M)
    warned = forecast.replace("preflight", "preflight WARN").replace("\n", "; the device would wait 30% of the time\n")
    busy = page.replace(forecast, "").replace("preflight WARN: axial", f"{warned}preflight WARN: axial")
    assert busy != page and execute.shape(busy) == execute.shape(page)
    assert execute.shape(page.replace(" checks, ", " ticks, ")) != execute.shape(page)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_tour_prints_what_it_says(tmp_path):
    """Every command of the page, run again; numbers may differ between machines, words and files may not."""
    execute, page = tour()
    assert execute.shape(execute.execute(page, tmp_path)) == execute.shape(page), (
        "run: python docs/execute.py docs/guide/tour.md"
    )


SHORTER = {"finetune": ["epochs=1"], "segment": ["steps=2"], "trust": ["--from-scratch-epochs", "0"]}
"""Words that make a command of the guide take seconds."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_commands_of_the_evaluation_page_run_one_after_another(tmp_path):
    """As printed, but for their lengths: every command finds what those before it have made."""
    from octfm.catalog.scan import scan
    from octfm.phantom import write_phantom
    from octfm.store.prepare import prepare
    from support.command_line import octfm_here
    from support.tiny_runs import config, quick_pretrain, quiet

    clinic = tmp_path / "clinic"
    write_phantom(clinic, 26, 5, size=(8, 96, 64), scanners=("topcon_triton",), diagnoses=("healthy", "dme"), workers=1)
    store = prepare(scan(clinic, workers=0), tmp_path / "prepared", small_preprocessing(), workers=0, progress=False)
    for seed, run in enumerate(("a", "b", "a_triton")):
        quick_pretrain(config(steps=2, seed=seed), store, tmp_path / "runs" / run, echo=quiet)
    shutil.copy(clinic / "ground_truth" / "labels.tsv", tmp_path)
    shutil.copy(next(clinic.rglob("*.dcm")), tmp_path / "scan.dcm")
    (tmp_path / "my_encoder.py").write_text("def mine():\n    return lambda voxels: voxels.mean(axis=(2, 3))\n")
    blocks = re.findall(r"^```bash\n.*?^```", (DOCS / "guide" / "evaluate.md").read_text(), re.S | re.M)
    lines = [line for line in commands("\n".join(blocks)) if line.split()[1] != "demo"]
    assert len(lines) >= 16
    for line in lines:
        verb, *words = shlex.split(line.replace("--group ethnicity", "--group clinical_site"))[1:]
        shorter = SHORTER.get(verb, []) if "--apply" not in words else []
        code, out, err = octfm_here(verb, *words, *shorter, cwd=tmp_path)
        assert code == 0, f"{line}\n{out}\n{err}"


class Fetched(HTMLParser):
    """What a browser would fetch by itself."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "video") and values.get("src"):
            self.found.append(values["src"])
        if tag == "link" and values.get("rel") not in ("canonical", "prev", "next", "alternate"):
            self.found.append(values.get("href") or "")


@pytest.mark.slow
def test_the_pages_build_without_a_warning_and_fetch_nothing(tmp_path):
    """As `make docs` builds them, with the network out of reach."""
    pytest.importorskip("mkdocs", reason="the pages need octfm[docs]")
    site = tmp_path / "site"
    environment = os.environ | {
        "NO_MKDOCS_2_WARNING": "1",
        "https_proxy": "http://127.0.0.1:9",
        "http_proxy": "http://127.0.0.1:9",
    }
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]
    assert len(pages) >= len(yaml.safe_load(re.sub(r"!!\S+", "", (ROOT / "mkdocs.yml").read_text()))["nav"])
    for page in pages:
        fetched = Fetched()
        fetched.feed(page.read_text())
        for target in fetched.found:
            assert not re.match(r"(https?:)?//", target), f"{page.name} fetches {target}"
            local = target.partition("?")[0].partition("#")[0]
            if local and not local.startswith("data:"):
                assert (page.parent / local).exists(), f"{page.name}: {target} is not there"
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?https?:|@import ['\"]?https?:", style.read_text()), style
    reference = (site / "api.html").read_text()
    assert "load_encoder" in reference and "pooled tissue tokens" in reference


def test_no_block_of_code_is_closed_with_the_opening_of_another():
    """Markdown takes "```bash" within a block for text, so everything below it would be code."""
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        inside = False
        for number, line in enumerate(page.read_text().splitlines(), 1):
            if line.startswith("```"):
                assert not (inside and line.strip() != "```"), f"{page.name}:{number}: {line}"
                inside = not inside
        assert not inside, f"{page.name}: the last block is not closed"
