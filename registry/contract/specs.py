"""Specs: one plugin's offer of a key."""

import hashlib
import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import field, fields, is_dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, Literal, Protocol, TypeGuard

from kernel_muster.registry.distributions import HOST_DISTRIBUTION, normal_name
from kernel_muster.registry.hardware.arch import CodeArch, parse_code_arch
from kernel_muster.registry.keys import KernelKey, parse_key
from kernel_muster.registry.plugin_code.python_code import code_digest_of, digest_of_values, source_digest_of
from kernel_muster.registry.values import frozen

Tier = Literal["fast", "reference"]
Stage = Literal["registered", "compiled", "loaded", "proven"]
_ABSENT = object()
STAGES: tuple[Stage, ...] = ("registered", "compiled", "loaded", "proven")


class Backend(Protocol):
    """How a spec's code is reached. ``name`` goes into reports and the set hash."""

    @property
    def name(self) -> str:
        """The backend's name: ``python``."""

    @property
    def source_sha256(self) -> str:
        """The digest of the bytes whose change makes this another kernel."""


class HostBackend(Backend, Protocol):
    """A backend that runs in this process."""

    def launch(self, arguments: dict[str, Any], dims: dict[str, int], stream: object | None) -> None:
        """Run the kernel on arguments that the contract has checked."""


def is_backend(value: object) -> bool:
    """Whether a value, no class of them, looks like a backend; its digest, which reads files, is not computed."""
    names = ("name", "source_sha256")
    return not isinstance(value, type) and all(inspect.getattr_static(value, name, None) is not None for name in names)


def has_member(value: object, name: str) -> bool:
    """Whether a value or its class has a member; nothing of it is called."""
    return inspect.getattr_static(value, name, _ABSENT) is not _ABSENT


def source_digest(backend: Backend) -> tuple[str, BaseException | None]:
    """Return the digest of a backend's source, or an empty one and why the source cannot be read."""
    try:
        digest = backend.source_sha256
        if type(digest) is not str:
            raise TypeError(f"source_sha256 is {type(digest).__name__}, expected text")
    except (Exception, SystemExit) as error:  # noqa: BLE001  (files of a plugin's, or code of its own)
        return "", error
    return digest, None


def is_host_backend(backend: Backend) -> TypeGuard[HostBackend]:
    """Whether a backend runs in this process."""
    return has_member(backend, "launch")


@frozen
class PythonKernel:
    """A kernel for ``cpu``: a function that takes the contract's parameters by name and writes the outputs.

    ``shares`` are the modules, besides the function's own, whose code it runs: their source makes this kernel too.
    """

    function: Callable[..., None]
    name: str = "python"
    shares: tuple[ModuleType, ...] = ()

    def __post_init__(self) -> None:
        if unreadable := [module.__name__ for module in self.shares if source_digest_of(module) is None]:
            raise ValueError(f"shares {', '.join(unreadable)}, whose source cannot be read")

    @property
    def source_sha256(self) -> str:
        """The digest of the source of its module (of its bytecode, where there is no file) and of those it shares."""
        own = sys.modules.get(self.function.__module__)
        digest = hashlib.sha256((own and source_digest_of(own)) or code_digest_of(self.function))
        for module in self.shares:
            digest.update(source_digest_of(module) or b"")
        return digest.hexdigest()

    def launch(self, arguments: dict[str, Any], dims: dict[str, int], stream: object | None) -> None:
        """Run the function; the host has no streams."""
        self.function(**arguments)


@frozen(kw_only=True)
class KernelSpec:
    """One plugin's offer of a key.

    ``contract`` names a registered contract. ``archs`` is what the code needs: ``sm_90+``, ``sm_90a``, ``cpu`` ...
    ``weight_layout`` is the layout its weight argument must have, and ``prepare(weight)`` makes it from the logical
    weight, out of place. ``bit_identical_to`` names a key whose result it equals bit for bit. ``overrides`` names
    the distribution whose spec of this key it replaces; ``replaces_module`` is ``(module, distribution)``.
    ``opt_in`` names the lever without which nothing asks for it.
    """

    key: str
    contract: str
    archs: tuple[str, ...]
    backend: Backend
    tier: Tier = "fast"
    weight_layout: str | None = None
    prepare: Callable[[Any], Any] | None = None
    deterministic: bool = True
    bit_identical_to: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    overrides: str | None = None
    replaces_module: tuple[str, str] | None = None
    opt_in: str | None = None
    provenance: str = ""

    @cached_property
    def kernel_key(self) -> KernelKey:
        """The parsed key; ValueError if malformed."""
        return parse_key(self.key)

    @cached_property
    def code_archs(self) -> tuple[CodeArch, ...]:
        """The parsed archs; ValueError if malformed."""
        return tuple(parse_code_arch(entry) for entry in self.archs)

    @property
    def backend_name(self) -> str:
        """The backend's name as it was when the spec was checked: a plugin's may change, or raise."""
        # No cached_property: before Python 3.12 all instances share its lock, and a plugin's code may hang in it.
        values = self.__dict__
        if "_backend_name" not in values:
            values["_backend_name"] = self.backend.name
        name: str = values["_backend_name"]
        return name

    @property
    def host_sha256(self) -> str:
        """The digest of the Python code that decides how the kernel runs: planner, prepare and the backend itself.

        What is compiled is not in it; a spec that is known from a trace alone has the trace's.
        """
        backend: object = type(self.backend)
        with suppress(Exception):  # a plugin's backend may be anything
            known = getattr(self.backend, "host_sha256", None)
            if type(known) is str:
                return known
            backend = _without_sources(self.backend)
        return digest_of_values({"backend": backend, "prepare": self.prepare})

    def problems(self) -> list[str]:
        """Say what is malformed, all at once."""
        found: list[str] = []
        for label, texts in (
            ("key", (self.key,)),
            ("alias", self.aliases),
            ("bit_identical_to", self.bit_identical_to),
        ):
            found.extend(f"{label}: {error}" for text in texts if (error := _error(parse_key, text)))
        if not isinstance(self.contract, str):
            found.append(f"contract is {self.contract!r}, expected the name of a contract")
        for label in ("overrides", "opt_in", "weight_layout"):
            text = getattr(self, label)
            if not isinstance(text, str | None):
                found.append(f"{label} is {text!r}, expected text or None")
        if not isinstance(self.archs, tuple) or not self.archs:
            found.append(f"archs is {self.archs!r}, expected a tuple with at least one entry")
        else:
            found.extend(error for entry in self.archs if (error := _error(parse_code_arch, entry)))
            if len({repr(entry) for entry in self.archs}) < len(self.archs):
                found.append("archs names an entry more than once")
        if self.tier not in ("fast", "reference"):
            found.append(f"tier is {self.tier!r}, expected 'fast' or 'reference'")
        if not is_backend(self.backend):
            kind = type(self.backend).__name__
            shown = f"the class {self.backend.__name__}" if isinstance(self.backend, type) else kind
            found.append(f"backend is {shown}, expected a Backend such as PythonKernel(function)")
        elif named := _name_problem(self):
            found.append(f"backend: {named}")
        elif isinstance(self.backend, PythonKernel) and not inspect.isroutine(self.backend.function):
            found.append(f"backend: function is {type(self.backend.function).__name__}, expected a function")
        elif callable(check := getattr(self.backend, "problems", None)):
            found.extend(f"backend: {problem}" for problem in check())
        if self.prepare is not None and self.weight_layout is None:
            found.append("prepare is given without weight_layout")
        if self.replaces_module is not None and not _is_text_pair(self.replaces_module):
            found.append(f"replaces_module is {self.replaces_module!r}, expected (module, distribution)")
        return found


def _name_problem(spec: KernelSpec) -> str:
    """Say why a backend's name is none that a report can hold."""
    try:
        name = spec.backend_name
    except Exception as error:  # noqa: BLE001  (a plugin's backend may be anything)
        return f"its name cannot be asked for: {type(error).__name__}"
    return "" if type(name) is str and name.strip() else f"name is {name!r}, expected text"


def _without_sources(backend: Backend) -> object:
    """Return what of a backend its own digest does not hold, or only in part."""
    if not is_dataclass(backend):
        return type(backend), backend
    names = (item.name for item in fields(backend) if item.name not in ("source", "include_dirs", "options", "shares"))
    return type(backend), {name: getattr(backend, name) for name in names}


def _is_text_pair(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(item, str) and item for item in value)


def _error(parse: Callable[[str], object], text: str) -> str | None:
    try:
        parse(text)
    except (ValueError, TypeError, AttributeError) as error:
        return str(error)
    return None


@frozen
class Provider:
    """Where a registration came from."""

    plugin: str
    distribution: str
    version: str

    @cached_property
    def normal_name(self) -> str:
        """The distribution's name in the form in which names compare."""
        return normal_name(self.distribution)

    @property
    def is_host(self) -> bool:
        """Whether it is this project's own distribution."""
        return self.normal_name == HOST_DISTRIBUTION

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}" if self.version else self.distribution


@frozen
class Registered:
    """A spec with its provider."""

    spec: KernelSpec
    provider: Provider = field(compare=True)
