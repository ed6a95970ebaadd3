"""Names of distributions compare as PEP 503 has it, wherever somebody gives one."""

import pytest
from kernel_muster.registry.discovery.discover import discover
from kernel_muster.registry.distributions import normal_name, same_distribution
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.keys import KernelKey
from kernel_muster.registry.selection.catalog import PluginRow
from kernel_muster.registry.selection.select import parse_prefer
from packaging.utils import canonicalize_name

SPELLINGS = ["acme-fast-kernels", "Acme_Fast.Kernels", "ACME--fast__kernels", "acme.-_fast-kernels"]
KEY = KernelKey("acme", "mul")


@pytest.mark.parametrize("name", [*SPELLINGS, "", "a", "-", "_a_", "(local)", "\u00c4cme", "a b"])
def test_normal_name_is_that_of_the_standard(name):
    assert normal_name(name) == canonicalize_name(name)
    assert same_distribution(name, name.upper().replace("-", "___")) is (
        canonicalize_name(name) == normal_name(name.upper())
    )


@pytest.mark.parametrize("name", SPELLINGS)
def test_override_names_a_distribution_in_any_spelling(select, offer, name):
    offers = [offer("acme::mul", "Acme-Fast-Kernels"), offer("acme::mul", "fork", overrides=name)]
    decision = select(*offers).decide(KEY)
    assert (decision.chosen.provider.distribution, decision.rivals) == ("fork", ())


@pytest.mark.parametrize("name", SPELLINGS)
def test_replaced_module_is_of_a_distribution_in_any_spelling(select, offer, name):
    offers = [
        offer("acme::mul", "Acme-Fast-Kernels"),
        offer("acme::add", "Acme-Fast-Kernels"),
        offer("acme::add", "fork", replaces_module=("acme", name)),
    ]
    decision = select(*offers).decide(KEY)
    assert (decision.cause, decision.reason) == ("SHADOWED", "module acme of Acme-Fast-Kernels is replaced by fork")


@pytest.mark.parametrize("name", SPELLINGS)
def test_preference_names_a_distribution_in_any_spelling(select, offer, name):
    offers = [offer("acme::mul", "Acme-Fast-Kernels"), offer("acme::mul", "fork")]
    decision = select(*offers, MUSTER_PREFER=f"acme::mul={name}").decide(KEY)
    assert (decision.chosen.provider.distribution, decision.rivals) == ("Acme-Fast-Kernels", ())


def test_preference_in_two_spellings_is_one():
    assert parse_prefer("acme::mul=Acme_Kernels,acme::mul=acme-kernels")[1] == []
    assert parse_prefer("acme::mul=Acme_Kernels,acme::mul=acme")[1] != []


def test_circle_of_overrides_is_seen_in_any_spelling(select, offer):
    offers = [offer("acme::mul", "A_1", overrides="b.2"), offer("acme::mul", "B-2", overrides="a-1")]
    assert {one.provider.distribution for one in select(*offers).decide(KEY).circle} == {"A_1", "B-2"}


def test_override_of_the_own_distribution_in_another_spelling_replaces_nothing(select, offer):
    offers = [offer("acme::mul", "A_1", overrides="a-1"), offer("acme::mul", "fork")]
    assert len(select(*offers).decide(KEY).rivals) == 1


@pytest.mark.parametrize("name", ["kernel-muster", "Kernel_Muster", "kernel.muster"])
def test_host_is_the_host_in_any_spelling(name, offer):
    assert PluginRow("p", name, "1", "loaded").is_host
    assert offer("acme::mul", name).provider.is_host
    assert not PluginRow("p", "kernel-muster-more", "1", "loaded").is_host


@pytest.mark.parametrize("name", ["fast-mul", "Fast_Mul", "FAST.MUL"])
@pytest.mark.parametrize("option", ["blocked", "demanded"])
def test_plugin_is_blocked_and_demanded_in_any_spelling(install, tmp_path, on_disk, name, option):
    path = install(tmp_path, text="[kernel_muster.v1]\nFast_Mul = acme_on_disk\n")
    catalog = discover(path=[path], **{option: [name]})
    assert catalog.plugins[0].status == ("blocked" if option == "blocked" else "failed")  # fast_mul does not own acme
    assert "PLUGIN_NOT_FOUND" not in {finding.code for finding in catalog.findings}


def test_exact_name_of_a_plugin_means_that_plugin_alone(install, tmp_path, on_disk):
    path = install(tmp_path, text="[kernel_muster.v1]\nfast-mul = acme_on_disk\nfast_mul = acme_on_disk\n")
    assert [row.status for row in discover(path=[path], blocked=["fast_mul"]).plugins] == ["failed", "blocked"]
    assert [row.status for row in discover(path=[path], blocked=["Fast.Mul"]).plugins] == ["blocked", "blocked"]


def test_plugin_blocked_in_one_spelling_and_demanded_in_another_is_a_usage_error(install, tmp_path):
    path = install(tmp_path, text="[kernel_muster.v1]\nfast-mul = never_imported\n")
    with pytest.raises(UsageError, match="fast-mul: demanded and blocked at once"):
        discover(path=[path], blocked=["Fast_Mul"], demanded=["fast.mul"])


@pytest.mark.parametrize("name", SPELLINGS)
def test_distribution_in_the_place_of_its_plugin_is_named_with_its_plugins(install, tmp_path, on_disk, name):
    path = install(tmp_path, "Acme_Fast_Kernels")
    (finding,) = discover(path=[path], demanded=[name]).findings
    assert finding.code == "PLUGIN_NOT_FOUND"
    assert finding.why == f"--plugin names {name}, which is not installed; the distribution of that name offers acme"


def test_metadata_seen_twice_in_two_spellings_is_one_plugin(install, tmp_path, on_disk):
    paths = [install(tmp_path / at, name) for at, name in (("1", "Acme_Kernels"), ("2", "acme.kernels"))]
    catalog = discover(path=paths)
    assert [row.status for row in catalog.plugins] == ["loaded"]
    assert catalog.plugins[0].notes[0].startswith("metadata seen 2 times")
