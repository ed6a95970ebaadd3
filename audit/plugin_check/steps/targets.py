"""What ``muster plugin check`` compiles a kernel for, and what there is to compile."""

from collections.abc import Iterable

from kernel_muster.registry.backends.cuda_kernel import is_device_backend
from kernel_muster.registry.backends.request import BuildRequest
from kernel_muster.registry.contract.specs import Registered
from kernel_muster.registry.hardware.arch import Arch, CodeArch, canonical_arch, parse_arch

#: What "sm_80+" is compiled for, besides the architecture that it names.
ARCHS = tuple(map(parse_arch, ("sm_80", "sm_90a", "sm_100a", "sm_121a")))


def declared_archs(code_archs: Iterable[CodeArch]) -> list[Arch]:
    """Return the architectures to compile for: those that are named, and ours that the code accepts."""
    entries = [entry for entry in code_archs if entry.kind != "host"]
    named = {Arch(e.capability, e.suffix) if e.suffix else canonical_arch(e.capability) for e in entries}
    accepted = {arch for arch in (*ARCHS, *named) if any(entry.rejects(arch) is None for entry in entries)}
    return sorted(accepted, key=lambda arch: (arch.capability, arch.suffix))


def requests_of(own: Iterable[Registered]) -> dict[BuildRequest, list[str]]:
    """Return what is to be compiled, with the keys that need it."""
    requests: dict[BuildRequest, list[str]] = {}
    for registered in own:
        backend = registered.spec.backend
        if is_device_backend(backend):
            for arch in declared_archs(registered.spec.code_archs):
                requests.setdefault(backend.request(arch), []).append(registered.spec.key)
    return requests
