"""Python callers: options are the parameters of ``boot()``."""

from collections.abc import Mapping

from kernel_muster.registry.messages.audience import Audience

#: Parameters of boot() by the command's options, and whether they take several.
PARAMETERS: Mapping[str, tuple[str, bool]] = {
    "--plugin": ("plugins", True),
    "--no-plugin": ("no_plugins", True),
    "--manifests": ("manifest_folders", True),
    "--dangerously-allow-unresolved": ("dangerously_allow_unresolved", True),
    "--manifest": ("manifest", False),
    "--quant": ("quant", False),
    "--ref": ("model", False),
    "--stage": ("stage", False),
    "--target": ("target", False),
}


def parameter(option: str, value: str | None) -> str:
    """Spell an option as a parameter: ``--stage proven`` is ``stage="proven"``."""
    name, takes_several = PARAMETERS[option]
    if value is None:
        return name
    shown = value if value.isupper() else f'"{value}"'  # FILE stands for a value
    return f"{name}=[{shown}]" if takes_several else f"{name}={shown}"


PYTHON = Audience(
    "python", {"remedy.write_manifest": "or write a manifest for it, and give that: boot({--manifest FILE})"}, parameter
)
