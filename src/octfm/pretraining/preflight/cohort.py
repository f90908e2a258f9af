"""Is the store what it should be: retinas the right way up with their own bands, trusted bands on every scanner, many participants?"""

from collections import Counter
from collections.abc import Sequence
from statistics import median

import numpy as np

from octfm.pretraining.preflight.check import Check, fail, passed, warn
from octfm.store.layout import StoreRow
from octfm.store.store import Store
from octfm.volume.appearance import Look, inspect

SAMPLE, FEWEST = 32, 4
"""Volumes that are looked at, and the fewest of each scanner."""
MOST_UNSURE = 0.5
"""Share of a scanner's volumes whose band may be of low confidence; on phantoms it is at most .05, in severe disease about a tenth."""
FEW = 4
"""A share of fewer volumes says nothing."""
MOST_OF_ONE, TIMES_THE_MEDIAN = 0.15, 4
"""Share of the rows that one participant may have, unless others have nearly as many."""
KEPT = frozenset({"declared_upright", "looks_upside_down"})
"""Flags of volumes that somebody keeps as they lie: they are named, and stop no run."""
STRANGE_BANDS = 0.2
"""Share of the bands that may belong to other voxels before the run is stopped: one or two may be misjudged."""


def checks(store: Store, rows: np.ndarray) -> list[Check]:
    """What the rows say, and what a sample of the voxels shows."""
    return [confidence(store, rows), participants(store, rows), *appearance(store, rows)]


def confidence(store: Store, rows: np.ndarray) -> Check:
    """On no scanner is the tissue band of most volumes of low confidence."""
    name, chosen = "tissue bands", [store.rows[row] for row in rows]
    volumes, unsure = (
        Counter(row.scanner for row in chosen if not (only_unsure and row.confident)) for only_unsure in (False, True)
    )
    measured = f"{unsure.total()} of {len(chosen)} are of low confidence"
    if ill := [s for s, n in volumes.items() if n >= FEW and unsure[s] > MOST_UNSURE * n]:
        worst = max(ill, key=lambda s: unsure[s] / volumes[s])
        return warn(
            name,
            f"{measured}: {unsure[worst]} of {volumes[worst]} volumes of {worst}",
            "most bands of a scanner are unsure when its millimetres are wrong, its scans are upside down, or it images something "
            "else; look at some of them (octfm view), and prepare again or leave it out (data.leave_out_scanners)",
        )
    return passed(name, measured)


def participants(store: Store, rows: np.ndarray) -> Check:
    """No participant has many times as many volumes as any other: that is a test object, or a folder's name that was taken for an id."""
    name, count = "participants", Counter(store.rows[row].participant for row in rows)
    (who, most), *others = count.most_common()
    measured = f"{len(count)} participants, at most {most} of {len(rows)} volumes of one"
    if others and most >= max(MOST_OF_ONE * len(rows), TIMES_THE_MEDIAN * median(n for _, n in others)):
        return warn(
            name,
            f"participant {who} has {most} of {len(rows)} volumes, the others have {median(n for _, n in others):g} in the median",
            "check that this is one person, and neither a test object nor a folder's name; wrong ids put one person into several "
            "splits, or many into one",
        )
    return passed(name, measured)


def appearance(store: Store, rows: np.ndarray) -> list[Check]:
    """A sample of volumes shows tissue, the right way up, where the stored bands say."""
    chosen = _sample(store, rows)
    looks = []
    for row in chosen:
        arrays = store.read([row])
        looks.append(inspect(arrays.voxels[0], arrays.band[0], arrays.valid[0], store.preprocessing.target_spacing))
    of = [store.rows[row] for row in chosen]
    return [_tissue(of, looks), _way_up(of, looks), _bands(store, of, looks)]


def _tissue(rows: Sequence[StoreRow], looks: Sequence[Look]) -> Check:
    name, blank = "volumes show tissue", [row for row, look in zip(rows, looks, strict=True) if look.noise]
    if not blank:
        return passed(name, f"layers in each of {len(rows)} volumes")
    measured = f"{len(blank)} of {len(rows)} volumes show noise and no layers ({_names(blank)})"
    advice = "look at them (octfm view); were they decoded as another format, scrambled, or scanned without an eye? Leave them out"
    return (fail if len(blank) > len(rows) / 2 else warn)(name, measured, advice)


def _way_up(rows: Sequence[StoreRow], looks: Sequence[Look]) -> Check:
    name = "right side up"
    seen = [(row, look) for row, look in zip(rows, looks, strict=True) if KEPT.isdisjoint((*row.flags, *row.found))]
    up, down = (Counter(row.scanner for row, look in seen if look.up == way) for way in ("up", "down"))
    advice = (
        "the vitreous belongs on top; turn the files over, or correct what says how they were written, then scan and prepare again, "
        "or leave the scanner out (data.leave_out_scanners) (F13)"
    )
    if turned := [scanner for scanner in down if down[scanner] >= 2 and down[scanner] > up[scanner]]:
        told = ", ".join(f"{down[scanner]} of {down[scanner] + up[scanner]} volumes of {scanner}" for scanner in turned)
        return fail(name, f"{told} are upside down", advice)
    wrong = [row for row, look in zip(rows, looks, strict=True) if look.up == "down"]
    right = sum(look.up == "up" for look in looks)
    measured = f"{right} of {len(rows)} volumes are, {len(rows) - right - len(wrong)} do not tell"
    if wrong:
        return warn(name, f"{len(wrong)} of {len(rows)} volumes are upside down ({_names(wrong)})", advice)
    return passed(name, measured)


def _bands(store: Store, rows: Sequence[StoreRow], looks: Sequence[Look]) -> Check:
    name, spacing = "bands fit their volumes", store.preprocessing.target_spacing
    judged = [
        (row, look) for row, look in zip(rows, looks, strict=True) if row.confident and look.border_mm is not None
    ]
    strange = [row for row, look in judged if look.strange_band(spacing)]
    if not strange:
        return passed(name, f"in {len(judged)} of {len(rows)} volumes the band lies where the retina is found again")
    off = median(look.border_mm or 0.0 for row, look in judged if row in strange)
    measured = f"{len(strange)} of {len(judged)} bands lie {1000 * off:.0f} µm beside the retina of their volume ({_names(strange)})"
    advice = (
        "rows or arrays of the store were mixed up, so masks would miss the retina: prepare again into a new folder"
    )
    return (fail if len(strange) > max(1, STRANGE_BANDS * len(judged)) else warn)(name, measured, advice)


def _sample(store: Store, rows: np.ndarray) -> np.ndarray:
    """Some rows of every scanner, spread over the store."""
    scanner = np.array([store.rows[row].scanner for row in rows])
    names = np.unique(scanner)
    each = max(FEWEST, SAMPLE // len(names))
    picked = []
    for name in names:
        own = rows[scanner == name]
        picked.append(own[np.linspace(0, len(own) - 1, min(each, len(own))).astype(int)])
    return np.sort(np.concatenate(picked))


def _names(rows: Sequence[StoreRow]) -> str:
    return ", ".join(row.uri for row in rows[:3]) + (", …" if len(rows) > 3 else "")
