"""The head of a fine-tuned model, for maps: what it answers on any tokens, and what it looks at."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from octfm.encoder.encoder import Encoder, content_of, load_encoder
from octfm.encoder.tuned import TunedModel, load_tuned
from octfm.errors import EvaluationError
from octfm.models.heads import CrossAttentionPool


@dataclass(frozen=True, eq=False)
class TrainedHead:
    """Maps take all kept tissue tokens of a volume, also of a head that was trained on a draw of them."""

    model: TunedModel

    @property
    def target(self) -> str:
        return self.model.answer.target

    @property
    def loss_unit(self) -> str:
        return "log-odds of its class" if self.model.answer.classes else "standard deviations of the label"

    @torch.inference_mode()
    def answer(self, tokens: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """float [B, O] of tokens [B, M, width] that count [B, M]: log-probabilities of classes, or a number in standard deviations."""
        tensor = self.model.encoder.runtime.tensor
        out = self.model.head(tensor(tokens), tensor(counts)).float()
        return (out.log_softmax(-1) if self.model.answer.classes else out).cpu().numpy()

    @torch.inference_mode()
    def attention(self, tokens: np.ndarray, counts: np.ndarray) -> np.ndarray | None:
        """float [B, M], mean over heads, sums to 1; None where the head averages its tokens."""
        head, tensor = self.model.head, self.model.encoder.runtime.tensor
        if not isinstance(head.pool, CrossAttentionPool):
            return None
        return head.pool.attention((tensor(tokens) - head.mean) / head.std, tensor(counts)).mean(1).cpu().numpy()

    def lost(self, before: np.ndarray, after: np.ndarray) -> float:
        """By how much an answer [O] is less: the log-odds of the class that was answered before, or the number."""
        if not self.model.answer.classes:
            return float(before[0] - after[0])
        named = int(before.argmax())
        return _log_odds(before[named]) - _log_odds(after[named])


def load_head(run: str | Path, encoder: Encoder) -> TrainedHead:
    """Of an `octfm finetune` run. Raises EvaluationError where it was trained on other weights: its maps would mean nothing for these."""
    model = load_tuned(run)
    if model.encoder.key != encoder.key:
        raise EvaluationError(
            f"{run}: its head was trained on {model.encoder.source}, not on {encoder.source}; give it as the run itself"
        )
    return TrainedHead(model)


def load_with_head(run: str | Path, device: str | None = None) -> tuple[Encoder, TrainedHead | None]:
    """The encoder of any run, checkpoint or export, and its head where it has one."""
    content = content_of(run)
    if "encoder_config" not in content and not content.get("head"):
        return load_encoder(run, device=device), None
    model = load_tuned(run, device)
    return model.encoder, TrainedHead(model)


def _log_odds(log_p: float) -> float:
    return float(log_p - np.log(max(-np.expm1(log_p), 1e-12)))
