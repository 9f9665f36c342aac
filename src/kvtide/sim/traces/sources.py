"""Where the traces that kvtide reads can be had, and under which licence. Nothing is fetched."""

from __future__ import annotations

from dataclasses import dataclass

from kvtide.sim.traces.request import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Public:
    """A public trace: what it is, the format kvtide reads it as, and how to get it."""

    name: str
    format: str
    source: Source
    get: str
    """The file's own address, or what to do at `source.url`."""


def _mooncake(file: str, about: str) -> Public:
    base = "https://raw.githubusercontent.com/kvcache-ai/Mooncake/main/FAST25-release/traces"
    return Public(
        name=f"mooncake-{file.removesuffix('_trace.jsonl')}",
        format="mooncake",
        source=Source(
            url="https://github.com/kvcache-ai/Mooncake/tree/main/FAST25-release/traces",
            licence="Apache-2.0",
            about=about,
        ),
        get=f"{base}/{file}",
    )


def _azure(file: str, about: str) -> Public:
    return Public(
        name=f"azure-{file}",
        format="azure",
        source=Source(
            url="https://github.com/Azure/AzurePublicDataset",
            licence="CC-BY-4.0; cite Splitwise (ISCA 2024)",
            about=about,
        ),
        get=(
            "https://raw.githubusercontent.com/Azure/AzurePublicDataset/master/data/"
            f"AzureLLMInferenceTrace_{file}.csv"
        ),
    )


PUBLIC = (
    _mooncake("conversation_trace.jsonl", "chat with long documents, 12,031 requests in an hour"),
    _mooncake("toolagent_trace.jsonl", "tools and agents, an hour"),
    _mooncake("synthetic_trace.jsonl", "made by its publishers out of public data sets"),
    Public(
        name="bailian",
        format="bailian",
        source=Source(
            url="https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon",
            licence="Apache-2.0; cite KVCache Cache in the Wild (USENIX ATC 2025)",
            about="chat, tasks, coding and thinking on one Qwen instance, two hours each",
        ),
        get="the qwen_*_blksz_16.jsonl files there",
    ),
    _azure("code", "code completion, 8,819 requests, lengths and times only"),
    _azure("conv", "conversation, 19,366 requests, lengths and times only"),
    Public(
        name="agent",
        format="agent",
        source=Source(
            url="https://github.com/callanjfox/kv-cache-tester",
            licence="Apache-2.0",
            about="coding-agent sessions, one file each",
        ),
        get="the folder traces there: read it as it is, or as one file of JSON lines",
    ),
    Public(
        name="servegen",
        format="rates",
        source=Source(
            url="https://github.com/alibaba/ServeGen",
            licence="Apache-2.0; cite ServeGen (NSDI 2026)",
            about="rates, burstiness and lengths of single clients in ten-minute windows",
        ),
        get="a folder such as data/reason/deepseek-r1 there, or a tar of it",
    ),
    Public(
        name="vattention",
        format="lengths",
        source=Source(
            url="https://github.com/microsoft/vattention",
            licence="MIT; cite vAttention (ASPLOS 2025)",
            about="lengths of long-context requests, up to 192k tokens",
        ),
        get="the CSV files in scripts/artifact_asplos25/traces there",
    ),
    Public(
        name="vllm-measured",
        format="lengths",
        source=Source(
            url="https://github.com/casys-kaist/LLMServingSim",
            licence="MIT",
            about="requests of measured vLLM runs, with their times",
        ),
        get="bench/examples/*/*/vllm/requests.jsonl there",
    ),
)


def source_of(name: str) -> Source:
    """The source of the format `name`: of the first public trace that is read as it."""
    return next(public.source for public in PUBLIC if public.format == name)


def download_text() -> str:
    """What `--download` prints: name, licence, address and use of every public trace."""
    known = [
        f"{public.name}: {public.source.about}\n"
        f"  licence  {public.source.licence}\n"
        f"  home     {public.source.url}\n"
        f"  file     {public.get}\n"
        f"  use      {public.format}:PATH"
        for public in PUBLIC
    ]
    first = "kvtide fetches nothing by itself. Public traces, and what each is read as:"
    last = "synthetic: made on the spot, needs no file\n  use      synthetic"
    return "\n\n".join([first, *known, last]) + "\n"
