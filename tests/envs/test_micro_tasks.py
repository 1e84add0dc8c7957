"""The micro-task grammar: deterministic, disjoint splits, right answers, tests that discriminate."""

import ast
import random
import subprocess
import sys

import pytest

from forge_composer.envs import prompts
from forge_composer.envs.grading import passed_count
from forge_composer.envs.micro_grammar import DIFFICULTIES, SIGNATURES, SPLITS, Difficulty, siblings, space
from forge_composer.envs.micro_tasks import (
    MicroTask,
    function_count,
    make_task,
    task_count,
    trusted_report,
    trusted_results,
)


def defined(source: str, name: str) -> object:
    scope: dict = {}
    exec(source, scope)
    return scope[name]


def sample(difficulty: Difficulty, count: int, split: str = "train") -> list[MicroTask]:
    rng = random.Random(11)
    indices = rng.sample(range(function_count(difficulty, split)), count)
    return [make_task(difficulty, split, index) for index in indices]


def test_a_known_task_in_full() -> None:
    """Frozen: training data and committed weights are made from these texts."""
    task = make_task("easy", "train", 5)
    assert task.task_id == "micro-easy-train-00005"
    assert task.module_source == (
        "def form(t):\n"
        '    """Return t without the last 3 characters, followed by "d".\n'
        "\n"
        "    >>> form('fbedg')\n"
        "    'fbd'\n"
        "    >>> form('beg')\n"
        "    'd'\n"
        '    """\n'
        "    raise NotImplementedError"
    )
    assert task.reference_body == 'return t[:-3] + "d"'
    assert task.signature == "form(t)"


def test_sizes() -> None:
    assert 2000 < function_count("easy", "train") < 4096
    assert function_count("easy", "eval") >= 256
    assert task_count("easy", "train") >= 4096
    for difficulty in ("medium", "hard"):
        assert function_count(difficulty, "train") > 1500
        assert function_count(difficulty, "eval") > 200


def test_same_tasks_in_another_process() -> None:
    code = (
        "from forge_composer.envs.micro_tasks import make_task\n"
        "print([make_task(d, s, i) for d in ('easy', 'hard') for s in ('train', 'eval') for i in (0, 7)])"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1]
    assert "micro-hard-eval-00007" in runs[0]


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_no_eval_function_occurs_in_train(difficulty: Difficulty) -> None:
    """Not its body under any names, not its sentence."""
    members = space(difficulty)
    texts = {
        split: {
            (spec.template.signature, ast.dump(ast.parse("def f():\n " + spec.body.replace("\n", "\n "))))
            for spec in members.of(split)
        }
        for split in SPLITS
    }
    assert texts["train"].isdisjoint(texts["eval"])
    sentences = {split: {spec.sentence for spec in members.of(split)} for split in SPLITS}
    assert sentences["train"].isdisjoint(sentences["eval"])
    assert len(texts["train"]) == len(members.train)


@pytest.mark.parametrize("difficulty", ["easy"])
def test_no_eval_function_behaves_like_one_in_train(difficulty: Difficulty) -> None:
    """On 300 inputs of each signature that hold all letters and numbers the grammar knows."""
    inputs = {signature: [probe(signature, random.Random(n)) for n in range(300)] for signature in SIGNATURES}
    seen: dict[object, str] = {}
    for split in SPLITS:
        for spec in space(difficulty).of(split):
            signature = spec.template.signature
            source = f"def f({', '.join(SIGNATURES[signature])}):\n    " + spec.body.replace("\n", "\n    ")
            function = defined(source, "f")
            outputs = repr([function(*arguments) for arguments in inputs[signature]])
            other = seen.setdefault((signature, outputs), split)
            assert other == split, spec.body


def probe(signature: str, rng: random.Random) -> tuple:
    def text() -> str:
        return "".join(rng.choice("abcdxyz_") for _ in range(rng.randint(2, 12)))

    if signature[0] == "i":
        return tuple(rng.randint(-20, 30) for _ in signature)
    if signature[0] == "l":
        items = [rng.randint(-5, 20) for _ in range(rng.randint(2, 9))]
        return (items, rng.randint(2, 9))[: len(signature)]
    return (text(), text() if signature == "ss" else rng.randint(1, 4))[: len(signature)]


def test_indices_beyond_the_functions_rename_them() -> None:
    functions = function_count("easy", "train")
    first, again = make_task("easy", "train", 3), make_task("easy", "train", 3 + functions)
    assert first.spec == again.spec
    assert first.module_source != again.module_source
    texts = {make_task("easy", "train", 3 + functions * n).signature for n in range(32)}
    assert len(texts) == 32
    with pytest.raises(IndexError, match="has tasks 0 to"):
        make_task("easy", "train", task_count("easy", "train"))


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_reference_passes_and_tests_differ(difficulty: Difficulty) -> None:
    for task in sample(difficulty, 40) + sample(difficulty, 20, "eval"):
        cases = task.visible + task.hidden
        function = defined(task.module_with(task.reference_body), task.function)
        assert [function(*case.arguments) for case in cases] == [case.expected for case in cases]
        assert len({repr(case.arguments) for case in cases}) == len(cases) == 9
        assert trusted_report(task, task.reference_body) == prompts.ALL_PASSED
        assert len({repr(case.expected) for case in task.hidden}) > 1, "a constant would pass"


@pytest.mark.parametrize(("difficulty", "allowed"), [("easy", 0.0), ("medium", 0.002), ("hard", 0.004)])
def test_hidden_tests_tell_functions_apart(difficulty: Difficulty, allowed: float) -> None:
    """Every other function of the grammar with the same signature fails at least one hidden test."""
    wrong = survivors = 0
    for task in sample(difficulty, 40):
        for other in siblings(task.spec, difficulty):
            results = trusted_results(task, task._named(other.body), task.hidden)
            wrong += 1
            survivors += passed_count(task.hidden, results) == len(task.hidden)
    assert wrong > 40 * 20
    assert survivors <= allowed * wrong


def test_random_other_functions_of_the_signature_fail() -> None:
    rng = random.Random(3)
    for task in sample("easy", 30):
        signature = task.spec.template.signature
        others = [s for s in space("easy").train if s.template.signature == signature and s != task.spec]
        for other in rng.sample(others, min(100, len(others))):
            results = trusted_results(task, task._named(other.body), task.hidden)
            assert passed_count(task.hidden, results) < len(task.hidden), (task.reference_body, other.body)


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_wrong_bodies_fail_a_visible_test(difficulty: Difficulty) -> None:
    for task in sample(difficulty, 30):
        bodies = task.plausible_wrong_bodies(random.Random(1), count=3)
        assert bodies == task.plausible_wrong_bodies(random.Random(1), count=3)
        assert len(set(bodies)) == 3
        for body in bodies:
            function = defined(task.module_with(body), task.function)
            values = []
            for case in task.visible:
                try:
                    values.append(function(*case.arguments))
                except Exception as error:
                    values.append(error)
            assert values != [case.expected for case in task.visible]
            assert f"{task.function}(" in trusted_report(task, body)


def test_report_is_the_documented_text() -> None:
    task = make_task("easy", "train", 5)
    assert trusted_report(task, 'return t[:-2] + "d"').splitlines()[0] == (
        "form('fbedg'): expected 'fbd', got 'fbed'"
    )
    assert trusted_report(task, "return t[0] // 1").splitlines()[0] == (
        "form('fbedg'): raised TypeError: unsupported operand type(s) for //: 'str' and 'int'"
    )


def test_string_constants_are_not_renamed() -> None:
    """A constant "x" next to a parameter x, and "a" next to a, stay as they are."""
    for task in (make_task("easy", "train", i) for i in range(0, function_count("easy", "train"), 15)):
        quoted = task.reference_body.split('"')[1::2]
        assert quoted == [constant[1:-1] for constant in task.spec.constants if constant[0] == '"'], task
        for parameter in task.parameters:
            assert parameter in task.sentence.replace(",", "").replace(".", "").split()


def test_modules_are_short() -> None:
    tasks = sample("easy", 80)
    assert sum(len(task.module_source) for task in tasks) / len(tasks) < 200
    assert all(task.reference_body.count("\n") == 0 for task in tasks)
    assert all(task.reference_body.count("\n") <= 2 for task in sample("medium", 40))
