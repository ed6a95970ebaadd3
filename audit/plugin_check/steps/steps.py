"""The steps of ``muster plugin check`` that follow the load: contracts, code for every architecture, plans, proofs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from pathlib import Path

from kernel_muster.audit.plugin_check.protocol.machine_code import entry_rows, warning_rows
from kernel_muster.audit.plugin_check.steps.loading import own_kernels
from kernel_muster.audit.plugin_check.steps.step import DeviceStopped, Step, Told
from kernel_muster.audit.plugin_check.steps.targets import declared_archs, requests_of
from kernel_muster.audit.proof.plan_check import plan_findings
from kernel_muster.audit.proof.proofs import device_memory, host_memory, prove
from kernel_muster.registry.backends.builder import Builder
from kernel_muster.registry.backends.cuda_kernel import DeviceBackend, is_device_backend
from kernel_muster.registry.backends.nvrtc.headers import EXTRAS
from kernel_muster.registry.backends.request import BuildFailure, BuildRequest
from kernel_muster.registry.contract.contracts import Contract
from kernel_muster.registry.contract.specs import KernelSpec, Registered, is_host_backend
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.hardware.arch import Arch
from kernel_muster.registry.hardware.target import CPU_TARGET, Target, resolve_target
from kernel_muster.registry.keys import parse_key
from kernel_muster.registry.launch.choose import choose_runner
from kernel_muster.registry.levers import read_levers
from kernel_muster.registry.messages.message import message
from kernel_muster.registry.plugin_code.watch import cause_chain, one_line
from kernel_muster.registry.selection.catalog import Catalog, PluginRow
from kernel_muster.registry.selection.handles import Handle
from kernel_muster.registry.selection.lookup_session import LookupSession
from kernel_muster.registry.selection.select import is_host_only

NO_COMPILER = f"no compiler is installed: {' or '.join(EXTRAS.values())}"


def steps_after_load(
    catalog: Catalog, rows: Iterable[PluginRow], failed: Set[str], builder: Builder | None, cache_dir: str | None
) -> Iterator[Step]:
    """Yield what follows the load: contracts, then code for every architecture, then numerics on what is there.

    ``failed`` grows while steps run: of a contract that is faulty no kernel can be proven. Without ``builder`` nothing
    is compiled.
    """
    own = own_kernels(catalog, rows)
    contracts = {r.spec.contract: catalog.contracts[r.spec.contract] for r in own}
    for name, contract in sorted(contracts.items()):
        where = _places(contract.reference, contract.inputs)
        yield Step("contract", name, "", lambda c=contract: _contract_findings(c), where=where)  # type: ignore[misc]
    requests = requests_of(own)
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


def step_count(own: Sequence[Registered]) -> int:
    """Return how many steps follow the load."""
    for_devices = [r.spec for r in own if is_device_backend(r.spec.backend)]
    plans = sum(len(declared_archs(spec.code_archs)) for spec in for_devices)
    proofs = sum(is_host_backend(r.spec.backend) for r in own) + sum(not is_host_only(r.spec) for r in own)
    return len({r.spec.contract for r in own}) + len(requests_of(own)) + plans + proofs


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
                yield failure.finding(keys[0]).explaining(
                    message("consequence.no_code", key=parse_key(key)) for key in keys[1:]
                )

        where = (str(request.source),)
        subject = _compile_subject(request, keys)
        yield Step("compile", subject, str(request.arch), build, skipped, where, tuple(sorted(set(keys))))


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
        for arch in declared_archs(spec.code_archs):
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


def _places(*functions: object) -> tuple[str, ...]:
    """Return where functions are written, of those of Python that say so."""
    codes = [getattr(function, "__code__", None) for function in functions]
    return tuple(f"{code.co_filename}:{code.co_firstlineno}" for code in codes if code is not None)
