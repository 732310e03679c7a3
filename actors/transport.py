"""Values in bytes, on their way between driver and ranks."""

from __future__ import annotations

import io
import pickle
import sys
from typing import TYPE_CHECKING, Any

from ray.cloudpickle import CloudPickler

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = ["to_bytes"]

# Those that torch itself can pickle; its way of reading the others back fails.
_CLASSIC = frozenset(
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex128 complex64".split()
)


def to_bytes(value: Any) -> bytes:
    """`value` in bytes that `pickle.loads` reads: functions and classes of scripts included, and tensors of
    every dtype.

    Raises:
        TypeError: Something in it can't be pickled.
    """
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


class _Pickler(CloudPickler):  # type: ignore[misc]
    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and type(value) is torch.Tensor:
            if _is_odd(value):
                flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                return _rebuild, (flat, str(value.dtype).removeprefix("torch."), tuple(value.shape))
            # Torch's own way. With RAY_ENABLE_ZERO_COPY_TORCH_TENSORS=1 Ray has another one, which fails on
            # conjugate and meta tensors, and forgets that a gradient is wanted.
            return value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return super().reducer_override(value)


def _is_odd(tensor: torch.Tensor) -> bool:
    return str(tensor.dtype).removeprefix("torch.") not in _CLASSIC and tensor.device.type in ("cpu", "cuda")


def _rebuild(flat: np.ndarray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    return torch.from_numpy(flat.copy()).view(getattr(torch, dtype)).reshape(shape)
