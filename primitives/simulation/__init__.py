"""The simulated world: the same code on a deterministic network with a virtual clock."""
