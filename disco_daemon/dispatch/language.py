"""The language of a text, by its script and commonest words, and whether it has program code or numbers. Pure.

Small and honest: where a text has too few common words, or as many of two languages, nothing is said. Of words only
those count that a question to a model has; names, terms and code have no language.
"""

# ruff: noqa: RUF001 - letters of other alphabets are what this file is about

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from itertools import islice

MOST_CHARS = 4000  # of a text that are looked at: a language shows in a few sentences, and a prompt may be a book
_OWN_LETTERS = {"uk": 0.02, "fa": 0.02, "ja": 0.2, "ko": 0.2, "zh": 0.2}  # share of letters; half of them of others
MOST_CODE_CHARS = 20_000  # in which code is looked for: a file of some 500 lines
LEAST_NUMBERS = 3  # a year or a version alone makes no question of numbers
_NUMBER = re.compile(r"\d+")
MOST_LINE_CHARS = 200  # of a line that are looked at: a line of a program is shorter, and no pattern is slow on so few

# Of the languages that share a script, the words that show them; each list has the commonest words of running text, and
# some that questions to a model begin with. A word that two of them share counts for both.
_WORDS: Mapping[str, str] = {
    "en": "the a an of to and in is are was for that this it with on as be by from or not you your i my me we "
    "what how why which who when where do does can could would should will have has there their they if "
    "about into than write give explain generate make list create tell find following between please all "
    "any one its at but he she",
    "de": "der die das und ist nicht ein eine einen einem einer zu den dem des mit von für auf im ich du er sie "
    "es wir was wie warum welche wer wann wo kann können soll wird werden sind haben hat mir mich dir auch "
    "aus bei als schreibe schreib erkläre nenne gib erstelle bitte zwischen über oder nur noch dass wenn "
    "zum zur war",
    "fr": "le la les un une des du de et est en que qui dans pour pas sur au aux avec ce cette ces il elle je tu "
    "nous vous on ne se sont être avoir quel quelle quels comment pourquoi quand où écris explique donne "
    "fais moi mon ma mes plus par ou mais entre comme peut dois crée liste leur son sa ses",
    "es": "el la los las un una de del y es en que por para con no se su sus lo al como más pero qué cuál cuáles "
    "cómo cuándo dónde quién son está están ser hay este esta estos mi me te yo tu escribe explica dame haz "
    "genera crea entre sobre o muy si puede puedo",
    "it": "il lo la i gli le un uno una di del della dei delle e è in che per con non si su sono come più ma cosa "
    "quale quali perché quando dove chi questo questa questi mi mio mia io tu scrivi spiega dammi genera "
    "crea tra fra nel nella al alla dal o anche essere ha ho può",
    "pt": "o a os as um uma de do da dos das e é em que por para com não se no na nos nas ao mais mas como qual "
    "quais quando onde quem são está este esta isso meu minha eu você escreva explique dê faça gere crie "
    "entre sobre ou muito pelo pela também ser tem foi",
    "nl": "de het een en van is in op te dat die voor met niet zijn aan er om als ook maar wat hoe waarom welke "
    "wie wanneer waar kan kunnen moet wordt worden ik je jij hij ze we mijn mij schrijf geef maak leg uit "
    "tussen over of nog naar bij deze dit heeft hebben",
    "sv": "och att det som en ett är i på av för med den till inte om de har jag du han hon vi var vad hur varför "
    "vilken vilka när kan ska skulle skriv förklara ge gör skapa mellan eller men från mig min mitt mina "
    "detta denna också",
    "pl": "i w na z do nie się to że jest o jak co ale po za od dla czy są być ten ta te jego przez przed "
    "dlaczego kiedy gdzie kto który która które napisz wyjaśnij podaj stwórz między lub mi mnie mój moja ja "
    "ty oraz tym tego",
    "tr": "ve bir bu da de için ile ne nasıl neden hangi kim nerede mi mı mu mü çok daha gibi olarak olan var yok "
    "ben sen o biz bana beni benim yaz açıkla ver oluştur arasında veya ama değil her şey en kadar sonra "
    "önce bunu",
    "vi": "là của và có không được cho trong một các những với này đó tôi bạn như thế nào gì tại sao khi ở đâu ai "
    "hãy viết giải thích về để người từ hay hoặc nhưng cũng rất",
    "id": "dan yang di ke dari untuk dengan ini itu adalah tidak akan pada dalam atau saya kamu anda apa "
    "bagaimana mengapa kapan mana siapa tulis jelaskan berikan buat antara tentang bisa dapat ada juga "
    "sebuah seorang oleh karena",
}
_BY_WORD: Mapping[str, tuple[str, ...]] = {
    word: tuple(code for code, words in _WORDS.items() if word in words.split())
    for word in {word for words in _WORDS.values() for word in words.split()}
}
# What shows a language by its script alone. Japanese stands before Chinese, whose characters it uses, too.
_SCRIPTS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("ja", re.compile("[\u3041-\u30ff]")),
    ("ko", re.compile("[\uac00-\ud7a3]")),
    ("zh", re.compile("[\u4e00-\u9fff\u3400-\u4dbf]")),
    ("uk", re.compile("[іїєґ]", re.IGNORECASE)),
    ("ru", re.compile("[а-яё]", re.IGNORECASE)),
    ("fa", re.compile("[پچژگ]")),
    ("ar", re.compile("[\u0620-\u064a]")),
    ("he", re.compile("[\u05d0-\u05ea]")),
    ("el", re.compile("[\u03b1-\u03c9ά-ώ]", re.IGNORECASE)),
    ("hi", re.compile("[\u0904-\u0939]")),
    ("th", re.compile("[\u0e01-\u0e2e]")),
)
LANGUAGES = tuple(sorted({*_WORDS, *(code for code, _ in _SCRIPTS)}))
_LETTER = re.compile(r"[^\W\d_]")
_WORD = re.compile(r"[^\W\d_]+")
_FENCED = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)

# Lines that only programs have, without the blanks around them. Two are code, or one that a fence announces. Strangers
# write these texts, and the event loop reads them: no two repeats beside each other take the same characters.
_CODE_LINE = re.compile(
    r"""(?:
        (?:async\s+)?def\s+\w+\s*\( | class\s+\w.*[:{]$ | from\s+[\w.]+\s+import\s
      | import\s+[\w.{}*,][\w.{}*,\s]*(?:;|$|(?<=\s)from\s)
      | (?:public|private|protected|static)\s+[\w<>\[\],][\w<>\[\],\s]*\(
      | (?:export\s+)?(?:async\s+)?function\b\s*(?:\w+\s*)?\(
      | (?:const|let|var)\s+\w+\s*(?::\s*\w+\s*)?= | \#include\s*[<"] | using\s+[\w.]+; | package\s+\w+;?$
      | fn\s+\w+\s*(?:<.*>)?\( | func\s+(?:\([^)]*\)\s*)?\w+\( | (?:if|for|while|switch)\s*\(.*\)\s*\{
      | (?:elif|if|for|while|with|try|except)\b[^.?!]*:$ | return\b[^.?!]*;?$ | \}.*$
      | SELECT\s.+\sFROM\s | (?:INSERT\s+INTO|CREATE\s+TABLE|UPDATE)\s+\w+ | \w[\w.\[\]]*\s*[-+*/]?=[^=].*[;)\]}]$
      | [\w.]+\(.*\);$ | </?\w+(?:\s[\w-]+=["'][^"']*["'])*\s*/?>$ | Traceback\s\(most\srecent
      | at\s[\w$]+\.[\w.$]+\(
      | (?:diff\s--git|@@\s-\d|\+\+\+\s|---\s[ab]/) | [$]\s\w+
    )""",
    re.VERBOSE,
)
LEAST_CODE_LINES = 2  # one such line is a figure of speech, or a formula


def language_of(text: str) -> str:
    """Return the code of a text's language, such as `de`; "" where it is not plain."""
    words_only = _FENCED.sub(" ", text[:MOST_CHARS])
    if script := _by_script(words_only):
        return script
    found: Counter[str] = Counter()
    for word in _WORD.findall(words_only.casefold()):
        for code in _BY_WORD.get(word, ()):
            found[code] += 1
    ranked = found.most_common(2)
    if not ranked or (len(ranked) > 1 and ranked[0][1] == ranked[1][1]):
        return ""
    return ranked[0][0]


def _by_script(text: str) -> str:
    """Return the language of a script that most letters are of, or a part that no other language would have."""
    if text.isascii():
        return ""
    n_letters = len(_LETTER.findall(text))
    for code, pattern in _SCRIPTS:
        found = len(pattern.findall(text))
        if found and found >= _OWN_LETTERS.get(code, 0.5) * n_letters:
            return code
    return ""


def has_numbers(text: str) -> bool:
    """Whether several numbers stand in a text, as where something is to be computed."""
    found = _NUMBER.finditer(text[-MOST_CODE_CHARS:])
    return sum(1 for _ in islice(found, LEAST_NUMBERS)) == LEAST_NUMBERS


def has_code(text: str) -> bool:
    """Whether there is program code in a text: a fenced block, or lines that only programs have."""
    text = text[-MOST_CODE_CHARS:]
    if "```" in text:
        return True
    n = 0
    for line in text.splitlines():
        if _CODE_LINE.match(line.strip()[:MOST_LINE_CHARS]):
            n += 1
            if n == LEAST_CODE_LINES:
                return True
    return False
