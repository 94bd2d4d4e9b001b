"""What to compute: the ladder of protocols, and one decoder for models in Hugging Face layout."""

MEANING = 2
"""How files of models are understood, as a number: what answers depend on besides the bits (`Library.numerics`). It is
raised with whatever makes other models of the same files.

1: until there was this number. 2: see "What files mean" in CHANGELOG.md.
"""
