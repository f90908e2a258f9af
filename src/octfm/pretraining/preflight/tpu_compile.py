"""Compile a recorded step for a TPU slice and write its memory use to compiled.json.

Run as `python -m octfm.pretraining.preflight.tpu_compile DIR v4:2x2x4`. libtpu compiles ahead of time and needs no TPU;
JAX is its interface.
"""

# JAX and libtpu are installed in an environment of their own (tests/xla).
# pyright: reportMissingImports=false

import io
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def annotate(main: Any, split: list[bool], devices: int, ir: Any) -> None:
    """Mark arguments that are split among the devices, and results that may reuse an argument's memory."""
    if len(split) != len(main.arguments):
        raise SystemExit(f"{len(split)} arguments were recorded, the program has {len(main.arguments)}")
    # A result of a replicated argument's type (weights, moments) takes its place in memory, as in a real step.
    free: dict[str, list[int]] = {}
    for number, result in enumerate(main.type.results):
        free.setdefault(str(result), []).append(number)
    attributes = []
    for argument, is_split in zip(main.arguments, split, strict=True):
        kind = str(argument.type)
        # Split along the first axis: a tensor type of n axes has n "x", as in tensor<8x3xf32>.
        sharding = f"{{devices=[{devices}{',1' * (kind.count('x') - 1)}]<=[{devices}]}}" if is_split else "{replicated}"
        marks = {"mhlo.sharding": ir.StringAttr.get(sharding)}
        if not is_split and free.get(kind):
            marks["tf.aliasing_output"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), free[kind].pop(0))
        attributes.append(ir.DictAttr.get(marks))
    main.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes)


def unpack_truths(program: str) -> str:
    """Unpack boolean constants: torch_xla's MLIR writes eight to a byte, JAX's reads one per byte."""

    def unpack(found: re.Match[str]) -> str:
        packed, shape = np.frombuffer(bytes.fromhex(found[1]), np.uint8), found[2]
        count = int(np.prod([int(n) for n in shape.split("x")]))
        unpacked = np.unpackbits(packed, count=count, bitorder="little").tobytes().hex().upper()
        return f'dense<"0x{unpacked}"> : tensor<{shape}xi1>'

    return re.sub(r'dense<"0x([0-9A-F]+)"> : tensor<([0-9x]+)xi1>', unpack, program)


def compile_for(folder: Path, topology: str) -> dict[str, Any]:
    """Fields of `tpu.Compiled` for the program in `folder`."""
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax.experimental import topologies
    from jaxlib.mlir import ir

    arguments = json.loads((folder / "arguments.json").read_text("utf-8"))
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology, chip_config_name="megacore").devices
    count = len(devices)
    if count != arguments["devices"]:
        raise SystemExit(f"{topology} has {count} devices, the step was recorded for {arguments['devices']}")
    options = xla_client.CompileOptions()
    build = options.executable_build_options
    options.num_replicas, options.num_partitions = 1, count
    build.num_replicas, build.num_partitions, build.use_spmd_partitioning = 1, count, True
    build.use_shardy_partitioner = False  # mhlo.sharding is for GSPMD
    build.allow_spmd_sharding_propagation_to_output = [True]
    build.device_assignment = xla_client.DeviceAssignment.create(np.array([d.id for d in devices]).reshape(1, count))
    begun = time.perf_counter()
    with mlir.make_ir_context():
        module = ir.Module.parse(unpack_truths((folder / "step.mlir").read_text("utf-8")))
        annotate(module.body.operations[0], arguments["split"], count, ir)
        module.operation.write_bytecode(io.BytesIO())
        try:
            program = devices[0].client.compile(module, xla_client.DeviceList(tuple(devices)), options)
        except Exception as error:
            if "exceeds available HBM" not in str(error) and "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return {"trouble": _too_large(str(error)), "seconds": time.perf_counter() - begun}
    memory = program.get_compiled_memory_stats()
    return {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "results": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "seconds": time.perf_counter() - begun,
    }


def _too_large(message: str) -> str:
    found = re.search(r"temporaries \(([\d.]+)G\) exceeds available HBM \(([\d.]+)G\)", message)
    if not found:
        return f"does not fit: {' '.join(message.split())[:200]}"
    return f"does not fit: {found[1]} GiB of temporaries on a device that has {found[2]}"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "compiled.json").write_text(json.dumps(compile_for(folder, sys.argv[2])), "utf-8")
