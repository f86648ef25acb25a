"""The low-level layer: how ranks talk."""
