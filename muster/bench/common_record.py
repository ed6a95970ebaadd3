"""The record of the small kernels as Markdown: what it was measured on and how, then a table a model and step."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

from kernel_muster.bench.common import Figure
from kernel_muster.registry.target import Target

_PACKAGES = ("cupy-cuda13x", "cupy-cuda12x", "cuda-bindings", "nvidia-cuda-nvrtc", "torch")
_METHOD = (
    "CUDA graph replays over copies of all arguments (at least 320 MiB together, but at most 40 copies: what is "
    "smaller than 8 MiB is partly found in L2, as in a step), plain launches, contestants in turn, median of the "
    "rounds. floor = a kernel that reads the same bytes and writes as many of them back as ours writes; empty = a "
    "launch that does nothing. Both are timed in the same call."
)


def _versions() -> str:
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def _cells(figure: Figure) -> Iterable[str]:
    peer = f"{figure.peer_us:.2f} ({figure.peer})" if figure.peer_us is not None else "-"
    yield from (figure.key, figure.label, f"{figure.us:.2f}", f"{figure.spread:.1%}", f"{figure.floor_us:.2f}")
    yield from (f"{figure.ratio:.2f}", f"{figure.empty_us:.2f}", peer)


def to_markdown(figures: Sequence[Figure], target: Target, command: str) -> str:
    """Return the record."""
    device = target.device
    name, driver = (device.name, device.driver) if device else ("-", "-")
    lines = [
        f"- date: {datetime.now(UTC):%Y-%m-%d}",
        f"- device: {name} ({target.arch}), driver for CUDA {driver}",
        f"- command: `{command}`",
        f"- {_versions()}",
        f"- method: {_METHOD}",
    ]
    for model in dict.fromkeys(figure.model for figure in figures):
        lines += ["", f"## {model}", "", "| key | shape | us | spread | floor us | us / floor | empty us | peer us |"]
        lines += ["|---|---|--:|--:|--:|--:|--:|--:|"]
        lines += ["| " + " | ".join(_cells(figure)) + " |" for figure in figures if figure.model == model]
    return "\n".join(lines) + "\n"
