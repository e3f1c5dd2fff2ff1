"""More tokens a step: drafts are proposed cheaply, and verified together. Chapters 16 and 17."""
