"""`kvtide replay`: what a split costs on recorded traffic, policy by policy."""
