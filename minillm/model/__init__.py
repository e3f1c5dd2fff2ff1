"""The decoder-only model of chapter 01: configuration, layers, sampling, tokenizer and weights."""
