"""What the scripts share beside `disco_daemon.bench.command`: a run that ends as a verb does, and an argument."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable

from disco_daemon.bench.command import progress
from disco_daemon.errors import DiscoError


def positive(text: str) -> float:
    """Read a finite number above 0. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError("must be a number above 0")
    return value


def run_script(main: Callable[[], int]) -> int:
    """Run the `main` of a script as `disco` runs a verb: an error is one line on stderr, and exit code 1."""
    try:
        code = main()
        sys.stdout.flush()  # here, where it can be told that nobody reads
    except DiscoError as e:
        progress(str(e))
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `… --json | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code
