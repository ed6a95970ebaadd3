"""What a contract makes of a case: its arguments, and the results by which a kernel is judged.

The contract's code is a plugin's. Where it fails, or gives results by which no kernel can be judged, the finding names
the contract and not the kernel.
"""

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from kernel_muster.registry.contract.contracts import Arguments, Case, Contract
from kernel_muster.registry.errors import MusterError
from kernel_muster.registry.plugin_code.watch import cause_chain, is_interrupt, one_line


class FaultyContract(MusterError):
    """A case by which no kernel can be judged; ``log`` is what the contract's code raised."""

    def __init__(self, why: str, log: str = "") -> None:
        super().__init__(why)
        self.log = log


def drawn(contract: Contract, case: Case, draw: str = "") -> Arguments:
    """Return the arguments of a case: the same numbers in every process."""
    seed = zlib.crc32(f"{contract.name}/{case.name}{draw}".encode())
    with _raising("the contract's inputs fail"):
        return contract.arguments(case, np.random.default_rng(seed))


def expected_of(contract: Contract, case: Case, given: Arguments) -> Mapping[str, Any]:
    """Return what the reference gives of a case's arguments."""
    with _raising("the reference fails"):
        expected, problems = contract.expected(case, given)
    if problems:
        raise FaultyContract("; ".join(problems))
    return expected


def check_sizes(contract: Contract, case: Case, given: Arguments) -> None:
    """Refuse arguments of other sizes than those that the case gives."""
    with _raising("the contract's inputs do not fit its signature"):
        problems = contract.case_problems(case, contract.signature.bind(contract.name, (), given).dims)
    if problems:
        raise FaultyContract("; ".join(problems))


@contextmanager
def _raising(what: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:  # (a plugin's code may raise anything)
        if is_interrupt(error):
            raise
        raise FaultyContract(f"{what}: {one_line(error)}", cause_chain(error)) from error
