"""The content of a chat message: a string, parts, or nothing."""

from __future__ import annotations


def is_text(content: object) -> bool:
    """Whether the content of a message is text: a string, parts of text, or nothing."""
    if not isinstance(content, list):
        return isinstance(content, str | None)
    return all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in content)


def text_of(content: object) -> str:
    """Return the text in the content of a message; parts that are no text have none."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    return "".join(part["text"] for part in content if is_text([part]))
