"""The manual's page of lookups, made from plan builds of all shipped models.

``python docs/generate.py`` writes it.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from kernel_muster.MODEL_toml import Catalogue, manifest_folder
from kernel_muster.registry.contract.builders import choose_builder
from kernel_muster.registry.discovery.discover import discover
from kernel_muster.registry.errors import MusterError
from kernel_muster.registry.hardware.arch import parse_arch
from kernel_muster.registry.hardware.target import CPU_TARGET, Target
from kernel_muster.registry.keys import KernelKey
from kernel_muster.registry.levers import read_levers
from kernel_muster.registry.selection.catalog import Catalog
from kernel_muster.registry.selection.lookup_session import LookupSession
from kernel_muster.registry.selection.lookups import Lookups
from kernel_muster.registry.selection.records import LookupEntry

#: Settings that change lookups, each in addition to the manifests' own.
LEVER_SETTINGS: tuple[Mapping[str, str], ...] = (
    {},
    {"MUSTER_NO_TGEMM_PIPELINE3": "1", "MUSTER_NO_K64_PIPELINE3": "1"},
    {"MUSTER_NO_K64_N64": "1"},
    {"MUSTER_FFN_ARM": "batched"},
    {"MUSTER_FFN_ARM": "atomic_c4"},
    {"MUSTER_W4A16_VARIANT": "v2"},
    {"MUSTER_W4A16_VARIANT": "v3"},
    {"MUSTER_FP32_ROUTING": "1"},
    {"MUSTER_FP4_PROJ_DECODE": "0"},
)
#: The one target with lookups of its own.
HOPPER_TARGET = Target("sm_90a", parse_arch("sm_90a"))
_ASKERS = (
    (r"mtp\..*\.attn", "MTP attention"), (r"mtp\..*\.(ffn|moe)", "MTP FFN"), (r"mtp.*", "MTP head"),
    (r"layers\.\d+\.attn", "attention"), (r"layers\.\d+\.gdn", "GDN"), (r"layers\.\d+\.ffn", "dense FFN"),
    (r"layers\.\d+\.moe", "MoE"), (r"context.*", "drafter context"), (r"lm_head", "LM head"),
    (r"final_norm", "last norm"),
)  # fmt: skip
_HEADER = """# Lookups

Every kernel that the shipped models ask for while they are built. The columns:

- *asked as*: required (R) or optional (O), and the preference chain, if any. A chain (a > b) is tried in order. An
  absent member needs a waiver, and a required chain needs one present member. A fused kernel and its parts form a
  chain: the parts serve if the fused kernel is absent.
- *by: when*: the layers, and the condition of their lookup.
- *reached by*: the decision or lever that launches the kernel.
- *contract*: the contract of the key.
- *provided*: the built-in families with their targets. A key without a family is open: any plugin may provide it under
  its contract.

`python docs/generate.py` makes this page from plan builds of all models, under every lever setting and target that
changes their lookups. A test keeps it current. Another test runs every model over empty arrays, and finds each
requested kernel among the launches.
"""


@dataclass
class Role:
    """One way of asking for a key: the layers by condition, and the decisions that reach it."""

    askers: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # by condition
    reached_by: set[str] = field(default_factory=set)


_Roles = dict[KernelKey, dict[str, Role]]  # key -> R or O, with the chain


def asker_of(layer: str) -> str:
    """Return the kind of layer of a label: ``layers.3.attn`` is attention."""
    return next((name for pattern, name in _ASKERS if re.fullmatch(pattern, layer)), layer)


def recorded_entries(
    catalog: Catalog, settings: Iterable[Mapping[str, str]] = LEVER_SETTINGS, target: Target = CPU_TARGET
) -> Iterator[LookupEntry]:
    """Build a plan of every shipped model under every setting, and yield its lookups."""
    chosen = tuple(settings)
    for manifest in Catalogue.from_folders([manifest_folder()], levers=catalog.levers).manifests:
        builder = choose_builder(catalog.builders, manifest.model_type, manifest.name)
        for setting in chosen:
            levers, _ = read_levers(catalog.levers, [("given", setting), ("manifest", manifest.defaults)])
            session = LookupSession(catalog, target, levers)
            builder.build(manifest, Lookups(session), None)
            yield from session.entries("boot")


def page_text(catalog: Catalog | None = None) -> str:
    """Return the page. MusterError if a built-in family does not load."""
    catalog = built_in_only(discover() if catalog is None else catalog)
    roles = _roles(chain(recorded_entries(catalog), recorded_entries(catalog, [{}], HOPPER_TARGET)))
    modules: dict[str, list[KernelKey]] = defaultdict(list)
    for key in sorted(roles):
        modules[key.module].append(key)
    parts = [_HEADER]
    for module, keys in modules.items():
        rows = [row for key in keys for row in _rows(catalog, key, roles[key])]
        columns = ("function", "asked as", "by: when", "reached by", "contract", "provided")
        head = f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}"
        parts.append("\n".join([f"## {module}", "", head, *rows, ""]))
    return "\n".join(parts)


def built_in_only(catalog: Catalog) -> Catalog:
    """Return a catalog without third-party packages."""
    if broken := [row.name for row in catalog.plugins if row.is_host and row.status != "loaded"]:
        raise MusterError(f"the page needs every built-in family, but {', '.join(broken)} did not load")
    kernels = tuple(one for one in catalog.kernels if one.provider.is_host)
    return Catalog(kernels=kernels, contracts=catalog.contracts, builders=catalog.builders, levers=catalog.levers)


def _roles(entries: Iterable[LookupEntry]) -> _Roles:
    found: _Roles = defaultdict(lambda: defaultdict(Role))
    for entry in entries:
        kind = "R" if entry.kind == "required" else "O"
        if len(entry.members) > 1:
            kind += f", chain {' > '.join(member.func for member in entry.members)}"
        when = f"{entry.when} (asked for by {entry.requested_by})" if entry.requested_by else entry.when
        for key in entry.members:
            role = found[key][kind]
            role.askers[when or "always"].add(asker_of(entry.layer))
            role.reached_by.add(entry.reached_by)
    return found


def _rows(catalog: Catalog, key: KernelKey, roles: Mapping[str, Role]) -> Iterator[str]:
    """Yield one line for each way of asking for a key. Contract and providers stand in the first."""
    contracts = sorted({one.spec.contract for one in catalog.by_key.get(key, ())})
    if opened := catalog.open_contracts.get(key):
        contracts = [opened.name]
    tail = [", ".join(contracts) or "-", _providers(catalog, key) or "none yet: open to any plugin"]
    for kind, role in sorted(roles.items()):
        asked = sorted(f"{', '.join(sorted(askers))}: {when}" for when, askers in role.askers.items())
        cells = [key.func, kind, "<br>".join(asked), "<br>".join(sorted(role.reached_by)), *tail]
        yield f"| {' | '.join(cells)} |"
        tail = ["", ""]


def _providers(catalog: Catalog, key: KernelKey) -> str:
    found = [
        f"{one.provider.plugin} on {', '.join(one.spec.archs)} ({one.spec.tier}, {one.spec.backend.name})"
        for one in catalog.by_key.get(key, ())
    ]
    return "; ".join(sorted(found))
