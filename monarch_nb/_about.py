"""Where the project is at home. Texts that lead to a page lead there: who has installed a wheel has no other copy."""

HOMEPAGE = "https://github.com/monarch-nb/monarch-nb"


def page(name: str) -> str:
    """The address of a page of docs/, such as `manual/hosts.md`."""
    return f"{HOMEPAGE}/blob/main/docs/{name}"
