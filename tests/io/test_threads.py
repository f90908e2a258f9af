"""What octfm changes in the whole process for a while is as before once every thread has left, in any order."""

import os
import signal
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext

import matplotlib as mpl
import pydicom.config
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octfm.display import drawing
from octfm.encoder.onnx_graph import _silent
from octfm.formats.dicom.file import refusing_damage
from octfm.run.runtime import torch_threads
from octfm.threads import Shared, held_while_forking, ignoring_warnings


def of_a_new_thread(found):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(found).result()


def validation():
    return pydicom.config.settings.reading_validation_mode, pydicom.config.settings.writing_validation_mode


@given(st.permutations(range(4)))
def test_warnings_and_checks_of_pydicom_are_as_before_in_whatever_order_readers_end(order):
    readers = [lambda: refusing_damage("scan.dcm"), ignoring_warnings, lambda: ignoring_warnings("Glyph")] * 2
    before = list(warnings.filters), validation()
    undo = [ExitStack() for _ in order]
    for stack, reader in zip(undo, readers, strict=False):
        stack.enter_context(reader())
    for place in order[:-1]:
        undo[place].close()
    if order[-1] in (0, 3):  # the last one is still reading, whoever has left
        assert validation() == (pydicom.config.IGNORE, pydicom.config.IGNORE)
    if order[-1] != 2:
        with warnings.catch_warnings(record=True) as shown:
            warnings.warn("a name", stacklevel=1)
        assert not shown
    undo[order[-1]].close()
    assert (list(warnings.filters), validation()) == before


@given(st.permutations("rrllmm"))
def test_a_reader_leaves_no_warning_ignored_when_libraries_catch_warnings_meanwhile(order):
    """As torch and scikit-learn do: warnings stayed switched off after all had ended."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        inside = {}
        contexts = {"r": ignoring_warnings, "l": warnings.catch_warnings, "m": warnings.catch_warnings}
        for which in order:
            if which in inside:
                inside.pop(which).close()
            else:
                inside[which] = ExitStack()
                inside[which].enter_context(contexts[which]())
        warnings.warn("for the caller", stacklevel=1)
        assert len(shown) == 1


def test_a_filter_that_the_caller_sets_while_another_thread_reads_stays():
    with warnings.catch_warnings():
        with ignoring_warnings():
            warnings.simplefilter("ignore")
        assert warnings.filters[0] == ("ignore", None, Warning, None, 0)


def test_a_reader_that_the_garbage_collector_closes_does_not_wait_for_its_own_thread():
    """Its generator was suspended in a cycle; the collector may run while the same thread enters another context."""
    before, abandoned, entered = list(warnings.filters), ignoring_warnings(), []

    def collect():
        with Shared(lambda: abandoned.__exit__(None, None, None) or nullcontext())():
            entered.append(list(warnings.filters))

    abandoned.__enter__()
    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(0.5)
    assert not thread.is_alive()
    assert entered == [before]


@given(st.permutations(range(3)))
def test_new_threads_of_torch_have_as_many_threads_as_before_in_whatever_order_others_end(order):
    ends, entered, counts = [threading.Event() for _ in order], threading.Semaphore(0), []

    def work(end):
        with torch_threads(1):
            counts.append(torch.get_num_threads())
            entered.release()
            end.wait()
        counts.append(torch.get_num_threads())

    own = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        threads = [threading.Thread(target=work, args=(end,)) for end in ends]
        for thread in threads:
            thread.start()
            entered.acquire()
        for place in order:
            ends[place].set()
            threads[place].join()
        assert of_a_new_thread(torch.get_num_threads) == torch.get_num_threads() == 3
        assert counts == [1, 1, 1, 3, 3, 3]
    finally:
        torch.set_num_threads(own)


def test_pictures_drawn_in_threads_leave_the_style_of_matplotlib():
    before = dict(mpl.rcParams)
    gate = threading.Barrier(2, timeout=0.05)

    def draw(_):
        with drawing({"font.size": 7.5}):
            try:
                gate.wait()  # both inside at once: never
            except threading.BrokenBarrierError:
                return False
            return True

    with ThreadPoolExecutor(2) as pool:
        assert not any(pool.map(draw, range(2)))
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize("context", [lambda: drawing({}), _silent], ids=["drawing", "exporting"])
def test_long_work_goes_on_in_one_thread_only(context):
    inside, stdout, second = threading.Event(), sys.stdout, []

    def enter():
        with context():
            second.append(inside.is_set())

    thread = threading.Thread(target=enter)
    with context():
        inside.set()
        thread.start()
        thread.join(0.05)
        inside.clear()
    thread.join()
    assert second == [False]
    assert sys.stdout is stdout


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
@pytest.mark.parametrize("context", [lambda: drawing({}), _silent], ids=["drawing", "exporting"])
def test_a_process_forks_during_long_work_of_another_thread_and_can_do_it_too(context):
    """The fork, which held the lock of logging, waited for a drawing that waited for that lock."""
    inside, forked, in_time = threading.Event(), threading.Event(), []

    def work():
        with context():
            inside.set()
            in_time.append(forked.wait(0.5))

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait()
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with context():
            os._exit(0)
    forked.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert in_time == [True]


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_a_process_forked_while_another_thread_holds_a_lock_can_take_it():
    lock, held = held_while_forking(threading.Lock()), threading.Event()

    def hold():
        with lock:
            held.set()
            time.sleep(0.05)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    if (child := os.fork()) == 0:
        os._exit(not lock.acquire(timeout=0.2))
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
