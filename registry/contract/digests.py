"""Digests of specs, taken once in a boot. Code of plugins that they run is watched: it may raise, hang or exit."""

from kernel_muster.registry.contract.specs import Registered, source_digest
from kernel_muster.registry.plugin_code.plain_text import class_name
from kernel_muster.registry.plugin_code.watch import Outcome, Worker
from kernel_muster.registry.values import frozen


class DigestFailed(Exception):
    """A plugin's code did not give the digest of a kernel."""


@frozen
class SpecDigests:
    """The digests of one spec. One that cannot be taken is empty, with its reason.

    ``source`` is of the kernel's source, ``host`` of the Python code that plans launches and prepares weights.
    """

    source: str = ""
    host: str = ""
    source_error: BaseException | None = None
    host_error: BaseException | None = None


class Digests:
    """The digests of all specs of a boot. ``seconds`` is the time that one spec has."""

    def __init__(self, seconds: float = 10) -> None:
        self._seconds, self._worker = seconds, Worker()
        self._known: dict[int, tuple[Registered, SpecDigests]] = {}  # a plugin's specs may have no hash

    def of(self, registered: Registered) -> SpecDigests:
        """Return the digests of a spec; they are taken when they are first asked for."""
        known = self._known.get(id(registered))
        if known is None:
            known = self._known[id(registered)] = registered, self._taken(registered)
        return known[1]

    def _taken(self, registered: Registered) -> SpecDigests:
        plugin = registered.provider.plugin
        if registered.provider.is_host:
            return _digests(registered)
        outcome = self._worker.watched(lambda: _digests(registered), self._seconds, f"plugin {plugin}")
        if outcome.value is not None:
            return outcome.value
        failure = _failure(outcome, f"plugin {plugin}: the digest of {registered.spec.key}", self._seconds)
        return SpecDigests(source_error=failure, host_error=failure)


def _failure(outcome: Outcome[SpecDigests], what: str, seconds: float) -> DigestFailed:
    if outcome.error is None:
        return DigestFailed(f"{what} took longer than {seconds:g} s")
    failure = DigestFailed(f"{what}: the plugin's code raised {class_name(outcome.error)}")
    failure.__cause__ = outcome.error
    return failure


def _digests(registered: Registered) -> SpecDigests:
    source, error = source_digest(registered.spec.backend)
    try:
        return SpecDigests(source, registered.spec.host_sha256, error)
    except OSError as changed:  # a file that is no longer what was imported
        return SpecDigests(source, "", error, changed)
