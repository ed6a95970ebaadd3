"""A content-addressed cache of compiled code that any number of processes may share.

An entry's name is the digest of everything that determines its content, so that an entry is never wrong for its
name, only damaged; whatever is not exactly what was written is built anew. Entries appear by rename, one process
builds a key while the others wait for it, but not for ever, and the least recently used go when the folder grows too
large.
"""

import hashlib
import os
import stat
import struct
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout
from kernel_muster.registry.backends.request import Compiled
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.logs import logger
from kernel_muster.registry.messages.message import message
from kernel_muster.registry.paths import without_home

# Part of the magic: another layout of the file never reads as this one.
_MAGIC = b"kernel-muster cubin 1\n"
_HEAD = struct.Struct(f"<{len(_MAGIC)}s32s32sQ")  # magic, key, digest of the rest, length of the log
DEFAULT_MAX_BYTES = 1 << 29
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_POLL_SECONDS = 0.01
#: How long another process is waited for, which may be suspended: a source takes some seconds. A second build of a key
#: costs no more than that.
LOCK_SECONDS = 60.0


def cache_key(parts: Iterable[bytes]) -> str:
    """Return the digest of all parts; their lengths are hashed too, so that no two lists give one text."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)
    return digest.hexdigest()


def default_cache_dir() -> Path:
    """Return the user's cache folder for compiled kernels; RuntimeError for a user without a home."""
    return Path(platformdirs.user_cache_dir("kernel-muster", appauthor=False)) / "cubins"


class BuildCache:
    """Compiled code by key in a folder of the user's own.

    A folder that cannot be made, or that others can write to, is neither read nor written: its code would run with
    this process's rights. ``problems`` collects what kept an entry from being stored, also a full disk: no build fails
    for it, and ``findings`` tells it. ``waits`` are the locks that somebody else holds and threads here wait for.
    """

    def __init__(
        self, folder: Path | None = None, max_bytes: int = DEFAULT_MAX_BYTES, lock_seconds: float = LOCK_SECONDS
    ) -> None:
        self.max_bytes = max_bytes
        self.problems: list[str] = []
        try:
            self.folder = (default_cache_dir() if folder is None else Path(folder)).absolute()
            self.unusable = _unusable(self.folder)
        except (RuntimeError, KeyError):  # no HOME, and no entry for this user
            self.folder, self.unusable = Path("~/.cache/kernel-muster"), "this user has no home folder"
        self.waits: list[str] = []
        self._patience = lock_seconds
        self._unkept: dict[str, Compiled] = {}

    def findings(self) -> tuple[Finding, ...]:
        """Return one finding for all that could not be stored."""
        if not self.problems:
            return ()
        count = len(self.problems)
        if self.unusable:
            cause = message("cache_not_kept.unusable", problem=str(self.unusable))
        else:
            cause = message("cache_not_kept.first", problem=str(self.problems[0]))
        why = message("cache_not_kept.one" if count == 1 else "cache_not_kept", count=count, cause=cause)
        first = message("remedy.own_folder" if self.unusable else "remedy.free_space")
        remedies = (first, message("remedy.other_folder"))
        return (Finding("CACHE_NOT_KEPT", without_home(self.folder), why, remedies=remedies),)

    def get(self, key: str) -> Compiled | None:
        """Return what is stored under a key and mark it as used; None if there is nothing or it is damaged."""
        if self.unusable:
            return self._unkept.get(key)
        path = self._path(key)
        data = _read_own(path)
        compiled = None if data is None else _decode(key, data)
        if compiled is not None:
            with suppress(OSError):  # evicted by another process after it was read
                os.utime(path)
        return compiled

    def get_or_build(self, key: str, build: Callable[[], Compiled]) -> tuple[Compiled, bool]:
        """Return what is stored under a key, or build and store it; and whether it was there.

        Of all processes and threads that want a key, one builds it. If ``build`` raises, nothing is stored, and the
        next of those that wait tries. One that has waited too long builds it beside the other.
        """
        if (found := self.get(key)) is not None:
            return found, True
        if self.unusable:
            compiled = self._unkept[key] = build()
            self.problems.append(self.unusable)
            return compiled, False
        lock = FileLock(self._lock(key), poll_interval=_POLL_SECONDS)
        try:
            self._acquire(lock)
        except OSError as error:
            self._note("could not be locked", error)
            return build(), False
        try:
            if (found := self.get(key)) is not None:
                return found, True
            compiled = build()
            try:
                self._store(key, compiled)
                self._evict(keep=key)
            except OSError as error:
                self._note("could not be stored", error)
            return compiled, False
        finally:
            lock.release()

    def _acquire(self, lock: FileLock) -> None:
        """Take a lock, or go on without it where its owner keeps it too long."""
        try:
            lock.acquire(timeout=0)
            return
        except Timeout:
            self.waits.append(lock.lock_file)
        try:
            lock.acquire(timeout=self._patience)
        except Timeout:
            self._patience = 0.0  # what does not end may hold the others too
            logger().info("cache.lock_kept", lock=lock.lock_file, effect="built without it")
        finally:
            self.waits.remove(lock.lock_file)

    def _note(self, what: str, error: OSError) -> None:
        self.problems.append(f"{what}: {error.strerror or error}")

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.cubin"

    def _lock(self, key: str) -> Path:
        return self.folder / "locks" / f"{key}.lock"

    def _store(self, key: str, compiled: Compiled) -> None:
        handle, name = tempfile.mkstemp(prefix=f"{key}.", suffix=".part", dir=self.folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_encode(key, compiled))
                file.flush()
                os.fsync(file.fileno())  # a crash must not leave a name without its bytes
            os.replace(name, self._path(key))
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise

    def _evict(self, keep: str) -> None:
        """Delete the least recently used entries until the folder is within its size; never the one just stored."""
        rows = []
        for path in (*self.folder.glob("*.cubin"), *self.folder.glob("*.part")):
            with suppress(OSError):
                status = path.stat()
                rows.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in rows)
        for _, size, path in sorted(rows):
            if total <= self.max_bytes:
                return
            key = path.name.partition(".")[0]
            if key != keep and self._delete(key, path):
                total -= size

    def _delete(self, key: str, path: Path) -> bool:
        """Delete an entry unless somebody is at work on it."""
        lock = FileLock(self._lock(key))
        try:
            with lock.acquire(timeout=0):
                path.unlink(missing_ok=True)
                self._lock(key).unlink(missing_ok=True)
        except (Timeout, OSError):
            return False
        return True


def _unusable(folder: Path) -> str:
    """Make a cache's folders, and return why they are not to be used; nothing if they are."""
    try:
        for part in (folder, folder / "locks"):
            part.mkdir(mode=0o700, parents=True, exist_ok=True)
            if why := _not_own(part.stat()):
                return why
    except FileExistsError as error:
        return f"{error.filename or folder} is there and is no folder"
    except OSError as error:
        return f"it cannot be made: {error.strerror or error}"
    return ""


def _not_own(status: os.stat_result) -> str:
    if not hasattr(os, "geteuid"):
        return ""
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}, expected {os.geteuid()}"
    if status.st_mode & _WRITABLE_BY_OTHERS:
        mode = stat.filemode(status.st_mode)
        return f"others may write to it ({mode}), and its code would run with this process's rights"
    return ""


def _read_own(path: Path) -> bytes | None:
    """Read a regular file that this user alone can write to; None if it is anything else."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return None
    # open() with a handle refuses a folder before anything could close it, hence the check first.
    status = os.fstat(handle)
    if _not_own(status) or not stat.S_ISREG(status.st_mode):
        os.close(handle)
        return None
    with os.fdopen(handle, "rb") as file:
        return file.read()


def _encode(key: str, compiled: Compiled) -> bytes:
    log = compiled.log.encode()
    rest = log + compiled.cubin
    return (
        _HEAD.pack(_MAGIC, bytes.fromhex(key), hashlib.sha256(_covered(key, len(log), rest)).digest(), len(log)) + rest
    )


def _decode(key: str, data: bytes) -> Compiled | None:
    """Return what an entry holds; None unless every byte is as it was written, under this key."""
    if len(data) < _HEAD.size:
        return None
    magic, stored_key, digest, log_size = _HEAD.unpack_from(data)
    rest = data[_HEAD.size :]
    if magic != _MAGIC or stored_key != bytes.fromhex(key) or log_size > len(rest):
        return None
    if hashlib.sha256(_covered(key, log_size, rest)).digest() != digest:
        return None
    return Compiled(rest[log_size:], rest[:log_size].decode())


def _covered(key: str, log_size: int, rest: bytes) -> bytes:
    return bytes.fromhex(key) + struct.pack("<Q", log_size) + rest
