"""Training algorithms composed from relaxmpi.primitives."""
