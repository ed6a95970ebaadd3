"""What an audit can say: stable codes, their severity, and one finding."""

from collections.abc import Iterable
from dataclasses import replace
from enum import StrEnum
from typing import Any, Literal

from kernel_muster.registry.errors import Lacks
from kernel_muster.registry.messages.message import plain_values, quoted
from kernel_muster.registry.values import frozen

Profile = Literal["serve", "qualify"]
PROFILES: tuple[Profile, ...] = ("serve", "qualify")


class Severity(StrEnum):
    """What a finding does to the boot."""

    REFUSE = "refuse"
    WARN = "warn"
    NOTE = "note"


@frozen
class Code:
    """One stable finding code; its page of manual is docs/findings/<NAME>.md."""

    name: str
    group: str
    serve: Severity
    qualify: Severity
    title: str

    def severity(self, profile: Profile) -> Severity:
        """Return what this code does under a profile."""
        return self.serve if profile == "serve" else self.qualify


_LETTER = {"R": Severity.REFUSE, "W": Severity.WARN, "N": Severity.NOTE}
# name, severity when serving / qualifying, title
_TABLE: dict[str, str] = {
    "lookups": """
        MISSING R/R no registered kernel serves a key that a layer asked for
        FALLBACK_TAKEN R/R the first choice of a preference chain is absent: a later, slower member serves, or none
        WRONG_ARCH R/R the key is registered, but for other architectures only
        DISABLED R/R MUSTER_DISABLE switched the key off
        SHADOWED R/R a plugin replaced the key's module and lacks the key
        SLOW_TIER R/R only a device kernel of tier reference serves the key
        REQUEST_NOT_HONORED R/R a lever, option or manifest asked for something that did not happen
        LAYOUT_MISSING R/R a chosen kernel reads a weight layout that the plan does not build
        SIGNATURE_MISMATCH R/R a kernel implements another contract than its key has""",
    "build": """
        COMPILE_FAILED R/R a kernel does not compile for the target
        TOOLCHAIN_MISSING R/R a package that the target needs is missing or does not import
        TOOLCHAIN_TOO_OLD R/R the compiler does not know the target's architecture
        HEADERS_MISSING R/R a header that a kernel includes is not installed
        NO_DEVICE_CODE R/R the compiled code has no such entry point for the target, or one with other parameters
        OVER_LIMIT R/R a kernel needs more registers or shared memory than the target has
        LOAD_FAILED R/R the driver refused a compiled kernel
        NO_DEVICE R/R no usable GPU, and no other target was named
        CACHE_NOT_KEPT N/W compiled code could not be stored in the cache""",
    "proof": """
        NUMERICS_FAILED R/R a kernel failed a case of its contract
        UNWRITTEN_OUTPUT R/R a kernel left part of its output unwritten
        OUT_OF_BOUNDS R/R a kernel touched memory outside its arguments
        NOT_DETERMINISTIC R/R a kernel declared deterministic gave two results
        BIT_IDENTITY_BROKEN R/R a kernel is not bit-identical to the one it names""",
    "late": """
        LATE_MISS R/R a lookup missed after the audit was sealed
        LATE_HIT N/W a lookup after the seal found its kernel
        LATE_REGISTRATION R/R a plugin was registered after the seal
        LATE_COMPILE W/R a kernel was compiled after the seal""",
    "plugins": """
        PLUGIN_LOAD_FAILED R/R a plugin's import or hook failed
        PLUGIN_NOT_FOUND R/R a plugin that was named is not installed
        PLUGIN_DUPLICATE R/R two distributions offer a plugin under one name
        PROCESS_CHANGED W/R a plugin changed the process that loads it
        PLUGIN_EMPTY W/R a plugin implements no hook, or every hook returned nothing
        UNKNOWN_HOOK R/R a plugin implements a hook that does not exist
        API_MISMATCH R/R a plugin was written for another version of the host API
        DUPLICATE_KERNEL R/R several equal kernels compete for one key
        BAD_SPEC R/R a plugin registered something malformed
        BAD_OVERRIDE R/R an override names nothing that exists
        OVERRIDDEN N/N a kernel was replaced by another distribution's
        DEAD_REGISTRATION N/W nothing asked for a third-party kernel
        KEY_RENAMED W/R a lookup used an old name of a key""",
    "manifest": """
        BAD_MANIFEST R/R a manifest breaks its schema
        EXPIRED_WAIVER W/R a waiver's date has passed
        WAIVER_EXPIRING N/W a waiver ends within 30 days
        STALE_WAIVER W/R a waiver excuses a kernel that is there
        UNUSED_WAIVER W/R a waiver excuses a kernel that nothing asked for
        WAIVED_REQUIRED R/R a waiver excuses a kernel that the model cannot run without
        EXPECTED_NOT_ASKED R/R a kernel the manifest expects was not asked for, or not got
        UNKNOWN_MODEL R/R no manifest serves the model that was named
        AMBIGUOUS_MODEL R/R several manifests serve the model equally well
        DUPLICATE_MODEL R/R two manifests describe a model of one name
        REFERENCE_NAMES_OTHER W/R the reference holds the text that tells another model apart
        UNKNOWN_CONFIG_FIELD W/R a config.json has fields that nobody knows
        WEIGHTS_NOT_QUANTISED W/R a config.json has no quantised weights, and the manifest asks for some""",
    "levers": """
        UNKNOWN_LEVER R/R a lever that nobody declares was set
        BAD_LEVER R/R a lever's value does not fit its type
        LEVER_CONFLICT R/R two levers contradict each other
        REMOVED_LEVER R/R a lever that no longer exists was set
        TUNING_STALE W/R a tuning table was measured on other kernels or another device
        TUNING_UNCOVERED N/W a shape lies outside the range a tuning table covers""",
    "coverage": """
        SET_HASH_MISMATCH R/R the kernel set is not the expected one
        VACUOUS_AUDIT R/R nothing was looked up, so nothing was checked
        UNCHECKED W/R a stage that was asked for did not run
        PLAIN_ARCH N/W an architecture is named without the suffix that its devices have""",
}


def _codes() -> dict[str, Code]:
    codes = {}
    for group, lines in _TABLE.items():
        for line in lines.strip().splitlines():
            name, severity, title = line.strip().split(" ", 2)
            codes[name] = Code(name, group, _LETTER[severity[0]], _LETTER[severity[2]], title)
    return codes


CODES = _codes()

#: The only codes that --dangerously-allow-unresolved can excuse: a key is absent, nothing worse.
ABSENCE_CODES = frozenset({"MISSING", "FALLBACK_TAKEN", "WRONG_ARCH", "DISABLED", "SHADOWED"})


@frozen
class Finding:
    """One thing that the audit has to say: what, where, why, and what to do about it.

    ``subject`` is the key, plugin, lever or manifest entry it is about; ``where`` holds dispatch sites or file
    positions; ``log`` keeps a cause chain, a stack or a compiler's output; ``explains`` lists consequences that
    are no findings of their own.

    Three fields link findings. ``cause`` names the plugin whose absence led to this finding. ``lacks`` names the hook
    that would have given the missing model, manifest or lever; it is empty for a misspelt name. ``needed_by`` names
    the plugins that failed for want of a contract of the subject.
    """

    code: str
    subject: str
    why: str
    where: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    log: str = ""
    explains: tuple[str, ...] = ()
    cause: str = ""
    lacks: Lacks = ""
    needed_by: tuple[str, ...] = ()

    @property
    def template(self) -> str:
        """The name of the sentence's template."""
        return quoted(self.why).template

    @property
    def parameters(self) -> dict[str, Any]:
        """The values that fill the sentence, as plain data."""
        return plain_values(self.why)

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise ValueError(f"{self.code!r} is not a finding code")

    def severity(self, profile: Profile) -> Severity:
        """Return what this finding does under a profile."""
        return CODES[self.code].severity(profile)

    def explaining(self, consequences: Iterable[str]) -> "Finding":
        """Return this finding with its consequences listed."""
        return replace(self, explains=(*self.explains, *consequences))


def sort_key(finding: Finding) -> tuple[int, str]:
    """Order findings as the code table does, then by subject, whatever order they arose in."""
    return _RANK[finding.code], finding.subject


_RANK = {name: rank for rank, name in enumerate(CODES)}
