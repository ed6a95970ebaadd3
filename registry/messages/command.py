"""The sentences of findings and remedies as the command line prints them, by the name of their template.

Names begin with the code of the finding, or with ``remedy``. A new sentence is one line here.
"""

from collections.abc import Mapping

TEMPLATES: Mapping[str, str] = {
    "quoted": "{text}",
    # measured tables
    "tuning_stale": "{differences:semicolons}",
    "tuning_uncovered": "it covers {range}; outside: {shapes}",
    "remedy.measure_again": (
        "measure again on this device: muster tune --output FILE, and name it: MUSTER_TUNING_TABLE=FILE"
    ),
    "remedy.built_in_thresholds": "or decide by the built-in thresholds: MUSTER_TUNING_TABLE=none",
    "remedy.measure_shapes": "measure these shapes too: muster tune MODEL --output FILE, or --shape NxK",
}
