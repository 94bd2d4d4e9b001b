"""Models in GGUF: header and numbers of a file or its parts, its config, its tokenizer."""

from hibachi.model.gguf.file import parts as parts
from hibachi.model.gguf.file import stem as stem
from hibachi.model.gguf.reader import GGUF as GGUF
from hibachi.model.gguf.reader import find_gguf as find_gguf
