"""The sentences of findings and remedies as the command line prints them, by the name of their template.

Names begin with the code of the finding, or with ``remedy``. A new sentence is one line here.
"""

from collections.abc import Mapping

TEMPLATES: Mapping[str, str] = {
    "quoted": "{text}",
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
    "remedy.unset_one": "unset {lever} or {other}",
    # manifests
    "bad_manifest.file": "{file}: {why}",
    "bad_manifest.lever": "{path}: nobody declares a lever {lever}{near:hint}",
    "unknown_model": "{why}{near:hint}",
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
}
