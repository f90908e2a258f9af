"""Names and birth dates stay in the files: not in the catalog, the store, the page, nor in anything that is printed."""

import csv
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from octfm.catalog.catalog import Catalog
from octfm.store.store import Store
from support.canaries import SPACING_MM, everything_in, eye
from support.command_line import octfm_command
from support.dicom_files import BIRTH_DATE, PATIENT_NAME, write_oct_dicom

SECRETS = (*PATIENT_NAME.split("^"), BIRTH_DATE, "1950-01-02", "Geheim")


@pytest.fixture(scope="module")
def clinic(tmp_path_factory) -> Path:
    """Good, damaged and rejected files with a name and a birth date in each, and a table that has them too."""
    root = tmp_path_factory.mktemp("work") / "clinic"
    for i in range(4):
        write_oct_dicom(root / f"{i}.dcm", eye(i), SPACING_MM, participant=f"p{i}", sop_instance_uid=f"1.2.{i}")
    whole = (root / "0.dcm").read_bytes()
    (root / "cut.dcm").write_bytes(whole[: len(whole) // 2])
    (root / "header.dcm").write_bytes(whole[: whole.index(b"Planted") + 3])
    (root / "garbled.dcm").write_bytes(whole.replace(b"PN", b"\xff\xff", 1))
    frames = b"\x28\x00\x08\x00IS\x02\x0016"
    assert frames in whole
    # What a parser quotes in its errors and warnings.
    (root / "quoted.dcm").write_bytes(whole.replace(frames, b"\x28\x00\x08\x00IS\x08\x00Planted "))
    with (root / "participants.tsv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["person_id", "PatientName", "dateOfBirth", "surname", "age"], delimiter="\t")
        table.writeheader()
        for i in range(4):
            table.writerow(
                {
                    "person_id": f"p{i}",
                    "PatientName": PATIENT_NAME,
                    "dateOfBirth": "1950-01-02",
                    "surname": "Geheim",
                    "age": 71,
                }
            )
    return root


def test_no_log_record_quotes_a_file(clinic, caplog):
    from octfm.catalog.scan import scan

    with caplog.at_level(logging.DEBUG):
        scan(clinic)
    assert not any(secret in record.getMessage() for record in caplog.records for secret in SECRETS)


GUARD = """
import socket

def refused(name):
    kept = getattr(socket.socket, name)

    def call(self, *args):
        if self.family == socket.AF_UNIX:
            return kept(self, *args)
        with open({asked!r}, "a") as file:
            print(name, args[-1], file=file)
        raise OSError("no network here")

    setattr(socket.socket, name, call)

for name in ("connect", "connect_ex", "sendto"):
    refused(name)
"""
"""Python imports sitecustomize when it starts, so that it holds for every child process, too."""


VERBS = {
    "data": (
        ("scan", "clinic", "--out", "catalog"),
        ("prepare", "catalog", "image_size=[16,96,96]", "target_spacing=[0.24,0.015,0.05]"),
        ("view", "clinic/0.dcm"),
    ),
    "run": (
        ("pretrain", "vit_s", "--smoke", "--out", "run"),
        ("report", "run"),
        ("view", "clinic/0.dcm", "--run", "run"),
    ),
}


@contextmanager
def guarded(folder: Path) -> Iterator[Path]:
    """Processes that start meanwhile get no connection; the file names those that they ask for."""
    asked = folder / "asked.txt"
    (folder / "guard").mkdir(exist_ok=True)
    (folder / "guard" / "sitecustomize.py").write_text(GUARD.format(asked=str(asked)))
    path = os.pathsep.join([str(folder / "guard"), *filter(None, [os.environ.get("PYTHONPATH")])])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        yield asked


@pytest.fixture(scope="module")
def data(clinic) -> list[tuple[int, str, str]]:
    """Code and output of verbs that read the clinic, none of which gets a connection."""
    with guarded(clinic.parent):
        return [octfm_command(*words, cwd=clinic.parent) for words in VERBS["data"]]


def test_no_name_or_birth_date_reaches_catalog_page_store_or_terminal(clinic, data):
    assert all(secret.encode() in everything_in(clinic) for secret in SECRETS), "they must be there to leak"
    work = clinic.parent
    catalog, store = Catalog.load(work / "catalog"), Store.open(work / "prepared")
    assert len(catalog.acquisitions) == len(store) == 4 and len(catalog.rejects) == 4
    # Parquet is compressed: its rows are looked at as text, everything else as bytes.
    found = str(asdict(catalog)) + str([asdict(row) for row in store.rows]) + repr(store.unprepared()) + str(data)
    raw = everything_in(work / "catalog") + everything_in(work / "prepared")
    for secret in SECRETS:
        assert secret not in found and secret.encode() not in raw, secret
    assert {a.participant_labels["age"] for a in catalog.acquisitions} == {"71"}


@pytest.mark.parametrize("kind", ["data", pytest.param("run", marks=pytest.mark.slow)])
def test_nothing_leaves_the_machine_unless_it_is_asked_to(clinic, data, kind):
    """No verb opens a connection: not to a tracker, a hub, a font or a counter of users."""
    with guarded(clinic.parent) as asked:
        said = data if kind == "data" else [octfm_command(*words, cwd=clinic.parent) for words in VERBS["run"]]
    assert all(code == 0 for code, *_ in said), said
    assert not asked.exists(), asked.read_text()


def test_the_guard_guards(tmp_path):
    with guarded(tmp_path) as asked:
        code = "import socket; socket.create_connection(('127.0.0.1', 9))"
        refused = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert refused.returncode and b"no network here" in refused.stderr and "127.0.0.1" in asked.read_text()
