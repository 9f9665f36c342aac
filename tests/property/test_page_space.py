"""Page space against arithmetic on single bytes: which granules stand under which pages."""

from __future__ import annotations

from typing import TypeAlias

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from kvtide.pool import PageSpace

Bytes: TypeAlias = set[int]


@st.composite
def spaces(draw: st.DrawFn) -> PageSpace:
    """Pages smaller, larger and as large as a granule; sizes that do and do not divide."""
    granule, num = draw(st.integers(1, 12)), draw(st.integers(1, 9))
    page = draw(st.integers(1, granule * num))
    return PageSpace(page, granule, num)


def bytes_of_page(space: PageSpace, page: int) -> Bytes:
    return set(range(page * space.page_bytes, (page + 1) * space.page_bytes))


def bytes_of_granule(space: PageSpace, granule: int) -> Bytes:
    return set(range(granule * space.granule_bytes, (granule + 1) * space.granule_bytes))


def touches(space: PageSpace, page: int, granule: int) -> bool:
    return bool(bytes_of_page(space, page) & bytes_of_granule(space, granule))


def subset(draw: st.DrawFn | st.DataObject, size: int) -> list[int]:
    chosen = draw.draw(st.sets(st.integers(0, size - 1)))  # type: ignore[union-attr]
    return sorted(chosen)


@given(space=spaces())
def test_as_many_pages_as_fit(space: PageSpace) -> None:
    total = space.num_granules * space.granule_bytes
    assert bytes_of_page(space, space.num_pages - 1) <= set(range(total))
    assert not bytes_of_page(space, space.num_pages) <= set(range(total))


@given(space=spaces(), data=st.data())
def test_first_and_last_granule_of_a_page(space: PageSpace, data: st.DataObject) -> None:
    page = data.draw(st.integers(0, space.num_pages - 1))
    under = [g for g in range(space.num_granules) if touches(space, page, g)]
    one = np.array([page], np.int32)
    assert space.first_granule(one).tolist() == under[:1]
    assert space.last_granule(one).tolist() == under[-1:]


@given(space=spaces(), data=st.data())
def test_load_and_under(space: PageSpace, data: st.DataObject) -> None:
    pages = subset(data, space.num_pages)
    load = [sum(touches(space, p, g) for p in pages) for g in range(space.num_granules)]
    array = np.array(pages, np.int32)
    assert space.load(array).tolist() == load
    marked = np.zeros(data.draw(st.integers(max(pages, default=-1) + 1, space.num_pages)), np.bool_)
    marked[array] = True
    assert space.count(marked).tolist() == load
    assert space.under(array).tolist() == [g for g, n in enumerate(load) if n]


@given(space=spaces(), data=st.data())
def test_touching(space: PageSpace, data: st.DataObject) -> None:
    granules = subset(data, space.num_granules)
    expected = [p for p in range(space.num_pages) if any(touches(space, p, g) for g in granules)]
    assert space.touching(np.array(granules, np.int64)).tolist() == expected


@given(space=spaces(), data=st.data())
def test_complete_pages_have_every_byte(space: PageSpace, data: st.DataObject) -> None:
    mapped = subset(data, space.num_granules)
    there: Bytes = set().union(*(bytes_of_granule(space, g) for g in mapped))
    mask = np.isin(np.arange(space.num_granules), mapped)
    pages = np.arange(space.num_pages, dtype=np.int32)
    expected = [p for p in pages.tolist() if bytes_of_page(space, p) <= there]
    assert space.complete(pages, mask).tolist() == expected


@given(space=spaces(), data=st.data())
def test_bare_granules_carry_no_page(space: PageSpace, data: st.DataObject) -> None:
    granules, pages = subset(data, space.num_granules), subset(data, space.num_pages)
    exists = np.isin(np.arange(space.num_pages), pages)
    expected = [g for g in granules if not any(touches(space, p, g) for p in pages)]
    assert space.bare(np.array(granules, np.int64), exists).tolist() == expected


@given(space=spaces(), data=st.data())
def test_counting_packed_pages(space: PageSpace, data: st.DataObject) -> None:
    """`granules_for` and `pages_in` are inverse as far as whole granules and pages allow."""
    pages = data.draw(st.integers(0, space.num_pages))
    need = space.granules_for(pages)
    last = set(range(pages * space.page_bytes))
    assert last <= set(range(need * space.granule_bytes))
    assert need == 0 or not last <= set(range((need - 1) * space.granule_bytes))
    assert space.pages_in(need) >= pages
    assert space.pages_in(space.num_granules) == space.num_pages
    if need:
        assert space.pages_in(need - 1) < pages
