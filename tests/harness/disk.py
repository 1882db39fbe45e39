"""A disk in memory that remembers every operation, so that tests can see each state a crash may leave behind.

What was not synced yet may or may not have happened, one operation independently of the other: a write, a name that was
made, moved or removed. A rename happens as a whole or not at all. What was synced has happened.
"""

from __future__ import annotations

import errno
import itertools
import os
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from bagpipe.checkpoint.disk import Disk, NewFile, OpenFile

ROOT = Path("/")


class _File:
    def __init__(self):
        self.data = bytearray()


class _Directory:
    def __init__(self):
        self.names = {}


@dataclass(frozen=True)
class _Write:
    file: _File
    start: int
    data: bytes


@dataclass(frozen=True)
class _Named:
    """A name was made (`old` None), removed (`new` None) or moved, all in one directory."""

    directory: _Directory
    node: _File | _Directory
    old: str | None
    new: str | None


@dataclass(frozen=True)
class _Synced:
    node: _File | _Directory


@dataclass
class Fault:
    """The `at`-th operation, counted from 0, fails with this error; `only` restricts what is counted."""

    at: int
    number: int
    only: frozenset[str] | None = None
    seen: list[str] = field(default_factory=list)

    def reach(self, name):
        if self.only is not None and name not in self.only:
            return False
        self.seen.append(name)
        return len(self.seen) == self.at + 1


class SimulatedDisk(Disk):
    """In memory; every operation of a disk is its own."""

    def __init__(self, root=None):
        self.root = root or _Directory()
        self.log = []
        self.fault = None

    # What code under test does.

    def create(self, path):
        self._reach("create", path)
        parent = self._parent(path)
        if path.name in parent.names:
            raise _error(errno.EEXIST, path)
        return _Handle(self, path, self._link(parent, path.name, _File()))

    def open(self, path):
        self._reach("open", path)
        node = self._find(path)
        if isinstance(node, _Directory):
            raise _error(errno.EINVAL, path)
        return _Reading(self, path, node)

    def make_directory(self, path):
        self._reach("make_directory", path)
        parent = self._parent(path)
        if path.name in parent.names:
            raise _error(errno.EEXIST, path)
        self._link(parent, path.name, _Directory())

    def files(self, path):
        return self._list(path, _File)

    def directories(self, path):
        return self._list(path, _Directory)

    def rename(self, source, target):
        self._reach("rename", source)
        parent = self._parent(source)
        assert parent is self._parent(target), "a move to another directory is not simulated"
        node = self._find(source)
        there = parent.names.get(target.name)
        if isinstance(there, _Directory) and there.names:
            raise _error(errno.ENOTEMPTY, target)
        del parent.names[source.name]
        parent.names[target.name] = node
        self.log.append(_Named(parent, node, source.name, target.name))

    def unlink(self, path):
        self._reach("unlink", path)
        self._remove(path, _File)

    def remove_directory(self, path):
        self._reach("remove_directory", path)
        if self._find(path).names:
            raise _error(errno.ENOTEMPTY, path)
        self._remove(path, _Directory)

    def sync_directory(self, path):
        self._reach("sync_directory", path)
        self.log.append(_Synced(self._find(path)))

    # What tests do.

    def contents(self):
        """Every file's bytes by path, and None for each directory."""
        return _contents(self.root)

    def write_file(self, path, data):
        """Put bytes in the place of a file's."""
        self._find(path).data = bytearray(data)

    def crashed(self, length, lost=frozenset()):
        """The disk after a crash that came after so many operations and took those with these numbers with it."""
        return SimulatedDisk(self._replay([op for number, op in enumerate(self.log[:length]) if number not in lost]))

    def unsynced(self, length):
        """Numbers of the operations that a crash after so many operations may take with it."""
        synced, found = set(), []
        for number in range(length - 1, -1, -1):
            op = self.log[number]
            if isinstance(op, _Synced):
                synced.add(id(op.node))
            elif id(op.directory if isinstance(op, _Named) else op.file) not in synced:
                found.append(number)
        return found[::-1]

    def crashes(self, length, random, at_most=256):
        """Disks after a crash there: all there can be if they are few, else with nothing, everything or some lost."""
        numbers = self.unsynced(length)
        if 2 ** len(numbers) <= at_most:
            choices = itertools.chain.from_iterable(
                itertools.combinations(numbers, count) for count in range(len(numbers) + 1)
            )
        else:
            alone = [[number] for number in numbers]
            but_one = [[other for other in numbers if other != number] for number in numbers]
            tails = [numbers[start:] for start in range(len(numbers))]
            drawn = [[number for number in numbers if random.random() < 0.5] for _ in range(at_most)]
            choices = [[], *alone, *but_one, *tails, *drawn]
        for lost in choices:
            yield self.crashed(length, frozenset(lost))

    # How it works.

    def _replay(self, log):
        clones = {id(self.root): _Directory()}

        def clone(node):
            return clones.setdefault(id(node), type(node)())

        for op in log:
            if isinstance(op, _Write):
                data = clone(op.file).data
                data.extend(bytes(max(0, op.start - len(data))))
                data[op.start : op.start + len(op.data)] = op.data
            elif isinstance(op, _Named):
                names, node = clone(op.directory).names, clone(op.node)
                if op.old is not None and names.get(op.old) is node:
                    del names[op.old]
                if op.new is not None:
                    names[op.new] = node
        return clones[id(self.root)]

    def _reach(self, name, path):
        if self.fault is not None and self.fault.reach(name):
            raise _error(self.fault.number, path)

    def _link(self, parent, name, node):
        parent.names[name] = node
        self.log.append(_Named(parent, node, None, name))
        return node

    def _remove(self, path, kind):
        node = self._find(path)
        if not isinstance(node, kind):
            raise _error(errno.EISDIR if kind is _File else errno.ENOTDIR, path)
        parent = self._parent(path)
        del parent.names[path.name]
        self.log.append(_Named(parent, node, path.name, None))

    def _list(self, path, kind):
        self._reach("list", path)
        node = self._find(path)
        if not isinstance(node, _Directory):
            raise _error(errno.ENOTDIR, path)
        return sorted(name for name, part in node.names.items() if isinstance(part, kind))

    def _parent(self, path):
        return self._find(path.parent)

    def _find(self, path):
        node = self.root
        for name in PurePosixPath(path).parts[1:]:
            if not isinstance(node, _Directory):
                raise _error(errno.ENOTDIR, path)
            if name not in node.names:
                raise _error(errno.ENOENT, path)
            node = node.names[name]
        return node


class _Handle(NewFile):
    def __init__(self, disk, path, file):
        super().__init__(-1)
        self.disk, self.path, self.file = disk, path, file

    def write(self, data):
        data = bytes(data)
        try:
            self.disk._reach("write", self.path)
        except OSError:
            self._add(data[: len(data) // 2])
            raise
        self._add(data)

    def _add(self, data):
        self.disk.log.append(_Write(self.file, len(self.file.data), data))
        self.file.data += data

    def sync(self):
        self.disk._reach("sync", self.path)
        self.disk.log.append(_Synced(self.file))


class _Reading(OpenFile):
    def __init__(self, disk, path, file):
        self._fd = -1
        self.disk, self.path, self.file = disk, path, file
        self.num_bytes = len(file.data)

    def read_into(self, buffer, start=0):
        self.disk._reach("read", self.path)
        data = self.file.data[start : start + len(buffer)]
        buffer[: len(data)] = data
        return len(data)


def _contents(directory, path=ROOT):
    found = {}
    for name, node in directory.names.items():
        if isinstance(node, _Directory):
            found[str(path / name)] = None
            found |= _contents(node, path / name)
        else:
            found[str(path / name)] = bytes(node.data)
    return found


def _error(number, path):
    return OSError(number, os.strerror(number), str(path))
