"""What may come next: grammars for the answers of requests, as masks of tokens."""
