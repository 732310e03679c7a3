"""A Ray Serve deployment: sentence embeddings from a model that is spread over tensor-parallel ranks.

    PUT the config of `config.yaml`      starts it; again with another `checkpoint`, reloads it in place
    POST /embed {"texts": [...]}         {"embeddings": [[...], ...]}
    GET  /status                         which checkpoint answers, and why the last one was refused, if it was

Life cycle, in the replica's process:
    1. `reconfigure` with the first `user_config` launches the ranks and loads them.
    2. Requests are tokenized here and computed by all ranks together.
    3. `reconfigure` with another one reloads the ranks in place: same processes, same memory. Requests that
       come meanwhile wait; each is computed wholly before or wholly after.
    4. A checkpoint that doesn't fit is refused before anything is written, and the old weights go on.
    5. When there is nothing to go on with (a rank has died, a file was found damaged while it was written
       into the ranks), requests are told so, and Serve starts another replica.
    6. `__del__` ends the ranks with the replica.
"""

# No `from __future__ import annotations`: FastAPI couldn't read them on a class that Serve has copied.
import asyncio
import json
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field
from ray import serve
from transformers import AutoTokenizer

import raywl
from raywl.demo.encoder import SHARDS, Encoder, build
from raywl.errors import CheckpointError, NodeLostError, RaywlError

_MAX_TOKENS = 256
_MADE_OF = (
    "hidden_size",
    "intermediate_size",
    "layer_norm_eps",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "type_vocab_size",
    "vocab_size",
)
"""What the encoder takes from `config.json`."""

log = logging.getLogger("ray.serve")
api = FastAPI(title="Sentence embeddings")


class Texts(BaseModel):
    """Body of a request."""

    texts: Annotated[list[str], Field(min_length=1, max_length=256)]


# Above the class, since Serve takes a copy of it as soon as it is decorated.


def encode(model: Encoder, token_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Runs on every rank."""
    with torch.inference_mode():
        return model(token_ids, mask).clone()


def read_assets(checkpoint: str) -> dict[str, Any]:
    """What belongs to a model besides its weights, and what requests are computed with."""
    try:
        folder = Path(checkpoint)
        config = json.loads((folder / "config.json").read_text())
        return {
            "config": {key: config[key] for key in _MADE_OF},
            "tokenizer": (folder / "tokenizer.json").read_text(),
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(str(checkpoint), None, f"{type(error).__name__}: {error}") from error


def refuse_another_model(checkpoint: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Weights can be replaced in place; what they mean can't."""
    for key, value in old["config"].items():
        if new["config"][key] != value:
            raise CheckpointError(checkpoint, None, f"{key} is {new['config'][key]}, the ranks have {value}")
    if new["tokenizer"] != old["tokenizer"]:
        raise CheckpointError(checkpoint, None, "it has another tokenizer")


@serve.deployment(
    # The ranks are actors of their own and reserve their own CPUs or GPUs; this process only tokenizes.
    ray_actor_options={"num_cpus": 0},
    max_ongoing_requests=64,
    # After three bad answers Serve starts another replica.
    health_check_period_s=3,
)
@serve.ingress(api)
class Embedder:
    """One replica: a group of ranks, and the HTTP side of it."""

    def __init__(self, tp_size: int) -> None:
        self._tp_size = tp_size
        self._group: raywl.RankGroup | None = None
        self._checkpoint = ""
        self._refused: dict[str, str] | None = None
        self._broken = ""
        self._turn = threading.Lock()
        # Threads, since the event loop must answer health checks all the time; one each, so that waiting
        # requests never take the thread that the reload needs.
        self._requests = ThreadPoolExecutor(1, "requests")
        self._loads = ThreadPoolExecutor(1, "loads")

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Loads `user_config["checkpoint"]`, a folder that all nodes of the ranks have.

        Serve calls it for each new `user_config` of a config deploy. An error raised here would make Serve
        end the replica and start another; so it is raised only where there are no old weights to go on with.
        """
        checkpoint = user_config.get("checkpoint")
        loop = asyncio.get_running_loop()
        if self._group is None:
            await loop.run_in_executor(self._loads, self._launch, checkpoint)
        elif checkpoint != self._checkpoint or self._refused:
            await loop.run_in_executor(self._loads, self._reload, checkpoint)

    def _launch(self, checkpoint: str) -> None:
        self._assets = read_assets(checkpoint)
        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self._group = raywl.launch(
            checkpoint,
            partial(build, self._assets["config"]),
            tp_size=self._tp_size,
            shards=SHARDS,
            strict="exact",
        )
        self._checkpoint = checkpoint
        log.info("loaded %s", checkpoint)

    def _reload(self, checkpoint: str) -> None:
        with self._turn:
            try:
                if checkpoint != self._checkpoint:
                    refuse_another_model(checkpoint, self._assets, read_assets(checkpoint))
                    report = self._group.reload(checkpoint)
                    log.info("reloaded %s in %.2f s", checkpoint, report.seconds)
            except RaywlError as error:
                if error.partly_loaded or isinstance(error, NodeLostError):
                    self._broken = str(error)
                    raise
                self._refused = {"checkpoint": str(checkpoint), "reason": str(error)}
                log.error("%s is refused, %s goes on: %s", checkpoint, self._checkpoint, error)
            else:
                self._checkpoint, self._refused = checkpoint, None

    @api.post("/embed")
    async def embed(self, body: Texts) -> dict[str, list[list[float]]]:
        """Embeddings of length 1, in the order of the texts."""
        loop = asyncio.get_running_loop()
        return {"embeddings": await loop.run_in_executor(self._requests, self._embed, body.texts)}

    def _embed(self, texts: list[str]) -> list[list[float]]:
        batch = self._tokenizer(
            texts, padding=True, truncation=True, max_length=_MAX_TOKENS, return_tensors="pt"
        )
        with self._turn:
            if self._broken:
                raise HTTPException(503, self._broken)
            try:
                # Every rank has the result.
                embeddings = self._group.run(encode, batch["input_ids"], batch["attention_mask"])[0]
            except NodeLostError as error:
                self._broken = str(error)
                raise HTTPException(503, self._broken) from error
        return embeddings.tolist()

    @api.get("/status")
    async def status(self) -> dict[str, Any]:
        """What answers, and what was refused."""
        return {"checkpoint": self._checkpoint, "refused": self._refused, "pid": os.getpid()}

    async def on_ranks(self, fn: Callable[..., Any]) -> list[Any]:
        """`fn(model)` of every rank, by a Serve handle; there is no way to it over HTTP."""
        return await asyncio.get_running_loop().run_in_executor(self._requests, self._group.run, fn)

    async def check_health(self) -> None:
        """Serve asks this regularly."""
        if self._broken:
            raise RuntimeError(self._broken)
        if self._group is not None and not (await asyncio.to_thread(self._group.status))["alive"]:
            raise RuntimeError("a rank doesn't answer")

    def __del__(self) -> None:
        if getattr(self, "_group", None) is not None:
            self._group.shutdown()


def application(args: dict[str, Any]) -> serve.Application:
    """What `import_path` in the config names; `args` come from there."""
    return Embedder.bind(tp_size=int(args.get("tp_size", 2)))
