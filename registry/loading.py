"""Loading one plugin in a transaction: everything it registers, or nothing and the reasons why."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import FunctionType
from typing import Any

import pluggy
from kernel_muster.registry import hookspecs
from kernel_muster.registry.builders import ModelBuilder
from kernel_muster.registry.contracts import Contract
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.keys import did_you_mean
from kernel_muster.registry.levers import Lever
from kernel_muster.registry.specs import KernelSpec
from kernel_muster.registry.watch import cause_chain, one_line, watched

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
    outcome = watched(lambda: _load(name, where, load, loaded), seconds, name)
    if outcome.is_hanging:
        why = f"still importing, or in a hook, after {seconds:g} s"
        remedies = (
            "make its import and hooks quick",
            "raise MUSTER_PLUGIN_TIMEOUT_S",
            f"block it: --no-plugin {name}",
        )
        # The abandoned thread may still write into ``loaded``: leave it alone.
        return Loaded(findings=[Finding("PLUGIN_LOAD_FAILED", name, why, (where,), remedies, log=outcome.stack)])
    if outcome.error is not None:
        loaded.findings.append(_failed(name, where, "its import failed", outcome.error))
    return loaded


def _failed(name: str, where: str, what: str, error: BaseException) -> Finding:
    return Finding(
        "PLUGIN_LOAD_FAILED",
        name,
        f"{what}: {one_line(error)}",
        (where,),
        ("repair or reinstall the distribution", f"block the plugin: --no-plugin {name}"),
        log=cause_chain(error),
    )


def _load(name: str, where: str, load: Callable[[], object], loaded: Loaded) -> None:
    plugin = load()
    if inspect.isclass(plugin):
        loaded.findings.append(
            _bad_spec(name, where, f"the entry point names the class {plugin.__name__}, not a module")
        )
        return
    loaded.findings.extend(_unknown_hooks(name, where, plugin))
    loaded.findings.extend(_wrappers(name, where, plugin))
    if loaded.findings:
        return
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(plugin, name)
    except pluggy.PluginValidationError as error:
        loaded.findings.append(_bad_spec(name, where, str(error)))
        return
    callers = {caller.name: caller for caller in manager.get_hookcallers(plugin) or ()}
    loaded.hooks = tuple(sorted(callers))
    for hook in _ITEMS:
        for impl in callers[hook].get_hookimpls() if hook in callers else ():
            loaded.items[hook] = _collect(name, where, hook, impl.function, loaded.findings)
    if _OBSERVER in callers:
        loaded.observer = callers[_OBSERVER].get_hookimpls()[0].function
    if not loaded.findings and loaded.observer is None and not any(loaded.items.values()):
        why = "every hook returned nothing" if loaded.hooks else "it implements no hook"
        remedies = (f"mark its functions @km.hookimpl; hooks are {', '.join(HOOKS)}", "or uninstall it")
        loaded.findings.append(Finding("PLUGIN_EMPTY", name, why, (where,), remedies))


def _members(plugin: object) -> Iterable[tuple[str, object]]:
    for member in dir(plugin):
        yield member, getattr(plugin, member, None)


def _unknown_hooks(name: str, where: str, plugin: object) -> list[Finding]:
    """Find marked functions that are no hook, and functions named like hooks that are not marked."""
    found = []
    for member, value in _members(plugin):
        marked = isinstance(getattr(value, _IMPL, None), dict)
        hook = (getattr(value, _IMPL)["specname"] or member) if marked else member
        if marked and hook not in HOOKS:
            why = f"{hook} is no hook{did_you_mean(hook, HOOKS)}"
            remedies = (f"hooks are {', '.join(HOOKS)}",)
        elif not marked and member in HOOKS and callable(value):
            why, remedies = (
                f"{member} is not marked as a hook, so that it would never run",
                ("mark it @km.hookimpl",),
            )
        elif not marked and member.startswith("muster_") and _is_own_function(plugin, value):
            why = f"{member} is named like a hook, but there is none of that name{did_you_mean(member, HOOKS)}"
            remedies = ("correct the name and mark it @km.hookimpl, or name it otherwise",)
        else:
            continue
        found.append(Finding("UNKNOWN_HOOK", name, why, (where, _source(value)), remedies))
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
        options = getattr(value, _IMPL, None)
        if not isinstance(options, dict):
            continue
        used = [o for o in ("wrapper", "hookwrapper", "tryfirst", "trylast", "optionalhook") if options.get(o)]
        if used:
            found.append(_bad_spec(name, where, f"hookimpl {member} uses {', '.join(used)}: plain hookimpls only"))
    return found


def _bad_spec(name: str, where: str, why: str) -> Finding:
    remedies = ("correct the plugin: docs/write-a-plugin.md", f"block it: --no-plugin {name}")
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
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  (SystemExit in a hook must not end the host)
        findings.append(_failed(name, where, f"hook {hook} failed", error))
        return []
    if len(items) > _MOST_ITEMS:
        findings.append(_bad_spec(name, where, f"{hook} returned more than {_MOST_ITEMS} items"))
        return []
    for position, item in enumerate(items):
        findings.extend(_bad_spec(name, where, why) for why in _item_problems(hook, position, item))
    return items


def _item_problems(hook: str, position: int, item: Any) -> list[str]:
    kind = _ITEMS[hook]
    label = f"{hook}()[{position}]"
    if not isinstance(item, kind):
        return [f"{label}: expected {kind.__name__}, got {type(item).__name__}"]
    if isinstance(item, Contract | KernelSpec | ModelBuilder | Lever):
        title = item.key if isinstance(item, KernelSpec) else item.name
        try:
            problems = list(_mistyped(item)) or item.problems()
        except Exception as error:  # noqa: BLE001  (fields may be of any type)
            problems = [f"malformed: {type(error).__name__}: {error}"]
        return [f"{label} {title}: {problem}" for problem in problems]
    if isinstance(item, Path) and not item.is_dir():
        return [f"{label}: {item} is no folder"]
    return []


def _mistyped(item: Any) -> Iterator[str]:
    """Say which fields are text where a tuple of text is meant: each of its letters would count as an item."""
    for name in ("aliases", "bit_identical_to", "choices", "conflicts"):
        value = getattr(item, name, ())
        if not isinstance(value, tuple) or not all(isinstance(one, str) for one in value):
            yield f"{name} is {value!r}, expected a tuple of text"
