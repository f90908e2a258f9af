"""The report: one self-contained page, true to the numbers, honest where they are missing, safe with whatever a
header says."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import octfm
from octfm.catalog.acquisition import Reject
from octfm.catalog.catalog import Catalog
from octfm.display import interval
from octfm.errors import EvaluationError, OctfmError
from octfm.evaluation.scoring import HEADLINE, PLANNED
from octfm.report.card.model_card import model_card
from octfm.report.card.paper import methods, shareable_run
from octfm.report.data_health import write_data_health
from octfm.report.figures import canvas, efficiency_plots, overview_forest, plain_ticks, to_svg, training_charts
from octfm.report.html import summary_lines, write_report
from octfm.report.images import example_pictures
from octfm.report.overview import data_flow, next_step
from octfm.report.participants import characteristics
from octfm.report.sources import Sources, gather
from octfm.report.words import (
    METRICS,
    comparison_rows,
    health_line,
    key_result,
    latest_health,
    planned,
    score_rows,
    seen_sentence,
    training_line,
    verdict,
)
from octfm.report.words import leakage as leakage_of
from octfm.store.store import Store
from octfm.tasks.scene import Overlay, Placement, Scene
from support.accessible import assert_accessible, contrast
from support.browser import Browser, assert_renders, needs_chromium
from support.run_folder import SCANNERS, probe_result, write_catalog, write_run, write_store
from support.small_store import edit_rows

pytestmark = [pytest.mark.drawn, pytest.mark.usefixtures("remembered_charts")]


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    run = write_run(folder)
    return write_report(run, folder / "report.html", catalog=write_catalog(folder), store_path=write_store(folder))


class Elements(HTMLParser):
    """Every tag with its attributes, the text, and the part of it that is visible before anything is unfolded."""

    HIDDEN = ("style", "script", "title")

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.unfolded: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in (*self.HIDDEN, "details", "summary"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_data(self, data):
        self.text.append(data)
        folded = self.open.count("details") > (self.open[-1:] == ["summary"])
        if not folded and not set(self.HIDDEN) & set(self.open):
            self.unfolded.append(data)


def test_page_loads_nothing_from_anywhere(page):
    elements = Elements(page.read_text())
    for tag, attributes in elements.tags:
        assert tag not in ("iframe", "object", "embed")
        for name in ("src", "href", "srcset", "data", "action", "poster"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), (tag, attributes)
    # One script, and the browser runs no other: its hash is in the page's policy.
    scripts = [attributes for tag, attributes in elements.tags if tag == "script"]
    assert [a.get("type") for a in scripts] == ["application/json", None]
    policy = next(a["content"] for t, a in elements.tags if t == "meta" and a.get("http-equiv"))
    assert (
        policy.startswith("default-src 'none'")
        and "script-src 'sha256-" in policy
        and "unsafe-inline'; script" in policy
    )
    # In style sheets only references within the page.
    assert not re.search(r"url\((?!#|\"#|data:)|@import|@font-face", page.read_text())


@pytest.fixture
def no_curves(monkeypatch):
    """Curves of training take most of the time of a page."""
    monkeypatch.setattr("octfm.report.figures.training_charts", lambda sources: [])


def test_without_images_no_scan_is_in_the_page(tmp_path, no_curves):
    text = write_report(write_run(tmp_path), tmp_path / "r.html", images=False).read_text()
    tags = [tag for tag, _ in Elements(text).tags]
    assert not {"img", "canvas", "script"} & set(tags) and "image/jpeg" not in text and "Look at volumes" not in text


def test_ids_are_unique_and_every_link_has_its_target(page):
    tags = Elements(page.read_text()).tags
    ids = [a["id"] for _, a in tags if "id" in a]
    assert len(ids) == len(set(ids))
    assert {a["href"][1:] for t, a in tags if t in ("a", "use") and a["href"].startswith("#")} <= set(ids)


def test_every_picture_and_chart_has_a_text_for_those_who_cannot_see_it(page):
    assert_accessible(page.read_text())
    assert "</h2><" not in page.read_text().split("<details", 1)[1], "heading and state would be read as one word"
    tags = Elements(page.read_text()).tags
    assert sum(t == "img" for t, _ in tags) == 1 + 2 * 6
    assert sum(t == "svg" for t, _ in tags) >= 10


def test_text_of_charts_has_eleven_pixels_on_a_phone(page):
    charts = re.findall(r'<svg[^>]*viewBox="0 0 ([\d.]+).*?</svg>', page.read_text(), re.S)
    sizes = [
        re.findall(r"font-size: ([\d.]+)px", svg[0]) for svg in re.finditer(r"<svg.*?</svg>", page.read_text(), re.S)
    ]
    within = 390 - 2 * 16
    assert len(charts) == len(sizes) >= 10
    for width, own in zip(charts, sizes, strict=True):
        assert min(map(float, own)) * within / float(width) >= 11


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_of_pages_have_contrast(scheme):
    """WCAG 1.4.3 and 1.4.11: 4.5 to 1 for text, 3 to 1 for curves."""
    style = (Path(octfm.__file__).parent / "report" / "page.css").read_text(encoding="utf-8")
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", re.findall(r":root \{(.*?)\}", style, re.S)[scheme]))
    for ground in ("paper", "raised"):
        for text in ("ink", "soft", "accent"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
        for curve in range(1, 6):
            assert contrast(colours[f"series-{curve}"], colours[ground]) >= 3, (curve, ground)
    for word in ("good", "watch", "bad"):
        assert contrast(colours[word], colours[f"{word}-back"]) >= 4.5, word


def test_the_style_of_pages_respects_settings_of_their_reader():
    style = (Path(octfm.__file__).parent / "report" / "page.css").read_text(encoding="utf-8")
    assert style.count("scroll-behavior") == 1
    assert "@media (prefers-reduced-motion: no-preference) { html { scroll-behavior" in style
    assert re.search(r"@media \(forced-colors: active\) { \.swatch, \.scale,[^{]*{ forced-color-adjust: none", style)
    scrolled = re.findall(r"\n([^\n{]*){[^}]*overflow-x: auto", style)
    assert scrolled == [".scroll "], "only what a keyboard can reach may scroll"


def test_wide_tables_of_every_page_can_be_scrolled_by_keyboard_and_have_no_empty_headers():
    """WCAG 2.1.1: not every browser lets a table be scrolled by keyboard that holds nothing to focus."""
    templates = list((Path(octfm.__file__).parent / "report").glob("*.jinja"))
    assert sum(path.read_text(encoding="utf-8").count('<div class="scroll" tabindex="0">') for path in templates) > 30
    for path in templates:
        text = path.read_text(encoding="utf-8")
        assert text.count('class="scroll"') == text.count('<div class="scroll" tabindex="0">'), path
        assert "<th></th>" not in text, path


def test_a_demonstration_without_pretraining_claims_none(tmp_path):
    """Layers of the packaged network and an untrained encoder, with a difference that Holm's correction rejects."""
    run = write_run(tmp_path, figures=False)
    record = json.loads((run / "run.json").read_text()) | {"not_pretrained": "Not pretrained: too few scans."}
    (run / "run.json").write_text(json.dumps(record))
    (run / "probe.json").write_text((run / "probe.json").read_text().replace('"pretrained"', '"layers"'))
    probe = json.loads((run / "probe.json").read_text())
    for compared in probe["comparisons"]:
        compared |= {"verdict": "better", "p_holm": 0.2, "planned": True}
    (run / "probe.json").write_text(json.dumps(probe))
    said = dict(line.split(": ", 1) for line in summary_lines(run))
    assert said["Health"] == "Nothing was pretrained, so nothing was checked."
    assert said["Training"] == "Not pretrained: too few scans."
    assert "the packaged network measures reach AUROC" in said["Result"]
    assert "the interval excludes 0, but not after Holm's correction" in said["Result"], said["Result"]


def test_a_probe_of_a_checkpoint_before_the_newest_is_pointed_out(tmp_path, no_curves):
    run = write_run(tmp_path, figures=False)
    (run / "checkpoints").mkdir()
    for step, said in ((2, False), (3, True)):
        (run / "checkpoints" / f"step-0000000{step}.pt").touch()
        result = probe_result() | {"embeddings": [{"encoder": "/runs/run/checkpoints/step-00000002.pt"}]}
        (run / "probe.json").write_text(json.dumps(result))
        remark = "The probe is of step-00000002.pt, and the run's newest checkpoint is step-00000003.pt"
        page = write_report(run, tmp_path / "r.html", images=False)
        shown = (page.read_text(), " ".join(summary_lines(run)), model_card(run))
        assert [remark in text.replace("&#39;", "'") for text in shown] == [said] * 3


def test_page_says_what_happened(page):
    text = " ".join(" ".join(Elements(page.read_text()).text).split())
    for sentence in (
        "among 126 participants it had never seen, the pretrained encoder reaches AUROC 0.91 (0.86 to 0.95)",
        "better than the same encoder at random initialisation: AUROC +0.11 (+0.06 to +0.16)",
        "That is with 174 labelled participants to learn from; with 44: +0.13 (+0.08 to +0.18), better; with 87: +0.02 (-0.03 to +0.07)",
        "results with fewer labelled participants",
        "20 participants",
        "40 volumes",
        "1 skipped, 3 rejected",
        "truncated_pixel_data",
        "Every participant is in one split only",
        "this one is broken",
        "iop was not probed",
        "AUROC of disease with nested shares of the training participants",
        "octfm pretrain demo data.store=prepared --out run",
        "5,900,000",
        "Not for diagnosis, screening, triage or any decision about a patient",
        "better than the same encoder at random initialisation",
    ):
        assert sentence in text, sentence
    assert "never-shown" not in text
    assert page.stat().st_size < 25_000_000


def test_words_from_outside_are_shown_not_executed(tmp_path):
    attack = '<script>alert(1)</script><img src=x onerror=alert(1)>"$\\frac{$'
    run = write_run(tmp_path, figures=False)
    result = probe_result()
    for r in [*result["results"], *result["label_efficiency"]]:
        r["target"] = attack if r["target"] == "disease" else r["target"]
    (run / "probe.json").write_text(json.dumps(result))
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace(SCANNERS[0], attack.replace("\\", "\\\\").replace('"', '\\"')))
    page = write_report(run, tmp_path / "r.html", catalog=write_catalog(tmp_path, sentence=attack))
    elements = Elements(page.read_text())
    assert "script" not in [t for t, _ in elements.tags]
    assert not any("onerror" in a for _, a in elements.tags)
    assert attack in "".join(elements.text)


def test_reasons_name_files_without_their_folders(tmp_path, no_curves):
    """Folders may be called after people: neither that of the rejected file, nor that of the one it is a copy of."""
    catalog = Catalog.load(write_catalog(tmp_path))
    first = replace(catalog.acquisitions[0], uri="/clinic/Huber/a.dcm")
    copy = Reject(
        "/clinic/Meier/b.dcm", "duplicate_sop_uid", f"/clinic/Meier/b.dcm: a copy of {first.uri}; keep one", 9
    )
    found = replace(catalog, acquisitions=(first, *catalog.acquisitions[1:]), rejects=(copy,))
    run, folder = write_run(tmp_path, figures=False), found.save(tmp_path / "named")
    page = write_report(run, tmp_path / "report.html", catalog=folder).read_text()
    assert "b.dcm: a copy of a.dcm; keep one" in page and "Meier" not in page and "Huber" not in page


def test_missing_parts_give_a_sentence(tmp_path):
    run = write_run(tmp_path, probe=False, figures=False)
    (run / "metrics.jsonl").unlink()
    text = " ".join(" ".join(Elements(write_report(run, tmp_path / "r.html").read_text()).text).split())
    for sentence in (
        "No probe has been run",
        "Neither a catalog nor a prepared store was given",
        "No training step has been logged yet",
        "No health verdict",
        "No example pictures",
        "octfm embed",
    ):
        assert sentence in text, sentence


@pytest.mark.parametrize(
    ("objective", "learned", "predicted"),
    [
        (None, "It learned without any label, by predicting hidden parts", "Hidden tissue is predicted"),
        ("vjepa2", "It learned without any label, by predicting hidden parts", "Hidden tissue is predicted"),
        ("dense", "It learned from the ground truth of synthetic scans", "What tokens show is predicted"),
        ("anchored", "and from the ground truth of synthetic scans", "Hidden tissue is predicted"),
        ("my_contrast", "list of numbers (features). Alone it answers", "The goal of its objective is predicted"),
    ],
)
def test_a_page_says_how_its_encoder_learned(tmp_path, objective, learned, predicted):
    """Phantoms teach dense by their truth: that is not learning without labels, and nothing need be hidden."""
    run = write_run(tmp_path, figures=False)
    if objective is not None:
        with (run / "config.yaml").open("a") as file:
            file.write(f"objective:\n  name: {objective}\n")
    page = Elements(write_report(run, tmp_path / "r.html").read_text())
    text = " ".join(" ".join(page.text).split())
    assert learned in text and predicted in text
    assert ("learned without any label" in text) == (objective in (None, "vjepa2"))
    assert ("The error of predicting hidden tissue" in text) == (objective in (None, "vjepa2", "anchored"))
    draft = methods(shareable_run(run, None, None))
    assert ("mask ratio" in draft) == (objective != "dense") and ("none of them hidden" in draft) == (
        objective == "dense"
    )


def test_metrics_with_nan_gaps_and_a_cut_last_line_are_drawn(tmp_path):
    run = write_run(tmp_path, figures=False)
    metrics = run / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows[3]["masked_over_baseline"] = "nan"
    del rows[5]["effective_rank"]
    rows[7]["grad_norm"] = "inf"
    metrics.write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"kind": "train", "st')
    assert "Masked loss over baseline" in write_report(run, tmp_path / "r.html").read_text()


def test_inconclusive_is_said_in_so_many_words():
    result = probe_result()
    main = next(
        c for c in result["comparisons"] if (c["target"], c["metric"], c["b"]) == ("disease", "auroc", "random_init")
    )
    main.update(low=-0.01, verdict="inconclusive")
    tone, text = key_result(result)
    assert tone == "inconclusive" and "is inconclusive" in text and "includes 0" in text
    main.update(low=None, high=None, p=None)
    assert "too few participants" in key_result(result)[1]


@pytest.mark.parametrize(("p_holm", "tone"), [(0.01, "worse"), (0.2, "inconclusive")])
def test_a_tissue_map_that_is_ahead_is_said_first(p_holm, tone):
    result = probe_result()
    main = next(
        c for c in result["comparisons"] if (c["target"], c["metric"], c["b"]) == ("disease", "auroc", "random_init")
    )
    main.update(difference=0.05, low=0.01, high=0.09, verdict="better", p_holm=0.5)
    ahead = {"b": "tissue_map", "difference": -0.1, "low": -0.14, "high": -0.06, "verdict": "worse", "p_holm": p_holm}
    result["comparisons"] = [c for c in result["comparisons"] if c["b"] != "tissue_map"] + [main | ahead]
    found, text = key_result(result)
    assert found == tone and ("it is worse than the tissue map" in text) == (tone == "worse")
    assert "excludes 0, but not after Holm's correction" in text and text.count(". ") <= 2


@pytest.mark.parametrize("found", ["better", "inconclusive", "worse"])
def test_only_a_tissue_map_that_is_ahead_is_said_to_be_and_once(found):
    result = probe_result()
    (main,) = (
        c for c in result["comparisons"] if (c["target"], c["metric"], c["b"]) == ("disease", "auroc", "histogram")
    )
    map_ = main | {"b": "tissue_map", "difference": -0.1, "low": -0.14, "high": -0.06, "verdict": found, "p_holm": 0.01}
    result["comparisons"].append(map_)
    tone, text = verdict(result)
    assert tone == ("worse" if found == "worse" else "better")
    assert ("tissue map" in text) == (found == "worse") and text.count("worse than") == (found == "worse")
    result["comparisons"] = [map_]
    assert verdict(result)[0] == found and verdict(result)[1].count("the tissue map") == 1


def test_a_verdict_says_where_intervals_of_folds_are_too_narrow():
    """Simulated: 40 participants, or 120 at AUROC .68, call equal encoders different in 15 to 21 % of cohorts."""
    result = probe_result()
    row = next(r for r in result["results"] if (r["target"], r["metric"]) == ("disease", "auroc"))
    for design, people, estimate, said in (
        ("k-fold", 60, 0.9, True), ("k-fold", 400, 0.65, True), ("k-fold", 400, 0.9, False),
        ("recommended_split", 60, 0.65, False),
    ):  # fmt: skip
        row.update(design=design, n_test_participants=people, estimate=estimate)
        tone, text = verdict(result)
        assert tone == "better" and ("a third too narrow" in text) == said, text


def test_telling_scanners_apart_is_never_the_key_result():
    """Leakage has no place in Holm's family, and a page would open with "better than its baseline"."""
    result = probe_result()
    for part in ("results", "comparisons"):
        result[part] = [row for row in result[part] if row["target"] == "scanner"]
    assert result["results"] and verdict(result) == (
        "none",
        "Only the scanner was probed, which measures leakage, not how good the features are.",
    )


def test_one_set_of_folds_is_said_only_of_folds(tmp_path, no_curves):
    run = write_run(tmp_path, figures=False)
    for design, seeds, said in (("k-fold", 1, True), ("k-fold", 3, False), ("recommended_split", 1, False)):
        result = json.loads((run / "probe.json").read_text())
        result["settings"] |= {"design": design, "seeds": seeds}
        (run / "probe.json").write_text(json.dumps(result))
        assert ("with one set of folds" in write_report(run, tmp_path / "r.html").read_text()) == said


def test_leaked_participants_are_said_in_the_key_result():
    result = probe_result()
    said = "test participants (had been|were) seen in training.* these numbers are too good"
    for count, note in (
        (4, "4 of them seen in pretraining"),
        (None, "nobody can tell whether pretraining has seen them"),
    ):
        for r in result["results"]:
            r["seen_test_participants"] = count
        assert f"({note}), the" in key_result(result)[1]
        assert re.search(said, seen_sentence(result["results"]))
    assert "Nobody can tell" in seen_sentence(result["results"])


def test_not_a_run_folder_is_one_clear_error_and_nothing_is_written(tmp_path):
    with pytest.raises(EvaluationError, match="expected a run folder"):
        write_report(tmp_path, tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.json", "[]", r"run\.json: expected an object"),
        ("run.json", '{"environment": "x"}', r"run\.json: environment is not an object; the file was edited"),
        ("run.json", '{"parameters": {"total": "x"}}', r"run\.json: parameters\.total is not a whole number; the file"),
        ("run.json", "{", r"run\.json: not valid JSON"),
        ("probe.json", "[" * 100_000, r"probe\.json: not valid JSON"),
        ("probe.json", "{}", r"probe\.json: expected an object with results and comparisons"),
        ("config.yaml", "<title>page: run: a</title>", r"config\.yaml: not valid YAML: line 1"),
        ("config.yaml", "steps", r"config\.yaml: expected a mapping of settings"),
        ("figures/scenes.npz", "junk", r"scenes\.npz: damaged"),
    ],
)
def test_a_damaged_part_of_a_run_is_named(tmp_path, name, content, message):
    run = write_run(tmp_path)
    (run / name).write_text(content)
    with pytest.raises(OctfmError, match=message):
        write_report(run, tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_a_folder_in_place_of_the_page_is_refused_without_leftovers(tmp_path):
    run, folder = write_run(tmp_path), tmp_path / "site"
    folder.mkdir()
    with pytest.raises(EvaluationError, match="site: expected the name of an HTML file, got a folder"):
        write_report(run, folder)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([run.name, "site"])


@pytest.mark.slow
def test_page_stays_small_by_leaving_out_pictures(tmp_path, monkeypatch):
    run = write_run(tmp_path)
    full = write_report(run, tmp_path / "full.html").stat().st_size
    monkeypatch.setattr("octfm.report.html.MAX_BYTES", full - 1)
    small = write_report(run, tmp_path / "small.html")
    assert small.stat().st_size < full and "Example volumes" in small.read_text()


def test_result_training_and_health_for_a_terminal(tmp_path):
    lines = summary_lines(write_run(tmp_path, figures=False))
    assert [line.split(":")[0] for line in lines] == ["Result", "Training", "Health"]
    assert "reaches AUROC 0.91 (0.86 to 0.95)" in lines[0]


def decoded(picture) -> np.ndarray:
    import base64
    import io

    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(base64.b64decode(picture.src.split(",")[1]))).convert("RGB")).astype(float)


def corner_scene(laterality: str) -> Scene:
    """Brighter below, inferior and on the right of what the encoder sees."""
    D, H, W = 8, 64, 32
    voxels = np.zeros((D, H, W), np.uint8)
    voxels[:, H // 2 :] = 200
    voxels[: D // 2] //= 2
    voxels[:, :, : W // 2] //= 2
    pca = np.zeros((4, 6, 6, 4), np.uint8)
    pca[..., 3] = 255
    pca[:, :3, :, 0] = 255  # red above
    pca[:2, :, :, 1] = 255  # green superior
    pca[:, :, 3:, 2] = 255  # blue on the right
    overlays = (
        Overlay("pca", "PCA", "colours", pca),
        Overlay("tokens", "tokens", "classes", np.zeros((4, 6, 6), np.uint8)),
    )
    return Scene(
        "s",
        voxels,
        (0.75, 0.03, 0.18),
        laterality,
        laterality == "L",
        overlays=overlays,
        placement=Placement.whole((D, H, W)),
    )


@pytest.mark.parametrize("laterality", ["R", "L"])
def test_F13_pictures_have_true_orientation_proportions_and_laterality(laterality):
    (example,) = example_pictures([corner_scene(laterality)])
    bscan, enface = (decoded(p) for p in example.pictures if p.caption in ("Prepared B-scan", "En face"))
    if laterality == "L":
        bscan, enface = bscan[:, ::-1], enface[:, ::-1]
    assert ("left" in example.detail) == (laterality == "L") and "mirrored" not in example.detail
    assert bscan.shape[1] / bscan.shape[0] == pytest.approx(32 * 0.18 / (64 * 0.03), rel=0.02)
    assert enface.shape[1] / enface.shape[0] == pytest.approx(32 * 0.18 / (8 * 0.75), rel=0.02)
    h, w = bscan.shape[:2]
    assert bscan[: h // 3].mean() < bscan[h * 2 // 3 :].mean()
    assert bscan[h * 2 // 3 :, : w // 3].mean() < bscan[h * 2 // 3 :, w * 2 // 3 :].mean()
    h, w = enface.shape[:2]
    assert enface[: h // 3].mean() < enface[h * 2 // 3 :].mean()
    assert enface[:, : w // 3].mean() < enface[:, w * 2 // 3 :].mean()


@pytest.mark.parametrize("laterality", ["R", "L"])
def test_F13_token_map_has_the_orientation_of_the_volume(laterality):
    (example,) = example_pictures([corner_scene(laterality)])
    bscan, enface = (decoded(p) for p in example.pictures if "PCA" in p.caption)
    if laterality == "L":
        bscan, enface = bscan[:, ::-1], enface[:, ::-1]
    h, w = bscan.shape[:2]
    assert bscan[: h // 2, :, 0].mean() > 200 > 60 > bscan[h // 2 + 2 :, :, 0].mean()
    assert bscan[:, w // 2 + 2 :, 2].mean() > 200 > 60 > bscan[:, : w // 2 - 2, 2].mean()
    h, w = enface.shape[:2]
    assert enface[: h // 2 - 2, :, 1].mean() > 200 > 60 > enface[h // 2 + 2 :, :, 1].mean()


@pytest.mark.slow
def test_report_never_imports_torch(tmp_path):
    run = write_run(tmp_path)
    code = "import sys; from pathlib import Path; from octfm.report.html import figures, write_report; "
    code += "figures.training_charts = lambda sources: []; "  # they take most of the time, and need what others need
    code += f"write_report(Path({str(run)!r}), Path('r.html')); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_at_most_600_words_before_unfolding_and_nothing_twice(page):
    elements = Elements(page.read_text())
    shown = " ".join(" ".join(elements.unfolded).split())
    assert 150 < len(shown.split()) <= 600
    assert len(" ".join(elements.text).split()) > len(shown.split()) + 200, "the rest is folded"
    sentences = [s for s in re.split(r"(?<=[.:])\s", shown) if len(s.split()) > 5]
    assert len(sentences) == len(set(sentences))
    assert shown.count("0.91 (0.86 to 0.95)") == 2, "in the verdict and in the forest plot, nowhere else"
    assert "watch" in shown.split() and "look at effective rank (watch)" in shown, "trouble is not folded away"
    details = [a for t, a in elements.tags if t == "details"]
    assert len(details) >= 9 and not any("open" in a for a in details)


def test_fewer_labels_are_told_of_the_same_comparison_with_holm_and_the_counts_that_learned():
    result = probe_result()
    shown = result["label_efficiency_comparisons"]
    result["label_efficiency_comparisons"] = [
        {**shown[0], "target": "diagnosis"}, {**shown[0], "metric": "balanced_accuracy"}, {**shown[0], "b": "histogram"},
        {**shown[0], "low": None}, {**shown[0], "fraction": 1.0}, *shown, {**shown[0], "p_holm": 0.2},
    ]  # fmt: skip
    told = key_result(result)[1].partition("That is with ")[2]
    assert told == (
        "174 labelled participants to learn from; with 44: +0.13 (+0.08 to +0.18), better; with 87: +0.02 (-0.03 "
        "to +0.07), inconclusive; with 44: +0.13 (+0.08 to +0.18), better, but not after Holm."
    )


def test_the_key_result_is_of_disease_wherever_it_stands_and_of_the_first_target_without():
    result = probe_result()
    result["results"] = sorted(result["results"], key=lambda row: row["target"], reverse=True)
    result["comparisons"] = result["comparisons"][::-1]
    assert "telling healthy participants from those with any disease" in verdict(result)[1]
    assert "histogram: AUROC +0.17 (" in verdict(result)[1], "not its gap in balanced accuracy"
    result["results"] = [r for r in result["results"] if r["target"] in ("scanner", "study_group")][::-1]
    assert "telling the study groups apart" in verdict(result)[1]


def test_planned_comparisons_have_no_leakage_and_tables_the_metrics_of_the_headline():
    rows = [
        {"metric": metric, "leakage": leakage, "difference": 0.1, "low": 0.05, "high": 0.15}
        for metric in METRICS
        for leakage in (False, True)
    ]
    assert [(c["metric"], c["leakage"]) for c in planned({"comparisons": rows})] == [
        (m, False) for m in METRICS if m in PLANNED
    ]
    shown = comparison_rows(rows)
    assert [c["metric"] for c in shown[::2]] == [METRICS[m] for m in METRICS if m in HEADLINE]
    results = [{"leakage": True, "metric": "auroc", "estimate": None}, {"leakage": False, "metric": "auroc", "estimate": 1},
               {"leakage": True, "metric": "auprc", "estimate": 2}, {"leakage": True, "metric": "auroc", "estimate": 3}]  # fmt: skip
    assert leakage_of(results) is results[3] and leakage_of(results[:3]) is None


def test_whether_people_were_seen_is_told_by_the_worst_of_all_results():
    def said(*counts):
        return seen_sentence([{"seen_test_participants": count} for count in counts])

    assert said() == said(0, 0) == ""
    assert said(0, 4, 1) == "4 test participants had been seen in training, so these numbers are too good."
    assert said(0, 4, None).startswith("Nobody can tell")


def test_health_and_training_are_told_by_their_last_rows_the_worst_first():
    def rows(*verdicts):
        return [{"what": what, "verdict": verdict} for what, verdict in verdicts]

    health = rows(("a", "ok"), ("b", "bad"), ("c", "bad"), ("d", "ok"), ("a", "watch"), ("b", "bad"), ("c", "ok"))
    latest = latest_health(health)
    assert [row["what"] for row in latest] == ["b", "a", "c", "d"] and latest[1]["counts"] == {"ok": 1, "watch": 1}
    losses = [{"step": step, "masked_over_baseline": ratio} for step, ratio in ((0, 0.9), (9, 0.3), (19, 0.4))]
    run = Sources(Path("run"), {}, None, losses, losses[:2], health, [], None, "", None, None, (), False, ())
    assert health_line(run) == "4 checks; look at b (bad), a (watch)."
    assert health_line(replace(run, health=health[3:4])) == "1 check; all ok."
    told = training_line(run).replace("\u00a0", " ")
    assert told.startswith("20 steps.") and "with 40 % of a constant prediction's error, 30 % on held-out" in told
    assert "no validation was logged" in training_line(replace(run, validation=[]))
    assert training_line(replace(run, train=losses[:1])).startswith("1 step. ")


def test_a_note_on_one_encoder_names_it():
    known = {"target": "a", "metric": "auroc", "estimate": 0.5, "note": None, "n_test_participants": 40}
    rows = [known | {"encoder": name} for name in ("x", "y")]
    (row,) = score_rows([rows[0], {**rows[1], "note": "Below guessing."}], ["x", "y"])
    assert row["notes"] == ["y: Below guessing."]
    (row,) = score_rows([{**r, "note": "Below guessing."} for r in rows], ["x", "y"])
    assert row["notes"] == ["Below guessing."]


def test_a_baseline_that_is_not_measurable_is_not_said_to_have_too_few_participants():
    probe = probe_result()
    probe["comparisons"][0].update(difference=None, low=None, high=None, p=None, verdict="inconclusive")
    assert key_result(probe)[1].endswith("the result is inconclusive: it is not measurable.")


def test_the_verdict_is_two_sentences():
    result = probe_result()
    for low in (-0.01, None):
        text = verdict(result)[1]
        assert len(re.findall(r"[.](?=\s|$)", text)) == 2, text
        for c in result["comparisons"]:
            c.update(low=low, verdict="inconclusive")
    assert len(re.findall(r"[.](?=\s|$)", verdict(result)[1])) == 2
    assert len(re.findall(r"[.](?=\s|$)", verdict(None)[1])) == 1


def test_counts_of_the_data_flow_agree(tmp_path):
    run, catalog = write_run(tmp_path), write_catalog(tmp_path)
    found = data_flow(gather(run, catalog))
    assert [box.counts for box in found.boxes] == [("44 files",), ("20 participants", "40 volumes")]
    assert found.boxes[0].lost == "1 skipped, 3 rejected"
    for i, total in enumerate((20, 40)):
        assert sum(int(box.counts[i].split()[0]) for box in found.splits) == total
    store = write_store(tmp_path)
    found = data_flow(gather(run, catalog, store))
    accepted, prepared = found.boxes[1:]
    assert prepared.label == "Prepared" and accepted.lost == "1 not prepared"
    volumes = [int(box.counts[1].split()[0]) for box in (prepared, *found.splits)]
    assert volumes[0] == sum(volumes[1:])
    record = json.loads((run / "run.json").read_text())
    unknown = {"store": {"train_participants": 5}, "inherited_participants": 1, "inherited_unknown": 31}
    for others, began in (
        (1, "had seen at least 31; nobody can tell how many are others"),
        (500, "had seen at least 500 others"),  # of a run whose key is here
    ):
        (run / "run.json").write_text(json.dumps(record | unknown | {"inherited_participants": others}))
        sentence = data_flow(gather(run, catalog)).sentence
        assert f"pretrained on 5 participants, and began with weights that {began}" in sentence


def test_an_id_in_two_spellings_is_one_participant_on_the_whole_page(tmp_path):
    """As in results, whose counts are on the same page; a table of labels may have one of the two only."""
    run, catalog, store = write_run(tmp_path), write_catalog(tmp_path), write_store(tmp_path)
    plain, counts, prepared = gather(run, catalog, store), Catalog.load(catalog), Store.open(store).summary()
    assert prepared["participants"] > 1

    def respelt(row):
        if row.laterality == "R":
            return {}
        name = f"sub-00{row.participant[1:]}"
        return {"participant": name, "eye_id": f"{name}_L", "participant_labels": {}}

    mixed = [{name: v for name, v in respelt(a).items() if name != "eye_id"} for a in counts.acquisitions]
    mixed = tuple(replace(a, **new) for a, new in zip(counts.acquisitions, mixed, strict=True))
    assert len({a.participant for a in mixed}) > len({a.participant for a in counts.acquisitions})
    mixed = replace(counts, acquisitions=mixed)
    assert mixed.summary() == counts.summary() and repr(mixed) == repr(counts)
    edit_rows(store, respelt)
    assert Store.open(store).summary()["participants"] == prepared["participants"]
    again = gather(run, mixed.save(tmp_path / "mixed"), store)
    assert data_flow(again) == data_flow(plain) and characteristics(again) == characteristics(plain)
    for found in (counts, mixed):
        write_data_health(found, tmp_path / f"{found is mixed}.html", images=False)
    assert (tmp_path / "True.html").read_text() == (tmp_path / "False.html").read_text()


def test_next_step_follows_from_the_result(tmp_path):
    run = write_run(tmp_path)
    sources = gather(run)
    assert next_step(sources, "runs/a", "prepared")[1] == ("octfm trust runs/a --store prepared --target disease",)
    probed_by_table = replace(sources, probe={**sources.probe, "labels": "mine.csv"})
    assert next_step(probed_by_table, "runs/a", "prepared")[1] == (
        "octfm trust runs/a --store prepared --labels LABELS.csv --target disease",
    )
    assert next_step(gather(write_run(tmp_path / "b", probe=False)), "runs/a", None)[1] == (
        "octfm embed runs/a --store STORE",
        "octfm probe runs/a --labels LABELS.csv",
    )


def test_a_chart_reads_the_numbers_out_that_it_shows():
    row = next(r for r in probe_result()["results"] if r["target"] == "cst_um")
    row |= {"estimate": 0.007, "low": -0.007, "high": 0.026}
    assert overview_forest([row]).svg.count(interval(row)) == 2


def test_forest_plot_has_every_target_once_and_scanner_last():
    result = probe_result()
    for r in [dict(r) for r in result["results"] if r["encoder"] == "histogram"]:
        result["results"].append(r | {"encoder": "tissue_map"})
    svg = overview_forest(result["results"]).svg
    titles = [
        "Disease or healthy",
        "Which diagnosis",
        "Which study group",
        "Which scanner",
        "Central retinal thickness",
    ]
    places = [svg.index(title) for title in titles]
    assert places == sorted(places)
    assert all(svg.count(title) == 1 for title in titles)
    assert svg.count(">tissue map<") == svg.count(">untrained<") == 5
    assert "balanced" not in svg and overview_forest([]) is None


def test_efficiency_plot_says_what_its_intervals_mean():
    rows = [r | {"design": "k-fold"} for r in probe_result()["label_efficiency"]]
    (chart,) = efficiency_plots(rows)
    assert "drawn anew for every fold" in chart.caption
    assert "up to a third too narrow where probes are weak" in chart.caption
    assert ">guessing<" in chart.svg and ">untrained<" in chart.svg
    (bare,) = efficiency_plots([r | {"low": None, "high": None} for r in rows])
    assert "too few participants for intervals" in bare.caption and "95" not in bare.caption
    upper, lower = efficiency_plots([r | {"target": name} for name in ("DR", "dr") for r in rows])
    assert not set(re.findall(r' id="([^"]+)"', upper.svg)) & set(re.findall(r' id="([^"]+)"', lower.svg))


@given(st.floats(-9, 6), st.floats(0.01, 12))
def test_a_logarithmic_axis_has_between_two_and_eight_ticks(lowest, decades):
    with canvas("wide", 3.4, 2.2) as (_, axes):
        axes.set_yscale("log")
        axes.set_ylim(10**lowest, 10 ** (lowest + decades))
        plain_ticks(axes.yaxis)
        low, high = axes.get_ylim()
        assert 2 <= sum(low <= tick <= high for tick in axes.get_yticks()) <= 8


def test_a_matplotlibrc_changes_no_chart():
    def drawn():
        with canvas("k", 3, 2) as (figure, axes):
            axes.plot([1, 2])
            axes.set_xlabel("a_b")
            return to_svg(figure, "")

    own = drawn()
    with mpl.rc_context({"text.usetex": True, "font.size": 30, "lines.linewidth": 9}):
        assert drawn() == own


def test_numbers_near_0_have_three_decimals():
    assert interval({"difference": 0.15, "low": 0.003, "high": 0.31}) == "+0.150 (+0.003 to +0.310)"
    assert interval({"difference": 0.15, "low": 0.03, "high": 0.31}) == "+0.15 (+0.03 to +0.31)"
    assert interval({"difference": -0.0001, "low": None, "high": None}) == "-0.0001"
    assert interval({"difference": -1e-17}) == "0.000" and interval({"difference": 0.0}) == "0.000", "no sign before 0"
    assert interval({"difference": 0.0002, "low": -0.01, "high": 0.03}) == "0.000 (-0.010 to +0.030)"
    assert interval({"estimate": 0.004, "low": None, "high": None}) == "0.004"
    assert interval({"estimate": 0.997, "low": 0.99, "high": 1.0}) == "0.997 (0.990 to 1.000)", "no perfect score"
    assert interval({"estimate": 0.9996, "low": None, "high": None}) == "0.9996"
    assert interval({"estimate": 0.97, "low": 0.4, "high": 1.6}, digits=1) == "1.0 (0.4 to 1.6)", "µm"
    assert interval({"estimate": 1.0, "low": 1.0, "high": 1.0}) == "1.00 (1.00 to 1.00)"
    assert interval({"difference": 0.03, "low": 0.0004, "high": 0.06}) == "+0.0300 (+0.0004 to +0.0600)"


@given(st.tuples(*[st.floats(-1, 1).filter(lambda x: x == 0 or abs(x) > 1e-6)] * 3).map(sorted))
def test_an_interval_shows_whether_it_excludes_zero(numbers):
    low, difference, high = numbers
    shown = interval({"difference": difference, "low": low, "high": high})
    ends = [float(text) for text in re.search(r"\((.*) to (.*)\)", shown).groups()]
    assert (ends[0] > 0 or ends[1] < 0) == (low > 0 or high < 0)


def test_no_curve_of_what_the_objective_does_not_have(tmp_path):
    """Masked voxels have neither a context loss nor a teacher, though their columns are logged."""
    run = write_run(tmp_path, figures=False)
    absent = {"Context loss over baseline", "Teacher movement", "EMA momentum"}
    assert absent <= {chart.title for chart in training_charts(gather(run))}
    record = json.loads((run / "run.json").read_text())
    record["parameters"]["target_encoder"] = 0
    (run / "run.json").write_text(json.dumps(record))
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"kind": "train"', '"kind": "train", "context_weight": 0.0'))
    found = {chart.title for chart in training_charts(gather(run))}
    assert not absent & found and "Masked loss over baseline" in found


@needs_chromium
def test_page_renders_in_a_browser_without_console_errors(page, tmp_path):
    assert_renders(page, "Frozen probe", tmp_path)


@needs_chromium
def test_notes_on_a_target_make_no_row_of_numbers_high(tmp_path, no_curves):
    drug = "oral_medication_and_or_non_insulin_injectable_medication_controlled"
    note = f"No interval: only 5 participants with healthy, 7 with pre_diabetes and 5 with {drug} in the test."
    probe = probe_result()
    for result in probe["results"]:
        result["note"] = note
    run = write_run(tmp_path, figures=False)
    (run / "probe.json").write_text(json.dumps(probe))
    page = write_report(run, tmp_path / "report.html")
    assert page.read_text().count(note) <= len({r["target"] for r in probe["results"]}), "once for a target"
    with Browser(tmp_path, (1440, 900)) as browser:
        browser.open(page)
        browser.js("document.querySelector('#probe').open = true")
        table = "document.querySelector('#probe table')"
        heights = browser.js(f"[...{table}.querySelectorAll('tr:not(.group)')].map((r) => r.offsetHeight)")
    assert len(heights) > 3 and max(heights) < 90


@needs_chromium
def test_first_picture_on_the_first_screen_and_few_printed_pages(page, tmp_path):
    import base64

    with Browser(tmp_path) as browser:
        browser.open(page)
        for width, height in ((1440, 900), (390, 844)):
            browser.call(
                "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
            )
            browser.wait(f"window.innerWidth === {width}")
            top, bottom = browser.js(
                "(({top, bottom}) => [top, bottom])(document.querySelector('main img').getBoundingClientRect())"
            )
            assert 0 < top < bottom <= height, f"{width} px"
            assert browser.js("document.documentElement.scrollWidth") <= width, "nothing to scroll sideways"
        assert browser.js("document.querySelector('#probe table').checkVisibility()") is False
        printed = base64.b64decode(browser.call("Page.printToPDF")["data"])
        assert 1 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= 6
        browser.js("document.querySelector('#look > summary').click()")
        browser.wait("document.querySelector('#look canvas').getBoundingClientRect().width > 200")
        browser.assert_quiet()
