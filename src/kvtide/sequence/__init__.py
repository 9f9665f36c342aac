"""Who holds what: sequences, their rows in the page tables, and the verbs on them."""

from kvtide.sequence.answer import Answer, Reuse
from kvtide.sequence.groups import PageCopy
from kvtide.sequence.holdings import Holdings
from kvtide.sequence.ledger import Ledger
from kvtide.sequence.sequence import Batch, Sequence, Status
from kvtide.sequence.step import Step
from kvtide.sequence.table import Csr, PageTable

__all__ = [
    "Answer",
    "Batch",
    "Csr",
    "Holdings",
    "Ledger",
    "PageCopy",
    "PageTable",
    "Reuse",
    "Sequence",
    "Status",
    "Step",
]
