"""Sentences of proofs, for the command line."""

from collections.abc import Mapping

TEMPLATES: Mapping[str, str] = {
    "not_deterministic": "case {case}: two runs differ",
    "numerics_failed.given_up": "{device} is given up",
    "numerics_failed.hanging": "it was still running after {seconds} s, and {given_up}",
    "numerics_failed.other_cases": "other cases were not tried",
    "numerics_failed.raised": "it failed on arguments that its contract allows: {error}",
    "of_case": "case {case}: {why}",
    "of_case.again": "case {case}, with other numbers: {why}",
    "out_of_bounds.input": "case {case}: changed its input {input}",
    "out_of_bounds.stopped": "the device stopped, and kernels after this one are not proven: {error}",
    "unchecked.outputs": (
        "no case of contract {contract} checks {outputs}: it is empty or not asked for, "
        "or zeros or what was there before would pass too"
    ),
    "unchecked.unproven": "it was not proven: {why}",
    "bit_identity_broken": "case {case}: the bits of {outputs} are not those of {other}",
    "unchecked.claim": "case {case}: its claim to the bits of {other} was not checked: {why}",
    "unchecked.claim_absent": "it claims the bits of {other}, which nothing serves on this target",
    "unchecked.claim_own": "it claims the bits of {other}, which it serves itself",
    "remedy.by_rows": "say in the contract's by_rows how that kernel makes these outputs",
    "remedy.claim_served": "name a kernel that serves the same targets",
    "remedy.drop_bits": "or drop the claim from bit_identical_to",
    "remedy.drop_claim": "or drop the claim",
    "remedy.same_order": "accumulate in the order of the kernel it names",
    "remedy.correct_cases": "correct the contract's cases, inputs or tolerance",
    "remedy.correct_contract": "or correct the contract",
    "remedy.end_kernel": "repair or block the kernel that does not end, and audit again",
    "remedy.explain": "repair the kernel: muster explain {key} --verbose shows the contract and its cases",
    "remedy.explain_on_host": (
        "repair the kernel: muster explain {key} --target cpu --verbose shows the contract and its cases"
    ),
    "remedy.faulty_contract": "correct the contract: its reference, inputs, cases or tolerance",
    "remedy.fixed_order": "add in a fixed order",
    "remedy.guard_edges": "guard the edges of partial tiles",
    "remedy.inout": "or, where the contract is yours, declare the parameter inout",
    "remedy.memcheck": "compute-sanitizer --tool memcheck shows the access",
    "remedy.more_time": "or give it more time: muster plugin check {plugin} --timeout SECONDS",
    "remedy.not_deterministic": "or declare deterministic=False",
    "remedy.outputs_only": "write to the outputs only",
    "remedy.stack": "look at the stack in the log",
    "remedy.write_all": "write every element, partial tiles too",
}
