"""Processor time that the terminal UI takes for each token of a growing answer, early and late in it.

`python -m benchmarks.tui.tui_stream [--tokens 5000] [--tps 100]`; the last line is JSON, times in ms of this process.
Tokens are put into the transcript of a window of 120 by 40, and drawn as often as they would be at that speed. The
reader stays at the top of the answer, as they do by default, or follows its end; pace fades what they have not reached.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time

from disco_daemon.client.stream import Link
from disco_tui.app import DiscoApp
from disco_tui.data.store import Store
from disco_tui.draw.entry import Entry
from disco_tui.widgets.transcript import FRAME_S, Transcript

SIZE = (120, 40)
NOBODY = "http://127.0.0.1:9"
KINDS = {
    "prose": ("A **list** keeps order, and a `set` keeps nothing twice; this goes on for some words more.\n\n", ""),
    "code": ("    seen.add(word)  # line by line\n", "```python\n"),
    "list": ("- one more item of a list\n", ""),
}


async def measure(kind: str, tokens: int, per_frame: int, *, follow: bool, pace: bool) -> dict[str, float]:
    """Return ms of processor time a token, of the first and of the last fifth of an answer."""
    words, first = KINDS[kind]
    pieces = [f"{word} " for word in words.removesuffix("\n").split(" ")]
    pieces[-1] = pieces[-1].rstrip(" ") + words[len(words.rstrip("\n")) :]
    with Store(None) as store:
        app = DiscoApp(Link(NOBODY), store)
        async with app.run_test(size=SIZE) as pilot:
            await pilot.pause()
            transcript = app.chat.query_one(Transcript)
            transcript.set_pace(4.8 if pace else 0.0)
            entry = Entry(1, "assistant", first, live=True)
            transcript.add(entry)
            if follow:
                transcript.action_end(1)
            spent: list[float] = []
            for i in range(tokens):
                entry.grow(pieces[i % len(pieces)], "device")
                if i % per_frame == 0:
                    began = time.process_time()
                    transcript.touch(entry)
                    transcript._frame()
                    await pilot.pause()
                    spent.append(time.process_time() - began)
    fifth = max(1, len(spent) // 5)
    early, late = (1e3 * sum(part) / fifth / per_frame for part in (spent[:fifth], spent[-fifth:]))
    return {"early_ms": round(early, 3), "late_ms": round(late, 3), "worst_frame_ms": round(1e3 * max(spent), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=5000)
    parser.add_argument("--tps", type=float, default=100.0)
    args = parser.parse_args()
    per_frame = max(1, round(args.tps * FRAME_S))
    found = {}
    for kind in KINDS:
        for how, options in {"top": (False, False), "end": (True, False), "pace": (False, True)}.items():
            follow, pace = options
            found[f"{kind}, {how}"] = asyncio.run(measure(kind, args.tokens, per_frame, follow=follow, pace=pace))
            print(f"{kind}, {how}: {found[f'{kind}, {how}']}", flush=True)
    print(json.dumps(vars(args) | found))


if __name__ == "__main__":
    main()
