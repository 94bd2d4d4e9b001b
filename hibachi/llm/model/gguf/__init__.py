"""Models in GGUF: header and numbers of a file or its parts, its config, its tokenizer."""

from hibachi.llm.model.gguf.file import parts as parts
from hibachi.llm.model.gguf.file import stem as stem
from hibachi.llm.model.gguf.reader import GGUF as GGUF
from hibachi.llm.model.gguf.reader import find_gguf as find_gguf
