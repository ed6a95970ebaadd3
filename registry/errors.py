"""Every exception that kernel_muster raises on purpose."""

from typing import Any, ClassVar, Literal

from kernel_muster.registry.foreign_text import Medium, written

#: A hook through which a plugin gives a model, a manifest or a lever.
Lacks = Literal["", "muster_models", "muster_manifests", "muster_levers"]
#: A refused boot has its whole report as its text.
MOST_IN_EXCEPTIONS = 4_000_000


class MusterError(Exception):
    """Base of all our exceptions. Each travels between processes with all that it holds, whatever it was made of.

    Its text may hold names of others: nothing in it is obeyed by a terminal. ``args`` keep them as they are.
    """

    medium: ClassVar[Medium] = "exception"
    #: The hook that would have given the missing thing; see :class:`Finding`.
    lacks: ClassVar[Lacks] = ""
    #: Whether a finding of the boot covers it.
    is_reported: bool = False

    def __str__(self) -> str:
        return written(Exception.__str__(self), self.medium, MOST_IN_EXCEPTIONS)

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (type(self), self.args, self.__dict__)


def is_reported(error: BaseException | None) -> bool:
    """Whether a finding covers an exception, or its cause."""
    while error is not None and not (isinstance(error, MusterError) and error.is_reported):
        error = error.__cause__
    return error is not None


def _remade(kind: type[MusterError], args: tuple[Any, ...], held: dict[str, Any]) -> MusterError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(held)
    return error


class UsageError(MusterError):
    """The caller asked for something that makes no sense, or named a file that cannot be read."""


class NoBuilder(MusterError):
    """No plugin that loaded gives a builder of the model type."""

    lacks = "muster_models"


class UndeclaredLever(MusterError, KeyError):
    """Code reads a lever that nobody declares."""

    __str__ = MusterError.__str__  # a KeyError shows its text in quotes


class ContractError(MusterError):
    """Arguments that a kernel's contract does not allow."""


class DeviceStuck(MusterError):
    """Something on a device does not end: nothing else runs there until this process ends."""


class NullKernelError(MusterError):
    """A handle was called whose lookup missed, or whose boot did not pass."""

    medium = "log"


class KernelMissing(MusterError):
    """A required lookup missed outside a boot."""

    medium = "log"


class ScratchError(MusterError):
    """Scratch memory that two users want at once, or that is smaller than its user needs."""


class LateKernelMiss(MusterError):
    """A lookup missed after the audit was sealed."""

    medium = "log"


class LateRegistration(MusterError):
    """Somebody tried to register a plugin after the audit was sealed."""

    medium = "log"


class BootRefused(MusterError):
    """The audit refused to start; ``report`` holds everything it found."""

    def __init__(self, message: str, report: object) -> None:
        super().__init__(message)
        self.report = report
