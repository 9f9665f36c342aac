"""Policies: who gets which granules, decided between steps from facts alone."""
