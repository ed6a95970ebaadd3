"""Levers: declared overrides with one grammar, read once into a frozen snapshot."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import field
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Literal

from kernel_muster.registry.errors import UndeclaredLever
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.messages.message import message
from kernel_muster.registry.service_variables import is_service_variable, resembles_service
from kernel_muster.registry.suggestions import Names
from kernel_muster.registry.values import copied, frozen

PREFIX = "MUSTER_"
LeverKind = Literal["bool", "int", "enum", "text"]
Value = bool | int | str
Origin = Literal["given", "environment", "manifest", "table", "built-in"]
#: What a measured table may do with a lever: nothing, or move it; a move then keeps every result's bits, or does not.
Tuning = Literal["", "same_bits", "other_bits"]

_BOOLEANS = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
_NAME = re.compile(r"MUSTER_[A-Z][A-Z0-9_]*\Z")
_DIGEST = re.compile(r"[a-z][a-z0-9_]*::[a-z][a-z0-9_]*=[0-9a-f]{64}")
_KEYS = re.compile(r"[a-z*][a-z0-9_*]*::[a-z*][a-z0-9_*]*(?:\|[a-z*][a-z0-9_*]*::[a-z*][a-z0-9_*]*)*\Z")


@frozen
class Measured:
    """Where figures of a lever's evidence were taken: the device, as its driver calls it, and the kernels by key.

    Each kernel has the digest of its source. Without kernels the figures are of others than those that serve here.
    """

    device: str
    kernels: Mapping[str, str] = field(default_factory=dict)

    def holds(self, device: str, digest_of: Callable[[str], str]) -> bool:
        """Whether the figures are of this device and of the kernels that serve: ``digest_of`` a key is theirs."""
        is_here = device == self.device and bool(self.kernels)
        return is_here and all(digest_of(key) == digest for key, digest in self.kernels.items())


@frozen(kw_only=True)
class Lever:
    """One declared override.

    ``effects`` says what a value does, for reports: ``{True: "kernel dropped", False: "kernel kept"}``. ``evidence``
    names the measurement behind a threshold, ``measured`` its device and kernels: where others serve, or none are
    named, reports say that the built-in value is assumed. ``diagnostic`` levers are for experiments, not for serving.
    ``tuning`` lets a device's measured table set the lever: ``same_bits`` where every value gives the same bits,
    ``other_bits`` where it does not, so that the value belongs to the set hash. ``keys`` names the kernels that it
    drops or chooses among: keys, patterns (``moe::*``), or several with ``|`` between. It concerns a model that asks
    for one of each.
    """

    name: str
    kind: LeverKind
    default: Value | None
    doc: str
    evidence: str = ""
    measured: tuple[Measured, ...] = ()
    diagnostic: bool = False
    minimum: int | None = None
    maximum: int | None = None
    choices: tuple[str, ...] = ()
    effects: Mapping[Value, str] = field(default_factory=dict)
    conflicts: tuple[str, ...] = ()
    tuning: Tuning = ""
    keys: tuple[str, ...] = ()

    def problems(self) -> list[str]:
        """Say what is malformed, all at once."""
        is_name = isinstance(self.name, str) and _NAME.match(self.name)
        found = [] if is_name else [f"name {self.name!r} does not match MUSTER_[A-Z][A-Z0-9_]*"]
        if is_name and resembles_service(self.name):
            found.append(f"name {self.name} resembles a platform's service variable: choose another")
        if self.kind not in ("bool", "int", "enum", "text"):
            found.append(f"kind is {self.kind!r}, expected bool, int, enum or text")
        if (self.kind == "enum") != bool(self.choices):
            found.append("choices go with kind enum, and enum needs them")
        found.extend(self._bound_problems())
        if self.tuning not in ("", "same_bits", "other_bits"):
            found.append(f"tuning is {self.tuning!r}, expected same_bits, other_bits or nothing")
        if not isinstance(self.keys, tuple) or not all(isinstance(one, str) and _KEYS.match(one) for one in self.keys):
            found.append(f"keys are {self.keys!r}, expected a tuple of module::func, in which * stands for any letters")
        found.extend(self._measured_problems())
        if not isinstance(self.doc, str) or not self.doc.strip():
            found.append("doc is empty")
        if not found and self.default is not None:
            found.extend(self._default_problems())
        return found

    def _bound_problems(self) -> list[str]:
        bounds = (("minimum", self.minimum), ("maximum", self.maximum))
        found = [
            f"{label} is {bound!r}, expected an integer or None"
            for label, bound in bounds
            if bound is not None and type(bound) is not int  # True is no number here
        ]
        if not found and self.minimum is not None and self.maximum is not None and self.minimum > self.maximum:
            found.append(f"minimum {self.minimum} is above maximum {self.maximum}")
        return found

    def _measured_problems(self) -> list[str]:
        if not isinstance(self.measured, tuple) or not all(isinstance(one, Measured) for one in self.measured):
            return [f"measured is {self.measured!r}, expected a tuple of Measured"]
        found = ["measured goes with evidence, which is empty"] if self.measured and not self.evidence else []
        for one in self.measured:
            if not isinstance(one.device, str) or not one.device.strip():
                found.append(f"measured: device is {one.device!r}, expected the name of a device")
            if not isinstance(one.kernels, Mapping) or not all(map(_is_digest, one.kernels.items())):
                found.append(f"measured: kernels are {one.kernels!r}, expected module::func -> sha256 of its source")
        return found

    def _default_problems(self) -> list[str]:
        try:
            self.parse(self.default)
        except ValueError as error:
            return [f"default {error}"]
        return []

    @property
    def built_in(self) -> Value | None:
        """The default as a value: ``"off"`` is a boolean lever's False, as it is in the environment."""
        return None if self.default is None else self.parse(self.default)

    def names(self, key: str) -> bool:
        """Whether it says that it drops this key, or chooses between it and others."""
        return any(names_key(one, key) for one in self.keys)

    @property
    def grammar(self) -> str:
        """What a value may look like, in words."""
        if self.kind == "bool":
            return "1/0/true/false/on/off"
        if self.kind == "enum":
            return "|".join(self.choices)
        if self.kind == "int":
            low = "" if self.minimum is None else f" from {self.minimum}"
            high = "" if self.maximum is None else f" to {self.maximum}"
            return f"an integer{low}{high}"
        return "text"

    def parse(self, raw: object) -> Value:
        """Read a value; ValueError says what was expected. Booleans and integers may be given as themselves."""
        text = str(raw).strip()
        if self.kind == "bool":
            if text.lower() in _BOOLEANS:
                return _BOOLEANS[text.lower()]
        elif self.kind == "enum":
            if text in self.choices:
                return text
        elif self.kind == "int":
            if (
                not isinstance(raw, bool | float)
                and re.fullmatch(r"[+-]?[0-9]{1,18}", text)
                and self._in_range(int(text))
            ):
                return int(text)
        elif "\0" in text:
            raise ValueError(f"{raw!r} has a NUL, which no name of a file has")
        elif isinstance(raw, str):
            return text
        raise ValueError(f"{raw!r} is not {self.grammar}")

    def _in_range(self, number: int) -> bool:
        return (self.minimum is None or number >= self.minimum) and (self.maximum is None or number <= self.maximum)


@frozen
class Setting:
    """A lever's value in one boot, and where it came from; ``measured`` is what a table says for its value."""

    lever: Lever
    value: Value | None
    origin: Origin
    measured: str = ""

    @property
    def evidence(self) -> str:
        """The measurement behind the value: the table's, else that of the built-in threshold."""
        return self.measured or self.lever.evidence

    def is_assumed(self, device: str, digest_of: Callable[[str], str]) -> bool:
        """Whether the built-in value rests on figures of another device, or of other kernels than those that serve."""
        if self.origin != "built-in" or not self.lever.evidence:
            return False
        return not any(one.holds(device, digest_of) for one in self.lever.measured)

    @property
    def is_asked(self) -> bool:
        """Whether somebody set it for this boot: neither measured nor built in."""
        return self.origin not in ("table", "built-in")

    @property
    def effect(self) -> str:
        """What the value does, in words; empty where the lever does not say."""
        return "" if self.value is None else self.lever.effects.get(self.value, "")


#: Levers that every registry has; families and models declare theirs through the hook.
CORE_LEVERS = (
    Lever(
        name="MUSTER_DISABLE",
        kind="text",
        default=None,
        doc="Comma-separated keys (module::func) that lookups shall treat as absent; each one asked for is DISABLED.",
        diagnostic=True,
    ),
    Lever(
        name="MUSTER_PREFER",
        kind="text",
        default=None,
        doc="Comma-separated key=distribution: which of several equal kernels serves the key.",
    ),
    Lever(
        name="MUSTER_TUNING_TABLE",
        kind="text",
        default=None,
        doc="Table of measured thresholds: a file that muster tune wrote, a shipped one by its name, or none; unset, "
        "the shipped table of the device.",
    ),
    Lever(
        name="MUSTER_CACHE_DIR",
        kind="text",
        default=None,
        doc="Folder of compiled kernels and of the keys of plugins that loaded; the user's cache folder by default.",
    ),
    Lever(
        name="MUSTER_PLUGIN_TIMEOUT_S",
        kind="int",
        default=10,
        minimum=1,
        maximum=3600,
        doc="Seconds after which a plugin that is still importing, or still in a hook, counts as failed.",
    ),
)

#: Old names, each with what to use instead; names are never reused.
REMOVED_LEVERS: Mapping[str, str] = {}


class Levers:
    """The frozen snapshot of one boot. Nothing reads the environment after it is made."""

    def __init__(self, settings: Mapping[str, Setting]) -> None:
        self._settings = dict(settings)

    def __getitem__(self, name: str) -> Value | None:
        return self.setting(name).value

    def __contains__(self, name: object) -> bool:
        return name in self._settings

    def setting(self, name: str) -> Setting:
        """Return the whole setting; UndeclaredLever, a KeyError, if nobody declares the lever."""
        try:
            return self._settings[name]
        except KeyError:
            why = f"nobody declares a lever {name}{Names(self._settings, PREFIX).did_you_mean(str(name))}"
        raise UndeclaredLever(f"{why}; a plugin that reads it returns a km.Lever from muster_levers")

    def flag(self, name: str) -> bool:
        """Return a boolean lever's value."""
        return bool(self.setting(name).value)

    def replaced(self, name: str, value: Value | None) -> "Levers":
        """Return levers of which one has another value, as if it were built in."""
        return Levers(self._settings | {name: Setting(self.setting(name).lever, value, "built-in")})

    def copy(self) -> "Levers":
        """Return equal levers that share no setting with these."""
        return Levers(copied(self._settings))

    @property
    def settings(self) -> tuple[Setting, ...]:
        """All settings, sorted by name."""
        return tuple(self._settings[name] for name in sorted(self._settings))


def _is_digest(item: tuple[object, object]) -> bool:
    return all(isinstance(one, str) for one in item) and _DIGEST.fullmatch("=".join(map(str, item))) is not None


def names_key(pattern: str, key: str) -> bool:
    """Whether one of a lever's ``keys`` is this key, or a pattern that it fits."""
    return any(fnmatchcase(key, one) for one in pattern.split("|"))


def concerns(keys: Iterable[str], asked: Collection[str]) -> bool:
    """Whether a lever that names these keys has something to decide where those are asked for: one of each."""
    return all(any(names_key(pattern, key) for key in asked) for pattern in keys)


def read_levers(
    declared: Iterable[Lever],
    sources: Iterable[tuple[Origin, Mapping[str, object]]],
    removed: Mapping[str, str] = REMOVED_LEVERS,
    measured: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Levers, list[Finding]]:
    """Make the snapshot: the first source that sets a lever wins, then its default.

    ``measured`` holds the evidence of what the source ``table`` sets. Empty values are unset. Everything wrong in any
    source is a finding, also where a better source wins.
    """
    table = {lever.name: lever for lever in declared}
    settings = {name: Setting(lever, lever.built_in, "built-in") for name, lever in table.items()}
    names = Names(table, PREFIX)
    findings: list[Finding] = []
    for origin, values in sources:
        for name in sorted(values, key=str):
            raw = values[name]
            if not isinstance(name, str):
                findings.append(_unnamed(name, origin))
                continue
            if (isinstance(raw, str) and not raw.strip()) or is_service_variable(name, values):
                continue
            # The environment is full of other names; what is given as levers is meant as levers.
            if not name.startswith(PREFIX) and origin != "given":
                continue
            lever = table.get(name)
            if lever is None:
                findings.append(_unknown(name, origin, names, removed))
                continue
            try:
                value = lever.parse(raw)
            except ValueError as error:
                findings.append(_bad(lever, origin, str(error)))
                continue
            if settings[name].origin == "built-in":
                settings[name] = Setting(lever, value, origin, measured.get(name, "") if origin == "table" else "")
    findings.extend(_conflicts(settings))
    return Levers(settings), findings


def _unknown(name: str, origin: Origin, names: Names, removed: Mapping[str, str]) -> Finding:
    if name in removed:
        why = message("removed_lever", lever=name)
        return Finding("REMOVED_LEVER", name, why, (origin,), (message("remedy.new_lever", lever=removed[name]),))
    near = names.near(name)
    why = message("unknown_lever", lever=name, near=near)
    remedies = (message("remedy.lever_name", lever=name), message("remedy.list_levers"))
    return Finding("UNKNOWN_LEVER", name, why, (origin,), remedies, lacks="" if near else "muster_levers")


def _unnamed(name: object, origin: Origin) -> Finding:
    why = message("unknown_lever.type", lever=repr(name), type=type(name).__name__)
    return Finding("UNKNOWN_LEVER", repr(name), why, (origin,), (message("remedy.lever_key"),))


def _bad(lever: Lever, origin: Origin, why: str) -> Finding:
    remedies = (message("remedy.lever_value", grammar=lever.grammar, lever=lever.name),)
    return Finding("BAD_LEVER", lever.name, message("bad_lever", lever=lever.name, why=why), (origin,), remedies)


def _conflicts(settings: Mapping[str, Setting]) -> list[Finding]:
    """Two levers that exclude each other were both set on purpose, and both are on."""
    found = []
    for name, setting in sorted(settings.items()):
        for other in setting.lever.conflicts:
            both_set = other in settings and setting.is_asked and settings[other].is_asked
            if both_set and setting.value and settings[other].value:
                values = {"value": setting.value, "other_value": settings[other].value}
                why = message("lever_conflict", lever=name, other=other, **values)
                where = (setting.origin, settings[other].origin)
                remedies = (message("remedy.unset_one", lever=name, other=other),)
                found.append(Finding("LEVER_CONFLICT", name, why, where, remedies))
    return found
