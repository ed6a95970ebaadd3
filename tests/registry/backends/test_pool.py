from dataclasses import replace
from threading import Event
from types import SimpleNamespace

import pytest
from filelock import FileLock
from kernel_muster.registry.backends.builder import Builder
from kernel_muster.registry.backends.cache import BuildCache
from kernel_muster.registry.backends.pool import BuildPool, build_all
from kernel_muster.registry.backends.request import BuildFailure
from kernel_muster.registry.launch.device import BuildRunner


@pytest.fixture
def requests(make_request, tmp_path):
    good = make_request(source=tmp_path / "good.cu")
    broken = make_request("broken", source=tmp_path / "broken.cu")
    return [good, broken, replace(good, options=("-DONE",)), replace(broken, name="again")]


def test_all_results_and_failures_come_back_in_order(builder, requests):
    outcomes = build_all(builder, requests)
    assert [outcome.request for outcome in outcomes] == requests
    assert [outcome.built is not None for outcome in outcomes] == [True, False, True, False]
    assert [outcome.failure is None for outcome in outcomes] == [True, False, True, False]
    assert outcomes[1].failure.code == "COMPILE_FAILED"
    assert all(outcome.seconds > 0 for outcome in outcomes)


def test_progress_is_told_after_each_build(builder, requests):
    seen = []
    outcomes = build_all(builder, requests, seen.append, workers=2)
    assert [(progress.done, progress.total) for progress in seen] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert {id(progress.outcome) for progress in seen} == {id(outcome) for outcome in outcomes}


def test_runner_says_how_many_builds_there_are_before_the_first_ends(builder, requests):
    good, broken = requests[:2]
    runner = BuildRunner(good.arch, builder)
    for request in (good, broken, good):
        runner.start(
            SimpleNamespace(backend=SimpleNamespace(request=lambda arch, one=request: one, plan=None), key="a::b")
        )
    seen = []
    runner.join(lambda *progress: seen.append(progress))
    assert seen[0] == (0, 2, f"builds for {good.arch}, 2 in all")
    assert [row[:2] for row in seen[1:]] == [(1, 2), (2, 2)]
    assert {row[2] for row in seen[1:]} == {f"build of {good.name}", f"build of {broken.name}"}


def test_equal_requests_are_built_once(builder, make_request):
    with BuildPool(builder) as pool:
        first = pool.submit(make_request())
        assert pool.submit(make_request()) is first
        assert len(pool.join()) == 1


def test_one_build_can_be_waited_for_before_the_rest(builder, make_request):
    with BuildPool(builder) as pool:
        assert pool.submit(make_request()).result().built.entries
        assert pool.submit(make_request()).done()


def test_without_a_compiler_every_request_has_its_failure(requests):
    class NoToolkit(Builder):
        @property
        def toolkit(self):
            raise BuildFailure("TOOLCHAIN_MISSING", "no NVRTC wheel is installed")

    outcomes = build_all(NoToolkit(), requests)
    assert {outcome.failure.code for outcome in outcomes} == {"TOOLCHAIN_MISSING"}


def test_exception_that_is_no_build_failure_is_raised(make_request):
    class Broken(Builder):
        def begin(self, request):
            raise ZeroDivisionError("a bug")

    class BrokenLater(Builder):
        def finish(self, begun):
            raise ZeroDivisionError("a bug")

    for builder in (Broken(), BrokenLater()):
        with pytest.raises(ZeroDivisionError, match="a bug"):
            build_all(builder, [make_request()])


def test_what_the_cache_has_comes_first_then_the_costliest(make_request, tmp_path):
    def request(name, lines):
        made = make_request(source=tmp_path / f"{name}.cu")
        made.source.write_text(made.source.read_text() + "// more\n" * lines)
        return made

    cache, order = BuildCache(tmp_path / "cache"), []

    class Noting(Builder):
        def finish(self, begun):
            order.append(begun.request.source.stem)
            return super().finish(begun)

    last = request("kept", 0)
    Builder(cache).build(last)
    with BuildPool(Noting(cache), workers=1) as pool:
        held = Event()
        pool._executor.submit(held.wait)  # until all have been submitted
        for one in (request("short", 1), request("long", 100), request("middle", 10), last):
            pool.submit(one)
        held.set()
        assert [outcome.built.from_cache for outcome in pool.join()] == [False, False, False, True]
    assert order == ["kept", "long", "middle", "short"]


def test_closed_pool_builds_at_once_and_tells_failures(builder, make_request, tmp_path):
    pool = BuildPool(builder)
    pool.close()
    assert pool.submit(make_request()).result(timeout=0).built.entries
    broken = pool.submit(make_request("broken", source=tmp_path / "broken.cu"))
    assert broken.result(timeout=0).failure.code == "COMPILE_FAILED"


def test_interruption_cancels_what_has_not_begun(builder, make_request):
    def interrupt(progress):
        raise KeyboardInterrupt

    pool = BuildPool(builder, workers=1)
    futures = [pool.submit(replace(make_request(), options=(f"-DN={i}",))) for i in range(30)]

    def join() -> None:
        with pool:
            pool.join(interrupt)

    with pytest.raises(KeyboardInterrupt):
        join()
    assert futures[-1].cancelled()


def test_lock_that_keeps_a_build_waiting_is_shown_with_its_path(tmp_path, make_request):
    cache = BuildCache(tmp_path / "cache")
    builder, request = Builder(cache), make_request()
    lock, seen = cache.folder / "locks" / f"{builder.key(request)}.lock", []
    runner = BuildRunner(request.arch, builder)

    def show(*progress):
        seen.append(progress)
        if progress[2].startswith("waiting"):
            held.release()

    held = FileLock(lock)
    held.acquire()
    runner.start(SimpleNamespace(backend=SimpleNamespace(request=lambda arch: request, plan=None), key="a::b"))
    runner.join(show)
    assert seen == [
        (0, 1, f"builds for {request.arch}, 1 in all"),
        (0, 1, f"waiting for another process, which holds {lock}; for 60 s at most"),
        (1, 1, f"build of {request.name}"),
    ]
