"""Loads a sentence encoder over ranks on several hosts, and checks what they compute together.

    python load.py FOLDER [--tp 2] [--report load.html]

FOLDER has config.json and the weights, under the same path on every host. The cluster is that of RAY_ADDRESS.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

MAX_DIFFERENCE = 1e-5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", metavar="FOLDER", help="folder of the checkpoint")
    parser.add_argument(
        "--tp", type=int, default=2, help="ranks, spread over the hosts (default: %(default)s)"
    )
    parser.add_argument("--report", metavar="FILE", help="write the load's report there, as a page")
    args = parser.parse_args()

    import torch

    import raywl
    from raywl.demo.assets import model_config
    from raywl.demo.encoder import SHARDS, build

    config = model_config(Path(args.folder))
    torch.manual_seed(0)
    token_ids = torch.randint(config["vocab_size"], (4, 32))
    mask = torch.ones_like(token_ids)

    def encode(model):
        with torch.inference_mode():
            return model(token_ids, mask).clone()

    with raywl.launch(
        args.folder,
        partial(build, config),
        tp_size=args.tp,
        placement="SPREAD",
        shards=SHARDS,
        strict="exact",
    ) as group:
        for rank, part in enumerate(group.report.ranks):
            print(f"rank {rank} on {part.node}: read {part.bytes_read:,} bytes, kept {part.bytes_loaded:,}")
        print(f"{group.report.seconds:.1f} s in all")
        # Every layer ends in an all-reduce between the ranks, and so between the hosts.
        found = group.run(encode)
        if args.report:
            group.report.to_html(args.report)

    whole = build(config, raywl.ParallelContext())
    raywl.load_into(whole, args.folder, strict="exact")
    expected = encode(whole)
    difference = max(float((embeddings - expected).abs().max()) for embeddings in found)
    print(f"largest difference from the model in one piece: {difference:.1e}")
    return 0 if difference <= MAX_DIFFERENCE else 1


if __name__ == "__main__":
    sys.exit(main())
