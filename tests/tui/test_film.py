"""The film of the README: what is seen at each moment is what was filmed, and the kept one can be shown anywhere."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.film_tui import FILE, LAST_S, QUESTION, SIZE, Frame, Rows, film

SVG = "{http://www.w3.org/2000/svg}"
STEP = re.compile(r"([\d.]+)% \{ visibility: (\w+) \}")


def seen_at(made: str, share: float) -> list[str]:
    """What a film shows when this share of its time is over: the words of each of its places."""
    steps: dict[str, list[tuple[float, str]]] = {
        name: [(float(at) / 100, value) for at, value in STEP.findall(rule)]
        for name, rule in re.findall(r"@keyframes (\w+) \{ (.*) \}", made)
    }

    def is_shown(group: ElementTree.Element) -> bool:
        names = group.get("class", "").split()
        if "s" not in names:
            return True
        past = [value for at, value in steps[names[1]] if at <= share + 1e-9]
        return past[-1] == "visible"

    def words(element: ElementTree.Element) -> str:
        own = (element.text or "") if element.tag == f"{SVG}text" else ""
        return own + "".join(words(child) for child in element if is_shown(child))

    return [words(place) for place in ElementTree.fromstring(made) if place.tag == f"{SVG}g"]


def drawn(words: str) -> str:
    return f'<rect fill="#000000" x="0" width="9" height="24.65"/><text class="c0" x="0" y="1">{words}</text>'


@given(st.lists(st.tuples(st.integers(1, 9), st.lists(st.sampled_from("abc"), min_size=2, max_size=2)), min_size=1))
def test_a_film_shows_at_each_moment_what_was_filmed(said: list[tuple[int, list[str]]]) -> None:
    frames, at_s = [], 0.0
    for lasts_s, rows in said:
        frames.append(Frame(at_s, tuple(drawn(row) for row in rows), rows[0].upper()))
        at_s += lasts_s
    made = film(frames, {"fill: #ffffff": "c0"})
    total_s = frames[-1].at_s + LAST_S
    ends = [frame.at_s for frame in frames[1:]] + [total_s]
    for frame, (_, rows), end_s in zip(frames, said, ends, strict=True):
        for at_s in (frame.at_s + 0.1, end_s - 0.1):  # percents are rounded
            assert [words for words in seen_at(made, at_s / total_s) if words] == [*rows, rows[0].upper()]


def test_rows_join_what_has_one_colour_and_leave_out_what_is_blank() -> None:
    rects = "".join(f'<rect fill="#11{n}" x="{n * 10}" y="1.5" width="10" height="24"/>' for n in (1, 1, 2))
    rects = rects.replace('x="10"', 'x="0"', 1)
    text = '<text class="terminal-7-r1" x="0" y="{}" textLength="9" clip-path="url(#a)">{}</text>'
    picture = f".terminal-7-r1 {{ fill: #eee }}{rects}{text.format(44.4, 'hi')}{text.format(20, '&#160;')}"
    first, second, *others = Rows().of(picture)
    assert re.findall(r'fill="(#\w+)" x="([\d.]+)" width="([\d.]+)"', first) == [
        ("#111", "0", "20"),
        ("#112", "20", "10"),
    ]
    assert "<text" not in first
    assert re.fullmatch(r'<text class="c0" x="0" y="[\d.]+" textLength="9">hi</text>', second)
    assert others == [""] * (SIZE[1] - 2)


def test_the_kept_film_is_small_and_needs_nothing_else() -> None:
    made = FILE.read_text("utf-8")
    assert len(made.encode()) < 300_000
    assert not re.search(r"<script|<image|href|url\(|@import", made)
    end = "".join(seen_at(made, 1.0)).replace("\N{NO-BREAK SPACE}", " ")
    assert QUESTION in end
    assert "1 handoff" in end
    assert "1 handoff" not in "".join(seen_at(made, 0.0)).replace("\N{NO-BREAK SPACE}", " ")
