"""Sentences of the rules about manifests, coverage, registrations and requests, for the command line."""

from collections.abc import Mapping

TEMPLATES: Mapping[str, str] = {
    # waivers and expectations
    "expected_not_asked": "nothing asked for it, but the manifest expects it: {reason}{near:hint}",
    "expected_not_asked.allowed": "it is absent, which was allowed, but the manifest expects it: {reason}",
    "expected_not_asked.waived": "it is absent and waived, but the manifest expects it: {reason}",
    "expired_waiver": "it ended on {until}; as of {as_of}; reason given: {reason}",
    "plain_arch.scope": (
        "devices of compute capability {capability} are called {device}: a scope of {arch} does not hold on them"
    ),
    "stale_waiver": "{provider} provides it on {target}",
    "stale_waiver.scoped": "{provider} provides it on {target} (scope: {scope})",
    "unused_waiver": "nothing asked for it{near:hint}",
    "unused_waiver.chain": (
        "nothing asked for it (a chain that begins with {first} resolved before it came to it){near:hint}"
    ),
    "waiver_expiring": "it ends on {until}; as of {as_of}; reason given: {reason}",
    "remedy.correct_expected": "correct the key: {keys:or} is asked for",
    "remedy.correct_lever": "correct the configuration or lever that keeps the model from asking",
    "remedy.correct_waiver": "correct the key: {keys:or} is asked for, and absent",
    "remedy.device_arch": "name the architecture {device}",
    "remedy.or_correct_lever": "or correct the configuration or lever that keeps the model from asking",
    "remedy.or_remove": "or remove {entry}",
    "remedy.provide": "provide the kernel, and remove the waiver",
    "remedy.remove": "remove {entry}",
    "remedy.renew": "or renew its date, with a reason that is still true",
    "remedy.scope_archs": 'or scope it to the architectures that lack the kernel: archs = ["..."]',
    "remedy.scope_waiver": "or scope it to where it is asked for: archs, quants, levers",
    # coverage
    "plain_arch": (
        "devices of compute capability {capability} are called {device}; that adds code for {count:# key}: {keys}"
    ),
    "plain_arch.unneeded": (
        "devices of compute capability {capability} are called {device}; no kernel that is installed needs it"
    ),
    "set_hash_mismatch": "expected {expected}, got {actual}",
    "vacuous_audit": "the boot ended without a lookup: nothing was checked",
    "remedy.build_inside": "build the model inside the boot: km.build_model(boot.manifest, boot.kernels)",
    "remedy.device_target": "name the target {device}",
    "remedy.diff": "compare with the report of the expected set: muster diff A.json B.json",
    "remedy.expect_hash": "install the expected versions, or qualify this set and expect its hash",
    # registrations
    "bad_override.circle": "{providers} override each other",
    "dead_registration": "nothing asked for any of its {count:# key}: {keys}",
    "dead_registration.near": "{key} looks like {missed}, which missed",
    "duplicate_kernel": "{count} equal kernels compete on {target}: {providers}",
    "overridden": "{provider} replaces {lost}",
    "overridden.rank": "{provider} serves before {other}: {reason}",
    "remedy.correct_keys": "correct the keys, so that the model's lookups find them",
    "remedy.keep_one": "remove all but one from {distribution}, or give them other archs or tiers",
    "remedy.or_uninstall": "or uninstall {distribution}",
    "remedy.override_one": 'or let one say overrides="<distribution>"',
    "remedy.prefer": "MUSTER_PREFER={key}={distribution}",
    "remedy.uninstall_all_but_one": "uninstall all but one of them",
    "remedy.uninstall_one": "or uninstall one",
    # requests
    "lever_conflict.key": "MUSTER_DISABLE switches {key} off, MUSTER_PREFER chooses who serves it",
    "request_not_honored.disable": "MUSTER_DISABLE names {key}, which nobody registers{near:hint}",
    "request_not_honored.no_key": "it does not provide that key",
    "request_not_honored.prefer": "MUSTER_PREFER asks {distribution} to serve {key}: {reason}",
    "remedy.checkpoint": "give the folder of a {checkpoint}, or name the model that this one is of",
    "remedy.correct_call": (
        "correct the call: kernel(module, func), try_kernel(module, func) or first_of((module, func), ...)"
    ),
    "remedy.correct_request": "correct the {request}, or install the plugin that can build it",
    "remedy.drop_key": "correct or drop the key",
    "remedy.drop_preference": "correct or drop the preference",
    "remedy.install_builder": "or install the plugin whose builder serves that type",
    "remedy.model_type": "correct model_type in the manifest",
    "remedy.one_list": "take the key out of one of them",
    "remedy.other_quant": "leave it out, or name a model whose manifest says that quant",
    "remedy.serve_nothing": "or boot with on_late_miss='raise' where nothing is served: to measure, or to test",
    "remedy.serve_production": (
        "serve a model whose builder is production: muster models lists each builder with its maturity"
    ),
    "remedy.trace_quant": "correct the trace's target.quant, or give the manifest of the model that was built",
}
