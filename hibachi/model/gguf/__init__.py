"""Models in one GGUF file: its header and numbers, its config, its tokenizer."""

from hibachi.model.gguf.reader import GGUF as GGUF
from hibachi.model.gguf.reader import find_gguf as find_gguf
