"""XML as elements that remember their line: what the readers of NCCL's files share.

It knows XML and how a fault is told, nothing of topologies or graphs. Document types are refused,
since entities are how small XML files grow without bound and NCCL writes none.
"""

import math
from xml.parsers import expat

from meshwright.errors import InputError, Problem
from meshwright.spec.serialization import format_value

_DEEPEST = 64


class XmlElement:
    """One XML element with the line it began on."""

    def __init__(self, tag: str, attributes: dict[str, str], line: int) -> None:
        self.tag = tag
        self.attributes = attributes
        self.line = line
        self.children: list[XmlElement] = []

    def find_all(self, *tags: str) -> list["XmlElement"]:
        """Return the children with one of these tags."""
        return [child for child in self.children if child.tag in tags]

    def get(self, name: str) -> str:
        """Return an attribute; empty where it is missing."""
        return self.attributes.get(name, "")


class XmlProblems:
    """Collects what is wrong with the elements of one file, each with its line."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.problems: list[Problem] = []

    def add(self, element: XmlElement, what: str, fix: str) -> None:
        """List a fault of an element."""
        self.problems.append(Problem(f"{self.where}: line {element.line}", what, fix))

    def number(self, element: XmlElement, name: str, default: float) -> float:
        """Return an attribute as a number; `default` where it is missing or faulty."""
        text = element.get(name).strip()
        if not text:
            return default
        try:
            number = float(int(text, 16)) if text.lower().startswith("0x") else float(text)
        except (ValueError, OverflowError):
            number = math.nan
        # The bound keeps a damaged digit from becoming an endless bandwidth.
        if not 0 <= number <= 1e12:
            what = f"{name} {format_value(text)} of <{element.tag}> is not a usable number"
            self.add(element, what, f'write a number from 0 to 1e12, such as {name}="1"')
            return default
        return number

    def raise_problems(self) -> None:
        """Raise every fault found, or nothing where there is none."""
        if self.problems:
            raise InputError(self.problems)


def read_xml(text: str, where: str, again: str) -> XmlElement:
    """Return the outermost element; `again` says how the file is made, for one that is broken."""
    parser = expat.ParserCreate()
    top = XmlElement("", {}, 0)
    stack = [top]

    def refuse(what: str, fix: str) -> InputError:
        return InputError([Problem(f"{where}: line {parser.CurrentLineNumber}", what, fix)])

    def start(tag: str, attributes: dict[str, str]) -> None:
        if len(stack) > _DEEPEST:
            raise refuse("the elements are nested too deeply", again)
        element = XmlElement(tag, attributes, parser.CurrentLineNumber)
        stack[-1].children.append(element)
        stack.append(element)

    def end(_tag: str) -> None:
        stack.pop()

    def doctype(*_declaration: object) -> None:
        raise refuse("a document type is not accepted", "leave out the <!DOCTYPE> part")

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.StartDoctypeDeclHandler = doctype
    try:
        parser.Parse(text, True)
    except (expat.ExpatError, UnicodeEncodeError) as error:
        raise refuse(f"is not whole XML: {error}", again) from None
    return top.children[0]
