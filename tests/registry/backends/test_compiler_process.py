import copy
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from kernel_muster.registry.backends.builder import Builder
from kernel_muster.registry.backends.nvrtc import compiler_process
from kernel_muster.registry.backends.nvrtc.compiler import compile_cubin
from kernel_muster.registry.backends.nvrtc.compiler_process import CompilerProcess, Compilers
from kernel_muster.registry.backends.request import BuildFailure


@pytest.fixture
def compilers():
    made = Compilers()
    yield made
    made.end()


@pytest.fixture
def compile_with(builder, make_request, compilers):
    """Compile a source by processes of this test alone."""

    def compile_(text=None, **kwargs):
        request = make_request(**kwargs) if text is None else make_request(text, **kwargs)
        return compilers.compile(builder.begin(request).work.input, builder.toolkit)

    return compile_


@pytest.fixture
def bindings(tmp_path, monkeypatch):
    """Put bindings of NVRTC that run the given code when they are imported before the real ones, for new processes."""

    def put(code):
        package = tmp_path / "site" / "cuda" / "bindings"
        package.mkdir(parents=True)
        for init in (package, package.parent):
            (init / "__init__.py").write_text("")
        (package / "nvrtc.py").write_text(f"import os, signal, sys\n{code}\n")
        monkeypatch.syspath_prepend(tmp_path / "site")

    return put


def refusal(compile_with):
    with pytest.raises(BuildFailure) as caught:
        compile_with()
    return caught.value


def idle(compilers):
    (process,) = compilers._idle
    return process._process


def test_machine_code_and_log_are_those_of_compiling_here(builder, make_request, compilers):
    work = builder.begin(make_request()).work.input
    assert compilers.compile(work, builder.toolkit) == compile_cubin(work, builder.toolkit)


def test_process_is_used_again_also_after_a_failure(compile_with, compilers):
    with pytest.raises(BuildFailure, match="COMPILE_FAILED"):
        compile_with("broken")
    first = idle(compilers).pid
    compile_with()
    assert idle(compilers).pid == first != os.getpid()


def test_process_ends_when_it_had_no_work_for_a_while(compile_with, compilers, monkeypatch):
    monkeypatch.setattr(compiler_process, "IDLE_SECONDS", 0.2)
    compile_with()
    compilers._timer.join(30)
    assert compilers._idle == []
    monkeypatch.setattr(compiler_process, "IDLE_SECONDS", 60.0)
    compile_with()
    process = idle(compilers)
    assert process.poll() is None
    compilers.end()
    assert process.poll() is not None


def test_failure_comes_with_its_log_and_what_to_do(compile_with, builder, make_request):
    request = make_request("#include <vector>\n")
    with pytest.raises(BuildFailure) as here:
        compile_cubin(builder.begin(request).work.input, builder.toolkit)
    with pytest.raises(BuildFailure) as there:
        compile_with("#include <vector>\n")
    known = (there.value.code, there.value.why, there.value.log, there.value.remedies)
    assert known == (here.value.code, here.value.why, here.value.log, here.value.remedies)
    assert known[0] == "HEADERS_MISSING"
    assert copy.copy(here.value).remedies == here.value.remedies


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "signal SIGSEGV"),
        ("os.abort()", "signal SIGABRT"),
        ("os._exit(0)", "exit status 0"),
        ("raise SystemExit(3)", "exit status 1"),
    ],
)
def test_compiler_that_ends_is_a_failure_of_its_source_alone(bindings, compile_with, compilers, monkeypatch, code, how):
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = list(sys.path)
    bindings(f"print('cannot go on', file=sys.stderr, flush=True)\n{code}")
    failure = refusal(compile_with)
    assert failure.code == "COMPILE_FAILED"
    assert f"itself ended with {how} while it compiled " in failure.why
    assert failure.why.endswith("scale.cu for sm_90a")
    assert "cannot go on" in failure.log
    assert compilers._idle == []
    sys.path[:] = path
    assert compile_with().cubin  # by a new process


def test_what_the_compiler_prints_is_no_answer(bindings, compile_with):
    bindings("os.write(1, b'hello'); print('hello', flush=True); raise ImportError('no library')")
    failure = refusal(compile_with)
    assert failure.code == "TOOLCHAIN_MISSING"
    assert "no library" in failure.why


@pytest.mark.parametrize("executable", ["", None, "/usr/sbin/engine"])
def test_embedded_interpreter_compiles_itself(builder, make_request, monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(subprocess, "Popen", None)
    work = builder.begin(make_request()).work.input
    assert Compilers().compile(work, builder.toolkit).cubin


@pytest.mark.skipif(os.name != "posix", reason="the stand-in for an interpreter is a script")
@pytest.mark.parametrize("text", ["#!/bin/sh\nexit 1\n", "#!/bin/sh\necho usage: engine\n", "no program"])
def test_executable_that_is_no_python_is_tried_once_and_logged(
    builder, make_request, tmp_path, monkeypatch, caplog, text
):
    caplog.set_level("INFO", "kernel_muster")
    script = tmp_path / "python-engine"
    script.write_text(text)
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    compilers, work = Compilers(), builder.begin(make_request()).work.input
    assert compilers.compile(work, builder.toolkit) == compile_cubin(work, builder.toolkit)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert compilers.compile(work, builder.toolkit).cubin
    assert [record.message for record in caplog.records].count("compilers.none") == 1


def test_interrupted_process_is_ended_and_not_asked_again(compile_with, compilers, monkeypatch):
    compile_with()
    process = idle(compilers)

    def interrupted(self, work, toolkit):
        raise KeyboardInterrupt

    monkeypatch.setattr(CompilerProcess, "compile", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compile_with()
    assert compilers._idle == []
    assert process.poll() is not None


def test_tunables_of_the_user_stay(monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=2")
    given, *own = compiler_process._environment()["GLIBC_TUNABLES"].split(":")
    assert given == "glibc.malloc.hugetlb=2"
    assert len(own) == len(compiler_process._TUNABLES) - 1
    monkeypatch.delenv("GLIBC_TUNABLES")
    assert "glibc.malloc.hugetlb=1" in compiler_process._environment()["GLIBC_TUNABLES"].split(":")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_forked_process_has_compilers_of_its_own(make_request, tmp_path):
    request = make_request()
    code = f"""
import os, warnings
from pathlib import Path
from kernel_muster.registry.hardware.arch import parse_arch
from kernel_muster.registry.backends import BuildRequest, EntryPoint
from kernel_muster.registry.backends.nvrtc import compiler_process
from kernel_muster.registry.backends.builder import Builder
compiler_process.IDLE_SECONDS = 3600.0  # on a loaded machine the steps below take longer than an idle compiler stays
request = BuildRequest("scale", Path({str(request.source)!r}), parse_arch("sm_90a"), {request.entries!r})
first = Builder().build(request).digest
(of_parent,) = compiler_process.compilers._idle
warnings.simplefilter("ignore")
child = os.fork()
if not child:
    assert compiler_process.compilers._idle == []
    assert Builder().build(request).digest == first
    compiler_process.compilers.end()
    os._exit(0)
print(os.waitpid(child, 0)[1], of_parent._process.poll(), Builder().build(request).digest == first)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (result.stdout.split(), result.stderr) == (["0", "None", "True"], "")


def test_builder_compiles_by_a_process(builder, make_request, monkeypatch):
    asked = []
    real = compiler_process.compilers.compile
    monkeypatch.setattr(
        compiler_process.compilers, "compile", lambda work, toolkit: asked.append(work) or real(work, toolkit)
    )
    Builder(toolkit=builder.toolkit).build(make_request())
    assert len(asked) == 1


@pytest.mark.skipif(os.name != "posix", reason="a pipe that is inherited says who still lives")
def test_compiler_at_work_ends_with_whoever_asked(make_request, tmp_path):
    package = tmp_path / "site" / "cuda" / "bindings"
    package.mkdir(parents=True)
    for init in (package, package.parent):
        (init / "__init__.py").write_text("")
    (package / "nvrtc.py").write_text("import os, time\nos.write(int(os.environ['ALIVE']), b'!')\ntime.sleep(600)\n")
    request = make_request()
    code = f"""
import subprocess, sys
from pathlib import Path
from kernel_muster.registry.hardware.arch import parse_arch
from kernel_muster.registry.backends import BuildRequest, EntryPoint
from kernel_muster.registry.backends.nvrtc import compiler_process
from kernel_muster.registry.backends.builder import Builder
start = subprocess.Popen
compiler_process.subprocess.Popen = lambda *given, **named: start(*given, **named, pass_fds=(int(sys.argv[1]),))
Builder().build(BuildRequest("scale", Path({str(request.source)!r}), parse_arch("sm_90a"), {request.entries!r}))
"""
    alive, end = os.pipe()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "ALIVE": str(end)}
    command = [sys.executable, "-c", code, str(end)]
    with subprocess.Popen(command, env=environment, pass_fds=(end,)) as asking:
        os.close(end)
        assert os.read(alive, 1) == b"!"
        asking.kill()
    assert os.read(alive, 1) == b""  # no process holds the other end any more
    os.close(alive)


def test_compiler_that_was_ended_without_work_is_replaced(compile_with, compilers):
    compile_with()
    process = idle(compilers)
    process.kill()
    process.wait()
    assert compile_with().cubin
    assert idle(compilers).pid != process.pid


@pytest.fixture
def only_here(monkeypatch):
    """Make a class that another process does not have."""

    def make(base):
        module = ModuleType("only_here")
        module.Odd = type("Odd", (base,), {"__module__": "only_here"})
        monkeypatch.setitem(sys.modules, "only_here", module)
        return module.Odd

    return make


def test_request_that_cannot_be_read_is_a_failure_and_no_wait(builder, make_request, compilers, only_here):
    work = builder.begin(make_request()).work.input
    with pytest.raises(BuildFailure, match="itself ended with exit status 1 while it compiled") as caught:
        compilers.compile(replace(work, options=(only_here(str)("-w"),)), builder.toolkit)
    assert "Error" in caught.value.log


def test_machine_code_is_kept_where_no_thread_can_start(compile_with, compilers, monkeypatch):
    def refused(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Timer, "start", refused)
    assert compile_with().cubin


def test_source_may_be_a_path_of_any_class(builder, make_request, compilers, only_here):
    request = make_request()
    work = builder.begin(replace(request, source=only_here(type(Path()))(request.source))).work.input
    assert compilers.compile(work, builder.toolkit).cubin
