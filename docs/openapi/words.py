"""What the fields of this daemon's own objects, and its headers, mean, for /openapi.json. Pure."""

from __future__ import annotations

# By the name of a type, its fields in words.
WORDS: dict[str, dict[str, str]] = {
    "DiscoOptions": {
        "route": "`device` or `server`: the request is served only there. `prefer-device` or `prefer-server`: it "
        "begins there alone, and the other side takes over only where that one fails, has no room or wants "
        "no requests now",
        "private": "the request is served on the device only; its KV cache is never on disk, its text never in the "
        "history or the log",
        "delivery": "how the tokens of a stream are released; without it as the settings say",
        "pace_tps": "the reader's pace in token/s",
        "sides": "each chunk of a stream names in `disco.side` the endpoint that made it, and has `disco.alone` where "
        "the lower layers of a model did without their partner",
        "max_cost_usd": "what servers may bill for this answer, $: docs/reference/api.md#what-an-answer-may-cost",
        "split_mode": "on two machines, docs/explain/split.md: who decides a token. `confident` and `alone` are "
        "answered by the device only",
        "theta": "for `confident`: how sure this machine must be of a token",
        "whole_schema": "the device may write all that a JSON schema allows, also members that it does not name and "
        "types that it does not speak of; without it what it leaves out is in `disco.narrowed` of the answer",
        "stop_repetition": "false: the answer may say the same again and again, as it is asked to; unless it is given, "
        "`delivery.stop_repetition` holds",
        "thinking_tokens": "a thought of the device is closed behind so many tokens, and the answer goes on; it counts "
        "before all other words for that",
        "redo_of": "the `request_id` of an earlier answer to the same question: the server begins, if it may, and the "
        "history notes that the earlier answer was redone; one of this, `regenerates` and `edits`",
        "regenerates": "the `request_id` of an earlier answer to the same question, for the history alone",
        "edits": "the `request_id` of an answer whose question was changed, for the history alone",
    },
    "DiscoOutcome": {
        "request_id": "the request's name in the history",
        "ttft_s": "the time to its first token, s",
        "winner": "the side that gave the first token",
        "reason": "why it was that side: `private` (the request must not leave), `route` (the client asked for it, by "
        "the model's name or `disco.route`), `rule` (a rule of the user's asked for it), `only` (no other "
        "side can serve it, or a cap closes it), `failure` (the other side began, and failed), `race` (both "
        "began, it was first), `plan` (it was to begin, and the other had not begun yet), `grade` (its model "
        "is the better one), `stand-in` (the better side was silent, or lets it begin)",
        "plan": "start delays, s; null = not planned",
        "prompt_tokens": "counted by the device's tokenizer, or estimated from the characters while it cannot be asked",
        "endpoints": "for each one that started: model, start, time to first token, whether that time is censored, "
        "tokens processed, error; `hedge` is `won`, `lost` or `failed` for a second request to the same server "
        "(`server#2`), else null",
        "tokens": "tokens delivered from each side",
        "handoffs": "how often the answer moved",
        "moves": "each move: tokens and characters before it, from where to where, why, how long it took; `dropped` "
        "says why one did not happen, `paused` that its source rested, `asked_again` that it had to come back",
        "cost_usd": "the bill and the energy's worth, $",
        "server_usd": "the bill alone, $",
        "energy_j": "the energy, J",
        "delivery": "how tokens were released",
        "qoe": "Andes' quality of experience, 0 to 1",
        "reading": "largest gap, stalled tokens, times between tokens, end of reading",
        "ignored": "the fields of the request that nobody heeded",
        "stand_in": "the `side` whose model is far worse than the other one's, and `why`: docs/reference/grades.md",
        "narrowed": "of an answer of the device by a JSON schema: what this allows and was not said. `...type`: values "
        "of types that it does not speak of; `...additionalProperties`: members that it does not name",
        "split": "of a device over two machines: how the answer was made, docs/howto/split.md#look-at-it",
        "rule": "the rule of the user's that decided who may answer, by its name: docs/howto/rules.md",
        "stopped": "`repetition` of an answer that was ended since it said the same again and again; it has the "
        "reason to finish of one that reached its limit",
        "server": "of several servers the one that gave the first token, by its name in the settings; each of "
        "`endpoints` names its own",
    },
}
HEADERS = {
    "X-Disco-Request-Id": "the request's name in the history",
    "X-Disco-Route": "the side of the first token; none where a stream began before it, docs/reference/api.md#streams",
    "X-Disco-Model": "that side's model, percent-encoded",
    "X-Disco-Reason": "why it was that side: `reason` of the `disco` object",
    "X-Disco-Quality": "of a device over two machines: `whole`, `confident` or `alone`; at the head of a stream what "
    "is planned, the last chunk says what it was",
    "X-Disco-Ignored": "the fields of the request that nobody heeded, percent-encoded; `disco.ignored` in the last "
    "chunk has all of them",
    "X-Disco-Cost-Usd": "of an answer in one piece: `cost_usd`",
    "X-Disco-Ttft-Ms": "of an answer in one piece: the time to its first token, ms",
}
