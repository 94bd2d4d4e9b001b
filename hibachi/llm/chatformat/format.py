"""The records of how a model writes tool calls and reasoning. They are data: derived from a chat template, or given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, TypeAlias


class Slot(Enum):
    """What stands between the fixed texts of a call."""

    NAME = "name"  # of the function
    ARGUMENTS = "arguments"
    ID = "id"  # of the call, as the conversation has it
    NUMBER = "number"  # of the call in its answer, see `ToolFormat.first_number`
    TAG = "tag"  # a word that says nothing, such as a type


Call: TypeAlias = tuple[str | Slot, ...]
"""The parts of one call. Texts are as the template writes them, blanks included."""


@dataclass(frozen=True, slots=True)
class Json:
    """Arguments as a JSON object."""


@dataclass(frozen=True, slots=True)
class Tagged:
    """Each argument between texts of its own: `<parameter=city>Paris</parameter>`.

    Strings are written as they are, other values as JSON; the type of a property in the tool's schema says which it
    is, or else `kinds`. open: before the name. close: behind the name, before the value. end: behind the value; in
    `open`, `close` and `end` "{key}" stands for the name, where it is written again. between: two arguments. kinds: the
    text that takes the place of `close`, by the type of the value in JSON's words ("string", "number", "boolean",
    "object", "array", "null"), where the format tells it.
    item: objects and arrays are no JSON but written in the same texts again, one for each entry of an object, and one
    of this name for each of an array; None means JSON. cdata: strings that hold "<", "&" or a new line stand between
    "<![CDATA[" and "]]>". python: values other than strings may be written as Python has them (True, None, 'a'), and
    are read so where they are no JSON; the grammar asks for JSON all the same. attribute: names stand in an attribute
    of XML, where & and " are &amp; and &quot;.
    """

    open: str
    close: str
    end: str
    between: str = ""
    kinds: Mapping[str, str] = field(default_factory=dict)
    item: str | None = None
    cdata: bool = False
    python: bool = False
    attribute: bool = False

    def written(self, name: str) -> str:
        """A name as it stands in a call."""
        return name.replace("&", "&amp;").replace('"', "&quot;") if self.attribute else name

    def read(self, name: str) -> str:
        """The name that stands in a call."""
        return name.replace("&quot;", '"').replace("&amp;", "&") if self.attribute else name


@dataclass(frozen=True, slots=True)
class Python:
    """Arguments as keywords of a call in Python: `city='Paris', days=3`."""


@dataclass(frozen=True, slots=True)
class Quoted:
    """JSON whose names have no quotes and whose strings stand between `quote`s, which do not come in them:
    `{city:<|"|>Paris<|"|>}`.
    """

    quote: str


Arguments: TypeAlias = Json | Tagged | Python | Quoted


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How calls are written: begin, call, between, call, ..., end.

    begin, between, end: around all calls of an answer; may be "". call: the parts of one. Blanks at the outer ends of
    begin, of the first part of a call and of `end` are optional when they are read.
    marker: the beginning of `begin` and of the first part that says that calls come, such as "<tool_call>". alone:
    there is no such text, so calls are the whole answer, and the marker stands at its beginning (after blanks).
    most: calls of one answer; None means any number. first_number: of NUMBER slots.
    id: the form that ids of calls must have in a conversation: None means any.
    spellings: other parts of a call that models are known to write; they are read like `call`, each with the text it
    begins with as a further marker, and never asked for.
    """

    call: Call
    marker: str
    begin: str = ""
    between: str = ""
    end: str = ""
    arguments: Arguments = field(default_factory=Json)
    alone: bool = False
    most: int | None = None
    first_number: int = 0
    id: Literal["nine letters"] | None = None
    spellings: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How reasoning is written: begin, the reasoning, end, and then what is said. Blanks around it are left out.

    A prompt may have written `begin` already, see `Thinking`.
    """

    begin: str
    end: str


@dataclass(frozen=True, slots=True)
class History:
    """What a template takes of a message with calls.

    arguments: as an object, or as JSON in a text. content, where nothing is said: no such key, the text "", or null
    that reaches the template as none (`render_chat(..., nulls=True)`). beside: what is shown of a message that has
    both a content and calls; what is not shown is lost without a word.
    """

    arguments: Literal["object", "text"] = "object"
    content: Literal["missing", "empty", "null"] = "missing"
    beside: Literal["both", "calls", "content"] = "both"


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How one chat template writes calls and reasoning. None means it writes none, or that it is not known how.

    before_said: a text that comes before what is said, and is no part of it, such as the header of a channel. silent:
    further texts that are part of nothing wherever they stand outside of reasoning and calls, such as the end of a
    channel. prompted: the end of a prompt for an answer that belongs to the answer: what the model writes is read as
    if it stood behind this text, and a text that it is asked for (a call, `before_said`, the beginning of reasoning)
    is asked for without it where it is the first of the answer.
    shows: the template shows tools to the model. source: "derived", or the name of the record that was taken.
    switch: the template's variable that turns thinking on and off (True, False), if there is one. effort: the template
    reads `reasoning_effort`.
    history: the form of messages in which the template writes calls.
    """

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    before_said: str = ""
    shows: bool = True
    source: str = "derived"
    silent: tuple[str, ...] = ()
    prompted: str = ""
    switch: str | None = None
    effort: bool = False
    history: History = field(default_factory=History)

    @property
    def nine(self) -> bool:
        """Whether ids of calls must have nine letters."""
        return self.tools is not None and self.tools.id == "nine letters"


PLAIN = ChatFormat()
HERMES = ToolFormat(
    call=('<tool_call>\n{"name": "', Slot.NAME, '", "arguments": ', Slot.ARGUMENTS, "}\n</tool_call>"),
    marker="<tool_call>",
    between="\n",
)
"""The form of Hermes, Qwen 2.5 and many more, and the generic one."""
THINK = ReasoningFormat("<think>", "</think>")


class Thinking(Enum):
    """Whether an answer begins with reasoning."""

    NONE = "none"  # no reasoning comes
    MAY = "may"  # if it begins with the marker
    OPEN = "open"  # in it: the prompt has opened it


def thinking_of(reasoning: ReasoningFormat | None, prompt: str) -> Thinking:
    """Where the answer to a rendered prompt begins."""
    if reasoning is None:
        return Thinking.NONE
    said = prompt.rstrip()
    if said.endswith(reasoning.end.strip()):
        return Thinking.NONE
    return Thinking.OPEN if said.endswith(reasoning.begin.strip()) else Thinking.MAY


# ---- what a text holds -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reasoned:
    """A piece of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Said:
    """A piece of what is said to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call begins. number: 0, 1, ... id: if the text has one."""

    number: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments of call `number`, as JSON text; all pieces together are one object."""

    number: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """complete: False means the answer ended within the call, and its arguments are no whole object."""

    number: int
    complete: bool = True


Event: TypeAlias = Reasoned | Said | CallBegun | CallArguments | CallEnded
