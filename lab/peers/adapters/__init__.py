"""One module for each peer, imported only in that peer's environment."""
