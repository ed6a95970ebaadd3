"""The kernels that operators may launch: those of the registries open in this process."""

import itertools
import threading

from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.selection.handles import AnyHandle
from kernel_muster.registry.values import frozen


@frozen
class OpenKernel:
    """One kernel, and its place of launch: the ordinal of a device, or None on the host."""

    handle: AnyHandle
    contract: str
    ordinal: int | None


_BY_TOKEN: dict[str, OpenKernel] = {}
_LOCK = threading.Lock()
_numbers = itertools.count(1)


def next_number() -> int:
    """Return the number of a newly opened registry."""
    return next(_numbers)


def token_of(key: str, number: int) -> str:
    """Return the name of a kernel of one registry: ``norm::rms_norm@1``."""
    return f"{key}@{number}"


def hand_out(token: str, kernel: OpenKernel) -> None:
    """Let operators launch a kernel under its token."""
    with _LOCK:
        _BY_TOKEN[token] = kernel


def take_back(number: int) -> None:
    """Let operators launch no kernel of a registry from now on."""
    with _LOCK:
        for token in [one for one in _BY_TOKEN if one.endswith(f"@{number}")]:
            del _BY_TOKEN[token]


def find_kernel(owner: str, contract: str, name: str) -> OpenKernel:
    """Return the kernel of a token or a key, or without a name the only possible one.

    UsageError where there is none, more than one, or one of another contract.
    """
    kernel = _BY_TOKEN.get(name)
    if kernel is None:
        kernel = _only_one(owner, contract, name)
    if kernel.contract != contract:
        raise UsageError(f"{owner}: kernel {name!r} keeps the contract {kernel.contract!r}, expected {contract!r}")
    return kernel


def _only_one(owner: str, contract: str, name: str) -> OpenKernel:
    with _LOCK:
        of_contract = {token: one for token, one in _BY_TOKEN.items() if one.contract == contract}
        meant = {token: one for token, one in of_contract.items() if name in ("", token.partition("@")[0])}
        any_open = bool(_BY_TOKEN)
    if len(meant) == 1:
        return next(iter(meant.values()))
    if not any_open:
        why = "no registry is open: open one with kernel_muster.torch.Kernels(kernel_muster.open_registry(target))"
    elif not of_contract:
        why = "no kernel of this contract was looked up: ask for one with Kernels.kernel(module, func)"
    elif meant:
        why = f"more than one may be meant: name one of {', '.join(sorted(meant))}"
    else:
        why = f"looked up are {', '.join(sorted(of_contract))}; the registry of any other is closed, or was not asked"
    raise UsageError(f"{owner}: served_by={name!r}: {why}")
