"""Probe the frozen encoder during a run: a checkpoint is chosen by what its features predict, never by SSL loss (F12).

Linear and nearest-neighbour readouts of pooled tissue features on a fixed, labelled subset, fitted on training and
scored on validation participants, never on test participants. Nothing feeds back into training.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import Field

from octfm.catalog.labels import LabelTable, as_number, one_spelling, read_labels, stated
from octfm.catalog.participants.ids import under_one_id
from octfm.config import Config, LocalPlace
from octfm.errors import ConfigError
from octfm.io.hashing import hash_text
from octfm.run.runtime import Runtime
from octfm.store.layout import StoreRow
from octfm.store.selection import evenly
from octfm.store.store import Store

PENALTIES = (1.0, 10.0, 100.0, 1e3, 1e4, 1e5)
NEIGHBOURS = 10
MIN_VOLUMES = 4
"""Fewest labelled volumes in training and in validation."""


class OnlineProbeConfig(Config):
    """Settings of the online probe; it is off unless `target` is set."""

    target: str | None = None
    """Column to predict, for example study_group, diagnosis or cst_um."""
    labels: LocalPlace | None = None
    """CSV or TSV with participant_id (and laterality); null uses the participants' labels in the store."""
    every_steps: int | None = Field(default=None, ge=1, le=10_000_000)
    """null: at every checkpoint, so that each probed state has one."""
    volumes: int = Field(default=512, ge=8, le=1_000_000)
    """Most volumes in training and in validation, always the same ones."""


@dataclass(frozen=True, eq=False)
class Cases:
    """The fixed subset: store rows and their labels."""

    target: str
    train: np.ndarray
    held_out: np.ndarray
    train_label: np.ndarray
    """int64 class numbers, or float64 values."""
    held_out_label: np.ndarray
    classes: tuple[str, ...]
    """Empty if labels are numbers."""
    train_participant: np.ndarray
    """The participant of each row of `train`: the penalty is chosen by leaving out participants, not volumes."""
    key: str = ""
    """Identifies volumes and labels: scores on others cannot be compared with those on these."""

    @property
    def metric(self) -> str:
        return "balanced_accuracy" if self.classes else "r2"

    @property
    def chance(self) -> float:
        return 1 / len(self.classes) if self.classes else 0.0


def find_cases(
    config: OnlineProbeConfig, store: Store, train_rows: np.ndarray, validation_rows: np.ndarray
) -> Cases | None:
    """Labelled volumes among training and validation rows; None if no target is set. Raises ConfigError if there are
    too few, or if a row is of another split: a test participant must never influence the choice of a checkpoint."""
    if config.target is None:
        return None
    table = read_labels(config.labels) if config.labels is not None else None
    sides = []
    for rows, split in ((train_rows, "train"), (validation_rows, "val")):
        _require_split(store, rows, split)
        labels = _labels(config.target, table, [store.rows[row] for row in rows])
        keep = np.array([i for i, label in enumerate(labels) if label is not None], np.int64)
        keep = evenly(keep, config.volumes)  # instead of drawn: every probe uses the same volumes
        sides.append((rows[keep], [str(labels[i]) for i in keep]))
    (train, train_text), (held_out, held_out_text) = sides
    texts = one_spelling([*train_text, *held_out_text])
    volumes = [store.rows[row].acquisition for row in (*train, *held_out)]
    key = hash_text("\n".join(f"{volume} {text}" for volume, text in zip(volumes, texts, strict=True)))[:12]
    train_text, held_out_text = texts[: len(train)], texts[len(train) :]
    if min(len(train), len(held_out)) < MIN_VOLUMES:
        known = sorted({key for row in store.rows for key in row.participant_labels})
        raise ConfigError(
            f"probe.target {config.target}: {len(train)} training and {len(held_out)} validation volumes have that "
            f"label, expected {MIN_VOLUMES} or more; set probe.labels, or choose a label of the store: "
            f"{', '.join(known) or 'it has none'}"
        )
    people = np.array(under_one_id([store.rows[row].participant for row in train]))
    # Up to ten different numbers are taken for classes, such as grades.
    numbers = [as_number(text) for text in texts]
    if None not in numbers and len(set(numbers)) > 10:
        values = np.array(numbers, np.float64)
        return Cases(config.target, train, held_out, values[: len(train)], values[len(train) :], (), people, key)
    classes = tuple(sorted(set(train_text)))
    if len(classes) < 2:
        raise ConfigError(
            f"probe.target {config.target}: every training volume has the label {train_text[0]}; choose a target with "
            "at least two labels"
        )
    # A class without training volumes cannot be predicted.
    known_class = np.array([text in classes for text in held_out_text])
    if not known_class.any():
        raise ConfigError(
            f"probe.target {config.target}: no validation volume has a label of the training volumes "
            f"({', '.join(classes)}); label more participants, or choose another target"
        )
    number = {name: k for k, name in enumerate(classes)}
    return Cases(
        config.target, train, held_out[known_class], np.array([number[t] for t in train_text]),
        np.array([number[t] for t in held_out_text if t in classes]), classes, people, key,
    )  # fmt: skip


def online_probe(
    cases: Cases, vectors_of: Callable[[np.ndarray], np.ndarray], runtime: Runtime
) -> dict[str, float | str]:
    """One row for metrics.jsonl: validation scores of a linear probe and of a nearest-neighbour vote.
    `vectors_of(rows)` returns the vectors of store rows. Scores are balanced accuracy for classes and R² for numbers.
    Ranks divide the volumes among them; rank 0 computes the scores."""
    vectors = [
        runtime.gather(torch.from_numpy(vectors_of(runtime.part(rows)))) for rows in (cases.train, cases.held_out)
    ]
    return runtime.first(lambda: _judge(cases, *(v.numpy() for v in vectors)))


def standardised(train: np.ndarray, *others: np.ndarray) -> list[np.ndarray]:
    """Vectors by mean and deviation of the first set."""
    mean, scale = train.mean(0), train.std(0)
    # A constant channel carries nothing but rounding, so it becomes 0.
    scale[scale <= 1e-6 * np.abs(mean) + 1e-12] = np.inf
    return [(vectors - mean) / scale for vectors in (train, *others)]


def _judge(cases: Cases, train: np.ndarray, held_out: np.ndarray) -> dict[str, float | str]:
    x, x_new = standardised(train, held_out)
    return {
        "target": cases.target,
        "cases": cases.key,
        "metric": cases.metric,
        "score": _score(cases, _ridge(cases, x, x_new)),
        "knn": _score(cases, _neighbours(cases, x, x_new)),
        "chance": cases.chance,
        "train_volumes": len(cases.train),
        "validation_volumes": len(cases.held_out),
    }


def _require_split(store: Store, rows: np.ndarray, split: str) -> None:
    wrong = [row for row in rows if store.rows[row].split != split]
    if wrong:
        row = store.rows[wrong[0]]
        raise ConfigError(
            f"the online probe got {row.acquisition} of split {row.split}, expected {split}: that would leak; report "
            "this as a bug"
        )


def _labels(target: str, table: LabelTable | None, rows: Sequence[StoreRow]) -> list[str | None]:
    if table is None:
        return [stated(row.participant_labels.get(target)) for row in rows]
    return table.join(target, [(row.acquisition, row.participant, row.laterality) for row in rows])


def _ridge(cases: Cases, x: np.ndarray, x_new: np.ndarray) -> np.ndarray:
    """Ridge regression predictions [n, K] (K = 1 for numbers) at the penalty with the smallest leave-one-out error.

    A participant is left out at a time: with another scan of the same person, too weak a penalty would seem best. One
    SVD serves all penalties: residuals of left-out rows G are (1 − H_GG)⁻¹ residual_G with the hat matrix H."""
    if cases.classes:
        y = np.eye(len(cases.classes))[cases.train_label]
        weight = 1 / np.bincount(cases.train_label, minlength=len(cases.classes))[cases.train_label]
    else:
        y, weight = cases.train_label[:, None], np.ones(len(x))
    # Classes have equal total weight, as in octfm probe.
    weight = weight / weight.mean()
    root = np.sqrt(weight)[:, None]
    centre_x, centre_y = np.average(x, 0, weight), np.average(y, 0, weight)
    u, s, vt = np.linalg.svd(root * (x - centre_x), full_matrices=False)
    # Centring and weighting first leaves the intercept out of the penalty.
    uy = u.T @ (root * (y - centre_y))
    _, member = np.unique(cases.train_participant, return_inverse=True)
    groups = [np.flatnonzero(member == m) for m in range(member.max() + 1)]
    best, prediction = np.inf, np.zeros((len(x_new), y.shape[1]))
    for penalty in PENALTIES:
        shrink = s**2 / (s**2 + penalty)
        residual = root * (y - centre_y) - u @ (shrink[:, None] * uy)
        error = 0.0
        for own in groups:
            hat = (u[own] * shrink) @ u[own].T + root[own] @ root[own].T / len(x)  # the second part is the intercept's
            # Not singular even if there is but one participant.
            error += float((np.linalg.solve((1 + 1e-6) * np.eye(len(own)) - hat, residual[own]) ** 2).sum())
        if error < best:
            best = error
            prediction = (x_new - centre_x) @ (vt.T @ ((s / (s**2 + penalty))[:, None] * uy)) + centre_y
    return prediction


def _neighbours(cases: Cases, x: np.ndarray, x_new: np.ndarray) -> np.ndarray:
    """Mean label [n, K] of the NEIGHBOURS nearest training volumes by cosine; classes over their frequency."""
    unit, unit_new = (v / np.maximum(1e-12, np.linalg.norm(v, axis=1, keepdims=True)) for v in (x, x_new))
    nearest = np.argsort(-(unit_new @ unit.T), axis=1, kind="stable")[:, : min(NEIGHBOURS, len(x))]
    y = np.eye(len(cases.classes))[cases.train_label] if cases.classes else cases.train_label[:, None]
    votes = y[nearest].mean(1)
    # Over the class frequencies, or a rare class could never win a vote.
    return votes / y.mean(0) if cases.classes else votes


def _score(cases: Cases, predicted: np.ndarray) -> float:
    truth = cases.held_out_label
    if cases.classes:
        right = predicted.argmax(1) == truth
        return float(np.mean([right[truth == k].mean() for k in np.unique(truth)]))
    spread = ((truth - truth.mean()) ** 2).sum()
    return float(1 - ((truth - predicted[:, 0]) ** 2).sum() / max(spread, 1e-12))
