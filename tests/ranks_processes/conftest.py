"""One host process for all groups of a module: importing torch costs more than most groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.ranks_processes.host import Host

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    host = Host(tmp_path_factory.mktemp("groups"))
    yield host
    host.close()
