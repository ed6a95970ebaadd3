"""Discovery: each plugin in a transaction, a finding for every defect, and no effect of order."""

import itertools
import sys
import threading
from dataclasses import fields, replace
from types import ModuleType

import kernel_muster as km
import numpy as np
import pytest
from kernel_muster.registry.contract.specs import source_digest
from kernel_muster.registry.discovery.discover import discover


def contract(name="acme_c"):
    signature = km.Signature((km.TensorParam("out", "f32", ("M",), role="out"),))
    case, exact = km.Case("one", {"M": 1}), km.Tolerance(0, 0, "zeros are exact")
    return km.Contract(
        name=name, summary="zeros", signature=signature, cases=(case,), tolerance=exact,
        reference=lambda arguments, dims: {"out": np.zeros(dims["M"])},
    )  # fmt: skip


def spec(key="acme::mul", **options):
    options = {"contract": "acme_c", "archs": ("cpu",), "backend": km.PythonKernel(print)} | options
    return km.KernelSpec(key=key, **options)


def plugin(name="acme_module", marker=km.hookimpl, **hooks):
    module = ModuleType(name)
    for hook, value in hooks.items():
        function = value if callable(value) else (lambda value=value: value)
        setattr(module, hook, marker(function))
    return module


def sound(**more):
    return plugin(muster_contracts=[contract()], muster_kernels=[spec()], **more)


def look(**local):
    return discover(local=local, path=[], timeout_s=10)


def said(catalog):
    return [(f.code, f.subject) for f in catalog.findings]


def raising(error):
    def hook():
        raise error

    return hook


def test_sound_plugin_is_loaded_with_everything_it_gives(tmp_path):
    lever = km.Lever(name="MUSTER_ACME", kind="bool", default=False, doc="Acme.")
    builder = km.ModelBuilder("acme", ("acme_moe",), "production", lambda *a: None)
    more = {"muster_levers": [lever], "muster_models": [builder], "muster_manifests": [tmp_path]}
    catalog = look(acme=sound(**more, muster_audit_finished=lambda report: None))
    assert catalog.findings == ()
    assert [str(key) for key in catalog.by_key] == ["acme::mul"]
    assert lever in catalog.levers
    assert (catalog.builders, catalog.manifest_folders) == ((builder,), (tmp_path,))
    assert [name for name, _ in catalog.observers] == ["acme"]
    (row,) = catalog.plugins
    assert (row.status, row.value, row.hooks) == ("loaded", "acme_module", tuple(sorted(row.hooks)))


def test_hook_may_be_a_generator_or_return_nothing():
    def kernels():
        yield spec()

    catalog = look(acme=plugin(muster_contracts=[contract()], muster_kernels=kernels, muster_levers=None))
    assert (catalog.findings, len(catalog.kernels)) == ((), 1)


def test_one_object_is_a_plugin_too():
    class Plugin:
        @km.hookimpl
        def muster_contracts(self):
            return [contract()]

        @km.hookimpl
        def muster_kernels(self):
            return [spec()]

    assert len(look(acme=Plugin()).kernels) == 1


def failing_generator():
    yield spec()
    raise RuntimeError("half way")


def endless():
    return itertools.count()


BROKEN = {
    "exception": (raising(RuntimeError("no driver")), "PLUGIN_LOAD_FAILED", "RuntimeError"),
    "half-way": (failing_generator, "PLUGIN_LOAD_FAILED", "RuntimeError"),
    "exit": (raising(SystemExit(0)), "PLUGIN_LOAD_FAILED", "SystemExit"),
    "generator-exit": (raising(GeneratorExit()), "PLUGIN_LOAD_FAILED", "GeneratorExit"),
    "text": ("acme::mul", "PLUGIN_LOAD_FAILED", "TypeError"),
    "dict": ({"a": 1}, "PLUGIN_LOAD_FAILED", "TypeError"),
    "number": (3, "PLUGIN_LOAD_FAILED", "TypeError"),
    "argument": (lambda config: [], "BAD_SPEC", "config"),
    "garbage": ([spec(), 42], "BAD_SPEC", "muster_kernels()[1]: expected KernelSpec, got int"),
    "endless": (endless, "BAD_SPEC", "more than 100000 items"),
    "no-arch": ([spec(archs=())], "BAD_SPEC", "at least one entry"),
    "list-arch": ([spec(archs=["cpu"])], "BAD_SPEC", "expected a tuple"),
    "bad-arch": ([spec(archs=("sm_1",))], "BAD_SPEC", "sm_1"),
    "bad-key": ([spec("Acme::mul")], "BAD_SPEC", "module 'Acme'"),
    "no-key": ([spec(None)], "BAD_SPEC", "is not a key"),
    "bad-tier": ([spec(tier="quick")], "BAD_SPEC", "tier is 'quick'"),
    "bad-backend": ([spec(backend=print)], "BAD_SPEC", "expected a Backend"),
    "class-as-backend": ([spec(backend=km.PythonKernel)], "BAD_SPEC", "backend is the class PythonKernel, expected"),
    "bad-alias": ([spec(aliases=("old",))], "BAD_SPEC", "alias: 'old'"),
    "prepare": ([spec(prepare=print)], "BAD_SPEC", "without weight_layout"),
    "replaces": ([spec(replaces_module="acme")], "BAD_SPEC", "expected (module, distribution)"),
    "contract-none": ([spec(contract=None)], "BAD_SPEC", "contract is None, expected"),
    "contract-number": ([spec(), spec("acme::add", contract=3)], "BAD_SPEC", "contract is 3, expected"),
    "override-number": ([spec(overrides=3)], "BAD_SPEC", "overrides is 3, expected text"),
    "layout-number": ([spec(weight_layout=3)], "BAD_SPEC", "weight_layout is 3, expected text"),
    "aliases-text": ([spec(aliases="acme::old")], "BAD_SPEC", "expected a tuple of text"),
    "aliases-none": ([spec(aliases=None)], "BAD_SPEC", "aliases is None, expected a tuple"),
    "lost-contract": ([spec(contract="acme_d")], "BAD_SPEC", "the contract 'acme_d'; did you mean acme_c"),
    "foreign-key": ([spec("other::mul")], "BAD_SPEC", "modules that begin with acme"),
    "near-module": ([spec("acmes::mul")], "BAD_SPEC", "modules that begin with acme"),
    "override": ([spec(overrides="nobody")], "BAD_OVERRIDE", "nobody does not provide it"),
    "override-self": ([spec(overrides="(local)")], "BAD_OVERRIDE", "(local)"),
    "replace-other": ([spec(replaces_module=("moe", "x"))], "BAD_OVERRIDE", "the key lies in 'acme'"),
    "replace-nobody": ([spec(replaces_module=("acme", "x"))], "BAD_OVERRIDE", "nobody else"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_plugin_is_one_finding_and_registers_nothing(case):
    kernels, code, why = BROKEN[case]
    healthy = plugin(muster_contracts=[contract("fine_c")], muster_kernels=[spec("fine::mul", contract="fine_c")])
    catalog = look(acme=plugin(muster_contracts=[contract()], muster_kernels=kernels), fine=healthy)
    assert said(catalog) == [(code, "acme")]
    (found,) = catalog.findings
    assert why in f"{found.why} {found.log}"
    assert found.remedies
    assert "(local)" in found.where[0]
    assert [str(key) for key in catalog.by_key] == ["fine::mul"]  # none of its kernels, all of the healthy one's
    assert {row.name: row.status for row in catalog.plugins} == {"acme": "failed", "fine": "loaded"}


def test_kernel_that_takes_a_weight_and_names_no_layout_is_refused():
    weight, out = km.WeightParam("w", "nvfp4", ("N", "K")), km.TensorParam("out", "f32", ("N",), role="out")
    takes = plugin(
        muster_contracts=[
            replace(contract(), signature=km.Signature((weight, out)), cases=(km.Case("one", {"N": 1, "K": 16}),))
        ],
        muster_kernels=[spec(backend=km.PythonKernel(lambda w, out: None))],
    )
    catalog = look(acme=takes)
    assert said(catalog) == [("BAD_SPEC", "acme")]
    assert catalog.findings[0].why == "acme::mul: contract acme_c takes the weights w, but weight_layout is not given"
    assert catalog.kernels == ()


@pytest.mark.parametrize(
    ("kernels", "why"),
    [
        ([spec(aliases=("norm::rms_norm_2",))], "does not lie in a module that begins with acme"),
        ([spec(), spec("acme::add", aliases=("acme::mul",))], "alias acme::mul is a key of its own"),
        (
            [spec(aliases=("acme::old",)), spec("acme::add", aliases=("acme::old",))],
            "acme::old is given to acme::add and acme::mul",
        ),
    ],
)
def test_alias_that_is_no_old_name_of_the_plugins_own_key_is_refused(kernels, why):
    catalog = look(acme=plugin(muster_contracts=[contract()], muster_kernels=kernels))
    assert said(catalog) == [("BAD_SPEC", "acme")]
    assert why in catalog.findings[0].why


@pytest.mark.parametrize(
    ("hook", "item", "why"),
    [
        ("muster_contracts", contract(3), "name is 3"),
        (
            "muster_levers",
            km.Lever(name="MUSTER_A", kind="bool", default=False, doc="A.", conflicts="MUSTER_B"),
            "tuple",
        ),
        ("muster_levers", km.Lever(name="MUSTER_A", kind="bool", default="maybe", doc="A."), "'maybe' is not 1/0"),
        ("muster_levers", km.Lever(name="MUSTER_A", kind="int", default=9, maximum=8, doc="A."), "9 is not an integer"),
        ("muster_levers", km.Lever(name=None, kind="bool", default=False, doc="A."), "name None"),
        ("muster_levers", km.Lever(name="MUSTER_A", kind="bool", default=False, doc=None), "doc is empty"),
        ("muster_models", km.ModelBuilder(None, ("m",), "partial", print), "name is None"),
        (
            "muster_models",
            km.ModelBuilder("m", ("t",), "partial", lambda manifest, kernels: None),
            "build takes (manifest, kernels), but is called as build(manifest, kernels, weights)",
        ),
        (
            "muster_models",
            km.ModelBuilder("m", ("t",), "partial", lambda manifest, kernels, *, weights: None),
            "build takes (manifest, kernels, *, weights), but is called",
        ),
        ("muster_models", km.ModelBuilder("m", "qwen", "partial", print), "model_types is 'qwen'"),
    ],
)
def test_malformed_item_of_any_hook_is_a_finding(hook, item, why):
    catalog = look(acme=sound(**{hook: [item]}) if hook != "muster_contracts" else plugin(muster_contracts=[item]))
    assert said(catalog) == [("BAD_SPEC", "acme")]
    assert why in catalog.findings[0].why


def opener(*keys, name="base_c"):
    return plugin(muster_contracts=[replace(contract(name), open_keys=keys)])


def test_key_that_a_contract_opens_may_be_provided_by_anybody():
    guest = plugin(muster_kernels=[spec("base_fp4::tile", contract="base_c")])
    catalog = look(base=opener("base_fp4::tile"), acme=guest)
    assert catalog.findings == ()
    assert [(str(key), rows[0].provider.plugin) for key, rows in catalog.by_key.items()] == [("base_fp4::tile", "acme")]
    assert {str(key): one.name for key, one in catalog.open_contracts.items()} == {"base_fp4::tile": "base_c"}


@pytest.mark.parametrize("name", ["acme", "base_fp4"])
def test_open_key_under_another_contract_is_refused_even_in_a_namespace_of_that_name(name):
    guest = plugin(muster_contracts=[contract()], muster_kernels=[spec("base_fp4::tile")])
    catalog = look(base=opener("base_fp4::tile"), **{name: guest})
    assert said(catalog) == [("BAD_SPEC", name)]
    why = "base_fp4::tile: it implements contract acme_c, and this key is open under base_c alone"
    assert catalog.findings[0].why == why
    assert catalog.kernels == ()


@pytest.mark.parametrize("key", ["base_fp4::tiles", "other::mul"])
def test_key_beside_an_open_one_is_as_closed_as_ever_and_the_open_one_is_proposed(key):
    guest = plugin(muster_kernels=[spec(key, contract="base_c")])
    catalog = look(base=opener("base_fp4::tile"), acme=guest)
    assert said(catalog) == [("BAD_SPEC", "acme")]
    assert "modules that begin with acme" in catalog.findings[0].why
    assert ("did you mean base_fp4::tile?" in catalog.findings[0].why) is (key == "base_fp4::tiles")


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (("other::tile",), "contract base_c opens other::tile, which does not lie in a module that begins with base"),
        (("Base",), "open_keys: 'Base' is not a key: expected module::func"),
        ("base::tile", "open_keys is 'base::tile', expected a tuple of text"),
        ((3,), "open_keys is (3,), expected a tuple of text"),
    ],
)
def test_contract_opens_keys_of_its_own_plugin_only(keys, why):
    catalog = look(base=plugin(muster_contracts=[replace(contract("base_c"), open_keys=keys)]))
    assert said(catalog) == [("BAD_SPEC", "base")]
    assert why in catalog.findings[0].why


def test_two_contracts_that_open_one_key_are_refused():
    both = [replace(contract(name), open_keys=("base::tile",)) for name in ("one_c", "two_c")]
    catalog = look(base=plugin(muster_contracts=both))
    assert said(catalog) == [("BAD_SPEC", "base")]
    assert catalog.findings[0].why == "contract two_c opens base::tile, which is open under contract one_c already"


def test_kernel_of_an_open_key_whose_contract_did_not_load_is_one_finding():
    guest = plugin(muster_kernels=[spec("base_fp4::tile", contract="base_c")])
    broken = plugin(muster_contracts=raising(RuntimeError("no")))
    catalog = look(base=broken, acme=guest)
    assert said(catalog) == [("PLUGIN_LOAD_FAILED", "base"), ("BAD_SPEC", "acme")]
    assert "the contract 'base_c'; what base (failed) registers is not known" in catalog.findings[1].why
    blocked = discover(local={"base": opener("base_fp4::tile"), "acme": guest}, path=[], blocked=["base"])
    assert said(blocked) == [("BAD_SPEC", "acme")]
    assert "what base (blocked) registers is not known" in blocked.findings[0].why


def test_cause_chain_is_kept():
    def kernels():
        try:
            raise OSError("libacme.so is not there")
        except OSError as error:
            raise RuntimeError("no kernels") from error

    (found,) = look(acme=plugin(muster_kernels=kernels)).findings
    assert "RuntimeError: no kernels" in found.log
    assert "because of OSError: libacme.so is not there" in found.log
    assert "test_discovery.py:" in found.log


def test_exception_whose_text_raises_is_still_reported():
    class Nasty(Exception):
        def __str__(self):
            raise ValueError("no text")

    assert said(look(acme=plugin(muster_kernels=raising(Nasty())))) == [("PLUGIN_LOAD_FAILED", "acme")]


def test_keyboard_interrupt_of_a_hook_is_nobodys_key():
    assert said(look(acme=plugin(muster_kernels=raising(KeyboardInterrupt())))) == [("PLUGIN_LOAD_FAILED", "acme")]


def test_class_instead_of_module_is_refused():
    class Plugin:
        @km.hookimpl
        def muster_kernels(self):
            return []

    catalog = look(acme=Plugin)
    assert said(catalog) == [("BAD_SPEC", "acme")]
    assert "class Plugin" in catalog.findings[0].why


@pytest.mark.parametrize("option", ["wrapper", "hookwrapper", "tryfirst", "trylast", "optionalhook"])
def test_hook_that_depends_on_others_is_refused(option):
    catalog = look(acme=plugin(marker=km.hookimpl(**{option: True}), muster_kernels=[]))
    assert said(catalog) == [("BAD_SPEC", "acme")]
    assert option in catalog.findings[0].why


def test_misspelt_hook_is_found_with_a_suggestion():
    catalog = look(acme=plugin(muster_kernals=[]))
    assert said(catalog) == [("UNKNOWN_HOOK", "acme")]
    assert "did you mean muster_kernels" in catalog.findings[0].why


def test_hook_renamed_by_specname_is_judged_by_that_name():
    assert said(look(acme=plugin(marker=km.hookimpl(specname="muster_nothing"), muster_kernels=[]))) == [
        ("UNKNOWN_HOOK", "acme")
    ]


def test_unmarked_hook_is_found():
    catalog = look(acme=plugin(marker=lambda function: function, muster_kernels=[]))
    assert said(catalog) == [("UNKNOWN_HOOK", "acme")]
    assert "not marked" in catalog.findings[0].why


def test_unmarked_hook_of_an_object_is_found():
    class Plugin:
        def muster_kernels(self):
            return [spec()]

    assert said(look(acme=Plugin())) == [("UNKNOWN_HOOK", "acme")]


def test_helper_of_the_plugin_named_like_a_hook_is_found_but_not_an_imported_one():
    def muster_tables():
        return []

    muster_tables.__module__ = "acme_module"
    module = sound()
    module.muster_tables = muster_tables
    assert said(look(acme=module)) == [("UNKNOWN_HOOK", "acme")]
    muster_tables.__module__ = "elsewhere"
    assert said(look(acme=module)) == []


@pytest.mark.parametrize("hooks", [{}, {"muster_kernels": []}, {"muster_kernels": None, "muster_levers": iter(())}])
def test_plugin_that_gives_nothing_is_empty(hooks):
    assert said(look(acme=plugin(**hooks))) == [("PLUGIN_EMPTY", "acme")]


def test_hanging_hook_is_abandoned_with_its_stack():
    release = threading.Event()

    def kernels():
        release.wait(30)
        return []

    try:
        catalog = discover(local={"acme": plugin(muster_kernels=kernels)}, path=[], timeout_s=0.1)
    finally:
        release.set()
    assert said(catalog) == [("PLUGIN_LOAD_FAILED", "acme")]
    (found,) = catalog.findings
    assert "after 0.1 s" in found.why
    assert "release.wait(30)" in found.log
    files = [line.split('"')[1] for line in found.log.splitlines() if line.startswith("  File")]
    assert files[0] == __file__  # the author's line comes first: the rest may be cut
    assert files[-1] == threading.__file__
    assert files.index(__file__) < next(
        i for i, file in enumerate(files) if file.endswith("registry/plugin_code/watch.py")
    )


# plugins compared with each other


@pytest.mark.parametrize(
    ("hook", "item"),
    [
        ("muster_contracts", contract("shared")),
        ("muster_levers", km.Lever(name="MUSTER_SHARED", kind="bool", default=False, doc="Shared.")),
        ("muster_models", km.ModelBuilder("shared", ("m",), "partial", lambda *a: None)),
    ],
)
def test_name_that_two_plugins_declare_refuses_both(hook, item):
    catalog = look(one=plugin(**{hook: [item]}), two=plugin(**{hook: [item]}))
    (found,) = catalog.findings
    assert (found.code, len(found.where)) == ("BAD_SPEC", 2)
    assert "declared 2 times" in found.why
    assert {row.status for row in catalog.plugins} == {"failed"}


def test_core_lever_is_not_to_be_declared_again():
    lever = km.Lever(name="MUSTER_DISABLE", kind="text", default="acme::mul", doc="Mine now.")
    catalog = look(acme=plugin(muster_levers=[lever]))
    assert said(catalog) == [("BAD_SPEC", "acme")]
    assert lever not in catalog.levers


def test_plugin_that_needs_a_failed_ones_contract_is_its_consequence():
    broken = plugin(muster_contracts=[contract()], muster_kernels=[spec(), 42])
    user = plugin(muster_kernels=[spec("user::mul")])
    user_of_user = plugin(muster_kernels=[spec("third::mul")])
    catalog = look(acme=broken, user=user, third=user_of_user)
    assert said(catalog) == [("BAD_SPEC", "acme")]
    assert [text.split(" needs")[0] for text in catalog.findings[0].explains] == ["plugin third", "plugin user"]
    assert {row.status for row in catalog.plugins} == {"failed"}
    assert catalog.kernels == ()


def test_manifest_folder_that_is_none_is_refused(tmp_path):
    (finding,) = look(acme=plugin(muster_manifests=[tmp_path / "none"])).findings
    assert (finding.code, finding.subject) == ("BAD_SPEC", "acme")
    assert f"{tmp_path}/none is no folder; the usual cause is a wheel without it: declare its files" in finding.why


def test_manifest_folder_in_a_wheel_on_the_path_is_not_blamed_on_package_data(tmp_path):
    wheel = tmp_path / "acme-1.0-py3-none-any.whl"
    wheel.write_bytes(b"")
    (finding,) = look(acme=plugin(muster_manifests=[wheel / "acme" / "manifests"])).findings
    assert f"is no folder; it is in the archive {wheel}, and only modules can be imported from there" in finding.why
    assert "package data" not in finding.why


# plugins beside installed ones


@pytest.fixture
def provide(install, tmp_path, monkeypatch):
    """Install a distribution that offers one module as a plugin, both of one name; return its folder."""

    def provide(name, module):
        monkeypatch.setitem(sys.modules, f"{name}_on_disk", module)
        return install(tmp_path / name, name, text=f"[kernel_muster.v1]\n{name} = {name}_on_disk\n")

    return provide


def test_override_may_keep_the_alias_that_the_keys_owner_gives(provide):
    path = provide("acme", plugin(muster_contracts=[contract()], muster_kernels=[spec(aliases=("acme::old",))]))
    better = plugin(muster_kernels=[spec(aliases=("acme::old",), overrides="acme")])
    assert said(discover(path=[path], local={"better": better})) == []


@pytest.mark.parametrize("blocked", [(), ("acme",)])
@pytest.mark.parametrize("replaces", [{"overrides": "acme"}, {"replaces_module": ("acme", "acme")}])
def test_override_of_a_plugin_that_did_not_load_is_no_finding_of_its_own(provide, replaces, blocked):
    path = provide("acme", plugin(muster_kernels=raising(ImportError("no driver"))))
    better = plugin(muster_contracts=[contract()], muster_kernels=[spec(**replaces)])
    catalog = discover(path=[path], local={"better": better}, blocked=blocked)
    assert said(catalog) == ([] if blocked else [("PLUGIN_LOAD_FAILED", "acme")])
    assert [str(key) for key in catalog.by_key] == ["acme::mul"]


def test_contract_that_a_plugin_which_did_not_load_may_have_is_said_so(provide):
    path = provide("base", plugin(muster_contracts=raising(ImportError("no driver"))))
    catalog = discover(path=[path], local={"acme": plugin(muster_kernels=[spec()])})
    found = next(f for f in catalog.findings if f.code == "BAD_SPEC")
    assert "what base (failed) registers is not known" in found.why
    assert found.remedies[0] == "first repair the plugins that did not load"


def test_local_plugin_does_not_hide_an_installed_one(install, tmp_path, on_disk):
    catalog = discover(path=[install(tmp_path)], local={"acme": sound()})
    assert said(catalog) == [("PLUGIN_DUPLICATE", "acme")]
    assert catalog.kernels == ()


def opting(name="MUSTER_ACME_TURBO", **more):
    return plugin(muster_contracts=[contract()], muster_kernels=[spec(opt_in=name)], **more)


def turbo():
    return km.Lever(name="MUSTER_ACME_TURBO", kind="bool", default=False, doc="Turbo.")


@pytest.mark.parametrize("name", ["MUSTER_NOPE", "not a lever", "", "MUSTER_ACME_TURBOO"])
def test_opt_in_that_names_no_lever_is_refused(name):
    catalog = look(acme=opting(name, muster_levers=[turbo()]))
    assert said(catalog) == [("BAD_SPEC", "acme")]
    assert f"acme::mul: opt_in={name!r}, and nobody declares such a lever" in catalog.findings[0].why
    assert ("did you mean MUSTER_ACME_TURBO?" in catalog.findings[0].why) == (name == "MUSTER_ACME_TURBOO")
    assert catalog.kernels == ()


@pytest.mark.parametrize("levers", [{}, {"muster_levers": [turbo()]}], ids=["the host's", "its own"])
def test_opt_in_that_names_a_declared_lever_is_sound(levers):
    assert said(look(acme=opting("MUSTER_ACME_TURBO" if levers else "MUSTER_PREFER", **levers))) == []


def test_opt_in_may_be_a_lever_of_another_plugin_and_one_that_did_not_load_is_named(provide):
    assert said(look(acme=opting(), base=plugin(muster_levers=[turbo()]))) == []
    path = provide("base", plugin(muster_levers=raising(ImportError("no driver"))))
    found = next(f for f in discover(path=[path], local={"acme": opting()}).findings if f.code == "BAD_SPEC")
    assert "what base (failed) registers is not known" in found.why
    assert found.remedies[0] == "first repair the plugins that did not load"


class Answering(str):
    """Text that is equal to anything."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other):
        return True


def derived(item, **more):
    kind = type(f"Own{type(item).__name__}", (type(item),), more)
    return kind(**{one.name: getattr(item, one.name) for one in fields(item)})


def raising_key(spec):
    raise RuntimeError("no key")


LIARS = {
    "key that raises": ("muster_kernels", lambda: derived(spec(), kernel_key=property(raising_key)), "OwnKernelSpec"),
    "no problems": ("muster_kernels", lambda: derived(spec(archs=()), problems=lambda self: []), "OwnKernelSpec"),
    "contract": ("muster_contracts", lambda: derived(contract()), "OwnContract"),
    "tolerance": (
        "muster_contracts", lambda: replace(contract(), tolerance=derived(contract().tolerance)), "expected a Tolerance"
    ),
    "lever": ("muster_levers", lambda: derived(turbo()), "OwnLever"),
    "builder": ("muster_models", lambda: derived(km.ModelBuilder("a", ("b",), "partial", lambda *a: None)), "OwnModel"),
}  # fmt: skip


@pytest.mark.parametrize(("hook", "item", "why"), LIARS.values(), ids=LIARS)
def test_item_of_a_class_of_the_plugins_own_is_refused(hook, item, why):
    catalog = look(acme=plugin(**{hook: [item()]}))
    assert said(catalog) == [("BAD_SPEC", "acme")]
    assert f"{hook}()[0]" in catalog.findings[0].why
    assert why in catalog.findings[0].why


def backend(**members):
    return type("Backend", (), {"source_sha256": "00", "launch": lambda *given: None} | members)()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (property(lambda self: 1 / 0), "its name cannot be asked for: ZeroDivisionError"),
        (["x"], "name is ['x'], expected text"),
        (" ", "name is ' ', expected text"),
        (Answering("x"), "name is 'x', expected text"),
    ],
    ids=["raises", "list", "blank", "lies"],
)
def test_backend_without_a_name_is_refused(name, why):
    catalog = look(acme=plugin(muster_contracts=[contract()], muster_kernels=[spec(backend=backend(name=name))]))
    assert said(catalog) == [("BAD_SPEC", "acme")]
    assert catalog.findings[0].why == f"muster_kernels()[0] acme::mul: backend: {why}"


@pytest.mark.parametrize("digest", [b"\xff", None, property(lambda self: 1 / 0), property(lambda self: sys.exit())])
def test_backend_whose_digest_is_no_text_has_none_and_says_why(digest):
    digest, error = source_digest(backend(name="x", source_sha256=digest))
    assert (digest, error is None) == ("", False)


def test_item_is_what_it_was_when_it_was_returned_and_its_text_is_text():
    given = contract(Answering("acme_c"))
    one = spec(Answering("acme::mul"), contract=Answering("acme_c"), aliases=(Answering("acme::old"),))

    def kernels():
        yield one
        vars(given).update(cases=(), tolerance=None, signature=None)

    catalog = look(acme=plugin(muster_contracts=[given], muster_kernels=kernels))
    assert (said(catalog), len(catalog.contracts["acme_c"].cases)) == ([], 1)
    (found,) = catalog.kernels
    assert {type(text) for text in (found.spec.key, found.spec.contract, *found.spec.aliases)} == {str}
