"""A fine-tuned model: the encoder and head of an `octfm finetune` run or its export, for predictions and maps."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, overload

import numpy as np
import torch

from octfm.display import box, brief
from octfm.encoder.encoder import Encoder, Scan, encoder_in, fill, opened, several
from octfm.encoder.tokens import draw_tissue, drawn_places
from octfm.errors import CheckpointError, EvaluationError
from octfm.io.location import Location
from octfm.io.progress import say
from octfm.models.heads import CrossAttentionPool, TaskHead
from octfm.models.vit3d import ViTConfig
from octfm.pretraining.resume import part_of
from octfm.run.runtime import Runtime, alone, torch_defaults
from octfm.store.layout import Arrays
from octfm.store.store import Store


@dataclass(frozen=True)
class Answer:
    """The meaning of a head's outputs."""

    target: str
    classes: tuple[str, ...] = ()
    """Empty if the target is a number; grades are in ascending order."""
    ordinal: bool = False
    mean: float = 0.0
    std: float = 1.0
    """Mean and standard deviation of a numeric target in training; the head outputs (value - mean) / std."""
    weighted: bool = False
    """Whether the training loss gave all classes the same weight, however rare."""
    log_prior: tuple[float, ...] = ()
    """Log of each class's frequency in training."""

    def value(self, answers: np.ndarray) -> np.ndarray:
        """[B, O] for `Predictions.value`: log-probabilities for equally common classes, or numbers in their unit."""
        if not self.classes:
            return answers * self.std + self.mean
        # Log-softmax, less the maximum inside the exponential so that it cannot overflow.
        top = answers.max(1, keepdims=True)
        log_p = answers - np.log(np.exp(answers - top).sum(1, keepdims=True)) - top
        return log_p if self.weighted else log_p - np.array(self.log_prior)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` reads it."""
        return asdict(self) | {"classes": list(self.classes), "log_prior": list(self.log_prior)}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "Answer":
        return Answer(**{**values, "classes": tuple(values["classes"]), "log_prior": tuple(values["log_prior"])})


@dataclass(frozen=True, eq=False)
class TunedModel:
    """A fine-tuned model: encoder, head, and what the outputs of the head mean; computes in float32."""

    encoder: Encoder
    head: TaskHead
    answer: Answer
    tokens_per_volume: int | None
    """Tissue tokens per volume that the head was trained on, from cached features; None: all kept tokens."""

    def __repr__(self) -> str:
        return brief("TunedModel", *self._described().values())

    def _repr_html_(self) -> str:
        return box("Fine-tuned model", self._described())

    def _described(self) -> dict[str, str]:
        classes = ", ".join(self.answer.classes) or "a number"
        return {"predicts": f"{self.answer.target}: {classes}", "encoder": repr(self.encoder)}

    @torch_defaults()
    @torch.inference_mode()
    def answers(self, arrays: Arrays) -> np.ndarray:
        """float32 [B, O] of prepared volumes, in the units of `Answer.value`."""
        tokens, tissue = self.encoder.tissue_tokens(arrays)
        if self.tokens_per_volume is not None:
            drawn = [draw_tissue(own, which, self.tokens_per_volume) for own, which in zip(tokens, tissue, strict=True)]
            tokens, tissue = np.stack([t for t, _ in drawn]).astype(np.float32), np.stack([c for _, c in drawn])
        tensor = self.encoder.runtime.tensor
        return self.answer.value(self.head(tensor(tokens), tensor(tissue)).float().cpu().numpy())

    def select(self, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that the head uses, as inputs of an exported graph.

        Returns flat grid indices, int64 [B, M], and which of them the head pools, bool [B, M].
        """
        index, tissue = self.encoder.select(arrays)
        if self.tokens_per_volume is None:
            return index, tissue
        counts = np.zeros_like(tissue)
        for own, which in zip(counts, tissue, strict=True):
            own[drawn_places(which, self.tokens_per_volume)] = True
        return index, counts

    @overload
    def predict(self, scans: Scan) -> dict[str, float]: ...

    @overload
    def predict(self, scans: Store | Iterable[Scan]) -> list[dict[str, float]]: ...

    def predict(self, scans: Scan | Store | Iterable[Scan]) -> dict[str, float] | list[dict[str, float]]:
        """Class → probability, for a population like that of training; or target → predicted number, in its unit.

        scans: what `Encoder.embed` takes; several give a list, in their order. Raises ReadError for a file that cannot
        be read or is upside down, EvaluationError for a store that was prepared otherwise.
        """
        of_bscans = cache(self.encoder.of_bscans)
        if isinstance(scans, Scan):
            return self._predict(scans, of_bscans)
        return [self._predict(scan, of_bscans) for scan in several(scans, "answers")]

    def _predict(self, scan: Scan, of_bscans: Callable[[], Encoder]) -> dict[str, float]:
        encoder, arrays = self.encoder.prepared(scan, of_bscans)
        value = replace(self, encoder=encoder).answers(arrays)[0].astype(float)
        if not self.answer.classes:
            return {self.answer.target: float(value[0])}
        # `value` is for equally common classes; Bayes' rule restores their frequencies in training.
        log_p = value + np.array(self.answer.log_prior)
        p = np.exp(log_p - log_p.max())
        return dict(zip(self.answer.classes, (p / p.sum()).tolist(), strict=True))

    # For maps, which use all kept tissue tokens even if the head was trained on a sample.

    @torch_defaults()
    @torch.inference_mode()
    def outputs(self, tokens: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """float [B, O]: log-probabilities of classes, or a number in standard deviations.

        `tokens` [B, M, width]; `counts` bool [B, M] marks those to use.
        """
        tensor = self.encoder.runtime.tensor
        out = self.head(tensor(tokens), tensor(counts)).float()
        return (out.log_softmax(-1) if self.answer.classes else out).cpu().numpy()

    @torch_defaults()
    @torch.inference_mode()
    def attention(self, tokens: np.ndarray, counts: np.ndarray) -> np.ndarray | None:
        """float [B, M]: attention to each token, averaged over heads, sums to 1; None if the head pools by the mean."""
        head, tensor = self.head, self.encoder.runtime.tensor
        if not isinstance(head.pool, CrossAttentionPool):
            return None
        return head.pool.attention((tensor(tokens) - head.mean) / head.std, tensor(counts)).mean(1).cpu().numpy()

    @property
    def loss_unit(self) -> str:
        """Unit of `lost`."""
        return "log-odds of its class" if self.answer.classes else "standard deviations of the label"

    def lost(self, before: np.ndarray, after: np.ndarray) -> float:
        """Decrease from `before` [O] to `after` [O], in `loss_unit`: of the log-odds of the class that `before`
        predicts, or of the number."""
        if not self.answer.classes:
            return float(before[0] - after[0])
        predicted = int(before.argmax())
        return _log_odds(before[predicted]) - _log_odds(after[predicted])


@torch_defaults()
def load_tuned(run: str | Location, device: str | torch.device | None = None) -> TunedModel:
    """The model of an `octfm finetune` run or of its export, on a disk or in a bucket.

    Raises CheckpointError if it has no head.
    """
    runtime = alone("fp32", device)
    return _tuned_in(run, *opened(run, say), runtime)


def _tuned_in(run: str | Location, path: Location, content: dict[str, Any], runtime: Runtime) -> TunedModel:
    """The model in what `opened` returned for `run`."""
    if "encoder_config" in content:
        if "answer" not in content:
            raise CheckpointError(
                f"{run}: fine-tuned by an octfm that did not record the meaning of outputs; run octfm finetune again"
            )
        config, best = content["config"], content["state"]["best"]
        pool, kept = config["pool"], config["tokens_per_volume"] if not config["lr_encoder"] else None
        encoder = encoder_in(path, content, runtime)  # raises if there is no best state yet
        tensors = part_of(best["model"], "head.")
    elif content.get("head"):
        encoder, tensors = encoder_in(path, content, runtime), content["head"]
        pool, kept = content["head_settings"]["pool"], content["head_settings"]["tokens_per_volume"]
    else:
        raise CheckpointError(
            f"{run}: an encoder without a head, which predicts nothing; expected a run of octfm finetune or its export"
        )
    answer = Answer.from_dict(content["answer"])
    with torch.device("meta"):
        head = TaskHead(encoder.width, heads_of(encoder.config.model), len(answer.classes) or 1, pool)
    fill(head, tensors, run)
    return TunedModel(encoder, head.to(encoder.runtime.device).eval().requires_grad_(False), answer, kept)


def heads_of(model: ViTConfig) -> int:
    """Number of attention heads of a pooling head for this encoder."""
    return next(h for h in (model.heads, 2, 1) if model.width % h == 0)


def load_head(run: str | Location, encoder: Encoder, device: str | torch.device | None = None) -> TunedModel:
    """The model of an `octfm finetune` run. Raises EvaluationError if it was not trained on `encoder`'s weights."""
    model = load_tuned(run, device)
    if model.encoder.key != encoder.key:
        raise EvaluationError(
            f"{run}: its head was trained on {model.encoder.source}, not on {encoder.source}; "
            "pass the fine-tuned run itself as the run"
        )
    return model


def load_with_head(run: str | Location, device: str | torch.device | None = None) -> tuple[Encoder, TunedModel | None]:
    """The encoder of any run, checkpoint or export, and the fine-tuned model that it belongs to, if there is one."""
    return with_head_in(run, *opened(run, say), device)


def with_head_in(
    run: str | Location, path: Location, content: dict[str, Any], device: str | torch.device | None = None
) -> tuple[Encoder, TunedModel | None]:
    """As `load_with_head`, from what `opened` returned for `run`."""
    runtime = alone("fp32", device)
    if "encoder_config" not in content and not content.get("head"):
        return encoder_in(path, content, runtime), None
    model = _tuned_in(run, path, content, runtime)
    return model.encoder, model


def _log_odds(log_p: float) -> float:
    return float(log_p - np.log(max(-np.expm1(log_p), 1e-12)))
