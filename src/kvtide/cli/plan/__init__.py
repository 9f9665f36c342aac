"""`kvtide plan`: what a model needs of memory, before it is launched."""
