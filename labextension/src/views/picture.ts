// A picture of a timeline on the page. It is replaced row by row, some rows in each frame, and only those that differ.

import { svg } from "../page/dom";
import { eachFrame } from "../page/frames";

const ROW = '<g class="r">'; // as written by the kernel; names in the picture are escaped
const BAR = 'class="b"';
const END = "</svg>";
const PIECE = 40; // bars that a frame replaces: the browser styles, lays out and paints them in the same frame

/** A picture in the form for drawing: the part before its rows, such as the axis, and the rows. */
export interface PictureParts {
  head: string;
  rows: string[];
}

export function partsOf(picture: string): PictureParts {
  const [head = "", ...rows] = picture.slice(0, picture.endsWith(END) ? -END.length : undefined).split(ROW);
  return { head, rows: rows.map((row) => ROW + row) };
}

/** The number of rows replaced at once, from a first one on: at least one, and no more than `most` bars. */
export function pieceOf(rows: readonly string[], from: number, most = PIECE): number {
  let bars = 0;
  let to = from;
  for (; to < rows.length; to++) {
    bars += (rows[to] as string).split(BAR).length - 1;
    if (bars > most && to > from) break;
  }
  return to - from;
}

export class Picture {
  /** `drawn` is called after each piece. */
  constructor(
    private _element: HTMLElement,
    private _drawn: () => void,
  ) {}

  show(picture: string): void {
    const { head, rows } = partsOf(picture);
    if (head !== this._head) this._drawHead(head);
    this._head = head;
    while (this._rows.length > rows.length) this._rows.pop()?.node.remove();
    this._wanted = rows;
    this._draw();
  }

  end(): void {
    this._frames.cancel();
  }

  /** Replaces the next rows that differ. */
  private _draw(): void {
    const differ = [...this._wanted.keys()].filter((row) => this._wanted[row] !== this._rows[row]?.text);
    const texts = differ.map((row) => this._wanted[row] as string);
    const piece = pieceOf(texts, 0);
    for (const [nth, text] of texts.slice(0, piece).entries()) this._row(differ[nth] as number).innerHTML = text;
    if (piece < texts.length) this._frames.soon();
    this._drawn();
  }

  /** The element of a row, whose text is the wanted one from now on. */
  private _row(number: number): SVGElement {
    const row = this._rows[number] ?? { node: svg("g"), text: "" };
    row.text = this._wanted[number] as string;
    if (this._rows[number]) return row.node;
    this._rows[number] = row;
    this._svg?.append(row.node);
    return row.node;
  }

  /** The style sheet in the drawing stays: another one would make the browser recompute the style of the whole page. */
  private _drawHead(head: string): void {
    const holder = document.createElement("div");
    holder.innerHTML = head + END;
    const drawing = holder.querySelector("svg");
    if (!drawing) return;
    if (this._svg) {
      for (const { name, value } of drawing.attributes) if (name !== "class") this._svg.setAttribute(name, value);
      drawing.querySelector("style")?.remove();
    } else {
      this._svg = drawing.cloneNode() as SVGElement;
      this._svg.append(...drawing.querySelectorAll("style"), this._axis);
      this._element.replaceChildren(this._svg);
    }
    this._axis.replaceChildren(...drawing.childNodes);
  }

  private _axis = svg("g");
  private _frames = eachFrame(() => this._draw());
  private _head = "";
  private _rows: { node: SVGElement; text: string }[] = [];
  private _svg: SVGElement | null = null;
  private _wanted: string[] = [];
}
