"""The set hash: one value for which kernels, in which versions, a boot chose."""

import hashlib
import json

from kernel_muster.audit.evidence import Evidence
from kernel_muster.registry.contract.specs import Registered
from kernel_muster.registry.levers import Setting


def set_hash(evidence: Evidence) -> str:
    """Return SHA-256 over the sorted rows of all chosen kernels.

    A row is key, distribution, version, backend, tier, archs, the digest of the source bytes, and that of the Python
    code that plans launches and prepares weights: no paths, times or machine code. A threshold that changes bits is a
    row too where it is not the built-in one, whoever set it.
    """
    chosen = {key: decision.chosen for key in evidence.asked_keys if (decision := evidence.decide(key)).chosen}
    rows = [_row(evidence, registered) for _, registered in sorted(chosen.items()) if registered is not None]
    rows += [["tuning", s.lever.name, s.value] for s in evidence.levers.settings if _changes_bits(s)]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def _changes_bits(setting: Setting) -> bool:
    return setting.lever.tuning == "other_bits" and setting.value != setting.lever.built_in


def _row(evidence: Evidence, registered: Registered) -> list[object]:
    spec, provider = registered.spec, registered.provider
    return [
        spec.key,
        provider.normal_name,
        provider.version,
        spec.backend_name,
        spec.tier,
        list(spec.archs),
        evidence.source_digest(registered),  # where it cannot be read, that is a finding
        evidence.host_digest(registered),
    ]
