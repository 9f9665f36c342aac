"""Traffic that changes its mind: short chats, questions about long documents, short chats again.

All text comes from this file and from the Python documentation in the standard library. Lengths are
cut in tokens, so that memory can be sized for them and chats of one length can be batched.
"""

from __future__ import annotations

import pydoc_data.topics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtide.engine.load import Tokenizer

SYSTEM = """You are the assistant of a programming school. You answer questions of beginners about
the Python language. Answer in one or two short sentences. Use simple words and explain every term
that a beginner may not know yet. If a question is about an error, first say what the error means,
then how to find the line that causes it, and only then how to repair it. Never write more than
three lines of code. If you show code, use names that say what a value is for. Do not invent modules
or functions that do not exist. If you do not know the answer, say so and name the page of the
documentation where the student can look. Be friendly and patient: everybody was a beginner once.
Students sometimes paste a part of the documentation and ask what it means. Then say it again in
your own words, with an example from daily life, and do not repeat the text that was pasted.
"""
QUESTIONS = (
    "What is this text about?",
    "Which errors does it mention?",
    "What is the first example?",
    "Who should read this?",
    "Which words are defined?",
    "What comes at the end?",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much traffic: requests of each phase, and lengths in tokens.

    Documents are a whole number of blocks long and questions shorter than a block, so that what is
    kept at the end of one prompt is what the next question about the document needs.
    """

    first_chats: int
    documents: int
    questions: int
    last_chats: int
    system_tokens: int
    document_tokens: int
    answer_tokens: int

    @property
    def max_tokens(self) -> int:
        """The longest sequence: a document, a question about it, and the answer."""
        return self.document_tokens + max(_EXCERPT_TOKENS) + self.answer_tokens


FULL = Size(
    first_chats=32,
    documents=2,
    questions=5,
    last_chats=24,
    system_tokens=160,
    document_tokens=1792,
    answer_tokens=20,
)
SHORT = Size(
    first_chats=8,
    documents=2,
    questions=3,
    last_chats=6,
    system_tokens=160,
    document_tokens=1392,
    answer_tokens=8,
)

_EXCERPT_TOKENS = (40, 56, 72)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request. The first `shared` tokens of its prompt are those of other jobs, too."""

    prompt: tuple[int, ...]
    shared: int
    arrival: int
    """Steps after the start of its phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Jobs of one kind; the next phase starts when all of them are answered."""

    title: str
    jobs: tuple[Job, ...]


def make_traffic(tokenizer: Tokenizer, size: Size) -> tuple[Phase, ...]:
    """The three phases, the same on every machine."""
    topics: dict[str, str] = pydoc_data.topics.topics
    texts = [topics[name] for name in sorted(topics, key=lambda name: (-len(topics[name]), name))]
    system = _cut(tokenizer, SYSTEM, size.system_tokens)
    documents = [
        _cut(tokenizer, f"Document:\n\n{text}", size.document_tokens)
        for text in texts[: size.documents]
    ]
    middle = size.documents + size.first_chats
    first, last = texts[size.documents : middle], texts[middle : middle + size.last_chats]
    return (
        Phase(title="short chats", jobs=_chats(tokenizer, system, first)),
        Phase(title="long documents", jobs=_reading(tokenizer, documents, size.questions)),
        Phase(title="short chats again", jobs=_chats(tokenizer, system, last)),
    )


def _chats(tokenizer: Tokenizer, system: list[int], texts: list[str]) -> tuple[Job, ...]:
    """A chat about each text over one system prompt; two arrive every other step."""
    tail = tokenizer("\nAssistant:")["input_ids"][1:]
    jobs: list[Job] = []
    for number, text in enumerate(texts):
        excerpt = " ".join(text.split()[:120])
        ids = tokenizer(f"\nStudent: What does this mean? {excerpt}")["input_ids"]
        room = _EXCERPT_TOKENS[number % len(_EXCERPT_TOKENS)] - len(tail)
        prompt = (*system, *ids[1 : room + 1], *tail)
        jobs.append(Job(prompt=prompt, shared=len(system), arrival=number // 2 * 2))
    return tuple(jobs)


def _reading(tokenizer: Tokenizer, documents: list[list[int]], questions: int) -> tuple[Job, ...]:
    """Questions about documents in turn; one arrives every fourth step."""
    jobs: list[Job] = []
    for question in QUESTIONS[:questions]:
        tail = tokenizer(f"\n\nQuestion: {question}\nAnswer:")["input_ids"][1:]
        for document in documents:
            prompt = (*document, *tail)
            jobs.append(Job(prompt=prompt, shared=len(document), arrival=4 * len(jobs)))
    return tuple(jobs)


def _cut(tokenizer: Tokenizer, text: str, num_tokens: int) -> list[int]:
    """The first `num_tokens` tokens of a text that is long enough."""
    ids = tokenizer(text)["input_ids"]
    if len(ids) < num_tokens:
        raise ValueError(f"a text of {len(ids)} tokens can not be cut to {num_tokens}")
    return ids[:num_tokens]


def num_distinct(sequences: Sequence[Sequence[int]]) -> int:
    """Number of different prefixes of the sequences: tokens that must be computed at least once."""
    total = 0
    before: tuple[int, ...] = ()
    # Sorted, a sequence shares with the one before it all that it shares with any before it.
    for row in sorted(tuple(sequence) for sequence in sequences):
        total += len(row) - _num_common(before, row)
        before = row
    return total


def _num_common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
