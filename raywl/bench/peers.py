"""Other ways to load a checkpoint, each by its own library and as its documentation says it is done best.

All bring the tensors to the same parameters, which were touched before; what a library keeps beside them is
its own affair, and counts in its peak of memory. Those that can't cut tensors read them whole and copy the
rank's part.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import nn

from raywl.bench.destinations import Work, bytes_of_model, digest, part_of, touched_model
from raywl.checkpoint import Manifest

__all__ = ["PEERS", "Peer", "why_not"]


class Peer:
    """One library. A contestant of the benchmark, used once in a process of its own."""

    package: ClassVar[str]
    """What must be importable."""
    distribution: ClassVar[str]
    """What it is installed as."""
    cuts: ClassVar[bool] = True
    """Whether a rank can have its part of a tensor."""

    def prepare(self, work: Work) -> None:
        """Imports, and touches the destinations."""
        self.work, self.manifest = work, work.manifest()
        self.paths = [self.manifest.path(file.name) for file in self.manifest.files]
        self.model = touched_model(work)
        self.parameters = dict(self.model.named_parameters())
        self.ready()

    def ready(self) -> None:
        """Makes everything else ready that isn't the work."""

    def run(self) -> int:
        """Does the work; returns the bytes that were asked of the source."""
        raise NotImplementedError

    def digest(self) -> str | None:
        """As of every contestant."""
        return digest(dict(bytes_of_model(self.model)))

    @property
    def files(self) -> Sequence[str]:
        """Files that it reads beside the checkpoint's own."""
        return ()

    def take(self, weights: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Copies tensors, or the rank's parts of them, to where they belong; returns the bytes of all."""
        num_bytes = 0
        with torch.no_grad():
            for name, tensor in weights:
                self.parameters[name].copy_(part_of(tensor, name, self.work))
                num_bytes += tensor.nbytes
        return num_bytes


class LoadFile(Peer):
    """`safetensors.torch.load_file`, file after file."""

    package, distribution = "safetensors", "safetensors"

    def ready(self) -> None:
        """As `Peer.ready`."""
        from safetensors.torch import load_file

        self._load_file = load_file

    def run(self) -> int:
        """As `Peer.run`."""
        return sum(self.take(self._load_file(path).items()) for path in self.paths)


class RunAi(Peer):
    """Run:ai's streamer over all files at once; its own numbers of threads and bytes."""

    package, distribution = "runai_model_streamer", "runai-model-streamer"

    def ready(self) -> None:
        """As `Peer.ready`."""
        self._streamer: Any = import_module("runai_model_streamer").SafetensorsStreamer

    def run(self) -> int:
        """As `Peer.run`."""
        with self._streamer() as streamer:
            streamer.stream_files(self.paths)
            return self.take(streamer.get_tensors())


class FastSafetensors(Peer):
    """fastsafetensors onto the CPU, without GPU-direct reads; all files at once."""

    package, distribution = "fastsafetensors", "fastsafetensors"

    def ready(self) -> None:
        """As `Peer.ready`."""
        self._library: Any = import_module("fastsafetensors")

    def run(self) -> int:
        """As `Peer.run`."""
        loader = self._library.SafeTensorsFileLoader(self._library.SingleGroup(), "cpu", nogds=True)
        loader.add_filenames({0: self.paths})
        buffer = loader.copy_files_to_device()
        try:
            return self.take((name, buffer.get_tensor(name)) for name in loader.get_keys())
        finally:
            buffer.close()
            loader.close()


class Tensorizer(Peer):
    """tensorizer, out of a file of its own format that is written beforehand."""

    package, distribution = "tensorizer", "tensorizer"

    def ready(self) -> None:
        """As `Peer.ready`; writes its file, unless another repetition has."""
        from safetensors.torch import load_file

        library: Any = import_module("tensorizer")
        self._deserializer = library.TensorDeserializer
        self._path = os.path.join(self.work.folder, "checkpoint.tensors")
        if not os.path.exists(self._path):
            own = f"{self._path}.{os.getpid()}"
            serializer = library.TensorSerializer(own)
            serializer.write_state_dict({n: t for path in self.paths for n, t in load_file(path).items()})
            serializer.close()
            os.replace(own, self._path)

    @property
    def files(self) -> Sequence[str]:
        """As `Peer.files`."""
        return [self._path]

    def run(self) -> int:
        """As `Peer.run`."""
        with self._deserializer(self._path, device="cpu", num_readers=os.cpu_count()) as tensors:
            return self.take((name, tensors[name]) for name in tensors)


class Accelerate(Peer):
    """`accelerate.load_checkpoint_in_model`."""

    package, distribution, cuts = "accelerate", "accelerate", False

    def ready(self) -> None:
        """As `Peer.ready`."""
        self._load: Any = import_module("accelerate").load_checkpoint_in_model
        self._modules = _as_modules(self.parameters)

    def run(self) -> int:
        """As `Peer.run`."""
        folder = self.paths[0] if len(self.paths) == 1 else os.path.dirname(self.paths[0])
        self._load(self._modules, folder)
        return self.manifest.nbytes


class DcpReader(Peer):
    """`torch.distributed.checkpoint` with its reader of Hugging Face checkpoints."""

    package, distribution, cuts = "torch", "torch", False

    def ready(self) -> None:
        """As `Peer.ready`."""
        import torch.distributed.checkpoint as dcp

        self._dcp: Any = dcp

    def run(self) -> int:
        """As `Peer.run`."""
        reader = self._dcp.HuggingFaceStorageReader(
            os.path.dirname(self.paths[0]), thread_count=os.cpu_count() or 1
        )
        state = {name: parameter.data for name, parameter in self.parameters.items()}
        self._dcp.load(state, storage_reader=reader, no_dist=True)
        return self.manifest.nbytes


class Transformers(Peer):
    """`transformers`' `from_pretrained`, into a model that it makes itself, in memory of its own."""

    package, distribution, cuts = "transformers", "transformers", False

    def prepare(self, work: Work) -> None:
        """As `Peer.prepare`, but that nothing can be touched for it."""
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

        self.work, self.manifest = work, work.manifest()
        self._folder = os.path.dirname(self.manifest.path(self.manifest.files[0].name))
        kinds = AutoConfig.from_pretrained(self._folder).architectures or [""]
        self._class: Any = AutoModelForCausalLM if "CausalLM" in kinds[0] else AutoModel

    def run(self) -> int:
        """As `Peer.run`."""
        self._loaded = self._class.from_pretrained(self._folder, dtype="auto")
        return self.manifest.nbytes

    def digest(self) -> str | None:
        """As of every contestant; `None` where it has other names for the tensors."""
        state = self._loaded.state_dict()
        if not self.manifest.tensors.keys() <= state.keys():
            return None
        names = self.manifest.tensors
        return digest({n: state[n].contiguous().reshape(-1).view(torch.uint8) for n in names})


def _as_modules(parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    """The same parameters in modules inside of modules, as their names have it."""
    root = nn.Module()
    for name, parameter in parameters.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, parameter)
    return root


PEERS: dict[str, type[Peer]] = {
    "load_file": LoadFile,
    "runai": RunAi,
    "fastsafetensors": FastSafetensors,
    "tensorizer": Tensorizer,
    "accelerate": Accelerate,
    "transformers": Transformers,
    "dcp": DcpReader,
}
"""By the word for `--peers`."""


def why_not(word: str, manifest: Manifest, tp_size: int) -> str | None:
    """Why a peer can't take part, or `None`."""
    peer = PEERS[word]
    if importlib.util.find_spec(peer.package) is None:
        return f"{peer.distribution} is not installed"
    if tp_size > 1 and not peer.cuts:
        return "it has no part of a tensor for a rank"
    folders = {os.path.dirname(os.path.realpath(manifest.path(file.name))) for file in manifest.files}
    if peer in (DcpReader, Accelerate) and len(folders) > 1:
        return "it takes one folder, and the files are in several"
    if peer is Transformers:
        size = manifest.source.size("config.json")
        try:
            kind = json.loads(manifest.source.read("config.json", 0, size or 0)).get("model_type")
        except (ValueError, AttributeError, OSError):
            kind = None
        if not kind:
            return "there is no config.json beside the weights that names a model_type"
    return None
