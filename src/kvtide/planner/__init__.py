"""What a model needs of memory before it is launched: pools, splits and capacity, as arithmetic."""
