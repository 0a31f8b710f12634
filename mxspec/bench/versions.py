"""The versions of the software that a run times."""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path

import mxspec


def versions(gpu: bool) -> dict[str, str]:
    """The versions of what was run: mxspec with the commit of its checkout, the frameworks, the driver."""
    found = {"mxspec": mxspec.__version__}
    if commit := said_by("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"):
        found["mxspec"] += f" ({commit})"
    for name in ("torch", "triton", "helion"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if gpu and (driver := said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")):
        found["driver"] = driver.splitlines()[0]
    return found


def said_by(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
