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

    def template(self, name: str) -> str:
        """Return a template by name; KeyError for one that does not exist."""
        return self.templates.get(name) or command.TEMPLATES[name]


#: Readers of the command line: every template has its wording there.
COMMAND = Audience("command", {})
