"""What is compiled of a Triton file: one function, for some types, constants and sizes."""

import hashlib
from typing import Any

from kernel_muster.registry.backends.numba.python_sources import Sources
from kernel_muster.registry.values import frozen


@frozen
class Variant:
    """One way to compile a function. ``constants`` are pairs, sorted by name; ``parameters`` are the others' types."""

    function: str
    parameters: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    num_warps: int
    num_stages: int
    shared_bytes: int

    def sha256(self, sources: Sources) -> str:
        """Return the digest of the files and of what is compiled of them."""
        digest = hashlib.sha256(repr(self).encode())
        for name, text in sources:
            digest.update(name.encode() + b"\0" + hashlib.sha256(text).digest())
        return digest.hexdigest()
