"""The pages of the demonstration: a first picture, and the report."""

from pathlib import Path

from octfm.demo.stages import Stages
from octfm.io.location import write_whole
from octfm.layers.segment import segment
from octfm.report.card.model_card import model_card
from octfm.report.html import summary_lines, write_report
from octfm.report.segmented.pictures import facts_of, thickness_pictures, verdict_of, volumes_of
from octfm.report.viewer import view_facts, write_view
from octfm.store.store import Store
from octfm.tasks.view import scene_of
from octfm.volume.volume import Volume


def first_picture(volume: Volume, out: Path, detail: str) -> Path:
    """A scan in the viewer, with the layers that the packaged network finds: OUT/first_scan.html."""
    page = out / "first_scan.html"
    if not (page.is_file() and (out / "prepared").is_dir()):  # it may be of another demonstration that got no further
        found = segment(volume)
        scene = scene_of(volume, found=found)
        facts = [*volumes_of(found), *facts_of(found), *view_facts(volume, scene)]
        write_view(scene, page, facts, detail, thickness_pictures(found), verdict=verdict_of(found))
    return page


def last_page(stages: Stages, run: Path, out: Path, store: Store, *, card: bool = True) -> Path:
    """Write OUT/report.html, and the model card of an encoder; print its result."""
    report = out / "report.html"
    with stages.stage("report", "one page"):
        write_report(run, report, catalog=out / "catalog", store_path=store.path)
        if card:
            text = model_card(run, catalog=out / "catalog", store=store.path)
            write_whole(out / "model_card.md", text.encode())
    shares = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in stages.parts)
    stages.say(f"took {stages.total:.0f} s: {shares}")
    for line in summary_lines(run):
        stages.say(line)
    stages.say(f"report: {report.resolve()}")
    return report
