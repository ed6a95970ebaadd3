"""How the process of the work ended: apart from the other events, for its supervisor imports nothing else."""

from typing import Literal

from kernel_muster.registry.values import frozen


@frozen(kw_only=True)
class Ended:
    """The process of the work has ended, reported by its supervisor.

    ``left`` are the commands of processes that it had left running and that were ended, ``unended`` of those that did
    not end.
    """

    event: Literal["ended"] = "ended"
    code: int
    left: tuple[str, ...] = ()
    unended: tuple[str, ...] = ()
