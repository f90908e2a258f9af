"""The order in which pytest-xdist hands out test files, and those that it hands out together."""

from pathlib import PurePath

from xdist.scheduler import LoadFileScheduling

RANKS = ("ranks", "finetune_ranks", "killed_ranks", "silent_illnesses", "exact_resume")
BUCKETS = (
    "buckets",
    "bucket_runs",
    "bucket_shards",
    "bucket_evaluation",
    "embed_files",
    "export",
    "people",
    "task_runs",
)
TOGETHER = {*RANKS, *BUCKETS}
"""Files whose tests share what a worker starts once, for some 4 s of CPU each: a process that forks ranks, and bucket
servers. Some need both, so that they are one group."""
FIRST = (
    "together", "demo", "layers", "docs", "trust", "recovery", "canary", "report", "isolation",
    "packaged_encoder", "preflight", "phantom", "verdict", "limits", "prototype", "pseudonyms", "golden_curve", "other_device",
    "preflight_resources", "notebooks", "wheel", "privacy", "corrections",
)  # fmt: skip
"""Files that take longest for their number of tests, longest first: handed out last, one would leave a worker idle."""


class HandingOut(LoadFileScheduling):
    """As --dist loadfile, which begins with the files that have most tests, but for TOGETHER and FIRST."""

    def _split_scope(self, nodeid: str) -> str:
        name = PurePath(nodeid.split("::", 1)[0]).stem.removeprefix("test_")
        return "together" if name in TOGETHER else name

    def _assign_work_unit(self, node) -> None:
        first = next((name for name in FIRST if name in self.workqueue), None)
        if first is not None:
            self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)
