"""launchd's property list for a user agent. Pure."""

from __future__ import annotations

import plistlib
from typing import Any

from .spec import MAX_FILES, NAME, RESTART_S, STOP_S, Spec

LABEL = f"org.{NAME}.daemon"
FILE = f"{LABEL}.plist"
LEAST_THROTTLE_S = 10  # launchd's own minimum between two starts


def document(spec: Spec) -> dict[str, Any]:
    """Return the keys of launchd.plist(5)."""
    limits = {"NumberOfFiles": MAX_FILES}
    if spec.memory_bytes is not None:
        limits["ResidentSetSize"] = spec.memory_bytes
    return {
        "Label": LABEL,
        "ProgramArguments": list(spec.command),
        "EnvironmentVariables": dict(sorted(spec.environment.items())),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": max(LEAST_THROTTLE_S, RESTART_S),
        "ExitTimeOut": STOP_S,
        "ProcessType": "Interactive",  # a user is reading: disk and timers as for an application
        "Umask": 0o077,
        "SoftResourceLimits": limits,
        "HardResourceLimits": limits,
        "StandardOutPath": str(spec.log / f"{NAME}.log"),
        "StandardErrorPath": str(spec.log / f"{NAME}.log"),
    }


def property_list(spec: Spec) -> str:
    """Return the text of the property list."""
    return plistlib.dumps(document(spec), sort_keys=False).decode()
