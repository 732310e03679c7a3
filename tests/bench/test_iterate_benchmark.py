"""The benchmark of iterators: what it counts, and that memory stays within what is promised."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from raywl.bench.iterate import ITERATORS, IterateBenchmark, measure

MIB = 1 << 20


def write(folder: Path, num_files: int) -> list[str]:
    """Files of 8 MiB."""
    paths = []
    for number in range(num_files):
        path = folder / f"model-{number}.safetensors"
        tensors = {f"{number}.{part}": torch.full((2 * MIB,), part, dtype=torch.uint8) for part in range(4)}
        save_file(tensors, path)
        paths.append(str(path))
    return paths


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """40 files, whose sum is more than any iterator may hold."""
    return write(tmp_path_factory.mktemp("files"), 40)


@pytest.mark.parametrize("name", ITERATORS)
def test_all_count_the_same(name, tmp_path):
    found = measure(name, write(tmp_path, 3), 2, 0.0)
    assert found["num_tensors"] == 12
    assert found["nbytes"] == 24 * MIB
    assert found["seconds"] > 0


def test_an_unknown_iterator(tmp_path):
    with pytest.raises(ValueError, match="lazy"):
        measure("fast", write(tmp_path, 1), 2, 0.0)


@pytest.mark.slow
def test_peak_memory_of_40_files(files):
    """By the kernel's own count, in processes of their own: files that are promised, and some slack."""
    said = []
    benchmark = IterateBenchmark(files, max_workers=3, iterators=["lazy", "eager", "threads"], pause_s=0.005)
    benchmark.run(1, said.append)
    found = benchmark.to_dict()
    assert len(said) == 3
    size = max(map(os.path.getsize, files))
    assert found["largest_file_bytes"] == size
    for name, held in (("lazy", 2), ("eager", 2), ("threads", 4)):
        assert found["iterators"][name]["peak_bytes"] < held * size + 32 * MIB < 40 * size / 2
    assert found["iterators"]["threads"]["peak_bytes"] > 2 * size


@pytest.mark.slow
def test_a_run_that_fails(tmp_path):
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"x" * 100)
    with pytest.raises(RuntimeError, match="lazy ended with code 1"):
        IterateBenchmark([str(bad)], iterators=["lazy"]).run(1, lambda line: None)


@pytest.mark.slow
def test_on_the_command_line(files):
    """One object of numbers, or a table."""

    def raywl(*words: str) -> str:
        command = [sys.executable, "-m", "raywl", "bench", "iterate", os.path.dirname(files[0]), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=170, check=True).stdout

    found = json.loads(raywl("--allow-pattern", "model-1*", "--repeat", "1", "--max-workers", "2", "--json"))
    assert set(found["iterators"]) == set(ITERATORS)
    assert found["num_files"] == 11
    assert found["max_workers"] == 2
    assert "peak memory" in raywl(
        "--allow-pattern", "model-3.*", "--repeat", "1", "--pause-ms", "1", "--quiet"
    )
