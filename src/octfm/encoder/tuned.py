"""A fine-tuned model, read back: what `octfm finetune` chose, as one thing that answers for a volume."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octfm.encoder.encoder import Encoder, content_of, fill, load_encoder
from octfm.encoder.tokens import draw_tissue
from octfm.errors import CheckpointError
from octfm.io.location import Location
from octfm.models.heads import Pool, TaskHead
from octfm.store.layout import Arrays
from octfm.volume.volume import Volume


@dataclass(frozen=True)
class Answer:
    """What the numbers mean that a head gives."""

    target: str
    classes: tuple[str, ...] = ()
    """Empty for a number; lowest grade first where they are grades."""
    ordinal: bool = False
    mean: float = 0.0
    std: float = 1.0
    """Of a number in training: the head answers in standard deviations from its mean."""
    weighted: bool = False
    """Classes counted the same in training, however rare."""
    log_prior: tuple[float, ...] = ()
    """log of how common each class was in training."""

    def value(self, answers: np.ndarray) -> np.ndarray:
        """What `Predictions.value` holds: log-probabilities of equally common classes, or numbers in their own unit. [B, O]"""
        if not self.classes:
            return answers * self.std + self.mean
        log_p = (
            answers
            - np.log(np.exp(answers - answers.max(1, keepdims=True)).sum(1, keepdims=True))
            - answers.max(1, keepdims=True)
        )
        return log_p if self.weighted else log_p - np.array(self.log_prior)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"classes": list(self.classes), "log_prior": list(self.log_prior)}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "Answer":
        fields: dict[str, Any] = {
            **values,
            "classes": tuple(values["classes"]),
            "log_prior": tuple(values["log_prior"]),
        }
        return Answer(**fields)


@dataclass(frozen=True, eq=False)
class TunedModel:
    """Encoder, head and what the head answers; float32."""

    encoder: Encoder
    head: TaskHead
    answer: Answer
    tokens_per_volume: int | None
    """A head that was trained on cached features of a frozen encoder sees so many tissue tokens of a volume; None: all that are kept."""

    @torch.inference_mode()
    def answers(self, arrays: Arrays) -> np.ndarray:
        """float32 [B, O] of prepared volumes, as `Answer.value` says."""
        tokens, tissue = self.encoder.tissue_tokens(arrays)
        if self.tokens_per_volume is not None:
            drawn = [draw_tissue(own, which, self.tokens_per_volume) for own, which in zip(tokens, tissue, strict=True)]
            tokens, tissue = np.stack([t for t, _ in drawn]).astype(np.float32), np.stack([c for _, c in drawn])
        tensor = self.encoder.runtime.tensor
        return self.answer.value(self.head(tensor(tokens), tensor(tissue)).float().cpu().numpy())

    def predict(self, volume: Volume) -> dict[str, float]:
        """One acquisition: the probability of every class, in a population like the one of training; or the number, under its name."""
        value = self.answers(self.encoder.prepare(volume))[0].astype(float)
        if not self.answer.classes:
            return {self.answer.target: float(value[0])}
        log_p = value + np.array(self.answer.log_prior)
        p = np.exp(log_p - log_p.max())
        return dict(zip(self.answer.classes, (p / p.sum()).tolist(), strict=True))


def load_tuned(run: str | Location, device: str | None = None) -> TunedModel:
    """The model of an `octfm finetune` run, or of one that `octfm export` wrote, on a disk or in a bucket."""
    content = content_of(run)
    if "encoder_config" in content:
        if "answer" not in content:
            raise CheckpointError(
                f"{run}: fine-tuned by an octfm that did not keep what the answers mean; run octfm finetune again"
            )
        config, best = content["config"], content["state"]["best"]
        pool, kept = config["pool"], config["tokens_per_volume"] if not config["lr_encoder"] else None
        encoder = load_encoder(run, device=device)  # which says so where there is no best state yet
        tensors = {
            name.removeprefix("head."): tensor for name, tensor in best["model"].items() if name.startswith("head.")
        }
    elif content.get("head"):
        encoder, tensors = load_encoder(run, device=device), content["head"]
        pool, kept = content["head_settings"]["pool"], content["head_settings"]["tokens_per_volume"]
    else:
        raise CheckpointError(
            f"{run}: an encoder without a head, which answers nothing; expected a run of octfm finetune or its export"
        )
    answer = Answer.from_dict(content["answer"])
    return TunedModel(encoder, build_head(encoder, answer, pool, tensors, run), answer, kept)


def build_head(
    encoder: Encoder, answer: Answer, pool: Pool, tensors: dict[str, Tensor], where: str | Location
) -> TaskHead:
    """The head of these weights, on the encoder's device."""
    head = TaskHead(encoder.width, heads_of(encoder), len(answer.classes) or 1, pool)
    fill(head, tensors, where)
    return head.to(encoder.runtime.device).eval().requires_grad_(False)


def heads_of(encoder: Encoder) -> int:
    """Attention heads of a pooling head."""
    return next(h for h in (encoder.config.model.heads, 2, 1) if encoder.width % h == 0)
