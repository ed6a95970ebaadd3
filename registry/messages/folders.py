"""Commands of several models: they take folders of manifests, and no single manifest."""

from kernel_muster.registry.messages.audience import Audience

_FOLDER = "or write a manifest for it, and give the folder above its own: {--manifests FOLDER}"
FOLDERS = Audience("folders", {"remedy.write_manifest": _FOLDER, "remedy.own_manifest": _FOLDER})
