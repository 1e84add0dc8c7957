"""What is printed and written: numbers, colours, and that no text of a model does anything."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from forge_composer.hints.records import Target
from forge_composer.inspection.as_json import to_json
from forge_composer.inspection.divergence import inspect_run
from forge_composer.inspection.load import read_run
from forge_composer.inspection.page import LONGEST_TEXT, render_page, write_page
from forge_composer.inspection.policy import Policy
from forge_composer.inspection.records import LEVELS, Inspection, TokenView
from forge_composer.inspection.selection import Selection
from forge_composer.inspection.terminal import print_inspection
from forge_composer.inspection.text import clipped, marked, token_text, visible
from forge_composer.inspection.wording import legend_edges
from tests.inspection.run_fixtures import ATTACK, POLICY, make_run, renderer, rollouts, targets

VOID = {"meta"}


class Page(HTMLParser):
    """Elements with their classes and text; fails on tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[int] = []
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(text)
        self.close()
        assert not self.open, "elements that are not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs)
        self.elements.append((tag, dict(attrs), []))
        if tag not in VOID:
            self.open.append(len(self.elements) - 1)

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self.open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        for index in self.open:
            self.elements[index][2].append(data)

    def all(self, tag: str, css: str | None = None) -> list[str]:
        return [
            "".join(text)
            for name, attributes, text in self.elements
            if name == tag and (css is None or css in (attributes.get("class") or "").split())
        ]


@pytest.fixture(scope="module")
def inspection(tmp_path_factory: pytest.TempPathFactory) -> Inspection:
    """All four targets, and one whose rollout is missing."""
    pairs = [*targets(rollouts()), (3, Target("train-000009-000", 0, "no_call", ATTACK, "template"))]
    folder = make_run(tmp_path_factory.mktemp("runs") / "a<b>&", pairs=pairs)
    return inspect_run(read_run(folder), Policy.load(POLICY), Selection())


def printed(inspection: Inspection, *, tokens: int = 8, **console: object) -> str:
    file = io.StringIO()
    options = {"width": 160, "highlight": False} | console
    print_inspection(Console(file=file, **options), inspection, tokens=tokens)  # type: ignore[arg-type]
    return file.getvalue()


# -- the page ---------------------------------------------------------------------------------------


def test_page_holds_every_token_with_its_numbers(inspection: Inspection) -> None:
    page = Page(render_page(inspection))
    assert len(page.all("article")) == 4
    turns = page.all("pre", "turn")
    for view, text in zip(inspection.shown, turns, strict=True):
        said = "".join(visible(token.text) for token in view.tokens)
        assert text.replace("↵\n", "\n").strip() == said
    tips = [
        attributes["title"]
        for name, attributes, _ in page.elements
        if name == "span" and "title" in attributes
    ]
    tokens = [token for view in inspection.shown for token in view.tokens]
    assert len(tips) == len(tokens)
    for tip, token in zip(tips, tokens, strict=True):
        assert tip is not None
        assert f"JSD {token.jsd:.4f}" in tip
        assert f"log p_S {token.student_logprob:.3f}, log p_T {token.teacher_logprob:.3f}" in tip
        assert tip.endswith(f"({token.best_probability:.3f})")
    hints = page.all("pre", "hint")
    assert [hint.strip() for hint in hints] == [visible(view.target.hint) for view in inspection.shown]
    marks = page.all("mark")
    assert all(hint.strip() in mark for hint, mark in zip(hints, marks, strict=True))


def test_page_colours_by_divergence_and_side(inspection: Inspection) -> None:
    page = Page(render_page(inspection))
    found = [
        attributes["class"]
        for name, attributes, _ in page.elements
        if name == "span" and "title" in attributes
    ]
    expected = []
    for token in (token for view in inspection.shown for token in view.tokens):
        level = sum(token.jsd >= edge for edge in (0.001, 0.01, 0.05, 0.2))
        side = "less" if token.teacher_logprob < token.student_logprob else "more"
        expected.append(f"{side} l{level}" if level else "l0")
    assert found == expected
    assert {"l0", "less l4", "more l4"} <= set(found)
    style = "".join(page.all("style"))
    assert all(f".l{level} " in style for level in range(1, len(LEVELS) + 1))
    assert "prefers-color-scheme: dark" in style


def test_page_does_nothing_and_loads_nothing(inspection: Inspection) -> None:
    """The attack is in a hint, a turn, and the folder's name; none of it is markup."""
    text = render_page(inspection)
    page = Page(text)
    tags = {name for name, _, _ in page.elements}
    assert not tags & {"script", "img", "link", "iframe", "a", "b", "object", "form", "svg"}
    names = {name for _, attributes, _ in page.elements for name in attributes}
    assert not {name for name in names if name.startswith("on") or name in ("src", "href", "style")}
    assert "default-src 'none'" in text
    assert "url(" not in text
    assert "@import" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert page.all("h1") == ["Hints of a<b>&"]
    assert text.count("&lt;script&gt;alert(1)") >= 3


def test_page_lists_what_has_no_context_and_the_summaries(inspection: Inspection) -> None:
    page = Page(render_page(inspection))
    assert "Targets without a teacher context: 1" in page.all("h2")
    cells = page.all("td")
    assert "traces/train.jsonl does not hold the rollout" in cells
    assert visible(ATTACK) in cells
    assert page.all("caption") == ["by kind", "by source"]
    total = inspection.total
    assert total is not None
    assert cells.count(f"{total.jsd:.4f}") >= 2


def test_page_is_written_whole(inspection: Inspection, tmp_path: Path) -> None:
    file = tmp_path / "new" / "hints.html"
    write_page(inspection, file)
    assert file.read_text(encoding="utf-8") == render_page(inspection)
    assert [found.name for found in file.parent.iterdir()] == ["hints.html"]


def test_page_cuts_long_contexts_away_from_the_hint(inspection: Inspection) -> None:
    view = inspection.shown[0]
    context = dataclasses.replace(view.context, before="START" + "x" * LONGEST_TEXT + "END")
    shown = [dataclasses.replace(view, context=context)]
    text = render_page(dataclasses.replace(inspection, shown=shown))
    assert "… 8 more characters" in text
    assert "xEND<mark>" in text
    assert "STARTx" not in text


# -- the terminal -----------------------------------------------------------------------------------


def test_terminal_shows_the_turn_and_its_most_divergent_tokens(inspection: Inspection) -> None:
    text = printed(inspection, tokens=3)
    for view in inspection.shown:
        assert (
            f"rollout {view.target.rollout_id}, turn {view.target.turn + 1} of {view.rollout_turns}" in text
        )
        assert f"JSD {view.jsd:.4f}" in text
        assert f"3 of {len(view.tokens)} tokens, by JSD" in text
        worst = sorted(view.tokens, key=lambda token: -token.jsd)
        for token in worst[:3]:
            row = rf"{re.escape(marked(token.text))} +{token.jsd:.4f} +{token.student_logprob:.3f}"
            assert re.search(row, text)
    rows = re.findall(r"^ +\d+ .+ -?\d+\.\d{3} +-?\d+\.\d{3} .+ [01]\.\d{3} *$", text, re.MULTILINE)
    assert len(rows) == 3 * 4
    everything = re.findall(
        r"^ +\d+ .+ -?\d+\.\d{3} +-?\d+\.\d{3} .+ [01]\.\d{3} *$", printed(inspection, tokens=0), re.MULTILINE
    )
    assert len(everything) == sum(len(view.tokens) for view in inspection.shown)
    assert "no teacher context: 1 of the targets" in text
    assert "step 3, no_call, template, train-000009-000 turn 1: traces/train.jsonl does not hold" in text


def test_terminal_obeys_no_text(inspection: Inspection) -> None:
    plain = printed(inspection)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", plain)
    assert r"\x1b[31mred\u202e" in plain
    assert "the hint makes a token" not in plain  # no colours, no legend


@pytest.mark.parametrize(
    ("system", "strong"), [("truecolor", "\x1b[38;2;0;0;0;48;2;217;81;47m"), ("standard", "\x1b[1;37;41m")]
)
def test_terminal_colours(inspection: Inspection, system: str, strong: str) -> None:
    """The strongest level of "less likely" stands before exactly those tokens, in turn, table and legend."""
    text = printed(inspection, tokens=0, color_system=system, force_terminal=True)
    count = sum(
        token.jsd >= LEVELS[-1] and token.advantage < 0 for view in inspection.shown for token in view.tokens
    )
    assert count > 0
    assert text.count(strong) == 2 * count + 1


def test_levels_and_legend_agree() -> None:
    def level(jsd: float) -> int:
        return TokenView(0, "", jsd, 0.0, 0.0, 0, "", 0.0).level

    assert [level(jsd) for jsd in (0.0, 0.0009, 0.001, 0.01, 0.0499, 0.05, 0.2, 9.0)] == [
        0,
        0,
        1,
        2,
        2,
        3,
        4,
        4,
    ]
    assert legend_edges() == ["under 0.001", "0.001 to 0.01", "0.01 to 0.05", "0.05 to 0.2", "0.2 and more"]


# -- JSON -------------------------------------------------------------------------------------------


def test_json_holds_everything(inspection: Inspection) -> None:
    content = json.loads(json.dumps(to_json(inspection), allow_nan=False))
    assert content["misaligned"] == {"no rollout": 1}
    assert content["misaligned_targets"][0]["hint"] == ATTACK
    assert content["summary"]["all"]["targets"] == 4
    assert set(content["summary"]["by_kind"]) == {"test_failed", "low_reward"}
    first = content["targets"][0]
    view = inspection.shown[0]
    assert (first["step"], first["turn"], first["kind"], first["reward"]) == (1, 1, "test_failed", 0.0)
    assert first["jsd"] == view.jsd
    token = first["tokens"][12]
    assert token == {
        "turn": 1,
        "token_id": view.tokens[12].token_id,
        "text": " b",
        "jsd": view.tokens[12].jsd,
        "student_logprob": view.tokens[12].student_logprob,
        "teacher_logprob": view.tokens[12].teacher_logprob,
        "advantage": view.tokens[12].teacher_logprob - view.tokens[12].student_logprob,
        "best_id": view.tokens[12].best_id,
        "best_text": view.tokens[12].best_text,
        "best_probability": view.tokens[12].best_probability,
    }


# -- text -------------------------------------------------------------------------------------------


def test_visible_spells_what_acts() -> None:
    assert visible("a\x1b[1m\r\x00\x85\u2028\u200b\U000e0001\ud800") == (
        r"a\x1b[1m\x0d\x00\x85\u2028\u200b\U000e0001\ud800"
    )
    assert visible("ü ✓\n\té 漢") == "ü ✓\n\té 漢"
    assert marked(" a\n\tb ") == "␣a↵⇥b␣"


def test_token_text_adds_up() -> None:
    """Characters of several tokens belong to the last one; the pieces make up the text."""
    decode = renderer().tokenizer.decode
    ids = renderer().tokenizer.encode("é 漢字 x ✓✓ end", add_special_tokens=False)
    pieces = [token_text(decode, ids[:index], token) for index, token in enumerate(ids)]
    assert "".join(piece for piece in pieces if piece != "\ufffd") == "é 漢字 x ✓✓ end"
    assert {"漢", "字"} <= {piece.strip() for piece in pieces}
    assert len(pieces) > len(set("".join(pieces)))


def test_clipped() -> None:
    assert clipped("a\nb\nc", 3) == "a\nb\nc"
    assert clipped("a\nb\nc", 2) == "a\nb\n… 1 more line"
    assert clipped("a\nb\nc", 1, keep="last") == "… 2 more lines\nc"
