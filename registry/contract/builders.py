"""What the registry knows of a model builder: which model types it serves and how mature it is."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from typing import Any, Literal, Protocol, get_args

from kernel_muster.registry.errors import MusterError, NoBuilder
from kernel_muster.registry.hardware.arch import CPU, parse_arch
from kernel_muster.registry.keys import near
from kernel_muster.registry.values import frozen

Maturity = Literal["reference", "partial", "production"]


@frozen
class ModelBuilder:
    """Builds the layers of some model types.

    ``build(manifest, kernels, weights)`` looks every kernel up, eagerly, and returns the model. Without weights it
    is a plan only. Serving refuses a maturity other than ``production``; an audit does not.

    ``recorded`` holds ``(architecture, date)`` of runs at full size whose results were judged and are kept. Where there
    are any, ``production`` holds on these architectures only, and is ``partial`` on any other.
    """

    name: str
    model_types: tuple[str, ...]
    maturity: Maturity
    build: Callable[..., Any]
    recorded: tuple[tuple[str, str], ...] = ()

    def maturity_on(self, arch: str) -> Maturity:
        """Return the maturity on an architecture (``sm_90a``, ``cpu``)."""
        if self.maturity != "production" or not self.recorded or self.run_on(arch):
            return self.maturity
        return "partial"

    def run_on(self, arch: str) -> str:
        """Return the latest date of a recorded run on an architecture, or nothing."""
        return max((day for name, day in self.recorded if name == arch), default="")

    def problems(self) -> list[str]:
        """Say what is malformed, all at once."""
        found = [] if isinstance(self.name, str) and self.name else [f"name is {self.name!r}, expected text"]
        types = self.model_types
        if not isinstance(types, tuple) or not types or not all(isinstance(item, str) for item in types):
            found.append(f"model_types is {types!r}, expected a tuple of at least one model type")
        if self.maturity not in get_args(Maturity):
            found.append(f"maturity is {self.maturity!r}, expected {', '.join(get_args(Maturity))}")
        if not isinstance(self.recorded, tuple) or not all(map(_is_run, self.recorded)):
            found.append(f"recorded is {self.recorded!r}, expected (architecture, YYYY-MM-DD) pairs in a tuple")
        if not callable(self.build):
            found.append(f"build is {self.build!r}, expected build(manifest, kernels, weights)")
        elif problem := _call_problem(self.build):
            found.append(f"build{problem}, but is called as build(manifest, kernels, weights)")
        return found


def _is_run(run: object) -> bool:
    """Whether a recorded run names an architecture and a day."""
    if not isinstance(run, tuple) or len(run) != 2 or not all(isinstance(part, str) for part in run):
        return False
    try:
        date.fromisoformat(run[1])
    except ValueError:
        return False
    return run[0] == CPU or _is_arch(run[0])


def _is_arch(name: str) -> bool:
    """Whether a text names an architecture."""
    try:
        parse_arch(name)
    except ValueError:
        return False
    return True


def _call_problem(build: Callable[..., Any]) -> str:
    """Say why a function cannot be called with three arguments; nothing where it can, or does not say."""
    try:
        signature = inspect.signature(build)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(None, None, None)
    except TypeError:
        return f" takes {signature}"
    return ""


class DecodesItself(Protocol):
    """What a model of another builder has so that ``muster boot`` and ``muster ab`` decode with it."""

    def decode_greedily(
        self, prompts: Sequence[Sequence[int]], new_tokens: int
    ) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[Any]]]:
        """Return the likeliest token, so many times, behind each prompt, and the logits that chose each token.

        Logits are rows ``(V,)`` of floats in host memory, one for each token, with V the manifest's vocabulary. Every
        call begins anew; a prompt gets the same bits alone and among others where the model promises that.
        """


def choose_builder(builders: Iterable[ModelBuilder], model_type: str | None, model: str) -> ModelBuilder:
    """Return the one builder of a model type; MusterError if there is none, or more than one."""
    known = sorted(builders, key=lambda builder: builder.name)
    if model_type is None:
        raise MusterError(f"{model}: it states no model type, or several: add [[model_types]], or model.model_type")
    found = [builder for builder in known if model_type in builder.model_types]
    if len(found) == 1:
        return found[0]
    have = ", ".join(f"{builder.name} ({', '.join(builder.model_types)})" for builder in known) or "none"
    if found:
        raise MusterError(f"{model}: {len(found)} builders serve model type {model_type!r}; builders: {have}")
    hint = _fitting(known, model_type)
    raise NoBuilder(f"{model}: no builder serves model type {model_type!r}{hint}; builders: {have}")


def _fitting(known: Iterable[ModelBuilder], model_type: str) -> str:
    """Name the builder of the type that is meant: that of the same type without ``_text``, else of one like it."""
    owners = {kind: builder.name for builder in known for kind in builder.model_types}
    bare = model_type.removesuffix("_text")
    likely = [bare] if bare in owners else near(model_type, owners, most=1)
    return "".join(f'; {owners[kind]} serves {kind}: write model_type = "{kind}" under [model]' for kind in likely)
