"""The block-diffusion drafter of an arm: booted beside its target, at the same size, with separate weights."""

import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

from kernel_muster._version import __version__
from kernel_muster.ab.booted import (
    ArmRefused,
    Booted,
    Building,
    Drafting,
    builds,
    check_without,
    kernels_of,
    refused_arm,
)
from kernel_muster.ab.decoding.decoders import EngineDecoder
from kernel_muster.ab.decoding.sizes import Limits, fitted_drafter
from kernel_muster.ab.decoding.weights import drafter_weights_of, weights_text
from kernel_muster.audit.evidence import AuditOptions
from kernel_muster.audit.opening import BootRequest
from kernel_muster.audit.session import BootOptions, BootSession
from kernel_muster.MODEL_toml.manifest import Manifest
from kernel_muster.models.drafter import Drafter, build_drafter
from kernel_muster.registry.errors import BootRefused, MusterError, UsageError
from kernel_muster.registry.keys import KernelKey
from kernel_muster.registry.values import frozen

#: Levers for experts, for attention in BF16 and for an MTP head, which no drafter has. A drafter's boot would refuse
#: them, so they are set for the target alone.
TARGET_LEVERS = (
    "MUSTER_FP32_ROUTING",
    "MUSTER_FP4_PROJ_DECODE",
    "MUSTER_MOE_GROUPED_DECODE",
    "MUSTER_MTP_GATE_FORCE",
    "MUSTER_MTP_PREFILL",
)


@frozen(kw_only=True)
class DrafterWish:
    """The drafter of both arms: its model name, its boot request, and a checkpoint's folder.

    ``limits`` are those of its target, if that has reduced size.
    """

    name: str
    base: BootRequest
    folder: Path | None = None
    limits: Limits | None = None

    def weights(self, seed: int) -> str:
        """Return the origin of its weights."""
        return weights_text(self.folder, seed + 1)


def boot_drafter(
    name: str, request: BootRequest, wish: DrafterWish, building: Building, target: Booted,
    without: frozenset[KernelKey] = frozenset(),
) -> None:  # fmt: skip
    """Boot the drafter of an arm for the arm's decoder. ArmRefused if it is refused or not built.

    UsageError for a model that is no drafter, a drafter of another model, or an arm's model that decodes itself.
    """
    if not isinstance(target.decoder, EngineDecoder):
        raise UsageError(f"--drafter {wish.name}: {target.manifest.name} decodes itself, and nothing drafts for it")
    levers = {lever: value for lever, value in request.levers.items() if lever not in TARGET_LEVERS}
    options = BootOptions(
        audit=AuditOptions(stage=building.stage, without=without), muster_version=__version__,
        progress=building.progress,
    )  # fmt: skip
    session = BootSession(replace(request, levers=levers), options)
    try:
        with redirect_stdout(sys.stderr), session as boot:
            sized = _sized(wish, boot.manifest, target)
            drafter = _built(sized, wish, boot, building, target)
    except BootRefused as error:
        if isinstance(error.__cause__, UsageError):
            raise error.__cause__ from None
        check_without(name, session, without)
        raise ArmRefused(name, session.report) from None
    except UsageError:
        raise
    except MusterError as error:
        raise refused_arm(name, session.report, error) from error
    target.decoder.draft_with(drafter, session.levers)
    target.drafting = Drafting(
        session=session, manifest=session.manifest, sized=sized, drafts=drafter.drafter.gamma,
        kernels=kernels_of(session),
    )  # fmt: skip


def _sized(wish: DrafterWish, manifest: Manifest, target: Booted) -> Manifest:
    if not manifest.dflash:
        raise UsageError(f"--drafter {wish.name}: {manifest.name} is no drafter: its manifest has no [dflash] table")
    request = manifest.dflash.get("target")
    if request != target.manifest.name:
        raise UsageError(f"--drafter {wish.name}: it drafts for {request}, not for {target.manifest.name}")
    return fitted_drafter(manifest, target.manifest, target.sized, wish.limits)


def _built(sized: Manifest, wish: DrafterWish, boot: BootSession, building: Building, target: Booted) -> Drafter:
    weights = drafter_weights_of(wish.folder, building.seed, is_zero_centred=sized.model.rms_norm_zero_centred)
    with builds("the drafter's builder"):
        return build_drafter(sized, boot.kernels, weights, target.model)
