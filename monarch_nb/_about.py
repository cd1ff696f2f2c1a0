"""The version, and where the project is at home, in a place that any layer may read and that imports nothing.

Texts that lead to a page lead to that home: who has installed a wheel has no other copy.
"""

__version__ = "0.1.0"
HOMEPAGE = "https://github.com/monarch-nb/monarch-nb"


def page(name: str) -> str:
    """The address of a page of docs/, or of a heading there: `manual/hosts.md#who-is-trusted`.

    A test holds all that the code leads to against the pages and headings that there are.
    """
    return f"{HOMEPAGE}/blob/main/docs/{name}"


def more(name: str) -> str:
    """A last line for the text of an error: where the page is that explains it."""
    return f"\nMore: {page(name)}"
