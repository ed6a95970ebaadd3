"""Watched calls, and exceptions as text."""

import gc
import json
import os
import threading
import time
from dataclasses import dataclass
from importlib.metadata import EntryPoint

import kernel_muster as km
import pytest
from kernel_muster.registry.plugin_code.watch import Worker, cause_chain, located, one_line, watched


def raising(error):
    def call():
        raise error

    return call


def test_watched_call_gives_its_value_or_its_exception():
    assert watched(lambda: 3, 5, "x").value == 3
    error = watched(raising(ValueError("no")), 5, "x").error
    assert cause_chain(error).startswith("ValueError: no (at ")


def test_worker_runs_its_calls_in_one_thread_that_it_begins_and_that_ends_with_it():
    begun = []
    worker = Worker(lambda: begun.append(threading.current_thread()))
    threads = [worker.watched(threading.current_thread, 5, "x").value for _ in range(3)]
    assert begun == threads[:1]
    assert len({*threads}) == 1
    assert threads[0] is not threading.current_thread()
    error = worker.watched(raising(ValueError("no")), 5, "x").error
    assert cause_chain(error).startswith("ValueError: no (at ")
    del worker, error
    gc.collect()
    threads[0].join(5)
    assert not threads[0].is_alive()


def test_worker_leaves_a_call_that_hangs_and_goes_on_in_another_thread():
    is_over, begun = threading.Event(), []
    worker = Worker(lambda: begun.append(threading.current_thread()))
    outcome = worker.watched(is_over.wait, 0.1, "x")
    assert outcome.is_hanging
    assert "in wait" in outcome.stack
    assert worker.watched(lambda: 3, 5, "x").value == 3
    assert len(begun) == 2
    is_over.set()
    begun[0].join(5)
    assert not begun[0].is_alive()


def test_worker_whose_beginning_fails_says_so():
    assert isinstance(Worker(raising(ValueError("no"))).watched(lambda: 3, 5, "x").error, ValueError)


@pytest.mark.parametrize("run", [watched, Worker().watched])
def test_interrupt_in_a_thread_is_an_exception_like_any_other(run):
    assert isinstance(run(raising(KeyboardInterrupt()), 5, "x").error, KeyboardInterrupt)


@pytest.mark.parametrize("end", [lambda: None, raising(ValueError("no"))])
@pytest.mark.parametrize("run", [watched, Worker().watched])
def test_process_that_a_call_forks_ends_with_the_call(run, end):
    def call():
        number = os.fork()
        return number or end()

    number = run(call, 5, "x").value
    deadline = time.monotonic() + 5
    while not (ended := os.waitpid(number, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    if not ended[0]:
        os.kill(number, 9)
        os.waitpid(number, 0)
    assert os.waitstatus_to_exitcode(ended[1]) == 1


def test_exception_is_told_on_one_line_with_its_place():
    error = watched(raising(ValueError("no\n  way")), 5, "x").error
    assert located(error).startswith(f"ValueError: no way (at {__file__}:")
    assert located(ValueError()) == "ValueError"


def test_cause_chain_of_a_circle_ends():
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert cause_chain(one).count("ValueError") == 2


@dataclass
class Own:
    text: str

    def __post_init__(self):
        json.loads(self.text)


@pytest.mark.parametrize(
    ("call", "function"),
    [
        (lambda: km.EntryPoint("add", ("f33",)), None),
        (lambda: Own("{"), Own.__post_init__),
    ],
    ids=["ours", "python's"],
)
def test_place_is_the_authors_line_and_not_that_of_what_it_calls(call, function):
    error = watched(call, 5, "x").error
    line = function.__code__.co_firstlineno + 1 if function else call.__code__.co_firstlineno
    assert located(error).endswith(f"(at {__file__}:{line})")


def test_place_of_an_import_is_the_line_that_imports(tmp_path, monkeypatch):
    (tmp_path / "zeta_half.py").write_text("x = 1\nimport zeta_gone\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    error = watched(EntryPoint("zeta", "zeta_half", "x").load, 5, "x").error
    assert located(error).endswith(f"(at {tmp_path}/zeta_half.py:2)")
    error = watched(EntryPoint("zeta", "zeta_gone", "x").load, 5, "x").error
    assert located(error) == "ModuleNotFoundError: No module named 'zeta_gone'"


def test_place_where_all_code_is_ours_is_the_last_line():
    error = watched(km.Case, 5, "x").error
    assert "registry/plugin_code/watch.py:" in located(error)


@pytest.mark.parametrize("end", [ZeroDivisionError, SystemExit])
def test_exception_whose_text_raises_is_reported_all_the_same(end):
    class Speechless(Exception):
        def __str__(self):
            raise end

    assert one_line(Speechless()) == "Speechless: (its text cannot be shown)"
    assert cause_chain(Speechless()) == "Speechless: (its text cannot be shown)"
