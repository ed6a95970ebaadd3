"""Prompts as token ids: from text, from files, or made from a seed.

There is no tokenizer: the bytes of a text are its tokens. With synthetic weights bytes serve as well as words. Callers
with a tokenizer pass ids.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.values import frozen

Prompt = tuple[int, ...]
#: Rows of made prompts, by turns. All exceed the widest batch tier, so prefill uses its own kernels. From 33 rows
#: on, attention uses tiles and the delta rule chunks of 64; the longest prompt needs two chunks. Short ones are for
#: hosts, which read rows one by one.
MADE_TOKENS = (72, 20, 40, 20)
_MOST_BYTES = 1 << 20
#: A vocabulary for all ids, before a model is known.
_ANY = 1 << 31


@frozen
class Prompts:
    """Distinct prompts, and their origin in words."""

    prompts: tuple[Prompt, ...]
    origin: str

    def take(self, count: int) -> tuple[Prompt, ...]:
        """Return a prompt for each sequence, starting again after the last one."""
        return tuple(self.prompts[at % len(self.prompts)] for at in range(count))


def made_prompts(count: int, vocab: int, seed: int) -> Prompts:
    """Make prompts from a seed, all different, so no two sequences use the same experts."""
    rng = random.Random(seed)  # noqa: S311  (nothing secret: the same prompts for the same seed)
    rows = [MADE_TOKENS[at % len(MADE_TOKENS)] for at in range(count)]
    found = tuple(tuple(rng.randrange(vocab) for _ in range(tokens)) for tokens in rows)
    return Prompts(found, f"{count} made from seed {seed}, {_lengths(found)}")


def _lengths(prompts: Sequence[Prompt]) -> str:
    least, most = min(map(len, prompts)), max(map(len, prompts))
    return f"{least} tokens each" if least == most else f"{least} to {most} tokens"


def read_prompts(texts: Sequence[str], vocab: int, whole: int | None = None) -> Prompts:
    """Read ``--prompt`` values: text, a file with one prompt in each line, or a .json file with texts or lists of ids.

    ``whole`` is the vocabulary at full size of a reduced model.
    """
    hint = f"; this model of reduced size has {vocab} tokens, --full all {whole}" if whole and whole > vocab else ""
    found = [prompt for text in texts for prompt in _read(text, vocab, hint)]
    if not found:
        raise UsageError("--prompt: no prompt in what was given")
    distinct = tuple(dict.fromkeys(found))
    return Prompts(distinct, f"{len(distinct)} given, {_lengths(distinct)}")


def check_count(texts: Sequence[str], sequences: int) -> None:
    """Refuse more prompts than sequences: some would not be decoded."""
    count = len(read_prompts(texts, _ANY).prompts) if texts else 0
    if count > sequences:
        raise UsageError(f"--prompt: {count} prompts for {sequences} sequences: raise --sequences, or drop prompts")


def longest_prompt(texts: Sequence[str]) -> int:
    """Return the length of the longest prompt, given or made, for any vocabulary. UsageError as for reading."""
    return max(map(len, read_prompts(texts, _ANY).prompts)) if texts else max(MADE_TOKENS)


def _read(text: str, vocab: int, hint: str) -> list[Prompt]:
    path = Path(text)
    try:
        is_file = path.is_file()
    except (OSError, ValueError):  # a long text is no path
        is_file = False
    if not is_file:
        _check_no_path(text, path)
        return [_from_text(text, vocab, "--prompt")]
    content = _content(path)
    if path.suffix == ".json":
        return _from_json(content, path, vocab, hint)
    return [_from_text(line, vocab, str(path)) for line in content.splitlines() if line.strip()]


def _check_no_path(text: str, path: Path) -> None:
    """Refuse a path without a file: a misspelt one would count as the prompt itself."""
    try:
        exists = path.exists()
    except (OSError, ValueError):
        exists = False
    if text and exists:
        raise UsageError(f"--prompt {text!r}: it is no file; name one, or put a text of that name into one")
    is_one_word = len(text.split()) == 1
    if text.endswith((".txt", ".json")) or (is_one_word and "/" in text):
        raise UsageError(f"--prompt {text!r}: there is no such file; a text goes into a file if it looks like a path")


def _content(path: Path) -> str:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UsageError(f"--prompt: {path} is larger than {_MOST_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompt: {path} cannot be read: {error}") from None


def _from_text(text: str, vocab: int, where: str) -> Prompt:
    try:
        ids = tuple(byte % vocab for byte in text.encode())
    except UnicodeEncodeError as error:
        raise UsageError(f"{where}: no UTF-8 at character {error.start} of a prompt; a .json file takes ids") from None
    if not ids:
        raise UsageError(f"{where}: a prompt is empty, expected at least one character")
    return ids


def _from_json(content: str, path: Path, vocab: int, hint: str) -> list[Prompt]:
    try:
        rows = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--prompt: {path} is no JSON: {error}") from None
    if not isinstance(rows, list):
        raise UsageError(f"--prompt: {path} holds {type(rows).__name__}, expected a list of texts or lists of ids")
    return [_from_row(row, at, path, vocab, hint) for at, row in enumerate(rows)]


def _from_row(row: object, at: int, path: Path, vocab: int, hint: str) -> Prompt:
    where = f"{path}[{at}]"
    if isinstance(row, str):
        return _from_text(row, vocab, where)
    if isinstance(row, list) and row and all(type(one) is int and 0 <= one < vocab for one in row):
        return tuple(row)
    ids = "from 0 on" if vocab == _ANY else f"from 0 to {vocab - 1}"
    raise UsageError(f"{where}: expected text, or ids {ids}, at least one{hint}")
