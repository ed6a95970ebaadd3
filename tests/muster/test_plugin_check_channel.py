"""``muster plugin check`` trusts its own code alone: no output, forgery or removal by a plugin makes a pass."""

import json
import os
import secrets

import pytest
from kernel_muster.audit.plugin_check.collected import Collected
from kernel_muster.audit.plugin_check.demands import missing_steps
from kernel_muster.audit.plugin_check.protocol.channel import KEY_BYTES, Receiver, Sender
from kernel_muster.audit.plugin_check.protocol.events import (
    Done,
    Finished,
    Listed,
    ListedKernel,
    Loading,
    Started,
    StepHead,
)
from plugin_texts import codes, source, steps

SPRAY = """
def spray(text):
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            try:
                os.write(int(name), text)
            except OSError:
                pass

"""
HEAD = {"name": "load acme", "kind": "load", "subject": "acme", "target": "", "keys": [], "where": []}
FORGED = (
    {"event": "plugins", "plugins": [], "steps": 1},
    {"event": "start", **HEAD},
    {"event": "done", **HEAD, "skipped": "", "findings": [], "entries": [], "warnings": [], "seconds": 0.1},
    {"event": "end"},
    {"event": "started", "step": HEAD},
    {"event": "done", "step": HEAD},
    {"event": "listed", "plugins": [], "kernels": [], "steps": 1},
    {"event": "finished"},
)


def forged(prefix: str) -> bytes:
    return "".join(f"\n{prefix}{json.dumps(event)}\n" for event in FORGED).encode()


@pytest.mark.parametrize(
    "prefix", ["", "kernel-muster plugin check: ", f"worker 0 {'0' * 64} ", f"worker 9 {'f' * 64} ", "supervisor 0 "]
)
def test_forged_steps_are_no_pass(check, prefix):
    head = f"{SPRAY}\nspray({forged(prefix)!r})\nos._exit(0)\n"
    report = check(source('spec("acme::double", wrong)', head=head))
    assert codes(report) == [("PLUGIN_LOAD_FAILED", "acme")]
    assert report["findings"][0]["why"] == "load ended its process with exit code 0 while plugin acme was loading"
    (note,) = report["notes"]
    assert note.startswith(f"{len(FORGED)} lines on the channel of the check came from elsewhere, and did not count")


@pytest.mark.parametrize("text", ["hello\n", "hello", "5\n{}\n", '{"event": "end"}\n', "[" * 9999 + "\n", "\xff\n"])
def test_stray_writes_are_dropped_and_reported(check, text):
    head = f"{SPRAY}\nspray({text.encode('latin-1')!r})\n\n\ndef loud(x, out):\n    spray(b'more')\n    wrong(x, out)\n"
    report = check(source('spec("acme::a", loud)', 'spec("acme::b")', head=head))
    assert codes(report) == [("NUMERICS_FAILED", "acme::a")]
    assert steps(report)["prove acme::b cpu"] == "ok"
    assert "on the channel of the check came from elsewhere" in report["notes"][0]


def test_descriptors_that_loops_meet_are_not_those_of_the_channel(check):
    head = """
for number in range(3, 100):
    try:
        os.write(number, b"hello")
    except OSError:
        pass
"""
    report = check(source('spec("acme::double")', head=head))
    assert (report["verdict"], report["notes"]) == ("passed", [])


@pytest.mark.parametrize(
    ("head", "kernel", "code"),
    [("\nos.closerange(3, 1 << 16)\n", "double", "PLUGIN_LOAD_FAILED"), ("", "close", "NUMERICS_FAILED")],
)
def test_closed_channel_is_found_where_it_was_closed(check, head, kernel, code):
    close = "\n\ndef close(x, out):\n    os.closerange(3, 1 << 16)\n"
    report = check(source(f'spec("acme::a", {kernel})', 'spec("acme::b")', head=head + close))
    (finding,) = report["findings"]
    assert finding["code"] == code
    assert "closed the file descriptors of others" in finding["why"]
    assert finding["remedies"] == [
        "look for what closes file descriptors that it has not opened, such as os.closerange"
    ]


def test_fork_that_goes_on_with_the_checks_own_code_speaks_for_nobody(check):
    report = check(source('spec("acme::double")', 'spec("acme::wrong", wrong)', head="\nos.fork()\n"))
    assert codes(report) == [("NUMERICS_FAILED", "acme::wrong")]
    assert [step["outcome"] for step in report["steps"]] == ["ok", "ok", "ok", "failed"]


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("steps._proof_steps = lambda *given: iter(())", "prove acme::double on cpu, prove acme::wrong on cpu"),
        ("steps._contract_findings = None; worker.steps_after_load = lambda *given: iter(())", "contract acme_double"),
        ("steps.is_host_backend = lambda backend: False", "prove acme::double on cpu"),
    ],
)
def test_steps_that_a_plugin_takes_away_are_missed(check, line, missing):
    head = f"""
import sys
steps = sys.modules["kernel_muster.audit.plugin_check.steps.steps"]
worker = sys.modules["kernel_muster.audit.plugin_check.process.worker"]
{line}
"""
    report = check(source('spec("acme::double")', 'spec("acme::wrong", wrong)', head=head))
    (finding,) = report["findings"]
    assert (report["verdict"], finding["code"], finding["subject"]) == ("refused", "UNCHECKED", "acme")
    assert missing in finding["why"]


def test_plugin_that_is_not_listed_is_missed(check):
    head = """
import sys
worker = sys.modules["kernel_muster.audit.plugin_check.process.worker"]
worker.rows_of = lambda *given: []
"""
    report = check(source('spec("acme::double", wrong)', head=head))
    assert codes(report) == [("UNCHECKED", "acme")]
    assert report["findings"][0]["why"] == "the entry points name plugins that the check did not list: acme"


def test_two_kernels_of_one_key_are_two_steps(check):
    text = source('spec("acme::a", crash)', 'spec("acme::a", wrong, tier="reference")')
    report = check(text)
    assert [finding["code"] for finding in report["findings"] if finding["subject"] == "acme::a"] == [
        "NUMERICS_FAILED",
        "OUT_OF_BOUNDS",
    ]


# the channel itself


class Pipe:
    """A channel with both of its ends."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        key = secrets.token_bytes(KEY_BYTES)
        self.sender, self.receiver = Sender(self.writer, "worker", key), Receiver({"worker": key})

    def written(self) -> bytes:
        return os.read(self.reader, 1 << 20)

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)


@pytest.fixture
def pipe():
    made = Pipe()
    yield made
    made.close()


def test_event_arrives_as_it_was_sent_whatever_its_names_hold(pipe):
    step = StepHead(name="prove a\nb\x1b", kind="prove", subject="caf\u00e9 \u202e", target="cpu", where=("a", "b"))
    pipe.sender.send(Started(step=step))
    assert list(pipe.receiver.events(pipe.written())) == [Started(step=step)]
    pipe.sender.send(Loading(plugin="\udc80"))
    assert list(pipe.receiver.events(pipe.written())) == [Loading(plugin="\\udc80")]


def test_line_arrives_in_pieces(pipe):
    pipe.sender.send(Finished())
    data = pipe.written()
    found = [event for at in range(len(data)) for event in pipe.receiver.events(data[at : at + 1])]
    assert (found, pipe.receiver.dropped) == ([Finished()], 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line.replace(b"worker 0", b"worker 1"),
        lambda line: line.replace(b"worker", b"helper"),
        lambda line: line.replace(b"finished", b"finishes"),
        lambda line: line[:-3] + b"\n",
        lambda line: b"x" + line.lstrip(b"\n"),
        lambda line: line.replace(b" ", b"  ", 1),
    ],
)
def test_line_that_was_changed_is_dropped(pipe, change):
    pipe.sender.send(Finished())
    assert list(pipe.receiver.events(change(pipe.written()))) == []
    assert pipe.receiver.dropped == 1


def test_line_counts_once(pipe):
    pipe.sender.send(Finished())
    data = pipe.written()
    assert list(pipe.receiver.events(data + data)) == [Finished()]
    assert pipe.receiver.dropped == 1


def test_event_of_no_known_kind_is_dropped(pipe, monkeypatch):
    monkeypatch.setattr("kernel_muster.audit.plugin_check.protocol.channel._dumps", lambda event: '{"event": "ok"}')
    pipe.sender.send(Finished())
    assert (list(pipe.receiver.events(pipe.written())), pipe.receiver.dropped) == ([], 1)


def test_text_without_a_line_end_does_not_fill_the_memory(pipe, monkeypatch):
    monkeypatch.setattr("kernel_muster.audit.plugin_check.protocol.channel._LONGEST", 1000)
    for _ in range(100):
        assert list(pipe.receiver.events(b"x" * 99)) == []
    pipe.sender.send(Finished())
    assert list(pipe.receiver.events(pipe.written())) == [Finished()]


def test_step_whose_end_was_lost_is_not_taken_for_a_sound_one():
    collected = Collected()
    collected.take(Started(step=StepHead(name="prove acme::a cpu", kind="prove", subject="acme::a", target="cpu")))
    collected.take(Finished())
    assert [(step.subject, step.outcome) for step in collected.steps] == [("acme::a", "failed")]
    assert (collected.has_finished, collected.open) == (True, None)


def test_every_step_of_a_kernel_is_demanded_as_often_as_it_is_registered():
    archs = ("sm_80", "sm_90a")
    kernel = ListedKernel(key="acme::a", contract="c", builds=archs, is_for_host=True, is_for_device=True)
    listing = Listed(plugins=(), kernels=(kernel, kernel), steps=0)
    shared = [StepHead(name="", kind="contract", subject="c")]
    shared += [StepHead(name="", kind="compile", subject="a.cu", keys=("acme::a",), target=arch) for arch in archs]
    own = [StepHead(name="", kind="plan", subject="acme::a", target=arch) for arch in archs]
    own += [StepHead(name="", kind="prove", subject="acme::a", target=target) for target in ("cpu", "cuda:1")]
    every = [*shared, *own, *own]
    assert list(missing_steps([listing], every, subject="acme")) == []
    for left_out in every:
        rest = list(every)
        rest.remove(left_out)
        (finding,) = missing_steps([listing], rest, subject="acme")
        assert finding.why.partition(" reported: ")[2].startswith(f"{left_out.kind} ")


def test_done_of_a_step_carries_its_findings(pipe):
    pipe.sender.send(Done(step=StepHead(name="x", kind="load", subject="acme")))
    (event,) = pipe.receiver.events(pipe.written())
    assert event.findings == ()
