"""A clinic with secrets in every place that can hold one, and a search that finds them in whatever octfm writes."""

import base64
import contextlib
import csv
import gzip
import io
import json
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from pydicom.datadict import DicomDictionary

from support.dicom_files import write_oct_dicom

MARK = "zqxkanari"
"""In every secret word, in any case; nine letters are not met by chance."""
SECRETS = (MARK.encode(), b"19571203", b"1957-12-03", b"03.12.1957", b"2.826.0.998877", b"2023-05-17", b"20230517")
SPACING_MM, SHAPE = (0.24, 0.015, 0.05), (16, 96, 96)
_TEXTS = {"LO": 60, "SH": 16, "PN": 60, "LT": 200, "ST": 200, "UT": 200, "UC": 200}


def write_clinic(folder: Path, people: int = 11) -> Path:
    """One eye of each person as DICOM, one in a ZIP, one as an array with a sidecar; broken files; tables. Secrets
    everywhere."""
    root = folder / f"{MARK}_klinik"
    rows = []
    for i in range(people):
        person = f"{MARK}{1000 + i}"
        path = root / f"{MARK}_Anna_1957-12-03_{i}" / f"{MARK}-{i}.dcm"
        named = (
            {"manufacturer": f"{MARK} Works", "model": f"{MARK} 5", "protocol": f"{MARK} cube"}
            if i in (0, 1, 7, 8)
            else {}
        )
        write_oct_dicom(
            path, eye(i), SPACING_MM, participant=person, laterality="RL"[i % 2], sop_instance_uid=f"1.2.826.0.998877.{i}",
            edit=plant, superior_first=True, **named,
        )  # fmt: skip
        rows.append(
            {
                "person_id": person, "age": 60 + i, "study_group": ("healthy", "insulin_dependent")[i % 2], "study_visit_date": "2023-05-17",
                "recommended_split": "train" if i < 6 else "val" if i == 6 else "test", "clinical_site": f"{MARK} hospital",
                "diagnosis": f"seen by Dr {MARK}" if i % 2 else "healthy", "vorname": f"{MARK}", "geboren": "03.12.1957", "remarks": f"{MARK} 3",
                f"{MARK}_column": ("TRUE", MARK)[i % 2], "sex": f"{MARK}"[:9] if i == 1 else "F",
            }
        )  # fmt: skip
    with (root / "participants.tsv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), delimiter="\t")
        table.writeheader()
        table.writerows(rows)
    first = next(root.rglob("*.dcm"))
    with zipfile.ZipFile(root / f"{MARK}.zip", "w") as archive:
        write_oct_dicom(
            folder / "member.dcm",
            eye(98),
            SPACING_MM,
            participant=f"{MARK}98",
            sop_instance_uid="1.2.826.0.998877.98",
            edit=plant,
        )
        archive.write(folder / "member.dcm", f"{MARK}/Anna {MARK}/scan.dcm")
        archive.writestr(f"{MARK}/broken {MARK}.dcm", first.read_bytes()[:3000])
    np.savez(root / f"{MARK}_99.npz", volume=eye(99))
    (root / f"{MARK}_99.json").write_text(
        json.dumps(
            {
                "spacing_mm": SPACING_MM,
                "participant": f"{MARK}99",
                "scanner": MARK,
                "protocol": MARK,
                "laterality": "OD",
            }
        )
    )
    whole = first.read_bytes()
    (root / f"{MARK}_cut.dcm").write_bytes(whole[: len(whole) // 2])
    (root / f"{MARK}_text.dcm").write_text(MARK)
    return root


def plant(dataset) -> None:
    """A secret in every text that DICOM knows and that is not set, in private ones, and in dates."""
    for tag, (vr, _, _, _, keyword) in DicomDictionary.items():
        if vr in _TEXTS and tag >> 16 > 8 and keyword and keyword not in dataset:
            setattr(dataset, keyword, f"{MARK} {keyword}"[: _TEXTS[vr]])
    dataset.InstitutionName = dataset.StationName = dataset.StudyDescription = dataset.SeriesDescription = MARK
    dataset.ReferringPhysicianName = dataset.OperatorsName = f"{MARK}^Anna"
    dataset.PatientName, dataset.PatientBirthDate = f"{MARK}^Anna", "19571203"
    dataset.StudyDate = dataset.SeriesDate = dataset.ContentDate = dataset.AcquisitionDate = "20230517"
    dataset.StudyInstanceUID, dataset.SeriesInstanceUID = "1.2.826.0.998877.1000", "1.2.826.0.998877.1001"
    block = dataset.private_block(0x0011, MARK, create=True)
    block.add_new(1, "LO", f"{MARK} private")


def eye(seed: int) -> np.ndarray:
    """Bright bands in noise, uint8 [16, 96, 96]."""
    rng = np.random.default_rng(seed)
    rows = np.arange(SHAPE[1])[None, :, None]
    top = 30 + rng.uniform(-5, 5) + rng.uniform(-0.1, 0.1) * np.arange(SHAPE[2])[None, None, :]
    bands = sum(gain * np.exp(-((rows - top - at) ** 2) / 10) for at, gain in ((2, 0.6), (10, 0.4), (20, 1.0)))
    return np.clip(255 * (0.1 + 0.7 * bands + rng.normal(0, 0.06, SHAPE)), 0, 255).astype(np.uint8)


def leaks(*places: Path) -> list[str]:
    """Every file below these places that holds a secret in its name or its content, whatever it is packed in."""
    files = [
        path
        for place in places
        for path in ([place] if place.is_file() else sorted(place.rglob("*")))
        if path.is_file()
    ]
    assert files, f"nothing was written to {places}"
    found = []
    for path in files:
        for where, data in [("its name", path.name.encode()), *unpacked(path.name, path.read_bytes())]:
            texts = (data.lower(), data.lower().replace(b"\0", b""))  # numpy's texts have four bytes a letter
            found += [
                f"{path}: {secret.decode()} in {where}" for secret in SECRETS if any(secret in text for text in texts)
            ]
    return found


def unpacked(name: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    """The bytes of a file, and those of everything inside it: members, compressed texts, columns, embedded pictures."""
    yield name, data
    if data[:4] in (b"PK\x03\x04", b"PK\x05\x06") and zipfile.is_zipfile(io.BytesIO(data)):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for member in archive.infolist():
                yield f"{name}!{member.filename}", member.filename.encode() + member.comment
                yield from unpacked(f"{name}!{member.filename}", archive.read(member))
    elif data[:3] == b"\x1f\x8b\x08":
        with contextlib.suppress(OSError, EOFError, zlib.error):  # three bytes that numbers have by chance
            yield from unpacked(f"{name} (gzip)", gzip.decompress(data))
    elif data[:4] == b"PAR1":
        import pyarrow.parquet as pq

        table = pq.read_table(io.BytesIO(data))
        yield f"{name} (columns)", repr((table.schema.metadata, table.drop_columns(
            [c for c in table.column_names if "vector" in c])
            .to_pylist())).encode()  # fmt: skip
    elif data[:8] == b"\x89PNG\r\n\x1a\n":
        at = 8
        while at < len(data):
            (length,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
            text = data[at + 8 : at + 8 + length]
            if kind in (b"zTXt", b"iTXt", b"eXIf", b"iCCP"):
                for start in [i for i in range(len(text)) if text[i : i + 1] == b"\x78"]:
                    try:
                        yield f"{name} ({kind.decode()})", zlib.decompress(text[start:])
                        break
                    except zlib.error:
                        continue
            at += 12 + length
    elif b"base64," in data:
        for code in re.findall(rb"base64,([A-Za-z0-9+/=]+)", data):
            yield from unpacked(f"{name} (embedded)", base64.b64decode(code))


def everything_in(folder: Path) -> bytes:
    return b"\n".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())
