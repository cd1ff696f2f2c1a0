// The tip of the cell under the pointer.

import { h } from "../page/dom";

/** A box of lines below its subject, within `frame`. */
export class Tip {
  readonly element = h("div", { class: "mnb-tip", role: "tooltip", hidden: true });

  constructor(private _frame: HTMLElement) {}

  show(lines: readonly HTMLElement[], box: DOMRect): void {
    const { element } = this;
    element.hidden = false;
    element.replaceChildren(...lines);
    const frame = this._frame.getBoundingClientRect();
    element.style.left = `${Math.max(0, Math.min(box.left - frame.left, frame.width - element.offsetWidth - 4))}px`;
    element.style.top = `${box.bottom - frame.top + 5}px`;
  }

  hide(): void {
    this.element.hidden = true;
  }
}
