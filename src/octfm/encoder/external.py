"""Embed prepared volumes with an external encoder: a user-defined function that returns an embedding function.

    def my_encoder():               # called once; loads the weights
        network = ...
        def embed(voxels):          # uint8 [B, D, H, W] = (B-scan, axial, lateral), as in the store
            return network(...)     # numbers [B, width]
        return embed

Use it as `octfm trust RUN --external my_file.py:my_encoder`, or `package.module:my_encoder`. docs/external_encoder.py
is an example for 2-D networks.
"""

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np

from octfm.addresses import refuse_credentials
from octfm.encoder.embed import as_array, own_vectors
from octfm.encoder.embeddings import Embeddings
from octfm.errors import EvaluationError
from octfm.io.location import local_path
from octfm.store.store import Store

Embed = Callable[[np.ndarray], np.ndarray]
_ANY = (Exception, SystemExit)
"""What a user's code may raise. With SystemExit, as of a script written to be run, octfm would end as if done."""
_FOLDERS: set[Path] = set()
"""Folders of the files loaded so far."""


def load_external(spec: str) -> tuple[str, Embed]:
    """(name, embedding function) of `FILE.py:FUNCTION` or `module:FUNCTION`, whose code is executed.

    Raises EvaluationError if there is no such file or function, or if the code fails.
    """
    refuse_credentials(spec)
    where, colon, function = spec.rpartition(":")
    if not colon or not where or not function.isidentifier():
        raise EvaluationError(f"--external: expected FILE.py:FUNCTION or module:FUNCTION, got {spec!r}")
    path = local_path(where) if where.endswith(".py") else None
    module = _from_file(path, spec) if path else _by_name(where, spec)
    make = getattr(module, function, None)
    if not callable(make):
        own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        known = ", ".join(own) or "none"
        raise EvaluationError(f"--external {spec}: {where} has no function {function}; functions there: {known}")
    try:
        embed: Any = make()
    except _ANY as error:
        raise EvaluationError(f"--external {spec}: {function}() failed: {type(error).__name__}: {error}") from error
    if path:
        _refuse_modules_of_another_file(path.absolute().parent, spec)
    if not callable(embed):
        raise EvaluationError(
            f"--external {spec}: {function}() must return a function of voxels [B, D, H, W], got {type(embed).__name__}"
        )
    return function, cast(Embed, embed)


def embed_external(spec: str, store: Store, data: Embeddings, loaded: tuple[str, Embed]) -> Embeddings:
    """One vector for every row of `data`, in its order, from the volumes of `store`; `loaded`: `load_external(spec)`.

    Raises EvaluationError if the code fails, and on a wrong shape or NaN.
    """
    name, embed = loaded
    place = {row.acquisition: row.index for row in store.rows}
    rows = np.array([place[acquisition] for acquisition in data.acquisition.tolist()])

    def guarded(voxels: np.ndarray) -> np.ndarray:
        try:
            return as_array(embed(voxels))
        except _ANY as error:
            raise EvaluationError(
                f"--external {spec}: failed on voxels {voxels.shape}: {type(error).__name__}: {error}"
            ) from error

    vectors = own_vectors(guarded, store, rows, f"--external {spec}")
    metadata = {"encoder": f"external: {re.sub(r'.*/', '', spec)}"}
    return replace(data, name=name, path=spec, metadata=metadata, vectors=vectors)


def _from_file(path: Path, spec: str) -> ModuleType:
    if not path.is_file():
        raise EvaluationError(f"--external {spec}: no such file {path}")
    described = importlib.util.spec_from_file_location(f"octfm_external_{path.stem}", path)
    assert described is not None and described.loader is not None
    module = importlib.util.module_from_spec(described)
    sys.modules[described.name] = module  # where dataclasses look up their annotations
    if (folder := str(path.absolute().parent)) not in sys.path:
        sys.path.append(folder)  # for modules next to the file; at the end, where they hide no package
    try:
        described.loader.exec_module(module)
    except _ANY as error:
        raise EvaluationError(f"--external {spec}: {path} failed: {type(error).__name__}: {error}") from error
    return module


def _refuse_modules_of_another_file(folder: Path, spec: str) -> None:
    """Raise EvaluationError if Python took a module next to another file for the one of the same name in `folder`."""
    _FOLDERS.add(folder)
    for own in (*folder.glob("*.py"), *folder.glob("*/__init__.py")):
        name = own.relative_to(folder).parts[0].removesuffix(".py")
        taken = Path(getattr(sys.modules.get(name), "__file__", None) or own)
        if any(taken in (other / f"{name}.py", other / name / "__init__.py") for other in _FOLDERS - {folder}):
            raise EvaluationError(
                f"--external {spec}: its module {name} would be {taken}, imported for another file; rename one of "
                "the two modules"
            )


def _by_name(name: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except _ANY as error:
        raise EvaluationError(
            f"--external {spec}: cannot import {name} ({type(error).__name__}: {error}); "
            "install it, or give FILE.py:FUNCTION"
        ) from error
