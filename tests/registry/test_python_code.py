"""Digests of planners and the like: another one for any other code, and the same wherever equal code lies."""

import os
import subprocess
import sys
import zipfile
from functools import cache, partial
from pathlib import Path

import pytest
from kernel_muster.registry.plugin_code.python_code import digest_of_values

PLANNERS = """
from dataclasses import dataclass
from functools import cache, partial, wraps
from pathlib import Path

from . import tiles
from .tiles import (
    ROWS,  # of one block
)

HERE = Path(__file__).parent


def plan(bound, entries):
    from acme_digests.late import later
    return later(ROWS)


def made(tile, folder=HERE):
    def planner(bound, entries):
        return tile, folder
    return planner


@dataclass(frozen=True)
class Tile:
    size: int

    def plan(self, bound, entries):
        return self.size


def twice(function):
    @wraps(function)
    def both(bound, entries):
        return function(bound, entries) * 2
    return both


cached = cache(plan)
"""
FILES = {
    "__init__.py": "",
    "planners.py": PLANNERS,
    "tiles.py": "ROWS = 4\n",
    "late.py": "from acme_digests.inner import deep\n\n\ndef later(rows):\n    return deep\n",
    "inner/__init__.py": "",
    "inner/deep.py": "from .. import tiles\nDEEP = 1\n",
    "unused.py": "UNUSED = 1\n",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Return a function that imports the planners of a package, some of whose files have another text."""

    def make(folder="one", **texts):
        site = tmp_path / folder
        for name, text in (FILES | texts).items():
            file = site / "acme_digests" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return imported(site)

    def imported(site):
        for name in [name for name in sys.modules if name.startswith("acme_digests")]:
            monkeypatch.delitem(sys.modules, name)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [str(site), *sys.path])
            patch.setattr(sys, "dont_write_bytecode", True)
            import acme_digests.planners

        return acme_digests.planners

    make.imported = imported
    return make


def of(planner):
    return digest_of_values({"planner": planner})


def test_digest_is_the_same_wherever_the_code_lies(package, tmp_path):
    first, lazily = (of(package(folder).plan) for folder in ("one", "elsewhere/two"))
    assert first == lazily
    with zipfile.ZipFile(tmp_path / "acme.zip", "w") as archive:
        for name, text in FILES.items():
            archive.writestr(f"acme_digests/{name}", text)
    assert of(package.imported(tmp_path / "acme.zip").plan) == first


def test_digest_is_the_same_whether_what_is_imported_late_was_imported(package):
    planners = package()
    before = of(planners.plan)
    assert "acme_digests.late" not in sys.modules
    sys.path.insert(0, str(Path(planners.__file__).parents[1]))
    try:
        import acme_digests.late  # noqa: F401
    finally:
        del sys.path[0]
    assert of(package("one").plan) == before == of(planners.plan)


def test_digest_is_the_same_in_another_process(package):
    planners = package()
    site = Path(planners.__file__).parents[1]
    text = (
        "import sys; from kernel_muster.registry.plugin_code.python_code import digest_of_values as of; "
        "import acme_digests.planners as p; print(of({'planner': (p.made(4), {'a', 'b', 'c'}, p.Tile(2).plan)}))"
    )
    environment = os.environ | {"PYTHONPATH": str(site), "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == of((planners.made(4), {"a", "b", "c"}, planners.Tile(2).plan))


@pytest.mark.parametrize("name", sorted(set(FILES) - {"unused.py", "__init__.py", "inner/__init__.py"}))
def test_digest_changes_with_every_module_of_its_package_that_the_code_imports(package, name):
    assert of(package("two", **{name: f"{FILES[name]}\nMORE = 1\n"}).plan) != of(package().plan)


def test_digest_does_not_change_with_a_module_that_nothing_imports(package):
    assert of(package("two", **{"unused.py": "UNUSED = 2\n"}).plan) == of(package().plan)


def test_digest_changes_with_what_a_function_was_made_with(package):
    planners = package()
    made, tile = planners.made, planners.Tile
    planned = [
        planners.plan, planners.cached, planners.twice(planners.plan), planners.twice(planners.made(4)),
        made(4), made(8), made(4.0), made("4"), made((4, 8)), made({"rows": 4}), made(made(4)), made(tile(4)),
        tile(4).plan, tile(8).plan, partial(made, 4), partial(made, 8), partial(made, tile=4), lambda: 4,
        lambda: 8,
    ]  # fmt: skip
    assert len({of(one) for one in planned}) == len(planned)
    again = package("two")
    assert of(again.made(4)) == of(planners.made(4))


def test_paths_are_no_part_of_a_digest(package, tmp_path):
    made = package().made
    assert of(made(4, Path("/opt/a"))) == of(made(4, Path("/usr/b")))
    assert of(made("/opt/a.cu")) == of(made("/usr/b.cu"))
    assert of(made("a.cu")) != of(made("b.cu"))


def test_what_holds_itself_or_raises_when_it_is_looked_at_has_a_digest(package):
    class Raising:
        def __getattribute__(self, name):
            raise RuntimeError(name)

    made, circle = package().made, []
    circle.append(circle)
    values = [made(circle), made(Raising()), made(cache(len)), made(sys.intern), made(sys)]
    assert len({of(value) for value in values}) == len(values)


OTHER = """
from functools import wraps


def other():
    return 1


class Other:
    pass


def decorated(function):
    @wraps(function)
    def both(bound, entries):
        return function(bound, entries)
    return both
"""


def test_code_of_other_packages_counts_by_name_alone(package, tmp_path, monkeypatch):
    (tmp_path / "acme_other.py").write_text(OTHER)
    monkeypatch.syspath_prepend(str(tmp_path))
    import acme_other

    made = package().made
    before = [of(made(one)) for one in (acme_other.other, acme_other.Other, acme_other.Other())]
    assert len(set(before)) == 3
    (tmp_path / "acme_other.py").write_text("VERSION = 2\n" + (tmp_path / "acme_other.py").read_text())
    monkeypatch.delitem(sys.modules, "acme_other")
    import acme_other

    assert [of(made(one)) for one in (acme_other.other, acme_other.Other, acme_other.Other())] == before
    assert of((made(4), acme_other.other)) != of((made(4), made(4)))
    one, more = (of(acme_other.decorated(package(f"at{size}").made(size))) for size in (4, 8))
    assert one != more
    changed = package("two", **{"tiles.py": "ROWS = 5\n"})
    assert of(acme_other.decorated(changed.made(4))) != one
