"""The terminal UI: a Textual application that talks to the daemon over its HTTP API only."""

import os

# Textual draws at ticks of a clock, and reads its rate when it is imported. A key that waits for the next of 60 ticks a
# second waits 8 ms on average, and the answer's own drawing (transcript.FRAME_S) is as rare as before.
os.environ.setdefault("TEXTUAL_FPS", "120")
