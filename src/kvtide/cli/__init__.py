"""The `kvtide` command. Subcommands are imported when they are called, with what they need."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec


def main() -> None:
    """Entry point of the `kvtide` command."""
    missing = [name for name in ("typer", "rich") if find_spec(name) is None]
    if missing:
        sys.exit(f"kvtide: {' and '.join(missing)} not installed; run: pip install 'kvtide[cli]'")
    # Torch's threads wait for each other by spinning. Where another process wants a core, that made
    # the demo six times as slow; sleeping costs a few per cent where none does. Read when torch is
    # loaded, so it is set before.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import_module("kvtide.cli.app").app()
