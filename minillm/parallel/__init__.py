"""Many devices: one model cut over several ranks. Chapter 18."""
