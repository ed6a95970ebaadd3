import os
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest
from kernel_muster.MODEL_toml import check_levers, load_manifest
from kernel_muster.MODEL_toml.loader import MOST_BYTES
from kernel_muster.registry.keys import KernelKey
from kernel_muster.registry.levers import Lever

Problems = Callable[..., list[tuple[str, int, str]]]
Write = Callable[..., Path]

FULL = """
schema = 1
[model]
name = "tiny"
hf_id = "someone/Tiny"
quant = "nvfp4"
match_names = ["tiny"]
[[model_types]]
model_type = "tiny_type"
hidden_size = 64
[defaults]
MUSTER_MOE_GROUPED_DECODE = false
[expected_absent.w4a4]
w4a4_gemm = "shipped only with another model's tree"
[expected_absent.w4a16.w4a16_gemm_t_k64_n64_p3]
reason = "narrow-N twin not ported to this chip"
archs = ["sm_100a"]
quants = ["nvfp4"]
levers = ["MUSTER_X=1"]
until = 2027-06-30
[expected_present.moe]
moe_sort_by_expert = "grouped decode is the main path"
[target."sm_90a".expected_absent.w4a4]
other = "not for Hopper, which has no FP4 tensor cores"
[target.cpu.expected_present.w4a16]
w4a16_gemm = "every model runs it"
[sampling.thinking]
temperature = 0.6
[behavior]
anything = ["goes", 1]
[dflash]
gamma = 16
[kernel]
deep = { a = { b = 1 } }
[x-other-tool]
level = "any"
"""


def test_load_manifest_of_the_whole_format_gives_everything(write: Write) -> None:
    file = write(FULL)
    manifest, findings = load_manifest(file)
    assert findings == []
    assert manifest is not None
    assert (manifest.name, manifest.hf_id, manifest.quant) == ("tiny", "someone/Tiny", "nvfp4")
    assert (manifest.path, manifest.match_names, manifest.model_type) == (file, ("tiny",), "tiny_type")
    assert manifest.defaults == {"MUSTER_MOE_GROUPED_DECODE": False}
    short, long, hopper = manifest.waivers
    assert (short.key, short.archs, short.until) == (KernelKey("w4a4", "w4a4_gemm"), (), None)
    assert short.reason == "shipped only with another model's tree"
    assert short.where == f"{file}:14"
    assert (long.archs, long.quants, long.levers) == (("sm_100a",), ("nvfp4",), ("MUSTER_X=1",))
    assert (long.until, long.where) == (date(2027, 6, 30), f"{file}:15")
    assert (hopper.key, hopper.archs, hopper.where) == (KernelKey("w4a4", "other"), ("sm_90a",), f"{file}:24")
    assert hopper.dotted == "target.sm_90a.expected_absent.w4a4.other"
    sort, cpu = manifest.expected_present
    assert (sort.key, sort.archs, sort.where) == (KernelKey("moe", "moe_sort_by_expert"), (), f"{file}:22")
    assert (cpu.key, cpu.archs) == (KernelKey("w4a16", "w4a16_gemm"), ("cpu",))
    assert manifest.sampling == {"thinking": {"temperature": 0.6}}
    assert manifest.behavior == {"anything": ["goes", 1]}
    assert manifest.dflash == {"gamma": 16}
    assert manifest.kernel == {"deep": {"a": {"b": 1}}}
    assert manifest.extensions == {"x-other-tool": {"level": "any"}}
    assert manifest.where("model", "quant") == f"{file}:6"


def test_load_manifest_without_schema_reads_version_one(write: Write, minimal: str) -> None:
    manifest, findings = load_manifest(write(minimal))
    assert findings == []
    assert manifest is not None
    assert manifest.document.schema_version == 1


# text after the minimal manifest (3 lines) -> subject, line, the whole sentence
BAD = [
    (
        '[expected_abscent.w4a4]\nf = "why"',
        "expected_abscent",
        4,
        "a manifest has no table 'expected_abscent'; did you mean expected_absent or expected_present?",
    ),
    ("hiden_size = 5", "model.hiden_size", 4, "[model] has no key 'hiden_size'; did you mean hidden_size?"),
    ("top_k = 5", "model.top_k", 4, "[model] has no key 'top_k'"),
    (
        "[model.attention]\nheads = 3\nkv_heads = 2\nhead_dim = 8",
        "model.attention",
        4,
        "heads 3 is no multiple of kv_heads 2",
    ),
    (
        "[model.moe]\nexperts = true\ntop_k = 0\nintermediate_size = 4",
        "model.moe.experts",
        5,
        "expected an integer, got a boolean true",
    ),
    ("[model.mtp]\nlayers = 0", "model.mtp.layers", 5, "expected at least 1, got 0"),
    ("[model.mtp]\nlayers = 1.0", "model.mtp.layers", 5, "expected an integer, got a number 1.0"),
    ("[model.rope]\ntheta = nan", "model.rope.theta", 5, "expected a finite number, got a number nan"),
    ('ffn = "gelu"', "model.ffn", 4, "expected 'dense', 'moe' or 'none', got 'gelu'"),
    ('match_names = [""]', "model.match_names[0]", 4, "'' is blank or not printable, expected text"),
    ("match_names = [\n'a',\n' ']", "model.match_names[1]", 6, "' ' is blank or not printable, expected text"),
    ("match_names = 'a'", "model.match_names", 4, "expected a list, got text 'a'"),
    ("match_names = ['a', 'a']", "model.match_names", 4, "'a' stands in the list more than once"),
    ("[[model_types]]\nhidden_size = 5", "model_types[0].model_type", 4, "[model_types[0]] lacks model_type"),
    (
        '[[model_types]]\nmodel_type = "a"\n[[model_types]]\nmodel_type = "a"',
        "model_types[1]",
        6,
        "the same row as model_types[0]",
    ),
    ("[defaults]\nMOE = true", "defaults.MOE", 5, "'MOE' does not match MUSTER_[A-Z][A-Z0-9_]*"),
    (
        "[defaults]\nMUSTER_SERVICE_PORT = 1",
        "defaults.MUSTER_SERVICE_PORT",
        5,
        "MUSTER_SERVICE_PORT resembles a platform's service variable, and no lever has such a name",
    ),
    (
        "[defaults]\nMUSTER_X = 1.5",
        "defaults.MUSTER_X",
        5,
        "expected a lever's value (a boolean, an integer or text), got a number",
    ),
    (
        "[defaults]\nMUSTER_X = ' '",
        "defaults.MUSTER_X",
        5,
        "expected a lever's value (a boolean, an integer or text), got blank text",
    ),
    ('[expected_absent.W4]\nf = "why not"', "expected_absent.W4", 4, "'W4' does not match [a-z][a-z0-9_]*"),
    ('[expected_absent.w4]\n"a-b" = "why not"', "expected_absent.w4.a-b", 5, "'a-b' does not match [a-z][a-z0-9_]*"),
    ('[expected_absent]\nw4 = "why"', "expected_absent.w4", 5, "expected a table, got text 'why'"),
    ("[expected_absent.w4]\nf = 3", "expected_absent.w4.f", 5, "expected a reason or a table, got an integer 3"),
    (
        "[expected_absent.w4.f]\narchs = ['sm_90a']",
        "expected_absent.w4.f.reason",
        4,
        "[expected_absent.w4.f] lacks reason",
    ),
    (
        "[expected_absent.w4.f]\nreason = 'why not'\narchs = ['sm_91a']",
        "expected_absent.w4.f.archs[0]",
        6,
        "'sm_91a' names no known compute capability; known: sm_75, sm_80, sm_86, sm_87, sm_88, sm_89, "
        "sm_90a, sm_100a, sm_103a, sm_110a, sm_120a, sm_121a",
    ),
    (
        "[expected_absent.w4.f]\nreason = 'why not'\narchs = []",
        "expected_absent.w4.f.archs",
        6,
        "the list is empty; leave the key out instead",
    ),
    (
        "[expected_absent.w4.f]\nreason = 'why not'\nquants = ['nvfp5']",
        "expected_absent.w4.f.quants[0]",
        6,
        "'nvfp5' is no quantisation: expected nvfp4, mxfp4, fp8, bf16; did you mean nvfp4?",
    ),
    (
        "[expected_absent.w4.f]\nreason = 'why not'\nlevers = ['MUSTER_X']",
        "expected_absent.w4.f.levers[0]",
        6,
        "'MUSTER_X' does not match (MUSTER_[A-Z][A-Z0-9_]*)=(\\S.*)",
    ),
    (
        "[expected_absent.w4.f]\nreason = 'why not'\nlevers = ['MUSTER_X=1', 'MUSTER_X=2']",
        "expected_absent.w4.f.levers",
        6,
        "MUSTER_X is named more than once, but all entries must hold at the same time",
    ),
    (
        "[expected_absent.w4.f]\nreason = 'why not'\nuntil = '2027-06-30'",
        "expected_absent.w4.f.until",
        6,
        "expected a date such as 2027-06-30 (no quotes, no time), got text",
    ),
    (
        "[expected_absent.w4.f]\nreason = 'why not'\nuntil = 2027-06-30T00:00:00Z",
        "expected_absent.w4.f.until",
        6,
        "expected a date such as 2027-06-30 (no quotes, no time), got a datetime",
    ),
    (
        "[expected_present.w4.f]\nreason = 'why not'\nuntil = 2027-06-30",
        "expected_present.w4.f.until",
        6,
        "[expected_present.w4.f] has no key 'until'",
    ),
    (
        "[expected_absent.w4]\nf = 'why not'\n[expected_present.w4]\nf = 'always'",
        "expected_present.w4.f",
        7,
        "w4::f is both expected absent and expected present: expected_absent.w4.f applies at the same time",
    ),
    (
        "[expected_absent.w4]\nf = 'why not'\n[target.sm_90a.expected_absent.w4]\nf = 'again'",
        "target.sm_90a.expected_absent.w4.f",
        7,
        "w4::f stands twice: expected_absent.w4.f applies at the same time",
    ),
    (
        "[expected_absent.w4.f]\nreason = 'why not'\nuntil = 2020-01-01\nlevers = ['MUSTER_X=16']\n"
        "[target.cpu.expected_absent.w4.f]\nreason = 'again'\nlevers = ['MUSTER_X=016']",
        "target.cpu.expected_absent.w4.f",
        8,
        "w4::f stands twice: expected_absent.w4.f applies at the same time",
    ),
    (
        "[expected_absent.w4.f]\nreason = 'why not'\nlevers = ['MUSTER_X=+16']\n"
        "[expected_present.w4.f]\nreason = 'always'\nlevers = ['MUSTER_X=016']",
        "expected_present.w4.f",
        7,
        "w4::f is both expected absent and expected present: expected_absent.w4.f applies at the same time",
    ),
    (
        "[expected_absent.w4.f]\nreason = 'why not'\nlevers = ['MUSTER_X=1', 'MUSTER_Y=2', 'MUSTER_X=off']",
        "expected_absent.w4.f.levers",
        6,
        "'MUSTER_X=1' and 'MUSTER_X=off' never hold together",
    ),
    (
        "[target.sm_90a.expected_absent.w4.f]\nreason = 'why not'\narchs = ['sm_100a']",
        "target.sm_90a.expected_absent.w4.f.archs",
        6,
        "[target.sm_90a] is the scope already",
    ),
    (
        "[target.hopper.expected_absent.w4]\nf = 'why not'",
        "target.hopper",
        4,
        "'hopper' is not an architecture: expected sm_<number>, for example sm_90a",
    ),
    (
        "[target.sm_90a.expected_abs.w4]\nf = 'why not'",
        "target.sm_90a.expected_abs",
        4,
        "[target.sm_90a] has no table 'expected_abs'; did you mean expected_absent?",
    ),
    ("[x-]\na = 1", "x-", 4, "no table name: expected x-<name> in small letters and digits"),
    ("[sampling]\ntop_p = 0.5", "sampling.top_p", 5, "expected a table, got a number 0.5"),
    ("[kernel]\nbig = 0x1" + "0" * 4000, "kernel.big", 5, "an integer of 16001 bits does not fit into 64 bits"),
]


@pytest.mark.parametrize(("extra", "subject", "line", "why"), BAD, ids=[row[1] + f"-{i}" for i, row in enumerate(BAD)])
def test_load_manifest_with_one_mistake_says_what_and_where(
    problems: Problems, minimal: str, extra: str, subject: str, line: int, why: str
) -> None:
    found = problems(minimal + extra)
    assert (subject, line, f"{subject}: {why}") in found


@pytest.mark.parametrize("archs", ["['sm90a']", "[3]", "['sm_90a', '', 'hopper']"])
def test_list_whose_items_are_wrong_is_not_called_empty(problems: Problems, minimal: str, archs: str) -> None:
    found = problems(f"{minimal}[expected_absent.w4.f]\nreason = 'why not'\narchs = {archs}")
    assert found
    assert all(subject.startswith("expected_absent.w4.f.archs[") for subject, _, _ in found)


REASONS = ["", " ", "?", "???", "todo", "TODO", "To-Do", "tbd.", "N/A", "n.a.", "None", "fixme!", "...",
           "TODO: explain", "absent", " missing. ",
           "\uff34\uff2f\uff24\uff2f"]  # fmt: skip


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("form", ['[expected_{t}.w4]\nf = "{r}"', '[expected_{t}.w4.f]\nreason = "{r}"'])
@pytest.mark.parametrize("table", ["absent", "present"])
def test_load_manifest_with_an_empty_reason_is_refused(
    problems: Problems, minimal: str, reason: str, form: str, table: str
) -> None:
    (found,) = problems(minimal + form.replace("{t}", table).replace("{r}", reason))
    assert "the reason" in found[2]
    assert any(f"is {what}, expected why" in found[2] for what in ("blank", "a placeholder", "one word"))


@pytest.mark.parametrize(
    "reason",
    ["None of its layers is dense", "\u7f3a\u5c11\u5185\u6838", "a todo list kernel", "not available on sm_90a"],
)
def test_load_manifest_with_a_reason_that_only_looks_empty_passes(write: Write, minimal: str, reason: str) -> None:
    assert load_manifest(write(f'{minimal}[expected_absent.w4]\nf = "{reason}"'))[1] == []


def test_load_manifest_with_control_characters_in_a_reason_is_refused(problems: Problems, minimal: str) -> None:
    (found,) = problems(minimal + '[expected_absent.w4]\nf = "red \\u001b[31m text"')
    assert found[2] == "expected_absent.w4.f: the reason holds control characters, expected one printable sentence"


def test_load_manifest_reports_all_problems_at_once_in_order_of_lines(problems: Problems) -> None:
    found = problems(
        '[model]\nname = "bad name"\nquant = "int4"\n[expected_absent.w4]\nf = "todo"\ng = 1\n'
        "[expected_present.w4]\nf = 'x y'\n[surprise]\n"
    )
    assert [(subject, line) for subject, line, _ in found] == [
        ("model.name", 2),
        ("model.quant", 3),
        ("expected_absent.w4.f", 5),
        ("expected_absent.w4.g", 6),
        ("expected_present.w4.f", 8),
        ("surprise", 9),
    ]


def test_load_manifest_with_a_key_in_the_wrong_table_says_where_it_belongs(write: Write, minimal: str) -> None:
    _, findings = load_manifest(write(minimal + "top_k = 8\nschema = 1\n"))
    assert [finding.remedies for finding in findings] == [
        ("'schema' belongs at the top of the file, before the first table",),
        ("'top_k' belongs in [model.moe]",),
    ] or [finding.remedies for finding in findings] == [
        ("'top_k' belongs in [model.moe]",),
        ("'schema' belongs at the top of the file, before the first table",),
    ]


def test_load_manifest_with_a_whole_key_as_func_says_how_to_write_it(write: Write, minimal: str) -> None:
    _, findings = load_manifest(write(minimal + '[expected_absent]\n"w4a4::w4a4_gemm" = "why not"\n'))
    remedies = {remedy for finding in findings for remedy in finding.remedies}
    assert '[expected_absent.w4a4] w4a4_gemm = "<why>"' in " ".join(remedies)


@pytest.mark.parametrize("version", ["2", '"1"', "true", "1.0"])
def test_load_manifest_with_another_schema_is_refused(problems: Problems, minimal: str, version: str) -> None:
    (found,) = problems(f"schema = {version}\n{minimal}")
    assert found[:2] == ("schema", 1)
    assert found[2].startswith("schema: expected 1, got")


@pytest.mark.parametrize("number", [0, -1, 4097, 2_000_000_000, 10**30])
def test_load_manifest_with_a_number_of_layers_that_no_model_has_is_refused(problems: Problems, number: int) -> None:
    found = problems(f'[model]\nname = "tiny"\nquant = "nvfp4"\nnum_layers = {number}\n')
    assert {row[:2] for row in found} == {("model.num_layers", 4)}


def test_load_manifest_without_model_names_what_is_missing(problems: Problems) -> None:
    assert problems("") == [("model", 1, "model: the manifest lacks [model]")]


@pytest.mark.parametrize(
    ("scope", "other"),
    [
        ("archs = ['sm_100a']", "archs = ['sm_90a']"),
        ("quants = ['nvfp4']", "quants = ['fp8']"),
        ("levers = ['MUSTER_X=1']", "levers = ['MUSTER_X=0']"),
    ],
)
def test_absent_and_present_in_scopes_that_never_meet_pass(write: Write, minimal: str, scope: str, other: str) -> None:
    text = f"[expected_absent.w4.f]\nreason = 'why not'\n{scope}\n[expected_present.w4.f]\nreason = 'as ever'\n{other}"
    assert load_manifest(write(f"{minimal}{text}"))[1] == []
    _, findings = load_manifest(write(f"{minimal}{text}".replace(other, scope)))
    assert "both expected absent and expected present" in findings[0].why


def test_load_manifest_with_one_key_twice_in_one_table_names_the_second_line(problems: Problems, minimal: str) -> None:
    (found,) = problems(minimal + "[expected_absent.w4]\nf = 'why not'\n[expected_absent.w4.f]\nreason = 'why not'")
    assert found[:2] == ("FILE", 6)
    assert found[2].startswith("FILE: it is not valid TOML: ")
    (found,) = problems(minimal + "[expected_absent.w4]\nf = 'why not'\nf = 'again'")
    assert found[1] == 6


HOSTILE = {
    "not UTF-8": (b'[model]\nname = "\xff"', "it is not UTF-8: byte 0xff at offset 16"),
    "NUL": (b'[model]\nname = "a\0"', "it is not valid TOML: "),
    "broken": (b"[model\n", "it is not valid TOML: "),
    "deep": (b"a = " + b"[" * 50_000, "it is nested too deeply: "),
    "deep tables": (b"a = " + b"{a=" * 50_000, "it is nested too deeply: "),
    "deep key": (b"a" + b".a" * 50_000 + b" = 1", "it is nested too deeply: "),
    "integer": (b"a = " + b"9" * 5000, "it is not valid TOML: "),
    "date": (b"a = 2027-13-45", "it is not valid TOML: "),
    "huge": (b"#" * (MOST_BYTES + 1), f"it has more than {MOST_BYTES} bytes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_load_manifest_of_hostile_bytes_gives_one_finding(problems: Problems, name: str) -> None:
    raw, why = HOSTILE[name]
    (found,) = problems(raw)
    assert found[2].startswith(f"FILE: {why}")


def test_load_manifest_of_no_file_says_so(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, why in (
        (tmp_path, "it is a directory, expected a file"),
        (tmp_path / "none.toml", "there is no such file"),
        (tmp_path / "a\0b", "it cannot be read: "),
        (tmp_path / ("n" * 5000), "it cannot be read: "),
        (tmp_path / "pipe", "it is no regular file"),
    ):
        manifest, (finding,) = load_manifest(path)
        assert manifest is None
        assert finding.why.startswith(f"{path}: {why}")


def test_load_manifest_with_byte_order_mark_and_crlf_counts_the_same_lines(write: Write, minimal: str) -> None:
    manifest, findings = load_manifest(write(b"\xef\xbb\xbf" + minimal.replace("\n", "\r\n").encode()))
    assert findings == []
    assert manifest is not None
    assert manifest.where("model", "quant").endswith(":3")


def test_load_manifest_with_a_key_in_the_place_of_a_module_says_it_once(write: Write, minimal: str) -> None:
    _, findings = load_manifest(write(f"{minimal}[expected_absent]\n'w4::f' = 'nobody ships it'"))
    (finding,) = findings
    assert finding.why == "expected_absent.'w4::f': 'w4::f' does not match [a-z][a-z0-9_]*"
    assert finding.remedies == ('write it as [expected_absent.w4] f = "<why>"',)


LEVERS = (
    Lever(name="MUSTER_FAST", kind="bool", default=None, doc="x"),
    Lever(name="MUSTER_MODE", kind="enum", choices=("a", "b"), default="a", doc="x"),
)


@pytest.mark.parametrize(
    ("scope", "why"),
    [
        ("MUSTER_FAST=1", None),
        ("MUSTER_MODE=b", None),
        ("MUSTER_FATS=1", "nobody declares a lever MUSTER_FATS; did you mean MUSTER_FAST?"),
        ("MUSTER_MODE=c", "MUSTER_MODE: 'c' is not a|b"),
    ],
)
def test_load_manifest_with_declared_levers_checks_lever_scopes(
    write: Write, minimal: str, scope: str, why: str | None
) -> None:
    file = write(f"{minimal}[expected_absent.w4.f]\nreason = 'why not'\nlevers = ['{scope}']")
    manifest, findings = load_manifest(file, levers=LEVERS)
    if why is None:
        assert findings == []
        return
    assert manifest is None
    (finding,) = findings
    assert finding.why == f"expected_absent.w4.f.levers[0]: {why}"
    assert finding.where == (f"{file}:6",)
    unchecked, _ = load_manifest(file)
    assert unchecked is not None
    assert check_levers(unchecked, LEVERS) == findings


@pytest.mark.parametrize("table", ["expected_absent", "expected_present", 'target."sm_80".expected_absent'])
def test_load_manifest_checks_lever_scopes_beside_other_problems(write: Write, minimal: str, table: str) -> None:
    scopes = "quants = ['nvfp']\nlevers = ['MUSTER_FATS=1', 'fast', 'MUSTER_MODE=c']"
    _, findings = load_manifest(write(f"{minimal}[{table}.w4.f]\nreason = 'why not'\n{scopes}"), levers=LEVERS)
    assert [finding.subject.rpartition(".f.")[2] for finding in findings] == [
        "quants[0]",
        "levers[0]",
        "levers[1]",
        "levers[2]",
    ]
    assert "did you mean MUSTER_FAST?" in findings[1].why
