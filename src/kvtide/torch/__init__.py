"""The bridge to torch: tensors over pages, and a transformers cache made of them."""

from kvtide.torch.cache import PagedCache
from kvtide.torch.generate import GenerateCache
from kvtide.torch.model_layout import layout_from_model
from kvtide.torch.views import page_view

__all__ = ["GenerateCache", "PagedCache", "layout_from_model", "page_view"]
