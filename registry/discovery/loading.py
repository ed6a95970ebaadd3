"""Loading one plugin in a transaction: everything it registers, or nothing and the reasons why."""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from numbers import Number
from pathlib import Path
from types import FunctionType, ModuleType, NoneType
from typing import Any

import pluggy
from kernel_muster.registry import hookspecs
from kernel_muster.registry.contract.builders import ModelBuilder
from kernel_muster.registry.contract.contracts import Contract, Tolerance
from kernel_muster.registry.contract.signature import Signature
from kernel_muster.registry.contract.specs import KernelSpec, is_backend, is_host_backend
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.hardware.arch import CPU
from kernel_muster.registry.levers import Lever
from kernel_muster.registry.messages.message import Message, message
from kernel_muster.registry.plugin_code.copies import copy_of
from kernel_muster.registry.plugin_code.process_state import process_state, put_back
from kernel_muster.registry.plugin_code.python_code import remember_sources
from kernel_muster.registry.plugin_code.regular_files import archive_of, install_archive
from kernel_muster.registry.plugin_code.watch import Outcome, cause_chain, one_line, watched
from kernel_muster.registry.suggestions import Names

_IMPL = f"{hookspecs.PROJECT}_impl"
_OBSERVER = "muster_audit_finished"
#: What each collecting hook returns.
_ITEMS: dict[str, type] = {
    "muster_contracts": Contract,
    "muster_kernels": KernelSpec,
    "muster_manifests": Path,
    "muster_models": ModelBuilder,
    "muster_levers": Lever,
}
HOOKS = (*_ITEMS, _OBSERVER)


def _hookspecs_alone() -> ModuleType:
    """Return the hookspecs without the other names of their module: pluggy looks at each name for every plugin."""
    alone = ModuleType(hookspecs.__name__)
    vars(alone).update({name: getattr(hookspecs, name) for name in HOOKS}, __dir__=lambda: list(HOOKS))
    return alone


_HOOKSPECS = _hookspecs_alone()
#: Which page documents what a hook returns, where it is not that on plugins.
_MANUAL = {"muster_levers": "levers.md", "muster_models": "add-a-model.md", "muster_manifests": "write-a-manifest.md"}
#: Where a plugin of this process is said to come from.
LOCAL = "(local)"
#: What helps a plugin that takes too long to load, where the limit is a boot's.
RAISE_LIMIT = message("remedy.raise_limit")
#: Templates of remedies that keep a plugin out of a boot.
BLOCKING = ("remedy.block", "remedy.uninstall_or_block")
# A generator that never ends must not eat the memory before the time limit ends it.
_MOST_ITEMS = 100_000


@dataclass
class Loaded:
    """What one plugin gave: its items by hook, and findings; with a refusing finding the items do not count."""

    hooks: tuple[str, ...] = ()
    items: dict[str, list[Any]] = field(default_factory=dict)
    observer: Callable[[Any], object] | None = None
    findings: list[Finding] = field(default_factory=list)


def load_plugin(name: str, where: str, load: Callable[[], object], seconds: float) -> Loaded:
    """Import a plugin, check it, and call each of its hooks; never raises what the plugin raises."""
    loaded = Loaded()
    before = process_state()
    outcome = watched(lambda: _load(name, where, load, loaded), seconds, f"plugin {name}")
    changed = [process_changed(name, where, found) for found in [put_back(before)] if found]
    if outcome.is_hanging:
        # The abandoned thread may still write into ``loaded``: leave it alone.
        why = f"still importing, or in a hook, after {seconds:g} s"
        return Loaded(findings=[_hanging(name, where, why, outcome), *changed])
    if outcome.error is not None:
        loaded.findings.append(_failed(name, where, "its import failed", outcome.error))
    loaded.findings.extend(changed)
    return loaded


def watch_failed(name: str, where: str, when: str, outcome: Outcome[Any], seconds: float) -> Finding:
    """Return the finding of a plugin whose objects raised, or did not answer in time, when they were looked at."""
    if outcome.error is None:
        return _hanging(name, where, f"{when}, its code ran longer than {seconds:g} s", outcome)
    return _failed(name, where, f"{when}, its code raised", outcome.error)


def _hanging(name: str, where: str, why: str, outcome: Outcome[Any]) -> Finding:
    remedies = (message("remedy.be_quick"), RAISE_LIMIT, _leave_out(name, where))
    return Finding("PLUGIN_LOAD_FAILED", name, why, (where,), remedies, log=outcome.stack)


def process_changed(name: str, where: str, found: Sequence[str], when: str = "while it loaded") -> Finding:
    """Return the finding of a plugin that changed the process of the program that boots."""
    why = message("process_changed", when=when, changes=tuple(found))
    remedies = (message("remedy.change_nothing"), _leave_out(name, where))
    return Finding("PROCESS_CHANGED", name, why, (where,) if where else (), remedies)


def _failed(name: str, where: str, what: str, error: BaseException) -> Finding:
    return Finding(
        "PLUGIN_LOAD_FAILED",
        name,
        message("plugin_load_failed", what=what, error=one_line(error)),
        (where,),
        (message("remedy.repair_plugin" if where == LOCAL else "remedy.repair"), _leave_out(name, where)),
        log=cause_chain(error),
    )


def _leave_out(name: str, where: str) -> Message:
    """Say how a boot does without a plugin: one of this process it was given by its own program."""
    return message("remedy.leave_out" if where == LOCAL else "remedy.block", plugin=name)


def _load(name: str, where: str, load: Callable[[], object], loaded: Loaded) -> None:
    imported = set(sys.modules)
    plugin = load()
    if where != LOCAL:
        remember_sources(sys.modules.keys() - imported)
    if kind := _kind_of_no_plugin(plugin):
        named = "the plugin is" if where == LOCAL else "the entry point names"
        loaded.findings.append(_bad_spec(name, where, f"{named} {kind}, not a module"))
        return
    loaded.findings.extend(_unknown_hooks(name, where, plugin))
    loaded.findings.extend(_wrappers(name, where, plugin))
    if loaded.findings:
        return
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(_HOOKSPECS)
    try:
        manager.register(plugin, name)
    except pluggy.PluginValidationError as error:
        loaded.findings.append(_bad_spec(name, where, str(error)))
        return
    callers = {caller.name: caller for caller in manager.get_hookcallers(plugin) or ()}
    loaded.hooks = tuple(sorted(callers))
    for hook in HOOKS:
        impls = callers[hook].get_hookimpls() if hook in callers else []
        if len(impls) > 1:
            names = ", ".join(sorted(getattr(impl.function, "__name__", hook) for impl in impls))
            loaded.findings.append(_bad_spec(name, where, f"several functions implement {hook}: {names}; one may"))
        elif impls and hook == _OBSERVER:
            loaded.observer = _observing(impls[0])
        elif impls:
            loaded.items[hook] = _collect(name, where, hook, impls[0].function, loaded.findings)
    if not loaded.findings and loaded.observer is None and not any(loaded.items.values()):
        why = message("plugin_empty" if loaded.hooks else "plugin_empty.no_hook")
        remedies = (message("remedy.mark_hooks", hooks=HOOKS), message("remedy.uninstall_it"))
        loaded.findings.append(Finding("PLUGIN_EMPTY", name, why, (where,), remedies))


def _kind_of_no_plugin(plugin: object) -> str:
    """Return what a plugin is in words where it can have no hooks: a class, a function or a plain value."""
    kind = type(plugin)
    if isinstance(plugin, type):
        return f"the class {plugin.__name__}"
    if inspect.isroutine(plugin) or isinstance(plugin, partial):
        return f"the function {getattr(plugin, '__name__', kind.__name__)}"
    if plugin is None:
        return "None"
    if isinstance(plugin, Number) or (kind.__module__ == "builtins" and not isinstance(plugin, ModuleType)):
        return f"a value of type {kind.__name__}"
    return ""


def _observing(impl: pluggy.HookImpl) -> Callable[[Any], object]:
    """Return the observer as a function of the report; like any hookimpl, it need not take what it does not use."""
    return impl.function if impl.argnames else lambda report: impl.function()


def _members(plugin: object) -> Iterable[tuple[str, object]]:
    for member in dir(plugin):
        yield member, getattr(plugin, member, None)


def _options(value: object) -> dict[str, Any] | None:
    """Return how a member is marked as a hook, if it is; a proxy that stands for nothing yet may raise anything."""
    try:
        options = getattr(value, _IMPL, None)
    except Exception:  # noqa: BLE001  (what a plugin imports is not ours, and no hook)
        return None
    return options if isinstance(options, dict) else None


def _unknown_hooks(name: str, where: str, plugin: object) -> list[Finding]:
    """Find what is marked and no hook or no function, and functions named like hooks that are not marked."""
    found, known = [], Names(HOOKS)
    for member, value in _members(plugin):
        options = _options(value)
        marked = options is not None
        hook = (options and options["specname"]) or member
        if marked and hook not in HOOKS:
            why = message("unknown_hook", hook=hook, near=known.near(hook))
            remedy = message("remedy.list_hooks", hooks=HOOKS)
        elif marked and not inspect.isroutine(value):
            why = message("unknown_hook.no_function", hook=member, type=type(value).__name__)
            remedy = message("remedy.make_function")
        elif not marked and member in HOOKS and callable(value):
            why, remedy = message("unknown_hook.unmarked", hook=member), message("remedy.mark_hook")
        elif not marked and member.startswith("muster_") and _is_own_function(plugin, value):
            why = message("unknown_hook.like_one", hook=member, near=known.near(member))
            remedy = message("remedy.name_hook")
        else:
            continue
        found.append(Finding("UNKNOWN_HOOK", name, why, (where, _source(value)), (remedy,)))
    return found


def _is_own_function(plugin: object, value: object) -> bool:
    return isinstance(value, FunctionType) and value.__module__ == getattr(plugin, "__name__", None)


def _source(value: object) -> str:
    code = getattr(value, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else type(value).__name__


def _wrappers(name: str, where: str, plugin: object) -> list[Finding]:
    """Refuse options by which one plugin would depend on the others or on their order."""
    found = []
    for member, value in _members(plugin):
        options = _options(value)
        if options is None:
            continue
        used = [o for o in ("wrapper", "hookwrapper", "tryfirst", "trylast", "optionalhook") if options.get(o)]
        if used:
            found.append(_bad_spec(name, where, f"hookimpl {member} uses {', '.join(used)}: plain hookimpls only"))
    return found


def _bad_spec(name: str, where: str, why: str, manual: str = "write-a-plugin.md") -> Finding:
    remedies = (message("remedy.correct_plugin", page=manual), _leave_out(name, where))
    return Finding("BAD_SPEC", name, why, (where,), remedies)


def _collect(name: str, where: str, hook: str, function: Callable[[], Any], findings: list[Finding]) -> list[Any]:
    """Call one hookimpl and materialise what it returns; each bad item is a finding."""
    try:
        result = function()
        if result is None:
            return []
        if isinstance(result, str | bytes | dict) or not isinstance(result, Iterable):
            kind = _ITEMS[hook].__name__
            raise TypeError(f"{hook} returned {type(result).__name__}, expected an iterable of {kind}")
        items = list(islice(result, _MOST_ITEMS + 1))
    except BaseException as error:  # noqa: BLE001  (SystemExit in a hook must not end the host)
        findings.append(_failed(name, where, f"hook {hook} failed", error))
        return []
    if len(items) > _MOST_ITEMS:
        findings.append(_bad_spec(name, where, f"{hook} returned more than {_MOST_ITEMS} items"))
        return []
    kept = []
    for position, item in enumerate(items):
        copy, problems = _checked(hook, position, item)
        findings.extend(_bad_spec(name, where, why, _MANUAL.get(hook, "write-a-plugin.md")) for why in problems)
        if copy is not None:
            kept.append(copy)
    return kept


def _checked(hook: str, position: int, item: Any) -> tuple[Any, list[str]]:
    """Return a copy of an item (None where there can be none), and what is wrong with it."""
    kind = _ITEMS[hook]
    label = f"{hook}()[{position}]"
    try:
        if not isinstance(item, kind):
            return None, [f"{label}: expected {kind.__name__}, got {type(item).__name__}"]
        item = copy_of(item, kind)
    except Exception as error:  # noqa: BLE001  (what a plugin's class does when it is looked at)
        return None, [f"{label}: {error if isinstance(error, TypeError) else f'malformed: {one_line(error)}'}"]
    if isinstance(item, Contract | KernelSpec | ModelBuilder | Lever):
        title = item.key if isinstance(item, KernelSpec) else item.name
        label = f"{label} {title if isinstance(title, str) else type(title).__name__}"
        try:
            problems = list(_mistyped(item)) or item.problems()
        except Exception as error:  # noqa: BLE001  (fields may be of any type)
            problems = [f"malformed: {one_line(error)}"]
        return item, [f"{label}: {problem}" for problem in problems]
    if isinstance(item, Path) and not item.is_dir():
        return item, [f"{label}: {item} is no folder; {_no_folder(item)}"]
    return item, []


def _no_folder(path: Path) -> str:
    """Return the usual cause of a missing folder: an archive on sys.path, or a wheel without its data."""
    if archive := archive_of(path):
        return (
            f"it is in the archive {archive}, and only modules can be imported from there: {install_archive(archive)}"
        )
    return "the usual cause is a wheel without it: declare its files as package data, in pyproject.toml"


#: Fields whose types the rules rely on, and the reports; what else is malformed the items say themselves.
_FIELDS: Mapping[type, Mapping[str, tuple[type | tuple[type, ...], str]]] = {
    KernelSpec: {"deterministic": (bool, "True or False"), "provenance": (str, "text")},
    Contract: {
        "summary": (str, "text"),
        "signature": (Signature, "a Signature"),
        "tolerance": (Tolerance, "a Tolerance"),
        "output_tolerances": (Mapping, "a mapping"),
        "by_rows": (Mapping, "a mapping"),
    },
    Lever: {
        "evidence": (str, "text"),
        "diagnostic": (bool, "True or False"),
        "minimum": ((int, NoneType), "an integer or None"),
        "maximum": ((int, NoneType), "an integer or None"),
        "effects": (Mapping, "a mapping"),
    },
}


def _mistyped(item: Any) -> Iterator[str]:
    """Say which fields are of another type than their own; each letter of a text would count as an item of a tuple."""
    for name in ("aliases", "bit_identical_to", "choices", "conflicts", "open_keys"):
        value = getattr(item, name, ())
        if not isinstance(value, tuple) or not all(isinstance(one, str) for one in value):
            yield f"{name} is {value!r}, expected a tuple of text"
    for kind, fields in _FIELDS.items():
        for name, (types, words) in fields.items() if isinstance(item, kind) else ():
            value = getattr(item, name)
            # A class of a plugin's own would judge in the place of ours.
            if not isinstance(value, types) or (types in (Signature, Tolerance) and type(value) is not types):
                yield f"{name} is {value!r}, expected {words}"
    is_for_host = isinstance(item, KernelSpec) and isinstance(item.archs, tuple) and CPU in item.archs
    if is_for_host and is_backend(item.backend) and not is_host_backend(item.backend):
        yield f"archs names {CPU}, but backend {type(item.backend).__name__} does not run on the host"
