"""Clocks, ceilings, ledgers: how the course measures (chapters 00, 03, 15, 35)."""
