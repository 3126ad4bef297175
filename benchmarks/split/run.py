"""Asking the split benchmark's deployments in turn, and what is made of their answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from disco_daemon.bench.child import BenchError
from disco_daemon.bench.command import progress
from disco_daemon.exits.quality import length_until_repeat
from disco_daemon.models.gguf import Header

from .daemons import NotOfferedError, TwoMachines
from .tables import Deployed, SplitAnswer, summarize
from .text import SplitPrompt, flop_share, naive_bytes, token_agreement

EXACT, CONFIDENT, ALONE, DRAFT = "exact", "confident", "alone", "draft"
THETAS = (0.8, 0.9, 1.0)


@dataclass(frozen=True, slots=True)
class Way:
    """A way to answer at the edge: a mode, and from which certainty on its exit decides in `confident`.

    `draft` is `exact` at an edge that has a small model in place of layers.
    """

    name: str
    theta: float | None = None

    @property
    def mode(self) -> str:
        return EXACT if self.name == DRAFT else self.name

    @property
    def label(self) -> str:
        return self.name if self.theta is None else f"{self.name} {self.theta:g}"

    @property
    def machine(self) -> str:
        """The name of a machine that answers this way only, so that no prompt is cached from another way."""
        return self.label.replace(" ", "-").replace(".", "-")


LOSSY = (*(Way(CONFIDENT, theta) for theta in THETAS), Way(ALONE))


@dataclass(slots=True)
class AskedPrompt:
    """A prompt of `n_prompt` tokens: the whole model's answer of `limit` tokens at most, and those of other ways."""

    prompt: SplitPrompt
    limit: int
    n_prompt: int
    cloud: SplitAnswer
    pieces: list[str]
    answers: dict[str, SplitAnswer] = field(default_factory=dict)


async def ask_cloud(machines: TwoMachines, prompt: SplitPrompt, max_tokens: int) -> AskedPrompt:
    """Ask the whole model; others are asked up to where its answer goes round in a circle, and so far it counts.

    Raises BenchError for an answer without text.
    """
    heard, prefixes = await machines.cloud(prompt.text, max_tokens)
    if not prefixes:
        msg = f"the whole model says nothing to {prompt.text[:50]!r}"
        raise BenchError(msg)
    n, limit, cloud = length_until_repeat(heard.pieces), max_tokens, prefixes[-1]
    if n < len(heard.pieces):  # what it costs is known; its prompt is cached now, so the second answer is for the text
        limit, cloud = max(1, n), prefixes[max(1, n) - 1]
        heard = await machines.whole(prompt.text, limit)
        cloud = replace(cloud, text=heard.text, n_tokens=int(heard.usage["completion_tokens"]))
    return AskedPrompt(prompt, limit, int(heard.usage["prompt_tokens"]), cloud, heard.pieces)


async def ask_all(machines: TwoMachines, asked: Sequence[AskedPrompt], ways: Sequence[Way], where: str) -> None:
    """Ask the edge each prompt in each way. Raises BenchError."""
    for number, one in enumerate(asked):
        progress(f"{where}, {number + 1} of {len(asked)}: {await ask_ways(machines, one, ways, where)}")


async def ask_ways(machines: TwoMachines, one: AskedPrompt, ways: Sequence[Way], where: str) -> str:
    """Ask the edge a prompt in each way; say what came.

    Raises BenchError, also if a machine computes nothing for an answer that both are to give.
    """
    said = [f"{one.cloud.took_s:.1f} s whole"]
    for way in ways:
        try:
            answer = await machines.split(one.prompt.text, one.limit, way.mode, way.theta)
        except NotOfferedError as e:
            if way.mode == EXACT:
                raise
            said.append(f"{way.label} is not offered: {e}")
            continue
        if way.mode == EXACT and not (answer.partner_rows and (answer.edge_rows or way.name == DRAFT)):
            msg = f"{answer.edge_rows} rows at the edge and {answer.partner_rows} at the partner: that is no split"
            raise BenchError(msg)
        one.answers[f"{where} {way.label}"] = answer
        same = "the same" if answer.text == one.cloud.text else "another answer"
        said.append(f"{way.label} {answer.took_s:.1f} s, rows {answer.edge_rows or 0} + {answer.partner_rows}, {same}")
    return "; ".join(said)


def by_data(asked: Sequence[AskedPrompt]) -> dict[str, list[AskedPrompt]]:
    """Return the prompts by their kind of data, in order."""
    kinds = dict.fromkeys(one.prompt.data for one in asked)
    return {kind: [one for one in asked if one.prompt.data == kind] for kind in kinds}


def way_rows(asked: Sequence[AskedPrompt], way: Way, where: str, cut: int, codec: str) -> list[Deployed]:
    """Return a row for each kind of data of which prompts were asked this way."""
    rows = []
    for data, ones in by_data(asked).items():
        heard = [(one.answers[key], one.cloud.text) for one in ones if (key := f"{where} {way.label}") in one.answers]
        if heard:
            answers, whole = zip(*heard, strict=True)
            rows.append(summarize(data, way.name, answers, whole, theta=way.theta, cut=cut, codec=codec))
    return rows


def cloud_rows(asked: Sequence[AskedPrompt]) -> list[Deployed]:
    """Return the whole model's row for each kind of data."""
    return [
        summarize(data, "cloud", [one.cloud for one in ones], [one.cloud.text for one in ones])
        for data, ones in by_data(asked).items()
    ]


def naive_rows(asked: Sequence[AskedPrompt], n_embd: int, cut: int) -> list[Deployed]:
    """Return the naive split's row for each kind of data: its bytes for all prompts are counted, not sent.

    Where prompts were really asked, times and agreement are theirs, as a whole model's answers would take.
    """
    rows = []
    for data, ones in by_data(asked).items():
        whole = [one.cloud.text for one in ones]
        row = summarize(data, "naive", [one.cloud for one in ones], whole, cut=cut, codec="f32")
        sent = sum(naive_bytes(one.n_prompt, one.cloud.n_tokens, n_embd) for one in ones)
        row = replace(row, mb_up=sent / 1e6, mb_down=4 * row.tokens / 1e6)
        row = replace(row, total_s=None, edge_s=None, partner_s=None, comm_s=None)
        heard = [(one, one.answers["naive"]) for one in ones if "naive" in one.answers]
        if heard:
            run = summarize(data, "naive", [a for _, a in heard], [one.cloud.text for one, _ in heard])
            tokens = sum(naive_bytes(one.n_prompt, one.cloud.n_tokens, n_embd) for one, _ in heard)
            scale = sent / tokens  # its time goes with the rows that it sends
            total_s, edge_s, partner_s, comm_s = (
                None if value is None else scale * value
                for value in (run.total_s, run.edge_s, run.partner_s, run.comm_s)
            )
            row = replace(row, rouge_l=run.rouge_l, equal=run.equal, total_s=total_s, edge_s=edge_s)
            row = replace(row, partner_s=partner_s, comm_s=comm_s)
        rows.append(row)
    return rows


def codec_rows(asked: Sequence[AskedPrompt], where: str, cut: int, codec: str, n_embd: int) -> list[dict[str, Any]]:
    """Return what a codec gives, for each kind of data: bytes up in shares of naive's, and agreement a token.

    The agreement stands beside what it rests on, and its interval of 95 %.
    """
    way, rows = Way(EXACT), []
    for row in way_rows(asked, way, where, cut, codec):
        ones = [one for one in asked if one.prompt.data == row.data and f"{where} {way.label}" in one.answers]
        naive = sum(naive_bytes(one.n_prompt, one.cloud.n_tokens, n_embd) for one in ones)
        agreement = token_agreement([(one.pieces, one.answers[f"{where} {way.label}"].text) for one in ones])
        found = {
            "naive_times": naive / (1e6 * row.mb_up), "agreement": agreement.share,
            "agreement_95": list(agreement.interval), "compared": agreement.n_tokens,
            "differences": agreement.n_different,
        }  # fmt: skip
        rows.append(asdict(row) | found)
    return rows


def share_rows(asked: Sequence[AskedPrompt], where: str, cut: int, header: Header) -> list[dict[str, Any]]:
    """Return the partner's share of the whole model's FLOP, for each kind of data of which answers are there."""
    n_layers, key = header.number(f"{header.architecture}.block_count") or 0, f"{where} {EXACT}"
    found = []
    for data, ones in by_data(asked).items():
        answers = [(one, one.answers[key]) for one in ones if key in one.answers]
        if answers:
            rows = sum(answer.partner_rows or 0 for _, answer in answers)
            logits = sum(answer.judged_rows or 0 for _, answer in answers)
            tokens = sum(one.cloud.n_tokens for one, _ in answers)
            whole = sum(one.n_prompt - 1 for one, _ in answers) + tokens, tokens
            found.append(
                {"data": data, "cut": cut, "flop_share": flop_share(header, cut, n_layers, rows, logits, whole)}
            )
    return found
