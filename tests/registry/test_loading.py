"""Loading one plugin: marked functions that would never run, fields of wrong types, and observers."""

from functools import partial
from types import ModuleType, SimpleNamespace

import kernel_muster as km
import numpy as np
import pytest
from kernel_muster.registry.discovery.loading import load_plugin

SIGNATURE = km.Signature((km.TensorParam("out", "f32", ("M",), role="out"),))
CONTRACT = {
    "name": "acme_zeros", "summary": "zeros", "signature": SIGNATURE, "cases": (km.Case("one", {"M": 1}),),
    "tolerance": km.Tolerance(0, 0, "zeros are exact"),
    "reference": lambda arguments, dims: {"out": np.zeros(dims["M"])},
}  # fmt: skip
SPEC = {"key": "acme::zeros", "contract": "acme_zeros", "archs": ("cpu",), "backend": km.PythonKernel(print)}
LEVER = {"name": "MUSTER_ACME", "kind": "int", "default": 1, "doc": "Acme."}


def hook(value):
    return km.hookimpl(lambda: value)


def module(**members):
    made = ModuleType("acme")
    made.muster_contracts = hook([km.Contract(**CONTRACT)])
    made.muster_kernels = hook([km.KernelSpec(**SPEC)])
    vars(made).update(members)
    return made


def load(plugin):
    return load_plugin("acme", "here", lambda: plugin, 10)


def said(loaded):
    return [(f.code, f.why) for f in loaded.findings]


@pytest.mark.parametrize(
    "value", [partial(list, ()), SimpleNamespace(__call__=list)], ids=["partial", "object that can be called"]
)
def test_hook_that_is_no_function_is_found_beside_one_that_is(value):
    ((code, why),) = said(load(module(muster_levers=km.hookimpl(value))))
    assert code == "UNKNOWN_HOOK"
    assert "no function: it would never run" in why


def test_hook_that_two_functions_implement_is_refused():
    @km.hookimpl(specname="muster_kernels")
    def more_kernels():
        return []

    ((code, why),) = said(load(module(more_kernels=more_kernels)))
    assert code == "BAD_SPEC"
    assert why.startswith("several functions implement muster_kernels")


def test_member_that_raises_whatever_it_is_asked_is_no_concern_of_ours():
    class Proxy:
        def __getattr__(self, name):
            raise RuntimeError("outside of a request")

    loaded = load(module(request=Proxy()))
    assert said(loaded) == []
    assert len(loaded.items["muster_kernels"]) == 1


def test_observer_need_not_take_the_report():
    calls = []
    load(module(muster_audit_finished=km.hookimpl(lambda: calls.append("bare")))).observer("report")
    load(module(muster_audit_finished=km.hookimpl(lambda report: calls.append(report)))).observer("report")
    assert calls == ["bare", "report"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"deterministic": "yes"}, "deterministic is 'yes', expected True or False"),
        ({"provenance": None}, "provenance is None, expected text"),
        ({"backend": SimpleNamespace(name="cuda", source_sha256="00")}, "does not run on the host"),
        ({"backend": km.PythonKernel(None)}, "function is NoneType, expected a function"),
        ({"backend": km.PythonKernel(partial(print))}, "function is partial, expected a function"),
    ],
)
def test_spec_with_a_malformed_field_is_refused(change, why):
    loaded = load(module(muster_kernels=hook([km.KernelSpec(**SPEC | change)])))
    assert [code for code, _ in said(loaded)] == ["BAD_SPEC"]
    assert why in said(loaded)[0][1]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"summary": None}, "summary is None, expected text"),
        ({"signature": 5}, "signature is 5, expected a Signature"),
        ({"tolerance": None}, "tolerance is None, expected a Tolerance"),
        ({"by_rows": ()}, "by_rows is (), expected a mapping"),
    ],
)
def test_contract_with_a_malformed_field_is_refused(change, why):
    loaded = load(module(muster_contracts=hook([km.Contract(**CONTRACT | change)])))
    assert [code for code, _ in said(loaded)] == ["BAD_SPEC"]
    assert why in said(loaded)[0][1]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"minimum": "1"}, "minimum is '1', expected an integer or None"),
        ({"evidence": 5}, "evidence is 5, expected text"),
        ({"effects": ("fast",)}, "expected a mapping"),
        ({"diagnostic": None}, "diagnostic is None"),
    ],
)
def test_lever_with_a_malformed_field_is_refused(change, why):
    loaded = load(module(muster_levers=hook([km.Lever(**LEVER | change)])))
    assert [code for code, _ in said(loaded)] == ["BAD_SPEC"]
    assert why in said(loaded)[0][1]


def test_contract_whose_name_is_no_text_does_not_break_the_comparison_of_plugins():
    broken = module(muster_contracts=hook([km.Contract(**CONTRACT | {"name": ["a"]})]))
    with pytest.raises(km.BootRefused) as refused:
        km.open_registry("cpu", levers={}, local_plugins={"acme": broken})
    assert [f.code for f in refused.value.report.findings] == ["BAD_SPEC"]
