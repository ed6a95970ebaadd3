"""Compare the machine code of two states of the tree: a digest of each entry point, for each architecture.

    python benchmarks/code_digests.py write before.json
    python benchmarks/code_digests.py write after.json --arch sm_90a --only moe/
    python benchmarks/code_digests.py compare before.json after.json

A change of names or comments must leave every digest as it was. A renamed entry point is found by its digest. Needs the
extra ``nvrtc13`` and no GPU. About 20 s for an architecture on two cores.
"""

import argparse
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from kernel_muster.ab.nudge import nudge_plugin
from kernel_muster.bench import floor, plugin
from kernel_muster.registry.backends.builder import Builder
from kernel_muster.registry.backends.cubin.elf import Elf
from kernel_muster.registry.backends.cuda_kernel import CudaKernel
from kernel_muster.registry.backends.pool import build_all
from kernel_muster.registry.backends.request import BuildRequest, Built
from kernel_muster.registry.discovery.discover import discover
from kernel_muster.registry.hardware.arch import parse_arch

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_121a")
_CODE = re.compile(r"\.(text|nv\.constant\d+)\.(.+)")
#: Source and entry point -> digest.
Digests = dict[str, str]


def requests(name: str) -> Iterator[BuildRequest]:
    """Yield one request for each built-in source that an architecture compiles."""
    arch = parse_arch(name)
    local = [spec for module in (nudge_plugin, floor, plugin) for spec in module.muster_kernels()]
    specs = [row.spec for row in discover().kernels] + local
    found = {
        spec.backend.request(arch): None
        for spec in specs
        if isinstance(spec.backend, CudaKernel) and any(need.rejects(arch) is None for need in spec.code_archs)
    }
    yield from found


def digests(request: BuildRequest, built: Built) -> Iterator[tuple[str, str]]:
    """Yield each entry point with a digest of its code, its constants, and the resources that it needs."""
    for name, needs in built.entries.items():
        digest = hashlib.sha256()
        for section in Elf(built.cubin).sections:
            match = _CODE.fullmatch(section.name)
            if match and match[2] == name:
                digest.update(match[1].encode() + b"\0" + section.data)
        digest.update(repr((needs.registers, needs.stack_bytes, needs.static_shared_bytes, needs.max_threads)).encode())
        yield f"{request.source.parent.name}/{request.source.name} {name}", digest.hexdigest()[:16]


def read(arch: str, only: str) -> Digests:
    """Compile the sources with ``only`` in their path; a name with different code in two sources gets a number."""
    asked = [request for request in requests(arch) if only in str(request.source)]
    outcomes = build_all(Builder(), asked)
    if failed := [str(outcome.failure) for outcome in outcomes if outcome.built is None]:
        sys.exit("\n".join(failed))
    found: dict[str, list[str]] = {}
    for outcome in outcomes:
        for name, digest in digests(outcome.request, outcome.built) if outcome.built else ():
            if digest not in (known := found.setdefault(name, [])):
                known.append(digest)
    return {
        name if number == 1 else f"{name} #{number}": digest
        for name, every in sorted(found.items())
        for number, digest in enumerate(every, 1)
    }


def of_sources(before: Digests, after: Digests) -> Digests:
    """Return the first one's entries for the sources of the second."""
    sources = {name.split()[0] for name in after}
    return {name: digest for name, digest in before.items() if name.split()[0] in sources}


def compare(before: Digests, after: Digests) -> Iterator[str]:
    """Yield a line for each changed entry point."""
    gone, new = ([name for name in one if name not in other] for one, other in ((before, after), (after, before)))
    for name in sorted(before.keys() & after.keys()):
        if before[name] != after[name]:
            yield f"changed  {name}"
    for name in new:
        old = next((one for one in gone if before[one] == after[name]), "")
        yield f"renamed  {old} -> {name}" if old else f"new      {name}"
        if old:
            gone.remove(old)
    yield from (f"removed  {name}" for name in gone)


def main() -> None:
    """Write digests, or compare those of two files. The exit code is 1 if any code changed or is new."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("path", type=Path)
    writing.add_argument("--arch", action="append", choices=ARCHS)
    writing.add_argument("--only", default="", help="part of the paths of the sources to compile")
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--only", action="store_true", help="leave out sources that the second file does not have")
    options = parser.parse_args()
    if options.command == "write":
        found = {arch: read(arch, options.only) for arch in options.arch or ARCHS}
        options.path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return
    before, after = (json.loads(path.read_text(encoding="utf-8")) for path in (options.before, options.after))
    kinds: Counter[str] = Counter()
    for arch in sorted(before.keys() & after.keys()):
        known = of_sources(before[arch], after[arch]) if options.only else before[arch]
        lines = list(compare(known, after[arch]))
        kinds.update(line.split()[0] for line in lines)
        print(f"{arch}: {len(after[arch])} entry points, {len(set(after[arch].values()))} different")
        print("".join(f"  {line}\n" for line in lines), end="")
    sys.exit(1 if kinds["changed"] or kinds["new"] else 0)


if __name__ == "__main__":
    main()
