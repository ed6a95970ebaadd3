"""Selection: the kernel of a key, and the rule that rejects each other candidate. Order has no effect."""

from itertools import permutations

import pytest
from kernel_muster.registry.keys import KernelKey
from kernel_muster.registry.selection.select import parse_key_list, parse_prefer

KEY = KernelKey("acme", "mul")


def rules(decision):
    return {c.registered.provider.distribution: c.rule for c in decision.candidates}


def decide(select, *offers, key=KEY, **options):
    """Decide in every order of registration; all must agree."""
    first, *others = [select(*order, **options).decide(key) for order in permutations(offers)]
    assert all(other == first for other in others)
    return first


def test_fast_beats_reference_whatever_its_architecture(select, offer):
    decision = decide(
        select,
        offer("acme::mul", "slow", tier="reference", archs=("sm_90a",)),
        offer("acme::mul", "fast", archs=("sm_75+",)),
    )
    assert decision.chosen.provider.distribution == "fast"
    assert rules(decision) == {"slow": "tier", "fast": ""}
    assert not decision.is_slow


def test_most_specific_architecture_wins(select, offer):
    decision = decide(
        select,
        offer("acme::mul", "plain", archs=("sm_80+",)),
        offer("acme::mul", "higher", archs=("sm_90+",)),
        offer("acme::mul", "exact", archs=("sm_90a",)),
        offer("acme::mul", "other", archs=("sm_100a",)),
    )
    assert decision.chosen.provider.distribution == "exact"
    assert rules(decision) == {"plain": "specificity", "higher": "specificity", "exact": "", "other": "arch"}


def test_most_specific_entry_that_the_target_accepts_counts(select, offer):
    wide = offer("acme::mul", "wide", archs=("sm_100a", "sm_80+"))  # its sm_100a is no match for sm_90a
    decision = decide(select, wide, offer("acme::mul", "near", archs=("sm_90+",)))
    assert decision.chosen.provider.distribution == "near"


def test_equal_kernels_are_rivals_and_the_choice_is_the_same_in_every_order(select, offer):
    decision = decide(select, offer("acme::mul", "b"), offer("acme::mul", "a"), offer("acme::mul", "c"))
    assert decision.chosen.provider.distribution == "a"
    assert [r.provider.distribution for r in decision.rivals] == ["b", "c"]
    assert rules(decision) == {"a": "", "b": "duplicate", "c": "duplicate"}


def test_prefer_decides_between_equals(select, offer):
    offers = [offer("acme::mul", "a"), offer("acme::mul", "b")]
    decision = decide(select, *offers, MUSTER_PREFER="acme::mul=b")
    assert decision.chosen.provider.distribution == "b"
    assert decision.rivals == ()
    assert rules(decision) == {"a": "preferred", "b": ""}


def test_prefer_does_not_lift_a_worse_kernel(select, offer):
    offers = [offer("acme::mul", "a"), offer("acme::mul", "b", tier="reference")]
    assert decide(select, *offers, MUSTER_PREFER="acme::mul=b").chosen.provider.distribution == "a"


def test_prefer_of_a_distribution_with_two_equals_decides_nothing(select, offer):
    offers = [offer("acme::mul", "a", provenance="1"), offer("acme::mul", "a", provenance="2")]
    decision = select(*offers, MUSTER_PREFER="acme::mul=a").decide(KEY)
    assert len(decision.rivals) == 1


def test_override_takes_the_key_of_the_distribution_it_names_alone(select, offer):
    offers = [
        offer("acme::mul", "acme", archs=("sm_90a",)),
        offer("acme::mul", "fork", overrides="acme", archs=("sm_80+",)),
        offer("acme::mul", "third", archs=("sm_80+",), tier="reference"),
    ]
    decision = decide(select, *offers)
    assert decision.chosen.provider.distribution == "fork"
    assert rules(decision) == {"acme": "overridden", "fork": "", "third": "tier"}


def test_override_that_does_not_run_here_overrides_nothing(select, offer):
    offers = [offer("acme::mul", "acme"), offer("acme::mul", "fork", overrides="acme", archs=("sm_100a",))]
    assert decide(select, *offers).chosen.provider.distribution == "acme"


def test_override_leaves_other_keys_alone(select, offer):
    offers = [offer("acme::mul"), offer("acme::add"), offer("acme::mul", "fork", overrides="acme")]
    assert decide(select, *offers, key=KernelKey("acme", "add")).chosen.provider.distribution == "acme"


def test_circle_of_overrides_still_answers_in_every_order(select, offer):
    decision = decide(select, offer("acme::mul", "a", overrides="b"), offer("acme::mul", "b", overrides="a"))
    assert decision.chosen is not None
    assert rules(decision)[decision.chosen.provider.distribution] == "overridden"


def test_replaced_module_shadows_what_the_replacement_lacks(select, offer):
    offers = [
        offer("acme::mul"),
        offer("acme::add"),
        offer("other::add"),
        offer("acme::mul", "fork", replaces_module=("acme", "acme")),
    ]
    assert decide(select, *offers).chosen.provider.distribution == "fork"
    lacking = decide(select, *offers, key=KernelKey("acme", "add"))
    assert (lacking.chosen, lacking.cause) == (None, "SHADOWED")
    assert "module acme of acme is replaced by fork" in lacking.reason
    assert decide(select, *offers, key=KernelKey("other", "add")).chosen is not None


def test_module_is_replaced_only_where_the_replacement_has_a_kernel_for_the_target(select, offer):
    offers = [
        offer("acme::mul"),
        offer("acme::add"),
        offer("acme::mul", "fork", replaces_module=("acme", "acme"), archs=("sm_100a",)),
    ]
    assert decide(select, *offers, key=KernelKey("acme", "add")).chosen is not None
    assert decide(select, *offers, key=KernelKey("acme", "add"), target="sm_100a").cause == "SHADOWED"


def test_wrong_architecture_names_what_each_candidate_needs(select, offer):
    offers = [offer("acme::mul", "a", archs=("sm_90a",)), offer("acme::mul", "b", archs=("sm_80",))]
    decision = decide(select, *offers, target="sm_120a")
    assert decision.cause == "WRONG_ARCH"
    assert decision.reason == "needs sm_80, the target is sm_120a; needs sm_90a, the target is sm_120a"


@pytest.mark.parametrize(
    ("archs", "target", "reason"),
    [
        (("sm_90a", "sm_121a"), "sm_100a", "needs sm_90a or sm_121a, the target is sm_100a"),
        (("cpu", "sm_90a"), "sm_100a", "needs sm_90a, the target is sm_100a"),
        (("sm_90a", "sm_100f", "sm_120f"), "cpu", "needs sm_90a or sm_100f or sm_120f, the target is cpu"),
    ],
)
def test_wrong_architecture_names_all_that_one_candidate_accepts(select, offer, archs, target, reason):
    decision = decide(select, offer("acme::mul", "a", archs=archs), target=target)
    assert (decision.cause, decision.reason) == ("WRONG_ARCH", reason)


def test_host_reference_is_missing_on_a_gpu_and_serves_on_cpu(select, offer):
    host = offer("acme::mul", archs=("cpu",), tier="reference")
    assert decide(select, host).cause == "MISSING"
    on_cpu = decide(select, host, target="cpu")
    assert on_cpu.chosen is host
    assert not on_cpu.is_slow


def test_host_reference_beside_a_kernel_for_another_chip_is_wrong_arch(select, offer):
    offers = [offer("acme::mul", archs=("cpu",), tier="reference"), offer("acme::mul", archs=("sm_100a",))]
    assert decide(select, *offers).cause == "WRONG_ARCH"


def test_device_kernel_of_tier_reference_is_slow(select, offer):
    assert decide(select, offer("acme::mul", tier="reference")).is_slow


def test_disabled_key_is_absent_whoever_offers_it(select, offer):
    decision = decide(select, offer("acme::mul", "a"), offer("acme::mul", "b"), MUSTER_DISABLE="x::y, acme::mul")
    assert (decision.chosen, decision.cause) == (None, "DISABLED")


def test_alias_answers_for_the_old_name_as_the_new_one_does(select, offer):
    old = KernelKey("acme", "old")
    found = decide(select, offer("acme::mul", aliases=("acme::old",)), key=old)
    assert found.chosen.spec.key == "acme::mul"
    assert found.renamed_to == KEY
    wrong = decide(select, offer("acme::mul", aliases=("acme::old",), archs=("sm_100a",)), key=old)
    assert (wrong.cause, wrong.renamed_to) == ("WRONG_ARCH", KEY)


def test_registered_key_is_not_taken_for_somebodys_alias(select, offer):
    old = offer("acme::old")
    assert decide(select, offer("acme::mul", aliases=("acme::old",)), old, key=KernelKey("acme", "old")).chosen is old


def test_alias_that_two_keys_claim_is_the_first_ones_in_every_order(select, offer):
    offers = [offer("acme::mul", aliases=("acme::old",)), offer("acme::add", aliases=("acme::old",))]
    assert decide(select, *offers, key=KernelKey("acme", "old")).renamed_to == KernelKey("acme", "add")


@pytest.mark.parametrize(
    ("text", "keys", "wrong"),
    [("", [], 0), (" a::b , c::d,", ["a::b", "c::d"], 0), ("a::b,c", ["a::b"], 1), ("A::b", [], 1), ("::", [], 1)],
)
def test_key_list_reads_what_is_right_and_counts_what_is_not(text, keys, wrong):
    found, problems = parse_key_list(text)
    assert [str(key) for key in found] == keys
    assert len(problems) == wrong


@pytest.mark.parametrize(
    ("text", "choices", "wrong"),
    [
        ("a::b=x , c::d=y", {"a::b": "x", "c::d": "y"}, 0),
        *((text, {}, 1) for text in ("a::b", "a::b=", "a=x", "=")),
    ],
)
def test_prefer_reads_what_is_right_and_names_what_is_not(text, choices, wrong):
    found, problems = parse_prefer(text)
    assert {str(key): value for key, value in found.items() if value} == choices
    assert len(problems) >= wrong
    assert bool(problems) is bool(wrong)
