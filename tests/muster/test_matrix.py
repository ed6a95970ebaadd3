"""``muster matrix``: models by targets."""

import json
from typing import Any

import pytest
from kernel_muster.audit.matrix import Cell, Matrix, headline


@pytest.fixture
def matrix(cli: Any) -> Any:
    """Run the matrix over manifests of the plugin's model, one a name, on cpu and sm_90a."""

    def run(*arguments: object, names: tuple[str, ...] = ("one", "two"), more: str = "") -> Any:
        folder = cli.folder / "models"
        for name in names:
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / "MODEL.toml").write_text(cli.manifest(more, name).read_text())
        given = ("--targets", "cpu,sm_90a") if "--targets" not in arguments else ()
        return cli("matrix", "--manifests", folder, *given, *arguments)

    return run


def test_matrix_of_models_that_pass_exits_0_with_a_cell_each(cli, matrix):
    cli.acme("acme::double")
    ran = matrix("--targets", "cpu", "--format", "json")
    assert ran.code == 0
    assert [(c["model"], c["target"], c["verdict"]) for c in ran.json["cells"]] == [
        ("one", "cpu", "passed"),
        ("two", "cpu", "passed"),
    ]
    assert (ran.json["schema"], ran.json["passed"], ran.json["groups"]) == ("kernel-muster/matrix", True, [])


def test_matrix_with_a_refused_cell_exits_1_and_folds_what_cells_share(cli, matrix):
    cli.acme("acme::double", "acme::twice", "acme::hopper", "acme::gone")
    ran = matrix("--stage", "registered")
    assert ran.code == 1
    lines = ran.out.splitlines()
    assert lines[0] == lines[-1] == "REFUSED: 2 models x 2 targets: 4 refused"
    assert "  one    REFUSED 2  REFUSED 3" in lines
    assert lines[lines.index("To act on: one, two on cpu, sm_90a") + 1] == "  MISSING: acme::gone"
    assert lines[lines.index("To act on: one, two on cpu") + 1] == "  WRONG_ARCH: acme::hopper"
    assert lines[lines.index("To act on: one, two on sm_90a") + 1] == "  MISSING: acme::double, acme::twice"
    assert ran.out.count("acme::gone") == 1


def test_matrix_says_which_cells_stay_below_the_stage_asked_for(cli, matrix):
    cli.acme("acme::double")
    ran = matrix("--targets", "cpu", "--stage", "loaded")
    assert ran.out.splitlines()[0] == "PASSED: 2 models x 1 target: 2 passed"
    cell = {"verdict": "passed", "stage": "compiled", "keys": 1, "refusing": 0, "warnings": 1, "set_hash": ""}
    below = Cell(model="one", target="sm_90a", stage_asked="proven", **cell)
    assert below.text == "compiled, not proven (1 warning)"
    found = Matrix(("one", "two"), ("sm_90a",), (below, Cell(model="two", target="sm_90a", **cell)))
    assert headline(found) == "PASSED: 2 models x 1 target: 2 passed, 1 of them below stage proven"


def test_matrix_json_and_markdown_say_the_same(cli, matrix):
    cli.acme("acme::hopper", "acme::gone")
    groups = matrix("--stage", "registered", "--format", "json").json["groups"]
    audit = f"muster audit one --target cpu --stage registered --manifests {cli.folder / 'models'}"
    assert groups == [
        {"cells": ["one, two on cpu, sm_90a"], "keys": {"MISSING": ["acme::gone"]}, "audit": audit},
        {"cells": ["one, two on cpu"], "keys": {"WRONG_ARCH": ["acme::hopper"]}, "audit": audit},
    ]
    markdown = matrix("--stage", "registered", "--format", "markdown").out
    assert "| MODEL | cpu | sm\\_90a |" in markdown
    assert "- WRONG\\_ARCH: acme::hopper" in markdown


def test_matrix_takes_the_models_that_are_named(cli, matrix):
    cli.acme("acme::double")
    ran = matrix("--models", "two,one,two", "--targets", "cpu", "--format", "json")
    assert ran.json["models"] == ["two", "one"]


def test_matrix_of_an_unknown_model_refuses_its_cells(cli, matrix):
    cli.acme("acme::double")
    ran = matrix("--models", "one,nobody", "--targets", "cpu", "--format", "json")
    assert ran.code == 1
    assert [c["causes"] for c in ran.json["cells"]] == [[], [["UNKNOWN_MODEL", "'nobody'"]]]
    assert [c["unknown"] for c in ran.json["cells"]] == ["", "no manifest is named 'nobody'"]
    text = matrix("--models", "one,twoo").out
    assert text.count("no manifest is named 'twoo'; did you mean two?") == 1


def test_matrix_profile_and_stage_reach_every_cell(cli, matrix):
    cli.acme("acme::double")
    waiver = '[expected_absent.acme]\nnever = "not asked for by this model at all"'
    assert matrix("--targets", "cpu", more=waiver).code == 0
    refused = matrix("--targets", "cpu", "--profile", "qualify", "--format", "json", more=waiver)
    assert {cause[0] for c in refused.json["cells"] for cause in c["causes"]} == {"UNUSED_WAIVER"}
    proven = matrix("--targets", "cpu", "--stage", "proven", "--format", "json")
    assert [c["stage"] for c in proven.json["cells"]] == ["proven", "proven"]


def test_matrix_says_which_audit_tells_why_and_what_warns(cli, matrix):
    cli.acme("acme::double")
    waiver = '[expected_absent.acme]\nnever = "not asked for by this model at all"'
    ran = matrix("--targets", "cpu", more=waiver)
    audit = f"muster audit one --target cpu --manifests {cli.folder / 'models'}"
    lines = [" ".join(line.split()) for line in ran.out.splitlines()]
    assert "one loaded (1 warning)" in lines
    at = lines.index("Warnings: one, two on cpu")
    assert lines[at + 1] == "UNUSED_WAIVER: acme::never"
    assert " ".join(lines[at + 2 : at + 4]).startswith(f"why, and what to do: {audit}")
    command = audit.split()[1:]
    assert "UNUSED_WAIVER acme::never" in cli(*command).out
    unknown = matrix("--models", "nobody", "--targets", "cpu").out
    assert f"why, and what to do: {audit.replace('one', 'nobody')}" in " ".join(unknown.split())


def test_matrix_whose_builder_fails_names_it_and_exits_3(cli, matrix):
    cli.acme("acme::double", after="raise RuntimeError('no layer of this kind')")
    ran = matrix("--targets", "cpu", names=("one",))
    assert ran.code == 3
    assert ran.out.startswith("INCOMPLETE: 1 model x 1 target: 1 failed\n")
    assert "BUILDER FAILED" in ran.out
    assert "one on cpu: RuntimeError: no layer of this kind" in ran.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--targets", "gpu"), "'gpu' is no target"),
        (("--targets", "sm_91a"), "names no known compute capability"),
        (("--models", "a,,b"), "--models: an item is empty"),
        (("--as-of", "tomorrow"), "--as-of: 'tomorrow' is no date"),
    ],
)
def test_matrix_with_a_bad_option_is_a_usage_error(cli, matrix, arguments, said):
    ran = matrix(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


def test_matrix_without_models_is_a_usage_error(cli, matrix):
    (cli.folder / "models").mkdir()
    assert "no manifest describes a model" in matrix(names=()).err


def test_matrix_output_goes_to_a_file_whole(cli, matrix):
    cli.acme("acme::double")
    target = cli.folder / "matrix.json"
    assert matrix("--targets", "cpu", "--format", "json", "--output", target).out == ""
    assert json.loads(target.read_text())["passed"] is True


def test_matrix_compiles_each_kernel_once_for_all_models(cli, matrix, monkeypatch, tmp_path):
    from kernel_muster.registry.backends.nvrtc.compiler_process import compilers

    compiled = []
    real = compilers.compile
    monkeypatch.setattr(compilers, "compile", lambda work, toolkit: compiled.append(work) or real(work, toolkit))
    monkeypatch.setenv("MUSTER_CACHE_DIR", str(tmp_path / "cubins"))
    cli.acme("gemv::dense_gemv_bf16", "gemv::dense_gemv_bf16_batchm")
    for _ in range(2):
        ran = matrix("--targets", "sm_80,sm_90a", "--format", "json")
        assert ran.code == 0, ran.out
        assert {c["stage"] for c in ran.json["cells"]} == {"compiled"}
    assert [str(work.arch) for work in compiled] == ["sm_80", "sm_90a"]


def test_cache_that_keeps_nothing_is_said_once_for_all_cells(cli, matrix, unkept):
    cli.acme("acme::double")
    ran = matrix("--targets", "cpu")
    assert ran.code == 0
    lines = ran.out.splitlines()
    at = lines.index("CACHE_NOT_KEPT: compiled code could not be stored in the cache")
    said = f"{unkept.subject}: one on cpu: {unkept.why} (and 1 more cell)"
    assert " ".join("".join(lines[at + 1 : -1]).split()) == said
    cells = matrix("--targets", "cpu", "--format", "json").json["cells"]
    assert [cell["unkept"] for cell in cells] == 2 * [[[unkept.subject, unkept.why]]]


def cell(model, target, *causes):
    verdict = "refused" if causes else "passed"
    return Cell(
        model=model, target=target, verdict=verdict, stage="", keys=1, refusing=len(causes), warnings=0, set_hash="",
        causes=causes,
    )  # fmt: skip


def test_cells_that_make_no_rectangle_are_named_by_target():
    cause = ("MISSING", "a::b")
    cells = (cell("m", "cpu", cause), cell("m", "sm_80"), cell("n", "cpu"), cell("n", "sm_80", cause))
    (group,) = Matrix(("m", "n"), ("cpu", "sm_80"), cells).groups()
    assert group.cells == ("m on cpu", "n on sm_80")
