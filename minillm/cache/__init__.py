"""Key-value caches: everything that can stand behind `attend` (chapters 02, 05, 07, 14, 24)."""
