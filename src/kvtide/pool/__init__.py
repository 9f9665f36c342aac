"""Pages and granules of one layer group: books only, except where a pool moves whole pages."""

from kvtide.pool.fences import Fence, Fences
from kvtide.pool.pages import NO_OWNER, PageBooks
from kvtide.pool.pool import Pool
from kvtide.pool.space import PageSpace

__all__ = ["NO_OWNER", "Fence", "Fences", "PageBooks", "PageSpace", "Pool"]
