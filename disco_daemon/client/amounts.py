"""Amounts as all of disco's surfaces write them: money, energy, and other figures. Pure."""

from __future__ import annotations

LEAST_USD = 0.0001  # $; less than that is written as less than that


def dollars(amount: float) -> str:
    """Write an amount of money: with cents from a dollar on, else with two significant digits, and never an exponent.

    All of disco's surfaces write money by this, and energy apart from it.
    """
    if amount == 0:
        return "$0"
    if abs(amount) < LEAST_USD:
        return f"<${LEAST_USD:.4f}"
    if abs(amount) >= 100:
        return f"${amount:,.0f}"
    exponent = int(f"{amount:.1e}".split("e")[1])
    return f"${amount:.{max(2, 1 - exponent)}f}"


def figure(value: float, digits: int = 3) -> str:
    """Write a number with some significant digits and never an exponent."""
    if value == 0:
        return "0"
    places = max(0, digits - 1 - int(f"{value:.{digits - 1}e}".split("e")[1]))
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def amount_of(value: float, unit: str) -> str:
    """Write an amount of a cap's unit, $ or Wh."""
    return dollars(value) if unit == "$" else f"{figure(value)} {unit}"
