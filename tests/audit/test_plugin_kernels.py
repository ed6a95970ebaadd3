"""``muster plugin check`` for keys with several equal kernels."""

import pytest
from kernel_muster.audit.plugin_check.steps.kernels import equal_kernels
from kernel_muster.registry.discovery.discover import discover
from kernel_muster.registry.hardware.arch import parse_arch
from kernel_muster.registry.hardware.target import CPU_TARGET, Target

TARGETS = (CPU_TARGET, *(Target(arch, parse_arch(arch)) for arch in ("sm_80", "sm_90a", "sm_100a")))


@pytest.fixture
def found(world):
    """Return what is found about one distribution's kernels of one key, beside those of another."""

    def found(*own, others=()):
        def plugin(archs):
            return world.plugin(kernels=[world.spec("zeta::mul", archs=one) for one in archs], contracts=())

        plugins = {"acme": world.plugin(contracts=[world.contract()], kernels=[world.spec("acme::add")])}
        site = world.distribution("zeta", plugin(own))
        sites = [str(site), *(str(world.distribution("rho", plugin(others))) for _ in others[:1])]
        catalog = discover(local=plugins, path=sites)
        assert [finding.why for finding in catalog.findings] == []
        kernels = [kernel for kernel in catalog.kernels if kernel.provider.distribution == "zeta"]
        return list(equal_kernels(catalog, kernels, TARGETS))

    return found


def test_equal_kernels_of_one_distribution_are_one_finding_for_all_targets(found):
    (finding,) = found(("cpu", "sm_80+"), ("cpu", "sm_80+"))
    assert (finding.code, finding.subject) == ("DUPLICATE_KERNEL", "zeta::mul")
    assert finding.why == "2 equal kernels compete on cpu, sm_80, sm_90a, sm_100a"
    assert finding.where == ("zeta 1.0, archs cpu sm_80+",) * 2
    assert finding.remedies == ("remove all but one from zeta, or give them other archs or tiers",)


def test_kernels_of_one_distribution_for_several_architectures_are_told_apart(found):
    assert found(("sm_80+",), ("sm_90a",), ("cpu",)) == []


def test_kernels_of_two_distributions_are_told_apart_by_an_override(found):
    (finding,) = found(("sm_80+",), ("sm_90a",), others=(("sm_80+",),))
    assert finding.why == "2 equal kernels compete on sm_80, sm_100a"
    assert finding.where == ("rho 1.0, archs sm_80+", "zeta 1.0, archs sm_80+")
    assert finding.remedies == ('say overrides="<distribution>" in the spec', "or give it a key of its own")
