"""A tokenizer with a token for each letter."""


class Letters:
    """first: the letter of id 0."""

    def __init__(self, first: str = "a") -> None:
        self.first = ord(first)

    def encode(self, text: str) -> list[int]:
        return [ord(c) - self.first for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(self.first + i) for i in ids)
