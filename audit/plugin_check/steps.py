"""The steps of ``muster plugin check``, run in a process of their own, where a crash or a hang ends nothing else.

Each step is announced before it runs and reported after, one marked JSON object a line, so that the parent knows in
which step a process died; it starts another one without that step. Nothing here prints; what a plugin prints, the
parent passes on.
"""

import ctypes
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

from kernel_muster.audit.plugin_check.kernels import equal_kernels
from kernel_muster.audit.plugin_check.machine_code import EntryRow, WarningRow, entry_rows, warning_rows
from kernel_muster.audit.plugin_check.models import equal_builders, manifest_findings
from kernel_muster.audit.proof.plan_check import plan_findings
from kernel_muster.audit.proof.proofs import device_memory, host_memory, prove
from kernel_muster.audit.rules.lookups import owner_contract
from kernel_muster.registry.backends.builder import Builder
from kernel_muster.registry.backends.cache import BuildCache
from kernel_muster.registry.backends.cuda_kernel import DeviceBackend, is_device_backend
from kernel_muster.registry.backends.nvrtc.headers import EXTRAS
from kernel_muster.registry.backends.request import BuildFailure, BuildRequest
from kernel_muster.registry.contract.contracts import Contract
from kernel_muster.registry.contract.specs import KernelSpec, Registered, is_host_backend
from kernel_muster.registry.discovery.discover import discover
from kernel_muster.registry.discovery.entry_points import scan
from kernel_muster.registry.discovery.loading import RAISE_LIMIT
from kernel_muster.registry.distributions import HOST_DISTRIBUTION, same_distribution
from kernel_muster.registry.errors import MusterError, UsageError
from kernel_muster.registry.findings import Finding, Severity
from kernel_muster.registry.hardware.arch import Arch, CodeArch, canonical_arch, parse_arch
from kernel_muster.registry.hardware.target import CPU_TARGET, Target, resolve_target
from kernel_muster.registry.hookspecs import ENTRY_POINT_GROUP
from kernel_muster.registry.launch.choose import choose_runner, has_toolkit
from kernel_muster.registry.levers import CORE_LEVERS, read_levers
from kernel_muster.registry.plugin_code import entered
from kernel_muster.registry.plugin_code.watch import cause_chain, one_line
from kernel_muster.registry.selection.catalog import Catalog, PluginRow
from kernel_muster.registry.selection.handles import Handle
from kernel_muster.registry.selection.lookups import LookupSession
from kernel_muster.registry.selection.select import is_host_only
from kernel_muster.registry.values import frozen

Told = Finding | EntryRow | WarningRow
Kind = Literal["install", "load", "contract", "compile", "plan", "prove"]
_PR_SET_PDEATHSIG = 1
#: What a line begins with that tells the parent something: a plugin may write to the pipe too.
MARK = b"kernel-muster plugin check: "
#: What "sm_80+" is compiled for, besides the architecture that it names.
ARCHS = tuple(map(parse_arch, ("sm_80", "sm_90a", "sm_100a", "sm_121a")))
_LIMIT = "MUSTER_PLUGIN_TIMEOUT_S"
NO_COMPILER = f"no compiler is installed: {' or '.join(EXTRAS.values())}"


@frozen
class Step:
    """One thing to check. ``skipped`` says why it cannot be checked here; ``where`` whose code it runs, if known."""

    kind: Kind
    subject: str
    target: str
    run: Callable[[], Iterable[Told]]
    skipped: str = ""
    where: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What the step is called between the processes."""
        return " ".join(filter(None, (self.kind, self.subject, self.target)))


class DeviceStopped(Exception):
    """The device answers nothing more in this process."""


class Reporter:
    """Runs steps and tells the parent."""

    def __init__(self, pipe: int, skip: Iterable[str], failed: Iterable[str], seconds: float) -> None:
        self._pipe, self._skip, self._seconds = pipe, frozenset(skip), seconds
        self.failed = set(failed)

    def tell(self, event: str, **more: Any) -> None:
        """Write one event, in a line of its own whatever was written before."""
        data = b"\n" + MARK + json.dumps({"event": event, **more}).encode() + b"\n"
        while data:
            data = data[os.write(self._pipe, data) :]

    def run(self, step: Step) -> None:
        """Run one step, unless an earlier process did."""
        if step.name in self._skip:
            return
        head = {"name": step.name, "kind": step.kind, "subject": step.subject, "target": step.target}
        self.tell("start", **head, where=step.where)
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
        findings = [replace(one, where=one.where or step.where) for one in told if isinstance(one, Finding)]
        if any(map(is_refusing, findings)):
            self.failed.add(step.name)
        rows = [asdict(finding) for finding in findings]
        code = {
            name: [asdict(one) for one in told if isinstance(one, kind)]
            for name, kind in (("entries", EntryRow), ("warnings", WarningRow))
        }
        self.tell("done", **head, skipped=step.skipped, findings=rows, **code, seconds=time.perf_counter() - start)
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


def main(
    distribution: str,
    *,
    plugin: str | None,
    pipe: int,
    skip: Iterable[str],
    failed: Iterable[str],
    seconds: float,
    cache_dir: str | None,
) -> None:
    """Check a distribution's plugins, or one of them, and end the process whatever threads they left.

    ``skip`` names the steps that earlier processes ran, ``failed`` those of them that failed.
    """
    faulthandler.enable()
    reporter = Reporter(pipe, skip, failed, seconds)
    found: list[Catalog] = []

    limit, remedy = _limit(seconds)

    def find() -> Catalog:
        entered.tell(_teller(reporter, distribution))
        found.append(discover(timeout_s=limit))
        entered.tell(lambda who: None)
        return found[0]

    def load() -> Iterator[Finding]:
        yield from (_for_author(finding, remedy) for finding in _load_findings(find(), distribution, plugin))

    # What the later steps need is loaded in each process; it is reported once.
    reporter.run(Step("load", distribution, "", load))
    if not found:
        find()
    rows = _rows_of(found[0], distribution, plugin)
    shown = [asdict(row) | {"keys": list(map(str, row.keys))} for row in rows]
    own = _own(found[0], rows)
    reporter.tell("plugins", plugins=shown, steps=1 + _count(own))
    # One for all steps: where the cache keeps nothing, it keeps at least what it has built.
    builds = any(is_device_backend(registered.spec.backend) for registered in own) and has_toolkit()
    builder = Builder(BuildCache(Path(cache_dir) if cache_dir else None)) if builds else None
    for step in _steps(found[0], rows, reporter.failed, builder, cache_dir):
        reporter.run(step)
    if builder is not None:
        reporter.tell("builds", findings=[asdict(finding) for finding in builder.findings()])
    reporter.tell("end")
    leave()


def _limit(seconds: float) -> tuple[float, str]:
    """Return how long a plugin may load, and how it gets longer: an audit's limit, and at most half of a step's time.

    The other half is for what follows in the step; UsageError for a lever without a sensible value.
    """
    given = {_LIMIT: os.environ[_LIMIT]} if _LIMIT in os.environ else {}
    levers, malformed = read_levers(CORE_LEVERS, [("environment", given)])
    if malformed:
        raise UsageError(f"{_LIMIT}: {malformed[0].why}")
    limit = float(levers[_LIMIT] or 10)
    if limit <= seconds * 0.5:
        return limit, RAISE_LIMIT
    return seconds * 0.5, f"raise --timeout: a plugin may load for half of it, and for {_LIMIT} ({limit:g} s) at most"


def _for_author(finding: Finding, raise_limit: str) -> Finding:
    """Return a finding for who can mend the plugin: nothing is blocked here."""
    remedies = tuple(
        raise_limit if remedy == RAISE_LIMIT else remedy for remedy in finding.remedies if "--no-plugin" not in remedy
    )
    return replace(finding, remedies=remedies)


def _teller(reporter: Reporter, distribution: str) -> Callable[[str], None]:
    """Return what tells the parent which plugin loads."""
    entries = {f"plugin {entry.name}": entry for entry in scan().entries}

    def tell(who: str) -> None:
        if (entry := entries.get(who)) is None:
            reporter.tell("loading", plugin="")
            return
        where = f"{entry.distribution} {entry.version} ({entry.value})"
        is_own = same_distribution(entry.distribution, distribution)
        is_host = same_distribution(entry.distribution, HOST_DISTRIBUTION)
        reporter.tell("loading", plugin=entry.name, where=where, whose="own" if is_own else "" if is_host else "other")

    return tell


def _places(*functions: object) -> tuple[str, ...]:
    """Return where functions are written, of those of Python that say so."""
    codes = [getattr(function, "__code__", None) for function in functions]
    return tuple(f"{code.co_filename}:{code.co_firstlineno}" for code in codes if code is not None)


def _rows_of(catalog: Catalog, distribution: str, plugin: str | None) -> list[PluginRow]:
    """Return the plugins to check: all of a distribution, or the one that was named."""
    rows = (row for row in catalog.plugins if same_distribution(row.distribution, distribution))
    return [row for row in rows if plugin in (None, row.name)]


def _own(catalog: Catalog, rows: Iterable[PluginRow]) -> list[Registered]:
    """Return what these plugins register, if they have loaded."""
    names = {row.name for row in rows if row.status == "loaded"}
    return [registered for registered in catalog.kernels if registered.provider.plugin in names]


def _load_findings(catalog: Catalog, distribution: str, plugin: str | None) -> Iterator[Finding]:
    """Yield what discovery and selection find about the plugins of one distribution, or about one of them."""
    rows = _rows_of(catalog, distribution, plugin)
    if not rows:
        why = f"{distribution} has no entry point in the group {ENTRY_POINT_GROUP}"
        remedies = (f'list the plugin\'s module in pyproject.toml: [project.entry-points."{ENTRY_POINT_GROUP}"]',)
        yield Finding("PLUGIN_NOT_FOUND", distribution, why, remedies=remedies)
    names = {row.name for row in rows}
    places = tuple(f"{row.distribution} {row.version} ({row.value}" if plugin else f"{row.distribution} {row.version} ("
                   for row in rows)  # fmt: skip
    for finding in catalog.findings:
        if finding.subject in names or any(where.startswith(places) for where in finding.where):
            yield finding
    own = [r for r in catalog.kernels if r.provider.plugin in names]
    yield from _other_contracts(catalog, own)
    yield from equal_kernels(catalog, own, (CPU_TARGET, *(Target(str(arch), arch) for arch in ARCHS)))
    yield from equal_builders(catalog, rows)
    yield from manifest_findings(catalog, rows)


def _other_contracts(catalog: Catalog, own: Iterable[Registered]) -> Iterator[Finding]:
    for registered in own:
        spec = registered.spec
        owner = owner_contract(catalog, spec.kernel_key)
        if owner and owner != spec.contract:
            why = f"{registered.provider} implements contract {spec.contract}, but {spec.key} has contract {owner}"
            remedies = (f"implement contract {owner}", "or register the kernel under a key of its own")
            yield Finding("SIGNATURE_MISMATCH", spec.key, why, (str(registered.provider),), remedies)


def _steps(
    catalog: Catalog, rows: Iterable[PluginRow], failed: Set[str], builder: Builder | None, cache_dir: str | None
) -> Iterator[Step]:
    """Yield what follows the load: contracts, then code for every architecture, then numerics on what is there.

    ``failed`` grows while steps run: of a contract that is faulty no kernel can be proven. Without ``builder`` nothing
    is compiled.
    """
    own = _own(catalog, rows)
    contracts = {r.spec.contract: catalog.contracts[r.spec.contract] for r in own}
    for name, contract in sorted(contracts.items()):
        where = _places(contract.reference, contract.inputs)
        yield Step("contract", name, "", lambda c=contract: _contract_findings(c), where=where)  # type: ignore[misc]
    requests = _requests(own)
    yield from _compile_steps(requests, builder)
    broken = frozenset(request for request, keys in requests.items() if _compile_name(request, keys) in failed)
    faulty = frozenset(name for name in contracts if f"contract {name}" in failed)
    yield from _plan_steps(catalog, own, faulty, broken, builder)
    on_host = [r for r in own if is_host_backend(r.spec.backend)]
    yield from _proof_steps(catalog, on_host, CPU_TARGET, faulty, "", cache_dir)
    compiled = [r for r in own if not is_host_only(r.spec)]
    if compiled:
        target, missing = resolve_target(None)
        why = missing.why if missing is not None else ""
        yield from _proof_steps(catalog, compiled, target or Target("cuda"), faulty, why, cache_dir)


def _count(own: Sequence[Registered]) -> int:
    """Return how many steps follow the load."""
    for_devices = [r.spec for r in own if is_device_backend(r.spec.backend)]
    plans = sum(len(_declared_archs(spec.code_archs)) for spec in for_devices)
    proofs = sum(is_host_backend(r.spec.backend) for r in own) + sum(not is_host_only(r.spec) for r in own)
    return len({r.spec.contract for r in own}) + len(_requests(own)) + plans + proofs


def _contract_findings(contract: Contract) -> Iterator[Finding]:
    """Make each case's arguments, bind them, and see that the reference gives every output in its shape."""
    import numpy as np

    cases: dict[str, list[str]] = {}  # by what is wrong with them
    logs: dict[str, str] = {}
    for case in contract.cases:
        try:
            given = contract.arguments(case, np.random.default_rng(0))
            bound = contract.signature.bind(contract.name, (), given)
            _, problems = contract.expected(case, given)
            why, log = "; ".join([*contract.case_problems(case, bound.dims), *problems]), ""
        except Exception as error:  # noqa: BLE001  (a plugin's contract may raise anything)
            why, log = one_line(error), cause_chain(error)
        if why:
            cases.setdefault(why, []).append(case.name)
            logs.setdefault(why, log)
    for why, names in cases.items():
        which = f"{'case' if len(names) == 1 else 'cases'} {', '.join(names)}"
        remedies = ("correct the contract's inputs, reference or cases",)
        yield Finding("BAD_SPEC", contract.name, f"{which}: {why}", remedies=remedies, log=logs[why])


def _declared_archs(code_archs: Iterable[CodeArch]) -> list[Arch]:
    """Return the architectures to compile for: those that are named, and ours that the code accepts."""
    entries = [entry for entry in code_archs if entry.kind != "host"]
    named = {Arch(e.capability, e.suffix) if e.suffix else canonical_arch(e.capability) for e in entries}
    accepted = {arch for arch in (*ARCHS, *named) if any(entry.rejects(arch) is None for entry in entries)}
    return sorted(accepted, key=lambda arch: (arch.capability, arch.suffix))


def _requests(own: Iterable[Registered]) -> dict[BuildRequest, list[str]]:
    """Return what is to be compiled, with the keys that need it."""
    requests: dict[BuildRequest, list[str]] = {}
    for registered in own:
        backend = registered.spec.backend
        if is_device_backend(backend):
            for arch in _declared_archs(registered.spec.code_archs):
                requests.setdefault(backend.request(arch), []).append(registered.spec.key)
    return requests


def _compile_subject(request: BuildRequest, keys: Iterable[str]) -> str:
    return f"{request.name} ({', '.join(sorted(set(keys)))})"


def _compile_name(request: BuildRequest, keys: Iterable[str]) -> str:
    """Return what the step is called that compiles this."""
    return f"compile {_compile_subject(request, keys)} {request.arch}"


def _compile_steps(requests: Mapping[BuildRequest, list[str]], builder: Builder | None) -> Iterator[Step]:
    skipped = NO_COMPILER if builder is None else ""
    for request, keys in requests.items():

        def build(request: BuildRequest = request, keys: list[str] = keys) -> Iterator[Told]:
            assert builder is not None  # noqa: S101  (skipped without one)
            try:
                built = builder.build(request)
                yield from entry_rows(request, keys, built)
                yield from warning_rows(request, built)
            except BuildFailure as failure:
                yield failure.finding(keys[0]).explaining(f"{key} has no code" for key in keys[1:])

        where = (str(request.source),)
        yield Step("compile", _compile_subject(request, keys), str(request.arch), build, skipped, where)


def _plan_steps(
    catalog: Catalog,
    own: Iterable[Registered],
    faulty: frozenset[str],
    broken: Set[BuildRequest],
    builder: Builder | None,
) -> Iterator[Step]:
    """Yield a step for each kernel and architecture: what its planner makes of the contract's cases.

    ``broken`` is what does not compile: a planner reads what the compiled code needs.
    """
    no_toolkit = NO_COMPILER if builder is None else ""
    for registered in own:
        spec, backend = registered.spec, registered.spec.backend
        if not is_device_backend(backend):
            continue
        contract = catalog.contracts[spec.contract]
        skipped = f"contract {spec.contract} is faulty" if spec.contract in faulty else no_toolkit
        for arch in _declared_archs(spec.code_archs):
            run = partial(_plan, builder, spec, backend, contract, arch)
            why = skipped or ("its code does not compile" if backend.request(arch) in broken else "")
            yield Step("plan", spec.key, str(arch), run, why, _places(getattr(backend, "planner", None)))


def _plan(
    builder: Builder | None, spec: KernelSpec, backend: DeviceBackend, contract: Contract, arch: Arch
) -> Iterator[Finding]:
    assert builder is not None  # noqa: S101  (skipped without one)
    request = backend.request(arch)
    try:
        built = builder.build(request)
    except BuildFailure:  # the step that compiles has said it
        return
    yield from plan_findings(spec, backend, contract, built, request.entries)


def _proof_steps(
    catalog: Catalog,
    own: Iterable[Registered],
    target: Target,
    faulty: frozenset[str],
    no_target: str,
    cache_dir: str | None,
) -> Iterator[Step]:
    levers, _ = read_levers(catalog.levers, [])
    session: LookupSession | None = None
    for registered in own:
        spec, skipped = registered.spec, no_target
        if spec.contract in faulty:
            skipped = f"contract {spec.contract} is faulty"
        elif not skipped and all(entry.rejects(target.arch) for entry in spec.code_archs):
            skipped = f"it needs {' or '.join(spec.archs)}, here is {target}"
        if session is None and not skipped:
            runner = choose_runner(target, None, cache_dir)
            session = LookupSession(catalog, target, levers, runner=runner)
        where = _places(getattr(spec.backend, "function", None)) or _source_of(spec)
        yield Step("prove", spec.key, target.name, lambda r=registered, s=session: _proof(r, s), skipped, where)  # type: ignore[misc]


def _source_of(spec: KernelSpec) -> tuple[str, ...]:
    """Return the file that a kernel for devices is written in."""
    source = getattr(spec.backend, "source", None)
    return (str(source),) if isinstance(source, Path) else ()


def _proof(registered: Registered, session: LookupSession) -> Iterator[Finding]:
    """Prove one spec, whether or not selection would choose it."""
    spec, runner = registered.spec, session.runner
    contract = session.catalog.contracts[spec.contract]
    handle = Handle(spec.kernel_key, spec, contract, registered.provider, runner)
    state = runner.state(spec)
    if state.failure is not None:
        yield state.failure
        return
    device = session.target.device
    memory = host_memory() if device is None else device_memory(device.ordinal)
    said: set[str] = set()
    for result in prove(handle, memory, session.handle_of):
        fresh = [finding for finding in result.findings if finding.code not in said]
        said.update(finding.code for finding in fresh)
        if result.is_last:
            raise DeviceStopped(fresh)
        yield from fresh


def is_refusing(finding: Finding) -> bool:
    """Whether a finding refuses a plugin: an author's kit judges as for a release."""
    return finding.severity("qualify") is Severity.REFUSE


def end_with(parent: int) -> None:
    """Let the kernel end this process with its parent, which may itself be ended at any moment (Linux)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    end_with(arguments.pop("parent"))
    sys.path[:] = arguments.pop("path")
    try:
        main(**arguments)
    except Exception as error:  # noqa: BLE001  (the parent says it, who knows whose fault it is)
        if not isinstance(error, UsageError):  # the parent says that as its own
            sys.stderr.write(f"{error}\n" if isinstance(error, MusterError) else traceback.format_exc())
            sys.stderr.flush()
        with suppress(OSError):
            reporter = Reporter(arguments["pipe"], (), (), 0.0)
            reporter.tell("stopped", is_usage=isinstance(error, UsageError), why=str(error))
        os._exit(70)
