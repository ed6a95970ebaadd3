"""One run of the comparison over all its models."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kernel_muster._version import __version__
from kernel_muster.ab.arms import GATE, Arm
from kernel_muster.ab.booted import Sized
from kernel_muster.ab.comparing import compare_model
from kernel_muster.ab.decoding.prompts import check_count, read_prompts
from kernel_muster.ab.decoding.sizes import DEVICE, HOST, Limits, sizing
from kernel_muster.ab.drafting import DrafterWish
from kernel_muster.ab.plan import Plan
from kernel_muster.ab.result import Comparison, Thresholds
from kernel_muster.audit.opening import BootRequest, discover_for, find_manifest
from kernel_muster.registry.contract.specs import Stage
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.hardware.arch import CPU
from kernel_muster.registry.launch.runners import Progress
from kernel_muster.registry.levers import PREFIX
from kernel_muster.registry.service_variables import is_service_variable
from kernel_muster.registry.values import frozen

_PACKAGES = ("numpy", "ml_dtypes", "cupy-cuda13x", "cupy-cuda12x", "cuda-bindings", "nvidia-cuda-nvrtc")
_DEVICE_SEQUENCES, _HOST_SEQUENCES = (1, 4, 8, 16, 32), (1, 4, 8)
_DEVICE_TOKENS, _HOST_TOKENS = 32, 16


@frozen(kw_only=True)
class Wish:
    """The caller's options. None selects the target's default."""

    models: tuple[str, ...]
    target: str | None = None
    sequences: tuple[int, ...] | None = None
    tokens: int | None = None
    repeats: int = 3
    drafts: int | None = None
    prompts: tuple[str, ...] = ()
    seed: int = 0
    folder: Path | None = None
    drafter: str | None = None
    drafter_folder: Path | None = None
    is_reduced: bool | None = None
    layers: int | None = None
    stage: Stage | None = None
    thresholds: Thresholds = Thresholds()
    command: str = ""

    @property
    def is_host(self) -> bool:
        """Whether the host itself decodes."""
        return self.target == CPU

    @property
    def limits(self) -> Limits | None:
        """The limits of a model of reduced size. None at full size.

        On the host models have reduced size, unless an option or a checkpoint selects full size.
        """
        is_small = self.is_reduced if self.is_reduced is not None else self.is_host and self.folder is None
        return (HOST if self.is_host else DEVICE) if is_small else None

    @property
    def sized(self) -> Sized:
        """The size of models."""
        return sizing(is_reduced=self.limits is not None, layers=self.layers, limits=self.limits or DEVICE)

    def drafter_wish(self, base: BootRequest) -> DrafterWish | None:
        """Return the drafter for a boot of ``base``, if requested."""
        if self.drafter is None:
            return None
        request = replace(base, model=self.drafter)
        return DrafterWish(name=self.drafter, base=request, folder=self.drafter_folder, limits=self.limits)

    def check(self) -> None:
        """UsageError for an impossible combination of drafter options."""
        if self.drafter is None and self.drafter_folder is not None:
            raise UsageError("--drafter-weights: name the drafter too, with --drafter")
        if self.drafter is None:
            return
        if len(self.models) > 1:
            raise UsageError(f"--drafter {self.drafter} drafts for one model: compare {len(self.models)} one by one")
        if self.drafts is not None:
            raise UsageError("--drafts is of the MTP head, and a drafter fills blocks of its own: leave one out")
        if (self.folder is None) is not (self.drafter_folder is None):
            raise UsageError(
                "--weights and --drafter-weights go together: where one is random hardly a draft holds; give both"
            )


def run(
    bases: Sequence[BootRequest], a: Arm, b: Arm, wish: Wish, progress: Progress | None, say: Callable[[str], None],
    tell_failure: Callable[[BaseException], None] = lambda error: None,
) -> Comparison:  # fmt: skip
    """Compare the arms on every model. ``say`` receives progress, ``tell_failure`` the exception of a builder."""
    wish.check()
    plan = Plan(
        sequences=wish.sequences or (_HOST_SEQUENCES if wish.is_host else _DEVICE_SEQUENCES),
        tokens=wish.tokens or (_HOST_TOKENS if wish.is_host else _DEVICE_TOKENS),
        repeats=wish.repeats, drafts=wish.drafts, prompts=wish.prompts, seed=wish.seed, sized=wish.sized,
        thresholds=wish.thresholds, folder=wish.folder, stage=wish.stage, progress=progress, say=say,
        tell_failure=tell_failure, drafter=wish.drafter_wish(bases[0]),
    )  # fmt: skip
    check_count(plan.prompts, max(plan.sequences))
    unknown = _checked(bases, plan)
    models = tuple(compare_model(base, a, b, plan) for base in unknown or bases)
    return Comparison(
        muster_version=__version__, command=wish.command, date=f"{datetime.now(UTC):%Y-%m-%d}", a=a.text(),
        b=b.text(), shared=_shared(bases, has_drafted=any(model.has_drafted for model in models)),
        tokens=plan.tokens, repeats=plan.repeats, sequences=plan.sequences, packages=_packages(),
        thresholds=wish.thresholds, models=models,
    )  # fmt: skip


def _checked(bases: Sequence[BootRequest], plan: Plan) -> list[BootRequest]:
    """Return the unknown models. UsageError for an impossible later model, before an earlier one has run."""
    unknown = []
    for base in bases:
        manifest, _ = find_manifest(base, discover_for(base))
        if manifest is None:
            unknown.append(base)
            continue
        sized = plan.sized(manifest)
        if plan.prompts:
            read_prompts(plan.prompts, sized.model.vocab_size or 1, manifest.model.vocab_size)
    return unknown


def _shared(bases: Sequence[BootRequest], *, has_drafted: bool) -> str:
    """Name the levers that the environment sets for both arms, and with drafts the pinned state of speculation."""
    levers = dict(bases[0].levers) if bases else dict(os.environ)
    own = [
        f"{k}={v}"
        for k, v in sorted(levers.items())
        if k.startswith(PREFIX) and v and not is_service_variable(k, levers)
    ]
    if has_drafted:
        own = [text for text in own if not text.startswith(f"{GATE}=")]
        over = f", over {GATE}={levers[GATE]} of the environment" if levers.get(GATE) else ""
        own.append(f"the speculation gate is pinned open{over}")
    return ", ".join(own) or "as it is"


def _packages() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
