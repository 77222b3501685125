"""Tasks from a seed: a package of a few modules, one fault, an issue, hidden tests.

Owns the repository's layout and the choice of names. Pure: the same arguments give the same tasks
on any machine. Validity comes from `evidence.py`; nothing is executed here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from random import Random

from contracts.errors import BadInputError
from sampler_fleet.episodes.base import Task
from sampler_fleet.episodes.tasks.domains import DOMAINS
from sampler_fleet.episodes.tasks.edit import Edit
from sampler_fleet.episodes.tasks.evidence import Example, Fault, find_examples, find_faults
from sampler_fleet.episodes.tasks.grammar import drawn_templates
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
_DRAWN_PER_WRITTEN = 3  # training tasks from the grammar for each from a written template
NUM_HIDDEN = 3  # hidden tests that fail; at most as many calls of the same function pass


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A task and what an expert would know of it."""

    task: Task
    path: str  # of the module at fault
    function: str  # at fault
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
class _FaultyModule:
    """Functions in a file, the fault in one of them."""

    path: str
    functions: tuple[_Function, ...]
    target: _Function
    fault: Fault

    @cached_property
    def right(self) -> str:
        return _join([function.source for function in self.functions])

    @cached_property
    def wrong(self) -> str:
        return _join(self._sources)

    @cached_property
    def _sources(self) -> list[str]:
        faulty = self.target.render(self.fault.source)
        return [faulty if f is self.target else f.source for f in self.functions]

    def edit(self, change: Change, function: _Function) -> Edit:
        """A change of one function as an edit of the file."""
        above = self._sources[: self.functions.index(function)]
        return Edit(
            path=self.path,
            line=change.line + sum(source.count("\n") + 2 for source in above),
            old=function.render(change.old),
            new=function.render(change.new),
        )

    def misses(self, function: _Function, source: str) -> tuple[Edit, ...]:
        """Plausible edits of a function whose source is `source` that don't repair the file."""
        edits = (self.edit(change.with_spaces(source), function) for change in _changes(source))
        return tuple(e for e in edits if e.apply(self.wrong) not in (self.right, self.wrong))


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A call of a function by its chosen name."""

    name: str
    example: Example


def generate_tasks(split: str, num_tasks: int, seed: int) -> list[Task]:
    """Distinct tasks of a split; its written templates take turns, others come between them.

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
    """An endless stream of problems; may repeat itself.

    In every turn each written template of the split comes once, and in training as many drawn ones
    as `_DRAWN_PER_WRITTEN` says.
    """
    if split not in SPLITS:
        raise BadInputError("task split", expected=" or ".join(SPLITS), found=split)
    rng = Random(f"{split}/{seed}")
    while True:
        turn = list(_written(heldout=split == "heldout"))
        if split == "train":
            turn += rng.sample(drawn_templates(), _DRAWN_PER_WRITTEN * len(turn))
        rng.shuffle(turn)
        for domain, template in turn:
            if not any(map(find_faults, template.variants)):
                continue  # the grammar doesn't know what a fault would show
            problem = None
            while problem is None:
                problem = _draw(split, domain, template, rng)
            yield problem


@cache
def _written(*, heldout: bool) -> tuple[tuple[Domain, Template], ...]:
    return tuple(
        (domain, template)
        for domain in DOMAINS
        for template in domain.templates
        if template.heldout == heldout
    )


@cache
def _companions(split: str) -> tuple[Template, ...]:
    """Templates that may stand beside the one at fault: held-out ones never in training tasks."""
    found = [*_written(heldout=False), *drawn_templates()]
    if split == "heldout":
        found += _written(heldout=True)
    return tuple(template for _, template in found)


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
    names = rng.sample(domain.modules, rng.randint(2, len(domain.modules)))
    module = _FaultyModule(
        path=f"{package}/{names[0]}.py", functions=tuple(functions), target=target, fault=fault
    )
    repair = module.edit(fault.undo.with_spaces(fault.source), target)
    if repair.apply(module.wrong) != module.right:
        return None
    others = {
        f"{package}/{name}.py": [
            _companion(split, domain, variant, rng, used) for _ in range(rng.randint(1, 2))
        ]
        for name in names[1:]
    }
    return Problem(
        task=_write_task(split, module, others, rng),
        path=module.path,
        function=target.name,
        repair=repair,
        near_misses=module.misses(target, fault.source),
        far_misses=tuple(miss for f in beside for miss in module.misses(f, f.variant.source)),
    )


def _write_task(
    split: str, module: _FaultyModule, others: Mapping[str, Sequence[_Function]], rng: Random
) -> Task:
    """`others`: the functions of the package's other modules, by path."""
    target, fault = module.target, module.fault
    beside = [function for function in module.functions if function is not target]
    shown, hidden = _examples(fault, target, beside, rng)
    package, file = module.path.split("/")
    name = file.removesuffix(".py")
    dotted = f"{package}.{name}"
    tree = {
        "README.md": _readme(package, {module.path: module.functions, **others}),
        f"{package}/__init__.py": "",
        module.path: module.wrong,
        **{path: _join([f.source for f in functions]) for path, functions in others.items()},
        f"tests/test_{name}.py": _tests(dotted, [_call_of(beside[0], rng)]),
    }
    return Task(
        task_id=f"{target.variant.template}-{_digest(tree)}",
        split=split,
        template=target.variant.template,
        issue=(
            f"{dotted}.{target.name}({shown.arguments}) {shown.outcome}, "
            f"expected {shown.expected}. {rng.choice(SYMPTOMS[fault.undo.kind])}"
        ),
        tree=tree,
        hidden_tests={HIDDEN_TEST: _tests(dotted, hidden)},
        fail_to_pass=_test_ids(hidden[:NUM_HIDDEN], 1),
        pass_to_pass=_test_ids(hidden[NUM_HIDDEN:], NUM_HIDDEN + 1),
        fix={module.path: module.right},
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
        if _join([f.source for f in (target, *beside, other)]).count("\n") <= _MAX_LINES:
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


def _join(sources: Sequence[str]) -> str:
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
