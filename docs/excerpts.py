"""Boots that give each finding code, for the excerpts of docs/findings: every excerpt comes from a real boot.

Each function below is one boot. Its name is the code in small letters and its docstring the sentence that introduces
the excerpt. Every boot runs in a separate folder (desk.py).
"""

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import kernel_muster as km
from desk import PLUGIN, Desk, desk, engine
from kernel_muster.audit.evidence import AuditOptions
from kernel_muster.audit.render.sections import finding_sections
from kernel_muster.audit.render.text import entry_lines
from kernel_muster.audit.replay.replay import replay
from kernel_muster.audit.replay.trace import parse_trace
from kernel_muster.audit.report import FindingRow
from kernel_muster.audit.reporting import finding_row
from kernel_muster.audit.verdict import judge
from kernel_muster.registry import levers
from kernel_muster.registry.backends.cache import BuildCache
from kernel_muster.registry.backends.request import Compiled
from kernel_muster.registry.hardware import target
from kernel_muster.registry.keys import KernelKey
from kernel_muster.registry.launch.runners import HostRunner


def excerpt(code: str) -> tuple[str, str]:
    """Return the sentence and the lines of the report that belong to a code."""
    trip = EXCERPTS[code]
    with desk() as at:
        outcome = trip(at)
        found = outcome if isinstance(outcome, tuple) else outcome.report.findings
        rows = [row for row in found if row.code == code]
        if len(rows) != 1:
            raise AssertionError(f"{code}: expected it once, got {[f'{row.code} {row.subject}' for row in found]}")
        if strangers := [f"{row.code} {row.subject}" for row in found if row.code not in (code, "OVERRIDDEN")]:
            raise AssertionError(f"{code}: expected nothing else, got {strangers}")
        text = "\n".join(_lines(rows[0])).replace(f"{at.folder}/", "").replace(str(at.folder), ".")
        # A digest changes with every kernel: the page would be stale after each change.
        text = re.sub(r"\bgot [0-9a-f]{64}\b", "got " + "5e" * 32, text)
    return str(trip.__doc__), text


def _lines(row: FindingRow) -> Iterator[str]:
    for section in finding_sections([row]):
        for entry in section.entries:
            yield from entry_lines(entry)


def _late(session: km.BootSession) -> tuple[FindingRow, ...]:
    return tuple(finding_row(judged) for judged in judge(session.late_findings(), "serve").findings)


def missing(at: Desk) -> km.BootSession:
    """A layer asks for a misspelt key:"""
    return at.boot('kernels.kernel("norm", "rms_norm")\nkernels.kernel("norm", "rms_norms")')


def fallback_taken(at: Desk) -> km.BootSession:
    """A layer prefers a 4-stage twin that no plugin provides, and falls back to its parent:"""
    return at.boot('kernels.first_of(("w4a16", "w4a16_gemm_t_p4"), ("w4a16", "w4a16_gemm_t"))')


def wrong_arch(at: Desk) -> km.BootSession:
    """The kernel is built for `sm_90a` only, and the target is `sm_100a`:"""
    at.install('spec("acme_attn::decode", archs=("sm_90a",))')
    return at.boot('kernels.try_kernel("acme_attn", "decode")', target="sm_100a")


def disabled(at: Desk) -> km.BootSession:
    """The environment holds `MUSTER_DISABLE=norm::rms_norm`:"""
    os.environ["MUSTER_DISABLE"] = "norm::rms_norm"
    return at.boot()


def shadowed(at: Desk) -> km.BootSession:
    """A distribution replaces module `norm` with its own `rms_norm`, and has no `rms_norm_gated`:"""
    spec = 'spec("norm::rms_norm", contract="rms_norm", function=stand_in, '
    at.install(spec + 'replaces_module=("norm", "kernel-muster"))')
    return at.boot('kernels.kernel("norm", "rms_norm")\nkernels.kernel("norm", "rms_norm_gated")')


def slow_tier(at: Desk) -> km.BootSession:
    """The only device kernel of the key declares itself a reference:"""
    at.install('spec("acme_attn::decode", archs=("sm_80+",), tier="reference")')
    return at.boot('kernels.kernel("acme_attn", "decode")', target="sm_90a", stage="registered")


def request_not_honored(at: Desk) -> km.BootSession:
    """The environment holds `MUSTER_W4A16_VARIANT=v3`, and no distribution with the third variant is installed:"""
    os.environ["MUSTER_W4A16_VARIANT"] = "v3"
    asks = 'kernels.try_kernel("w4a16_v3", "w4a16_gemm_t_m128_v3", requested_by="MUSTER_W4A16_VARIANT")'
    return at.boot(f'kernels.kernel("norm", "rms_norm")\nif levers["MUSTER_W4A16_VARIANT"] == "v3":\n    {asks}')


def layout_missing(at: Desk) -> km.BootSession:
    """The selected tile GEMM reads a transposed copy, and the builder never planned one:"""
    return at.boot(
        'tile = kernels.kernel("w4a16", "w4a16_gemm_t")\n'
        'kernels.layouts.want("layers.0.mlp.down", tile.weight_layout, tile.key)'
    )


def signature_mismatch(at: Desk) -> km.BootSession:
    """A third party overrides `silu::silu_mul` with a kernel of another contract:"""
    at.install('spec("silu::silu_mul", overrides="kernel-muster")')
    return at.boot('kernels.kernel("silu", "silu_mul")')


def no_device(at: Desk) -> km.BootSession:
    """No `--target` was given, on a machine without a driver:"""
    error = OSError("libcuda.so.1: cannot open shared object file: No such file or directory")
    with mock.patch.object(target, "read_devices", side_effect=error):
        return at.boot(target=None)


def cache_not_kept(at: Desk) -> km.BootSession:
    """The disk of the cache is full:"""
    cache = BuildCache(at.folder / "cubins")
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(os, "fsync", side_effect=full):
        for key in ("0" * 64, "1" * 64):
            cache.get_or_build(key, lambda: Compiled(b"", ""))
    # Builds need a compiler: the boot gets this cache's findings instead.
    with mock.patch.object(HostRunner, "findings", return_value=cache.findings()):
        return at.boot()


def numerics_failed(at: Desk) -> km.BootSession:
    """A kernel multiplies by 2.01, and its contract by 2:"""
    return _proven(at, 'spec("acme_attn::decode", function=wrong)')


def unwritten_output(at: Desk) -> km.BootSession:
    """A kernel writes whole tiles of four rows only, and a case has five:"""
    return _proven(at, 'spec("acme_attn::decode", function=partial)')


def out_of_bounds(at: Desk) -> km.BootSession:
    """A kernel uses its input as scratch memory:"""
    return _proven(at, 'spec("acme_attn::decode", function=clobber)')


def not_deterministic(at: Desk) -> km.BootSession:
    """A kernel's last bit changes from launch to launch:"""
    return _proven(at, 'spec("acme_attn::decode", function=unsteady)')


def bit_identity_broken(at: Desk) -> km.BootSession:
    """A kernel for many rows claims the bits of the one-row kernel, but rounds differently:"""
    claim = 'spec("acme_attn::decode_rows", function=close, bit_identical_to=("acme_attn::decode",))'
    return _proven(at, f'spec("acme_attn::decode"), {claim}', "decode", "decode_rows")


def _proven(at: Desk, specs: str, *functions: str) -> km.BootSession:
    at.install(specs)
    asks = "\n".join(f'kernels.kernel("acme_attn", "{name}")' for name in functions or ("decode",))
    return at.boot(asks, stage="proven")


def late_miss(at: Desk) -> tuple[FindingRow, ...]:
    """With `on_late_miss="count"`, a layer looks a kernel up in its forward pass, three times:"""
    session = at.boot(on_late_miss="count")
    engine('for step in range(3):\n    kernels.try_kernel("norm", "rms_norms")')(session.kernels, session.levers)
    return _late(session)


def late_hit(at: Desk) -> tuple[FindingRow, ...]:
    """The same, but the kernel is present:"""
    session = at.boot()
    engine('for step in range(3):\n    kernels.try_kernel("silu", "silu_mul")')(session.kernels, session.levers)
    return _late(session)


def late_registration(at: Desk) -> tuple[FindingRow, ...]:
    """A server registers a plugin while it is serving:"""
    session = at.boot()
    with contextlib.suppress(km.LateRegistration):
        engine('kernels.register("acme", object())')(session, None)
    return _late(session)


def plugin_load_failed(at: Desk) -> km.BootSession:
    """A plugin imports a package that is not installed. Its missing keys are listed with it:"""
    at.install("import acme_runtime\n")
    return at.boot('kernels.kernel("acme_attn", "decode")')


def plugin_not_found(at: Desk) -> km.BootSession:
    """`--plugin acme-kernels`, the name of the distribution. Its plugin is called `acme`:"""
    at.install('spec("acme_attn::decode")')
    return at.boot('kernels.kernel("acme_attn", "decode")', plugins=["acme-kernels"])


def plugin_duplicate(at: Desk) -> km.BootSession:
    """A fork keeps the entry-point name of the original, and both are installed:"""
    at.install('spec("acme_attn::decode")')
    at.install('spec("acme_attn::decode")', name="acme-kernels-fork", version="1.3")
    return at.boot()


def plugin_empty(at: Desk) -> km.BootSession:
    """The plugin's module implements no hook:"""
    at.install("KERNELS = []\n")
    return at.boot()


def process_changed(at: Desk) -> km.BootSession:
    """The plugin's import hides a GPU from the whole process:"""
    at.install('import os\nos.environ["CUDA_VISIBLE_DEVICES"] = "1"\n' + PLUGIN % 'spec("acme_attn::decode")')
    return at.boot('kernels.kernel("acme_attn", "decode")')


def unknown_hook(at: Desk) -> km.BootSession:
    """The hook is called `muster_kernels`:"""
    at.install("import kernel_muster as km\n\n\n@km.hookimpl\ndef muster_kernel():\n    return []\n")
    return at.boot()


def api_mismatch(at: Desk) -> km.BootSession:
    """The distribution was written for the next version of the host API:"""
    at.install("raise SystemExit\n", group="v2")
    return at.boot()


def duplicate_kernel(at: Desk) -> km.BootSession:
    """Two distributions offer equal kernels for one key:"""
    at.install('spec("acme_attn::decode")')
    twin = PLUGIN.replace('contract("acme_double")', 'contract("zeta_double")') % 'spec("acme_attn::decode")'
    at.install(twin, name="zeta-kernels", version="0.3", plugin="zeta")
    return at.boot('kernels.kernel("acme_attn", "decode")')


def bad_spec(at: Desk) -> km.BootSession:
    """The key is new, and does not lie in the plugin's own modules:"""
    at.install('spec("residual_add::bf16_residual_sum", contract="bf16_residual_add", function=stand_in)')
    return at.boot()


def bad_override(at: Desk) -> km.BootSession:
    """The distribution's name is misspelt:"""
    at.install('spec("silu::silu_mul", contract="silu_mul", function=stand_in, overrides="kernel-mustre")')
    return at.boot()


def overridden(at: Desk) -> km.BootSession:
    """A third party replaces a built-in kernel with `overrides`:"""
    at.install('spec("silu::silu_mul", contract="silu_mul", function=stand_in, overrides="kernel-muster")')
    return at.boot('kernels.kernel("silu", "silu_mul")')


def dead_registration(at: Desk) -> km.BootSession:
    """A distribution is installed, and the model never asks for its keys:"""
    at.install('spec("acme_attn::decode"), spec("acme_attn::prefill")')
    return at.boot()


def key_renamed(at: Desk) -> km.BootSession:
    """The model still uses the old name:"""
    at.install('spec("acme_attn::decode", aliases=("acme_attn::decode_one",))')
    return at.boot('kernels.kernel("acme_attn", "decode_one")')


def bad_manifest(at: Desk) -> km.BootSession:
    """A key is misspelt, in line 4 of the file:"""
    at.manifest(model="num_layer = 40")
    return at.boot()


_ASK_FP4 = 'kernels.kernel("norm", "rms_norm")\nkernels.try_kernel("w4a4", "w4a4_gemm")'


def _waiver(until: str = "") -> str:
    return f'[expected_absent.w4a4.w4a4_gemm]\nreason = "the FP4 tile is not ported to this chip yet"\n{until}'


def expired_waiver(at: Desk) -> km.BootSession:
    """The waiver has `until = 2027-06-30`, and the audit runs with `--as-of 2027-07-01`:"""
    at.manifest(_waiver("until = 2027-06-30"))
    return at.boot(_ASK_FP4, as_of=date(2027, 7, 1))


def waiver_expiring(at: Desk) -> km.BootSession:
    """The same waiver, eleven days before its end:"""
    at.manifest(_waiver("until = 2027-06-30"))
    return at.boot(_ASK_FP4, as_of=date(2027, 6, 19))


def stale_waiver(at: Desk) -> km.BootSession:
    """A waiver without scope names a kernel present on the target:"""
    at.manifest('[expected_absent.w4a16]\nw4a16_gemm_t_p3 = "the 3-stage twin is not ported to this chip"')
    return at.boot('kernels.try_kernel("w4a16", "w4a16_gemm_t_p3")')


def unused_waiver(at: Desk) -> km.BootSession:
    """No layer of the model asks for the waived key:"""
    at.manifest(_waiver())
    return at.boot()


def waived_required(at: Desk) -> km.BootSession:
    """A required lookup misses, and the manifest waives its key:"""
    at.manifest(_waiver())
    return at.boot('kernels.kernel("w4a4", "w4a4_gemm")')


def expected_not_asked(at: Desk) -> km.BootSession:
    """The manifest expects the grouped path, and a layer never asks for it:"""
    at.manifest('[expected_present.moe]\nmoe_sort_by_expert = "grouped decode is the main path of this model"')
    return at.boot()


_ACME = '[[model_types]]\nmodel_type = "acme"\nhidden_size = 64'


def _config(at: Desk, text: str, folder: str = ".") -> str:
    (at.folder / folder).mkdir(parents=True, exist_ok=True)
    (at.folder / folder / "config.json").write_text(text, encoding="utf-8")
    return str(Path(folder, "config.json"))


def _called(at: Desk, rows: dict[str, str]) -> None:
    """Write a manifest for each name, with the name as its match name."""
    for name, text in rows.items():
        file = f"manifests/{name}/MODEL.toml"
        at.manifest(text, model=f'match_names = ["{name}"]', file=file)
        written = (at.folder / file).read_text(encoding="utf-8")
        (at.folder / file).write_text(written.replace('"tiny"', f'"{name}"'), encoding="utf-8")


def unknown_model(at: Desk) -> km.BootSession:
    """The name is misspelt:"""
    return at.boot(model="qwen3.6-27", manifest=None)


def ambiguous_model(at: Desk) -> km.BootSession:
    """A `config.json` fits two manifests, and no reference decides:"""
    config = _config(at, '{"model_type": "acme", "hidden_size": 64}')
    _called(at, {"acme-one": _ACME, "acme-two": _ACME})
    return at.boot(manifest=None, config=config, manifest_folders=["manifests"])


def duplicate_model(at: Desk) -> km.BootSession:
    """Two folders hold a manifest of the same name:"""
    for folder in ("ours", "theirs"):
        at.manifest(file=f"{folder}/tiny/MODEL.toml")
    return at.boot(model="tiny", manifest=None, manifest_folders=["ours", "theirs"])


def reference_names_other(at: Desk) -> km.BootSession:
    """The folder has the name of a model whose manifest claims no model type:"""
    config = _config(at, '{"model_type": "acme", "hidden_size": 64}', "Acme-Tuned-NVFP4")
    _called(at, {"acme-base": _ACME, "acme-tuned": ""})
    return at.boot(manifest=None, config=config, manifest_folders=["manifests"])


def unknown_config_field(at: Desk) -> km.BootSession:
    """A `config.json` has an unknown option:"""
    at.manifest(_ACME, file="manifests/tiny/MODEL.toml")
    config = _config(at, '{"model_type": "acme", "hidden_size": 64, "attention_sharpness": 2.0}')
    return at.boot(manifest=None, config=config, manifest_folders=["manifests"])


def weights_not_quantised(at: Desk) -> km.BootSession:
    """The folder holds the BF16 weights, before their quantisation:"""
    at.manifest(_ACME, file="manifests/tiny/MODEL.toml")
    config = _config(at, '{"model_type": "acme", "hidden_size": 64, "num_hidden_layers": 24}')
    return at.boot(manifest=None, config=config, manifest_folders=["manifests"])


def unknown_lever(at: Desk) -> km.BootSession:
    """The environment holds `MUSTER_NO_K64_N46=1`:"""
    os.environ["MUSTER_NO_K64_N46"] = "1"
    return at.boot()


def bad_lever(at: Desk) -> km.BootSession:
    """The environment holds `MUSTER_NO_K64_N64=yes`:"""
    os.environ["MUSTER_NO_K64_N64"] = "yes"
    return at.boot()


def lever_conflict(at: Desk) -> km.BootSession:
    """One lever disables a key, another selects its distribution:"""
    os.environ["MUSTER_DISABLE"] = "silu::silu_mul"
    os.environ["MUSTER_PREFER"] = "silu::silu_mul=acme-kernels"
    return at.boot()


def removed_lever(at: Desk) -> km.BootSession:
    """If `MUSTER_OFF` had been an old name of `MUSTER_DISABLE` (no lever has been removed so far):"""
    os.environ["MUSTER_OFF"] = "norm::rms_norm"
    with mock.patch.dict(levers.REMOVED_LEVERS, {"MUSTER_OFF": "MUSTER_DISABLE"}):  # type: ignore[arg-type]
        return at.boot()


def tuning_stale(at: Desk) -> km.BootSession:
    """`MUSTER_TUNING_TABLE` names a table measured on another chip:"""
    at.table({}, arch="sm_121a", device="NVIDIA GB10", sms=48)
    return at.boot(target="sm_90a", stage="registered")


def tuning_uncovered(at: Desk) -> km.BootSession:
    """A model has a projection wider than all measured ones:"""
    at.install('spec("acme_attn::decode", archs=("sm_90a",))')
    kernel = KernelKey("acme_attn", "decode")
    (registered,) = km.open_registry("cpu").catalog.by_key[kernel]
    at.table({str(kernel): registered.spec.backend.source_sha256})
    plans = "\n".join(
        f'kernels.layouts.want("layers.0.mlp.gate_up", "{layout}", decode.key)\n'
        f'kernels.layouts.build("layers.0.mlp.gate_up", "{layout}", 1, "decode", (32768, 5120))'
        for layout in ("rows", "columns")
    )
    return at.boot(f'decode = kernels.kernel("acme_attn", "decode")\n{plans}', target="sm_90a", stage="registered")


def set_hash_mismatch(at: Desk) -> km.BootSession:
    """A release expects the hash of another set:"""
    at.install('spec("acme_attn::decode")')
    return at.boot('kernels.kernel("acme_attn", "decode")', expect_set_hash="0" * 64)


def vacuous_audit(at: Desk) -> km.BootSession:
    """The block ends without building a model:"""
    return at.boot("pass")


def unchecked(at: Desk) -> tuple[FindingRow, ...]:
    """A trace is replayed with `--stage proven`:"""
    session = at.boot()
    told = parse_trace(session.trace())
    return replay(told, AuditOptions(stage="proven"), manifest="MODEL.toml").findings


def plain_arch(at: Desk) -> km.BootSession:
    """An audit names `--target sm_121`, and a kernel has separate code for `sm_121a`:"""
    at.install('spec("acme_attn::decode", archs=("sm_80+", "sm_121a"))')
    return at.boot('kernels.kernel("acme_attn", "decode")', target="sm_121", stage="registered")


#: By code; the missing codes need a compiler or a device.
EXCERPTS: dict[str, Callable[[Desk], Any]] = {
    function.__name__.upper(): function
    for function in (
        missing, fallback_taken, wrong_arch, disabled, shadowed, slow_tier, request_not_honored, layout_missing,
        signature_mismatch, no_device, cache_not_kept, numerics_failed, unwritten_output, out_of_bounds,
        not_deterministic, bit_identity_broken, late_miss, late_hit, late_registration, plugin_load_failed,
        plugin_not_found, plugin_duplicate, plugin_empty, process_changed, unknown_hook, api_mismatch,
        duplicate_kernel, bad_spec, bad_override, overridden, dead_registration, key_renamed, bad_manifest,
        expired_waiver, waiver_expiring, stale_waiver, unused_waiver, waived_required, expected_not_asked,
        unknown_model, ambiguous_model, duplicate_model, reference_names_other, unknown_config_field,
        weights_not_quantised, unknown_lever, bad_lever, lever_conflict, removed_lever, tuning_stale,
        tuning_uncovered, set_hash_mismatch, vacuous_audit, unchecked, plain_arch,
    )
}  # fmt: skip
