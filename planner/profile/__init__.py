"""Operator times: what the cost model reads, whatever they come from."""
