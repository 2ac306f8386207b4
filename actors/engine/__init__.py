"""The training engine: torch, without Ray."""
