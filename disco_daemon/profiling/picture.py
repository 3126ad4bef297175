"""TTFT against prompt length, as a text for the terminal and as a PNG."""

from __future__ import annotations

from pathlib import Path

from .saved import DeviceFigures

WIDTH, HEIGHT = 64, 14  # characters


def terminal(device: DeviceFigures) -> str:
    """`o` is a sample, `.` the fitted curve; both axes begin at 0, and so one sees the curve as it is."""
    top = max(max(s for _, s in device.samples), device.ttft_fit.predict(_longest(device)))
    field = [[" "] * WIDTH for _ in range(HEIGHT)]
    for column in range(WIDTH):
        _put(field, column, device.ttft_fit.predict(column / (WIDTH - 1) * _longest(device)) / top, ".")
    for tokens, seconds in device.samples:
        _put(field, round(tokens / _longest(device) * (WIDTH - 1)), seconds / top, "o")
    rows = [f"{top * (HEIGHT - 1 - i) / (HEIGHT - 1):7.3f} |{''.join(row)}" for i, row in enumerate(field)]
    half, whole = str(_longest(device) // 2), str(_longest(device))
    axis = f"0{half:>{WIDTH // 2 + len(half) // 2 - 1}}".ljust(WIDTH - len(whole)) + whole
    title = "TTFT, s, by fresh prompt tokens: o measured, . fitted"
    return "\n".join([title, *(row.rstrip() for row in rows), "        +" + "-" * WIDTH, "         " + axis])


def _longest(device: DeviceFigures) -> int:
    return max(tokens for tokens, _ in device.samples)


def _put(field: list[list[str]], column: int, height: float, mark: str) -> None:
    field[HEIGHT - 1 - min(HEIGHT - 1, round(height * (HEIGHT - 1)))][column] = mark


def formula(device: DeviceFigures) -> str:
    """The fitted curve as people write it, times in ms."""
    fit = device.ttft_fit
    bent = f" + {1e9 * fit.q_s_per_token2:.3g} ms·(l/1000)²" if fit.q_s_per_token2 else ""
    return f"T(l) = {1e3 * fit.c_s:.3g} ms + {1e3 * fit.k_s_per_token:.4g} ms·l{bent}"


def draw(device: DeviceFigures, path: Path) -> Path:
    """Write samples and curve as a PNG; return its path. Raises ConfigError without matplotlib, OSError."""
    from ..simulate.figures import panels, require_plots, save

    require_plots()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = panels(1, 1, (6.2, 4.2))
    panel, fit = axes[0][0], device.ttft_fit
    lengths = [_longest(device) * i / 200 for i in range(201)]
    panel.plot([n for n, _ in device.samples], [s for _, s in device.samples], "o", color="#0072B2", ms=4, alpha=0.6)
    panel.plot(lengths, [fit.predict(n) for n in lengths], "-", color="#D55E00", lw=1.2)
    title = f"{device.model}\n{formula(device)}, R² {fit.r2:.4f}, n = {fit.n}"
    panel.set_title(title, fontsize=8)
    panel.set(
        xlabel="prompt tokens that no cache knows", ylabel="time to first token, s", xlim=(0, None), ylim=(0, None)
    )
    return save(figure, path)
