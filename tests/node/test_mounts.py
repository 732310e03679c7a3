"""File systems by the table of mounts."""

import os

import pytest

from raywl.node.mounts import fs_type, is_network

FIELD = """\
/dev/sda1 / ext4 rw 0 0
srv:/x /data nfs4 rw 0 0
/dev/nvme0 /data/local xfs rw 0 0
mgs:/l /lus lustre rw 0 0
"""


@pytest.fixture
def table(tmp_path):
    def write(text):
        path = tmp_path / "mounts"
        path.write_text(text, encoding="utf-8", newline="\n")
        return str(path)

    return write


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/data/m", "nfs4"),
        ("/data", "nfs4"),
        ("/database/m", "ext4"),
        ("/data/local/m", "xfs"),
        ("/data/locals", "nfs4"),
        ("/lus/m", "lustre"),
        ("/", "ext4"),
    ],
)
def test_the_longest_mount_that_contains_the_file(table, path, kind):
    """C47."""
    assert fs_type([path, "/elsewhere"], table(FIELD)) == kind


def test_of_equal_mounts_the_last(table):
    """An automounter's own entry comes first."""
    assert fs_type(["/net/m"], table("a /net autofs rw 0 0\nsrv:/ /net nfs rw 0 0\n")) == "nfs"
    assert fs_type(["/net/m"], table("srv:/ /net nfs rw 0 0\na /net tmpfs rw 0 0\n")) == "tmpfs"


@pytest.mark.parametrize(
    ("written", "path"),
    [
        (r"/my\040models", "/my models/m"),
        (r"/a\011b", "/a\tb/m"),
        (r"/a\012b", "/a\nb/m"),
        (r"/a\134040b", r"/a\040b/m"),
        ("/a\u00a0b\u2028c\rd", "/a\u00a0b\u2028c\rd/m"),
        ("/größe", "/größe/m"),
    ],
)
def test_mount_points_with_unusual_characters(table, written, path):
    """Blanks are written as octal numbers; other characters that count as space elsewhere are not."""
    assert fs_type([path], table(f"/dev/x / ext4 rw 0 0\nsrv:/x {written} nfs rw 0 0\n")) == "nfs"


def test_links_are_resolved(table, tmp_path):
    """A snapshot of the hub is a folder of links into another place."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/m").touch()
    (tmp_path / "m").symlink_to(tmp_path / "blobs/m")
    mounts = f"/dev/x / ext4 rw 0 0\nsrv:/x {tmp_path}/blobs ceph rw 0 0\n"
    assert fs_type([str(tmp_path / "m")], table(mounts)) == "ceph"
    assert fs_type([str(tmp_path / "other")], table(mounts)) == "ext4"


def test_unknown(table, tmp_path):
    assert fs_type([], table(FIELD)) == ""
    assert fs_type(["/data/m"], str(tmp_path / "absent")) == ""
    assert fs_type(["/data/m"], table("")) == ""
    assert fs_type(["/data/m"], table("garbage\n\nsrv:/x /data\n")) == ""
    assert fs_type(["/data/m"], table("srv:/x /other nfs rw 0 0\n")) == ""


def test_relative_paths_are_of_the_working_folder(table, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mounts = f"/dev/x / ext4 rw 0 0\nsrv:/x {os.path.realpath(tmp_path)} nfs rw 0 0\n"
    assert fs_type(["m"], table(mounts)) == "nfs"


def test_this_machine():
    assert fs_type(["/proc/self/mounts"]) == "proc"


@pytest.mark.parametrize(
    "name", ["nfs", "nfs4", "lustre", "virtiofs", "fuse.sshfs", "ceph", "gpfs", "beegfs", "9p"]
)
def test_network_file_systems(name):
    assert is_network(name)


@pytest.mark.parametrize("name", ["", "ext4", "xfs", "overlay", "tmpfs", "fuse", "fuseblk", "nfsd", "nfs5"])
def test_others(name):
    assert not is_network(name)
