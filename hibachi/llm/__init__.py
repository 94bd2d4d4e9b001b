"""Language models: text in, text out, over an engine."""
