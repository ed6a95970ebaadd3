"""The author's checks on the examples: installed, and as a wheel that is not."""

import pytest

pytestmark = pytest.mark.install

KEYS = {"acme_softcap::softcap", "silu::silu_mul"}


@pytest.fixture(scope="module")
def examples(make_environment, copy_example):
    environment = make_environment()
    environment.install(copy_example("acme_kernels"), copy_example("ten_lines"))
    return environment


@pytest.fixture(scope="module")
def acme_wheel(make_environment, copy_example, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", folder)
    done = make_environment().run("-m", "pip", "wheel", *options, copy_example("acme_kernels"))
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def proven(report):
    return {step["subject"] for step in report["steps"] if (step["kind"], step["outcome"]) == ("prove", "ok")}


def test_installed_examples_pass_with_every_kernel_proven(examples):
    acme = examples.muster_json("plugin", "check", "acme-kernels")
    assert (acme["verdict"], acme["findings"], proven(acme)) == ("passed", [], KEYS)
    ten_lines = examples.muster_json("plugin", "check", "ten_lines")
    assert (ten_lines["verdict"], proven(ten_lines)) == ("passed", {"residual_add::sigmoid_gate_mul_batched"})


def test_wheel_of_an_example_passes_where_it_is_not_installed(make_environment, acme_wheel):
    environment = make_environment()
    report = environment.muster_json("plugin", "check", acme_wheel)
    assert (report["distribution"], report["verdict"], proven(report)) == ("acme-kernels", "passed", KEYS)
    assert environment.muster("plugin", "check", "acme-kernels").returncode == 2


def test_wheel_of_an_example_passes_where_it_is_installed_too(examples, acme_wheel):
    report = examples.muster_json("plugin", "check", acme_wheel)
    assert (report["verdict"], len(report["plugins"]), proven(report)) == ("passed", 1, KEYS)
