"""The sentences of findings and remedies as the command line prints them, by the name of their template.

Names begin with the code of the finding, or with ``remedy``. A new sentence is one line here.
"""

from collections.abc import Mapping

TEMPLATES: Mapping[str, str] = {
    "quoted": "{text}",
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
