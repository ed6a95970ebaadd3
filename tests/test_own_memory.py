"""The measure of a process's own device memory, on lists as the driver gives them."""

from own_memory import Process, own_bytes, own_pids


def test_own_memory_is_that_of_the_process_and_of_no_other() -> None:
    rows = [Process(pid=7, used_bytes=100), Process(pid=8, used_bytes=900)]
    assert own_bytes(rows, {8, 4021}) == 900
    assert own_bytes(rows, {9}) is None


def test_process_has_a_number_in_each_namespace() -> None:
    assert own_pids("Name:\tx\nNSpid:\t4021\t8\n", 8) == {8, 4021}
    assert own_pids("Name:\tx\n", 8) == {8}


def test_memory_that_the_driver_does_not_tell_is_unknown() -> None:
    assert own_bytes([Process(pid=8, used_bytes=(1 << 64) - 1)], {8}) is None
    assert own_bytes([Process(pid=8, used_bytes=1), Process(pid=9, used_bytes=2)], {8, 9}) is None
