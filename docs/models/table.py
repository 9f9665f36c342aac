"""Writes README.md beside it: what the models of `models.json` cache, by family.

python docs/models/table.py            # writes
python docs/models/table.py --check    # exit status 1 if it would write something else
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kvtide import Layout
from kvtide.layout import State, Window

HERE = Path(__file__).parent
BLOCK_TOKENS = 128

HEAD = """# What models cache

Written by `python docs/models/table.py` from [models.json](models.json), which has of each model's
configuration the fields that decide what it caches, and where they come from. One GPU (tensor
parallel 1), keys and values in bfloat16, indexer keys as the family's kernels want them (fp8 with
scales for DeepSeek and GLM), recurrent states in their own dtype, {block} tokens a block.

"Every token" is what each token adds for as long as its sequence lives; a window adds its bytes for
the last tokens only, and a state is there once per sequence, however long. `kvtide plan` tells the
same, and more, of any config.json.
"""


def row(model: dict[str, Any]) -> str:
    """One line of a family's table."""
    layout = Layout.from_config(model["fields"], block_tokens=BLOCK_TOKENS, kv_dtype="bfloat16")
    every = sum(
        group.bytes_per_token or 0
        for group in layout.groups
        if not isinstance(group.lifetime, Window)
    )
    pools = "; ".join(
        f"{group.name}: {len(group.layers)} layers, "
        + (
            f"{group.bytes_per_state:,} a state"
            if isinstance(group.lifetime, State)
            else f"{group.bytes_per_token:,} a token"
        )
        for group in layout.groups
    )
    return (
        f"| {model['name']} | {every:,} | {layout.bytes_per_state or 0:,} "
        f"| {pools} | {model['source']} |"
    )


def document(models: list[dict[str, Any]]) -> str:
    """The whole page."""
    parts = [HEAD.format(block=BLOCK_TOKENS)]
    for family in dict.fromkeys(model["family"] for model in models):
        parts.append(f"\n## {family}\n")
        parts.append("| model | bytes every token | bytes of states | pools | source |")
        parts.append("|---|---|---|---|---|")
        parts += [row(model) for model in models if model["family"] == family]
    return "\n".join(parts) + "\n"


def main() -> int:
    """Write the page, or compare it with `--check`."""
    text = document(json.loads((HERE / "models.json").read_text(encoding="utf-8")))
    page = HERE / "README.md"
    if "--check" in sys.argv[1:]:
        return int(page.read_text(encoding="utf-8") != text)
    page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
