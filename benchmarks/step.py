"""Training step of octfm compared with facebookresearch/vjepa2: `python benchmarks/step.py --peer VJEPA2_CLONE`.

Forward, backward, optimizer and EMA of one micro-batch: the same encoder (384 x 12, 64-wide heads), predictor (192 x 6,
32-wide heads), context and target tokens, random voxels. Every arm is a separate process; steps of all arms alternate,
so that other load on the machine affects all alike. Printed: median wall and CPU seconds per step, their ratios to the
peer (median over rounds, of adjacent steps), peak resident memory beyond that after the imports, ATen dispatches other
than views, and GFLOP/s with those of a matrix product.

Arms:
  peer     vjepa2's VisionTransformer, VisionTransformerPredictor and AdamW, EMA as in its training loop; one mask set
  equal    octfm at equal work: no context loss, 32-wide predictor heads
  default  octfm as configured by default: context loss, 64-wide predictor heads
  budget   default with a budget of --budget kept tokens (if fewer than all)
On a loaded machine, compare CPU seconds.
"""

import argparse
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import types
from copy import deepcopy
from pathlib import Path

SIZES = {"16": (16, 128, 128), "32": (32, 192, 192), "64": (64, 384, 384)}
PATCH = (4, 16, 16)
WIDTH, DEPTH, HEADS = 384, 12, 6
PREDICTOR_WIDTH, PREDICTOR_DEPTH = 192, 6
SEEN = 0.4
"""Share of kept tokens used as context, as in vjepa2's first mask generator; all others are targets."""


def grid_of(size: tuple[int, int, int]) -> tuple[int, int, int]:
    d, h, w = (s // p for s, p in zip(size, PATCH, strict=True))
    return d, h, w


def resident(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key + ":"))
    return 1024 * int(line.split()[1])


def draw_masks(size, batch: int, budget: int | None):
    """Kept tokens [B, K], and context [B, C] and target [B, T] as sorted positions among them."""
    import numpy as np

    rng = np.random.default_rng(0)
    tokens = int(np.prod(grid_of(size)))
    keep = min(budget or tokens, tokens)
    kept, seen, asked = [], [], []
    for _ in range(batch):
        kept.append(np.sort(rng.permutation(tokens)[:keep]))
        order = rng.permutation(keep)
        count = round(SEEN * keep)
        seen.append(np.sort(order[:count]))
        asked.append(np.sort(order[count:]))
    return np.array(kept), np.array(seen), np.array(asked)


def build_peer(path: str, size, batch: int, device: str = "cpu", compiled: bool = False):
    """A function that runs one step of the peer; `compiled` as its training loop can."""
    import torch
    from torch.nn import functional as F

    # Stubs for packages that the peer imports but these modules never call: timm (stochastic depth 0) and einops.
    absent = {"timm.models.layers": ("drop_path", lambda x, rate, training: x), "einops": ("rearrange", None)}
    for module, (name, value) in absent.items():
        try:
            importlib.import_module(module)
        except ImportError:
            parts = module.split(".")
            for end in range(1, len(parts) + 1):
                parent = ".".join(parts[:end])
                sys.modules.setdefault(parent, types.ModuleType(parent))
            setattr(sys.modules[module], name, value)
    sys.path.insert(0, path)
    from src.masks.utils import apply_masks  # pyright: ignore[reportMissingImports]
    from src.models.predictor import vit_predictor  # pyright: ignore[reportMissingImports]
    from src.models.vision_transformer import VisionTransformer  # pyright: ignore[reportMissingImports]

    shape = {
        "img_size": size[1:],
        "patch_size": PATCH[1],
        "num_frames": size[0],
        "tubelet_size": PATCH[0],
        "use_rope": True,
        "use_sdpa": True,
    }
    with torch.device(device):
        encoder = VisionTransformer(**shape, in_chans=1, embed_dim=WIDTH, depth=DEPTH, num_heads=HEADS)
        predictor = vit_predictor(
            **shape,
            embed_dim=WIDTH,
            predictor_embed_dim=PREDICTOR_WIDTH,
            depth=PREDICTOR_DEPTH,
            num_heads=6,
            use_mask_tokens=True,
            num_mask_tokens=2,
        )
    target = deepcopy(encoder).requires_grad_(False)
    for network in (encoder, target, predictor) if compiled else ():
        network.compile()
    named = [(n, p) for module in (encoder, predictor) for n, p in module.named_parameters()]
    groups = [
        {"params": [p for n, p in named if "bias" not in n and p.ndim != 1]},
        {"params": [p for n, p in named if "bias" in n or p.ndim == 1], "weight_decay": 0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-4)
    _, seen, asked = (torch.from_numpy(m).to(device) for m in draw_masks(size, batch, None))
    voxels = torch.rand(batch, 1, *size, device=device)

    def step() -> None:
        with torch.no_grad():
            goal = F.layer_norm(target(voxels), (WIDTH,))
        answer = predictor(encoder(voxels, [seen]), [seen], [asked])
        loss = (answer - apply_masks(goal, [asked])).abs().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            averages, sources = list(target.parameters()), list(encoder.parameters())
            torch._foreach_mul_(averages, 0.999)
            torch._foreach_add_(averages, sources, alpha=0.001)

    return step


def build_ours(
    size,
    batch: int,
    budget: int | None,
    equal: bool,
    checkpointing: bool = False,
    device: str = "cpu",
    compiled: bool = False,
):
    """A function that runs one step of octfm; `checkpointing` recomputes activations instead of keeping them."""
    import torch

    from octfm.models.objectives.jepa import JEPA, JEPAConfig
    from octfm.models.objectives.objective import View
    from octfm.models.predictor import PredictorConfig
    from octfm.models.vit3d import TokenGrid, TokenIndex, ViTConfig, take_patches
    from octfm.pretraining.learner import optimizer_groups

    predictor = PredictorConfig(width=PREDICTOR_WIDTH, depth=PREDICTOR_DEPTH, heads=6 if equal else 3)
    grid = TokenGrid(grid_of(size), (0.375, 0.083, 0.25))
    encoder = ViTConfig(width=WIDTH, depth=DEPTH, heads=HEADS, activation_checkpointing=checkpointing)
    with torch.device(device):
        model = JEPA(JEPAConfig(), encoder, predictor, grid)
    if compiled:
        from gpu_step import compile_blocks

        compile_blocks(model, device)
    decayed, free = optimizer_groups(model)
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": free, "weight_decay": 0.0}], lr=1e-4, fused=True)
    index = TokenIndex(*(torch.from_numpy(m).to(device) for m in draw_masks(size, batch, budget)))
    voxels = torch.rand(batch, 1, *size, device=device)

    def step() -> None:
        patches = take_patches(voxels, index.kept, PATCH)
        loss = model([View(patches, patches, index)], 0.0 if equal else 0.5).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decayed + free, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        model.update_target(0.999)

    return step


def dispatches(step) -> int:
    """ATen operations of one step that are not views."""
    from torch.utils._python_dispatch import TorchDispatchMode

    count = 0

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal count
            count += func.namespace in ("aten", "mkldnn") and not func.is_view
            return func(*args, **(kwargs or {}))

    with Counter():
        step()
    return count


def worker(chosen: argparse.Namespace) -> None:
    """Serve requests on stdin: `step`, `count` or `memory`."""
    import torch

    import octfm.models.objectives.jepa
    import octfm.pretraining.inputs  # noqa: F401

    torch.manual_seed(0)
    size = SIZES[chosen.size]
    before = resident("VmRSS")
    if chosen.arm == "peer":
        bare = build_peer(chosen.peer, size, chosen.batch)
    else:
        bare = build_ours(size, chosen.batch, chosen.budget if chosen.arm == "budget" else None, chosen.arm == "equal")

    def step() -> None:
        # The same autocast for peer and octfm; running backward outside of it would change nothing for either.
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=chosen.precision == "bf16"):
            bare()

    for line in sys.stdin:
        if line.strip() == "step":
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            answer = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        elif line.strip() == "count":
            answer = {"count": dispatches(step)}
        else:
            answer = {
                "memory": resident("VmHWM") - before,
                "minor_faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt,
            }
        print(json.dumps(answer), flush=True)


class Arm:
    """A process that runs steps on request."""

    def __init__(self, name: str, size: str, precision: str, chosen: argparse.Namespace):
        self.name = name
        command = [
            sys.executable,
            __file__,
            "--worker",
            "--arm",
            name,
            "--size",
            size,
            "--precision",
            precision,
            "--batch",
            str(chosen.batch),
        ]
        command += ["--budget", str(chosen.budget), "--peer", chosen.peer]
        environment = {**os.environ, "OMP_NUM_THREADS": str(chosen.threads)}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.steps: list[dict[str, float]] = []

    def ask(self, what: str) -> dict[str, float]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"arm {self.name} ended: exit {self.process.wait()}")
        return json.loads(line)

    def end(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def flops(size, batch: int, budget: int | None, context_loss: bool) -> float:
    """Multiplications and additions of one step's matrix products."""
    tokens = min(budget or 10**9, grid_of(size)[0] * grid_of(size)[1] * grid_of(size)[2])
    seen, asked = round(SEEN * tokens), tokens - round(SEEN * tokens)

    def blocks(n: int, width: int, depth: int) -> float:
        return depth * (24 * n * width**2 + 4 * n**2 * width)

    voxels = 2 * PATCH[0] * PATCH[1] * PATCH[2] * WIDTH
    target = blocks(tokens, WIDTH, DEPTH) + tokens * voxels
    context = blocks(seen, WIDTH, DEPTH) + seen * voxels
    predictor = blocks(tokens, PREDICTOR_WIDTH, PREDICTOR_DEPTH) + 2 * PREDICTOR_WIDTH * WIDTH * (
        seen + (tokens if context_loss else asked)
    )
    return batch * (target + 3 * (context + predictor))


def matmul_peak(precision: str, threads: int) -> float:
    """GFLOP/s of a large matrix product with this number of threads."""
    dtype = "bfloat16" if precision == "bf16" else "float32"
    code = (
        f"import torch, time\na = torch.randn(2048, 2048, dtype=torch.{dtype})\na @ a\nbest = 9e9\n"
        "for _ in range(8):\n    t = time.perf_counter(); a @ a; best = min(best, time.perf_counter() - t)\n"
        "print(2 * 2048**3 / best / 1e9)"
    )
    return float(
        subprocess.check_output([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    )


def compare(size: str, precision: str, chosen: argparse.Namespace) -> dict:
    arms = [Arm(name, size, precision, chosen) for name in chosen.arms.split(",")]
    for arm in arms:
        arm.ask("step")
    for _ in range(chosen.rounds):
        for arm in arms:
            arm.steps.append(arm.ask("step"))
    rows = {}
    for arm in arms:
        memory = arm.ask("memory")["memory"]
        middle = {key: statistics.median(step[key] for step in arm.steps) for key in ("wall", "cpu")}
        budget = chosen.budget if arm.name == "budget" else None
        work = flops(SIZES[size], chosen.batch, budget, arm.name in ("default", "budget"))
        row = {
            **middle,
            "memory_gb": memory / 1e9,
            "dispatches": arm.ask("count")["count"] if chosen.dispatches else 0,
            "gflops_per_s": work / middle["wall"] / 1e9,
        }
        for key in ("wall", "cpu"):
            row[f"faster_{key}"] = statistics.median(
                p[key] / s[key] for p, s in zip(arms[0].steps, arm.steps, strict=True)
            )
        rows[arm.name] = row
        arm.end()
    print(
        f"\n{list(SIZES[size])} {precision}, {chosen.batch} volume(s), {chosen.threads} thread(s), "
        f"{chosen.rounds} rounds"
    )
    print(f"{'arm':<9}{'wall s':>9}{'cpu s':>9}{'x wall':>8}{'x cpu':>8}{'GB':>7}{'ops':>7}{'GFLOP/s':>9}")
    for name, r in rows.items():
        print(
            f"{name:<9}{r['wall']:>9.3f}{r['cpu']:>9.3f}{r['faster_wall']:>8.2f}{r['faster_cpu']:>8.2f}{r['memory_gb']:>7.2f}"
            f"{r['dispatches']:>7.0f}{r['gflops_per_s']:>9.0f}",
            flush=True,
        )
    return {"size": SIZES[size], "precision": precision, "arms": rows}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--peer", required=True, help="a clone of facebookresearch/vjepa2")
    arguments.add_argument("--sizes", default="16,32,64")
    arguments.add_argument("--precisions", default="bf16,fp32")
    arguments.add_argument("--arms", default="peer,equal,default,budget")
    arguments.add_argument("--batch", type=int, default=1, help="volumes per step")
    arguments.add_argument("--budget", type=int, default=3072)
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument(
        "--dispatches", action="store_true", help="count operators too, which takes one more step of each arm"
    )
    arguments.add_argument("--json", type=Path, help="also write the figures here")
    for name in ("--worker", "--arm", "--size", "--precision"):
        arguments.add_argument(name, help=argparse.SUPPRESS, **({"action": "store_true"} if name == "--worker" else {}))
    chosen = arguments.parse_args()
    if chosen.worker:
        worker(chosen)
        return
    for precision in chosen.precisions.split(","):
        print(f"matrix product, {precision}: {matmul_peak(precision, chosen.threads):.0f} GFLOP/s")
    rows = [
        compare(size, precision, chosen)
        for size in chosen.sizes.split(",")
        for precision in chosen.precisions.split(",")
    ]
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
