"""Arms of a comparison: their levers come from ``--a NAME=VALUE`` and ``--b NAME=VALUE``."""

from collections.abc import Mapping

from kernel_muster.registry.messages.audience import Audience

_TEMPLATES: Mapping[str, str] = {
    "remedy.lever_correct": "correct it, or drop --ARM {lever}",
    "remedy.lever_name": "correct the name, or drop --ARM {lever}",
    "remedy.lever_value": "set it to {grammar}, or drop --ARM {lever}",
    "remedy.or_unset": "or drop --ARM {lever}",
    "remedy.unset_model": "drop --ARM {lever}, or choose a model that can do it",
    "remedy.unset_one": "drop --ARM {lever} or {other}",
}


def of_arm(letter: str) -> Audience:
    """Return the words for one arm, ``a`` or ``b``."""
    templates = {name: text.replace("ARM", letter) for name, text in _TEMPLATES.items()}
    return Audience(f"arm {letter}", templates)
