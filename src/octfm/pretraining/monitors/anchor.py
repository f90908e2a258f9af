"""Whether what is learned from phantoms holds for scans: how separable the two are, whether layers predicted in scans
lie in order and near those of the packaged network, and whether a disease that no phantom had is distinguished from
health. Without labels of scans, a loss on phantoms alone would not show it."""

import numpy as np
import torch

from octfm.models.layer_net import SURFACES
from octfm.models.objectives.anchored import Anchored
from octfm.models.objectives.dense import Composition
from octfm.models.vit3d import TokenGrid
from octfm.pretraining.learner import Learner
from octfm.pretraining.monitors.measure import encoded, tissue_vectors
from octfm.pretraining.monitors.online_probe import standardised
from octfm.store.phantoms import PhantomStore
from octfm.store.store import Store
from octfm.volume.segmentation import BORDERS, CLASSES, LESION_CLASSES
from octfm.volume.volume import Volume

MOST = 64
"""Most volumes of each kind that are measured."""
SEGMENTED = 8
"""Of them, those whose middle B-scan the packaged network reads: a tenth of a second each."""
UNSEEN = 32
"""Phantoms of conditions that were left out, and healthy ones: five to ten seconds of a core."""
HEALTHY = "healthy"
BORDER_ROWS = [SURFACES.index(name) for name in BORDERS]
FEWEST = 4
"""Fewest volumes of each kind for which `told_apart` is measured."""


def anchor_row(learner: Learner, store: Store, rows: np.ndarray) -> dict[str, float] | None:
    """Measurements on held-out volumes of both kinds, for metrics.jsonl: `domain_auroc` (see `told_apart`) of mean
    tissue tokens, and on scans and on phantoms `surface_disorder` (see `disorder`) and `segmenter_um` (see `apart`).
    None for objectives and data that are not anchored. All ranks must call it."""
    scans = store.recorded(rows)[:MOST]
    phantoms = np.setdiff1d(rows, store.recorded(rows))[:MOST]
    model = learner.whole()
    if not isinstance(model, Anchored) or min(len(scans), len(phantoms)) < 1:
        return None

    def row() -> dict[str, float]:
        looks = [_look(learner, model, store, own) for own in (scans, phantoms)]
        found = {"volumes": float(len(scans) + len(phantoms))}
        if min(len(scans), len(phantoms)) >= FEWEST:
            found["domain_auroc"] = told_apart(looks[0][0], looks[1][0])
        for kind, (_, measured) in zip(("", "_phantoms"), looks, strict=True):
            found |= {f"{name}{kind}": value for name, value in measured.items()}
        return found

    return learner.runtime.first(row)


def unseen_row(learner: Learner, store: Store) -> dict[str, float] | None:
    """For metrics.jsonl, `unseen_auroc`: how well the run's vectors tell UNSEEN phantoms of left-out conditions from as
    many healthy ones (`told_apart`). None if data.phantoms.conditions leaves none out. All ranks must call it."""
    config = learner.config
    phantoms = config.data.phantoms
    if phantoms is None or not phantoms.conditions:
        return None
    from octfm.phantom.native.stream import CONDITIONS

    left_out = tuple(c for c in CONDITIONS if c not in phantoms.conditions and c != HEALTHY)
    encoder = learner.whole().frozen_encoder(config.objective.frozen)

    def vectors_of(conditions: tuple[str, ...]) -> np.ndarray:
        # Held-out places, whatever was trained on.
        wanted = PhantomStore(phantoms.model_copy(update={"conditions": conditions}), store.preprocessing, UNSEEN)
        return tissue_vectors(learner, encoder, wanted, np.arange(phantoms.volumes, phantoms.volumes + UNSEEN))

    def row() -> dict[str, float]:
        return {"volumes": 2.0 * UNSEEN, "unseen_auroc": told_apart(vectors_of((HEALTHY,)), vectors_of(left_out))}

    return learner.runtime.first(row) if left_out else None


@torch.inference_mode()
def _look(learner: Learner, model: Anchored, store: Store, rows: np.ndarray) -> tuple[np.ndarray, dict[str, float]]:
    """Mean tissue token of each volume, and measurements of the layers that tissue tokens name."""
    from octfm.layers.finder import load_finder  # no other objective needs it

    pre, finder = store.preprocessing, load_finder(device="cpu")
    middle = pre.image_size[0] // 2
    vectors, crossings, distances, left = [], np.zeros(2), np.zeros(2), SEGMENTED
    for arrays, index, tissue, tokens_BKD in encoded(learner, model.encoder, store, rows):
        with learner.runtime.autocast():
            answers = model.head(tokens_BKD)
        tokens, answers = tokens_BKD.float().cpu().numpy(), answers.float().cpu().numpy()
        vectors += [t[own if own.any() else slice(None)].mean(0) for t, own in zip(tokens, tissue, strict=True)]
        crossings += disorder(answers[tissue], model.composition.parts)
        for place in range(min(len(answers), left)):
            own = tissue[place]
            layers = named(answers[place][own], index[place][own], model.composition, model.encoder.grid)
            bscan = Volume(arrays.voxels[place, middle, None], pre.target_spacing, layout="line")
            distances += apart(layers[middle], finder.find(bscan).rows[BORDER_ROWS, 0])
        left = max(0, left - len(answers))
    measured = {"surface_disorder": float(crossings[0] / max(crossings.sum(), 1))}
    if distances[1]:
        measured["segmenter_um"] = float(1000 * pre.target_spacing[1] * distances[0] / distances[1])
    return np.stack(vectors), measured


def named(answers_NA: np.ndarray, index_N: np.ndarray, composition: Composition, grid: TokenGrid) -> np.ndarray:
    """The layer that each voxel's token predicts, int8 [D, H, W]: an index into LAYERS, -1 where a lesion is predicted
    and where there is no token. answers_NA: log odds; index_N: flat grid indices."""
    parts = composition.parts
    best = answers_NA.reshape(len(answers_NA), *parts, len(CLASSES)).argmax(-1)
    layers = np.full((grid.size, *parts), -1, np.int8)
    layers[index_N] = np.where(best < LESION_CLASSES.start, best, -1)
    layers = layers.reshape(*grid.shape, *parts).transpose(0, 3, 1, 4, 2, 5)
    layers = layers.reshape([tokens * part for tokens, part in zip(grid.shape, parts, strict=True)])
    for axis, voxels in enumerate(composition.over):
        layers = layers.repeat(voxels, axis)
    return layers


def apart(layers_HW: np.ndarray, borders_SW: np.ndarray) -> np.ndarray:
    """[2]: summed distance in rows between the BORDERS that tokens predict and those found, and the number of borders
    compared: those inside a predicted layer, in A-scans in which all were found."""
    known = (layers_HW >= 0) & np.isfinite(borders_SW).all(0)
    row = np.arange(len(layers_HW))[:, None]
    found = (row[None] >= borders_SW[:, None]).sum(0)
    # Every border between two layers that differ by n layers is missed in this row.
    missed = np.abs(found - layers_HW)[known].sum()
    at = np.clip(np.nan_to_num(np.rint(borders_SW)), 0, len(layers_HW) - 1).astype(int)
    return np.array([missed, np.take_along_axis(known, at, 0).sum()], float)


def disorder(answers_NA: np.ndarray, parts: tuple[int, int, int]) -> np.ndarray:
    """[2]: numbers of neighbours within tokens whose predicted layers are in the wrong order, and in the right one.
    Predicted lesions do not count. answers_NA: log odds; parts: of a patch along each axis."""
    odds = answers_NA.reshape(len(answers_NA), *parts, len(CLASSES))
    layer = odds[..., : LESION_CLASSES.start].argmax(-1)
    known = odds.argmax(-1) < LESION_CLASSES.start
    step = np.diff(layer, axis=2)[known[:, :, 1:] & known[:, :, :-1]]
    return np.array([(step < 0).sum(), (step > 0).sum()], float)


def told_apart(one_ND: np.ndarray, other_ND: np.ndarray) -> float:
    """AUROC of a linear classifier between two sets of vectors, fitted on one half of each and tested on the other; the
    mean of both ways. 0.5 if the sets look alike, 1 if they are separable."""
    scores = []
    for half in (0, 1):
        fit, judged = ([x[half::2], x[1 - half :: 2]] for x in (one_ND, other_ND))
        train = np.concatenate([fit[0], judged[0]])
        y = np.repeat([-1.0, 1.0], [len(fit[0]), len(judged[0])])
        x, *tested = standardised(train, fit[1], judged[1])
        # Ridge regression in the space of the volumes, which are fewer than channels.
        weights = x.T @ np.linalg.solve(x @ x.T + x.shape[1] * np.eye(len(x)), y - y.mean())
        a, b = (vectors @ weights for vectors in tested)
        scores.append(float(((b[:, None] > a) + 0.5 * (b[:, None] == a)).mean()))
    return float(np.mean(scores))
