"""How messages become lines: Markdown, tints, seams, and nothing that a terminal would obey. No terminal here."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from disco_daemon.client.once import NOT_RUNNING, REFUSED_KEY, DaemonError
from disco_tui.data import banner
from disco_tui.draw.entry import Entry, Words, summary
from disco_tui.draw.markdown import Painter, code_blocks, last_block
from disco_tui.draw.theme import TextTheme, fit, mark_sides, strip_marks, text_theme_of
from tests.fixtures.tui import DISCO, STATE

THEME = text_theme_of({}, dark=True, plain=False)
PLAIN = text_theme_of({}, dark=True, plain=True)
SAMPLE = """# Title

A *para* with **bold** and `code`, [a link](http://example.org/x).

- one
- two
  1. inner

> quoted

```python
def f(x):
    return x
```

| a | bb |
|---|----|
| 1 | 2 |

---
The end.
"""


def drawn(entry: Entry, width: int, theme: TextTheme) -> list[str]:
    return [entry.gutter(i, theme).plain + line.plain for i, line in enumerate(entry.draw(width, theme))]


def shown(text: str, width: int = 40, theme: TextTheme = THEME) -> list[str]:
    return [line.plain.rstrip() for line in Painter(width, theme).paint(mark_sides(text, []))]


def test_markdown_becomes_lines() -> None:
    assert shown(SAMPLE) == [
        "Title", "", "A para with bold and code, a link", "(http://example.org/x).", "",
        "• one", "• two", "  1. inner", "", "│ quoted", "",
        "▏ python", "▏ def f(x):", "▏     return x", "",
        "a  bb", "─  ──", "1  2", "", "─" * 40, "", "The end.",
    ]  # fmt: skip


def test_plain_mode_draws_no_frames_and_reads_tables_cell_by_cell() -> None:
    lines = shown(SAMPLE, theme=PLAIN)
    assert {"# Title", "- one", "> quoted", "    def f(x):", "a: 1", "bb: 2", "---"} <= set(lines)
    assert all(ord(character) < 0x2500 for line in lines for character in line)


@pytest.mark.parametrize("theme", [THEME, PLAIN], ids=["theme", "plain"])
@given(text=st.text(st.sampled_from("ab *_`#>-|\n[](1.)~\t\x1b字é"), max_size=120), width=st.integers(8, 60))
def test_no_line_is_wider_than_asked_and_no_control_character_gets_out(theme: TextTheme, text: str, width: int) -> None:
    for line in Entry(1, "assistant", text, finish="stop").draw(width + 2, theme):
        assert line.cell_len <= max(width + 2, 24)  # nested lists keep a few cells for words
        assert not any(ord(c) < 32 for c in line.plain)


@given(st.text())
def test_what_a_terminal_would_obey_is_shown(text: str) -> None:
    assert not any(ord(c) < 32 and c != "\n" for c in fit(text))
    assert fit("a\x1b]52;c;x\x07b\u202ec") == "a\ufffd]52;c;x\ufffdb\ufffdc"


HIDDEN = [
    "&#27;",
    "&#x9b;",
    "&#x202e;",
    "&rlm;",
    "&#xf8d0;",
    "&#xf8d1;",
    "&#8233;",
    "%1b",
    "%9b",
    "%E2%80%AE",
    "%EF%A3%90",
]
AROUND = [
    "{}",
    "<http://a/{}x>",
    "[x](http://a/{}z)",
    "[x](<http://a/{}z>)",
    "![{}](http://x)",
    "**{}**",
    "# {}",
    "| {} |\n|-|",
]
AROUND += [
    "[x](http://a '{}')",
    "[{}]: http://y\n\n[{}]",
    "```{}\n{}\n```",
    "<b>{}</b>",
    "> {}",
    "\\{}",
    "<a@b.c{}>",
    "`{}`",
]


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_what_is_written_as_an_entity_or_percent_reaches_no_terminal_and_forges_no_side(
    around: str, hidden: str
) -> None:
    entry = Entry(1, "assistant", finish="\x1b[2J")
    entry.grow(around.replace("{}", f"evil {hidden} text" if "http" not in around else hidden), "server")
    entry.grow("\n\nThe end.", "server")
    lines = entry.draw(60, THEME)
    assert [line.plain for line in lines] == [fit(line.plain) for line in lines]
    assert not any(str(THEME.tints["device"]) in str(span.style) for line in lines for span in line.spans)
    assert "⇢" not in "".join(line.plain for line in lines)


@given(st.lists(st.sampled_from([*HIDDEN, *"[]()<>!`*#|\\&;%\n ", "http://a", "x:"]), max_size=30).map("".join))
def test_nothing_that_a_terminal_obeys_comes_of_any_markdown(text: str) -> None:
    entry = Entry(1, "assistant", finish="stop")
    entry.grow(text, "server")
    assert all(line.plain == fit(line.plain) for line in entry.draw(40, THEME))


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (
            {"stopped": "repetition"},
            "stopped: it was repeating itself; Ctrl+R tries again (delivery.stop_repetition = false lets it)",
        ),
        ({}, "cut at the length limit: Ctrl+G goes on"),
    ],
)
def test_an_answer_that_was_stopped_says_why_and_what_to_do(record: dict[str, Any], says: str) -> None:
    entry = Entry(1, "assistant")
    entry.grow("na na na", "device")
    entry.end("length", record)
    assert "\n".join(drawn(entry, 120, THEME)).strip().endswith(says)
    entry.end("length", {"stopped": ["what", "a file says"]})
    assert "what" in "\n".join(drawn(entry, 60, THEME))


def test_words_are_tinted_by_side_and_the_seam_is_marked() -> None:
    entry = Entry(1, "assistant", finish="stop")
    entry.grow("The **cat sat", "device")
    entry.grow(" on** the mat.", "server")
    assert drawn(entry, 60, THEME)[0] == "◆ The cat sat ⇢◇ on the mat."
    line = entry.draw(60, THEME)[0]
    tint = {line.plain[s.start : s.end].strip(): str(s.style) for s in line.spans if "#" in str(s.style)}
    assert THEME.tints["device"].color is not None
    assert THEME.tints["device"].color.name in tint["cat sat"]
    assert str(THEME.tints["server"]) in tint["the mat."]
    assert "disco [device]: The cat sat [server] on the mat." in " ".join(drawn(entry, 60, PLAIN))


@pytest.mark.parametrize(
    ("before", "after", "seen"),
    [
        ("a [link](http://x.or", "g/y) end", "a link (http://x.org/y) end"),
        ("x\n\n", "- item", "• item"),
        ("x\n\n```pyt", "hon\na = 1\n```\n", "▏ python"),
        ("x **", "bold** y", "bold y"),
        ("text", " **", "text **"),
    ],
)
def test_a_seam_in_the_middle_of_markup_breaks_none(before: str, after: str, seen: str) -> None:
    entry = Entry(1, "assistant", finish="stop")
    entry.grow(before, "device")
    entry.grow(after, "server")
    assert seen in "\n".join(drawn(entry, 60, THEME)).replace("⇢◇ ", "")


def test_a_seam_in_code_is_shown_behind_its_line() -> None:
    entry = Entry(1, "assistant", finish="stop")
    entry.grow("```\na = 1\n", "device")
    entry.grow("b = 2\n```\n", "server")
    assert drawn(entry, 40, THEME)[:2] == ["◆ ▏ a = 1", "  ▏ b = 2  ⇢◇"]


@given(
    st.lists(st.sampled_from(["word ", "\n\n", "# h\n", "- i\n", "```\n", "x = 1\n", "> q\n", "**b** "]), max_size=25)
)
def test_a_growing_answer_shows_what_the_whole_one_does(pieces: list[str]) -> None:
    # Reference: an answer that came at once. Only what ends in the middle of a block may be joined otherwise.
    live, whole = Entry(1, "assistant", live=True), Entry(1, "assistant", "".join(pieces), live=True)
    for piece in pieces:
        live.grow(piece, None)
        grown = [line.plain for line in live.draw(60, THEME)]
    if pieces:
        assert [x for x in grown if x.strip()] == [x.plain for x in whole.draw(60, THEME) if x.plain.strip()]


def test_only_the_last_block_of_a_growing_answer_is_painted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Entry(1, "assistant", live=True)
    for i in range(50):
        entry.grow(f"Paragraph {i} with some words.\n\n", "device")
    entry.draw(60, THEME)
    painted: list[int] = []
    paint = Painter.paint

    def counted(self: Painter, source: str) -> list[Text]:
        painted.append(len(source))
        return paint(self, source)

    monkeypatch.setattr(Painter, "paint", counted)
    entry.grow("more ", "device")
    entry.draw(60, THEME)
    assert sum(painted) < 200


@given(st.text(st.sampled_from("ab#-> \n`"), max_size=80))
def test_the_last_block_begins_at_a_line(text: str) -> None:
    at = last_block(text)
    assert 0 <= at <= len(text)
    assert at == 0 or text[at - 1] == "\n"


@given(
    st.text(max_size=60),
    st.lists(st.tuples(st.integers(0, 60), st.sampled_from(["device", "server", "alone"])), max_size=4),
)
def test_marks_change_no_word(text: str, sides: list[tuple[int, str]]) -> None:
    assert strip_marks(mark_sides(text, sorted(sides))) == fit(text)


def test_words_made_without_the_partner_are_tinted_and_have_a_sign() -> None:
    text, sides = "Red, green and blue.", [(0, "device"), (5, "alone"), (15, "device")]
    for theme in (THEME, PLAIN):
        [line] = Painter(60, theme).paint(mark_sides(text, sides))
        sign = theme.mark("alone")
        assert line.plain.index(sign) < line.plain.index("green")
        assert sign in theme.whole_legend
    [line] = Painter(60, THEME).paint(mark_sides(text, sides))
    at = {word: line.get_style_at_offset(Console(), line.plain.index(word)) for word in ("Red", "green", "blue")}
    assert at["Red"] == at["blue"] == THEME.tints["device"]
    assert at["green"] == THEME.tints["alone"]


def test_a_seam_leaves_tabs_as_wide_as_they_were() -> None:
    assert strip_marks(mark_sides("ab\tc\td", [(1, "device"), (4, "server")])) == "ab  c   d"


def test_code_blocks_are_found_as_they_were_written() -> None:
    assert code_blocks("x\n```py\na\n  b\n```\ny\n\n    indented\n") == ["a\n  b", "indented"]


def test_the_line_below_an_answer() -> None:
    assert summary(DISCO, THEME) == (
        "TTFT 0.31 s (alone: device 0.31, server > 0.80) · ◆ 12 tok · ◇ 40 tok · 1 handoff · <$0.0001 · 12 J · QoE 0.98"
    )
    alone = DISCO | {"endpoints": {"device": DISCO["endpoints"]["device"]}, "tokens": {"device": 3, "server": 0}}
    assert summary(alone | {"handoffs": 0, "qoe": None, "server_usd": 0.0}, PLAIN) == (
        "TTFT 0.31 s, [device] 3 tok, $0, 12 J"
    )
    split = {"round_trips": 20, "accepted": 26, "quality": "whole", "alone_from": None}
    for changes, says in (
        ({}, "[device] 3 tok, 2.3 tok a round trip, $0"),
        ({"quality": "confident"}, "2.3 tok a round trip, confident, $0"),
        ({"quality": "alone", "alone_from": 30}, "2.3 tok a round trip, alone from token 30, $0"),
        ({"quality": "alone", "round_trips": 0, "accepted": 0}, "[device] 3 tok, alone, $0"),
    ):
        both = alone | {"handoffs": 0, "qoe": None, "server_usd": 0.0, "split": split | changes}
        assert says in summary(both, PLAIN)


@pytest.mark.parametrize(
    ("finish", "says"),
    [("length", "length limit"), ("cancelled", "stopped"), (None, "interrupted"), ("error", "failed")],
)
def test_an_answer_that_is_not_whole_says_so(finish: str | None, says: str) -> None:
    lines = Entry(1, "assistant", Words("half", disco={"error": "it broke"}), finish=finish).draw(60, THEME)
    assert says in lines[-2].plain
    assert any("it broke" in line.plain for line in lines)


def with_state(**changes: Any) -> dict[str, Any]:
    endpoints = {
        name: STATE["endpoints"][name] | changes.get(name, {}) for name in changes.get("sides", STATE["endpoints"])
    }
    return {
        "endpoints": endpoints, "money": {"caps": changes.get("caps", {})}, "private": changes.get("private", False)
    }  # fmt: skip


DOWN = {"state": "down", "partner": "desktop", "error": "it does not answer"}
CAP = {"unit": "$", "limit": 0.5, "spent": 0.5, "reserved": 0.0, "reset_at": 0.0}


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (with_state(), None),
        (with_state(device={"state": "loading"}), "is being loaded"),
        (with_state(device={"state": "failed", "last_error": "out of memory"}), "out of memory): the server answers"),
        (with_state(device={"state": "failed"}, sides=["device"]), "disco doctor"),
        (with_state(server={"down_s": 12.0, "last_error": "429"}), "left alone for 12 s (429); this machine answers"),
        (with_state(server={"down_s": 9.0, "failing": {"reason": "rate_limited", "since": 0.0}}), "for 9 s more; this"),
        (with_state(server={"failing": {"reason": "unauthorized", "since": 0.0}}), "key refused since"),
        (with_state(server={"failing": {"reason": "unreachable", "since": 0.0}}), "this machine answers. F5"),
        (with_state(server={"failing": {"reason": "timeout", "since": 0.0}}), None),
        (with_state(caps={"usd_per_day": CAP}), "usd_per_day is reached ($0.50 of $0.50)"),
        (with_state(caps={"usd_per_day": CAP | {"spent": 0.49}}), None),
        (with_state(caps={"usd_per_day": CAP}), "the other side answers"),
        (with_state(caps={"wh_per_day": CAP}, private=True), "nobody is left to answer"),
        (with_state(caps={"usd_per_day": CAP}, private=True), None),
        (with_state(server={"down_s": 12.0, "last_error": "429"}, private=True), None),
        (with_state(device={"state": "failed"}, private=True), "disco doctor"),
        (with_state() | {"split": {"state": "up", "partner": "desktop", "error": None}}, None),
        (with_state() | {"split": DOWN}, "has the upper layers (it does not answer): the server"),
        (with_state(sides=["device"]) | {"split": DOWN}, "(it does not answer): `disco doctor` looks for the cause"),
    ],
)  # fmt: skip
def test_banners(state: dict[str, Any], says: str | None) -> None:
    found = banner.of_state(state)
    if says is None:
        assert found is None
    else:
        assert found is not None
        assert says in found.text


def test_banners_of_a_daemon_that_cannot_be_asked() -> None:
    gone = DaemonError("no daemon at …", NOT_RUNNING)
    assert banner.of_error(gone, "http://127.0.0.1:1", here=True).startable
    away = banner.of_error(gone, "http://far.example:1", here=False)
    assert not away.startable
    assert "disco up" in away.text
    key = banner.of_error(DaemonError("no", REFUSED_KEY), "http://127.0.0.1:1", here=True)
    assert not key.startable
    assert "api.key" in key.text
    assert "odd" in banner.of_error(DaemonError("odd"), "http://127.0.0.1:1", here=True).text


def test_what_was_drawn_while_an_answer_grew_is_not_kept() -> None:
    entry = Entry(1, "assistant", live=True)
    for i in range(5):
        entry.grow(f"Paragraph {i}.\n\n", "device")
        entry.draw(60, THEME)
    assert entry._blocks
    entry.live, entry.finish = False, "stop"
    whole = [line.plain for line in entry.draw(60, THEME)]
    assert entry._blocks == []
    entry.live = True
    entry.grow("More.\n\n", "device")
    assert [line.plain for line in entry.draw(60, THEME)][: len(whole) - 1] == whole[:-1], "it can go on"


def test_the_first_steps_do_not_say_of_two_machines_that_one_answers_alone() -> None:
    alone = banner.welcome({"endpoints": {"device": {}}})
    two = banner.welcome({"endpoints": {"device": {}}, "split": {"state": "up"}})
    assert alone is not None
    assert two is not None
    assert "alone" in alone.text
    assert "partner" in two.text
    assert "alone" not in two.text


def test_the_lines_of_a_poem_stay_lines() -> None:
    entry = Entry(1, "assistant", "Rain falls\non the roof\nand stays.", finish="stop")
    assert [line.plain for line in entry.draw(60, THEME)][:3] == ["Rain falls", "on the roof", "and stays."]
