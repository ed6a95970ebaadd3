"""What a cubin says about itself: architecture, entry points, parameters, registers, stack, shared memory.

NVIDIA documents the container (ELF) but not its sections; what is read here was found by compiling kernels that differ
in one thing and comparing with the assembler's log, for CUDA 12.9 and 13.5 and compute capabilities 7.5 to 12.1. What
cannot be understood is an error, never a default.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import field

from kernel_muster.registry.backends.cubin.elf import FUNCTION, BadElf, Elf, Section, Symbol, notes
from kernel_muster.registry.backends.request import EntryResources
from kernel_muster.registry.hardware.arch import Arch
from kernel_muster.registry.values import frozen

_CUDA_MACHINE = 190
_ENTRY_FLAG = 0x10
_INFO_SECTION = 0x70000000
# Attributes of .nv.info: one byte of format, one of attribute, then two bytes of value, or of length if format is 4.
_SIZED_FORMAT = 4
_MAX_THREADS, _REQUIRED_THREADS, _CLUSTER = 0x05, 0x10, 0x3D
_PARAMETER, _LARGE_PARAMETER = 0x17, 0x45
_FRAME_SIZE, _STACK_SIZE, _REGISTERS = 0x11, 0x12, 0x2F
# Capability 9.0 and newer: the section counts what the system keeps of each block's shared memory.
_RESERVED_SHARED = 1024
# The low 12 bits of a 16-byte instruction are its opcode, the next four the predicate (7: always).
_INSTRUCTION, _NOP, _ALWAYS_ENDS = 16, 0x918, (0x794D, 0x795C)  # EXIT, trap


class BadCubin(ValueError):
    """The bytes are no cubin that can be understood; the message says what is wrong."""


@frozen
class Cubin:
    """An inspected cubin. ``suffix`` is None where the file does not say (CUDA 12 before sm_100)."""

    capability: tuple[int, int]
    suffix: str | None
    entries: dict[str, EntryResources] = field(default_factory=dict)

    def serves(self, arch: Arch) -> bool:
        """Whether this was compiled for exactly this architecture, as far as the file says."""
        return self.capability == arch.capability and self.suffix in (None, arch.suffix)


def inspect_cubin(data: bytes) -> Cubin:
    """Read a cubin; BadCubin says what is wrong with bytes that are none."""
    try:
        return _inspect(Elf(data))
    except BadElf as error:
        raise BadCubin(str(error)) from None
    except (struct.error, IndexError) as error:
        raise BadCubin(f"a record ends too early: {error}") from None


def _inspect(elf: Elf) -> Cubin:
    if elf.machine != _CUDA_MACHINE:
        raise BadCubin(f"ELF machine is {elf.machine}, expected {_CUDA_MACHINE} (NVIDIA CUDA)")
    # ABI version 8 (CUDA 13, and sm_100+ of CUDA 12) moved the capability up by one byte.
    number = (elf.flags >> 8 if elf.abi[1] >= 8 else elf.flags) & 0xFF
    capability = (number // 10, number % 10)
    if capability < (7, 5):
        raise BadCubin(f"compute capability {capability[0]}.{capability[1]} is older than any that is supported")
    totals = _Totals(elf)
    entries = {
        symbol.name: _resources(elf, symbol, totals, capability)
        for symbol in elf.symbols
        if symbol.kind == FUNCTION and symbol.other & _ENTRY_FLAG and symbol.section
    }
    return Cubin(capability, _suffix(elf, number), entries)


def _suffix(elf: Elf, number: int) -> str | None:
    note = elf.section(".note.nv.tkinfo")
    for description in notes(note) if note else ():
        if match := re.search(rb"-arch sm_(\d+)([af]?) ", description):
            if int(match[1]) != number:
                raise BadCubin(f"compiled for sm_{int(match[1])}, but flagged as sm_{number}")
            return match[2].decode()
    return None


class _Totals:
    """The file-wide table that gives registers and stack by symbol."""

    def __init__(self, elf: Elf) -> None:
        self.values: dict[tuple[int, str], int] = {}
        section = elf.section(".nv.info")
        for attribute, data in _attributes(section) if section else ():
            if attribute in (_REGISTERS, _FRAME_SIZE, _STACK_SIZE):
                index, value = struct.unpack("<II", data)
                self.values[attribute, elf.symbols[index].name] = value

    def get(self, attribute: int, entry: str) -> int:
        if (attribute, entry) not in self.values:
            raise BadCubin(f"{entry}: attribute {attribute:#x} is not in .nv.info")
        return self.values[attribute, entry]


def _attributes(section: Section) -> Iterator[tuple[int, bytes]]:
    if section.kind != _INFO_SECTION:
        raise BadCubin(f"{section.name} has type {section.kind:#x}, expected {_INFO_SECTION:#x}")
    data, position = section.data, 0
    while position < len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, position)
        position += 4
        if form != _SIZED_FORMAT:
            yield attribute, struct.pack("<H", size)
            continue
        if position + size > len(data):
            raise BadCubin(f"{section.name}: attribute {attribute:#x} of {size} bytes goes beyond the section")
        yield attribute, data[position : position + size]
        position += size


def _resources(elf: Elf, symbol: Symbol, totals: _Totals, capability: tuple[int, int]) -> EntryResources:
    name = symbol.name
    info = elf.section(f".nv.info.{name}")
    if info is None:
        raise BadCubin(f"{name}: there is no section .nv.info.{name}")
    parameters: dict[int, tuple[int, int]] = {}
    max_threads = cluster = None
    for attribute, data in _attributes(info):
        if attribute in (_PARAMETER, _LARGE_PARAMETER):
            _, ordinal, offset, bits = struct.unpack("<IHHI", data)
            parameters[ordinal] = (offset, bits >> 18 if attribute == _PARAMETER else bits)
        elif attribute in (_MAX_THREADS, _REQUIRED_THREADS):
            x, y, z = struct.unpack("<III", data)
            max_threads = x * y * z
        elif attribute == _CLUSTER:
            cluster = struct.unpack("<III", data)
    if sorted(parameters) != list(range(len(parameters))):
        raise BadCubin(f"{name}: parameters {sorted(parameters)} are described, expected 0 to {len(parameters) - 1}")
    return EntryResources(
        registers=totals.get(_REGISTERS, name),
        stack_bytes=max(totals.get(_FRAME_SIZE, name), totals.get(_STACK_SIZE, name)),
        static_shared_bytes=_static_shared(elf.section(f".nv.shared.{name}"), name, capability),
        max_threads=max_threads,
        cluster=cluster,
        parameters=tuple(parameters[ordinal] for ordinal in range(len(parameters))),
        instructions=_instructions(elf.section(f".text.{name}"), symbol),
    )


def _static_shared(section: Section | None, name: str, capability: tuple[int, int]) -> int:
    reserved = _RESERVED_SHARED if section is not None and capability >= (9, 0) else 0
    size = section.size if section is not None else 0
    if size < reserved:
        raise BadCubin(f"{name}: {size} bytes of shared memory, fewer than the {reserved} that are reserved")
    return size - reserved


def _instructions(section: Section | None, symbol: Symbol) -> int:
    """Count the instructions up to the first that always ends the thread; 2 is an empty body."""
    code = section.data[symbol.value : symbol.value + symbol.size] if section is not None else b""
    if not code or len(code) % _INSTRUCTION:
        raise BadCubin(f"{symbol.name}: {len(code)} bytes of code, expected a multiple of {_INSTRUCTION} above 0")
    count = 0
    for position in range(0, len(code), _INSTRUCTION):
        (word,) = struct.unpack_from("<H", code, position)
        count += word & 0xFFF != _NOP
        if word in _ALWAYS_ENDS:
            break
    return count
