"""Forms of several ranks side by side, each under its ranks, as one piece of HTML."""

import base64
from collections.abc import Mapping, Sequence
from html import escape

# The user's HTML keeps the front end's own style: nothing of ours but the frame around it.
_STYLE = """
.mnb-row{display:flex;flex-wrap:wrap;gap:8px 24px;margin:2px 0 4px;align-items:start;max-width:100%}
.mnb-row.mnb-images{display:grid;gap:8px 16px;justify-items:start}
.mnb-row>figure{margin:0;max-width:100%;min-width:0;overflow-x:auto}
.mnb-row>figure>figcaption{font-family:var(--jp-code-font-family,ui-monospace,monospace);font-size:12px;opacity:.75;
margin:0 0 2px;color:var(--jp-ui-font-color1,currentColor)}
.mnb-row>figure>img{max-width:100%;height:auto;display:block}
.mnb-row>figure>pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere}
""".replace("\n", "")
_IMAGES = ("image/png", "image/jpeg", "image/gif")
_SVG = "image/svg+xml"
_PLAIN = "text/plain"
_HTML = "text/html"


def can_stand_beside(data: Mapping[str, object]) -> bool:
    """Returns whether these forms can be embedded in HTML: images, and HTML without scripts."""
    if any(kind.startswith("application/") and kind != "application/pdf" for kind in data):
        return False
    html = data.get(_HTML)
    if html is not None:
        return "<script" not in str(html).lower()
    return any(kind in data for kind in (_SVG, *_IMAGES)) or set(data) <= {_PLAIN}


def part_of(data: Mapping[str, object], metadata: Mapping[str, object], ranks: str) -> str:
    """Returns the richest of these forms as HTML, for these ranks."""
    if _HTML in data:
        return _text(data[_HTML])
    if _SVG in data:
        return _image(_SVG, base64.b64encode(_text(data[_SVG]).encode()).decode("ascii"), metadata, ranks)
    for kind in _IMAGES:
        if kind in data:
            return _image(kind, "".join(_text(data[kind]).split()), metadata, ranks)
    return f"<pre>{escape(_text(data.get(_PLAIN, '')))}</pre>"


def side_by_side(parts: Sequence[tuple[str, str]], *, indented: bool = False) -> str:
    """Captions, and HTML below each; images in one or two columns where there are few, in at most four.

    `indented` as text among which it stands.
    """
    columns = next(count for most, count in ((1, 1), (4, 2), (9, 3), (len(parts), 4)) if len(parts) <= most)
    least = f"min(100%, max(240px, calc(100% / {columns} - 16px)))"
    figures = "".join(f"<figure><figcaption>{escape(caption)}</figcaption>{part}</figure>" for caption, part in parts)
    images = any(part.startswith("<img") for _, part in parts)
    style = f"grid-template-columns:repeat(auto-fill,minmax({least},1fr));" if images else ""
    style += "padding-left:var(--jp-code-padding,0)" if indented else ""
    return (
        f'<style>{_STYLE}</style><div class="mnb-row{" mnb-images" if images else ""}" style="{style}">{figures}</div>'
    )


def _image(kind: str, text: str, metadata: Mapping[str, object], ranks: str) -> str:
    about = metadata.get(kind)
    sizes = about if isinstance(about, dict) else {}
    attributes = "".join(
        f' {name}="{int(sizes[name])}"' for name in ("width", "height") if isinstance(sizes.get(name), int | float)
    )
    return f'<img src="data:{kind};base64,{escape(text)}" alt="figure of {escape(ranks)}"{attributes}>'


def _text(form: object) -> str:
    return "".join(map(str, form)) if isinstance(form, list | tuple) else str(form)
