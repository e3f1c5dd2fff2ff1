"""The engine: many requests through one model (chapters 04 to 07). docs/life_of_one_token.md follows one request."""
