// Questions before an action: by JupyterLab's dialogs, or, in displays of any page, by the browser's own.

import { h } from "./dom";
import { say } from "./language";

export interface Dialogs {
  /** Asks for confirmation of a loss. */
  agree(title: string, lost: string, label: string): Promise<boolean>;
  /** Asks for a line; null if cancelled. */
  type(title: string, proposed: string, example: string): Promise<string | null>;
  /** Shows a form; resolves with whether it was confirmed. */
  fill(title: string, form: HTMLElement, label: string): Promise<boolean>;
}

/** Dialogs within `root`, which has the style. No form is submitted: pages in a sandbox may not. */
export function plainDialogs(root: HTMLElement): Dialogs {
  return {
    agree: (title, lost, label) => ask(root, title, h("div", { text: lost }), label, true),
    async type(title, proposed, example) {
      const input = h("input", { class: "mnb-query", "aria-label": title, spellcheck: "false" });
      input.value = proposed;
      const agreed = await ask(root, title, h("div", {}, input, h("div", { class: "mnb-dim", text: example })), say`Ok`);
      return (agreed && input.value.trim()) || null;
    },
    fill: (title, form, label) => ask(root, title, form, label),
  };
}

function ask(root: HTMLElement, title: string, body: HTMLElement, label: string, warns = false): Promise<boolean> {
  const before = document.activeElement as HTMLElement | null;
  const button = (text: string, kind: string, agreed: boolean): HTMLButtonElement => h("button", { class: `mnb-b ${kind}`, type: "button", text, onclick: () => end(agreed) });
  const cancel = button(say`Cancel`, "", false);
  const buttons = h("div", { class: "mnb-buttons" }, cancel, button(label, warns ? "mnb-main" : "mnb-agree", true));
  const dialog = h("dialog", { class: "mnb-dialog", "aria-label": title }, h("b", { text: title }), body, buttons);
  let agrees = false;
  const end = (agreed: boolean): void => {
    agrees = agreed;
    dialog.close();
  };
  dialog.addEventListener("keydown", (event) => {
    event.stopPropagation(); // else the notebook takes letters for commands
    if (event.key === "Enter" && event.target instanceof HTMLInputElement) end(true);
  });
  root.append(dialog);
  dialog.showModal();
  (warns ? cancel : (body.querySelector<HTMLElement>("input, select, textarea") ?? cancel)).focus();
  return new Promise((resolve) =>
    dialog.addEventListener("close", () => {
      dialog.remove();
      before?.focus();
      resolve(agrees);
    }),
  );
}
