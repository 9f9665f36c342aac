"""Shipped test tools: conformance suites and helpers for those who add an arena or an engine.

`kvtide.testing.arenas` needs pytest; import the module you use.
"""
