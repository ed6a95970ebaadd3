import hashlib
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_muster.registry.backends.cache import BuildCache, cache_key, default_cache_dir
from kernel_muster.registry.backends.request import Compiled

GOOD = Compiled(b"\x7fELF" + bytes(range(256)) * 3, "ptxas info: \N{GREEK SMALL LETTER MU} fine")
KEY = hashlib.sha256(b"one").hexdigest()
OTHER = hashlib.sha256(b"two").hexdigest()


class Counted:
    """Builds one thing and counts how often."""

    def __init__(self, compiled: Compiled = GOOD) -> None:
        self.compiled, self.count = compiled, 0

    def __call__(self) -> Compiled:
        self.count += 1
        return self.compiled


@pytest.fixture
def cache(tmp_path) -> BuildCache:
    return BuildCache(tmp_path / "cache")


def _entry(cache: BuildCache, key: str = KEY) -> Path:
    return cache.folder / f"{key}.cubin"


def unused(folder: Path, why: str) -> None:
    """See that a cache there builds each key once, leaves nothing, and says why."""
    before = sorted(folder.rglob("*")) if folder.is_dir() else []
    cache, build = BuildCache(folder), Counted()
    assert cache.findings() == ()
    assert [cache.get_or_build(KEY, build) for _ in range(2)] == [(GOOD, False), (GOOD, True)]
    assert build.count == 1
    assert [path for path in before if path.suffix] == [path for path in sorted(folder.rglob("*")) if path.suffix]
    (found,) = cache.findings()
    assert (found.code, found.subject) == ("CACHE_NOT_KEPT", str(folder))
    assert found.why.startswith(
        "1 compiled source was not kept, and will be compiled again in the next boot; the folder is not used: "
    )
    assert why in found.why
    assert found.remedies[-1] == "or name another folder: MUSTER_CACHE_DIR=FOLDER"


def test_key_tells_apart_what_concatenates_to_the_same_text():
    assert len({cache_key(parts) for parts in ([b"ab", b"c"], [b"a", b"bc"], [b"abc"], [b"abc", b""], [b""])}) == 5


def test_second_call_reads_what_the_first_built(cache):
    build = Counted()
    assert cache.get(KEY) is None
    assert cache.get_or_build(KEY, build) == (GOOD, False)
    assert cache.get_or_build(KEY, build) == (GOOD, True)
    assert BuildCache(cache.folder).get(KEY) == GOOD
    assert build.count == 1
    assert not list(cache.folder.glob("*.part"))


def test_build_that_raises_stores_nothing_and_leaves_no_lock(cache):
    def fail() -> Compiled:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cache.get_or_build(KEY, fail)
    assert cache.get_or_build(KEY, Counted()) == (GOOD, False)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_entry_is_rebuilt_and_never_used(cache, data):
    cache.get_or_build(KEY, Counted())
    good = _entry(cache).read_bytes()
    kind = data.draw(st.sampled_from(["flip", "cut", "grow"]))
    if kind == "flip":
        position, bit = data.draw(st.integers(0, len(good) - 1)), data.draw(st.integers(0, 7))
        bad = good[:position] + bytes([good[position] ^ 1 << bit]) + good[position + 1 :]
    else:
        bad = (
            good[: data.draw(st.integers(0, len(good) - 1))]
            if kind == "cut"
            else good + data.draw(st.binary(min_size=1))
        )
    _entry(cache).write_bytes(bad)
    assert cache.get(KEY) is None
    build = Counted()
    assert cache.get_or_build(KEY, build) == (GOOD, False)
    assert build.count == 1
    assert _entry(cache).read_bytes() == good


def test_entry_under_the_name_of_another_key_is_not_used(cache):
    cache.get_or_build(KEY, Counted())
    shutil.copy(_entry(cache), _entry(cache, OTHER))
    assert cache.get(OTHER) is None


def test_entry_that_is_a_link_or_a_pipe_is_not_used(cache, tmp_path):
    cache.get_or_build(KEY, Counted())
    shutil.move(_entry(cache), tmp_path / "elsewhere")
    _entry(cache).symlink_to(tmp_path / "elsewhere")
    assert cache.get(KEY) is None
    os.mkfifo(_entry(cache, OTHER))
    assert cache.get(OTHER) is None
    assert cache.get_or_build(OTHER, Counted()) == (GOOD, False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_belongs_to_another_user_is_not_used(tmp_path):
    cache = BuildCache(tmp_path / "cache")
    cache.get_or_build(KEY, Counted())
    os.chown(_entry(cache), 12345, 12345)
    assert cache.get(KEY) is None
    os.chown(cache.folder, 12345, 12345)
    unused(cache.folder, "it belongs to user 12345, expected 0")


@pytest.mark.parametrize("part", ["", "locks"])
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o722])
def test_folder_that_others_can_write_to_is_not_used(tmp_path, mode, part):
    (tmp_path / "cache" / part).mkdir(parents=True)
    (tmp_path / "cache" / part).chmod(mode)
    unused(tmp_path / "cache", f"others may write to it ({stat.filemode(stat.S_IFDIR | mode)}), and its code would run")


def test_what_lies_in_a_folder_of_others_is_not_read(tmp_path):
    cache = BuildCache(tmp_path / "cache")
    cache.get_or_build(KEY, lambda: Compiled(b"planted", ""))
    cache.folder.chmod(0o777)
    assert BuildCache(cache.folder).get(KEY) is None
    assert BuildCache(cache.folder).get_or_build(KEY, Counted()) == (GOOD, False)


def test_folder_is_made_for_this_user_only(tmp_path):
    assert (BuildCache(tmp_path / "a" / "b").folder.stat().st_mode & 0o777) == 0o700


def test_folder_that_cannot_be_made_is_not_used(tmp_path):
    (tmp_path / "file").write_text("")
    unused(tmp_path / "file" / "cache", "it cannot be made: Not a directory")
    unused(tmp_path / "file", f"{tmp_path}/file is there and is no folder")


def test_default_folder_is_the_users_own(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "kernel-muster" / "cubins"
    assert BuildCache().folder == default_cache_dir()


def test_least_recently_used_entries_go_when_the_folder_is_full(tmp_path):
    size = 1 << 14
    cache = BuildCache(tmp_path / "cache", max_bytes=3 * size + 1000)
    keys = [hashlib.sha256(bytes([i])).hexdigest() for i in range(4)]
    for age, key in enumerate(keys[:3]):
        cache.get_or_build(key, Counted(Compiled(bytes(size), "")))
        os.utime(_entry(cache, key), (1000 + age, 1000 + age))
    assert cache.get(keys[0]) is not None  # used: now the newest
    cache.get_or_build(keys[3], Counted(Compiled(bytes(size), "")))
    assert [cache.get(key) is not None for key in keys] == [True, False, True, True]
    assert not (cache.folder / "locks" / f"{keys[1]}.lock").exists()


def test_entry_larger_than_the_cache_is_kept_until_the_next_comes(tmp_path):
    cache = BuildCache(tmp_path / "cache", max_bytes=10)
    cache.get_or_build(KEY, Counted())
    assert cache.get(KEY) == GOOD
    cache.get_or_build(OTHER, Counted())
    assert (cache.get(KEY), cache.get(OTHER)) == (None, GOOD)


def test_entry_that_somebody_is_building_is_not_evicted(tmp_path):
    cache = BuildCache(tmp_path / "cache", max_bytes=10)
    cache.get_or_build(KEY, Counted())
    with FileLock(cache.folder / "locks" / f"{KEY}.lock"):
        cache.get_or_build(OTHER, Counted())
        assert cache.get(KEY) == GOOD


def test_cache_that_cannot_store_still_builds_and_says_so(cache):
    _entry(cache).mkdir()
    assert cache.get_or_build(KEY, Counted()) == (GOOD, False)
    shutil.rmtree(cache.folder)
    cache.folder.write_text("no folder any more")
    assert cache.get_or_build(OTHER, Counted()) == (GOOD, False)
    assert cache.problems == ["could not be stored: Is a directory", "could not be locked: Not a directory"]
    (finding,) = cache.findings()
    assert (finding.code, finding.subject) == ("CACHE_NOT_KEPT", str(cache.folder))
    assert finding.why.startswith("2 compiled sources were not kept")
    assert finding.why.endswith("the first could not be stored: Is a directory")


def test_cache_that_stores_everything_has_no_finding(cache):
    cache.get_or_build(KEY, Counted())
    assert cache.findings() == ()


def test_threads_that_want_one_key_build_it_once(cache):
    build, results = Counted(), []
    slow = threading.Event()

    def build_slowly() -> Compiled:
        slow.wait(0.2)
        return build()

    threads = [threading.Thread(target=lambda: results.append(cache.get_or_build(KEY, build_slowly))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert build.count == 1
    assert sorted(found for _, found in results) == [False] + [True] * 7


WORKER = """
import sys
from pathlib import Path
from kernel_muster.registry.hardware.arch import parse_arch
from kernel_muster.registry.backends import BuildRequest, EntryPoint
from kernel_muster.registry.backends.builder import Builder
from kernel_muster.registry.backends.cache import BuildCache
from kernel_muster.registry.backends.pool import build_all
folder = Path(sys.argv[1])
requests = [
    BuildRequest(f"k{i}", folder / "k.cu", parse_arch(arch), (EntryPoint("k", ("ptr",)),), (f"-DVALUE={i}",))
    for i in range(3) for arch in ("sm_80", "sm_121a")
]
sys.stdin.readline()
for outcome in build_all(Builder(BuildCache(folder / "cache")), requests, workers=2):
    print(outcome.built.from_cache, outcome.built.digest)
"""


def test_eight_processes_on_an_empty_cache_compile_each_key_once(tmp_path):
    (tmp_path / "k.cu").write_text('extern "C" __global__ void k(float* o) { o[threadIdx.x] = VALUE; }\n')
    command = [sys.executable, "-c", WORKER, str(tmp_path)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    time.sleep(1.0)  # all are imported and waiting: they start as one
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=120)[0].splitlines() for process in processes]
    assert all(process.returncode == 0 for process in processes)
    rows = [tuple(line.split()) for lines in outputs for line in lines]
    assert len(rows) == 8 * 6
    compiled = [digest for from_cache, digest in rows if from_cache == "False"]
    assert len(compiled) == len(set(compiled)) == 6
    assert {digest for _, digest in rows} == set(compiled)


def test_lock_that_somebody_keeps_is_told_and_waited_for_no_longer_than_it_is_worth(tmp_path):
    cache, seen = BuildCache(tmp_path / "cache", lock_seconds=0.3), []
    locks = [cache.folder / "locks" / f"{key}.lock" for key in (KEY, OTHER)]

    def look() -> Compiled:
        seen.append(list(cache.waits))
        return GOOD

    with FileLock(locks[0]), FileLock(locks[1]):
        waiting = threading.Thread(target=lambda: cache.get_or_build(KEY, look))
        waiting.start()
        while waiting.is_alive() and not cache.waits:
            time.sleep(0.01)
        assert cache.waits == [str(locks[0])]
        waiting.join()
        assert cache.get(KEY) == GOOD  # built and stored without the lock
        start = time.monotonic()
        assert cache.get_or_build(OTHER, look) == (GOOD, False)
        assert time.monotonic() - start < 0.3  # the holder of one may hold all
    assert (seen, cache.findings()) == ([[], []], ())


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_entry_that_others_can_write_to_is_built_anew(tmp_path, mode):
    cache = BuildCache(tmp_path / "cache")
    key = cache_key([b"a"])
    cache.get_or_build(key, lambda: Compiled(b"one", ""))
    assert cache.get(key) == Compiled(b"one", "")
    (tmp_path / "cache" / f"{key}.cubin").chmod(mode)
    assert cache.get(key) is None
    assert cache.get_or_build(key, lambda: Compiled(b"two", "")) == (Compiled(b"two", ""), False)
    assert cache.get(key) == Compiled(b"two", "")  # written afresh, for this user alone


@pytest.mark.parametrize("error", [RuntimeError("no home"), KeyError("getpwuid(): uid not found: 12345")])
def test_user_without_a_home_builds_and_is_told_that_nothing_is_kept(monkeypatch, error):
    def no_home(*given, **named):
        raise error

    monkeypatch.setattr("platformdirs.user_cache_dir", no_home)
    cache = BuildCache()
    assert cache.get_or_build(cache_key([b"a"]), lambda: Compiled(b"one", "")) == (Compiled(b"one", ""), False)
    (finding,) = cache.findings()
    assert (finding.code, finding.subject) == ("CACHE_NOT_KEPT", "~/.cache/kernel-muster")
    assert "this user has no home folder" in finding.why
