"""The trial log: checked records, each on the disk when ``append`` returns, that survive damage to the file.

A damaged log is reported and kept as ``<log>.damaged-<n>``; the whole records continue in a new file.

A line is JSON that any tool reads::

    {"n":7,"kind":"trial","data":{"params": {"stages": 2}},"sum":"5f0c…"}

``sum`` is the start of the SHA-256 of the bytes before ``,"sum"``, so a flipped bit anywhere is noticed, and white
space counts. The envelope is written without spaces and ``data`` with them: ``{"n":`` can only be the start of a
record, which is how records are found again after damaged bytes, a lost line end included. Line 1 holds the version of
the format.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, count, pairwise
from pathlib import Path
from typing import Any, BinaryIO, Self

from optimizer.files import disk_errors, write_all, write_atomic
from search_spaces.core.bounded import parsed_json
from search_spaces.core.errors import OptimizeError, RunFolderError
from search_spaces.models.files import sync_folder

SCHEMA_VERSION = 1
MAX_RECORD_NBYTES = 16 << 20
# Two records run together when their line end is damaged; they must still be read.
_MAX_LINE_NBYTES = 2 * MAX_RECORD_NBYTES + 2
_CHUNK_NBYTES = 1 << 20
_START = re.compile(rb'\{"n":')
_RECORD = re.compile(
    rb'(\{"n":([0-9]{1,15}),"kind":"([a-z][a-z_]{0,31})","data":(.*)),"sum":"([0-9a-f]{16})"\}', re.DOTALL
)
_END = re.compile(rb',"sum":"[0-9a-f]{16}"\}')
_KIND = re.compile(r"[a-z][a-z_]{0,31}")
_HEADER_KIND = "log"
_DEVICE = "device"  # kind of the record of the machine


@dataclass(frozen=True, slots=True)
class Record:
    """One entry of a log.

    Attributes:
        n: its number, 1 for the first.
        kind: of its content, lower case.
        data: plain values as JSON gives them back (lists, never tuples).
    """

    n: int
    kind: str
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Damage:
    """Damage in a log.

    Attributes:
        line: its number, 1 for the first; 0 for a missing record.
        what: the damage in words.
        nbytes: size of the unusable data; 0 where only the order or line ends were wrong.
        count: lines in a row with this damage.
    """

    line: int
    what: str
    nbytes: int = 0
    count: int = 1

    def __str__(self) -> str:
        if not self.line:
            return self.what
        where = f"line {self.line}" if self.count == 1 else f"lines {self.line} to {self.line + self.count - 1}"
        return f"{where}: {self.what}"


@dataclass(frozen=True, slots=True)
class LogContents:
    """Contents of a log at opening: whole records by ascending ``n``, damage, and the path of the original."""

    records: tuple[Record, ...]
    damage: tuple[Damage, ...] = ()
    original: Path | None = None


@dataclass(frozen=True, slots=True)
class Scan:
    """A log on the disk: ``lines`` are the bytes of its records; it is repaired unless it is ``clean``."""

    contents: LogContents
    lines: tuple[bytes, ...]
    clean: bool


def header() -> bytes:
    """Return the first line of every log."""
    return encode(0, _HEADER_KIND, {"schema_version": SCHEMA_VERSION})


def encode(n: int, kind: str, data: Mapping[str, Any]) -> bytes:
    """Return a record as a line with its end.

    Raises:
        OptimizeError: ``data`` holds what JSON cannot represent (NaN, an object of a class, …), or is too large.
    """
    if not _KIND.fullmatch(kind):
        raise OptimizeError(f"a record's kind is a lower-case word of at most 32 letters, not {kind!r}")
    try:
        text = json.dumps(dict(data), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise OptimizeError(f"record {n} ({kind}) is not writable as JSON: {error}") from error
    body = f'{{"n":{n},"kind":"{kind}","data":{text}'.encode()
    line = b'%b,"sum":"%b"}\n' % (body, _checksum(body))
    if len(line) > MAX_RECORD_NBYTES:
        raise OptimizeError(f"record {n} ({kind}) takes {len(line)} bytes; at most {MAX_RECORD_NBYTES} are kept")
    return line


def decode(line: bytes) -> Record | str:
    """Return the record on a line (without its end), or what is wrong with the line."""
    match = _RECORD.fullmatch(line)
    if match is None:
        return "not a whole record"
    body, number, kind, text, checksum = match.groups()
    if _checksum(body) != checksum:
        return "the checksum does not match"
    try:
        data = parsed_json(text)
    except (ValueError, RecursionError) as error:
        return f"its JSON cannot be read ({error})"
    if not isinstance(data, dict):
        return "its data is not a JSON object"
    return Record(int(number), kind.decode(), data)


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest()[:16].encode()


def _lines(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Yield each line with its end and its size; of one that is too long only the start, so memory stays bounded."""
    while line := file.readline(_MAX_LINE_NBYTES):
        nbytes = len(line)
        if nbytes == _MAX_LINE_NBYTES and not line.endswith(b"\n"):
            line = line[:_CHUNK_NBYTES]
            while more := file.readline(_CHUNK_NBYTES):
                nbytes += len(more)
                if more.endswith(b"\n"):
                    break
        yield line, nbytes


def _salvage(line: bytes) -> Iterator[tuple[bytes, Record | str]]:
    """Split a damaged line where records start; yield each piece with its record or its damage."""
    first = 0
    for last in chain((m.start() for m in _START.finditer(line)), (len(line),)):
        if last == first:
            continue
        piece = line[first:last]
        first = last
        end = _END.search(piece)
        found = decode(piece[: end.end()]) if end else "not a whole record"
        if end is None or isinstance(found, str):
            yield piece, found
            continue
        yield piece[: end.end()], found
        if piece[end.end() :].rstrip(b"\n"):
            yield piece[end.end() :], "its line end is damaged, or bytes were added"
        elif last == len(line) and not piece.endswith(b"\n"):
            yield b"", "its line end is missing"


def scan(path: Path) -> Scan:
    """Read a log from its file; memory is bounded by its whole records.

    Raises:
        OSError: it cannot be read.
        RunFolderError: a newer version wrote it, or another program.
    """
    kept: dict[int, tuple[Record, bytes]] = {}
    damage: list[Damage] = []
    number, newest = 0, -1
    if not path.is_file() and path.exists():  # reading a pipe would wait for ever
        raise RunFolderError(f"{path}: not a regular file", "give another --study or --out")
    with path.open("rb") as file:
        for number, (line, nbytes) in enumerate(_lines(file), 1):
            whole = decode(line[:-1]) if line.endswith(b"\n") and nbytes == len(line) else None
            if isinstance(whole, Record) and whole.n > newest:
                kept[whole.n] = whole, line[:-1]
                newest = whole.n
                continue
            if nbytes > len(line):
                _note(damage, Damage(number, f"longer than {_MAX_LINE_NBYTES} bytes", nbytes))
                continue
            for piece, found in _salvage(line):
                if isinstance(found, str):
                    _note(damage, Damage(number, found, len(piece)))
                elif found.n in kept:
                    _note(damage, Damage(number, f"record {found.n} is there twice", len(piece)))
                else:
                    if found.n < newest:
                        _note(damage, Damage(number, f"record {found.n} is out of order"))
                    kept[found.n] = found, piece
                    newest = max(newest, found.n)
    return _judge(path, kept, damage, empty=number == 0)


def _note(damage: list[Damage], new: Damage) -> None:
    """Add damage; the same kind in consecutive lines becomes one entry, so a file of garbage gives one line."""
    if damage and damage[-1].what == new.what and damage[-1].line + damage[-1].count >= new.line:
        old = damage.pop()
        new = Damage(old.line, old.what, old.nbytes + new.nbytes, new.line - old.line + 1)
    damage.append(new)


def _judge(path: Path, kept: dict[int, tuple[Record, bytes]], damage: list[Damage], *, empty: bool) -> Scan:
    """Remove the header, and report missing records."""
    first, _ = kept.pop(0, (None, b""))
    if first is not None:
        version = first.data.get("schema_version")
        if first.kind != _HEADER_KIND or type(version) is not int or version < 1:
            raise RunFolderError(f"{path}: not a trial log of this program", "give another --study or --out")
        if version > SCHEMA_VERSION:
            raise RunFolderError(
                f"{path}: schema_version is {version}, and this version reads up to {SCHEMA_VERSION}",
                "update the program, or give another --study",
            )
    elif not empty and not any(d.line == 1 for d in damage):
        _note(damage, Damage(1, "the line with the format version is missing"))
    clean = not damage and not empty
    numbers = sorted(kept)
    for before, n in pairwise([0, *numbers]):
        if n > before + 1:
            lost = f"record {n - 1} is" if n == before + 2 else f"records {before + 1} to {n - 1} are"
            damage.append(Damage(0, f"{lost} missing"))
    contents = LogContents(tuple(kept[n][0] for n in numbers), tuple(damage))
    return Scan(contents, tuple(kept[n][1] for n in numbers), clean)


class TrialLog:
    """An open log; its lock keeps other processes out until it is closed or its process dies. Not thread-safe."""

    def __init__(self, path: Path, descriptor: int, nbytes: int, following: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._end = nbytes, following  # one value, so that an interrupt finds both old or both new
        self._unsettled = False
        self.empty = following <= 1
        """Whether it holds no record but that of the device: nothing would have to be measured again."""
        _open_logs.add(self)

    @classmethod
    def open(cls, path: Path) -> tuple[TrialLog, LogContents]:
        """Open or create the log at ``path``, repair it if it is damaged, and return it with its contents.

        Raises:
            RunFolderError: it cannot be read or written, another process has it open, or a newer version wrote it.
        """
        with disk_errors(path):
            descriptor = _open_locked(path)
            try:
                found = scan(path)
                contents = found.contents
                if not found.clean:
                    contents = _mend(path, found)
                    fresh = _open_locked(path)
                    os.close(descriptor)
                    descriptor = fresh
                nbytes = os.fstat(descriptor).st_size
            except BaseException:
                os.close(descriptor)
                raise
        last = contents.records[-1].n if contents.records else 0
        return cls(path, descriptor, nbytes, last + 1), contents

    def append(self, kind: str, data: Mapping[str, Any]) -> Record:
        """Add a record and return it as a reader of the log gets it; when this returns, it is on the disk.

        Raises:
            RunFolderError: it could not be written (the log is as before), or the file was changed by someone else.
            OptimizeError: ``data`` holds what JSON cannot represent (NaN, an object of a class, …), or is too large.
        """
        if self._descriptor < 0:
            raise OptimizeError(f"{self.path}: the log is closed")
        nbytes, n = self._end
        line = encode(n, kind, data)
        record = decode(line[:-1])
        if isinstance(record, str):
            raise OptimizeError(f"{self.path}: record {n} would not be readable: {record}")
        with disk_errors(self.path, f"all {n - 1} records before are safe; make room if need be, and start again"):
            self._settle()
            self._unsettled = True
            try:
                write_all(self._descriptor, line)
                os.fsync(self._descriptor)
            except BaseException:
                # The first error matters; the next append or open cuts the torn record off.
                with contextlib.suppress(OSError, RunFolderError):
                    self._settle()
                raise
            self._end = nbytes + len(line), n + 1
            self._unsettled = False
            self.empty = self.empty and kind == _DEVICE
        return record

    def close(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _settle(self) -> None:
        """Cut off what an interrupted append left behind."""
        status = os.fstat(self._descriptor)
        nbytes, _ = self._end
        if self._unsettled and status.st_size > nbytes:
            os.ftruncate(self._descriptor, nbytes)
            os.fsync(self._descriptor)
        elif status.st_size != nbytes or status.st_nlink == 0:
            raise RunFolderError(f"{self.path}: the file was changed or removed while it was in use", "start again")
        self._unsettled = False


_open_logs: weakref.WeakSet[TrialLog] = weakref.WeakSet()


def _close_in_child() -> None:
    # A forked worker that outlives a killed parent would keep the lock, and nobody could resume.
    for log in list(_open_logs):
        with contextlib.suppress(OSError):
            log.close()


os.register_at_fork(after_in_child=_close_in_child)


def read_log(path: Path) -> LogContents:
    """Read a log without locking or repairing it; its last record may be incomplete.

    Raises:
        RunFolderError: it cannot be read, or a newer version wrote it.
    """
    with disk_errors(path):
        return scan(path).contents


def _mend(path: Path, found: Scan) -> LogContents:
    """Keep a damaged log under another name, then replace it by its whole records; safe if killed in between."""
    original = _keep(path) if found.contents.damage else None
    write_atomic(path, header() + b"".join(line + b"\n" for line in found.lines))
    return LogContents(found.contents.records, found.contents.damage, original)


def _keep(path: Path) -> Path:
    for i in count(1):
        other = path.with_name(f"{path.name}.damaged-{i}")
        try:
            other.hardlink_to(path)
        except FileExistsError:
            continue
        except OSError:  # a file system without hard links
            if other.exists():
                continue
            shutil.copyfile(path, other)
        break
    return other


def _open_locked(path: Path) -> int:
    """Return a locked descriptor of the file at ``path``, created if necessary."""
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                sync_folder(path.parent)
                return descriptor
        except FileNotFoundError:
            pass
        except BlockingIOError:
            holder = _holder(descriptor)
            os.close(descriptor)
            who = f"process {holder}" if holder else "another process"
            raise RunFolderError(f"{path}: in use by {who}", "wait for it, or give another --study") from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the log was repaired between open and lock: take the new file


def _holder(descriptor: int) -> int | None:
    """Return the process that has the lock, where Linux reports it."""
    status = os.fstat(descriptor)
    name = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5] == name and int(fields[4]) > 0:
                return int(fields[4])
    return None
