"""What to compute: the ladder of protocols, and one decoder for models in Hugging Face layout."""
