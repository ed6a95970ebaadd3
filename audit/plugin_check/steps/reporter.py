"""Runs the steps of ``muster plugin check`` one by one, and reports each to the parent."""

import ctypes
import faulthandler
import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

from kernel_muster.audit.plugin_check.protocol.channel import Sender
from kernel_muster.audit.plugin_check.protocol.events import Done, Started
from kernel_muster.audit.plugin_check.protocol.machine_code import EntryRow, WarningRow
from kernel_muster.audit.plugin_check.steps.step import DeviceStopped, Step, Told, is_refusing
from kernel_muster.registry.findings import Finding


class Reporter:
    """Runs steps, and reports that they begin and what they gave.

    ``skip`` names the steps that earlier processes ran, ``failed`` those of them that failed.
    """

    def __init__(self, sender: Sender, skip: Iterable[str], failed: Iterable[str], seconds: float) -> None:
        self._sender, self._skip, self._seconds = sender, frozenset(skip), seconds
        self._names: dict[str, int] = {}
        self.failed = set(failed)

    def run(self, step: Step) -> None:
        """Run one step, unless an earlier process did."""
        self._names[step.name] = number = self._names.get(step.name, 0) + 1
        step = replace(step, number=number)
        if step.name in self._skip:
            return
        self._sender.send(Started(step=step.head))
        start = time.perf_counter()
        told: list[Told] = []
        has_stopped = False
        if not step.skipped:
            # Before the parent ends the process: where it hangs goes to stderr, which the parent keeps.
            faulthandler.dump_traceback_later(self._seconds * 0.9, exit=False)
            try:
                for one in step.run():
                    told.append(one)
            except DeviceStopped as error:
                told.extend(error.args[0])
                has_stopped = True
            faulthandler.cancel_dump_traceback_later()
        findings = tuple(replace(one, where=one.where or step.where) for one in told if isinstance(one, Finding))
        if any(map(is_refusing, findings)):
            self.failed.add(step.name)
        self._sender.send(
            Done(
                step=step.head,
                skipped=step.skipped,
                findings=findings,
                entries=tuple(one for one in told if isinstance(one, EntryRow)),
                warnings=tuple(one for one in told if isinstance(one, WarningRow)),
                seconds=time.perf_counter() - start,
            )
        )
        if has_stopped:
            leave()


def leave() -> NoReturn:
    """End the process whatever threads a plugin left, with all that was printed."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)
    os._exit(0)
