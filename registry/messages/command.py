"""The sentences of findings and remedies as the command line prints them, by the name of their template.

Names begin with the code of the finding, or with ``remedy``. A new sentence is one line here.
"""

from collections.abc import Mapping

from kernel_muster.registry.messages import of_models, of_plugins, of_proofs, of_rules

TEMPLATES: Mapping[str, str] = {
    "quoted": "{text}",
    "joined": "{parts:semicolons}",
    # decisions about keys
    "decision.arch": "needs {needed:or}, the target is {target}",
    "decision.disabled": "switched off by MUSTER_DISABLE",
    "decision.duplicate": "equal to the kernel of {provider}",
    "decision.missing": "no plugin registers {key}{near:hint}",
    "decision.missing_from": "no plugin registers {key}; plugin {plugin} of {distribution}, {how}, {state}",
    "decision.missing_here": "no plugin registers {key}; {func} exists in {modules}",
    "decision.no_key": "no plugin registers {key} ({problem}){near:hint}",
    "decision.overridden": "overridden by {provider}",
    "decision.preferred": "MUSTER_PREFER names {distribution}",
    "decision.replaced": "module {module} of {distribution} is replaced by {by}",
    "decision.specificity": "{arch} is less specific than {serving}",
    "decision.tier": "tier {tier}; a {serving} kernel serves",
    "plugin.blocked": "is blocked",
    "plugin.failed": "did not load",
    "plugin.mismatched": "is for another version of the host API",
    "plugin.owns": "which owns its module",
    "plugin.provided": "which provided it when it last loaded",
    "plugin.provides": "which provides it",
    # lookups
    "consequence": "{code} {subject}: {why}",
    "consequence.lookup": "{code} {key}: asked for at {places}",
    "consequence.no_code": "{key} has no code",
    "key_renamed": "{key} is now called {renamed}",
    "late.compile": "nothing had asked for it before the seal, so it was compiled while requests were served",
    "late.hit": "asked for {count:# time} after the seal",
    "late.miss": "asked for {count:# time} after the seal: {reason}",
    "late.registration": "registered after the seal, without effect",
    "layout_missing": "read by {readers}, but the layout plan does not build this copy",
    "layout_missing.many": "read by {readers}, but the layout plan does not build these copies",
    "lookup.blocked_plugin": (
        "plugin {plugin} of {distribution} is blocked, and provides {count} keys that are asked for: {keys}"
    ),
    "lookup.chain": "chain {chain}: {outcome}",
    "lookup.fell_back": "fell back to {key}",
    "lookup.no_member": "no member resolves",
    "lookup.not_honored": "{lever} asked for {key}, which is absent: {reason}",
    "lookup.reason": "{key}: {reason}",
    "signature_mismatch": "{provider} implements contract {contract}, but {key} has contract {owner}",
    "slow_tier": "only a kernel of tier reference, by {provider}, serves {key} on {target}",
    "unchecked.stage": "stage {stage} was asked for, but the kernels reached {reached} on {target}",
    "unused_waiver.allowance": (
        "{--dangerously-allow-unresolved} names it, and it is there, or waived, or nothing asked for it"
    ),
    "waived_required": "{keys} is absent and waived, but the model cannot run without it: {reason}",
    "remedy.add_func": "add {func} to the distribution that replaces module {module}, or uninstall it",
    "remedy.ask_stage": "ask for {--stage stage}",
    "remedy.audit_elsewhere": "or audit where stage {stage} can run",
    "remedy.audit_for": "audit for {--target target}",
    "remedy.build_copy": "build the copy in the model's layout plan",
    "remedy.choose_target": "or choose {--target target}",
    "remedy.correct_key": "correct the key that is asked for: both names are small letters, digits and _",
    "remedy.declare": ('or declare it, with the true reason, in {manifest}: [expected_absent.{module}] {func} = "..."'),
    "remedy.declare_many": "or declare those that are optional, each with its true reason, in the manifest",
    "remedy.drop_allowance": "take it out of {--dangerously-allow-unresolved}",
    "remedy.drop_waiver": "drop the waiver at {where}",
    "remedy.enable": "take {key} out of MUSTER_DISABLE",
    "remedy.gate": "or gate the lookup on the model's configuration, so that it is never issued",
    "remedy.implement": "implement contract {contract}",
    "remedy.install": "install the distribution that provides {key}, or repair it",
    "remedy.install_fast": "install a distribution with a fast kernel for {key}",
    "remedy.install_for": "install a distribution that provides {key} for {arch}",
    "remedy.look_up": "look up {renamed}; the old name goes away with a later version of {provider}",
    "remedy.look_up_early": "look the kernel up while the model is built, and keep the handle",
    "remedy.misspelt": "or, if the name is misspelt: did you mean {near:or}?",
    "remedy.or_unset": "or unset {lever}",
    "remedy.other_kernels": "or choose kernels that read a layout it builds",
    "remedy.own_key": "or register the kernel under a key of its own",
    "remedy.register_early": "register it as a plugin, through an entry point or boot(local_plugins=...)",
    "remedy.reinstall_backend": "reinstall {distribution}, or correct its backend",
    "remedy.required": "it is required: a waiver cannot excuse it",
    "remedy.unblock": "unblock plugin {plugin} ({--no-plugin}), which is there to provide it",
    "remedy.unblock_many": "unblock plugin {plugin} ({--no-plugin}), which is there to provide them",
    "remedy.waiver_key": "or correct the waiver at {where}: it names {key}, which nothing asks for",
    "remedy.waiver_scope": "or correct the scope in the manifest: {scope}",
    "remedy.write_kernel": (
        "no installed distribution ships a kernel of {key} for {arch}: install one that does, or write it"
    ),
    # plugins
    "plugin_not_found": "{option} names {plugin}, which is not installed{near:hint}",
    "plugin_not_found.distribution": (
        "{option} names {plugin}, which is not installed; the distribution of that name offers {offered}"
    ),
    "plugin_not_found.renamed": (
        "{option} names {plugin}, which is not installed; its kernels are in the plugins {plugins:and}"
    ),
    "remedy.block": "block it: {--no-plugin plugin}",
    "remedy.block_server": "nothing, if this is meant; else block what serves: {--no-plugin plugin}",
    "remedy.install_plugin": "install the distribution that offers it, or correct the name",
    "remedy.leave_out": "leave {plugin} out of local_plugins",
    "remedy.list_plugins": "muster plugins lists all",
    "remedy.or_block": "or block it: {--no-plugin plugin}",
    "remedy.override": 'or let the other say overrides="{distribution}"',
    "remedy.raise_limit": "raise MUSTER_PLUGIN_TIMEOUT_S",
    "remedy.repair_plugin": "repair the plugin",
    "remedy.uninstall_meant": "nothing, if this is meant; else uninstall {distribution}",
    "remedy.uninstall_or_block": "or uninstall it, or block it: {--no-plugin plugin}",
    # devices
    "no_device.driver": "{why}",
    "no_device.failed": "{why}",
    "no_device.ordinal": "the driver sees {count} GPU(s), there is no cuda:{ordinal}",
    "remedy.name_arch": "name an architecture to audit without a device: {--target target}",
    "remedy.name_host": "name the host on purpose: {--target target}",
    "remedy.audit_only": "audit without a device, and decode nothing: muster audit MODEL --target sm_90a",
    "remedy.decode_on_host": "decode on the host on purpose, at reduced size: {--target target}",
    "remedy.gpu_machine": (
        "run it on a machine with an NVIDIA GPU, sm_80 or newer: it measures, and nothing can stand in for the GPU"
    ),
    "remedy.install_cupy": (
        "CuPy is not installed here: install the extra for the driver's CUDA, kernel-muster[cuda13] or [cuda12]"
    ),
    "remedy.install_driver": (
        "on that machine: install NVIDIA's driver, which brings libcuda.so.1; start a container with its GPUs"
    ),
    "remedy.other_gpu": (
        "name a GPU that the driver sees (nvidia-smi -L lists them), or make this one visible to this process"
    ),
    "remedy.visible_there": (
        "on that machine: make the GPU and its driver visible to this process "
        "(CUDA_VISIBLE_DEVICES, options of the container)"
    ),
    "remedy.visible_gpu": "make the GPU and its driver visible to this process",
    # levers
    "unknown_lever": "nobody declares a lever {lever}{near:hint}",
    "unknown_lever.type": "{lever} is {type}, and names of levers are text",
    "removed_lever": "{lever} no longer exists",
    "bad_lever": "{lever}: {why}",
    "lever_conflict": "{lever}={value} contradicts {other}={other_value}",
    "remedy.engine_levers": "or, if an engine of yours declares it, give its levers: --levers FILE",
    "remedy.lever_key": "correct the name, or leave it out",
    "remedy.lever_name": "correct the name, or unset it",
    "remedy.lever_value": "set it to {grammar}, or unset it",
    "remedy.list_levers": "muster levers lists all of them",
    "remedy.new_lever": "use {lever} instead",
    "remedy.lever_correct": "correct it, or unset it",
    "remedy.unset_model": "unset {lever}, or choose a model that can do it",
    "remedy.unset_one": "unset {lever} or {other}",
    # manifests
    "bad_manifest.file": "{file}: {why}",
    "bad_manifest.lever": "{path}: nobody declares a lever {lever}{near:hint}",
    "unknown_model": "{why}{near:hint}",
    "unknown_model.file": ", and the file of that name is no folder of a model; a manifest is given with {--manifest}",
    "unknown_model.folder": ", and the folder of that name holds no config.json",
    "unknown_model.name": "no manifest is named {name}{path}",
    "remedy.own_manifest": "give the model of that config.json a manifest of its own: {--manifest FILE}",
    "remedy.reference": "or give a reference ({--ref}) that holds a text of one of them alone: {needles}",
    "remedy.list_models": "muster models lists all of them",
    "remedy.name_model": "name {model}, whose text the reference holds, if it is that model",
    "remedy.write_manifest": "or write a manifest for it, and give that: {--manifest FILE}, or boot(manifest=FILE)",
    # the author's kit
    "plugin_check.channel_closed": "{what} closed the file descriptors of others{when}: nothing more can be reported",
    "plugin_check.dropped": "{count:# line} on the channel of the check came from elsewhere, and did not count: "
    "something writes to file descriptors that it has not opened",
    "plugin_check.left": "ended what was left running: {commands}",
    "plugin_check.lost": "{step} ended, but its report was lost",
    "plugin_check.unended": "left running, and impossible to end: {commands}",
    "plugin_check.unsupervised": "processes that leave the group of the check are not looked for on this system",
    "unchecked.plugins": "the entry points name plugins that the check did not list: {plugins}",
    "unchecked.steps": "steps that its kernels must have were not reported: {steps}",
    "remedy.steps": "look for code that changes modules, functions or objects of kernel_muster",
    "remedy.stray_closes": "look for what closes file descriptors that it has not opened, such as os.closerange",
    "remedy.stray_writes": "look for what writes to file descriptors that it has not opened",
    # files in the package of the host
    "plugin_load_failed.intruder": "it has put files into {host}, where they pass for a part of it: {files}",
    "plugin_load_failed.intruded": "manifests lie in {host} that are none of its files: {files}",
    "remedy.uninstall": "uninstall it: pip uninstall {distribution}",
    "remedy.reinstall_host": "remove their folders, and reinstall {distribution}",
    # wheels that are not installed
    "plugin_load_failed.wheel": "it would do damage where it is installed: {problems:semicolons}",
    "plugin_load_failed.wheel_more": "and {count} more",
    "plugin_load_failed.wheel_at_start": "Python would read {file} at every start, and run what it holds",
    "plugin_load_failed.wheel_command": "{file} would take the place of the command {command} of {whose}",
    "plugin_load_failed.wheel_file": "{file} is a file of {whose} too",
    "plugin_load_failed.wheel_hides": "{file} would hide the module {module} of {whose}",
    "plugin_load_failed.wheel_host": "{file} would be a part of {host}",
    "plugin_load_failed.wheel_leads_out": "{file} leads out of the folder where it is installed",
    "plugin_load_failed.wheel_metadata": "{file} would be taken for the metadata of a distribution",
    "plugin_load_failed.wheel_module": "{file} would be taken for Python's own module {module}",
    "plugin_load_failed.wheel_python": "{file} would take the place of a file of Python",
    "remedy.own_modules": (
        "let the wheel have modules of its own alone: packages, or py_modules, in its pyproject.toml"
    ),
    # measured tables
    "tuning_stale": "{differences:semicolons}",
    "tuning_uncovered": "it covers {range}; outside: {shapes}",
    "remedy.measure_again": (
        "measure again on this device: muster tune --output FILE, and name it: MUSTER_TUNING_TABLE=FILE"
    ),
    "remedy.built_in_thresholds": "or decide by the built-in thresholds: MUSTER_TUNING_TABLE=none",
    "remedy.measure_shapes": "measure these shapes too: muster tune MODEL --output FILE, or --shape NxK",
    **of_proofs.TEMPLATES,
    **of_rules.TEMPLATES,
    **of_models.TEMPLATES,
    **of_plugins.TEMPLATES,
}
