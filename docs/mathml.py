"""Markdown extension: formulas become MathML while the site is built; a page needs no script and no network.

`pymdownx.arithmatex` finds the formulas, this turns them into MathML. An unreadable formula stops the build.
"""

from html import unescape
from xml.etree.ElementTree import Element

from markdown import Extension, Markdown
from markdown.treeprocessors import Treeprocessor
from math_core import LatexToMathML

to_mathml = LatexToMathML().convert_with_local_state


class MathProcessor(Treeprocessor):
    """Replace the text of each formula, still between its delimiters, by MathML."""

    def run(self, root: Element) -> None:
        for element in root.iter():
            if element.get("class") == "arithmatex":
                source = unescape(element.text or "")
                formula = to_mathml(source[2:-2].strip(), displaystyle=source.startswith(r"\["))
                element.text = self.md.htmlStash.store(formula)


class MathExtension(Extension):
    """Run after the inline patterns, which have priority 20."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.treeprocessors.register(MathProcessor(md), "mathml", 10)


def makeExtension(**kwargs: object) -> MathExtension:
    return MathExtension(**kwargs)
