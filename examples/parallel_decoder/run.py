"""Loads a checkpoint over several ranks and decodes greedily.

python examples/parallel_decoder/run.py REF --tp 2 [--ep 2] [--check]
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import parallel_decoder
from parallel_decoder import DecoderConfig, greedy, load_arguments, logits_of, make_model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ref", metavar="REF", help="folder of a checkpoint")
    parser.add_argument("--tp", type=int, default=1, help="ranks that each dense weight is cut for")
    parser.add_argument("--dp", type=int, default=1, help="groups of such ranks")
    parser.add_argument("--ep", type=int, default=1, help="parts that the experts are spread over")
    parser.add_argument("--address", help="Ray cluster; by default RAY_ADDRESS, else a local one")
    parser.add_argument("--prompt", type=int, nargs="+", default=[1, 2, 3, 4], help="token ids")
    parser.add_argument("--tokens", type=int, default=8, help="how many to decode")
    parser.add_argument("--check", action="store_true", help="compare logits with transformers', in float32")
    args = parser.parse_args()

    import ray

    import raywl

    # The ranks' processes may run where this folder isn't: they are sent the code itself.
    ray.cloudpickle.register_pickle_by_value(parallel_decoder)
    sizes = {"tp_size": args.tp, "dp_size": args.dp, "ep_size": args.ep}
    try:
        config = DecoderConfig.from_folder(args.ref)
        if args.check:
            config = dataclasses.replace(
                config, dtype="float32"
            )  # in bfloat16 only its rounding would be seen
        # On `meta` a rank's model costs nothing: what doesn't divide is said before anything starts.
        make_model(config)(raywl.ParallelContext.of_rank(0, **sizes))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    with raywl.launch(
        args.ref, make_model(config), address=args.address, **sizes, **load_arguments(config)
    ) as group:
        for rank, report in enumerate(group.report.ranks):
            print(f"rank {rank}: read {report.bytes_read:,} bytes, kept {report.bytes_loaded:,}")
        tokens = group.run(greedy, args.prompt, args.tokens)[0]
        print("tokens:", *tokens)
        if args.check:
            difference = largest_difference(args.ref, tokens, group.run(logits_of, [tokens]))
            print(f"largest difference of a logit: {difference:.2e}")
            return 0 if difference <= 1e-4 else 1
    return 0


def largest_difference(ref: str, tokens: list[int], logits: list) -> float:
    """Between the ranks' logits and those that transformers computes."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(ref, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits.float()
    return max((rank_logits - expected).abs().max().item() for rank_logits in logits)


if __name__ == "__main__":
    sys.exit(main())
