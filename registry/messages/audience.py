"""Who reads a message: a table of the sentences that differ, and a spelling of options."""

from collections.abc import Callable, Mapping

from kernel_muster.registry.messages import command
from kernel_muster.registry.messages.template import Option, plain_option
from kernel_muster.registry.values import frozen


def _unchanged(value: object) -> object:
    return value


@frozen
class Audience:
    """Readers of one kind. ``templates`` holds the sentences that they read in other words than the command line's.

    ``value`` replaces a value: a key by the word KEY, for a text about many keys.
    """

    name: str
    templates: Mapping[str, str]
    option: Option = plain_option
    value: Callable[[object], object] = _unchanged

    def over(self, other: "Audience") -> "Audience":
        """Return this audience with the words of another one where it has none of its own."""
        if self is COMMAND or not other.templates or other is self:
            return self
        option = other.option if self.option is plain_option else self.option
        return Audience(self.name, {**other.templates, **self.templates}, option, self.value)

    def template(self, name: str) -> str:
        """Return a template by name; KeyError for one that does not exist."""
        return self.templates.get(name) or command.TEMPLATES[name]


#: Readers of the command line: every template has its wording there.
COMMAND = Audience("command", {})
