"""Calls between hidden tests and the code they test, which lives in another process.

Owns both ends of what `peer.py` carries. The worker runs the policy's code; the tests see its
modules, functions, classes and objects as proxies. Plain values (see `wire.py`) cross as copies, so
that tests compare built-in objects with built-in objects in a process that never holds an object,
class or line of the policy. Everything else stays behind as a reference to call, index, iterate or
compare with its like. Must not judge: `grading.py` does.

What a test may do: call functions and classes of the tree, pass its own functions, read and set
attributes, iterate, catch the tree's exceptions, see its own lists, dicts and sets changed by a
call. What it may not: patch the standard library or capture output (the worker has its own), use
`with` on the tree's objects, hand over instances of its own classes, or functions by which the
worker could reach into the tests (`getattr`, `exec`, `pickle.loads`).

What an object of the tree says of itself is its word: whether it equals another of them, is true,
is an instance, has a member, what it makes with an operator. One that says yes to everything is
caught by a stranger that it should say no to (see `strangers.py`), one that gives the same whatever
is added to it or taken from it by such operands; one that lies with care is not.

Runs in a sandbox with a bare interpreter: few imports, all of them cheap.
"""

from __future__ import annotations

import builtins
import operator
import sys

from sampler_fleet.episodes.peer import Lost, Peer
from sampler_fleet.episodes.strangers import (
    NUM_WORLDS,
    far,
    is_proven,
    look_alike,
    near,
    shuffled,
)
from sampler_fleet.episodes.wire import decode, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from typing import Any

_NOTHING = object()
_ModuleType = type(sys)
_ModuleSpec: Any = type(builtins.__spec__)  # without importing importlib


class Unproven(BaseException):
    """An object's word counts for nothing. No Exception: it is no failure that a test expects."""


# --- the worker's end --------------------------------------------------------------------------


def _import(name: str) -> Any:
    __import__(name)
    return sys.modules[name]


_ARITHMETIC = (
    *("neg", "pos", "abs", "invert", "add", "sub", "mul", "truediv", "floordiv", "mod"),
    *("and_", "or_", "xor"),
)
_OPERATORS = ("lt", "le", "gt", "ge", "getitem", "setitem", "delitem", *_ARITHMETIC)
_VERBS: dict[str, Callable[..., Any]] = {
    **{kind.__name__: kind for kind in (getattr, setattr, isinstance, iter, next, len, repr)},
    **{kind.__name__: kind for kind in (str, int, float, bool)},
    **{name: getattr(operator, name) for name in (*_OPERATORS, "eq", "contains", "index")},
    "import": _import,
}
# Of what a test hands over, the worker may call what its tests define, and these.
_HARMLESS_MODULES = (
    *("operator", "_operator", "math", "cmath", "functools", "re"),
    *("_functools", "itertools", "collections", "json", "string", "decimal", "fractions"),
    *("datetime", "statistics", "random", "copy", "builtins"),
)
_HARMFUL = (
    *("eval", "exec", "compile", "__import__", "getattr", "setattr", "delattr", "vars", "globals"),
    *("locals", "open", "input", "breakpoint", "type", "super", "format", "format_map"),
    *("attrgetter", "methodcaller"),
)
_ADDABLE: tuple[Any, ...] = (int, float, str, bytes)
_BASES: tuple[Any, ...] = (*_ADDABLE, list, tuple, dict, set, frozenset)


class Worker(Peer):
    """Runs what the tests ask for."""

    def perform(self, verb: str, *arguments: Any) -> Any:
        return self._call(*arguments) if verb == "call" else _VERBS[verb](*arguments)

    def _call(
        self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[Any, list[tuple[int, Any]]]:
        """(result, [(place, new content) of each container among the arguments that changed])."""
        before = {
            place: encode(argument, self.refer)
            for place, argument in enumerate(arguments)
            if type(argument) in (list, dict, set)
        }
        result = function(*arguments, **keywords)
        changed = [
            (place, arguments[place])
            for place, data in before.items()
            if encode(arguments[place], self.refer) != data
        ]
        return result, changed

    def refer(self, thing: Any) -> tuple[str, int, Any]:
        if isinstance(thing, Callback):
            return "yours", thing.number, None
        number = self.number(thing)
        if isinstance(thing, type) and issubclass(thing, BaseException):
            return "exception", number, self.describe_class(thing)
        for base in _BASES:  # an instance of a subclass: its content comes along
            if isinstance(thing, base):
                return "object", number, (encode(_plain(thing, base), self.refer),)
        return "object", number, None

    def resolve(self, kind: str, number: int, more: Any) -> Any:
        return self.own[number] if kind == "yours" else Callback(self, number)

    def exception(self, kind: Any, arguments: tuple[Any, ...], number: int) -> BaseException:
        return getattr(builtins, kind[0])(*arguments)


def _plain(thing: Any, base: Any) -> Any:
    """The content of an instance of a subclass of a built-in type, as that type."""
    if base in _ADDABLE:
        return base.__add__(thing, base())  # the sum of the two is of the built-in type
    return base(base.items(thing) if base is dict else base.__iter__(thing))


class Callback:
    """A function of the test, in the worker."""

    def __init__(self, peer: Worker, number: int) -> None:
        self.peer, self.number = peer, number

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.peer.ask("call", self, arguments, keywords)


# --- the tests' end ----------------------------------------------------------------------------


class Proxy:
    """An object in the worker. Equal to plain values only where it extends a built-in type.

    One that an operator made with a plain value has twins: (what was made with its look-alike,
    how far apart numbers from the two must be to differ) for each.
    """

    def __init__(
        self,
        peer: Tests,
        number: int,
        content: Any = _NOTHING,
        twins: Sequence[tuple[Any, float]] = (),
    ) -> None:
        self.__dict__.update(_peer=peer, _number=number, _content=content, _twins=twins)

    def __getattr__(self, name: str) -> Any:
        return self._peer.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("setattr", self, name, value)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        result, changed = self._peer.ask("call", self, arguments, keywords)
        for place, content in changed:
            mine = arguments[place]
            if type(mine) is not type(content):
                raise TypeError("an argument changed its type")
            mine.clear()
            (mine.extend if type(mine) is list else mine.update)(content)
        return result

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Proxy):
            return self._number == other._number or self._peer.says_yes("eq", self, other)
        return self._content is not _NOTHING and self._content == other

    def __contains__(self, thing: object) -> bool:
        return self._peer.says_yes("contains", self, thing)

    def __hash__(self) -> int:
        return hash(self._number if self._content is _NOTHING else self._content)

    def __instancecheck__(self, thing: object) -> bool:
        return isinstance(thing, Proxy) and self._peer.ask("isinstance", thing, self) is True


def _forward(verb: str) -> Callable[..., Any]:
    def method(self: Proxy, *arguments: Any) -> Any:
        return self._peer.ask(verb, self, *arguments)

    return method


def _forward_doubted(verb: str) -> Callable[..., Any]:
    def method(self: Proxy, *arguments: Any) -> Any:
        return self._peer.doubt(verb, self, *arguments)

    return method


def _forward_order(verb: str) -> Callable[..., Any]:
    def method(self: Proxy, other: Any) -> Any:
        if isinstance(other, Proxy):
            return self._peer.ask(verb, self, other)
        if self._content is _NOTHING:  # a strange object must not decide how it compares
            return NotImplemented
        return getattr(operator, verb)(self._content, other)

    return method


_MAKERS = {
    _forward: ("getitem", "setitem", "delitem", "iter", "next"),
    _forward_order: ("lt", "le", "gt", "ge"),
    _forward_doubted: (*_ARITHMETIC, "index", "len", "repr", "str", "int", "float", "bool"),
}
for _make, _verbs in _MAKERS.items():
    for _verb in _verbs:
        setattr(Proxy, f"__{_verb.rstrip('_')}__", _make(_verb))


class RemoteModule(_ModuleType):
    """A module of the tree, as the tests import it."""

    def __init__(self, name: str, proxy: Proxy) -> None:
        super().__init__(name)
        self.__dict__["_proxy"] = proxy
        for own in ("__name__", "__doc__"):
            del self.__dict__[own]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_proxy"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, _ModuleType) or name.startswith("__"):  # the import system does that
            super().__setattr__(name, value)
        else:
            setattr(self.__dict__["_proxy"], name, value)


class Tests(Peer):
    """Asks the worker, and finds the tree's `modules` for the import system."""

    def __init__(
        self, read_fd: int, write_fd: int, *, deadline: float, modules: Collection[str]
    ) -> None:
        super().__init__(read_fd, write_fd, deadline)
        self._modules = frozenset(modules)
        self._proxies: dict[int, Proxy] = {}
        self._classes: dict[int, Any] = {}  # number -> stand-in of an exception class

    def perform(self, verb: str, *arguments: Any) -> Any:
        function, positional, keywords = arguments
        if verb != "call":
            raise TypeError("only functions of the test can be called")
        return function(*positional, **keywords)

    def refer(self, thing: Any) -> tuple[str, int, Any]:
        if isinstance(thing, RemoteModule):
            thing = thing.__dict__["_proxy"]
        if isinstance(thing, Proxy):
            return "yours", thing._number, None
        if isinstance(thing, type) and "_number" in thing.__dict__:
            return "yours", thing.__dict__["_number"], None
        if callable(thing) and _is_harmless(thing):
            return "function", self.number(thing), None
        raise TypeError(f"a {type(thing).__name__} can't be handed to the code under test")

    def resolve(self, kind: str, number: int, more: Any) -> Any:
        if kind == "yours":
            return self.own[number]
        if kind == "exception":
            return self._exception_class(*more)
        if more is not None:  # its content may have changed since it was last here
            return Proxy(self, number, decode(more[0], self.resolve))
        return self._proxies.setdefault(number, Proxy(self, number))

    def exception(self, kind: Any, arguments: tuple[Any, ...], number: int) -> BaseException:
        stand_in = self._exception_class(*kind)
        error = stand_in.__new__(stand_in, *arguments)
        error.__dict__["_original"] = Proxy(self, number)
        return error

    def describe_class(self, kind: type[BaseException]) -> tuple[str, list[tuple[int, str]]]:
        return super().describe_class(kind)[0], []  # only built-in exceptions go to the worker

    def _exception_class(self, builtin: str, below: list[tuple[int, str]]) -> Any:
        kind = getattr(builtins, builtin)
        if not issubclass(kind, BaseException):
            raise TypeError("no exception")
        for number, name in below:
            if number not in self._classes:
                body = {"_number": number, "__getattr__": _ask_original}
                self._classes[number] = type(name, (kind,), body)
            kind = self._classes[number]
        return kind

    def says_yes(self, verb: str, proxy: Proxy, thing: object) -> bool:
        """Whether an object answers True to `thing`, and not to all strangers as well."""
        if self.ask(verb, proxy, thing) is not True:  # first: an iterator looks only once
            return False
        # An exception: it was looked at, and was nothing that can be compared.
        strangers = far(thing) or [_stranger]
        return any(self._answer(verb, proxy, stranger) is not True for stranger in strangers)

    def doubt(self, verb: str, *operands: Any) -> Any:
        """What an operator gives; Unproven if it gives the same for what a test never meant."""
        worlds = [operands, *(_in_world(operands, world) for world in range(NUM_WORLDS))]
        is_alone = all(one is other for one, other in zip(operands, worlds[1], strict=True))
        # Zero times anything is zero, and no test multiplies to compare.
        if is_alone or (verb == "mul" and not _have_twins(operands)):
            return self.ask(verb, *operands)
        answers: list[Any] = [None] * len(worlds)
        for place in shuffled(len(worlds)):
            answers[place] = self._answer(verb, *worlds[place])
        answer, *others = answers
        if isinstance(answer, BaseException):
            raise answer
        twins = [
            (
                _NOTHING if isinstance(other, BaseException) else other,  # which can't be handed on
                near(verb, operands[-1], there[-1], before),
            )
            for other, there, before in zip(others, worlds[1:], _nearness(operands), strict=True)
        ]
        plain = _plain_of(answer)
        if plain is not _NOTHING and not _is_builtin(verb, operands, plain):
            known = [(_plain_of(other), tolerance) for other, tolerance in twins]
            if not is_proven(verb, plain, known):
                raise Unproven(f"an object gives {plain!r:.40} to {verb!r} whatever it is given")
        if isinstance(answer, Proxy):
            return Proxy(self, answer._number, answer._content, twins)
        return answer

    def _answer(self, verb: str, *operands: Any) -> Any:
        """What the other side answers, or what it raised."""
        try:
            return self.ask(verb, *operands)
        except Lost:
            raise
        except BaseException as error:
            return error

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name.partition(".")[0] in self._modules:
            return _ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> RemoteModule:
        return RemoteModule(spec.name, self.ask("import", spec.name))

    def exec_module(self, module: RemoteModule) -> None:
        """The worker ran it when it was created."""


def _in_world(operands: tuple[Any, ...], world: int) -> tuple[Any, ...]:
    """The operands as they would be had the test other values."""
    return tuple(
        thing._twins[world][0] if _have_twins([thing]) else look_alike(thing, world)
        for thing in operands
    )


def _nearness(operands: tuple[Any, ...]) -> list[float]:
    """Of each world, what its twins must be apart already."""
    twins = [thing._twins for thing in operands if _have_twins([thing])]
    return [max((t[world][1] for t in twins), default=0.0) for world in range(NUM_WORLDS)]


def _have_twins(things: Sequence[Any]) -> bool:
    return any(isinstance(thing, Proxy) and thing._twins for thing in things)


def _plain_of(thing: Any) -> Any:
    return thing._content if isinstance(thing, Proxy) else thing


def _is_builtin(verb: str, operands: tuple[Any, ...], answer: Any) -> bool:
    """Whether it is what the built-in type gives that an object extends."""
    contents = [_plain_of(operand) for operand in operands]
    if _NOTHING in contents:
        return False
    try:
        return bool(_VERBS[verb](*contents) == answer)
    except Exception:
        return False


def _stranger() -> None:
    """Nothing of the tree equals it or has it."""


def _is_harmless(function: Any) -> bool:
    """Whether it may be called by an enemy, with plain values and functions like it."""
    if type(function).__name__ == "partial":
        return _is_harmless(function.func)
    module, name = getattr(function, "__module__", None), getattr(function, "__name__", "")
    if module is None:  # a method of a built-in type, or of a value of one
        value = getattr(function, "__self__", None)
        owner = getattr(function, "__objclass__", None) or value
        unbound = owner is not value
        kind = owner if isinstance(owner, type) else type(owner)
        return kind in _BASES and not (unbound and name in _HARMFUL)
    if module == "unittest.mock":
        return not name  # a mock, and not what makes or places them
    return module == "hidden" or (module in _HARMLESS_MODULES and name not in _HARMFUL)


def _ask_original(error: BaseException, name: str) -> Any:
    if name.startswith("__") or "_original" not in error.__dict__:
        raise AttributeError(name)
    return getattr(error.__dict__["_original"], name)
