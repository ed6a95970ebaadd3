"""Keys removed from a boot on purpose, for a comparison with another boot."""

import kernel_muster as km
import pytest
from kernel_muster.audit.evidence import AuditOptions
from kernel_muster.audit.replay.replay import replay
from kernel_muster.audit.replay.trace import parse_trace

MUL = km.KernelKey("acme", "mul")
EXPECTED = '[expected_present.acme]\nmul = "the main path of this model"'


def lookup(func, **more):
    return {"module": "acme", "func": func, "site": "engine.cpp:1", "kind": "optional", "phase": "boot"} | more


@pytest.fixture
def judge(world):
    """Judge a boot whose ``acme::mul`` MUSTER_DISABLE takes away."""

    def judge(*lookups, manifest="", without=(MUL,), disabled="acme::mul"):
        trace = {
            "version": "1.0",
            "target": {"arch": "sm_121a", "quant": "nvfp4"},
            "model": "tiny",
            "kernels": [{"module": "acme", "func": func} for func in ("mul", "add")],
            "lookups": list(lookups),
            "plugins": [{"name": "acme", "distribution": "acme-engine", "version": "3.1"}],
            "levers": {"MUSTER_DISABLE": disabled},
        }
        asked = AuditOptions(without=frozenset(without))
        report = replay(parse_trace(trace), asked, manifest=world.manifest(manifest))
        return [(f.code, f.subject) for f in report.findings]

    return judge


def test_key_that_layers_can_do_without_is_no_finding(judge):
    assert judge(lookup("mul"), lookup("add")) == []
    assert judge(lookup("mul", chain=[["acme", "mul"], ["acme", "add"]], kind="required")) == []


def test_key_that_is_only_switched_off_is_one(judge):
    assert judge(lookup("mul"), lookup("add"), without=()) == [("DISABLED", "acme::mul")]
    more = judge(lookup("mul"), lookup("add"), disabled="acme::mul,acme::add")
    assert more == [("DISABLED", "acme::add")]


def test_key_that_is_required_is_refused_all_the_same(judge):
    assert judge(lookup("mul", kind="required")) == [("DISABLED", "acme::mul")]


def test_key_that_is_absent_for_another_reason_is_not_excused(judge):
    (found,) = judge(lookup("sub"), lookup("mul"), without=(km.KernelKey("acme", "sub"), MUL))
    assert found == ("MISSING", "acme::sub")


def test_manifest_that_expects_the_key_is_not_contradicted(judge):
    assert judge(lookup("mul"), manifest=EXPECTED) == []
    assert ("DISABLED", "acme::mul") in judge(lookup("mul"), manifest=EXPECTED, without=())
    # ... but a key without a lookup is still not expected.
    assert judge(lookup("add"), manifest=EXPECTED, disabled="acme::sub", without=()) != []
