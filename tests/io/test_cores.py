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


@pytest.mark.parametrize(("quota", "expected"), [(400_000, 4), (-1, 64)])
def test_older_hosts_state_the_cores_of_a_container_elsewhere(tmp_path, monkeypatch, quota, expected):
    """Version 1 of control groups, as on Red Hat 8."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(cores, "GROUP", tmp_path)
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cores.available_cores() == expected


@pytest.mark.parametrize("name", ["cpuset.cpus.effective", "cpuset/cpuset.effective_cpus"])
def test_ranks_in_one_set_of_cores_share_it(tmp_path, monkeypatch, name):
    """As docker run --cpuset-cpus: each of four ranks took all eight cores, as if they were its own."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(cores, "GROUP", tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("0-3,8,10-12\n")
    assert (cores.available_cores(), cores.available_cores(4), cores.available_cores(16)) == (8, 2, 1)
    (tmp_path / name).write_text("0-63\n")
    assert cores.available_cores(4) == 8, "bound to its own by a launcher"


@pytest.mark.parametrize(("allotted", "bound", "ranks", "expected"), [("8", 64, 1, 8), ("8", 64, 4, 2), ("8", 4, 1, 4)])
def test_a_job_of_slurm_takes_no_more_cores_than_it_was_given(monkeypatch, tmp_path, allotted, bound, ranks, expected):
    """Where SLURM binds no job to its cores, as without task/affinity, it took those of the other jobs on its node."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(bound)), raising=False)
    monkeypatch.setattr(cores, "GROUP", tmp_path)
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", allotted)
    assert cores.available_cores(ranks) == expected


@pytest.mark.parametrize(
    ("membership", "folder", "quota", "memory"),
    [
        ("0::/slurm/job_7/task_0", "slurm/job_7", {"cpu.max": "400000 100000"}, ("memory.max", "memory.current")),
        (
            "4:memory:/slurm/job_7\n1:cpu,cpuacct:/slurm/job_7/task_0\n0::/",
            "{kind}/slurm/job_7",
            {"cpu.cfs_quota_us": "400000", "cpu.cfs_period_us": "100000"},
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_the_limits_of_a_job_count_without_a_container(tmp_path, monkeypatch, membership, folder, quota, memory):
    """SLURM sets them in groups inside the outermost, where they were not seen: a job with 8 of 512 GB planned for 512."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(cores, "GROUP", tmp_path)
    monkeypatch.setattr(cores, "MEMBERSHIP", tmp_path / "membership")
    (tmp_path / "membership").write_text(membership + "\n")
    values = dict(zip(memory, ("8000", "5000"), strict=True)) | {"memory.stat": "active_file 30\ninactive_file 20"}
    for kind, files in (("cpu", quota), ("memory", values)):
        (place := tmp_path / folder.format(kind=kind)).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (place / name).write_text(f"{text}\n")
    assert (cores.available_cores(), cores.memory_left()) == (4, 3050)


@pytest.mark.parametrize("membership", [b"0::/job\xff\n", b"0::/../..\n", b"0::/job (deleted)\n", b"\n", b""], ids=str)
def test_a_group_of_any_name_or_none_stops_no_verb(tmp_path, monkeypatch, membership):
    monkeypatch.setattr(cores, "GROUP", tmp_path)
    monkeypatch.setattr(cores, "MEMBERSHIP", tmp_path / "membership")
    (tmp_path / "membership").write_bytes(membership)
    assert cores.available_cores() >= 1 and cores.memory_left() is None
