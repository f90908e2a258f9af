"""Embed a store: one vector per acquisition, written as parquet with a key of everything the vectors depend on."""

import json
import shlex
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from octfm.encoder.encoder import AT_RANDOM, Encoder, load_encoder
from octfm.errors import Echo, EvaluationError, shown
from octfm.io.hashing import hash_text
from octfm.io.location import Location, expect_writable, from_json, local_path, location, write_whole
from octfm.io.parquet import from_parquet, to_parquet
from octfm.io.progress import Progress
from octfm.run.bucket import local_run
from octfm.run.checkpoint_files import before_newest, named_in
from octfm.run.runtime import torch_threads
from octfm.store.layout import Arrays
from octfm.store.store import Store
from octfm.volume.preprocessing import Preprocessing

L = TypeVar("L", bound=Location)
BATCH = 16
"""Volumes per batch, shared by the threads."""
OWN_BATCH = 8
"""Volumes that a user's own encoder gets at a time."""
HISTOGRAM_BINS = 64
QUALITY = ("signal", "noise", "contrast", "saturated")
"""Signal: 99th percentile of the grey levels less their median in the vitreous. Noise: standard deviation in the
vitreous. Contrast: signal over noise. Saturated: share of the image at the highest grey level."""
ABOVE = 8
"""Rows above the tissue band that still count as tissue: the band's upper surface may lie a little too deep."""
WORDS = ("acquisition", "participant", "eye_id", "laterality", "scanner", "protocol", "split")
"""Columns of an embeddings file that describe the acquisition."""
RANDOM_INIT = ("random_init", "random_init_2", "random_init_3")
"""The same network before its first update: as drawn by the run's seed, and by two other seeds."""
NAMES = ("pretrained", *RANDOM_INIT, "histogram", "tissue_map", "image_quality")
"""Files from which the arms of every result are made (octfm.evaluation.arms), the encoder of interest first."""
SINGLE_SCANS = "single scans"
"""Value of `of` in the metadata of embed_scans' files: these and a store's vectors must not replace each other."""


def embedding_files(run: str | Location, folder: str | Location | None = None) -> list[Location]:
    """The embeddings files of a run, in RUN/embeddings or in `folder` (also in a bucket), in the order of NAMES. Raises
    EvaluationError if there are none, or if they do not belong together."""
    where = location(folder) if folder is not None else location(run) / "embeddings"
    found = [where / f"{name}.parquet" for name in NAMES if (where / f"{name}.parquet").is_file()]
    own = location(run) / f"{NAMES[0]}.parquet"
    if not found and folder is None and own.is_file():
        maker = facts_of(own).get("encoder", "RUN")
        words = shlex.join([str(maker), "--embeddings", str(run)])
        raise EvaluationError(f"{run}: holds embeddings, not a run; name the encoder that made them too: {words}")
    if not found and folder is None and not (location(run) / "config.yaml").is_file():
        raise EvaluationError(f"{run}: no run here (config.yaml is missing); expected a folder of octfm pretrain")
    if not found:
        command = shlex.join(["octfm", "embed", str(run), "--store", "prepared"])
        raise EvaluationError(f"{where}: no embeddings; make them with `{command}`")
    _expect_one_origin({file: facts_of(file) for file in found})
    return found


def _expect_one_origin(files: Mapping[Location, Mapping[str, Any]]) -> None:
    """Raise EvaluationError if the first file is of other volumes than another one, or a random initialisation of
    another encoder: octfm embed writes them one by one. Files of earlier versions do not name their volumes."""
    (first, facts), *others = files.items()
    for file, own in others:
        volumes = {each["voxels"] for each in (facts, own) if "voxels" in each}
        drawn, is_drawn, _ = str(own.get("encoder", "")).partition(AT_RANDOM)
        run = Path(drawn).parents[1] if named_in(drawn) else Path(drawn)
        if len(volumes) > 1:
            what = f"of other volumes than {first.name}"
        elif is_drawn and not Path(facts.get("encoder", "")).resolve().is_relative_to(run.resolve()):
            what = f"of {drawn}, and {first.name} is of {facts.get('encoder')}"
        else:
            continue
        raise EvaluationError(
            f"{file}: {what}: octfm embed is still writing into this folder, was stopped, or wrote another encoder's "
            "vectors there; embed again, into a folder of its own"
        )


def other_vectors(run: str | Location, file: Location) -> str | None:
    """A sentence about vectors in a folder of their own that were not made with the weights of `run`; else None."""
    facts = facts_of(file)
    if file.stem != NAMES[0] or facts.get("weights") in (None, load_encoder(run).digest):
        return None
    return (
        f"{file}: vectors of {facts.get('encoder')}, which are not by the weights of {run}; participants that were "
        f"trained on are those of {run}"
    )


def older_vectors(run: str | Location, file: Location) -> str | None:
    """A sentence about vectors of a run that are not those of its newest checkpoint, as after more training; else
    None."""
    names = before_newest(facts_of(file).get("encoder", ""), local_run(run))
    if names is None:
        return None
    words = shlex.join(["octfm", "embed", str(run), "--store", "prepared"])
    return f"{file}: vectors of {names[0]}; the newest checkpoint of this run is {names[1]}, which `{words}` embeds"


def embed_store(encoder: Encoder, store: Store, out: str | Path, name: str = "pretrained", echo: Echo = print) -> Path:
    """Write `<out>/<name>.parquet`: one float32 vector for every volume of the store.

    Raises EvaluationError if the store was prepared with other settings than the encoder was trained on, and if the
    file holds vectors of embed_scans.
    """
    encoder = encoder.reading(store)
    target = local_path(out) / f"{name}.parquet"
    before = facts_to_replace(target)
    key = f"{encoder.vector_key}-{_voxels_of(store)}"
    facts = encoder_facts(encoder) | {"key": key, "name": name}
    if before.get("key") == key:
        # The file is still written again, because splits and labels may have changed since.
        echo(f"{target}: vectors of these weights and volumes are already there")
        vectors = np.array(from_parquet(target)["vector"].to_pylist(), np.float32)
    else:
        expect_writable(target.parent)
        threads = torch.get_num_threads() if encoder.runtime.device.type == "cpu" else 1
        vectors = _in_batches(store, encoder.embed_arrays, encoder.vector_width, name, threads)
    return write_rows(out, store, vectors, facts)


def facts_to_replace(target: Path) -> dict[str, Any]:
    """`facts_of` a file that a store's vectors are to replace. Raises EvaluationError if it is of embed_scans."""
    facts = facts_of(target)
    if facts.get("of") == SINGLE_SCANS:
        raise EvaluationError(f"{target}: holds vectors of single scans; choose another --out, or remove the file")
    return facts


def encoder_facts(encoder: Encoder) -> dict[str, str]:
    """Metadata of an embeddings file: whose vectors they are."""
    return {
        "key": encoder.vector_key,
        "encoder": encoder.source,
        "weights": encoder.digest,
        "precision": encoder.runtime.precision,
        "pool": encoder.config.objective.pool,
        "readout": encoder.readout,
    }


def histogram_baseline(store: Store, out: str | Path) -> Path:
    """Write `<out>/histogram.parquet`, a baseline of every result: a 64-bin histogram of the image voxels."""
    vectors = _in_batches(store, histogram, HISTOGRAM_BINS, "histogram")
    return write_rows(out, store, vectors, histogram_facts(store.fingerprint))


def quality_baseline(store: Store, out: str | Path) -> Path:
    """Write `<out>/image_quality.parquet`: the numbers of QUALITY for every volume, for the arm of covariates."""
    vectors = _in_batches(store, image_quality, len(QUALITY), "image quality")
    return write_rows(out, store, vectors, facts_without_weights("image_quality", "image quality", store.fingerprint))


def embed_with(embed: Callable[[np.ndarray], np.ndarray], store: Store, out: str | Path, name: str) -> Path:
    """Write `<out>/<name>.parquet` with your own encoder, a function from voxels to vectors.

    It gets uint8 voxels [B, D, H, W] and returns vectors [B, width], an array or a tensor. Raises EvaluationError if it
    returns another shape, NaN or infinity.
    """
    if not isinstance(store, Store) or not len(store):
        raise TypeError(f"store: expected a Store with volumes, got {shown(store)}; octfm.Store.open opens one")
    expect_writable(local_path(out))
    vectors = own_vectors(embed, store, np.arange(len(store)), name).astype(np.float32)
    return write_rows(out, store, vectors, facts_without_weights(name, name, _voxels_of(store)))


def own_vectors(embed: Callable[[np.ndarray], np.ndarray], store: Store, rows: np.ndarray, name: str) -> np.ndarray:
    """float64 [N, width]: vectors of these rows by a user's own encoder. Raises EvaluationError as `embed_with`."""
    batches, found = [rows[first : first + OWN_BATCH] for first in range(0, len(rows), OWN_BATCH)], []
    with Progress(f"embed with {name}", len(rows)) as progress:
        for own, arrays in _read_ahead(store, batches):
            vectors = as_array(embed(arrays.voxels))
            # The first batch sets the width of all others.
            width = found[0].shape[1] if found else vectors.shape[-1] if vectors.ndim else 0
            if vectors.shape != (len(own), width) or not width:
                expected = f"[{len(own)}, {width or 'width'}]"
                raise EvaluationError(f"{name}: expected vectors {expected}, got {list(vectors.shape)}")
            # As float32, in which vectors are stored.
            if (bad := np.flatnonzero(~(np.abs(vectors) <= np.finfo(np.float32).max).all(1))).size:
                which = arrays.acquisition[bad[0]]
                raise EvaluationError(f"{name}: expected finite vectors, got NaN or infinity for {which}")
            found.append(vectors)
            progress.advance(len(own))
    return np.concatenate(found)


def as_array(numbers: Any) -> np.ndarray:
    """A float64 array of an array or a tensor, on any device, with or without a gradient. Raises TypeError for complex
    numbers, whose imaginary parts NumPy would drop."""
    if isinstance(numbers, torch.Tensor):
        numbers = numbers.detach().cpu()
        numbers = numbers if numbers.is_complex() else numbers.double()  # NumPy lacks bfloat16
    array = np.asarray(numbers)
    if np.iscomplexobj(array):
        raise TypeError(f"expected real numbers, got {array.dtype}")
    return np.asarray(array, np.float64)


def histogram(arrays: Arrays) -> np.ndarray:
    """float32 [B, 64]: normalised histogram of the grey values of image voxels (`Arrays.valid`)."""
    histograms = []
    for voxels, image in zip(arrays.voxels, _image(arrays), strict=True):
        counts = np.bincount(voxels[image] // (256 // HISTOGRAM_BINS), minlength=HISTOGRAM_BINS)
        histograms.append(counts / max(1, counts.sum()))
    return np.array(histograms, np.float32)


def image_quality(arrays: Arrays) -> np.ndarray:
    """float32 [B, 4], see QUALITY, of image voxels (`Arrays.valid`); without vitreous, all image voxels stand in for
    it."""
    rows = np.arange(arrays.voxels.shape[2])[:, None]
    found = []
    for voxels, band, image in zip(arrays.voxels, arrays.band, _image(arrays), strict=True):
        vitreous = image & (rows < band[0][:, None, :] - ABOVE)
        grey = voxels[image].astype(np.float32)
        dark = voxels[vitreous].astype(np.float32) if vitreous.any() else grey
        if not grey.size:
            found.append(np.zeros(len(QUALITY)))
            continue
        signal, noise = np.percentile(grey, 99) - np.median(dark), max(float(dark.std()), 1.0)
        found.append([signal, noise, signal / noise, np.mean(grey == 255)])
    return np.array(found, np.float32)


def _image(arrays: Arrays) -> Iterator[np.ndarray]:
    """bool [D, H, W] of each volume: voxels of the image, not padding."""
    rows = np.arange(arrays.voxels.shape[2])[:, None]
    return ((rows >= first[:, None]) & (rows < end[:, None]) for first, end in arrays.valid)


def histogram_facts(fingerprint: str) -> dict[str, str]:
    """Metadata of an embeddings file of histograms."""
    return facts_without_weights("histogram", "intensity histogram", f"{HISTOGRAM_BINS}-{fingerprint}")


def facts_without_weights(name: str, about: str, of: str) -> dict[str, str]:
    """Metadata of an embeddings file whose vectors no weights of octfm made; `of`: what else they depend on."""
    return {"key": f"{name}-{of}", "encoder": about, "name": name, "precision": "fp32"}


def _voxels_of(store: Store) -> str:
    """Identifies the volumes of a store and their order."""
    return hash_text("\n".join(f"{row.acquisition} {row.checksum}" for row in store.rows))[:16]


def facts_of(path: Location) -> dict[str, Any]:
    """Metadata of an embeddings file; empty if there is none, or none that can be read."""
    import pyarrow as pa

    if not path.is_file():
        return {}
    try:
        return from_json((from_parquet(path).schema.metadata or {}).get(b"octfm", b"{}"))
    except pa.ArrowInvalid:
        return {}


def _in_batches(
    store: Store, describe: Callable[[Arrays], np.ndarray], width: int, name: str, threads: int = 1
) -> np.ndarray:
    """float32 [N, width]: `describe` applied to all volumes of a store; `name` of the encoder is shown as progress.

    With several threads, which `describe` must allow, each works on different volumes with its share of the cores,
    because the matrix products of small networks are too small to be divided.
    """
    vectors, size = np.empty((len(store), width), np.float32), max(1, BATCH // threads)
    batches = [np.arange(first, min(first + size, len(store))) for first in range(0, len(store), size)]

    def fill(rows: np.ndarray, arrays: Arrays) -> int:
        vectors[rows] = describe(arrays)
        return len(rows)

    with Progress(f"embed with {name}", len(store)) as progress:
        if threads == 1:  # in the caller's thread, because some of torch's settings are per thread
            for rows, arrays in _read_ahead(store, batches):
                progress.advance(fill(rows, arrays))
            return vectors
        share = max(1, torch.get_num_threads() // threads)
        with torch_threads(share), ThreadPoolExecutor(threads, "octfm-embed") as pool:
            waiting: deque[Future[int]] = deque()
            for rows in batches:
                waiting.append(pool.submit(fill, rows, store.read(rows)))
                if len(waiting) > threads:
                    progress.advance(waiting.popleft().result())
            for done in waiting:
                progress.advance(done.result())
    return vectors


def _read_ahead(store: Store, batches: Sequence[np.ndarray]) -> Iterator[tuple[np.ndarray, Arrays]]:
    """Rows and their volumes; the next ones are read while the caller, or its device, works on these."""
    with ThreadPoolExecutor(1, "octfm-read") as reader:
        reading = [reader.submit(store.read, rows) for rows in batches[:1]]
        for place, rows in enumerate(batches, 1):
            arrays = reading.pop().result()
            reading += [reader.submit(store.read, following) for following in batches[place : place + 1]]
            yield rows, arrays


def write_rows(out: str | Path, store: Store, vectors: np.ndarray, facts: dict[str, Any]) -> Path:
    """Write `<out>/<name>.parquet`, vectors [N, width] in the order of a store; `facts` hold the name."""
    path, facts = local_path(out) / f"{facts['name']}.parquet", facts | {"voxels": _voxels_of(store)}
    return write_vectors(path, [vars(row) for row in store.rows], vectors, facts, store.preprocessing)


def write_vectors(
    path: L, rows: Sequence[Mapping[str, Any]], vectors: np.ndarray, facts: dict[str, Any], preprocessing: Preprocessing
) -> L:
    """Write an embeddings file for `read_embeddings`: columns of metadata, and `vectors` float32 [N, width]."""
    import pyarrow as pa

    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in WORDS}
    columns["participant_labels"] = [json.dumps(row["participant_labels"]) for row in rows]
    columns["vector"] = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1]).cast(
        pa.list_(pa.float32())
    )
    facts = facts | {"preprocessing": preprocessing.model_dump(mode="json"), "width": int(vectors.shape[1])}
    write_whole(path, to_parquet(pa.table(columns).replace_schema_metadata({"octfm": json.dumps(facts)})))
    return path
