"""What each of several gloo ranks saves at once: run by `test_together.py` as `python -m`."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import raywl

WHOLE = {"rows": (7, 6), "columns": (7, 6), "same": (5,)}
PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "same": Replicate()}


def values(name: str, seed: int) -> torch.Tensor:
    return torch.randn(WHOLE[name], generator=torch.Generator().manual_seed(seed + len(name)))


def main(folder: str, rank: int, size: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    model = nn.Module()
    for name, placement in PLACEMENTS.items():
        tensor = distribute_tensor(values(name, 0), mesh, [placement])
        model.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    reports = [raywl.save_sharded(model, f"{folder}/made").to_dict()]
    dist.barrier()
    # What was saved is loaded, changed, and saved again by the record of the load.
    raywl.load_into(model, f"{folder}/made", strict="exact")
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().add_(1)
    reports.append(raywl.save_sharded(model, f"{folder}/loaded", max_file_bytes=100).to_dict())
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(reports), flush=True)
    # Threads of torch's may be at their end still, and one that meets the interpreter's aborts the process.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
