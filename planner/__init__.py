"""Decides the work: pure functions over data."""
