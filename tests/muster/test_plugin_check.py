"""``muster plugin check``: its report for each kind of fault."""

import json
from contextlib import contextmanager

import pytest
from kernel_muster.audit.plugin_check.process.printed import MOST_CHARACTERS, NO_MORE, Printed
from kernel_muster.cli.wheels import installed
from plugin_texts import codes, source, steps, wheel


def test_sound_plugin_passes_with_every_step(check):
    report = check(source('spec("acme::double")', 'spec("acme::loud", chatter)'))
    assert (report["schema"], report["verdict"], report["findings"]) == ("kernel-muster/plugin-check", "passed", [])
    assert steps(report) == {
        "load acme": "ok",
        "contract acme_double": "ok",
        "prove acme::double cpu": "ok",
        "prove acme::loud cpu": "ok",
    }
    (plugin,) = report["plugins"]
    assert (plugin["name"], plugin["keys"]) == ("acme", ["acme::double", "acme::loud"])


def test_text_says_verdict_plugin_and_steps(cli):
    cli.install(source('spec("acme::double")'))
    ran = cli("plugin", "check", "acme")
    lines = ran.out.splitlines()
    assert lines[0] == lines[-1] == "PASSED: acme 1.0: 3 steps: 3 ok"
    assert "Plugin acme (loaded): contracts kernels" in lines
    assert "All steps" not in ran.out
    assert "prove     acme::double  cpu     ok" in cli("plugin", "check", "acme", "--verbose").out


BAD_REFERENCE = 'contract(reference=lambda arguments, dims: {"out": arguments["x"][:2]})'
ROUNDED = 'contract(reference=lambda arguments, dims: {"out": arguments["x"] * np.float32(2)})'
NO_OUTPUT = 'contract(reference=lambda arguments, dims: {"ot": arguments["x"]})'
NO_INPUTS = 'contract(), contract("acme_other", inputs=lambda dims, rng: 1 / 0)'


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("raise ImportError('no such library')\n", ("PLUGIN_LOAD_FAILED", "acme")),
        ("import sys\nsys.exit(0)\n", ("PLUGIN_LOAD_FAILED", "acme")),
        ("", ("PLUGIN_EMPTY", "acme")),
        (source('spec("acme::double")').replace("muster_contracts", "muster_contract"), ("UNKNOWN_HOOK", "acme")),
        (source('spec("other::double")'), ("BAD_SPEC", "acme")),
        (source('spec("acme::double", contract="nobodys")'), ("BAD_SPEC", "acme")),
        (source('spec("acme::double", archs=())'), ("BAD_SPEC", "acme")),
        (source('spec("acme::double", overrides="nobody")'), ("BAD_OVERRIDE", "acme")),
        (source('spec("acme::double")', 'spec("acme::double")'), ("DUPLICATE_KERNEL", "acme::double")),
        (source('spec("silu::silu_mul", overrides="kernel-muster")'), ("SIGNATURE_MISMATCH", "silu::silu_mul")),
        (source('spec("acme::double")', contracts=BAD_REFERENCE), ("BAD_SPEC", "acme_double")),
        (source('spec("acme::double")', contracts=ROUNDED), ("BAD_SPEC", "acme_double")),
        (source('spec("acme::double")', contracts=NO_OUTPUT), ("BAD_SPEC", "acme_double")),
        (source('spec("acme::double", contract="acme_other")', contracts=NO_INPUTS), ("BAD_SPEC", "acme_other")),
        (source('spec("acme::double", wrong)'), ("NUMERICS_FAILED", "acme::double")),
        (source('spec("acme::double", bit_identical_to=("acme::gone",))'), ("UNCHECKED", "acme::double")),
    ],
)  # fmt: skip
def test_faulty_plugin_is_refused_with_its_code(check, text, found):
    report = check(text)
    assert report["verdict"] == "refused"
    assert codes(report) == [found]
    assert "--no-plugin" not in json.dumps(report["findings"])


def test_output_that_the_reference_lacks_is_said_once_for_all_cases(check):
    more = 'km.Case("three", {"M": 3}), km.Case("five", {"M": 5}),'
    text = source('spec("acme::double")', contracts=NO_OUTPUT).replace('km.Case("three", {"M": 3}),', more)
    (finding,) = check(text)["findings"]
    assert finding["why"] == "cases three, five: the reference gives no output out (it gives ot)"
    assert finding["log"] == ""


def test_scalar_that_a_case_does_not_give_is_refused(check):
    params = '(km.ScalarParam("cap", "f32"), km.TensorParam("x", "f32", ("M",)), '
    text = source('spec("acme::double")').replace('((km.TensorParam("x", "f32", ("M",)), ', f"({params}")
    (finding,) = check(text.replace("def double(x, out)", "def double(cap, x, out)"))["findings"]
    assert (finding["code"], finding["subject"]) == ("BAD_SPEC", "acme")
    assert finding["why"] == "muster_contracts()[0] acme_double: case three gives no value for the scalar cap"


def test_kernel_of_a_faulty_contract_is_not_blamed(check):
    report = check(source('spec("acme::double")', 'spec("acme::b", crash)', contracts=BAD_REFERENCE))
    skipped = {s["subject"]: s["reason"] for s in report["steps"] if s["outcome"] == "skipped"}
    assert skipped == dict.fromkeys(("acme::double", "acme::b"), "contract acme_double is faulty")


def test_failed_plugin_of_somebody_else_is_not_ones_own_fault(cli, check):
    cli.install("raise ImportError('broken')\n", "stranger")
    report = check(source('spec("acme::double")'))
    assert (report["verdict"], report["findings"]) == ("passed", [])


def test_builder_of_a_model_type_that_another_serves_is_found(check):
    hook = """
@km.hookimpl
def muster_models():
    return [km.ModelBuilder("mine", ("acme_type", "qwen3_5"), "production", lambda *given: None)]
"""
    report = check(source('spec("acme::double")') + hook)
    (finding,) = report["findings"]
    assert (finding["code"], finding["subject"]) == ("BAD_SPEC", "acme")
    said = "2 builders serve model type qwen3_5: hybrid_decoder, mine; a boot refuses its models"
    assert finding["why"] == said


def test_manifest_of_ones_own_that_refuses_every_boot_is_found(cli, check):
    folder = cli.manifest().parent.parent
    hook = f"@km.hookimpl\ndef muster_manifests():\n    import pathlib\n    return [pathlib.Path({str(folder)!r})]\n"
    text = source('spec("acme::double")') + hook
    cli.install("raise ImportError('broken')\n", "stranger")  # its faults are not this plugin's
    assert check(text)["verdict"] == "passed"
    (folder / "tiny" / "MODEL.toml").write_text("[modell]\n")
    report = json.loads(cli("plugin", "check", "acme", "--format", "json").out)
    assert report["verdict"] == "refused"
    assert {row["code"] for row in report["findings"]} == {"BAD_MANIFEST"}
    assert all(row["where"][0].startswith(f"{folder}/tiny/MODEL.toml") for row in report["findings"])


# the subject of a check


def test_distribution_without_a_plugin_is_refused(cli):
    ran = cli("plugin", "check", "numpy", "--format", "json")
    assert (ran.code, codes(ran.json)) == (1, [("PLUGIN_NOT_FOUND", "numpy")])


@pytest.mark.parametrize("seconds", ["inf", "nan", "1e300", "0", "-1", "x"])
def test_time_limit_that_is_none_is_a_usage_error(cli, seconds):
    cli.install(source('spec("acme::double")'), "acme")
    ran = cli("plugin", "check", "acme", "--timeout", seconds)
    assert (ran.code, ran.out) == (2, "")
    assert "Invalid value for '--timeout'" in ran.err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("kernel-mustre", "no wheel, installed distribution or plugin; did you mean kernel-muster"),
        ("gone-1.0-py3-none-any.whl", "is no file"),
        ("", "no wheel, installed distribution or plugin"),
        (".", ". is a folder, and what is checked is installed: pip install ., or pip wheel --no-deps . and check"),
    ],
)
def test_nothing_of_that_name_is_a_usage_error(cli, name, said):
    ran = cli("plugin", "check", name)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


def test_plugin_is_found_by_its_entry_point_name(cli):
    def offer(distribution: str) -> None:
        info = cli.folder / f"site_{distribution}" / f"{distribution}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[kernel_muster.v1]\nentry_a = nowhere\n")
        cli.monkeypatch.syspath_prepend(str(info.parent))

    offer("acme-wheels")
    found, plugin = installed("entry_a")
    assert (found.metadata["Name"], plugin) == ("acme-wheels", "entry_a")
    offer("other-wheels")
    ran = cli("plugin", "check", "entry_a")
    assert (ran.code, ran.out) == (2, "")
    assert "plugin entry_a is offered by acme-wheels and other-wheels" in ran.err


@pytest.mark.install
def test_wheel_is_checked_without_being_installed(cli, tmp_path):
    ran = cli("plugin", "check", wheel(tmp_path, source('spec("acme::double")')), "--format", "json")
    assert ran.code == 0, ran.out + ran.err
    assert (ran.json["distribution"], ran.json["distribution_version"]) == ("acme", "2.0")
    assert cli("plugin", "check", "acme").code == 2


@pytest.mark.install
def test_wheel_takes_the_place_of_the_version_that_is_installed(cli, tmp_path):
    cli.install(source('spec("acme::old", wrong)'))
    ran = cli("plugin", "check", wheel(tmp_path, source('spec("acme::new")')), "--format", "json")
    assert ran.code == 0, ran.out + ran.err
    assert [plugin["keys"] for plugin in ran.json["plugins"]] == [["acme::new"]]


@pytest.mark.install
@pytest.mark.parametrize("name", ["acme-2.0-py3-none-any.whl", "acme.whl"])
def test_file_that_is_no_wheel_is_refused_with_what_pip_says(cli, tmp_path, name):
    (tmp_path / name).write_text("no archive")
    ran = cli("plugin", "check", tmp_path / name, "--format", "json")
    assert (ran.code, codes(ran.json)) == (1, [("PLUGIN_LOAD_FAILED", name)])
    assert ran.json["findings"][0]["log"].startswith("ERROR: ")


@pytest.mark.install
@pytest.mark.parametrize(
    ("file", "why"),
    [
        ("kernel_muster/__init__.py", "kernel_muster/__init__.py would be a part of kernel_muster"),
        ("json.py", "json.py would be taken for Python's own module json"),
        ("json/__init__.py", "json/__init__.py would be taken for Python's own module json"),
        ("sitecustomize.py", "sitecustomize.py would be taken for Python's own module sitecustomize"),
        ("numpy.py", "numpy.py would hide the module numpy of numpy "),
        ("numpy/__init__.py", "numpy/__init__.py is a file of numpy "),
        ("six/__init__.py", "six/__init__.py would hide the module six of six "),
    ],
)
def test_wheel_that_brings_what_belongs_to_others_is_refused(cli, tmp_path, file, why):
    if file.startswith("six"):
        site = tmp_path / "site"
        (site / "six-1.0.dist-info").mkdir(parents=True)
        (site / "six-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: six\nVersion: 1.0\n")
        (site / "six-1.0.dist-info" / "RECORD").write_text("six.py,,\n")
        cli.monkeypatch.syspath_prepend(str(site))
    path = wheel(tmp_path, source('spec("acme::double")'), more={file: "raise RuntimeError"})
    ran = cli("plugin", "check", path, "--format", "json")
    assert (ran.code, codes(ran.json)) == (1, [("PLUGIN_LOAD_FAILED", path.name)])
    (found,) = ran.json["findings"]
    assert found["why"].startswith(f"it would do damage where it is installed: {why}")
    assert "let the wheel have modules of its own alone" in found["remedies"][0]


@pytest.mark.install
def test_wheel_that_adds_to_a_namespace_package_of_others_is_fine(cli, tmp_path):
    site = tmp_path / "site" / "acme_space"
    site.mkdir(parents=True)
    (site / "__init__.py").write_text("# shared\n")
    info = tmp_path / "site" / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "RECORD").write_text("acme_space/__init__.py,,\nacme_space/other.py,,\nacme_only/other.py,,\n")
    cli.monkeypatch.syspath_prepend(str(tmp_path / "site"))
    more = {
        "acme_space/__init__.py": "# shared\n",
        "acme_space/own.py": "",
        "acme_only/own.py": "",
        "json/data.txt": "",
    }
    ran = cli("plugin", "check", wheel(tmp_path, source('spec("acme::double")'), more=more), "--format", "json")
    assert ran.code == 0, ran.out + ran.err


def test_report_goes_to_a_file_whole(cli, tmp_path):
    cli.install(source('spec("acme::double")'))
    target = tmp_path / "check.json"
    assert cli("plugin", "check", "acme", "--format", "json", "--output", target).out == ""
    assert json.loads(target.read_text())["verdict"] == "passed"


# output during a check


def test_what_a_plugin_prints_reaches_stderr_and_leaves_json_alone(cli):
    head = "\nimport sys\nprint('on import')\nprint('to stderr', file=sys.stderr)\nos.write(1, b'raw \\xff\\n')\n"
    cli.install(source('spec("acme::loud", chatter)', 'spec("acme::b", leave)', head=head))
    ran = cli("plugin", "check", "acme", "--format", "json")
    assert ran.json["verdict"] == "refused"  # its kernel b ends the process in which the other has printed
    for said in ("on import", "to stderr", "a kernel that prints", r"raw \xff"):
        assert f"acme| {said}\n" in ran.err


def test_what_a_plugin_prints_is_escaped_and_passes_for_nothing_else(cli):
    printed = "\x1b[2JPASSED: acme\r\n\u202emuster: error\u200b\x00 @all"
    head = f"\nimport sys\nprint({printed!r})\nsys.stdout.write('no line end')\n"
    cli.install(source('spec("acme::double")', head=head))
    ran = cli("plugin", "check", "acme")
    assert ran.err.splitlines() == [
        r"acme| \x1b[2JPASSED: acme",
        r"acme| \u202emuster: error\u200b\x00 @all",
        "acme| no line end",
    ]


def test_plugin_that_prints_without_end_fills_no_terminal():
    lines = []
    printed = Printed(lines.append)
    for _ in range(3 * MOST_CHARACTERS // 1000):
        printed.take(b"x" * 999 + b"\n")
    printed.take(b"y" * 10_000 + b"\nlast\n")
    printed.end()
    assert lines[-1] == NO_MORE
    assert sum(map(len, lines)) < 1.1 * MOST_CHARACTERS
    assert printed.log.endswith("y\nlast")


def test_line_that_is_too_long_is_passed_on_in_parts():
    lines = []
    printed = Printed(lines.append)
    printed.take(b"x" * 5000)
    printed.take(b"caf\xc3")
    printed.take(b"\xa9\n")
    assert [len(line) for line in lines] == [2000, 2000, 1004]
    assert lines[-1].endswith("caf\u00e9")


@pytest.mark.parametrize("stage", [(), ("--stage", "proven")])
def test_progress_knows_how_many_steps_there_are(cli, stage, monkeypatch):
    seen = []

    @contextmanager
    def shown():
        yield lambda done, total, name: seen.append((done, total, name))

    monkeypatch.setattr("kernel_muster.cli.process.progress.shown_progress", shown)
    cli.install(source('spec("acme::double")', 'spec("acme::b", crash)', 'spec("acme::c")'))
    ran = cli("plugin", "check", "acme", "--format", "json", *stage)
    count = len(ran.json["steps"])
    assert seen[0] == (0, 0, "load acme")  # the later steps are not known before
    assert {total for _, total, _ in seen[1:]} == {count}
    assert [done for done, *_ in seen] == list(range(count))


# one plugin of several


def offer_two(cli):
    second = source('spec("acme_more::wrong", wrong, contract="acme_more")', contracts='contract("acme_more")')
    site = cli.folder / "site_two"
    info = site / "acme_both-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "acme_first_module.py").write_text(source('spec("acme_one::double")'))
    (site / "acme_second_module.py").write_text(second)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-both\nVersion: 1.0\n")
    names = "acme_one = acme_first_module\nacme_more = acme_second_module\n"
    (info / "entry_points.txt").write_text(f"[kernel_muster.v1]\n{names}")
    cli.monkeypatch.syspath_prepend(str(site))


def test_plugin_that_is_named_is_checked_without_the_others_of_its_distribution(cli):
    offer_two(cli)
    whole = cli("plugin", "check", "acme-both", "--format", "json")
    assert (whole.json["plugin_asked"], codes(whole.json)) == ("", [("NUMERICS_FAILED", "acme_more::wrong")])
    one = cli("plugin", "check", "acme_one", "--format", "json")
    assert (one.code, one.json["distribution"], one.json["plugin_asked"]) == (0, "acme-both", "acme_one")
    assert [plugin["name"] for plugin in one.json["plugins"]] == ["acme_one"]
    assert set(steps(one.json)) == {"load acme-both", "contract acme_double", "prove acme_one::double cpu"}
    other = cli("plugin", "check", "acme_more")
    assert other.code == 1
    assert other.out.startswith("REFUSED: acme-both 1.0, plugin acme_more: 3 steps: 2 ok, 1 failed")


def test_fault_of_another_plugin_of_the_distribution_is_not_that_of_the_one_that_is_named(cli):
    offer_two(cli)
    (cli.folder / "site_two" / "acme_second_module.py").write_text("raise ImportError('broken')\n")
    assert cli("plugin", "check", "acme_one").code == 0
    assert cli("plugin", "check", "acme_more").code == 1
    assert cli("plugin", "check", "acme-both").code == 1


@pytest.mark.install
def test_remedy_for_a_wheel_says_first_to_install_it(cli, tmp_path):
    ran = cli("plugin", "check", wheel(tmp_path, source('spec("acme::a", wrong)')), "--format", "json")
    (found,) = ran.json["findings"]
    assert found["remedies"][0].startswith("repair the kernel: once the wheel is installed, muster explain acme::a ")


@pytest.mark.install
def test_places_of_a_wheel_are_those_in_the_wheel(cli, tmp_path):
    ran = cli("plugin", "check", wheel(tmp_path, source('spec("acme::a", crash)')), "--format", "json")
    (found,) = ran.json["findings"]
    assert found["where"][0].startswith("acme_wheel.py:")
    assert "muster-check-" not in json.dumps(ran.json["findings"])
