"""Every exception that kernel_muster raises on purpose."""


class MusterError(Exception):
    """Base of all our exceptions."""


class UsageError(MusterError):
    """The caller asked for something that makes no sense, or named a file that cannot be read."""


class UndeclaredLever(MusterError, KeyError):
    """Code reads a lever that nobody declares."""

    __str__ = Exception.__str__  # a KeyError shows its text in quotes


class ContractError(MusterError):
    """Arguments that a kernel's contract does not allow."""


class DeviceStuck(MusterError):
    """Something on a device does not end: nothing else runs there until this process ends."""


class NullKernelError(MusterError):
    """A handle whose lookup missed was called."""


class KernelMissing(MusterError):
    """A required lookup missed outside a boot."""


class ScratchError(MusterError):
    """Scratch memory that two users want at once, or that is smaller than its user needs."""


class LateKernelMiss(MusterError):
    """A lookup missed after the audit was sealed."""


class LateRegistration(MusterError):
    """Somebody tried to register a plugin after the audit was sealed."""


class BootRefused(MusterError):
    """The audit refused to start; ``report`` holds everything it found."""

    def __init__(self, message: str, report: object) -> None:
        super().__init__(message)
        self.report = report
