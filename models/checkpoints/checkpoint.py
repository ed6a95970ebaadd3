"""A checkpoint folder: config.json, and model.safetensors or the shards that an index names.

Opening reads headers only. ``model.safetensors.index.json`` is followed to the letter: a shard that is missing, a
tensor that is elsewhere, twice, or in a shard without being listed, is refused.
"""

from collections.abc import Iterator, Mapping
from os import PathLike, fspath
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kernel_muster.MODEL_toml.hf.config import HfConfig
from kernel_muster.MODEL_toml.wording import shown, type_name
from kernel_muster.models.checkpoints.documents import is_there, read_hf_config, read_object
from kernel_muster.models.checkpoints.errors import CheckpointError, MissingTensorError, plain
from kernel_muster.models.checkpoints.tensors import CARRIERS, MappedFile, TensorEntry, read_header
from kernel_muster.registry.errors import UsageError
from numpy.typing import NDArray

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
#: Bytes of a name that any file system takes.
_LONGEST_NAME = 255


class Checkpoint:
    """Entries by tensor name, the config, and values on demand, memory-mapped and read-only."""

    def __init__(self, folder: Path, config: HfConfig, entries: Mapping[str, TensorEntry]) -> None:
        self.folder, self.hf = folder, config
        self.entries = MappingProxyType(dict(entries))
        self._files: dict[Path, MappedFile] = {}
        self._children: dict[str, list[str]] = {}
        for name in self.entries:
            module, _, leaf = name.rpartition(".")
            self._children.setdefault(module, []).append(leaf)

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of config.json."""
        return self.hf.content

    def leaves(self, module: str) -> tuple[str, ...]:
        """Return the last name parts of a module's own tensors: ``("weight", "weight_scale")``."""
        return tuple(self._children.get(module, ()))

    def entry(self, name: str) -> TensorEntry:
        """Return where a tensor lies; MissingTensorError if there is none of that name."""
        if name not in self.entries:
            raise MissingTensorError(self.folder, name)
        return self.entries[name]

    def tensor(self, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...] | None = None) -> NDArray[Any]:
        """Return a tensor of one of these types (U8, BF16, F8_E4M3, F32), and of this shape; else CheckpointError."""
        entry = self.entry(name)
        is_typed = entry.dtype in dtypes and entry.dtype in CARRIERS
        if not is_typed or (shape is not None and entry.shape != shape):
            wanted = " or ".join(dtypes) + ("" if shape is None else f" {list(shape)}")
            raise CheckpointError(entry.file, name, wanted, entry.described())
        return self._mapped(entry.file).view(entry)

    def _mapped(self, file: Path) -> MappedFile:
        if file not in self._files:
            try:
                self._files[file] = MappedFile(file)
            except (OSError, ValueError) as error:
                raise CheckpointError(file, None, "a file that can be mapped", str(error)) from None
        return self._files[file]


def open_checkpoint(folder: str | PathLike[str]) -> Checkpoint:
    """Open a folder; CheckpointError, a UsageError, says what is missing or malformed."""
    if not isinstance(folder, str | PathLike) or not isinstance(fspath(folder), str):
        raise UsageError(f"folder is {type(folder).__name__}, expected the path of a checkpoint's folder")
    folder = Path(folder)
    config = read_hf_config(folder)
    has_single, has_index = is_there(folder / SINGLE), is_there(folder / INDEX)
    if has_index:
        entries = _sharded(folder)
        if has_single and not any(entry.file.name == SINGLE for entry in entries.values()):
            raise CheckpointError(folder / INDEX, None, f"one set of weights, {SINGLE} among its files", "two sets")
    elif has_single:
        entries = read_header(folder / SINGLE)
    else:
        raise CheckpointError(folder, None, f"{SINGLE} or {INDEX}", "neither")
    if not entries:
        raise CheckpointError(folder, None, "tensors", "none at all")
    return Checkpoint(folder, config, entries)


def _sharded(folder: Path) -> dict[str, TensorEntry]:
    index = folder / INDEX
    listed = dict(_weight_map(index))
    entries: dict[str, TensorEntry] = {}
    for shard in sorted(set(listed.values())):
        if not is_there(folder / shard):
            first = next(name for name, file in listed.items() if file == shard)
            raise CheckpointError(
                index, first, f"the shard {plain(shard)}", "no such file", "download the whole checkpoint"
            )
        for name, entry in read_header(folder / shard).items():
            if name in entries:
                raise CheckpointError(entry.file, name, "each tensor once", f"it is in {entries[name].file.name} too")
            if name not in listed:
                raise CheckpointError(entry.file, name, f"a tensor that {INDEX} lists", "one that it does not list")
            entries[name] = entry
    for name, shard in listed.items():
        if name not in entries:
            raise CheckpointError(folder / shard, name, f"the tensor that {INDEX} puts here", "none of that name")
        if entries[name].file.name != shard:
            raise CheckpointError(index, name, f"a tensor in {shard}", f"one in {entries[name].file.name}")
    return entries


def _is_shard_name(file: object) -> bool:
    if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
        return False
    return len(file.encode("utf-8", "surrogatepass")) <= _LONGEST_NAME


def _weight_map(index: Path) -> Iterator[tuple[str, str]]:
    table = read_object(index).get("weight_map")
    if not isinstance(table, dict):
        raise CheckpointError(index, None, "a weight_map object", type_name(table))
    for name, file in table.items():
        # A shard lies beside its index: a path that leads elsewhere is not followed.
        if not _is_shard_name(file):
            raise CheckpointError(index, name, "the name of a .safetensors file in this folder", shown(file))
        yield name, file
