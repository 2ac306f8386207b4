"""Asks for work and shows it: REST service, command line and dashboard."""
