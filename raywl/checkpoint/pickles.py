"""A pickle's values without its code: opcodes run on inert values, and nothing of the file is ever called.

Python's own unpickler looks up what a file names and calls it. Here every name stands for one of a short list
of builders, each of which only notes what it was given; any other name is refused. Dicts of all kinds become
dicts, sets are only noted, and a value's state is thrown away.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from typing import IO, Any, NamedTuple

from raywl.errors import CheckpointError, CorruptFileError

__all__ = ["MAX_OPCODES", "Builder", "Opaque", "read_pickle"]

MAX_OPCODES = 10_000_000
"""Most opcodes of one pickle: a tensor takes about forty, and the worst of them about 150 bytes."""

_MAX_SHOWN = 200
_ATOMS = (str, int, float, bool, bytes, type(None))
_PLAIN = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = frozenset(
    """INT BININT BININT1 BININT2 LONG LONG1 FLOAT BINFLOAT UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8
    SHORT_BINBYTES BINBYTES BINBYTES8 BYTEARRAY8""".split()
)
_STRINGS = frozenset(["STRING", "SHORT_BINSTRING", "BINSTRING"])
_PUTS = frozenset(["PUT", "BINPUT", "LONG_BINPUT"])
_GETS = frozenset(["GET", "BINGET", "LONG_BINGET"])


class Opaque(NamedTuple):
    """A value that is no weight, and of which nothing is known but what it is."""

    kind: str


class Builder(NamedTuple):
    """What a name in a pickle stands for."""

    name: str
    build: Callable[..., Any]
    """Takes what the pickle would call it with, and calls nothing of the file."""


class _Bad(Exception):
    """The pickle contradicts itself."""


def read_pickle(
    stream: IO[bytes],
    globals_: Mapping[str, Any],
    persistent: Callable[[Any], Any],
    *,
    path: str,
    what: str,
    max_opcodes: int = MAX_OPCODES,
) -> Any:
    """The value of the pickle at the stream's position, which is moved to its end.

    Args:
        stream: A seekable file.
        globals_: Full name to the `Builder` or value that it stands for. No other name is let in.
        persistent: From a persistent id to a value; raises `ValueError` for what is none.
        path: How messages name the file.
        what: How they name the pickle.
        max_opcodes: Most opcodes.

    Raises:
        CheckpointError: It names something that isn't in `globals_`.
        CorruptFileError: It is no pickle, or does what no writer of state dicts does.
    """
    start, position, count = stream.tell(), 0, 0
    machine = _Machine(globals_, persistent, path)
    try:
        for opcode, argument, at in pickletools.genops(stream):
            position, count = at or 0, count + 1
            if count > max_opcodes:
                raise _Bad(f"more than {max_opcodes} opcodes")
            machine.run(opcode.name, argument)
        return machine.result()
    except _Bad as error:
        reason = str(error)
    except (IndexError, KeyError):
        reason = "takes what was never put there"
    except (ValueError, OverflowError, UnicodeError) as error:
        reason = f"is no pickle: {str(error)[:_MAX_SHOWN]}"
    raise CorruptFileError(path, None, f"{what}: {reason} (at byte {position - start} of it)")


class _Machine:
    """The stack, its marks, and the memo."""

    def __init__(self, globals_: Mapping[str, Any], persistent: Callable[[Any], Any], path: str) -> None:
        self._globals, self._persistent, self._path = globals_, persistent, path
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def result(self) -> Any:
        """What the pickle is of, after its last opcode."""
        if len(self._stack) != 1 or self._below:
            raise _Bad(f"ends with {len(self._stack)} values")
        return self._stack[0]

    def run(self, name: str, argument: Any) -> None:
        """One opcode."""
        # In the order of how often they come.
        stack = self._stack
        if name in _PUTS:
            self._memo[argument] = stack[-1]
        elif name in _GETS:
            stack.append(self._memo[argument])
        elif name in _VALUES:
            stack.append(argument)
        elif name == "MARK":
            self._below.append(stack)
            self._stack = []
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in _PLAIN:
            stack.append(_PLAIN[name])
        elif name == "GLOBAL":
            stack.append(self._global(*argument.split(" ", 1)))
        elif name == "INST":
            # A call by itself. What it calls is told, in case it is let in nowhere.
            self._global(*argument.split(" ", 1))
            raise _Bad("has the opcode INST, which no state dict needs")
        else:
            handler = getattr(self, f"_op_{name.lower()}", None)
            if handler is not None:
                handler()
            elif name in _STRINGS:
                stack.append(_text_of(argument))
            elif name not in ("PROTO", "FRAME", "STOP"):
                raise _Bad(f"has the opcode {name}, which no state dict needs")

    def _pop_mark(self) -> list[Any]:
        if not self._below:
            raise _Bad("has no mark where it needs one")
        items, self._stack = self._stack, self._below.pop()
        return items

    def _global(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in self._globals:
            raise CheckpointError(
                self._path,
                None,
                f"needs the global {full[:_MAX_SHOWN]!r}, and not only what state dicts are made of: "
                "code that a file names is never run, and nothing was read",
            )
        return self._globals[full]

    def _call(self, function: Any, arguments: Any) -> Any:
        if not isinstance(function, Builder):
            raise _Bad(f"calls {_kind_of(function)}")
        if type(arguments) is not tuple:
            raise _Bad(f"calls {function.name} with {_kind_of(arguments)} as its arguments")
        try:
            return function.build(*arguments)
        except TypeError:
            raise _Bad(f"calls {function.name} with {len(arguments)} arguments that don't fit") from None

    # What each opcode does. Those that aren't here are refused.

    def _op_stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise _Bad("names a global by what is no text")
        self._stack.append(self._global(module, name))

    def _op_reduce(self) -> None:
        arguments = self._stack.pop()
        self._stack[-1] = self._call(self._stack[-1], arguments)

    _op_newobj = _op_reduce

    def _op_build(self) -> None:
        # Attributes, as `_metadata` of a state dict, which nobody asks for.
        self._stack.pop()
        if type(self._stack[-1]) not in (dict, Opaque):
            raise _Bad(f"sets attributes of {_kind_of(self._stack[-1])}")

    def _op_binpersid(self) -> None:
        try:
            self._stack[-1] = self._persistent(self._stack[-1])
        except ValueError as error:
            raise _Bad(str(error)) from None

    def _op_pop(self) -> None:
        self._stack.pop()

    def _op_pop_mark(self) -> None:
        self._pop_mark()

    def _op_empty_dict(self) -> None:
        self._stack.append({})

    def _op_empty_list(self) -> None:
        self._stack.append([])

    def _op_empty_tuple(self) -> None:
        self._stack.append(())

    def _op_empty_set(self) -> None:
        self._stack.append(Opaque("set"))

    def _op_frozenset(self) -> None:
        self._pop_mark()
        self._stack.append(Opaque("frozenset"))

    def _op_additems(self) -> None:
        self._pop_mark()
        if self._stack[-1] != Opaque("set"):
            raise _Bad(f"adds to {_kind_of(self._stack[-1])} as if it were a set")

    def _op_list(self) -> None:
        items = self._pop_mark()
        self._stack.append(items)

    def _op_tuple(self) -> None:
        items = self._pop_mark()
        self._stack.append(tuple(items))

    def _op_tuple1(self) -> None:
        self._stack[-1:] = [(self._stack[-1],)]

    def _op_tuple2(self) -> None:
        self._stack[-2:] = [(self._stack[-2], self._stack[-1])]

    def _op_tuple3(self) -> None:
        self._stack[-3:] = [(self._stack[-3], self._stack[-2], self._stack[-1])]

    def _op_dict(self) -> None:
        items = self._pop_mark()
        self._stack.append({})
        self._set_items(items)

    def _op_append(self) -> None:
        item = self._stack.pop()
        self._extend([item])

    def _op_appends(self) -> None:
        self._extend(self._pop_mark())

    def _op_setitem(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set_items([key, value])

    def _op_setitems(self) -> None:
        self._set_items(self._pop_mark())

    def _extend(self, items: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise _Bad(f"appends to {_kind_of(self._stack[-1])}")
        self._stack[-1].extend(items)

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise _Bad(f"sets {len(items)} halves of items in {_kind_of(target)}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Hashing a deeply nested key can take for ever.
            if type(key) not in _ATOMS and not (type(key) is tuple and all(type(k) in _ATOMS for k in key)):
                raise _Bad(f"has {_kind_of(key)} as a key of a dict")
            target[key] = value


def _text_of(raw: str) -> str:
    """A string of Python 2, which is bytes."""
    return raw.encode("latin-1").decode("utf-8")


def _kind_of(value: Any) -> str:
    if isinstance(value, Builder):
        return value.name
    return str(value.kind) if isinstance(value, Opaque) else type(value).__name__
