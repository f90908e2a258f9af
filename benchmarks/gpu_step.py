"""One update on inputs that are on the device already: eager, compiled, or replayed as a CUDA graph."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from octfm.models.vit3d import Block
from octfm.pretraining.inputs import make_inputs
from octfm.pretraining.learner import Learner
from octfm.store.loader import Batch

MODES = ("eager", "compiled", "graph", "compiled graph", "whole compiled")
"""`compiled`: every transformer block. `whole compiled`: networks and loss at once, for a learner whose runtime
compiles (runtime.compile)."""
WARM_UP = 3
"""Updates before a graph is recorded: AdamW makes its moments, libraries their handles."""


def compile_blocks(model: nn.Module, device: str) -> None:
    """Compile every transformer block: all blocks of one shape share one program."""
    torch.compiler.reset()
    # The CPU's is for rehearsals: the same graphs, executed by torch.
    backend = "inductor" if device == "cuda" else "aot_eager"
    for module in model.modules():
        if isinstance(module, Block):
            module.compile(fullgraph=True, dynamic=False, backend=backend)


def update_of(learner: Learner, batch: Batch, context_weight: float, mode: str = "eager") -> Callable[[], Tensor]:
    """A function that makes one update with always the same views and returns the loss on the device.

    With a graph, the first WARM_UP updates are made here. Nothing in it waits for the device.
    """
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {mode}")
    runtime = learner.runtime
    views = make_inputs(learner.config, learner.preprocessing, runtime, batch).views
    (weight,), made = runtime.numbers(context_weight), torch.ones((), dtype=torch.bool, device=runtime.device)
    if mode.startswith("compiled"):
        compile_blocks(learner.model, runtime.device.type)

    def update() -> Tensor:
        with runtime.autocast():
            loss = learner.compiled(views, weight).loss
        loss.backward()
        runtime.clip(learner.trained, learner.config.clip_grad_norm)
        learner.update(made)
        return loss.detach()

    if "graph" not in mode:
        return update
    for group in learner.optimizer.param_groups:
        group["capturable"] = True
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            update()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        loss = update()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay
