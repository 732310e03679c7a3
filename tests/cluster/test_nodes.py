"""Nodes that are not alike: other files, another raywl, no raywl."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import raywl
from raywl.errors import CheckpointError, NotFoundError
from tests.cluster.conftest import connected, ray_cluster
from tests.cluster.parts import SHARDS, Model, tensors_of

ROOT = Path(raywl.__file__).parents[1]


@pytest.fixture(scope="module")
def homes(tmp_path_factory):
    """Two nodes with file systems of their own, as far as `~` goes, and a driver on neither's."""
    folders = [tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")]
    nodes = [{"num_cpus": 1, "env_vars": {"HOME": str(folder)}} for folder in folders]
    with ray_cluster(*nodes) as cluster, connected(cluster.address):
        yield cluster, folders


def write(folder: Path, scale: float = 1.0, name: str = "model.safetensors") -> None:
    folder.mkdir()
    save_file({key: value * scale for key, value in tensors_of(torch).items()}, folder / name)


def launch_on_both(ref: str):
    return raywl.launch(
        ref, Model, tp_size=2, shards=SHARDS, placement="STRICT_SPREAD", timeout_s=60.0, agent_idle_s=30.0
    )


def test_every_node_opens_its_own(homes):
    """`~` is each node's; the driver has no such folder at all."""
    _, folders = homes
    for folder in folders:
        write(folder / "same")
    assert not Path("~/same").expanduser().exists()
    with launch_on_both("~/same") as group:
        assert group.report.ref == "~/same"
        assert len({rank.node for rank in group.report.ranks}) == 2
        parts = group.run(lambda model: model.embed.weight.detach().clone())
    assert torch.equal(torch.cat(parts), tensors_of(torch)["embed.weight"])


def test_a_node_that_lacks_the_checkpoint_is_named(homes):
    """C100: the others have it, so the message says which one hasn't."""
    import ray

    _, folders = homes
    write(folders[0] / "half")
    with pytest.raises(NotFoundError, match="on 1 of 2 nodes") as caught:
        launch_on_both("~/half")
    second = next(node for node in ray.nodes() if node["NodeID"][:8] in str(caught.value))
    assert second["Alive"]
    assert any(str(folders[1]) in note for note in caught.value.__notes__)


def test_nodes_that_have_different_checkpoints(homes):
    """Both identities are named, each with its node."""
    _, folders = homes
    write(folders[0] / "other")
    write(folders[1] / "other", name="weights.safetensors")
    with pytest.raises(CheckpointError, match="not the same checkpoint on every node") as caught:
        launch_on_both("~/other")
    identities = [raywl.open_checkpoint(folder / "other").identity for folder in folders]
    assert identities[0] != identities[1]
    assert all(f"{identity} on " in str(caught.value) for identity in identities)


def other_raywl(folder: Path, version: str) -> Path:
    """A copy of raywl that says it has another version."""
    shutil.copytree(ROOT / "raywl", folder / "raywl", ignore=shutil.ignore_patterns("__pycache__", "actors"))
    shutil.copytree(
        ROOT / "actors", folder / "raywl" / "actors", ignore=shutil.ignore_patterns("__pycache__")
    )
    (folder / "raywl" / "_version.py").write_text(f'__version__ = "{version}"\n')
    return folder


DRIVER = """
import sys
import torch
import raywl
try:
    raywl.launch(
        sys.argv[1], lambda context: torch.nn.Module(), dp_size=3, placement="STRICT_SPREAD", timeout_s=60.0,
        address=sys.argv[2], strict=False, init_distributed=False,
    )
except raywl.errors.ClusterError as error:
    print(error.node, error)
"""


def test_a_node_with_another_raywl(homes, tmp_path, checkpoint):
    """Node and both versions are named; a node without raywl likewise; then the rest works."""
    cluster, _ = homes
    without = tmp_path / "without"
    without.mkdir()
    (without / "raywl.py").write_text("raise ModuleNotFoundError(\"No module named 'raywl'\")\n")
    for python_path, told in [
        (other_raywl(tmp_path / "other", "9.8.7"), "raywl 9.8.7"),
        (without, "no raywl that can be imported"),
    ]:
        node = cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": str(python_path)})
        try:
            # A driver elsewhere, since Ray puts its sys.path in front of the workers'.
            ended = subprocess.run(
                [sys.executable, "-c", DRIVER, checkpoint, cluster.address],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=100,
            )
            assert ended.returncode == 0, ended.stderr
            for part in (told, f"raywl {raywl.__version__}", f"({node.node_id[:8]}) ["):
                assert part in ended.stdout
        finally:
            cluster.remove_node(node)
    with launch_on_both(checkpoint) as group:
        assert len(group.run(lambda model: None)) == 2
