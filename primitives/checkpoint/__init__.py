"""Checkpoints: what all ranks need to go on as if they had never stopped."""
