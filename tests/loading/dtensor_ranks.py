"""What each of two gloo ranks checks: run by `test_dtensor.py` as `python -m`."""

from __future__ import annotations

import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import raywl

W = {"w": torch.arange(35, dtype=torch.float32).reshape(7, 5)}


class Net(nn.Module):
    def __init__(self, tensor):
        super().__init__()
        self.w = nn.Parameter(tensor)


def placements(folder, mesh):
    for device in ("cpu", "meta"):
        for placement in (Shard(0), Shard(1), Replicate()):
            with torch.device(device):
                net = Net(torch.empty(7, 5))
            if device == "cpu":
                net.w = nn.Parameter(distribute_tensor(torch.zeros(7, 5), mesh, [placement]))
            else:
                local = distribute_tensor(torch.zeros(7, 5), mesh, [placement]).to_local().to("meta")
                net.w = nn.Parameter(
                    DTensor.from_local(local, mesh, [placement], run_check=False, shape=(7, 5), stride=(5, 1))
                )
            report = raywl.load_into(net, folder)
            assert isinstance(net.w, DTensor)
            assert net.w.placements == (placement,)
            expected = distribute_tensor(W["w"], mesh, [placement]).to_local()
            assert torch.equal(net.w.to_local(), expected), (device, placement)
            assert torch.equal(net.w.full_tensor(), W["w"])
            assert report.bytes_loaded == expected.nbytes


def refused(folder, mesh):
    local = torch.zeros(7, 5)
    for placement in (Partial(), _StridedShard(0, split_factor=2)):
        net = Net(DTensor.from_local(local, mesh, [placement], run_check=False, shape=(7, 5), stride=(5, 1)))
        with pytest.raises(ValueError, match=type(placement).__name__):
            raywl.load_into(net, folder)


def fully_sharded(folder, mesh):
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    if dist.get_rank() == 0:
        from safetensors.torch import save_file

        save_file(dict(reference.state_dict()), f"{folder}/fsdp/model.safetensors")
    dist.barrier()
    for device in ("cpu", "meta"):
        with torch.device(device):
            net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        for layer in net:
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        raywl.load_into(net, f"{folder}/fsdp")
        for name, parameter in net.named_parameters():
            assert torch.equal(parameter.full_tensor(), reference.get_parameter(name)), (device, name)
        x = torch.randn(2, 5, generator=torch.Generator().manual_seed(1))
        assert torch.allclose(net(x), reference(x)), device


def main(folder, rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for check in (placements, refused, fully_sharded):
        check(folder, mesh)
    dist.destroy_process_group()
    print("all right", flush=True)
    # Threads of torch's may be at their end still, and one that meets the interpreter's aborts the process.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
