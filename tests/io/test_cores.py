"""No more workers than cores that this process may use."""

import os

import pytest

from octfm.io import cores


@pytest.mark.parametrize(
    ("limit", "bound", "ranks", "expected"),
    [
        ("max 100000", 64, 1, 64),
        ("400000 100000", 64, 1, 4),
        ("50000 100000", 64, 1, 1),
        ("150000 100000", 64, 1, 2),
        ("", 3, 1, 3),
        ("", 64, 8, 8),
        ("", 8, 8, 8),  # each rank is bound to its own
        ("1600000 100000", 64, 8, 2),
    ],
)
def test_a_container_and_a_scheduler_may_leave_a_process_fewer_cores_than_the_host_has(
    tmp_path, monkeypatch, limit, bound, ranks, expected
):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(bound)), raising=False)
    monkeypatch.setattr(cores, "GROUP", tmp_path)
    if limit:
        (tmp_path / "cpu.max").write_text(f"{limit}\n")
    assert cores.available_cores(ranks) == expected
