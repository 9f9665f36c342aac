"""Request traces: where they come from, how they are read, mixed and made."""
