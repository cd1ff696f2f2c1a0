// The placement of a tensor: its shards beside the mesh. Pointing and selection in one highlight both.

import type { Piece, PlacementData } from "../cluster/messages";
import { copyButton } from "../page/buttons";
import { h, setText, setFacts } from "../page/dom";
import { say } from "../page/language";
import { Drawing } from "./drawing";

import "./placement.css";

const hint = (): string => say`point at a shard to see its ranks, or at a rank to see its shard; click to keep the highlight`;
const NONE: ReadonlySet<number> = new Set();

/** The highlighted blocks of the tensor, and ranks of the mesh if single ones are chosen. */
interface Lit {
  blocks: Set<number>;
  ranks: Set<number>;
  description: string;
}

export class PlacementPicture {
  readonly element: HTMLElement;

  constructor(private _data: PlacementData) {
    const events = {
      hover: (piece: Piece | null): void => this._hover(piece),
      pick: (piece: Piece, more: boolean): void => this._pick(piece, more),
      clear: (): void => this._pin(null),
    };
    const does = _data.rows.map(([dimension, , effect]) => `${dimension} ${effect}`).join("; ");
    this._tensor = new Drawing(_data.tensor, `${_data.title}: ${does}`, events);
    this._mesh = new Drawing(_data.mesh, say`the mesh ${_data.mesh_text}`, events);
    const table = h("div", { class: "mnb-facts mnb-does" });
    setFacts(table, _data.rows.map(([dimension, placement, effect]) => [dimension, `${placement}   ${effect}`] as const));
    this.element = h(
      "div",
      { class: "mnb-placement" },
      h("div", { class: "mnb-top" }, h("span", {}, h("b", { text: _data.name }), h("span", { class: "mnb-dim", text: say` · ${_data.title} · on ${_data.mesh_text} · ${_data.bytes}` }))),
      h("div", { class: "mnb-pictures" }, this._tensor.element, this._mesh.element),
      h("div", { class: "mnb-slice mnb-description" }, this._description, this._copy),
      table,
    );
    this._show();
  }

  /** Marks ranks of the mesh; `sign` returns "" for healthy ones. */
  mark(sign: (rank: number) => string): void {
    this._mesh.mark(sign);
  }

  private _litBy(piece: Piece): Lit {
    const [block] = piece.blocks ?? [];
    const shard = block === undefined ? "" : (this._data.blocks[block] ?? "");
    const single = piece.blocks?.length === 1;
    const description = piece.ranks ? [piece.description ?? "", single ? shard : ""].filter(Boolean).join(" · holds ") : (piece.description ?? "");
    return { blocks: new Set(piece.blocks), ranks: new Set(piece.ranks), description };
  }

  private _hover(piece: Piece | null): void {
    this._hovered = piece && this._litBy(piece);
    if (this._hovered) this._hovered.ranks = new Set(); // highlights all ranks with the same blocks
    this._show();
  }

  private _pick(piece: Piece, more: boolean): void {
    const lit = this._litBy(piece);
    const pinned = this._pinned;
    if (pinned && !more && pinned.description === lit.description) return this._pin(null);
    if (pinned && more) {
      for (const block of lit.blocks) pinned.blocks.add(block);
      for (const rank of lit.ranks) pinned.ranks.add(rank);
      pinned.description = `${pinned.blocks.size} shards`;
      return this._pin(pinned);
    }
    this._pin(lit);
  }

  private _pin(lit: Lit | null): void {
    this._pinned = lit;
    const has = (ranks: number[] | undefined, among: ReadonlySet<number>): boolean => Boolean(ranks?.some((rank) => among.has(rank)));
    this._tensor.select((piece) => has(piece.blocks, lit?.blocks ?? NONE));
    this._mesh.select((piece) => has(piece.ranks, lit?.ranks ?? NONE) || (!lit?.ranks.size && has(piece.blocks, lit?.blocks ?? NONE)));
    this._show();
  }

  private _show(): void {
    const lit = this._hovered ?? this._pinned;
    for (const drawing of [this._tensor, this._mesh]) drawing.light(lit?.blocks ?? NONE, NONE);
    setText(this._description, lit?.description || hint());
    this._description.classList.toggle("mnb-dim", !lit);
    this._copy.hidden = !this._pinned || this._pinned.blocks.size !== 1;
  }

  /** The selected shard as an index into the tensor. */
  private _index(): string {
    const [block] = this._pinned?.blocks ?? [];
    return block === undefined ? "" : (this._data.blocks[block] ?? "").split(" · ")[0] ?? "";
  }

  private _copy = copyButton(say`copy index`, () => this._index());
  private _hovered: Lit | null = null;
  private _pinned: Lit | null = null;
  private _mesh: Drawing;
  private _description = h("span", { role: "status" });
  private _tensor: Drawing;
}
