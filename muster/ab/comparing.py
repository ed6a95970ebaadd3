"""Boot both arms of one model, and compare them."""

from contextlib import ExitStack

from kernel_muster.ab.arms import A, Arm, B, request_for
from kernel_muster.ab.booted import ArmRefused, Booted, boot_arm, close_quietly
from kernel_muster.ab.comparison import Comparison
from kernel_muster.ab.decoding.decoders import NO_DRAFTS, is_model
from kernel_muster.ab.drafting import boot_drafter
from kernel_muster.ab.plan import Plan
from kernel_muster.ab.refusals import told
from kernel_muster.ab.result import (
    ModelResult,
)
from kernel_muster.audit.opening import BootRequest
from kernel_muster.audit.report import KernelRow, Report
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.keys import KernelKey, did_you_mean
from kernel_muster.registry.selection.select import Selector


def compare_model(base: BootRequest, a: Arm, b: Arm, plan: Plan) -> ModelResult:
    """Boot both arms of one model and compare them; a failed boot is part of the result."""
    pins = bool(plan.drafts) and plan.drafter is None
    request = {A: request_for(base, a, b, pins_gate=pins), B: request_for(base, b, a, pins_gate=pins)}
    without = {A: frozenset(a.without), B: frozenset(b.without)}
    building = plan.building()
    booted: dict[str, Booted] = {}
    refused: list[tuple[str, Report, str]] = []
    failed: list[str] = []
    with ExitStack() as stack:
        for name in (A, B):
            plan.say(f"{base.model or base.manifest}: boot of arm {name}")
            try:
                booted[name] = boot_arm(name, request[name], building, without=without[name])
                stack.callback(close_quietly, booted[name])
                if plan.drafts and not is_model(booted[name].model):
                    raise UsageError(NO_DRAFTS)
                if plan.drafter is not None:
                    own, other = (a, b) if name == A else (b, a)
                    drafters = request_for(plan.drafter.base, own, other, pins_gate=False)
                    boot_drafter(name, drafters, plan.drafter, building, booted[name], without[name])
                _check_asked(name, booted[name], without[name])
            except ArmRefused as error:
                refused.append((name, told(error.report, a if name == A else b), error.why))
                if error.failure is not None:
                    failed.append(name)
                    plan.tell_failure(error.failure)
        if refused:
            report = refused[0][1]
            return ModelResult(
                model=report.model, manifest=report.manifest, size="", layers=0, weights="", prompts="",
                target=report.target, device=report.device, refused=tuple(refused), failed=tuple(failed),
            )  # fmt: skip

        comparing = Comparison(
            plan,
            booted[A],
            booted[B],
            lambda: boot_arm(A, request[A], building, without=without[A], nudge_seed=plan.seed),
        )
        stack.callback(comparing.close)
        return comparing.result()


def _check_asked(name: str, booted: Booted, without: frozenset[KernelKey]) -> None:
    """UsageError for a key that an arm does not use: its removal changes nothing."""
    reports = [booted.report, *([booted.drafting.session.report] if booted.drafting else [])]
    rows = [row for report in reports for row in report.kernels]
    asked = {key for row in rows for key in (row.key, *row.chain)}
    session = booted.session
    for key in sorted(without):
        if str(key) not in asked:
            hint = did_you_mean(str(key), asked, "")
            raise UsageError(f"{booted.manifest.name} asks for no {key}, so that no arm has it{hint}")
        option, model = f"--{name.lower()}-without {key}", booted.manifest.name
        enabled = Selector(session.kernels.catalog, session.target, session.levers).if_enabled(key)
        if enabled.chosen is None:
            raise UsageError(f"{option}: on {session.target} arm {name} lacks it as it is: {enabled.reason}")
        before = [_served_before(row, str(key)) for row in rows if str(key) in (row.key, *row.chain)]
        if all(before):
            raise UsageError(
                f"{option}: {model} never comes to it: {before[0]} stands before it in its chain and serves"
            )


def _served_before(row: KernelRow, key: str) -> str:
    """Return the chain member that serves before a key is reached. Empty if there is none."""
    members = row.chain or (row.key,)
    at = members.index(row.served_by) if row.served_by in members else len(members)
    return row.served_by if at < members.index(key) else ""
