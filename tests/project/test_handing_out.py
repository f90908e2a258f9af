"""Which worker gets which test file, and when."""

from types import SimpleNamespace

from support import TESTS
from support.handing_out import FIRST, TOGETHER, HandingOut


class Worker:
    """A worker that runs what it is sent."""

    shutting_down = False

    def __init__(self):
        self.gateway, self.sent = SimpleNamespace(id="gw"), []

    def send_runtest_some(self, places: list[int]) -> None:
        self.sent += places

    def shutdown(self) -> None:
        self.shutting_down = True


def handed_out(collected: list[str]) -> list[list[str]]:
    """What each of two workers runs, in its order."""
    config = SimpleNamespace(
        getvalue=lambda name: ["popen", "popen"], option=SimpleNamespace(loadscopereorder=True, tx=["popen", "popen"])
    )
    scheduler, workers = HandingOut(config), [Worker(), Worker()]
    for worker in workers:
        scheduler.add_node(worker)
        scheduler.add_node_collection(worker, collected)
    scheduler.schedule()
    done = [0, 0]
    while any(done[i] < len(worker.sent) for i, worker in enumerate(workers)):
        for i, worker in enumerate(workers):
            if done[i] < len(worker.sent):
                scheduler.mark_test_complete(worker, worker.sent[done[i]])
                done[i] += 1
    return [[collected[place] for place in worker.sent] for worker in workers]


def test_files_that_share_what_is_dear_go_to_one_worker_and_long_ones_come_first():
    tests = {"test_buckets": 3, "test_config": 9, "test_demo": 1, "test_ranks": 2, "test_store": 5, "test_way_up": 1}
    collected = [f"tests/{file}.py::test_{i}[a::b]" for file, count in tests.items() for i in range(count)]
    one, other = handed_out(collected)
    assert sorted(one + other) == sorted(collected), "each once"
    assert {name.split("::")[0] for name in one[:5]} == {"tests/test_ranks.py", "tests/test_buckets.py"}
    assert other[0] == "tests/test_demo.py::test_0[a::b]"
    for file in tests:
        assert any(file in name for name in one) != any(file in name for name in other), "a file stays whole"


def test_every_name_is_that_of_a_file():
    files = {path.stem.removeprefix("test_") for path in TESTS.rglob("test_*.py")}
    assert TOGETHER | set(FIRST) <= files | {"together"}
    assert not set(FIRST) & TOGETHER, "a file that goes with others has no place of its own"
