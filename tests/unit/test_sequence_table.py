"""Page tables: rows for life, padded rows for kernels, compressed rows for paged attention."""

from __future__ import annotations

import numpy as np
import pytest

from kvtide.errors import ConfigError
from kvtide.sequence import PageTable
from kvtide.types import ABSENT, SINK


@pytest.fixture
def table() -> PageTable:
    """Blocks of 4; rows: 3 pages, none, 2 pages behind a window, a full row."""
    table = PageTable(5, 4, 4, None)
    table.rows[0, :3] = [7, 5, 9]
    table.rows[2, 2:4] = [3, 4]
    table.rows[3] = [1, 2, 6, 8]
    return table


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def test_rows_start_absent() -> None:
    table = PageTable(3, 5, 4, None)
    assert table.rows.shape == (3, 5)
    assert table.rows.dtype == np.int32
    assert (table.rows == ABSENT).all()


def test_the_engines_buffer_is_written_in_place() -> None:
    buffer = np.zeros((3, 5), np.int32)
    table = PageTable(3, 5, 4, buffer)
    assert table.rows is buffer
    assert (buffer == ABSENT).all()


@pytest.mark.parametrize(
    "buffer",
    [np.zeros((3, 4), np.int32), np.zeros((3, 5), np.int64), np.zeros(15, np.int32)],
    ids=["too narrow", "of another dtype", "flat"],
)
def test_a_buffer_of_another_form_is_refused(buffer: np.ndarray) -> None:
    given = f"{buffer.dtype}{list(buffer.shape)}"
    with pytest.raises(ConfigError) as caught:
        PageTable(3, 5, 4, buffer)
    assert given in str(caught.value)
    assert "give int32[3, 5] or none" in str(caught.value)


def test_padded_rows_name_the_sink_where_nothing_is(table: PageTable) -> None:
    padded = table.padded(rows(2, 1))
    assert padded.tolist() == [[SINK, SINK, 3, 4], [SINK] * 4]
    padded[:] = 99
    assert table.rows[2].tolist() == [ABSENT, ABSENT, 3, 4], "padded rows are a copy"


def test_compressed_rows(table: PageTable) -> None:
    csr = table.csr(rows(0, 2, 3), rows(10, 16, 13))
    assert csr.indptr.tolist() == [0, 3, 5, 9]
    assert csr.indices.tolist() == [7, 5, 9, 3, 4, 1, 2, 6, 8]
    assert csr.last_page_len.tolist() == [2, 4, 1]
    assert csr.first_block.tolist() == [0, 2, 0]
    assert {a.dtype for a in (csr.indptr, csr.indices, csr.last_page_len, csr.first_block)} == {
        np.dtype(np.int32)
    }


def test_pages_beyond_the_length_are_left_out(table: PageTable) -> None:
    """Room that was granted and holds nothing yet is not for kernels to read."""
    csr = table.csr(rows(3, 0), rows(5, 4))
    assert csr.indptr.tolist() == [0, 2, 3]
    assert csr.indices.tolist() == [1, 2, 7]
    assert csr.last_page_len.tolist() == [1, 4]


def test_rows_without_pages(table: PageTable) -> None:
    csr = table.csr(rows(1, 4), rows(0, 0))
    assert csr.indptr.tolist() == [0, 0, 0]
    assert csr.indices.size == 0
    assert csr.last_page_len.tolist() == [0, 0]


def test_no_rows(table: PageTable) -> None:
    csr = table.csr(rows(), rows())
    assert csr.indptr.tolist() == [0]
    assert csr.indices.size == 0
    assert csr.last_page_len.size == csr.first_block.size == 0


@pytest.mark.parametrize("length", range(1, 17))
def test_a_kernel_finds_every_token(table: PageTable, length: int) -> None:
    """Token t stands in slot t % 4 of the page that the compressed row gives for block t // 4."""
    csr = table.csr(rows(1, 3), rows(0, length))
    start, stop = csr.indptr[1:3]
    found = [
        (int(page), slot)
        for i, page in enumerate(csr.indices[start:stop])
        for slot in range(4 if start + i < stop - 1 else int(csr.last_page_len[1]))
    ]
    assert found == [(int(table.rows[3, t // 4]), t % 4) for t in range(length)]
