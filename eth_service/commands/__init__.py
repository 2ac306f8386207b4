"""Subcommands of `eth`, one file each."""
