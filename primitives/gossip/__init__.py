"""Neighbour verbs: ranks average with a few others instead of with all."""
