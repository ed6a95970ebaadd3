"""What the registry knows of a model builder: which model types it serves and how mature it is."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol, get_args

from kernel_muster.registry.errors import MusterError
from kernel_muster.registry.keys import near
from kernel_muster.registry.values import frozen

Maturity = Literal["reference", "partial", "production"]
#: What the message of a model that nobody builds holds: a plugin that failed may be why.
NO_BUILDER = "no builder serves"


@frozen
class ModelBuilder:
    """Builds the layers of some model types.

    ``build(manifest, kernels, weights)`` looks every kernel up, eagerly, and returns the model. Without weights it
    is a plan only. Serving refuses a maturity other than ``production``; an audit does not.
    """

    name: str
    model_types: tuple[str, ...]
    maturity: Maturity
    build: Callable[..., Any]

    def problems(self) -> list[str]:
        """Say what is malformed, all at once."""
        found = [] if isinstance(self.name, str) and self.name else [f"name is {self.name!r}, expected text"]
        types = self.model_types
        if not isinstance(types, tuple) or not types or not all(isinstance(item, str) for item in types):
            found.append(f"model_types is {types!r}, expected a tuple of at least one model type")
        if self.maturity not in get_args(Maturity):
            found.append(f"maturity is {self.maturity!r}, expected {', '.join(get_args(Maturity))}")
        if not callable(self.build):
            found.append(f"build is {self.build!r}, expected build(manifest, kernels, weights)")
        elif problem := _call_problem(self.build):
            found.append(f"build{problem}, but is called as build(manifest, kernels, weights)")
        return found


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
    raise MusterError(f"{model}: {NO_BUILDER} model type {model_type!r}{hint}; builders: {have}")


def _fitting(known: Iterable[ModelBuilder], model_type: str) -> str:
    """Name the builder of the type that is meant: that of the same type without ``_text``, else of one like it."""
    owners = {kind: builder.name for builder in known for kind in builder.model_types}
    bare = model_type.removesuffix("_text")
    likely = [bare] if bare in owners else near(model_type, owners, most=1)
    return "".join(f'; {owners[kind]} serves {kind}: write model_type = "{kind}" under [model]' for kind in likely)
