"""The manual as data: its pages, their fenced blocks, and a small shell to run them."""

import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from kernel_muster.cli.app import run as muster
from kernel_muster.MODEL_toml.loader import load_manifest

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^```(\w+)?([^\n`]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def _load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["docs_generate"] = module
    spec.loader.exec_module(module)
    return module


GENERATE = _load_generator()
PAGES = {str(page.relative_to(ROOT)): page for page in GENERATE.pages()}


@dataclass(frozen=True)
class Block:
    """One fenced block: ```` ```sh run exit=1 ````."""

    language: str
    options: dict[str, str]
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        options = dict(part.partition("=")[::2] for part in match[2].split())
        found.append(Block(match[1] or "", options, match[3], text.count("\n", 0, match.start()) + 1))
    return found


@dataclass
class Shell:
    """Runs the blocks of one page, in order, in one folder that also holds the examples."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    output: str = ""
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})

    @property
    def site(self) -> Path:
        return self.folder / "site-packages"

    def run(self, block: Block) -> None:
        if "file" in block.options:
            target = self.folder / block.options["file"]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.text, encoding="utf-8")
        if block.language == "text" and "output" in block.options:
            self._compare(block.text)
        elif "run" in block.options:
            {"python": self._python, "toml": self._toml, "sh": self._commands}[block.language](block)

    def _python(self, block: Block) -> None:
        out = StringIO()
        with redirect_stdout(out):
            exec(compile(block.text, block.options.get("file", "example.py"), "exec"), self.names)  # noqa: S102
        self.output = out.getvalue()

    def _toml(self, block: Block) -> None:
        file = self.folder / block.options.get("file", "MODEL.toml")
        file.write_text(block.text, encoding="utf-8")
        manifest, findings = load_manifest(file)
        assert manifest is not None, findings

    def _commands(self, block: Block) -> None:
        lines = [line for line in block.text.replace("\\\n", " ").splitlines() if line.strip() and line[0] != "#"]
        outputs = []
        for number, line in enumerate(lines, 1):
            expected = int(block.options.get("exit", 0)) if number == len(lines) else 0
            code, output = self._command(shlex.split(line, comments=True))
            outputs.append(output)
            assert code == expected, f"{line}: exit code {code}\n{output}"
        self.output = "".join(outputs)

    def _command(self, words: list[str]) -> tuple[int, str]:
        with self.monkeypatch.context() as patch:
            while "=" in words[0]:
                name, _, value = words.pop(0).partition("=")
                patch.setenv(name, value)
            if words[:2] == ["pip", "install"]:
                return self._install(self.folder / words[2]), ""
            if words[:3] == ["pip", "uninstall", "-y"]:
                return self._uninstall(words[3]), ""
            if words[0] in ("cp", "sed"):
                return subprocess.run(words, cwd=self.folder, check=False, timeout=60).returncode, ""
            assert words[0] == "muster", f"this shell does not know {words[0]}"
            out = StringIO()
            with redirect_stdout(out):
                code = muster(words[1:])
            return code, out.getvalue()

    def _install(self, project: Path) -> int:
        """Do what pip does for a pure distribution; tests/installed has the real one."""
        table = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))
        name, version = table["project"]["name"], table["project"]["version"]
        self._uninstall(name)
        self.site.mkdir(exist_ok=True)
        source = project / "src" if (project / "src").is_dir() else project
        for found in source.iterdir():
            if found.is_dir() and (found / "__init__.py").is_file():
                shutil.copytree(found, self.site / found.name, dirs_exist_ok=True)
            elif found.suffix == ".py":
                shutil.copy(found, self.site)
        info = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        points = table["project"]["entry-points"].items()
        text = "".join(f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in rows.items()) for group, rows in points)
        (info / "entry_points.txt").write_text(text)
        return 0

    def _uninstall(self, name: str) -> int:
        for info in self.site.glob(f"{name.replace('-', '_')}-*.dist-info"):
            shutil.rmtree(info)
        self.forget()
        return 0

    def forget(self) -> None:
        """Forget the modules of this folder, so that the next command imports them anew."""
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(str(self.folder)):
                del sys.modules[name]
        importlib.invalidate_caches()

    def _compare(self, text: str) -> None:
        """Each line shown occurs, in this order; ``...`` stands for the rest of a line, or for lines left out."""
        lines = iter(self.output.splitlines())
        for shown in filter(lambda line: line.strip() not in ("", "..."), text.splitlines()):
            pattern = re.compile(".*".join(map(re.escape, shown.rstrip().split("..."))))
            found = any(pattern.fullmatch(line.rstrip()) for line in lines)
            assert found, f"{shown!r} is not in, or out of order in\n{self.output}"


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    for name in [name for name in os.environ if name.startswith("MUSTER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path, monkeypatch)
    monkeypatch.syspath_prepend(str(shell.site))
    yield shell
    shell.forget()


@pytest.fixture(scope="session")
def manual() -> dict[str, Path]:
    return PAGES


@pytest.fixture(scope="session")
def generate() -> ModuleType:
    return GENERATE


@pytest.fixture(scope="session")
def blocks_of() -> Callable[[Path], list[Block]]:
    return blocks


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "page" in metafunc.fixturenames:
        pages = PAGES
        if "shell" in metafunc.fixturenames:
            pages = {name: page for name, page in PAGES.items() if any("run" in b.options for b in blocks(page))}
        metafunc.parametrize("page", pages.values(), ids=pages.keys())
