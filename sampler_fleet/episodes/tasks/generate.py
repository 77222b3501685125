"""Tasks from a seed: a package of a few modules, one fault, an issue, hidden tests.

Owns the repository's layout and the choice of names. Pure: the same arguments give the same tasks
on any machine. Validity comes from `evidence.py`; nothing is executed here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from contracts.errors import BadInputError
from sampler_fleet.episodes.base import Task
from sampler_fleet.episodes.tasks.domains import DOMAINS
from sampler_fleet.episodes.tasks.edit import Edit
from sampler_fleet.episodes.tasks.evidence import Example, Fault, find_examples, find_faults
from sampler_fleet.episodes.tasks.mutate import SYMPTOMS, Change, find_changes
from sampler_fleet.episodes.tasks.templates import (
    ROLE,
    Domain,
    Template,
    Variant,
    rename,
    role_of,
)

SPLITS = ("train", "heldout")
HIDDEN_TEST = "tests/test_hidden.py"
_MAX_LINES = 13  # of the module at fault
NUM_HIDDEN = 3  # hidden tests that fail; at most as many calls of the same function pass


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A task and what an expert would know of it."""

    task: Task
    path: str  # of the module at fault
    repair: Edit
    near_misses: tuple[Edit, ...]  # plausible edits in the function at fault, all of them wrong
    far_misses: tuple[Edit, ...]  # such edits elsewhere in its module


@dataclass(frozen=True, kw_only=True)
class _Function:
    """A function with its names chosen."""

    name: str
    variant: Variant
    names: dict[str, str]

    def render(self, source: str) -> str:
        """Roles replaced by this function's names."""
        return rename(source, self.names)

    @property
    def source(self) -> str:
        return self.render(self.variant.source)


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A call of a function by its chosen name."""

    name: str
    example: Example


def generate_tasks(split: str, num_tasks: int, seed: int) -> list[Task]:
    """Distinct tasks of a split, spread evenly over its templates.

    Raises:
        BadInputError: an unknown split, or more tasks than there are different ones.
    """
    tasks: dict[str, Task] = {}
    for drawn, problem in enumerate(generate_problems(split, seed)):
        if len(tasks) >= num_tasks:
            break
        if drawn > 20 * num_tasks + 1000:
            raise BadInputError(
                f"number of {split} tasks", expected=f"at most {len(tasks)}", found=num_tasks
            )
        tasks.setdefault(problem.task.task_id, problem.task)
    return list(tasks.values())


def generate_problems(split: str, seed: int) -> Iterator[Problem]:
    """An endless stream of problems; the templates of the split take turns. May repeat itself."""
    if split not in SPLITS:
        raise BadInputError("task split", expected=" or ".join(SPLITS), found=split)
    rng = Random(f"{split}/{seed}")
    while True:
        turn = list(_targets(split))
        rng.shuffle(turn)
        for domain, template in turn:
            problem = None
            while problem is None:
                problem = _draw(split, domain, template, rng)
            yield problem


@cache
def _targets(split: str) -> tuple[tuple[Domain, Template], ...]:
    return tuple(
        (domain, template)
        for domain in DOMAINS
        for template in domain.templates
        if template.heldout == (split == "heldout")
    )


@cache
def _companions(split: str) -> tuple[Template, ...]:
    """Templates that may stand beside the one at fault: held-out ones never in training tasks."""
    return tuple(
        template
        for domain in DOMAINS
        for template in domain.templates
        if split == "heldout" or not template.heldout
    )


def _draw(split: str, domain: Domain, template: Template, rng: Random) -> Problem | None:
    """One problem, or None where the drawn names spoil the repair."""
    variant = rng.choice(template.variants)
    fault = _choose_fault(variant, rng)
    used: set[str] = set()
    target = _name(variant, domain, rng, used)
    beside = _beside(split, domain, target, rng, used)
    functions = [target, *beside]
    rng.shuffle(functions)

    package = rng.choice(domain.packages)
    modules = rng.sample(domain.modules, rng.randint(2, len(domain.modules)))
    path = f"{package}/{modules[0]}.py"
    right = _module([f.source for f in functions])
    wrong_sources = [target.render(fault.source) if f is target else f.source for f in functions]
    wrong = _module(wrong_sources)

    def edit(change: Change, function: _Function) -> Edit:
        above = wrong_sources[: functions.index(function)]
        return Edit(
            path=path,
            line=change.line + sum(source.count("\n") + 2 for source in above),
            old=function.render(change.old),
            new=function.render(change.new),
        )

    def misses(function: _Function, source: str) -> Iterator[Edit]:
        for change in _changes(source):
            miss = edit(change, function)
            if miss.apply(wrong) not in (right, wrong):
                yield miss

    repair = edit(fault.undo, target)
    if repair.apply(wrong) != right:
        return None
    rest = {
        f"{package}/{module}.py": [
            _companion(split, domain, variant, rng, used) for _ in range(rng.randint(1, 2))
        ]
        for module in modules[1:]
    }
    dotted = path.removesuffix(".py").replace("/", ".")
    shown, hidden = _examples(fault, target, beside, rng)
    tree = {
        "README.md": _readme(package, {path: functions, **rest}),
        f"{package}/__init__.py": "",
        path: wrong,
        **{other: _module([f.source for f in fs]) for other, fs in rest.items()},
        f"tests/test_{modules[0]}.py": _tests(dotted, [_call_of(beside[0], rng)]),
    }
    task = Task(
        task_id=f"{template.name}-{_digest(tree)}",
        split=split,
        template=template.name,
        issue=(
            f"{dotted}.{target.name}({shown.arguments}) {shown.outcome}, "
            f"expected {shown.expected}. {rng.choice(SYMPTOMS[fault.undo.kind])}"
        ),
        tree=tree,
        hidden_tests={HIDDEN_TEST: _tests(dotted, hidden)},
        fail_to_pass=_test_ids(hidden[:NUM_HIDDEN], 1),
        pass_to_pass=_test_ids(hidden[NUM_HIDDEN:], NUM_HIDDEN + 1),
        fix={path: right},
    )
    return Problem(
        task=task,
        path=path,
        repair=repair,
        near_misses=tuple(misses(target, fault.source)),
        far_misses=tuple(miss for f in beside for miss in misses(f, f.variant.source)),
    )


_changes = cache(find_changes)


def _choose_fault(variant: Variant, rng: Random) -> Fault:
    """Kinds first, so that none drowns the others; those with a rival half as often."""
    faults = find_faults(variant)
    kinds: dict[str, float] = {}
    for fault in faults:
        kinds[fault.undo.kind] = 1 / (1 + fault.num_rivals)
    (kind,) = rng.choices(list(kinds), list(kinds.values()))
    return rng.choice([fault for fault in faults if fault.undo.kind == kind])


def _examples(
    fault: Fault, target: _Function, beside: Sequence[_Function], rng: Random
) -> tuple[Example, list[_Call]]:
    """The call that the issue shows (a short one), and the calls of the hidden tests.

    The first `NUM_HIDDEN` of these fail before the repair. No function that returns what the issue
    expects, whatever its arguments, passes them all.
    """
    drawn = rng.sample(fault.failing, min(len(fault.failing), 2 * NUM_HIDDEN))
    drawn.sort(key=lambda example: len(example.arguments + example.outcome))
    shown = drawn[0]
    failing = drawn[1 : NUM_HIDDEN + 1]
    passing = rng.sample(fault.passing, min(len(fault.passing), NUM_HIDDEN))
    if all(example.expected == shown.expected for example in (*failing, *passing)):
        different = [e for e in fault.failing if e.expected != shown.expected]
        if different:
            failing[0] = rng.choice(different)
        else:
            passing.append(rng.choice([e for e in fault.passing if e.expected != shown.expected]))
    calls = [_Call(name=target.name, example=example) for example in (*failing, *passing)]
    return shown, [*calls, *(_call_of(function, rng) for function in beside)]


def _name(variant: Variant, domain: Domain, rng: Random, used: set[str]) -> _Function:
    """Chooses names for all roles; the function's is not in `used`, and is added to it."""
    roles = list(dict.fromkeys(ROLE.findall(variant.source)))
    while True:
        names: dict[str, str] = {}
        for role in roles:
            pool = domain.nouns if role == "NOUN" else role_of(role).names
            names[role] = rng.choice([name for name in pool if name not in names.values()])
        name = rename(variant.function, names)
        if name not in used:
            used.add(name)
            return _Function(name=name, variant=variant, names=names)


def _beside(
    split: str, domain: Domain, target: _Function, rng: Random, used: set[str]
) -> list[_Function]:
    """One or two functions to share the module, the second only if it stays short."""
    beside = [_companion(split, domain, target.variant, rng, used)]
    if rng.random() < 0.5:
        other = _companion(split, domain, target.variant, rng, used)
        if _module([f.source for f in (target, *beside, other)]).count("\n") <= _MAX_LINES:
            beside.append(other)
    return beside


def _companion(
    split: str, domain: Domain, target: Variant, rng: Random, used: set[str]
) -> _Function:
    while True:
        template = rng.choice(_companions(split))
        if template.name != target.template:
            return _name(rng.choice(template.variants), domain, rng, used)


def _call_of(function: _Function, rng: Random) -> _Call:
    """Any call that the function answers."""
    examples = [example for example in find_examples(function.variant) if example]
    return _Call(name=function.name, example=rng.choice(examples))


def _module(sources: Sequence[str]) -> str:
    """Sources apart by one blank line."""
    return "\n\n".join(sources) + "\n"


def _tests(module: str, calls: Sequence[_Call]) -> str:
    names = ", ".join(sorted({call.name for call in calls}))
    tests = [
        f"def test_{call.name}_{number}():\n"
        f"    assert {call.name}({call.example.arguments}) == {call.example.expected}\n"
        for number, call in enumerate(calls, 1)
    ]
    return "\n\n".join([f"from {module} import {names}\n", *tests])


def _test_ids(calls: Sequence[_Call], first: int) -> tuple[str, ...]:
    return tuple(
        f"{HIDDEN_TEST}::test_{call.name}_{number}" for number, call in enumerate(calls, first)
    )


def _readme(package: str, modules: Mapping[str, Sequence[_Function]]) -> str:
    lines = [f"- `{path}`: {', '.join(f.name for f in fs)}" for path, fs in modules.items()]
    return f"# {package}\n\n" + "\n".join(sorted(lines)) + "\n"


def _digest(tree: Mapping[str, str]) -> str:
    text = "\0".join(f"{path}\0{content}" for path, content in sorted(tree.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:10]
