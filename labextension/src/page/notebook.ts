// Requests to the surrounding page; JupyterLab and Notebook 7 take commands from elements that name them.

import { say } from "./language";
import { h } from "./dom";

/** The cell that an element is in, where a click can run it. */
export function cellOf(element: Element): Element | null {
  return element.closest(".jp-CodeCell");
}

/** Reruns the cell of an element. Throws if the front end cannot. */
export function runAgain(element: HTMLElement): void {
  const cell = cellOf(element);
  // The command runs the active cell: it must be this one, also if another was clicked on meanwhile.
  element.dispatchEvent(new MouseEvent("mousedown", { bubbles: true }));
  if (!cell?.classList.contains("jp-mod-active")) throw new Error(say`run the cell again yourself: this front end cannot`);
  const link = h("button", { hidden: true, "data-commandlinker-command": "notebook:run-cell", "data-commandlinker-args": "{}" });
  element.after(link); // within the output, which is trusted if the notebook is
  link.click();
  link.remove();
}

/** The name of the event by which displays ask the panel of their page. Outputs that are not trusted run no script that could. */
export const ASKED = "monarch-nb-asked";

/** A command of the panel. */
export interface Asked {
  command: string;
  args: object;
}

/** Sends a command to JupyterLab's panel of this notebook; returns whether there is one. */
export function askPanel(element: HTMLElement, command: string, args: object): boolean {
  const detail: Asked = { command: `monarch-nb:${command}`, args };
  return !element.dispatchEvent(new CustomEvent(ASKED, { bubbles: true, cancelable: true, composed: true, detail }));
}
