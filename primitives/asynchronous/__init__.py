"""Endpoints of ranks that run freely: messages come when they come."""
