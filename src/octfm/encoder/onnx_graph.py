"""Export an encoder, with its head if fine-tuned, as an ONNX graph, and verify that onnxruntime agrees with torch.

    voxels  uint8   [batch, D, H, W]     prepared volumes (`Encoder.prepare`)
    index   int64   [batch, tokens]      flat grid indices of tokens, such as the token budget (`TunedModel.select`)
    counts  float32 [batch, tokens]      1 for tokens to pool (tissue), 0 for others
    ->
    tokens  float32 [batch, tokens, width]
    vector  float32 [batch, numbers]     pooled tokens (objective.pool), as `Encoder.embed` returns them
    answers float32 [batch, outputs]     output of the head, before `Answer.value`; fine-tuned models only

Batch and number of tokens are dynamic. The graph cuts and normalises patches itself.
"""

import contextlib
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from octfm.encoder.encoder import Encoder
from octfm.errors import EvaluationError
from octfm.models.heads import TaskHead
from octfm.models.pooling import VectorPool
from octfm.models.vit3d import normalise, take_patches
from octfm.threads import OneAtATime, ignoring_warnings

TOLERANCE = 1e-4
"""Largest allowed difference in an output, relative to its largest magnitude if that is above 1."""
INPUTS = ("voxels", "index", "counts")


class Graph(nn.Module):
    """The module that is exported; its inputs and outputs are described above."""

    pool: VectorPool

    def __init__(self, encoder: Encoder, head: TaskHead | None):
        super().__init__()
        self.network, self.head = encoder.network, head
        self.patch_size, self.pool = encoder.config.model.patch_size, encoder.config.objective.pool
        self.mean, self.std = encoder.preprocessing.intensity_mean, encoder.preprocessing.intensity_std

    def forward(self, voxels: Tensor, index: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
        patches = normalise(take_patches(voxels.unsqueeze(1), index, self.patch_size), self.mean, self.std)
        tokens = self.network(patches, index)
        vector = self.network.vector(tokens, counts, index, self.pool)
        return (tokens, vector) if self.head is None else (tokens, vector, self.head(tokens, counts > 0))


def write_onnx(encoder: Encoder, head: TaskHead | None, file: Path) -> float:
    """Write and verify the graph; returns the largest relative difference between onnxruntime and torch (TOLERANCE).

    Raises EvaluationError, and leaves no file, if they disagree; also without the packages of octfm[onnx], and for an
    encoder that is not on a CPU.
    """
    _require_packages()
    if encoder.runtime.device.type != "cpu":
        raise EvaluationError("an ONNX graph is exported from a CPU; use --device cpu")
    graph = Graph(encoder, head).eval()
    names = ["tokens", "vector"] + (["answers"] if head is not None else [])
    # The example has 2 volumes: torch.export treats a dimension of 1 as constant.
    batch, tokens = torch.export.Dim("batch", min=1), torch.export.Dim("tokens", min=1)
    shapes = {"voxels": {0: batch}, "index": {0: batch, 1: tokens}, "counts": {0: batch, 1: tokens}}
    try:
        with torch.no_grad(), _silent():
            inputs = example(encoder, 2, min(encoder.network.grid.size, 64), 0)
            program = torch.onnx.export(
                graph, inputs, dynamo=True, input_names=list(INPUTS), output_names=names, dynamic_shapes=shapes,
                external_data=False, verbose=False,
            )  # fmt: skip
            assert program is not None
            program.save(str(file))
        _remove_source_notes(file)
        return check(graph, encoder, file)
    except BaseException:
        file.unlink(missing_ok=True)
        raise


def _remove_source_notes(file: Path) -> None:
    """Remove torch's notes on every node: stack traces, with paths of the exporting machine."""
    import onnx

    def clear(message: Any) -> None:
        for field, value in message.ListFields():
            if field.name in ("doc_string", "metadata_props"):
                message.ClearField(field.name)
            elif field.message_type is not None:
                for inner in value if hasattr(value, "append") else [value]:
                    clear(inner)

    model = onnx.load(str(file))
    clear(model)
    onnx.save(model, str(file))


def check(graph: Graph, encoder: Encoder, file: Path) -> float:
    """Largest difference of onnxruntime from torch over some input sizes. Raises EvaluationError above TOLERANCE."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    grid, worst = encoder.network.grid.size, 0.0
    kept, _, _ = encoder.config.masks.counts(encoder.network.grid.shape)
    # Other sizes than the example's, which must not be fixed in the graph.
    for batch, tokens, seed in ((1, kept, 1), (3, min(17, grid), 2)):
        inputs = example(encoder, batch, tokens, seed)
        found = session.run(None, {name: value.numpy() for name, value in zip(INPUTS, inputs, strict=True)})
        with torch.inference_mode():
            expected = graph(*inputs)
        for name, ours, theirs in zip(names, expected, found, strict=True):
            difference = float(np.abs(ours.numpy() - theirs).max()) / max(1.0, float(ours.abs().max()))
            if not difference <= TOLERANCE:
                raise EvaluationError(
                    f"{file.name}: onnxruntime and torch differ by {difference:.2g} in {name} with {batch} volumes of "
                    f"{tokens} tokens, expected at most {TOLERANCE:g}; nothing was exported. Export without --onnx, "
                    "and report it with your versions of torch and onnx"
                )
            worst = max(worst, difference)
    return worst


def example(encoder: Encoder, batch: int, tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random inputs: horizontal bands with noise, and a random choice of tokens, half of which count."""
    rng = np.random.default_rng(seed)
    shape = encoder.preprocessing.image_size
    rows = np.linspace(0, 6 * np.pi, shape[1])[:, None]
    voxels = np.clip(110 + 90 * np.sin(rows) + rng.normal(0, 20, (batch, *shape)), 0, 255).astype(np.uint8)
    index = np.stack([np.sort(rng.permutation(encoder.network.grid.size)[:tokens]) for _ in range(batch)])
    counts = (rng.random(index.shape) < 0.5).astype(np.float32)
    counts[:, 0] = 1
    return torch.from_numpy(voxels), torch.from_numpy(index), torch.from_numpy(counts)


def _require_packages() -> None:
    try:
        import onnx
        import onnxruntime
        import onnxscript
    except ImportError as error:
        raise EvaluationError(f"--onnx needs {error.name}; install it with: pip install 'octfm[onnx]'") from None
    assert onnx and onnxruntime and onnxscript


_EXPORTING = OneAtATime()


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Silence the exporter, which reports operators of other libraries and its own deprecated calls. One thread at a
    time, since stdout and the level are the whole process's."""
    log = logging.getLogger("torch.onnx")
    with _EXPORTING(), ignoring_warnings(), contextlib.redirect_stdout(io.StringIO()):
        level = log.level
        log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            log.setLevel(level)
