"""The demo: load over two ranks, encode, compare, report.

Life cycle:
    1. driver: tokenize the sentences; compute the reference embeddings with `transformers`, unsharded
    2. driver: `raywl.launch` starts a local cluster and two ranks
    3. ranks: build the encoder on `meta`, load their part of each weight, encode together (gloo)
    4. driver: compare, write the page, shut the ranks down
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raywl import html
from raywl.demo.assets import model_config, model_folder
from raywl.progress import Progress
from raywl.report import GroupReport

if TYPE_CHECKING:
    import torch

    from raywl.demo.encoder import Encoder
    from raywl.types import ParallelContext

__all__ = ["MAX_DIFFERENCE", "NUM_RANKS", "SENTENCES", "DemoResult", "run_demo"]

NUM_RANKS = 2
MAX_DIFFERENCE = 1e-5
"""Largest difference between sharded and unsharded embeddings that counts as the same."""

SENTENCES = (
    "A loader reads each weight once and puts it where it belongs.",
    "Every parameter is fetched a single time, straight into its place.",
    "The cat sleeps on the warm windowsill.",
    "A kitten is napping by the sunny window.",
    "Interest rates were left unchanged this quarter.",
)
_MAX_TOKENS = 256


@dataclass(slots=True)
class DemoResult:
    """What the demo found."""

    report: GroupReport
    sentences: tuple[str, ...]
    similarities: list[list[float]]
    """Cosine similarity of each pair of sentences."""
    max_difference: float
    """Largest absolute difference from the unsharded model, over all ranks' embeddings."""

    @property
    def ok(self) -> bool:
        """Whether the sharded model is the same as the unsharded one."""
        return self.max_difference <= MAX_DIFFERENCE

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return {
            "ok": self.ok,
            "max_difference": self.max_difference,
            "limit": MAX_DIFFERENCE,
            "sentences": list(self.sentences),
            "similarities": self.similarities,
            "report": self.report.to_dict(),
        }

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes a self-contained page.

        Raises:
            OSError: The folder doesn't exist or can't be written to.
        """
        headers = ["sentence", *(str(number + 1) for number in range(len(self.sentences)))]
        rows = [
            [f"{number + 1}. {sentence}", *(f"{value:.3f}" for value in row)]
            for number, (sentence, row) in enumerate(zip(self.sentences, self.similarities, strict=True))
        ]
        verdict = (
            f'<span class="{"good" if self.ok else "bad"}">{"the same" if self.ok else "NOT the same"}</span>'
        )
        check = (
            f"<p>Embeddings of {NUM_RANKS} tensor-parallel ranks against the unsharded model: {verdict}, "
            f"largest difference {self.max_difference:.2e} (limit {MAX_DIFFERENCE:.0e}).</p>"
        )
        sections = html.report_sections(self.report)
        sections[1:1] = [
            html.section("Check", check),
            html.section("Cosine similarities", html.table(headers, rows)),
        ]
        html.write_page(path, html.page("raywl demo: a sentence encoder over two ranks", sections))


def run_demo(progress: Progress | None = None) -> DemoResult:
    """Runs the demo on a Ray cluster of its own, which ends with it.

    Raises:
        ModuleNotFoundError: The demo's model or `transformers` isn't installed.
        RaywlError: The weights can't be loaded.
    """
    import raywl
    from raywl.demo.encoder import SHARDS

    folder = model_folder()
    config = model_config(folder)
    token_ids, mask = _tokenize(folder, SENTENCES)
    expected = _reference(folder, token_ids, mask)
    with raywl.launch(
        str(folder),
        partial(_build, config),
        tp_size=NUM_RANKS,
        address="local",
        shards=SHARDS,
        strict="exact",
        progress=progress,
    ) as group:
        embeddings = group.run(_encode, token_ids, mask)
        report = group.report
    differences = [float((found - expected).abs().max()) for found in embeddings]
    similarities = embeddings[0] @ embeddings[0].T
    return DemoResult(report, SENTENCES, similarities.tolist(), max(differences))


def _build(config: dict[str, Any], context: ParallelContext) -> Encoder:
    from raywl.demo.encoder import build

    return build(config, context)


def _encode(model: Encoder, token_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    import torch

    with torch.inference_mode():
        embeddings: torch.Tensor = model(token_ids, mask)
    return embeddings.clone()


def _tokenize(folder: Path, sentences: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    batch = tokenizer(
        list(sentences), padding=True, truncation=True, max_length=_MAX_TOKENS, return_tensors="pt"
    )
    return batch["input_ids"], batch["attention_mask"]


def _reference(folder: Path, token_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The same embeddings by `transformers` alone: no code of raywl's takes part."""
    import torch
    from transformers import AutoModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModel.from_pretrained(str(folder)).eval()
    with torch.inference_mode():
        states = model(input_ids=token_ids, attention_mask=mask).last_hidden_state
        weights = mask[:, :, None].to(states.dtype)
        means = (states * weights).sum(1) / weights.sum(1)
        return torch.nn.functional.normalize(means, dim=-1).clone()
