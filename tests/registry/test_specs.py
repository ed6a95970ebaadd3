import importlib.util
import sys
from pathlib import Path

import pytest
from kernel_muster.registry.contract.specs import KernelSpec, PythonKernel


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Return a function that imports a module of given source under a name."""

    def make(name, text, folder="one"):
        file = tmp_path / folder / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        spec = importlib.util.spec_from_file_location(name, file)
        made = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, made)
        spec.loader.exec_module(made)
        return made

    return make


KERNEL = "def triple(x, out):\n    out[...] = x * 3\n"


def test_python_kernel_digest_is_that_of_the_source_wherever_it_lies(module):
    first = PythonKernel(module("acme_cpu", KERNEL).triple).source_sha256
    assert PythonKernel(module("acme_cpu", KERNEL, "two").triple).source_sha256 == first
    assert PythonKernel(module("acme_cpu", KERNEL + "\n", "three").triple).source_sha256 != first


def test_python_kernel_digest_changes_with_the_code_it_shares(module):
    function = module("acme_cpu", KERNEL).triple

    def digest(*texts):
        shares = tuple(module(f"acme_{place}", text, f"f{text}") for place, text in enumerate(texts))
        return PythonKernel(function, shares=shares).source_sha256

    assert digest("A = 1", "B = 1") == digest("A = 1", "B = 1")
    assert len({digest(), digest("A = 1"), digest("A = 1", "B = 1"), digest("A = 2", "B = 1")}) == 4


def test_python_kernel_that_shares_a_module_without_source_is_refused(module):
    function, gone = module("acme_cpu", KERNEL).triple, module("acme_gone", "A = 1")
    Path(gone.__file__).unlink()
    with pytest.raises(ValueError, match="shares sys, acme_gone, whose source cannot be read"):
        PythonKernel(function, shares=(sys, gone))


def test_python_kernel_without_a_file_has_the_digest_of_its_bytecode():
    def made(text):
        namespace = {"__name__": "nowhere"}
        exec(text, namespace)  # noqa: S102
        return PythonKernel(namespace["triple"]).source_sha256

    assert made(KERNEL) == made(KERNEL)
    assert made(KERNEL) != made(KERNEL.replace("* 3", "+ 3"))
    assert made(KERNEL) != made(KERNEL.replace("* 3", "* 4"))


def test_python_kernel_of_a_builtin_has_the_digest_of_its_name():
    assert PythonKernel(sys.intern).source_sha256 != PythonKernel(sys.exit).source_sha256


def test_spec_that_names_an_architecture_twice_is_refused():
    def problems(*archs):
        backend = PythonKernel(print)
        return KernelSpec(key="a::b", contract="c", archs=archs, backend=backend).problems()

    assert problems("sm_90a", "cpu", "sm_90+") == []
    assert problems("sm_90a", "cpu", "sm_90a") == ["archs names an entry more than once"]
    assert problems(["sm_90a"], "sm_90a", "sm_90a")[-1] == "archs names an entry more than once"
