"""The form of the documents: links, lengths, scripts, the changelog, and the hosted checks."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from docs import generate, site
from tests.fixtures.documents import PAGES, README, ROOT, TOP

# Those beside code and recorded answers too: files move, and nobody reads such a page then.
EVERY_PAGE = PAGES | {
    path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
    for folder in ("disco_daemon", "tui", "profiles", "benchmarks", "native", "tests", ".ci")
    for path in sorted((ROOT / folder).rglob("*.md"))
    if "node_modules" not in path.parts
}


def test_a_block_that_is_missing_or_there_twice_is_an_error() -> None:
    block = "<!-- generated: x -->\nold\n<!-- end: x -->\n"
    assert generate.replace_block(f"a\n{block}b\n", "x", "new") == f"a\n{block.replace('old', 'new')}b\n"
    for text in ("", block + block, block.replace("end", "and")):
        with pytest.raises(ValueError, match="expected one"):
            generate.replace_block(text, "x", "new")


def test_readme_fits_on_a_few_screens() -> None:
    assert len(README.splitlines()) <= 130


def test_the_page_on_the_design_is_short() -> None:
    assert len(PAGES["explain/design.md"].splitlines()) < 200


def test_hosted_checks_run_what_everybody_runs_on_both_systems() -> None:
    workflow = (ROOT / ".github/workflows/ci.yml").read_text("utf-8")
    assert re.findall(r"^      - run: (.+)$", workflow, re.MULTILINE) == ['PYTHON="$(command -v python)" .ci/run']
    assert "os: [ubuntu-latest, macos-latest]" in workflow
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    newest = re.search(r"for p in python(3\.\d+) ", (ROOT / "Makefile").read_text("utf-8"))
    assert newest
    oldest = project["requires-python"].removeprefix(">=")
    assert f'python: ["{oldest}", "{newest[1]}"]' in workflow
    for action in re.findall(r"uses: (\S+)", workflow):
        assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", action), action


def test_the_changelog_keeps_its_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    kinds = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]  # as Keep a Changelog orders them
    assert text.startswith("# Changelog\n")
    for release in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        assert re.match(r"\[(Unreleased\]|\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d)\n", release), release[:40]
        heads = re.findall(r"^### (.+)$", release, re.MULTILINE)
        assert heads == [kind for kind in kinds if kind in heads]


@pytest.mark.parametrize("name", EVERY_PAGE)
def test_every_script_that_a_document_runs_is_there(name: str) -> None:
    text = EVERY_PAGE[name]
    for module in re.findall(r"python(?:3)? -m (\w+(?:\.\w+)*)", text):
        path = ROOT.joinpath(*module.split("."))
        ours = module.split(".")[0] in ("disco_daemon", "benchmarks")
        assert not ours or path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    for file in re.findall(r"python(?:3)? ([\w/]+\.py)", text):
        assert (ROOT / file).exists(), file


@pytest.mark.parametrize("name", EVERY_PAGE)
def test_every_file_and_folder_that_a_document_names_is_there(name: str) -> None:
    for path in re.findall(
        r"(?<![\w/.-])((?:disco_daemon|tui|tests|benchmarks|native|\.ci)/[\w./-]*\w)", EVERY_PAGE[name]
    ):
        there = (ROOT / path).exists() or (ROOT / f"{path}.py").exists() or "NAME" in path
        assert there, f"{name} names {path}, which is no more"


def test_no_document_names_a_place_of_one_machine() -> None:
    for text in (*PAGES.values(), (ROOT / "CHANGELOG.md").read_text("utf-8")):
        assert not re.search(r"/(home|root|work|tmp|Users|opt)/", text)


def anchors(path: Path) -> set[str]:
    """The names by which links lead to the headings of a page."""
    heads = re.findall(r"^#+ (.+)$", path.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def test_every_link_between_documents_leads_somewhere() -> None:
    for name, text in PAGES.items():
        page = ROOT / name if name in TOP else ROOT / "docs" / name
        for target, anchor in re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)", text):
            path = page.parent / target if target else page
            assert path.exists(), f"{name}: {target}"
            assert not anchor or anchor in anchors(path), f"{name}: {target}#{anchor}"


@pytest.mark.parametrize("name", PAGES)
def test_no_picture_has_a_semicolon(name: str) -> None:
    """It ends a statement of Mermaid's, and what follows it is an error where the page is drawn."""
    assert ";" not in "".join(re.findall(r"```mermaid\n(.*?)```", PAGES[name], re.DOTALL))


def test_every_page_that_the_code_cites_is_there() -> None:
    cited = set()
    for folder in ("disco_daemon", "tui", "profiles", "benchmarks", ".ci", "native"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text("utf-8").replace("docs/gguf.md", "")  # llama.cpp's own
            cited |= set(re.findall(r"(?<![\w/])docs/([\w/-]+\.md)(?:#([\w-]+))?", text))
            assert "DESIGN §" not in text, path
    assert {"explain/design.md", "explain/handoff.md"} <= {page for page, _ in cited}
    for page, anchor in cited:
        assert (ROOT / "docs" / page).exists(), page
        assert not anchor or anchor in anchors(ROOT / "docs" / page), f"{page}#{anchor}"


def test_the_site_has_every_page_and_what_a_page_links_to() -> None:
    pages = sorted((ROOT / "docs").rglob("*.md"))
    assert {page.parent.name for page in pages} == set(site.KINDS), "a folder without an entry in the menu"
    menu = tomllib.loads(site.menu(pages))["nav"]
    assert [name for entry in menu[1:] for names in entry.values() for name in names] == [
        f"docs/{folder}/{page.name}" for folder in site.KINDS for page in pages if page.parent.name == folder
    ]
    assert {ROOT / "LICENSE", ROOT / "CHANGELOG.md", *pages} <= site.linked(ROOT / site.FRONT, pages)


def test_every_page_can_be_reached_from_the_readme() -> None:
    assert sorted({*(ROOT / "docs").rglob("*.md")} - site.linked(ROOT / site.FRONT, [])) == []


def test_the_pages_that_one_reads_stay_short() -> None:
    read = [text for name, text in PAGES.items() if name not in TOP and not name.startswith(("lab/", "reference/"))]
    assert sum(len(text.splitlines()) for text in read) <= 3_500


def test_lists_of_the_site_are_indented_by_four_spaces() -> None:
    page = "Text\n- a\n  - b\n    b\n\n1. c\n\n   ```sh\n     d\n   ```\n\nText\n\n    code\n\n```\n- e\n  f\n```\n"
    wide = "Text\n\n- a\n    - b\n        b\n\n1. c\n\n    ```sh\n      d\n    ```\n"
    assert site.widened(page) == wide + page[page.index("\nText\n\n") :]
