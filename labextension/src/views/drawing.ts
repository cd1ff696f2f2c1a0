// A drawing of a placement: boxes for pointing, selection and navigation by keys.

import type { DrawingData, Piece } from "../cluster/messages";
import { svg } from "../page/dom";

export interface DrawingEvents {
  /** The pointer or the focus is at a box; null after it has left. */
  hover(piece: Piece | null): void;
  pick(piece: Piece, more: boolean): void;
  clear(): void;
}

const HATCH = 8; // px between lines over parts that are not reduced yet
const SHEET = 6; // visible px of a sheet behind
const MOVES: Readonly<Record<string, [x: number, y: number]>> = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

/** The box next to one in a direction: the nearest in that direction, preferring straight ahead. */
export function nextTo(pieces: readonly Piece[], from: number, [right, down]: [x: number, y: number]): number {
  const origin = pieces[from];
  if (!origin) return from;
  let [best, least] = [from, Infinity];
  for (const [index, piece] of pieces.entries()) {
    const [x, y] = [piece.x + piece.w / 2 - origin.x - origin.w / 2, piece.y + piece.h / 2 - origin.y - origin.h / 2];
    const ahead = x * right + y * down;
    const aside = Math.abs(x * down) + Math.abs(y * right);
    if (index !== from && ahead > 0.5 && ahead + 3 * aside < least) [best, least] = [index, ahead + 3 * aside];
  }
  return best;
}

/** Lines from the lower left to the upper right of a box. */
function hatched({ x, y, w, h }: Piece): string {
  let path = "";
  for (let offset = HATCH / 2; offset < w + h; offset += HATCH) {
    const [x1, y1] = offset <= h ? [x, y + offset] : [x + offset - h, y + h];
    const [x2, y2] = offset <= w ? [x + offset, y] : [x + w, y + offset - w];
    path += `M${x1} ${y1}L${x2} ${y2}`;
  }
  return path;
}

export class Drawing {
  readonly element: SVGElement;

  constructor(
    private _data: DrawingData,
    label: string,
    private _events: DrawingEvents,
  ) {
    const { width, height, sheets, sides, labels, pieces } = _data;
    this.element = svg("svg", { class: "mnb-drawing", width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": label });
    for (const [x, y, w, h] of sheets) this.element.append(svg("path", { class: "mnb-sheet", d: `M${x} ${y + SHEET}v-${SHEET}h${w}v${h}h-${SHEET}` }));
    for (const { points, fill, blocks } of sides) {
      const side = svg("path", { class: "mnb-shard", fill, d: `M${points.map(([x, y]) => `${x} ${y}`).join("L")}z` });
      this._note(side, blocks);
      this.element.append(side);
    }
    for (const [index, piece] of pieces.entries()) this.element.append(this._box(piece, index));
    for (const { x, y, text, anchor, small } of labels) this.element.append(svg("text", { x, y, text, class: small ? "mnb-small" : null, "text-anchor": anchor }));
    this._listen();
  }

  /** Highlights these blocks or ranks, and dims the rest; dims nothing without any. */
  light(blocks: ReadonlySet<number>, ranks: ReadonlySet<number>): void {
    this.element.classList.toggle("mnb-dimmed", blocks.size + ranks.size > 0);
    for (const [element, ownBlocks] of this._blocks) {
      const of = this._ranks.get(element);
      const lit = of && ranks.size ? of.some((rank) => ranks.has(rank)) : ownBlocks.some((block) => blocks.has(block));
      element.classList.toggle("mnb-lit", lit);
    }
  }

  /** Marks the boxes of unhealthy ranks; `sign` returns "" for healthy ones. */
  mark(sign: (rank: number) => string): void {
    for (const [index, piece] of this._data.pieces.entries()) {
      const worst = (piece.ranks ?? []).map(sign).find(Boolean) ?? "";
      const box = this._boxes[index];
      if (!box || (box.dataset.sign ?? "") === worst) continue;
      box.dataset.sign = worst;
      (box.querySelector("text") as Element).textContent = worst || (piece.text ?? "");
    }
  }

  select(isChosen: (piece: Piece) => boolean): void {
    for (const [index, piece] of this._data.pieces.entries()) this._boxes[index]?.setAttribute("aria-pressed", String(isChosen(piece)));
  }

  private _note(element: SVGElement, blocks: number[], ranks?: number[]): void {
    this._blocks.set(element, blocks);
    if (ranks) this._ranks.set(element, ranks);
  }

  private _box(piece: Piece, number: number): SVGElement {
    const { x, y, w, h, fill, ink, text = "", blocks = [], ranks, description = "" } = piece;
    const round = Math.min(w, h) > 10 ? 3 : Math.min(w, h) > 4 ? 1 : 0;
    const box = svg(
      "g",
      { class: `mnb-shard${blocks.length ? "" : " mnb-none"}`, role: "button", "aria-label": description, "aria-pressed": "false", tabindex: number ? -1 : 0, "data-at": number },
      svg("rect", { x, y, width: w, height: h, rx: round, fill }),
      piece.hatched ? svg("path", { class: "mnb-hatch", d: hatched(piece) }) : null,
      svg("text", { x: x + w / 2, y: y + h / 2 + 0.5, text, style: ink ? `fill:${ink}` : null }),
    );
    this._boxes[number] = box;
    this._note(box, blocks, ranks);
    return box;
  }

  private _listen(): void {
    const { element, _events: events } = this;
    const indexOf = (event: Event): number => Number((event.target as Element).closest<SVGElement>("[data-at]")?.dataset.at ?? -1);
    const piece = (event: Event): Piece | null => this._data.pieces[indexOf(event)] ?? this._sideOf(event.target as SVGElement);
    element.addEventListener("pointermove", (event) => events.hover(piece(event)));
    element.addEventListener("pointerleave", () => events.hover(null));
    element.addEventListener("focusin", (event) => (event.target as Element).matches(":focus-visible") && events.hover(piece(event)));
    element.addEventListener("focusout", () => events.hover(null));
    element.addEventListener("click", (event) => {
      const clicked = piece(event);
      if (!clicked) return events.clear();
      if (indexOf(event) >= 0) this._focus(indexOf(event), false);
      events.pick(clicked, event.shiftKey || event.ctrlKey || event.metaKey);
    });
    element.addEventListener("keydown", (event) => this._key(event));
  }

  /** The block whose side this element is. */
  private _sideOf(element: SVGElement): Piece | null {
    const blocks = this._blocks.get(element);
    return this._data.pieces.find((piece) => piece.blocks?.some((block) => blocks?.includes(block))) ?? null;
  }

  private _key(event: KeyboardEvent): void {
    const { pieces } = this._data;
    const move = MOVES[event.key];
    if (move) this._focus(nextTo(pieces, this._focused, move), true);
    else if (event.key === "Home" || event.key === "End") this._focus(event.key === "Home" ? 0 : pieces.length - 1, true);
    else if (event.key === "Enter" || event.key === " ") this._events.pick(pieces[this._focused] as Piece, event.shiftKey);
    else if (event.key === "Escape") this._events.clear();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  private _focus(number: number, move: boolean): void {
    this._boxes[this._focused]?.setAttribute("tabindex", "-1");
    this._focused = number;
    const box = this._boxes[number];
    box?.setAttribute("tabindex", "0");
    if (move) box?.focus();
  }

  private _blocks = new Map<SVGElement, number[]>();
  private _boxes: SVGElement[] = [];
  private _focused = 0;
  private _ranks = new Map<SVGElement, number[]>(); // of the mesh's boxes
}
