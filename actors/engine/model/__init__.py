"""The transformer, built stage by stage."""
