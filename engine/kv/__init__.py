"""Paged KV memory: which blocks exist, who holds them, what they are known to contain. No torch here."""
