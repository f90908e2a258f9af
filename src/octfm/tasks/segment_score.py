"""Train segmenters and score them: µm and Dice in native frames of test participants, with baselines and intervals."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from octfm.config import load
from octfm.display import interval
from octfm.encoder.encoder import beginning_of, seen_if_known
from octfm.errors import CheckpointError, Echo, EvaluationError
from octfm.evaluation.cases import people
from octfm.evaluation.metrics import mae, ratio
from octfm.evaluation.probe import RESAMPLES, write_probe
from octfm.evaluation.results import Result, tested_people
from octfm.evaluation.scoring import Scored, compare_scored, correct, difference_words, estimate
from octfm.evaluation.statistics import MIN_PARTICIPANTS, bootstrap
from octfm.io.hashing import hash_file
from octfm.io.location import Location
from octfm.run.checkpoint_writer import Retention
from octfm.run.folder import Identity, Kind, open_run, resume, volumes_digest
from octfm.run.loop import Interruption, Session, open_session, train
from octfm.run.runtime import torch_defaults
from octfm.run.tracking import TrackingConfig
from octfm.store.selection import assert_disjoint_splits, evenly
from octfm.store.store import Store
from octfm.tasks.segment import (
    Fit,
    Labelled,
    Segmenter,
    open_encoder,
    open_store,
    read_truth,
    to_prepared,
    transform_of,
    truth_file,
)
from octfm.tasks.segment_settings import SegmentConfig
from octfm.version import __version__
from octfm.volume.segmentation import Segmentation
from octfm.volume.transform import Transform

Predictor = Callable[[int], Segmentation]
"""A function from a row of the store to what is found in its volume, in the native frame."""
# Not max_cache_gb: tokens that are kept are rounded, and others are not.
SEGMENTATION = Kind("segment", frozenset({"store"}), lambda settings, _: load(SegmentConfig, settings))


@torch_defaults()
def segment(
    config: SegmentConfig,
    out: str | Location,
    device: str | None = None,
    *,
    baselines: bool = True,
    allow_seen: bool = False,
    echo: Echo = print,
) -> Result:
    """Train on the store's train and val participants, judge on its test ones; returns segment.json's content.

    `out` is a folder or an address in a bucket; the same call resumes an interrupted run. Raises EvaluationError if
    a test participant was in the encoder's pretraining (unless `allow_seen`) or a volume has no fitting truth, and
    Preempted after SIGTERM, SIGINT or SIGHUP.
    """
    encoder = open_encoder(config, device)
    store = open_store(config, encoder)
    splits = _rows(store, config)
    train_rows, test_rows = splits["train"], splits["test"]
    seen = seen_if_known(str(config.encoder), allow_seen=allow_seen)
    tested = [store.rows[i].participant for i in test_rows]
    known = None if seen is None else {*people(np.array([who for who in tested if seen(who)], str)).tolist()}
    if known and not allow_seen:
        raise EvaluationError(
            f"{len(known)} test participants were in the encoder's pretraining ({min(known)} …); hold them out of "
            "pretraining, or pass --allow-seen"
        )
    truth = [to_prepared(read_truth(config, store.rows[i]), transform_of(store.rows[i])) for i in train_rows]
    _require_something_to_find(config, store, truth, test_rows)
    # With other volumes, splits or surfaces to learn from it would be another run.
    taught = [hash_file(truth_file(config, store.rows[i])) for i in train_rows]
    data = volumes_digest(store, [*train_rows, *test_rows], taught)
    # A trained encoder is in the checkpoints, and begins as that of this run; a frozen one is only named by its key.
    named = beginning_of(str(config.encoder), encoder) if config.lr_encoder else encoder.key
    # The key is "" because None would draw one: no participants are hashed here.
    identity = Identity(SEGMENTATION, config, store.fingerprint, data, key="", encoder=named)
    with (
        open_run(out, identity, encoder.runtime, echo=echo, check=_require_unfinished) as run,
        Interruption() as interruption,
    ):
        segmenters = {"pretrained": Segmenter(config, encoder)}
        if baselines:
            segmenters["random_init"] = Segmenter(config, open_encoder(config, device, random_init=True))
            segmenters["voxels"] = Segmenter(config, encoder, "voxels")
        training = Segmentations(
            {
                name: Fit(segmenter, lambda i: store.read([train_rows[i]]).voxels[0], truth)
                for name, segmenter in segmenters.items()
            }
        )
        resume(run, training, echo)
        train(training, open_session(training, run, Retention(1), echo), interruption)
        predictors: dict[str, Predictor] = {
            # `s=s` binds this segmenter; without it all predictors would use the last one.
            name: (lambda i, s=s: s.in_native(store.read([i]), transform_of(store.rows[i])))
            for name, s in segmenters.items()
        }
        if baselines and config.surfaces:
            predictors["mean_height"] = mean_height(config, store, truth)
        learned_from = {*people(np.array([store.rows[i].participant for i in train_rows]))}
        n_seen = None if known is None else len(known)
        facts = {"n_train_participants": len(learned_from), "seen_test_participants": n_seen}
        result = _judge(config, store, test_rows, predictors, facts)
        write_probe(run.path / "segment.json", result)
        run.publish()
    return result


class Segmentations:
    """A training of run/loop.py: `config.steps` updates of the pretrained segmenter, then as many of the next."""

    tracking = TrackingConfig()

    def __init__(self, fits: dict[str, Fit]):
        self.fits, self.names = fits, list(fits)
        self.segmenter = fits[self.names[0]].segmenter
        self.config, self.runtime = self.segmenter.config, self.segmenter.runtime
        self.frozen = {} if self.segmenter.learns else {"frozen_encoder": self.segmenter.encoder.digest}
        self.step, self.steps = 0, len(fits) * self.config.steps
        self.losses: deque[float] = deque(maxlen=20)

    @property
    def finished(self) -> bool:
        return self.step >= self.steps

    def update(self, session: Session, interruption: Interruption) -> str | None:
        name = self.names[self.step // self.config.steps]
        fit, step = self.fits[name], self.step % self.config.steps
        session.waiting.for_("the device")
        if step == 0:
            session.echo(f"{name}: {len(fit.truth)} training volumes")
            fit.begin()
        self.losses.append(fit.update(step))
        session.metrics.write("train", self.step, segmenter=name, loss=self.losses[-1])
        self.step += 1
        if self._fifth():
            session.echo(f"step {step + 1:>5}/{self.config.steps}  loss {np.mean(self.losses):.3f}")
        if step + 1 == self.config.steps:  # the next segmenter has tokens of its own
            fit.forget()
            self.losses.clear()
        return interruption.signal_name

    def recover(self, session: Session) -> bool:
        return False

    def validate(self, session: Session) -> bool:
        """Whether to write a checkpoint: after every fifth of a segmenter's updates.

        Nothing is scored here: scores are for test participants, and come last.
        """
        return self._fifth() or self.finished

    def _fifth(self) -> bool:
        """Whether another fifth of a segmenter's updates is made."""
        # Segmenters are trained one after the other, each for config.steps updates.
        step = (self.step - 1) % self.config.steps + 1
        return step % max(1, self.config.steps // 5) == 0 or step == self.config.steps

    def content(self) -> dict[str, Any]:
        """All that `load_segmenter` needs except the pretraining run; to resume, also baselines and optimizer."""
        # Rounded up, so that the segmenter in training counts.
        begun = -(-self.step // self.config.steps)
        current = None if self.step % self.config.steps == 0 else self.fits[self.names[begun - 1]].segmenter
        baselines = {name: self.fits[name].segmenter.weights() for name in self.names[1:begun]}
        encoder = self.segmenter.encoder
        return {
            "model": self.segmenter.weights(),
            "optimizer": current.optimizer.state_dict() if current is not None else {},
            "state": {"tokens": self.segmenter.tokens, "baselines": baselines},
            "config": self.config.model_dump(mode="json"),
            "preprocessing": encoder.preprocessing.model_dump(mode="json"),
            "fingerprint": encoder.fingerprint,
            **self.frozen,
            "participants": {"key": "", "hashes": []},
            "octfm": __version__,
        }

    def restore(self, content: dict[str, Any] | None, source: Path) -> None:
        assert content is not None, "one process segments"
        self.step = content["step"]
        # The first segmenter is trained, or it is the one in training; the optimizer is that of the last one begun.
        self.segmenter.load_weights(content["model"])
        # Checkpoints up to version 0.1 hold the first segmenter, fully trained, and no baselines.
        for name, tensors in content["state"].get("baselines", {}).items():
            if name in self.fits:
                self.fits[name].segmenter.load_weights(tensors)
        if content["optimizer"] and not self.finished:
            name = self.names[self.step // self.config.steps]
            self.fits[name].segmenter.optimizer.load_state_dict(content["optimizer"])


def _require_something_to_find(
    config: SegmentConfig, store: Store, truth: Sequence[Labelled], test_rows: Sequence[int]
) -> None:
    """Raises EvaluationError if no training volume has a surface or the mask, no test volume has a surface, or surfaces
    are not named in their order. Reads the truth of all test volumes, so that a fault in it is found before the
    training and not after."""
    tested = np.zeros(len(config.surfaces), bool)
    for i in test_rows:
        tested |= np.isfinite(read_truth(config, store.rows[i])["rows"]).any((1, 2))
    trained = np.any([np.isfinite(t.rows).any((1, 2)) for t in truth], axis=0)
    for split, known in (("training", trained), ("test", tested)):
        if absent := [name for name, any_row in zip(config.surfaces, known, strict=True) if not any_row]:
            raise EvaluationError(
                f"truth: no {split} volume has a row of {', '.join(absent)}; leave it out of surfaces, or label it"
            )
    for i, (upper, lower) in enumerate(pairwise(config.surfaces)):
        # A surface is never placed above the one before it.
        if sum(np.sign(np.nan_to_num(t.rows[i + 1] - t.rows[i])).sum() for t in truth) < 0:
            raise EvaluationError(
                f"surfaces: {lower} lies above {upper} in the truth; name them from the vitreous downwards"
            )
    if config.mask_values and not any(t.mask.any() for t in truth if t.mask is not None):
        raise EvaluationError(
            f"truth: no training volume has a voxel of mask_values {list(config.mask_values)} within its prepared "
            "field; name the values that your files use (PNG masks often have 255)"
        )


def _judge(
    config: SegmentConfig,
    store: Store,
    test_rows: Sequence[int],
    predictors: dict[str, Predictor],
    facts: dict[str, int],
) -> Result:
    """What segment.json holds: errors of every predictor on the test volumes, and comparisons with the encoder's."""
    who = people(np.array([store.rows[i].participant for i in test_rows]))
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in predictors}
    for i in test_rows:
        truth, transform = read_truth(config, store.rows[i]), transform_of(store.rows[i])
        for name, predictor in predictors.items():
            found[name].append(errors_of(config, predictor(i), truth, transform))
    scored = score_errors(config, found, who, facts, RESAMPLES)
    comparisons = [
        # PLANNED lists metrics of probes; here every comparison is planned.
        compare_scored(a, b, leakage=False) | {"planned": True}
        for name, others in scored.items()
        if name != "pretrained"
        for a in scored["pretrained"]
        for b in others
        if (a.row["target"], a.metric) == (b.row["target"], b.metric)
    ]
    return Result(
        format="octfm-segment",
        version=1,
        results=[s.row for per in scored.values() for s in per],
        comparisons=correct(comparisons),
        settings=config.model_dump(mode="json"),
    )


def _require_unfinished(folder: Path) -> None:
    if (folder / "segment.json").exists():
        raise CheckpointError(f"{folder}: holds a finished segmentation; choose another --out")


def errors_of(
    config: SegmentConfig, found: Segmentation, truth: dict[str, Any], transform: Transform
) -> dict[str, Any]:
    """Errors in one volume: mean absolute error of each surface in µm, over A-scans with truth and prediction; voxel
    counts for Dice."""
    dy_um = found.spacing_mm[1] * 1000
    errors: dict[str, Any] = {}
    for name, rows in zip(config.surfaces, truth["rows"], strict=True):
        # A surface outside the image cannot be seen.
        visible = (rows >= 0) & (rows <= transform.native_shape[1] - 1)
        gap = np.abs(found.surfaces[name] - rows)[visible & np.isfinite(found.surfaces[name])]
        errors[name] = float(gap.mean() * dy_um) if gap.size else float("nan")
    if truth["mask"] is not None:
        # What was cropped away was never seen, so it does not count.
        field = transform.to_native(np.ones(transform.shape, np.uint8)).astype(bool)
        answer, real = found.masks[config.mask_name] & field, truth["mask"] & field
        errors[config.mask_name] = (int((answer & real).sum()), int(answer.sum()), int(real.sum()))
    return errors


def score_errors(
    config: SegmentConfig,
    errors: dict[str, list[dict[str, Any]]],
    participants: np.ndarray,
    facts: dict[str, Any],
    resamples: int,
) -> dict[str, list[Scored]]:
    """By predictor the mean error in µm over volumes, and Dice over all test voxels together, with intervals over
    participants. All are judged on the same volumes, or their differences would not be paired."""
    scored: dict[str, list[Scored]] = {name: [] for name in errors}
    measures = [(surface, "mae") for surface in config.surfaces] + [(config.mask_name, "dice")] * bool(
        config.mask_values
    )
    for target, metric in measures:
        values = np.array([[e[target] for e in own] for own in errors.values()], float)
        # NaN: in this volume no A-scan shows the surface both in truth and prediction.
        kept = np.isfinite(values.reshape(*values.shape[:2], -1)).all((0, 2))
        who = participants[kept]
        counts = {"n_test_participants": len(set(who.tolist())), "n_test_volumes": len(who)}
        if not len(who):
            continue
        for name, own in zip(errors, values[:, kept], strict=True):
            # The values are errors already: their mean is the error against zero.
            measure = partial(mae, np.zeros(len(own)), own) if metric == "mae" else partial(dice, own)
            enough = counts["n_test_participants"] >= MIN_PARTICIPANTS
            boot = bootstrap(measure, who, resamples=resamples) if enough else None
            found = estimate(boot, float(measure(np.ones((1, len(own))))[0]))
            note = None if boot else f"No interval: fewer than {MIN_PARTICIPANTS} test participants."
            if found["estimate"] is None:
                note = f"Undefined: no test volume has {target}, and none was found in any."
            row = {
                **facts,
                **counts,
                "target": target,
                "metric": metric,
                "unit": "µm" if metric == "mae" else "",
                "encoder": name,
                **found,
                "note": note,
            }
            scored[name].append(Scored(metric, name, boot, row))
    return scored


def dice(voxels: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """2 |A ∩ B| / (|A| + |B|) over all volumes, under weights [R, n]; `voxels` [n, 3] holds |A ∩ B|, |A|, |B|. NaN
    where both are empty."""
    both, answer, real = (weights @ column for column in voxels.T)
    return ratio(2 * both, answer + real)


def mean_height(config: SegmentConfig, store: Store, truth: Sequence[Labelled]) -> Predictor:
    """A predictor that ignores the image: the mean surface of training volumes, in the prepared frame, which is
    centred on the tissue; its mean row where none of them has it."""
    stacked = np.stack([t.rows for t in truth])
    known = np.isfinite(stacked)
    total, count = np.where(known, stacked, 0).sum(0), known.sum(0)
    everywhere = (total.sum((1, 2)) / count.sum((1, 2)))[:, None, None]
    mean = np.where(count > 0, total / np.maximum(count, 1), everywhere)

    def answer(i: int) -> Segmentation:
        transform = transform_of(store.rows[i])
        surfaces = {name: transform.rows_to_native(rows) for name, rows in zip(config.surfaces, mean, strict=True)}
        masks = {config.mask_name: np.zeros(transform.native_shape, bool)} if config.mask_values else {}
        return Segmentation(surfaces, masks, transform.native_spacing_mm)

    return answer


def summary_lines(result: dict[str, Any]) -> list[str]:
    """One line per surface or mask and source, then one per comparison, for a terminal."""
    lines = []
    for r in result["results"]:
        estimate = "undefined" if r["estimate"] is None else interval(r)
        unit = f" {r['unit']}" if r["unit"] else ""
        who = tested_people(r)
        lines.append(f"{r['target']:<12} {r['metric']:<5} {r['encoder']:<12} {estimate}{unit}, {who}")
        if r["estimate"] is None:
            lines.append(f"{r['target']:<12} {r['note']}")
    for c in result["comparisons"]:
        if c["low"] is not None:
            lines.append(f"{c['target']:<12} {c['metric']:<5} {difference_words(c, digits=2)}")
    return lines


def _rows(store: Store, config: SegmentConfig) -> dict[str, list[int]]:
    """Rows to `train` on and to `test`; no participant is in both."""
    assert_disjoint_splits(store)
    train = [row.index for row in store.rows if row.split in ("train", "val")]
    test = [row.index for row in store.rows if row.split == "test"]
    if not train or not test:
        raise EvaluationError(f"{store.path}: expected train and test participants; octfm scan makes splits")
    if config.max_volumes is not None:
        train = evenly(np.array(train), config.max_volumes).tolist()
    return {"train": train, "test": test}
