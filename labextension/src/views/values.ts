// The values of a tensor, on request: its first elements, and statistics by rank.

import type { Cluster } from "../cluster/client";
import type { TensorValues } from "../cluster/messages";
import { askButton, messageLine } from "../page/buttons";
import { h, setText, tableHead } from "../page/dom";
import { say } from "../page/language";

import "./values.css";

const showValues = (): string => say`show values`;

export class ValuesOf {
  constructor(
    private _cluster: Cluster,
    root: HTMLElement,
    name: string,
    of: [tensors: string, number: number],
  ) {
    this._name = name === "Tensor" ? "t" : name; // the name in a program
    const { message, report } = messageLine();
    const ask = async (): Promise<void> => this._show(await this._cluster.request("values", { tensors: of[0], number: of[1] }));
    const title = say`the first elements, and the least, the largest and the mean of each rank; no cell need run for that`;
    this._button = askButton(showValues(), ask, (text, wrong) => this._report(report, text, wrong), { title });
    this._hide = h("button", { class: "mnb-b", type: "button", text: say`hide`, onclick: () => this._clear() });
    this._hint.append(say`its values: `, h("code", { text: `${this._name}.full_tensor()` }), say`, by rank: `, h("code", { text: `${this._name}.local_shards()` }));
    root.append(h("div", { class: "mnb-values" }, h("div", { class: "mnb-tools" }, this._button, this._hide, this._hint), message, this._found));
    this.draw();
  }

  /** Without a kernel the form in the cell stays. */
  draw(): void {
    this._button.hidden = !this._cluster.live;
    this._hide.hidden = !this._found.childElementCount;
  }

  private _report(report: (text: string, wrong?: boolean) => void, text: string, wrong?: boolean): void {
    if (wrong) this._clear(); // the former values are outdated
    report(text, wrong);
  }

  private _show({ corner, index, columns, rows, notes }: TensorValues): void {
    const ranks = rows.map((row) => h("tr", {}, ...row.map((text) => h("td", { text, class: ODD.test(text) ? "mnb-odd" : null }))));
    const counted = (row: HTMLElement): HTMLElement => {
      for (const cell of [...row.children].slice(columns.indexOf("NaN"))) cell.classList.toggle("mnb-odd", cell.textContent !== "0");
      return row;
    };
    this._found.replaceChildren(
      ...(corner.length ? [h("div", { class: "mnb-dim", text: index ? say`${this._name}${index}, the first of its elements` : say`all elements` })] : []),
      h("div", { class: "mnb-scroll" }, h("table", { class: "mnb-corner", "aria-label": say`elements` }, h("tbody", {}, ...corner.map((row) => h("tr", {}, ...row.map((text) => h("td", { text, class: ODD.test(text) ? "mnb-odd" : null }))))))),
      ...notes.map((text) => h("div", { class: "mnb-note", text })),
      ...(rows.length ? [h("div", { class: "mnb-scroll" }, h("table", { class: "mnb-list", "aria-label": say`values by rank` }, tableHead(columns), h("tbody", {}, ...ranks.map(counted))))] : []),
    );
    setText(this._button, say`show again`);
    this.draw();
  }

  private _clear(): void {
    this._found.replaceChildren();
    setText(this._button, showValues());
    this.draw();
  }

  private _button: HTMLButtonElement;
  private _found = h("div", { class: "mnb-found" });
  private _hide: HTMLButtonElement;
  private _hint = h("span", { class: "mnb-dim" });
  private _name: string;
}

const ODD = /nan|inf/; // numbers that are mostly unwanted
