"""``muster plugin check`` about machine code: what each entry point needs, and what the compiler said of it."""

from collections.abc import Iterable, Iterator

from kernel_muster.registry.backends.request import BuildRequest, Built
from kernel_muster.registry.values import frozen


@frozen(kw_only=True)
class EntryRow:
    """What one entry point needs on one architecture: registers and bytes a thread, shared bytes a block.

    Spills are those of its code and of the functions that it calls; None where the compiler did not say.
    """

    source: str
    keys: tuple[str, ...]
    entry: str
    target: str
    registers: int
    static_shared_bytes: int
    dynamic_shared_bytes: int  # the most that is declared
    stack_bytes: int
    spill_store_bytes: int | None
    spill_load_bytes: int | None
    max_threads: int | None  # the launch bound

    @property
    def is_spilling(self) -> bool:
        """Whether registers did not suffice, so that values go through memory."""
        return bool(self.spill_store_bytes or self.spill_load_bytes)


@frozen(kw_only=True)
class WarningRow:
    """One line in which a compiler warned, with the architecture that it compiled for."""

    source: str
    target: str
    text: str


def entry_rows(request: BuildRequest, keys: Iterable[str], built: Built) -> Iterator[EntryRow]:
    """Yield what each entry point of a build needs, in the order of their declaration."""
    named = tuple(sorted(set(keys)))
    for entry in request.entries:
        needs = built.entries[entry.name]
        yield EntryRow(
            source=request.name,
            keys=named,
            entry=entry.name,
            target=str(request.arch),
            registers=needs.registers,
            static_shared_bytes=needs.static_shared_bytes,
            dynamic_shared_bytes=entry.dynamic_shared_bytes,
            stack_bytes=needs.stack_bytes,
            spill_store_bytes=needs.spill_store_bytes,
            spill_load_bytes=needs.spill_load_bytes,
            max_threads=needs.max_threads,
        )


def warning_rows(request: BuildRequest, built: Built) -> Iterator[WarningRow]:
    """Yield what the compiler warned of, each line once: also what -Xptxas=--warn-on-spills asks for."""
    warned = (line.strip() for line in built.log.splitlines() if "warning" in line.lower())
    for text in dict.fromkeys(warned):
        yield WarningRow(source=request.name, target=str(request.arch), text=text)


def spill_notes(rows: Iterable[EntryRow]) -> Iterator[str]:
    """Yield a line for each entry point that spills, with all architectures on which it does."""
    spilling: dict[tuple[str, str], list[EntryRow]] = {}
    for row in rows:
        if row.is_spilling:
            spilling.setdefault((row.source, row.entry), []).append(row)
    for (source, entry), alike in spilling.items():
        where = "; ".join(
            f"{row.target} {row.spill_store_bytes} stored, {row.spill_load_bytes} loaded ({row.registers} registers)"
            for row in alike
        )
        yield f"{entry} of {source}, bytes a thread: {where}"
