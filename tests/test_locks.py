"""Locks between processes, and files that appear whole or not at all."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import filelock
import pytest

from raywl.errors import LockError
from raywl.locks import acquire_within, atomic_writer, get_lock

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run processes as two other users")


def name_of(model: str | Path, folder: Path) -> str:
    return os.path.basename(get_lock(model, folder).lock_file)


@pytest.fixture
def public():
    """A folder that other users can reach, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="rwlock", dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


_BECOME = """
import os, sys, tempfile
from raywl.locks import get_lock
# What is imported late isn't readable for the other user, where Python itself is in root's home.
with tempfile.TemporaryDirectory() as folder, get_lock("warm/up", folder):
    pass
uid, umask = int(sys.argv.pop()), int(sys.argv.pop())
os.setgroups([])
os.setgid(uid)
os.setuid(uid)
os.umask(umask)
"""


def run_as(uid: int, code: str, *args: object, umask: int = 0o022) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _BECOME + code, *map(str, args), str(umask), str(uid)],
        capture_output=True,
        text=True,
        timeout=60,
    )


# One lock, or two


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a-b/c", "a/b-c"),
        ("a/b", "a-b"),
        ("a/b", "a--b"),
        ("Org/x", "org/x"),
        ("a/b.c", "a/b-c"),
        ("ä/b", "ö/b"),
    ],
)
def test_different_models_never_share(tmp_path, one, other):
    assert name_of(one, tmp_path) != name_of(other, tmp_path)


def test_spellings_of_one_folder_are_one_lock(tmp_path, monkeypatch):
    """Trailing slash, relative and absolute, through a link, and as a path object."""
    model = tmp_path / "models" / "one"
    model.mkdir(parents=True)
    (tmp_path / "link").symlink_to(model)
    monkeypatch.chdir(tmp_path)
    spellings = [
        model, str(model), f"{model}/", "models/one", "./models/one", "models/../models/one/", "link",
        str(tmp_path / "models" / "." / "one"),
    ]  # fmt: skip
    assert len({name_of(spelling, tmp_path) for spelling in spellings}) == 1
    assert name_of("models/one", tmp_path) != name_of("models/two", tmp_path)


def test_a_folder_that_is_not_there_yet_has_one_lock(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert name_of("./later", tmp_path) == name_of(tmp_path / "later", tmp_path)


def test_a_repository_has_one_lock_whatever_the_slash(tmp_path):
    assert name_of("org/name/", tmp_path) == name_of("org/name", tmp_path)


@pytest.mark.parametrize(
    "model", ["o/" + "n" * 4000, "ü" * 300, "/" + "deep/" * 800, "...", "/", "a\nb"], ids=repr
)
def test_file_names_fit(tmp_path, model):
    """Whatever the model is called, the file can be made and locked."""
    lock = get_lock(model, tmp_path)
    assert len(os.fsencode(os.path.basename(lock.lock_file))) <= 255
    assert os.path.dirname(lock.lock_file) == str(tmp_path)
    with acquire_within(lock, 5, "test"):
        assert os.path.exists(lock.lock_file)
        assert {path.name.encode().__len__() <= 255 for path in tmp_path.iterdir()} == {True}


def test_long_names_with_one_beginning_differ(tmp_path):
    assert name_of("o/" + "n" * 400 + "1", tmp_path) != name_of("o/" + "n" * 400 + "2", tmp_path)


def test_the_folder_is_made(tmp_path):
    with get_lock("org/name", tmp_path / "not" / "there"):
        pass
    assert (tmp_path / "not" / "there").is_dir()


def test_the_system_folder_is_the_default(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert get_lock("org/name").lock_file.startswith(str(tmp_path))


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
    """Two processes that work in different folders by then must still mean one lock."""
    monkeypatch.chdir(tmp_path)
    lock = get_lock("org/model", "locks")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with lock:
        assert os.listdir(".") == []
        assert os.path.dirname(lock.lock_file) == str(tmp_path / "locks")


def test_a_lock_excludes_and_is_a_filelock(tmp_path):
    first, second = get_lock("org/name", tmp_path), get_lock("org/name", tmp_path)
    assert isinstance(first, filelock.BaseFileLock)
    held = subprocess.run(
        [sys.executable, "-c", _TRY, first.lock_file], capture_output=True, text=True, check=True, timeout=60
    )
    assert held.stdout.strip() == "free"
    with first:
        held = subprocess.run(
            [sys.executable, "-c", _TRY, first.lock_file],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert held.stdout.strip() == "held"
    with second:
        pass


_TRY = """
import sys, filelock
try:
    filelock.FileLock(sys.argv[1]).acquire(timeout=0)
    print("free")
except filelock.Timeout:
    print("held")
"""


# Users


_TAKE = """
import os, sys
from raywl.errors import LockError
from raywl.locks import get_lock
try:
    with get_lock("org/name", sys.argv[1]) as lock:
        print("locked")
except LockError as error:
    print("LockError", error)
"""


@root_only
def test_two_users_of_a_sticky_folder(public):
    """C55: as in /tmp. Each has a folder of his own there, and can always lock."""
    sticky = public / "tmp"
    sticky.mkdir()
    sticky.chmod(0o1777)
    for uid in (1111, 2222, 1111):
        done = run_as(uid, _TAKE, sticky)
        assert done.stdout == "locked\n", done.stderr
    assert {path.stat().st_uid for path in sticky.iterdir()} == {1111, 2222}


@root_only
def test_somebody_else_took_the_name(public):
    """Neither a bare PermissionError nor a lock in another user's hands."""
    sticky = public / "tmp"
    sticky.mkdir()
    sticky.chmod(0o1777)
    taken = sticky / "raywl-locks-2222"
    taken.mkdir(mode=0o777)
    taken.chmod(0o777)
    os.chown(taken, 1111, 1111)
    done = run_as(2222, _TAKE, sticky)
    assert done.stdout.startswith(f"LockError {taken}"), done.stderr
    assert "cache_dir" in done.stdout


@root_only
@pytest.mark.parametrize("umask", [0o022, 0o077], ids=oct)
def test_two_users_of_a_shared_folder(public, umask):
    """C62: without the sticky bit they share one lock file, whatever the umask of who made it."""
    shared = public / "cache"
    shared.mkdir()
    shared.chmod(0o777)
    for uid in (1111, 2222):
        done = run_as(uid, _TAKE, shared, umask=umask)
        assert done.stdout == "locked\n", done.stderr
    (lock,) = shared.glob("*.lock")
    assert stat.S_IMODE(lock.stat().st_mode) == 0o666


@root_only
@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_may_not_be_locked_names_itself_and_the_remedy(public, what):
    folder = public / "cache"
    folder.mkdir()
    path = folder
    if what == "file":
        folder.chmod(0o777)
        path = Path(get_lock("org/name", folder).lock_file)
        path.touch(mode=0o600)
        path.chmod(0o600)
    done = run_as(2222, _TAKE, folder)
    assert done.stdout.startswith(f"LockError {path}"), done.stderr
    assert "give another cache_dir" in done.stdout


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(LockError, match="can't hold locks"):
        get_lock("org/name", tmp_path / "file")


# Waiting


_HOLD = """
import sys
from raywl.locks import acquire_within, get_lock
with acquire_within(get_lock("org/name", sys.argv[1]), 10, "holding"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_a_wait_has_an_end_that_names_the_holder(tmp_path, holder):
    with (
        pytest.raises(LockError) as caught,
        acquire_within(get_lock("org/name", tmp_path), 0.2, "download of x"),
    ):
        raise AssertionError
    assert f"process {holder.pid} of " in caught.value.holder
    assert " since 20" in caught.value.holder
    assert "download of x: waited 0.2 s" in str(caught.value)
    assert caught.value.path.startswith(str(tmp_path))


def test_a_holder_that_left_no_note_is_named(tmp_path):
    """C57: whoever holds the lock by itself, as `with get_lock(...)` does, is named as well."""
    code = (
        "import sys; from raywl.locks import get_lock\n"
        "with get_lock('org/name', sys.argv[1]): print('held', flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], stdin=pipe, stdout=pipe, text=True
    ) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            lock = get_lock("org/name", tmp_path)
            # Some file systems have another device number there than for `stat`.
            if str(os.stat(lock.lock_file).st_ino) not in Path("/proc/locks").read_text():
                pytest.skip("the kernel doesn't tell whose locks these are")
            with pytest.raises(LockError) as caught, acquire_within(lock, 0.2, "test"):
                raise AssertionError
            assert caught.value.holder.startswith(f"process {holder.pid} on ")
        finally:
            holder.kill()


def test_a_lock_of_a_dead_process_is_free_and_its_note_not_believed(tmp_path, holder):
    holder.kill()
    holder.wait()
    lock = get_lock("org/name", tmp_path)
    assert list(tmp_path.glob("*.holder"))
    with acquire_within(lock, 10, "test"):
        # Now held, but the note of the dead one is put back.
        (note,) = tmp_path.glob("*.holder")
        note.write_text(note.read_text().replace(f'"pid": {os.getpid()}', f'"pid": {holder.pid}'))
        code = (
            "import sys; from raywl.locks import *; from raywl.errors import LockError\n"
            "try:\n with acquire_within(get_lock('org/name', sys.argv[1]), 0, 'x'): pass\n"
            "except LockError as error: print(error.holder)"
        )
        said = subprocess.run(
            [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=60
        )
        # As the kernel says, where it does.
        assert said.stdout.startswith((f"process {os.getpid()} on ", "an unknown process")), said.stderr
    assert not list(tmp_path.glob("*.holder"))


def test_a_lock_is_free_after_an_error(tmp_path):
    lock = get_lock("org/name", tmp_path)
    with pytest.raises(KeyboardInterrupt), acquire_within(lock, 1, "test"):
        raise KeyboardInterrupt
    assert not lock.is_locked
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


# Whole files


def test_a_file_appears_when_it_is_whole(tmp_path):
    target = tmp_path / "x.json"
    with atomic_writer(target, encoding="utf-8") as file:
        file.write("ä")
        assert not target.exists()
        assert Path(file.name).parent == tmp_path
        assert len(list(tmp_path.iterdir())) == 1
    assert target.read_text("utf-8") == "ä"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("existing", [None, b"old"])
def test_after_an_error_all_is_as_it_was(tmp_path, error, existing):
    target = tmp_path / "x"
    if existing is not None:
        target.write_bytes(existing)

    def write():
        with atomic_writer(target, "wb") as file:
            file.write(b"half")
            raise error

    with pytest.raises(error):
        write()
    assert [path.read_bytes() for path in tmp_path.iterdir()] == ([] if existing is None else [existing])


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_new_file_has_ordinary_permissions(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        with atomic_writer(tmp_path / "x") as file:
            file.write("x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == mode


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o666, 0o755, 0o444], ids=oct)
def test_an_existing_file_keeps_its_permissions(tmp_path, mode):
    target = tmp_path / "x"
    target.write_text("old")
    target.chmod(mode)
    with atomic_writer(target) as file:
        # What few may read isn't open to more while it is written.
        (temporary,) = set(tmp_path.iterdir()) - {target}
        assert stat.S_IMODE(temporary.stat().st_mode) == mode
        file.write("new")
    assert stat.S_IMODE(target.stat().st_mode) == mode
    assert target.read_text() == "new"


def test_a_bare_name_is_of_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with atomic_writer("x.bin", "wb") as file:
        file.write(b"1")
    assert (tmp_path / "x.bin").read_bytes() == b"1"


def test_the_longest_name_works(tmp_path):
    with atomic_writer(tmp_path / ("x" * 255)) as file:
        file.write("1")
    assert [path.name for path in tmp_path.iterdir()] == ["x" * 255]


@pytest.mark.parametrize("mode", ["r", "a", "r+", "ab", "x"])
def test_modes_that_do_not_write_anew_are_refused(tmp_path, mode):
    (tmp_path / "x").write_text("old")
    with pytest.raises(ValueError, match="anew"), atomic_writer(tmp_path / "x", mode):
        pass
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_data_is_on_disk_before_the_name_is(tmp_path, monkeypatch):
    """The order of the calls: a crash between them may leave the old file, never a hole under the name."""
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("replace"), replace(a, b)))
    with atomic_writer(tmp_path / "x") as file:
        file.write("x" * 100_000)
    assert calls[0].endswith(".tmp")
    assert calls[1:] == ["replace", str(tmp_path)]


def test_the_writer_may_close_the_file(tmp_path):
    with atomic_writer(tmp_path / "x") as file:
        file.write("x")
        file.close()
    assert (tmp_path / "x").read_text() == "x"


def test_a_folder_that_is_absent(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_writer(tmp_path / "no" / "x"):
        pass
