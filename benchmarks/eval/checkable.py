"""Questions whose answers a program can check, of many kinds and lengths, drawn with a fixed seed. Pure."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

SEED = 20261129
CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "Poland": "Warsaw",
    "Austria": "Vienna", "Greece": "Athens", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki",
    "Hungary": "Budapest", "Russia": "Moscow", "China": "Beijing", "Japan": "Tokyo", "India": "New Delhi",
    "Egypt": "Cairo", "Kenya": "Nairobi", "Canada": "Ottawa", "Australia": "Canberra", "Brazil": "Brasilia",
    "Argentina": "Buenos Aires", "Chile": "Santiago", "Peru": "Lima", "Cuba": "Havana", "Turkey": "Ankara",
    "Iran": "Tehran", "Iraq": "Baghdad", "Mongolia": "Ulaanbaatar", "Kazakhstan": "Astana", "Laos": "Vientiane",
    "Bhutan": "Thimphu", "Senegal": "Dakar", "Malawi": "Lilongwe", "Suriname": "Paramaribo", "Tonga": "Nuku",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "fast": "slow", "light": "dark", "happy": "sad", "old": "young",
    "open": "closed", "early": "late", "rich": "poor", "strong": "weak", "full": "empty", "hard": "soft", "wet": "dry",
    "loud": "quiet", "near": "far", "first": "last", "buy": "sell", "win": "lose", "ancient": "modern",
}  # fmt: skip
NAMES = ("Anna", "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Henry", "Irene", "Jonas", "Karin", "Louis")
CITIES = ("Bern", "Lyon", "Porto", "Graz", "Turin", "Leeds", "Ghent", "Cork", "Oulu", "Brno", "Malmo", "Basel")
JOBS = ("baker", "nurse", "pilot", "teacher", "painter", "farmer", "lawyer", "singer", "tailor", "gardener")
WORDS = (
    "river", "stone", "garden", "window", "yellow", "market", "silver", "winter", "summer", "bridge", "candle",
    "forest",
    "letter", "mirror", "orange", "pencil", "rocket", "school", "ticket", "violin",
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Task:
    """A question, and the text that a right answer has."""

    kind: str
    prompt: str
    right: str

    def is_right(self, answer: str) -> bool:
        """Whether an answer has the right text as words of its own, whatever the case, spaces and commas in numbers."""
        if self.kind == "json":
            return "".join(self.right.split()).casefold() in "".join(answer.split()).casefold()
        said = re.sub(r"(?<=\d),(?=\d{3})", "", " ".join(answer.casefold().split()))
        return re.search(rf"(?<!\w){re.escape(self.right.casefold())}(?!\w)", said) is not None


def _sum(rng: random.Random) -> tuple[str, str]:
    a, b = (rng.randrange(10 ** (n - 1), 10**n) for n in (rng.randint(1, 4), rng.randint(1, 4)))
    return f"What is {a} + {b}?", str(a + b)


def _product(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(2, 12), rng.randint(2, 10 ** rng.randint(1, 3))
    return f"What is {a} times {b}?", str(a * b)


def _copied(rng: random.Random) -> tuple[str, str]:
    text = " ".join(rng.choices(WORDS, k=rng.randint(3, 25)))
    return f"Repeat these words exactly, and say nothing else: {text}", text


def _spelt(rng: random.Random) -> tuple[str, str]:
    word = rng.choice(WORDS)
    return f'Spell the word "{word}" with a hyphen between each two letters.', "-".join(word)


def _extracted(rng: random.Random) -> tuple[str, str]:
    n = rng.randint(2, 12)
    people = list(zip(rng.sample(NAMES, n), rng.sample(CITIES, n), rng.choices(JOBS, k=n), strict=True))
    name, city, _ = rng.choice(people)
    text = " ".join(f"{who} is a {job} and lives in {where}." for who, where, job in people)
    return f"{text}\n\nIn which city does {name} live?", city


def _sorted(rng: random.Random) -> tuple[str, str]:
    numbers = rng.sample(range(1, 100), rng.randint(3, 8))
    said = ", ".join(map(str, numbers))
    return f"Sort these numbers, smallest first: {said}", ", ".join(map(str, sorted(numbers)))


def _next_day(rng: random.Random) -> tuple[str, str]:
    names, what = rng.choice([(DAYS, "day"), (MONTHS, "month")])
    at, after = rng.randrange(len(names)), rng.choice([1, 1, 2, 3])
    return f"Which {what} comes {after} {what}s after {names[at]}?", names[(at + after) % len(names)]


def _capital(rng: random.Random) -> tuple[str, str]:
    country = rng.choice(list(CAPITALS))
    return f"What is the capital of {country}?", CAPITALS[country]


def _opposite(rng: random.Random) -> tuple[str, str]:
    word = rng.choice(list(OPPOSITES))
    return f'What is the opposite of "{word}"? Answer with one word.', OPPOSITES[word]


def _json(rng: random.Random) -> tuple[str, str]:
    name, city, age = rng.choice(NAMES), rng.choice(CITIES), rng.randint(18, 90)
    wanted = f'{{"name": "{name}", "age": {age}, "city": "{city}"}}'
    return f"Write a JSON object with the name, age and city of {name}, who is {age} and lives in {city}.", wanted


def _counted(rng: random.Random) -> tuple[str, str]:
    word = rng.choice(WORDS)
    return f'How many letters has the word "{word}"?', str(len(word))


def _printed(rng: random.Random) -> tuple[str, str]:
    a, b, c = rng.randint(2, 20), rng.randint(2, 20), rng.randint(1, 9)
    code = f"def f(x):\n    return x * {b} + {c}\n\nprint(f({a}))"
    return f"What does this program print?\n\n```python\n{code}\n```", str(a * b + c)


MAKERS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "sum": _sum, "product": _product, "copy": _copied, "spell": _spelt, "extract": _extracted, "sort": _sorted,
    "calendar": _next_day, "capital": _capital, "opposite": _opposite, "json": _json, "letters": _counted,
    "program": _printed,
}  # fmt: skip


def tasks(n_each: int) -> list[Task]:
    """Return `n_each` questions of each kind, no two alike, in an order that mixes them."""
    rng, found = random.Random(SEED), dict[str, Task]()
    for kind, make in MAKERS.items():
        made = 0
        for _ in range(40 * n_each):
            prompt, right = make(rng)
            if prompt not in found and made < n_each:
                found[prompt] = Task(kind, prompt, right)
                made += 1
    mixed = list(found.values())
    rng.shuffle(mixed)
    return mixed
