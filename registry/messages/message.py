"""One sentence as data."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from kernel_muster.registry.messages.audience import COMMAND, Audience
from kernel_muster.registry.messages.template import fill

#: The template of a sentence that was written elsewhere: by a trace, an exception or a compiler.
QUOTED = "quoted"
#: The template of several sentences in one.
JOINED = "joined"

_T = TypeVar("_T")


class Message(str):
    """A sentence with the name of its template and the values that fill it.

    As a string it is the wording of the command line. ``for_audience`` gives the wording of another audience; the
    values may hold messages, which are reworded with it.
    """

    template: str
    values: Mapping[str, Any]
    audience: Audience

    def __new__(
        cls, template: str, values: Mapping[str, Any], text: str, audience: Audience = COMMAND
    ) -> "Message":  # fmt: skip
        """Make a message whose text is already known, in the words of an audience."""
        made = super().__new__(cls, text)
        made.template, made.values, made.audience = template, values, audience
        return made

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.template, dict(self.values), str(self), self.audience)

    def for_audience(self, audience: Audience) -> "Message":
        """Return the message in the words of an audience. What that leaves as it was keeps its present words."""
        if self.template == QUOTED:
            return self
        words = audience.over(self.audience)
        values = {name: _reworded(value, words) for name, value in self.values.items()}
        return Message(self.template, values, fill(words.template(self.template), values, words.option), words)

    def with_values(self, **values: object) -> "Message":
        """Return the message with some values replaced."""
        return self if self.template == QUOTED else message(self.template, **{**self.values, **values})


def message(template: str, /, **values: object) -> Message:
    """Return a message by the name of its template; KeyError for a template or a value that does not exist."""
    return Message(template, values, fill(COMMAND.template(template), values, COMMAND.option))


def quoted(text: str) -> Message:
    """Return a sentence that was written elsewhere, word for word."""
    return text if isinstance(text, Message) else Message(QUOTED, {"text": text}, text)


def joined(parts: Iterable[str]) -> Message:
    """Return several sentences as one, each once."""
    every = [one for part in parts for one in parts_of(part)]
    distinct = tuple(dict.fromkeys(every))
    return distinct[0] if len(distinct) == 1 else message(JOINED, parts=distinct)


def parts_of(text: str) -> tuple[Message, ...]:
    """Return the sentences of a joined one."""
    whole = quoted(text)
    return tuple(map(quoted, whole.values["parts"])) if whole.template == JOINED else (whole,)


def values_of(text: str, kind: type[_T]) -> Iterator[_T]:
    """Yield the values of one type, those of inner messages too."""
    pending: list[object] = [text]
    while pending:
        value = pending.pop(0)
        if isinstance(value, kind):
            yield value
        elif isinstance(value, Message):
            pending += value.values.values()
        elif isinstance(value, list | tuple):
            pending += value


def plain_values(text: str) -> dict[str, Any]:
    """Return the values of a message as JSON can hold them. A text without a template has none."""
    if not isinstance(text, Message) or text.template == QUOTED:
        return {}
    return {name: _plain(value) for name, value in text.values.items()}


def _plain(value: object) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return [_plain(one) for one in value]
    return str(value)


def _reworded(value: object, audience: Audience) -> object:
    if isinstance(value, Message):
        return value.for_audience(audience)
    if type(value) in (list, tuple):
        return tuple(_reworded(one, audience) for one in value)  # type: ignore[attr-defined]
    return audience.value(value)
