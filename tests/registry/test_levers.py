"""Levers: one grammar, one precedence, and a finding for every error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_muster.registry.levers import CORE_LEVERS, Lever, Levers, Measured, read_levers
from kernel_muster.registry.service_variables import resembles_service

FAST = Lever(name="MUSTER_FAST", kind="bool", default=False, doc="Fast.", conflicts=("MUSTER_SLOW",))
SLOW = Lever(name="MUSTER_SLOW", kind="bool", default=True, doc="Slow by default.")
SIZE = Lever(name="MUSTER_SIZE", kind="int", default=4, minimum=-2, maximum=64, doc="Size.")
OPEN = Lever(name="MUSTER_OPEN", kind="int", default=None, doc="Any integer.")
MODE = Lever(name="MUSTER_MODE", kind="enum", default="auto", choices=("auto", "tiled"), doc="Mode.")
NAME = Lever(name="MUSTER_NAME", kind="text", default=None, doc="Name.")
TABLE = (*CORE_LEVERS, FAST, SLOW, SIZE, OPEN, MODE, NAME)


def read(*sources, **options):
    return read_levers(TABLE, sources, **options)


@pytest.mark.parametrize("read_it", [Levers.flag, Levers.setting, Levers.__getitem__])
def test_lever_that_nobody_declares_says_how_to_declare_it(read_it):
    said = "nobody declares a lever MUSTER_SIZ; did you mean MUSTER_SIZE?; a plugin that reads it returns a km.Lever"
    with pytest.raises(KeyError) as caught:
        read_it(read()[0], "MUSTER_SIZ")
    assert str(caught.value) == f"{said} from muster_levers"


@pytest.mark.parametrize("text", ["1", "true", "on", "TRUE", "On", " 1 "])
def test_bool_that_is_on(text):
    assert FAST.parse(text) is True


@pytest.mark.parametrize("text", ["0", "false", "off", "OFF", False])
def test_bool_that_is_off_zero_included(text):
    assert FAST.parse(text) is False


@pytest.mark.parametrize(
    ("lever", "raw"),
    [
        *((FAST, raw) for raw in ("yes", "no", "2", "", "y", "01", 2, 1.0, None, "tru")),
        *((SIZE, raw) for raw in ("65", "-3", "4.0", "0x10", "1e1", "", "four", "4 5", True, 4.0, "9" * 30, "٤")),
        *((OPEN, raw) for raw in ("1_000", "--1", "+", "1" * 19, None)),
        *((MODE, raw) for raw in ("Auto", "wide", "", "auto|tiled", 1, None)),
        *((NAME, raw) for raw in (1, True, None, 1.5)),
    ],
)  # fmt: skip
def test_value_outside_the_grammar_is_refused_with_the_grammar(lever, raw):
    with pytest.raises(ValueError, match="is not") as caught:
        lever.parse(raw)
    assert lever.grammar in str(caught.value)


def test_text_with_a_nul_is_refused():
    with pytest.raises(ValueError, match="has a NUL"):
        Lever(name="MUSTER_X", kind="text", default=None, doc="A file.").parse("a\0b")


@pytest.mark.parametrize(
    ("lever", "raw", "value"),
    [(SIZE, "-2", -2), (SIZE, "+64", 64), (SIZE, 7, 7), (SIZE, "007", 7), (OPEN, "-99", -99), (MODE, "tiled", "tiled"),
     (NAME, " a,b ", "a,b"), (FAST, True, True)],
)  # fmt: skip
def test_value_inside_the_grammar_is_read(lever, raw, value):
    found = lever.parse(raw)
    assert (found, type(found)) == (value, type(value))


@given(st.text(max_size=12) | st.integers() | st.floats() | st.booleans() | st.none())
def test_any_value_is_read_or_refused_and_never_anything_else(raw):
    for lever in TABLE:
        try:
            value = lever.parse(raw)
        except ValueError:
            continue
        assert type(value) is {"bool": bool, "int": int, "enum": str, "text": str}[lever.kind]


def test_first_source_that_sets_a_lever_wins():
    environment, manifest = {"MUSTER_SIZE": "8"}, {"MUSTER_SIZE": 16, "MUSTER_MODE": "tiled"}
    levers, findings = read(("environment", environment), ("manifest", manifest), ("table", {"MUSTER_OPEN": 3}))
    assert findings == []
    said = {s.lever.name: (s.value, s.origin) for s in levers.settings}
    assert said["MUSTER_SIZE"] == (8, "environment")
    assert said["MUSTER_MODE"] == ("tiled", "manifest")
    assert said["MUSTER_OPEN"] == (3, "table")
    assert said["MUSTER_FAST"] == (False, "built-in")


def test_value_equal_to_the_default_still_beats_a_later_source():
    levers, _ = read(("environment", {"MUSTER_SIZE": "4"}), ("manifest", {"MUSTER_SIZE": 16}))
    assert (levers["MUSTER_SIZE"], levers.setting("MUSTER_SIZE").origin) == (4, "environment")


def test_zero_in_the_environment_beats_a_manifest_that_turns_it_on():
    levers, _ = read(("environment", {"MUSTER_FAST": "0"}), ("manifest", {"MUSTER_FAST": True}))
    assert levers.flag("MUSTER_FAST") is False


@pytest.mark.parametrize("empty", ["", " ", "\t\n"])
def test_empty_value_is_unset(empty):
    levers, findings = read(
        ("environment", {"MUSTER_SIZE": empty, "MUSTER_FAST": empty}), ("manifest", {"MUSTER_SIZE": 9})
    )
    assert findings == []
    assert levers["MUSTER_SIZE"] == 9


def test_unknown_lever_is_a_finding_with_a_suggestion_and_its_origin():
    _, (found,) = read(("environment", {"MUSTER_SIZ": "1"}))
    assert (found.code, found.subject, found.where) == ("UNKNOWN_LEVER", "MUSTER_SIZ", ("environment",))
    assert "did you mean MUSTER_SIZE?" in found.why


def test_variables_of_others_are_not_levers():
    _, findings = read(("environment", {"PATH": "/bin", "MUSTERD_X": "1", "muster_size": "junk", "XMUSTER_SIZE": "x"}))
    assert findings == []


KUBERNETES = {
    "MUSTER_API_SERVICE_HOST": "10.96.0.12",
    "MUSTER_API_SERVICE_PORT": "443",
    "MUSTER_API_SERVICE_PORT_HTTP_METRICS": "9090",
    "MUSTER_API_PORT": "tcp://10.96.0.12:443",
    "MUSTER_API_PORT_443_TCP": "tcp://10.96.0.12:443",
    "MUSTER_API_PORT_443_TCP_PROTO": "tcp",
    "MUSTER_API_PORT_443_TCP_PORT": "443",
    "MUSTER_API_PORT_443_TCP_ADDR": "10.96.0.12",
}
SERVICES = [
    KUBERNETES,
    {name.replace("_API", ""): value for name, value in KUBERNETES.items()},
    {
        name: value.replace("//10.96.0.12", "//[fd00::a:1]").replace("10.96.0.12", "fd00::a:1")
        for name, value in KUBERNETES.items()
    },
    {"MUSTER_DNS_PORT_53_UDP": "udp://10.0.0.1:53", "MUSTER_DNS_PORT_53_UDP_PROTO": "udp"},
    {"MUSTER_DB_PORT": "sctp://172.17.0.2:3306"},
]  # fmt: skip


@pytest.mark.parametrize("values", SERVICES, ids=range(len(SERVICES)))
def test_service_variables_of_a_container_platform_are_no_levers(values):
    for origin in ("environment", "given"):
        assert read((origin, values))[1] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in KUBERNETES for value in ("1", "0", "off", "x", "443x")),
        *((name, "10.96.0.999") for name in KUBERNETES),
        ("MUSTER_NO_SERVICE_HOST", "localhost"), ("MUSTER_NO_SERVICE_PORT", "443"), ("MUSTER_NO_PORT", "8080"),
        ("MUSTER_PORTABLE_PORT", "udp"), ("MUSTER_PORT", "http://10.0.0.1:80"), ("MUSTER_PORT", "tcp://10.0.0.1"),
        ("MUSTER_PORT", "tcp://10.0.0.1:0"), ("MUSTER_PORT", "tcp://10.0.0.1:65536"), ("MUSTER_PORT", "tcp://host:80"),
        ("MUSTER_PORT_X", "tcp://10.0.0.1:80"), ("MUSTER_SERVICE_PORTABLE", "80"), ("MUSTER_SERVICE_HOSTS", "10.0.0.1"),
        ("MUSTER_API_PORT_80_TCP_PORT", "80"), ("MUSTER_API_PORT_80_TCP_ADDR", "10.0.0.1"),
    ],
)  # fmt: skip
def test_value_that_no_platform_sets_belongs_to_a_lever_that_nobody_declares(name, value):
    (found,) = read(("environment", {name: value}))[1]
    assert (found.code, found.subject) == ("UNKNOWN_LEVER", name)


@pytest.mark.parametrize("name", [name for name in KUBERNETES if name[-5:] in ("_PORT", "PROTO", "_ADDR", "TRICS")])
def test_part_of_a_service_counts_only_beside_the_rest_of_it(name):
    other = {"MUSTER_API_SERVICE_HOST": "off", "MUSTER_API_PORT_443_TCP": "off", name: KUBERNETES[name]}
    found = [f.subject for f in read(("environment", other))[1]]
    assert (name in found) is (name != "MUSTER_API_PORT")


@pytest.mark.parametrize(
    "name", ["MUSTER_SIZE", "MUSTER_SUPPORT", "MUSTER_IMPORTANT", "MUSTER_SERVICE_HOSTS", "MUSTER_PORTS"]
)
def test_name_that_only_resembles_a_service_is_a_lever(name):
    assert not resembles_service(name)


def test_no_declared_lever_resembles_a_service():
    assert not [lever.name for lever in TABLE if resembles_service(lever.name)]


def test_removed_lever_names_its_replacement():
    _, (found,) = read(("environment", {"MUSTER_OLD": "1"}), removed={"MUSTER_OLD": "MUSTER_MODE=tiled"})
    assert (found.code, found.subject) == ("REMOVED_LEVER", "MUSTER_OLD")
    assert found.remedies == ("use MUSTER_MODE=tiled instead",)


def test_everything_wrong_in_any_source_is_said_at_once():
    _, findings = read(
        ("environment", {"MUSTER_SIZE": "8", "MUSTER_NOPE": "1", "MUSTER_FAST": "yes"}),
        ("manifest", {"MUSTER_SIZE": 999, "MUSTER_MODE": "wide"}),
    )
    assert [(f.code, f.subject, f.where) for f in findings] == [
        ("BAD_LEVER", "MUSTER_FAST", ("environment",)),
        ("UNKNOWN_LEVER", "MUSTER_NOPE", ("environment",)),
        ("BAD_LEVER", "MUSTER_MODE", ("manifest",)),
        ("BAD_LEVER", "MUSTER_SIZE", ("manifest",)),
    ]


@pytest.mark.parametrize(
    ("values", "conflict"),
    [
        ({"MUSTER_FAST": "1", "MUSTER_SLOW": "1"}, True),
        ({"MUSTER_FAST": "1", "MUSTER_SLOW": "0"}, False),
        ({"MUSTER_FAST": "0", "MUSTER_SLOW": "1"}, False),
        ({"MUSTER_FAST": "1"}, False),  # MUSTER_SLOW is on by default only
    ],
)
def test_conflict_is_two_levers_both_set_on_purpose_and_both_on(values, conflict):
    _, findings = read(("environment", values))
    assert [f.code for f in findings] == (["LEVER_CONFLICT"] if conflict else [])


def test_conflict_across_sources_names_both_origins():
    _, (found,) = read(("environment", {"MUSTER_FAST": "1"}), ("manifest", {"MUSTER_SLOW": True}))
    assert found.where == ("environment", "manifest")
    assert "MUSTER_FAST=True contradicts MUSTER_SLOW=True" in found.why


def test_snapshot_does_not_follow_its_source():
    values = {"MUSTER_SIZE": "8"}
    levers, _ = read(("given", values))
    values["MUSTER_SIZE"] = "9"
    assert levers["MUSTER_SIZE"] == 8
    with pytest.raises(TypeError):
        levers["MUSTER_SIZE"] = 9


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"name": "FAST"}, "does not match"),
        ({"name": "MUSTER_fast"}, "does not match"),
        ({"kind": "float"}, "expected bool, int, enum or text"),
        ({"kind": "enum"}, "enum needs them"),
        ({"choices": ("a",)}, "enum needs them"),
        ({"doc": " "}, "doc is empty"),
        ({"minimum": True}, "minimum is True, expected an integer or None"),
        ({"maximum": "2"}, "maximum is '2', expected an integer or None"),
        ({"kind": "int", "default": 1, "maximum": 2.5}, "maximum is 2.5, expected an integer or None"),
        ({"kind": "int", "default": None, "minimum": 3, "maximum": 2}, "minimum 3 is above maximum 2"),
        ({"keys": "acme::norm"}, "keys are 'acme::norm', expected a tuple of module::func"),
        ({"keys": ("acme::norm", "acme")}, "in which * stands for any letters"),
        ({"keys": ("acme::norm|",)}, "in which * stands for any letters"),
        ({"measured": [Measured("A")]}, "expected a tuple of Measured"),
        ({"measured": ("A1",)}, "measured is ('A1',), expected a tuple of Measured"),
        ({"measured": (Measured("A"),)}, "measured goes with evidence, which is empty"),
        ({"evidence": "1.2x", "measured": (Measured(" "),)}, "device is ' ', expected the name of a device"),
        ({"evidence": "1.2x", "measured": (Measured("A", {"acme::norm": "b"}),)}, "module::func -> sha256"),
        ({"evidence": "1.2x", "measured": (Measured("A", {"norm": "a" * 64}),)}, "module::func -> sha256"),
        ({"evidence": "1.2x", "measured": (Measured("A", ["acme::norm"]),)}, "module::func -> sha256"),
    ],
)
def test_malformed_declaration_is_named(options, problem):
    lever = Lever(**({"name": "MUSTER_X", "kind": "bool", "default": False, "doc": "X."} | options))
    assert problem in "; ".join(lever.problems())


@pytest.mark.parametrize(
    ("device", "digests", "holds"),
    [
        ("A1", {"a::a": "1" * 64, "a::b": "2" * 64}, True),
        ("A2", {"a::a": "1" * 64, "a::b": "2" * 64}, False),
        ("A1", {"a::a": "1" * 64}, False),
        ("A1", {"a::a": "1" * 64, "a::b": "3" * 64}, False),
    ],
)
def test_measured_figures_hold_for_one_device_and_all_their_kernels(device, digests, holds):
    measured = Measured("A1", {"a::a": "1" * 64, "a::b": "2" * 64})
    lever = Lever(name="MUSTER_X", kind="int", default=1, doc="X.", evidence="1.2x", measured=(measured,))
    assert lever.problems() == []
    assert measured.holds(device, lambda key: digests.get(key, "")) is holds
    assert not Measured("A1").holds(device, lambda key: digests.get(key, ""))
    settings, _ = read_levers([lever], ())
    assert settings.setting("MUSTER_X").is_assumed(device, lambda key: digests.get(key, "")) is not holds


@pytest.mark.parametrize("lever", TABLE, ids=lambda lever: lever.name)
def test_default_of_every_lever_fits_its_own_grammar(lever):
    assert lever.problems() == []
    if lever.default is not None:
        assert lever.parse(lever.default) == lever.default


def test_given_name_without_the_prefix_is_unknown_and_the_environments_is_no_lever():
    lever = Lever(name="MUSTER_QKV_ARM", kind="text", default=None, doc="Arm.")
    _, (finding,) = read_levers([lever], [("given", {"QKV_ARM": "wide"})])
    assert (finding.code, finding.subject) == ("UNKNOWN_LEVER", "QKV_ARM")
    assert finding.why.endswith("; did you mean MUSTER_QKV_ARM?")
    assert read_levers([lever], [("environment", {"QKV_ARM": "wide"})])[1] == []


def test_effect_is_told_in_words():
    kill = Lever(name="MUSTER_NO_X", kind="bool", default=False, doc="Kill.", effects={False: "kept", True: "dropped"})
    levers, _ = read_levers([kill], [("given", {"MUSTER_NO_X": "0"})])
    assert levers.setting("MUSTER_NO_X").effect == "kept"


@pytest.mark.parametrize(("default", "value"), [("off", False), ("1", True), (0, False)])
def test_default_is_read_by_the_grammar_of_the_environment(default, value):
    lever = Lever(name="MUSTER_TEXT", kind="bool", default=default, doc="A default as text.")
    levers, findings = read_levers([*CORE_LEVERS, lever], [])
    assert (levers["MUSTER_TEXT"], findings) == (value, [])


@pytest.mark.parametrize("name", ["MUSTER_ACME_PORT", "MUSTER_PORT_X", "MUSTER_ACME_SERVICE_HOST"])
def test_lever_that_would_be_ignored_as_noise_cannot_be_declared(name):
    (problem,) = Lever(name=name, kind="int", default=1, doc="A port.").problems()
    assert "resembles a platform's service variable" in problem


@pytest.mark.parametrize(
    ("pattern", "key", "is_named"),
    [
        ("acme::norm", "acme::norm", True),
        ("acme::norm", "acme::norm_2", False),
        ("acme::*", "acme::norm_2", True),
        ("acme*::n*m", "acme_2::norm", True),
        ("acme::a|acme::b", "acme::b", True),
        ("acme::a|acme::b", "acme::c", False),
    ],
)
def test_keys_of_a_lever_are_keys_patterns_or_several(pattern, key, is_named):
    lever = Lever(name="MUSTER_X", kind="bool", default=False, doc="X.", keys=("other::x", pattern))
    assert lever.problems() == []
    assert lever.names(key) is is_named
