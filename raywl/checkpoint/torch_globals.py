"""What the names in torch's pickles stand for here: descriptions of storages and tensors, without any data.

The names are those that `torch.load(weights_only=True)` lets in by itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from raywl.checkpoint.dtypes import TORCH_NAMES, TORCH_ONLY
from raywl.checkpoint.pickles import Builder, Opaque

__all__ = ["GLOBALS", "StorageRef", "TensorRef", "storage_of"]

_STORAGES = {
    "BFloat16Storage": ("bfloat16", 2),
    "BoolStorage": ("bool", 1),
    "ByteStorage": ("uint8", 1),
    "CharStorage": ("int8", 1),
    "ComplexDoubleStorage": ("complex128", 16),
    "ComplexFloatStorage": ("complex64", 8),
    "DoubleStorage": ("float64", 8),
    "FloatStorage": ("float32", 4),
    "HalfStorage": ("float16", 2),
    "IntStorage": ("int32", 4),
    "LongStorage": ("int64", 8),
    "QInt32Storage": ("qint32", 4),
    "QInt8Storage": ("qint8", 1),
    "QUInt2x4Storage": ("quint2x4", 1),
    "QUInt4x2Storage": ("quint4x2", 1),
    "QUInt8Storage": ("quint8", 1),
    "ShortStorage": ("int16", 2),
    "UntypedStorage": ("uint8", 1),
}
"""Classes of storages, with torch's name for what their elements are, and the bytes of one."""

_DTYPES = {*TORCH_NAMES.values(), *(name for name, _ in TORCH_ONLY.values())}
_DTYPES |= {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
_DTYPES |= {"qint8", "qint32", "quint8", "quint2x4", "quint4x2"}
_QSCHEMES = ["per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric"]
_QSCHEMES += ["per_channel_affine_float_qparams"]
_LAYOUTS = ["strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged"]


class DType(NamedTuple):
    """A dtype of torch."""

    name: str


class StorageType(NamedTuple):
    """A class of storages."""

    dtype: str
    """torch's name for its elements."""
    itemsize: int
    """Bytes of one."""


class StorageRef(NamedTuple):
    """Memory that tensors are views of, as a persistent id names it."""

    key: str
    """Names its bytes in the file."""
    dtype: str
    """torch's name of the dtype that its elements are counted in."""
    itemsize: int
    """Bytes of one of them."""
    num_elements: int
    view: tuple[int, int] | None = None
    """First element and number of elements of the part that this is, in files from before torch 0.4."""


class TensorRef(NamedTuple):
    """A tensor as its pickle describes it; nothing of it is checked."""

    storage: Any = None
    offset: Any = 0
    """First element, in elements of its dtype."""
    shape: Any = ()
    strides: Any = ()
    """In elements."""
    dtype: str = ""
    """torch's name."""
    problem: str | None = None
    """Why it can't be read as a range of bytes; `None` if it can."""


def storage_of(value: Any) -> StorageRef:
    """The storage that a persistent id names.

    Raises:
        ValueError: It names none.
    """
    if type(value) is not tuple or not value or value[0] != "storage":
        kind = value[0] if type(value) is tuple and value and type(value[0]) is str else type(value).__name__
        raise ValueError(f"refers to what is no storage ({kind[:100]!r})")
    if len(value) not in (5, 6):
        raise ValueError(f"refers to a storage by {len(value)} values, expected 5 or 6")
    # The fourth is where it was (`cuda:0`), which means nothing here.
    kind, key, _, num_elements, view = (*value[1:], None)[:5]
    if not isinstance(kind, StorageType) or type(key) is not str or not _is_count(num_elements):
        raise ValueError("refers to a storage without a class, key or size")
    if view is not None:
        if type(view) is not tuple or len(view) != 3 or not all(map(_is_count, view[1:])):
            raise ValueError("refers to a part of a storage without a first element and a size")
        view = view[1:]
    return StorageRef(key, kind.dtype, kind.itemsize, num_elements, view)


_TENSOR = Opaque("torch.Tensor")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _tensor(storage: Any, offset: Any, size: Any, stride: Any) -> TensorRef:
    return TensorRef(storage, offset, size, stride, storage.dtype if isinstance(storage, StorageRef) else "")


def _tensor_v2(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, metadata: Any = None
) -> TensorRef:
    return _with_metadata(_tensor(storage, offset, size, stride), metadata)


def _tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> TensorRef:
    if not isinstance(dtype, DType):
        return TensorRef(problem="has no dtype")
    return _with_metadata(TensorRef(storage, offset, size, stride, dtype.name), metadata)


def _with_metadata(tensor: TensorRef, metadata: Any) -> TensorRef:
    bits = [name for name, is_set in metadata.items() if is_set] if type(metadata) is dict else []
    if not bits:
        return tensor
    resolve = " and ".join(f"resolve_{name}()" for name in ("conj", "neg") if name in bits)
    kind = "conjugated or negated" if resolve else f"marked {', '.join(map(str, bits))[:100]}"
    remedy = f"; save what {resolve} gives" if resolve else ""
    return tensor._replace(problem=f"is {kind} by a mark, and not in its bytes{remedy}")


def _not_dense(what: str) -> Builder:
    def build(*_: Any) -> TensorRef:
        return TensorRef(problem=f"is {what}, which has no counterpart as a plain range of bytes")

    return Builder(what, build)


def _parameter(data: Any, requires_grad: Any = None, hooks: Any = None, state: Any = None) -> Any:
    return data


_PARAMETER = Builder("torch.nn.Parameter", _parameter)


def _from_type(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    if not isinstance(function, Builder) or type(arguments) is not tuple or kind not in (_TENSOR, _PARAMETER):
        return TensorRef(problem="is made by a class of its own")
    return function.build(*arguments)


def _dict(items: Any = ()) -> dict[Any, Any]:
    # Python 2 wrote the items of an OrderedDict as pairs.
    found: dict[Any, Any] = {}
    for pair in items.items() if type(items) is dict else items:
        key, value = pair
        if type(key) not in (str, int):
            raise TypeError(key)
        found[key] = value
    return found


def _opaque(kind: str) -> Builder:
    return Builder(kind, lambda *_: Opaque(kind))


def _size(items: Any = ()) -> tuple[Any, ...]:
    return tuple(items) if type(items) in (tuple, list) else ()


GLOBALS: dict[str, Any] = {
    "collections.OrderedDict": Builder("OrderedDict", _dict),
    "collections.Counter": Builder("Counter", _dict),
    "torch.Size": Builder("torch.Size", _size),
    "torch.device": _opaque("torch.device"),
    "torch.serialization._get_layout": _opaque("torch.layout"),
    "_codecs.encode": _opaque("bytes"),
    "builtins.bytearray": _opaque("bytearray"),
    "builtins.set": _opaque("set"),
    "builtins.complex": _opaque("complex"),
    "__builtin__.bytearray": _opaque("bytearray"),
    "__builtin__.set": _opaque("set"),
    "__builtin__.complex": _opaque("complex"),
    "torch.Tensor": _TENSOR,
    "torch.nn.parameter.Parameter": _PARAMETER,
    "torch._utils._rebuild_tensor": Builder("_rebuild_tensor", _tensor),
    "torch._utils._rebuild_tensor_v2": Builder("_rebuild_tensor_v2", _tensor_v2),
    "torch._utils._rebuild_tensor_v3": Builder("_rebuild_tensor_v3", _tensor_v3),
    "torch._utils._rebuild_parameter": Builder("_rebuild_parameter", _parameter),
    "torch._utils._rebuild_parameter_with_state": Builder("_rebuild_parameter_with_state", _parameter),
    "torch._tensor._rebuild_from_type_v2": Builder("_rebuild_from_type_v2", _from_type),
    "torch._utils._rebuild_qtensor": _not_dense("a quantised tensor"),
    "torch._utils._rebuild_sparse_tensor": _not_dense("a sparse tensor"),
    "torch._utils._rebuild_nested_tensor": _not_dense("a nested tensor"),
    "torch._utils._rebuild_meta_tensor_no_storage": _not_dense("a tensor on meta"),
    "torch._utils._rebuild_wrapper_subclass": _not_dense("a tensor of a class of its own"),
    "torch._utils._rebuild_device_tensor_from_numpy": _not_dense("a tensor of a device without storages"),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _not_dense(
        "a tensor of a device without storages"
    ),
    **{f"torch.{name}": DType(name) for name in sorted(_DTYPES)},
    **{f"torch.{name}": Opaque(f"torch.{name}") for name in (*_QSCHEMES, *_LAYOUTS)},
    **{
        f"{module}.{name}": StorageType(dtype, itemsize)
        for module in ("torch", "torch.cuda", "torch.storage")
        for name, (dtype, itemsize) in _STORAGES.items()
    },
}
"""Full name to what it stands for."""
