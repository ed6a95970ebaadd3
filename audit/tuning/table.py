"""A tuning table as JSON: the edges that were measured on a device, with everything that they rest on.

Strict: an unknown key, another type or a number that cannot be is refused, with all problems at once.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from kernel_muster.audit.tuning.arms import is_arm, missing_behind, untimed
from kernel_muster.audit.versions import version_pattern
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.hardware.arch import parse_arch
from kernel_muster.registry.keys import parse_key
from kernel_muster.registry.levers import Lever
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

SCHEMA: Literal["kernel-muster/tuning"] = "kernel-muster/tuning"
VERSION = "1.0"
#: A table of a hundred shapes and all row counts takes 2 MB.
MOST_BYTES = 16 * 1024 * 1024


def _known_arch(text: str) -> str:
    parse_arch(text)
    return text


def _known_key(text: str) -> str:
    parse_key(text)
    return text


def _known_date(text: str) -> str:
    try:
        date.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"{text} is no date: {error}") from None
    return text


Name = Annotated[str, Field(min_length=1, max_length=1_000)]
Text = Annotated[str, Field(max_length=100_000)]
Count = Annotated[int, Field(ge=1, lt=2**40)]
Microseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Key = Annotated[Name, AfterValidator(_known_key)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class MeasuredDevice(_Strict):
    """The device that was measured. ``driver`` is the CUDA version of its driver, ``cuda`` the compiler's."""

    name: Name
    arch: Annotated[Name, AfterValidator(_known_arch)]
    multiprocessors: Count
    driver: Annotated[Name, Field(pattern=r"^[0-9]+\.[0-9]+$")]
    cuda: Name


class Range(_Strict):
    """From least to most, both measured."""

    least: Count
    most: Count

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.least > self.most:
            raise ValueError(f"least {self.least} is above most {self.most}")
        return self

    def __contains__(self, value: int) -> bool:
        return self.least <= value <= self.most


class Covers(_Strict):
    """What was measured: rows M, features N and depth K."""

    rows: Range
    features: Range
    depth: Range


class Edge(_Strict):
    """One threshold between two arms.

    ``loss`` is what is left against the faster arm at worst, ``spread`` that of the times behind it; both are shares.
    """

    lever: Annotated[Name, Field(pattern=r"^MUSTER_[A-Z][A-Z0-9_]*$")]
    value: Annotated[int, Field(ge=0, lt=2**40)]
    built_in: Annotated[int, Field(ge=0, lt=2**40)]
    below: Name
    above: Name
    loss: Share
    spread: Share
    figures: list[Text]


class Timing(_Strict):
    """Times of all arms at one shape and row count, and their spreads."""

    features: Count
    depth: Count
    rows: Count
    us: dict[Name, Microseconds]
    spread: dict[Name, Share]

    @model_validator(mode="after")
    def _a_spread_a_time(self) -> Self:
        if not self.us:
            raise ValueError("us: no arm has a time")
        if unknown := sorted(arm for arm in self.us if not is_arm(arm)):
            raise ValueError(f"us: nobody knows an arm {', '.join(arm[:60] for arm in unknown[:5])}")
        if differing := sorted(self.us.keys() ^ self.spread.keys()):
            raise ValueError(f"us and spread are of other arms: {', '.join(differing)} in one of them alone")
        return self


class Table(_Strict):
    """A tuning table."""

    format: Annotated[Literal["kernel-muster/tuning"], Field(alias="schema")]
    version: Annotated[Name, Field(pattern=version_pattern(1))]
    device: MeasuredDevice
    date: Annotated[Name, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$"), AfterValidator(_known_date)]
    command: Text
    method: Text
    muster_version: Name
    kernels: dict[Key, Digest]
    covers: Covers
    edges: list[Edge]
    timings: list[Timing]

    @model_validator(mode="after")
    def _one_edge_a_lever(self) -> Self:
        names = [edge.lever for edge in self.edges]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"edges: {', '.join(twice)} twice")
        return self

    @model_validator(mode="after")
    def _one_timing_a_point(self) -> Self:
        points = Counter((timing.features, timing.depth, timing.rows) for timing in self.timings)
        if twice := [f"{n} x {k} of {m} rows" for (n, k, m), count in points.items() if count > 1]:
            raise ValueError(f"timings: {', '.join(twice[:5])} stand twice")
        return self

    @model_validator(mode="after")
    def _covers_what_was_measured(self) -> Self:
        if not self.timings:
            raise ValueError("timings: nothing was measured")
        for name in ("rows", "features", "depth"):
            values = [getattr(timing, name) for timing in self.timings]
            span: Range = getattr(self.covers, name)
            if span.least < min(values) or span.most > max(values):
                said = f"{span.least} to {span.most}, timings hold {min(values)} to {max(values)}"
                raise ValueError(f"covers.{name}: {said}")
        return self

    @property
    def where(self) -> str:
        """The device in words."""
        return f"{self.device.name} ({self.device.arch}, {self.device.multiprocessors} SMs)"

    def values(self) -> dict[str, int]:
        """Return what it sets."""
        return {edge.lever: edge.value for edge in self.edges}

    def evidence(self, name: str) -> dict[str, str]:
        """Return the evidence of each edge for a report; ``name`` is what the table is called."""
        head = f"{self.where}, table {name} of {self.date}"
        return {edge.lever: f"{head}, {edge.below} / {edge.above}: {'; '.join(edge.figures)}" for edge in self.edges}

    def problems(self) -> list[str]:
        """Say why it decides nothing that one may rest on: it has no edges, or no times or kernels behind them."""
        found = [] if self.edges else ["edges: it sets nothing"]
        found += untimed(self.values(), (timing.us for timing in self.timings))
        if not self.kernels:
            return [*found, "kernels: it names none, so that nothing says whether they are still the measured ones"]
        return [*found, *missing_behind(self.values(), self.kernels)]

    def lever_problems(self, declared: Iterable[Lever]) -> list[str]:
        """Say which edges no lever takes."""
        levers: Mapping[str, Lever] = {lever.name: lever for lever in declared}
        found = []
        for edge in self.edges:
            lever = levers.get(edge.lever)
            if lever is None:
                found.append(f"nobody declares a lever {edge.lever}")
            elif not lever.tuning:
                found.append(f"{edge.lever} is no threshold that a table may set")
            else:
                try:
                    lever.parse(edge.value)
                except ValueError as error:
                    found.append(f"{edge.lever}: {error}")
        return found


_ADAPTER = TypeAdapter(Table)


def read_table(path: Path) -> Table:
    """Read a table; UsageError says everything that is wrong with it."""
    try:
        if not path.is_file():
            raise UsageError(f"{path}: {_what_else(path)}")
        with path.open("rb") as stream:
            raw = stream.read(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES:
            raise UsageError(f"{path}: larger than {MOST_BYTES} bytes, which no table is")
        return parse_table(raw.decode("utf-8"), str(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _what_else(path: Path) -> str:
    """Say what stands where a file is expected."""
    kinds = ((path.is_dir, "a directory"), (path.is_fifo, "a pipe"), (path.is_socket, "a socket"),
             (path.is_char_device, "a device"), (path.is_block_device, "a device"))  # fmt: skip
    for is_it, kind in kinds:
        if is_it():
            return f"is {kind}, expected a file"
    return "there is no such file"


def parse_table(text: str, name: str) -> Table:
    """Check a table; UsageError says everything that is wrong with it."""
    try:
        data = json.loads(text, object_pairs_hook=partial(_once, name))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name}: is not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        got = str(data.get("schema"))[:40] if isinstance(data, dict) else type(data).__name__
        raise UsageError(f'{name}: is no tuning table: expected "schema": "{SCHEMA}", got {got!r}')
    try:
        return _ADAPTER.validate_python(data)
    except ValidationError as error:
        problems = [_problem(one) for one in error.errors(include_url=False)[:10]]
        count = error.error_count()
        raise UsageError(f"{name}: {count} problem{'s' * (count > 1)}: {'; '.join(problems)}") from None


def _once(name: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of JSON; of a key that stands in it twice nobody knows which one was meant."""
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = ", ".join(sorted({ascii(key)[:60] for key in keys if keys.count(key) > 1})[:10])
        raise UsageError(f"{name}: one object has keys twice: {twice}")
    return found


def _problem(error: Any) -> str:
    place = ".".join(map(str, error["loc"]))
    why = str(error["msg"]).removeprefix("Value error, ")  # pydantic's word for a problem that our own text tells
    return f"{place}: {why}" if place else why


def table_text(table: Table) -> str:
    """Return a table as JSON, one edge and one timing a line, so that a change of one shows as one."""
    head = table.model_dump(mode="json", by_alias=True, exclude={"edges", "timings"})
    parts = json.dumps(head, indent=1)[:-2]
    for name, rows in (("edges", table.edges), ("timings", table.timings)):
        lines = ",\n  ".join(json.dumps(row.model_dump(mode="json")) for row in rows)
        parts += f',\n "{name}": [\n  {lines}\n ]' if rows else f',\n "{name}": []'
    return f"{parts}\n}}\n"


def slug(device: str) -> str:
    """Return the name of a device's shipped table: ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
