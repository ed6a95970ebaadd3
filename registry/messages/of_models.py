"""Sentences about manifests, builds and traces, for the command line."""

from collections.abc import Mapping

TEMPLATES: Mapping[str, str] = {
    # models and manifests
    "ambiguous_model": "{count} manifests serve {subject} equally well: {models}; no reference was given",
    "ambiguous_model.reference": (
        "{count} manifests serve {subject} equally well: {models}; the reference {reference} does not decide"
    ),
    "bad_manifest.empty_folder": "{folder} holds no <name>/MODEL.toml",
    "bad_manifest.no_folder": "{folder} is no folder",
    "bad_manifest.unreadable": "{folder} cannot be read",
    "duplicate_model": "{count} manifests describe a model named {model}",
    "reference_names_other": "{reference} holds {needles}; the config.json was resolved as {model}",
    "unknown_config_field": "no rule compares these fields, and they are not known to be harmless: {fields}",
    "unknown_model.contradicted": (
        "the config.json has type and size of {model}, and contradicts its manifest: {facts}"
    ),
    "unknown_model.malformed": "the config.json is malformed: {error}",
    "unknown_model.misfit": "{model} was named, but {misfit}",
    "weights_not_quantised": (
        'config.json: no quantised weights; manifest: quant "{quant}"; to accept it write quant = "bf16" under [model]'
    ),
    "remedy.clean_reference": "or take the text of {others:or} out of the reference",
    "remedy.correct_either": "or correct one of the two",
    "remedy.fitting_config": "name the model of that config.json, or give the config.json of {model}",
    "remedy.known_fields": (
        "or, if the builder of the model reads them, write known_config_fields = [{names}] under [model]"
    ),
    "remedy.match_names": "or add match_names that no other has to the manifest of {models}",
    "remedy.name_agreeing": "name {models:or}, whose manifest agrees with this config.json",
    "remedy.name_folder": "name a folder of <name>/MODEL.toml files",
    "remedy.name_meant": "name the model that is meant: {model}, or {others:or}",
    "remedy.name_one": "name one of them: {models}",
    "remedy.quantised_folder": "give the folder of a checkpoint in {quant}",
    "remedy.remove_fields": "find out whether they change a result; remove those that do not from config.json",
    "remedy.rename_models": "rename or remove all but one of them",
    "remedy.requantise": (
        "or name the weights to requantise when they are loaded: CheckpointWeights(checkpoint, requantise=[...])"
    ),
    # builds
    "cache_not_kept": "{count} compiled sources were not kept, and will be compiled again in the next boot; {cause}",
    "cache_not_kept.first": "the first {problem}",
    "cache_not_kept.one": "1 compiled source was not kept, and will be compiled again in the next boot; {cause}",
    "cache_not_kept.unusable": "the folder is not used: {problem}",
    "compile_failed.raised": "its build raised {error}",
    "toolchain_missing.cupy": "the driver is there, but CuPy does not import: {error}",
    "remedy.correct_sources": "correct its sources, or its backend",
    "remedy.cupy_extra": "install the extra that fits the driver: kernel-muster[cuda13] or kernel-muster[cuda12]",
    "remedy.free_space": "free space in the folder, or make it writable for this user",
    "remedy.older_toolkit": "or compile with a toolkit that is not newer than the driver",
    "remedy.other_folder": "or name another folder: MUSTER_CACHE_DIR=FOLDER",
    "remedy.own_folder": "make it a folder that only this user can write to (chmod 700)",
    "remedy.report_it": "or report it, if both are sound",
    "remedy.update_driver": "update the driver",
    # traces, tables and observers
    "bad_lever.declared": "{source} declares it, but malformed: {problems:semicolons}",
    "bad_lever.table": "the shipped table is broken: {why}",
    "plugin_duplicate.trace": "the trace lists {count} plugins called {plugin}; none of them counts as loaded",
    "plugin_empty.trace": "it is loaded, and the trace has no kernel of it",
    "plugin_load_failed.observer": "hook muster_audit_finished failed: {how}",
    "remedy.correct_registration": "correct the registration",
    "remedy.declared_levers": "correct its declared_levers entry",
    "remedy.list_once": "load one of them only, or write each plugin down once",
    "remedy.load_without": "or load the engine without it",
    "remedy.no_table": "or use no table: MUSTER_TUNING_TABLE=none",
    "remedy.reinstall_muster": "install kernel-muster again",
    "remedy.register_one": "or register one of them alone",
    "remedy.trace_lever": "declare it in the trace, under declared_levers, if it is the engine's own",
    "remedy.trace_lookups": (
        "write what the layers asked for into the trace: one row of lookups for each question from one place"
    ),
    "remedy.trace_manifest": (
        "give the manifest that the boot had: {--manifest FILE}, or its folder, {--manifests FOLDER}: "
        "a replay loads no plugins, and has none of their manifests"
    ),
    "remedy.trace_model": "or correct the trace's model: muster models lists all of them",
    "remedy.trace_name": "or correct the name: the trace sets it under levers, the manifest under defaults",
    "remedy.trace_overrides": ("let the engine decide, and name the distribution that loses in overrides of the trace"),
    "remedy.write_kernels": "write its kernels into the trace, each with its plugin or distribution",
}
