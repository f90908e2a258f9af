"""Something to learn in a second: participants of three grades, which differ in brightness."""

import pytest

from support.finetune_runs import write_labels
from support.small_store import darkened, small_store


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("store") / "prepared", darkened)


@pytest.fixture(scope="module")
def labels(tmp_path_factory):
    return write_labels(tmp_path_factory.mktemp("labels") / "labels.tsv")
