"""Memory that may still be taken: the host's, and what each control group above this process allows."""

import platform
from pathlib import Path

import numpy as np
import psutil
import pytest

from raywl.node.memory import available_ram_bytes, give_back_freed, group_allowances, want_huge_pages

NO_LIMIT = 9223372036854771712
ROW = "31 23 0:28 {root} {path} rw,relatime shared:9 - {kind} {kind} rw{options}\n"


class Groups:
    """A process file system and control groups, as files below a folder."""

    def __init__(self, folder: Path):
        self.proc, self.top = folder / "proc", folder / "groups with blank"
        (self.proc / "self").mkdir(parents=True)
        self.top.mkdir()
        self.mount(("cgroup2", "/", self.top, ""))

    def mount(self, *rows):
        text = "22 27 0:21 / /proc rw - proc proc rw\n"
        for kind, root, path, options in rows:
            text += ROW.format(kind=kind, root=root, path=str(path).replace(" ", r"\040"), options=options)
        (self.proc / "self/mountinfo").write_text(text)

    def own(self, *lines):
        (self.proc / "self/cgroup").write_text("".join(f"{line}\n" for line in lines))

    def v2(self, name, limit, usage, **stat):
        self._write(name, {"memory.max": limit, "memory.current": usage}, stat)

    def v1(self, name, limit, usage, **stat):
        self._write(name, {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": usage}, stat)

    def _write(self, name, files, stat):
        folder = self.top / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, value in files.items():
            (folder / file).write_text(f"{value}\n")
        (folder / "memory.stat").write_text("".join(f"{key} {value}\n" for key, value in stat.items()))

    def allowed(self):
        return list(group_allowances(str(self.proc)))


@pytest.fixture
def groups(tmp_path):
    return Groups(tmp_path)


def test_the_host_alone_where_no_group_limits(tmp_path):
    found = available_ram_bytes(str(tmp_path))
    assert found == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    assert list(group_allowances(str(tmp_path))) == []


def test_the_smallest_group_counts_when_below_the_host(groups):
    groups.own("0::/job")
    groups.v2("job", 5000, 1000)
    assert available_ram_bytes(str(groups.proc)) == 4000


def test_every_ancestor_counts(groups):
    """A limit on the slice above holds for the service below, whatever that one's own says."""
    groups.own("0::/slice/service/worker")
    groups.v2("slice", 1000, 900)
    groups.v2("slice/service", "max", 500)
    groups.v2("slice/service/worker", 10000, 400)
    assert groups.allowed() == [9600, 100]


def test_page_cache_of_files_counts_as_free(groups):
    """What is shared memory isn't given back, and isn't in those two numbers."""
    groups.own("0::/job")
    groups.v2("job", 1000, 990, active_file=300, inactive_file=500, shmem=100, anon=90)
    assert groups.allowed() == [1000 - 190]


def test_more_used_than_allowed_is_nothing_free(groups):
    groups.own("0::/job")
    groups.v2("job", 1000, 1500, inactive_file=100)
    assert groups.allowed() == [0]
    groups.v2("job", 1000, 100, inactive_file=300)
    assert groups.allowed() == [1000]


def test_version_1_with_its_sums_over_the_groups_below(groups):
    groups.mount(("cgroup", "/", groups.top, ",memory"), ("cgroup", "/", "/elsewhere", ",cpu"))
    groups.own("5:cpu,cpuacct:/other", "4:memory:/a/b", "0::/")
    groups.v1("a/b", 2000, 1500, inactive_file=10, total_active_file=100, total_inactive_file=400)
    groups.v1("a", 900, 800)
    groups.v1(".", NO_LIMIT, 5000)
    assert groups.allowed() == [1000, 100]


@pytest.mark.parametrize("limit", [NO_LIMIT, 2**63 - 65536, 2**63 - 1])
def test_no_limit_of_version_1(groups, limit):
    """The largest number of whole pages, of 4 KiB or of 64 KiB."""
    groups.mount(("cgroup", "/", groups.top, ",memory"))
    groups.own("4:memory:/")
    groups.v1(".", limit, 10)
    assert groups.allowed() == []


def test_both_versions_at_once(groups):
    """A hybrid machine: memory is in version 1, and version 2 has no memory files."""
    (groups.top / "unified").mkdir()
    groups.mount(("cgroup", "/", groups.top, ",memory"), ("cgroup2", "/", groups.top / "unified", ""))
    groups.own("4:memory:/job", "0::/job")
    groups.v1("job", 700, 200)
    assert groups.allowed() == [500]


@pytest.mark.parametrize("root", ["/docker/abc", "/docker/abc/inner", "/somewhere"])
def test_a_container_sees_its_own_group_at_the_top(groups, root):
    groups.mount(("cgroup2", root, groups.top, ""))
    groups.own("0::/docker/abc")
    groups.v2(".", 300, 100)
    assert groups.allowed() == [200]


def test_a_mount_of_an_outer_group_leads_to_the_inner_one(groups):
    groups.mount(("cgroup2", "/docker", groups.top, ""))
    groups.own("0::/docker/abc")
    groups.v2("abc", 300, 100)
    groups.v2(".", 1000, 900)
    assert groups.allowed() == [200, 100]


def test_groups_that_went_and_files_that_say_nothing_are_passed_over(groups):
    groups.own("0::/a/gone/deeper")
    groups.v2("a", 300, 100)
    assert groups.allowed() == [200]
    groups.v2("a", "what", 100)
    assert groups.allowed() == []
    (groups.proc / "self/cgroup").unlink()
    assert groups.allowed() == []


def test_this_machine():
    assert 0 < available_ram_bytes() <= psutil.virtual_memory().total


def test_freed_memory_goes_back():
    """Once for a whole process; what is in use stays as it is."""
    kept = bytearray(b"x") * 1000
    assert give_back_freed() is (platform.libc_ver()[0] == "glibc")
    assert kept == b"x" * 1000


def test_huge_pages_are_only_advice():
    """What is there stays, at any address and length; memory that isn't there is no error."""
    raw = np.zeros(8 << 20, dtype=np.uint8)
    raw[:] = 7
    address = raw.ctypes.data
    for start, length in ((0, raw.nbytes), (1, raw.nbytes - 1), (5000, 3), (0, 0), (4097, 100_000)):
        assert want_huge_pages(address + start, length) in (True, False)
    assert not want_huge_pages(address, 100)
    assert (raw == 7).all()
    assert not want_huge_pages(1 << 60, 1 << 21)
