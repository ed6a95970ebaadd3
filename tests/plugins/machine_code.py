"""Machine code of kernels from nvdisasm: the memory accesses that may precede the wait for the previous launch (PDL).

A kernel that may begin early waits for the previous launch (``griddepcontrol.wait``). The compiler moves loads of
``const __restrict__`` parameters above that wait, so only machine code shows the early reads.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from kernel_muster.registry.backends.cubin.elf import Elf
from kernel_muster.registry.backends.request import Built, EntryPoint

#: Start of the parameters in the constant bank; it differs by architecture.
PARAMETERS_AT = {"sm_90a": 0x210}
_WAIT = "ACQBULK"
# Instructions on memory that other launches see. A prefetch into L2 does not count: all launches see the same L2.
_BULK = frozenset({"UBLKCP", "UTMALDG", "UTMASTG", "UBLKRED", "UTMAREDG"})
_STORES = frozenset({"ST", "STG", "RED", "REDG", "UREDGR"})
_LOADS = frozenset({"LD", "LDG", "LDGMC", "ATOM", "ATOMG"})
_ACCESSES = _LOADS | _STORES | _BULK | {"LDGSTS"}
# Results that are no address derived from a parameter.
_READ = _LOADS | {"LDS", "LDL", "LDSM", "ATOMS", "S2R", "S2UR", "CS2R"}
# The first operand of these is no result.
_NOT_WRITING = _STORES | _BULK | {"STS", "STL", "BAR", "SYNCS", "MEMBAR", "CCTL", "BSSY", "BSYNC", "BREAK", "WARPSYNC"}
_JUMPS = ("BRA", "JMP", "CALL", "BSSY", "WARPSYNC.COLLECTIVE")
_INDIRECT = frozenset(["BRX", "BRXU", "JMX", "JMXU"])
_ALIGN = 128
_INSTRUCTION = 16

_LINE = re.compile(r"\s*/\*([0-9a-f]+)\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_TARGET = re.compile(r"\b0x([0-9a-f]+)$")
_REGISTER = re.compile(r"\bU?R\d+\b")
_CONSTANT = re.compile(r"c\[0x0\]\[0x([0-9a-f]+)\]")
_PREDICATE = re.compile(r"!?U?P[T\d]+\Z")
_PREDICATES = re.compile(r"\bU?P\d+\b")
_AHEAD = re.compile(r"(?:U?R[Z\d]+(?:\.\w+)*, )?(?:!?U?P[T\d]+(?:, |$))*")

Origin = frozenset[int]
# The possible sources of each register. "P0 R2": the sources of R2 under predicate P0, known until either is written.
State = dict[str, Origin]
_NOTHING: Origin = frozenset()


def disassembler() -> Path | None:
    """Return nvdisasm of the wheel; None if that is not installed."""
    try:
        files = distribution("nvidia-cuda-nvdisasm").files or ()
    except PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name == "nvdisasm"), None)


@dataclass(frozen=True)
class Instruction:
    """One instruction: its place among those of its entry, its guard if it has one, name and operands."""

    place: int
    guard: str
    name: str
    operands: str
    target: int | None = None

    @property
    def base(self) -> str:
        """The name without its modifiers."""
        return self.name.partition(".")[0]


@dataclass(frozen=True)
class Access:
    """One access before the wait: the instruction, and the positions of the parameters that its address is made of."""

    text: str
    parameters: frozenset[int]
    is_peek: bool  # ld.relaxed: concurrent writes by other blocks are expected


@dataclass
class Before:
    """What an entry may do before it has waited, and whether it ever waits."""

    waits: bool
    accesses: list[Access] = field(default_factory=list)


def read_entries(arch: str, built: Iterable[Built], folder: Path) -> list[dict[str, list[Instruction]]]:
    """Return the instructions of each entry of each cubin; one call of nvdisasm reads them all."""
    blob, places = bytearray(), []
    for cubin in (one.cubin for one in built):
        found = {}
        for section in Elf(cubin).sections:
            if section.name.startswith(".text."):
                found[section.name.removeprefix(".text.")] = (len(blob) // _INSTRUCTION, len(section.data))
                blob += section.data + bytes(-len(section.data) % _ALIGN)
        places.append(found)
    lines = _disassembled(arch, bytes(blob), folder)
    return [
        {name: list(_instructions(lines, start, size // _INSTRUCTION)) for name, (start, size) in found.items()}
        for found in places
    ]


def _disassembled(arch: str, code: bytes, folder: Path) -> list[str]:
    tool = disassembler()
    assert tool is not None, "nvidia-cuda-nvdisasm is not installed"
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".bin") as file:
        file.write(code)
        file.flush()
        command = [str(tool), "-ndf", "-raw", "-b", arch.replace("sm_", "SM"), file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    lines = [line for line in text.splitlines() if line.lstrip().startswith("/*")]
    assert len(lines) == len(code) // _INSTRUCTION, "nvdisasm left instructions out"
    return lines


def _instructions(lines: list[str], start: int, count: int) -> Iterator[Instruction]:
    """Read lazily made lines; targets become places inside the entry."""
    for place in range(count):
        match = _LINE.match(lines[start + place])
        assert match is not None, lines[start + place]
        at, guard, name, operands = match.groups()
        assert int(at, 16) == (start + place) * _INSTRUCTION, lines[start + place]
        target = _TARGET.search(operands) if name.startswith(_JUMPS) else None
        inside = None if target is None else int(target[1], 16) // _INSTRUCTION - start
        assert inside is None or 0 <= inside < count, lines[start + place]
        yield Instruction(place, guard or "", name, operands, inside)


def before_wait(code: list[Instruction], entry: EntryPoint, offsets: Iterable[tuple[int, int]], base: int) -> Before:
    """Follow all ways from the entry up to its waits, and what each register's address is made of on them.

    Of ``offsets``, ``(offset, size)`` of the parameters, only pointers and tensor maps count. A branch is taken both
    ways, a guarded wait is none, and a call returns as it came: what is missed is nothing, what is found may be a way
    that no thread goes. AssertionError where a branch cannot be followed.
    """
    pointers = {
        word: position
        for position, (kind, (offset, size)) in enumerate(zip(entry.parameters, offsets, strict=True))
        if kind in ("ptr", "tensormap")
        for word in range(base + offset, base + offset + size, 4)
    }
    maps = frozenset(position for position, kind in enumerate(entry.parameters) if kind == "tensormap")
    found: dict[int, Origin] = {}
    states: dict[int, State] = {0: {}}
    work = [0]
    while work:
        place = work.pop()
        one, state = code[place], states[place]
        if one.name == _WAIT and not one.guard:
            continue
        if one.base in _ACCESSES:
            origin = _origin(_address(one), one.guard, state, pointers)
            # The address of a tensor map is a parameter itself, not read from the constant bank.
            found[place] = found.get(place, _NOTHING) | (origin or (maps if one.base.startswith("UTMA") else _NOTHING))
        after = _written(one, state, pointers)
        for following in _following(one, code):
            if _merge(states, following, after):
                work.append(following)
    accesses = [
        Access(f"{code[place].name} {code[place].operands}", origin, ".STRONG." in f"{code[place].name}.")
        for place, origin in sorted(found.items())
    ]
    return Before(any(one.name == _WAIT for one in code), accesses)


def _following(one: Instruction, code: list[Instruction]) -> list[int]:
    assert one.base not in _INDIRECT, f"{one.name} {one.operands}: it may go anywhere"
    falls = [one.place + 1] if one.place + 1 < len(code) else []
    if one.base == "BSYNC":  # continues at the target of BSSY, which is nearly always the next instruction
        ends = [begun.target for begun in code if begun.base == "BSSY" and begun.target is not None]
        return falls if falls and falls[0] in ends else falls + ends
    if one.base in ("BSSY", "WARPSYNC"):
        return falls + ([one.target] if one.base == "WARPSYNC" and one.target is not None else [])
    if one.target is not None:
        is_plain = not one.guard and one.base != "CALL" and "," not in one.operands
        return [one.target, *([] if is_plain else falls)]
    assert one.base not in ("BRA", "JMP", "CALL"), f"{one.name} {one.operands}: no target"
    return falls if one.guard or one.base not in ("EXIT", "RET", "KILL", "BPT") else []


def _known(state: State, register: str) -> Origin:
    """Return what a register, or a register under a guard, may be made of."""
    return state[register] if register in state else state.get(register.rpartition(" ")[2], _NOTHING)


def _merge(states: dict[int, State], place: int, state: State) -> bool:
    """Add a state to that of a place; whether anything is new there."""
    if place not in states:
        states[place] = dict(state)
        return True
    old = states[place]
    new = {register: _known(old, register) | _known(state, register) for register in {*old, *state}}
    states[place] = new
    return any(origin != _known(old, register) for register, origin in new.items())


def _address(one: Instruction) -> str:
    """Return what an address is made of: the operands in brackets but for the descriptor, or all of a bulk copy."""
    if one.base in _BULK:
        return one.operands
    return " ".join(part for part in re.findall(r"(?<!desc)\[[^\]]*\]", one.operands))


def _origin(text: str, guard: str, state: State, pointers: Mapping[int, int]) -> Origin:
    found = {pointers[word] for text in _CONSTANT.findall(text) if (word := int(text, 16)) in pointers}
    return _NOTHING.union(found, *(_known(state, f"{guard} {register}") for register in _REGISTER.findall(text)))


def _written(one: Instruction, state: State, pointers: Mapping[int, int]) -> State:
    """Return the state behind an instruction: what it writes is made of all that it reads."""
    state = _without_guards(state, one)
    target, _, rest = (part.strip() for part in one.operands.partition(","))
    if _PREDICATE.match(target) and one.base in _READ | {"SHFL"}:  # a predicate stands before the register
        target, _, rest = (part.strip() for part in rest.partition(","))
    match = re.fullmatch(r"(U?R)(\d+)(?:\.\w+)*", target)
    if match is None or one.base in _NOT_WRITING:
        return state
    parts = one.name.split(".")
    width = 4 if "128" in parts else 2 if {"64", "WIDE"} & {*parts} or one.base in ("DADD", "DFMA", "DMUL") else 1
    origin = _NOTHING if one.base in _READ else _origin(rest, one.guard, state, pointers)
    for number in range(int(match[2]), int(match[2]) + width):
        state = _set(state, f"{match[1]}{number}", one.guard, origin)
    return state


def _without_guards(state: State, one: Instruction) -> State:
    """Forget what held under predicates that are perhaps written: those ahead of all operands but one register."""
    if one.base in ("R2P", "R2UP"):
        return {name: origin for name, origin in state.items() if " " not in name}
    written = set(_PREDICATES.findall(_AHEAD.match(one.operands)[0]))
    if not written:
        return state
    return {name: origin for name, origin in state.items() if name.partition(" ")[0].lstrip("!") not in written}


def _set(state: State, register: str, guard: str, origin: Origin) -> State:
    """Return a state after a register is written, under a guard if there is one."""
    if not guard:
        return {
            **{name: known for name, known in state.items() if name.rpartition(" ")[2] != register},
            register: origin,
        }
    negated = guard[1:] if guard.startswith("!") else f"!{guard}"
    also = {
        name: known | origin
        for name, known in state.items()
        if name.rpartition(" ")[2] == register and name != f"{negated} {register}"
    }
    return {**state, register: _known(state, register) | origin, **also, f"{guard} {register}": origin}
