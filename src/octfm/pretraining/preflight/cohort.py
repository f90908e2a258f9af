"""Checks of the training cohort: upright retinas with matching, confident bands; volumes per participant."""

from collections import Counter
from collections.abc import Sequence
from statistics import median

import numpy as np

from octfm.catalog.participants.ids import under_one_id
from octfm.pretraining.preflight.check import Check, fail, passed, warn
from octfm.store.layout import StoreRow
from octfm.store.selection import evenly
from octfm.store.store import Store
from octfm.volume.appearance import Look, inspect

SAMPLE, FEWEST = 32, 4
"""Volumes to inspect, and the fewest of each scanner."""
MOST_UNSURE = 0.5
"""Share of a scanner's bands that may have low confidence; at most 0.05 on phantoms, about 0.1 in severe disease."""
FEW = 4
"""Fewest volumes of a scanner for a share to mean anything."""
MOST_OF_ONE, TIMES_THE_MEDIAN = 0.15, 4
"""Volumes of one participant are too many if they are this share of all, and this many times the others' median."""
KEPT = frozenset({"declared_upright", "looks_upside_down"})
"""Flags of volumes that are kept as stored on purpose: they are reported but stop no run."""
STRANGE_BANDS = 0.2
"""Share of bands that may not fit their voxels before the run stops; one or two may be misjudged."""


def checks(store: Store, rows: np.ndarray) -> list[Check]:
    """Checks of the store's rows and of a sample of voxels; none for streamed phantoms, whose truth is known."""
    if not len(rows):
        return []
    return [confidence(store, rows), participants(store, rows), *appearance(store, rows)]


def confidence(store: Store, rows: np.ndarray) -> Check:
    """Warn if most tissue bands of a scanner have low confidence."""
    name, chosen = "tissue bands", [store.rows[row] for row in rows]
    volumes, unsure = Counter(row.scanner for row in chosen), Counter(r.scanner for r in chosen if not r.confident)
    measured = f"{unsure.total()} of {len(chosen)} are of low confidence"
    if doubtful := [s for s, n in volumes.items() if n >= FEW and unsure[s] > MOST_UNSURE * n]:
        worst = max(doubtful, key=lambda s: unsure[s] / volumes[s])
        return warn(
            name,
            f"{measured}: {unsure[worst]} of {volumes[worst]} volumes of {worst}",
            "most bands of a scanner are unsure if its spacing is wrong, its scans are upside down, or it images "
            "another part of the eye; look at some of them (octfm view), and prepare again or leave the scanner out "
            "(data.leave_out_scanners)",
        )
    return passed(name, measured)


def participants(store: Store, rows: np.ndarray) -> Check:
    """Warn if one participant has far more volumes than the others: a test object, or a folder name taken for an id."""
    name, count = "participants", Counter(under_one_id([store.rows[row].participant for row in rows]))
    (who, most), *others = count.most_common()
    usual = median(n for _, n in others) if others else most
    if others and most >= max(MOST_OF_ONE * len(rows), TIMES_THE_MEDIAN * usual):
        return warn(
            name,
            f"participant {who} has {most} of {len(rows)} volumes, the others have a median of {usual:g}",
            "check that this is one person, and neither a test object nor a folder's name; wrong ids put one person "
            "into several splits, or many people into one",
        )
    return passed(name, f"{len(count)} participants, at most {most} of {len(rows)} volumes of one")


def appearance(store: Store, rows: np.ndarray) -> list[Check]:
    """Checks that a sample of volumes shows tissue, the right way up, inside the stored bands."""
    chosen = _sample(store, rows)
    looks = []
    # One at a time: a volume may be 9 MB.
    for row in chosen:
        arrays = store.read([row])
        looks.append(inspect(arrays.voxels[0], arrays.band[0], arrays.valid[0], store.preprocessing.target_spacing))
    sampled = [store.rows[row] for row in chosen]
    return [_tissue(sampled, looks), _way_up(sampled, looks), _bands(store, sampled, looks)]


def _tissue(rows: Sequence[StoreRow], looks: Sequence[Look]) -> Check:
    name, blank = "volumes show tissue", [row for row, look in zip(rows, looks, strict=True) if look.noise]
    if not blank:
        return passed(name, f"layers in each of {len(rows)} volumes")
    measured = f"{len(blank)} of {len(rows)} volumes show noise and no layers ({_names(blank)})"
    advice = "look at them (octfm view), and leave them out if they were decoded wrongly or show no eye (data.exclude)"
    return (fail if len(blank) > len(rows) / 2 else warn)(name, measured, advice)


def _way_up(rows: Sequence[StoreRow], looks: Sequence[Look]) -> Check:
    name = "right side up"
    judged = [(row, look) for row, look in zip(rows, looks, strict=True) if KEPT.isdisjoint((*row.flags, *row.found))]
    up, down = (Counter(row.scanner for row, look in judged if look.up == way) for way in ("up", "down"))
    advice = (
        "the vitreous belongs on top: turn the files over, or correct the metadata that gives their orientation, then "
        "scan and prepare again; or leave the scanner out (data.leave_out_scanners) (F13)"
    )
    # A single volume may be misjudged; most of a scanner's are not.
    if turned := [scanner for scanner in down if down[scanner] >= 2 and down[scanner] > up[scanner]]:
        counts = ", ".join(f"{down[s]} of {down[s] + up[s]} volumes of {s}" for s in turned)
        return fail(name, f"{counts} are upside down", advice)
    wrong = [row for row, look in zip(rows, looks, strict=True) if look.up == "down"]
    if wrong:
        return warn(name, f"{len(wrong)} of {len(rows)} volumes are upside down ({_names(wrong)})", advice)
    right = sum(look.up == "up" for look in looks)
    return passed(name, f"{right} of {len(rows)} volumes, {len(rows) - right} unclear")


def _bands(store: Store, rows: Sequence[StoreRow], looks: Sequence[Look]) -> Check:
    name, spacing = "bands fit their volumes", store.preprocessing.target_spacing
    judged = [
        (row, look) for row, look in zip(rows, looks, strict=True) if row.confident and look.border_mm is not None
    ]
    strange = [row for row, look in judged if look.strange_band(spacing)]
    if not strange:
        return passed(name, f"in {len(judged)} of {len(rows)} volumes the band lies on the retina in the voxels")
    off = 1000 * median(look.border_mm or 0.0 for row, look in judged if row in strange)
    measured = (
        f"{len(strange)} of {len(judged)} bands lie {off:.0f} µm off the retina of their volume ({_names(strange)})"
    )
    advice = "the store's rows or arrays are mixed up, so masks would miss the retina: prepare again into a new folder"
    return (fail if len(strange) > max(1, STRANGE_BANDS * len(judged)) else warn)(name, measured, advice)


def _sample(store: Store, rows: np.ndarray) -> np.ndarray:
    """Some rows of every scanner, evenly spread over the store."""
    scanner = np.array([store.rows[row].scanner for row in rows])
    names = np.unique(scanner)
    each = max(FEWEST, SAMPLE // len(names))
    return np.sort(np.concatenate([evenly(rows[scanner == name], each) for name in names]))


def _names(rows: Sequence[StoreRow]) -> str:
    return ", ".join(row.uri for row in rows[:3]) + (", …" if len(rows) > 3 else "")
